"""The document data set: whole documents of a `.bin/.idx`, as samples for Megatron's samplers.

Shapes: S = --seq-length, B = micro batch, T = tokens of a microbatch without padding. A sample is a
dict of tensors [S]. `position_ids` carries the boundaries: position 0 opens a sequence, -1 is
padding. Every piece of a cut document begins at position 0 again, since attention does not join
them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Protocol, cast

import numpy as np
import torch
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.utils import Split
from torch import Tensor
from torch.utils.data import Dataset

from megatron_balance.errors import ConfigError, DataError
from megatron_balance.training.sequences import Sequences, to_bits
from megatron_balance.workloads.documents import CutPolicy, DocumentStream, Filling, Piece, split_documents
from megatron_balance.workloads.idx import CorpusIndex, read_index

PADDING = -1
"""position_ids of tokens that belong to no sequence."""

TOKEN, LABEL, LOSS_MASK = range(3)
"""Columns of the rows that travel with each token.

The loss mask travels as its bits, so any weight arrives exactly.
"""
NUM_COLUMNS = 3
POSITION = 3
"""Behind the three columns, for every token that is predicted further: those of the token so far
ahead, and its position. Zeros where the sequence has none.
"""
PER_DEPTH = 4


def num_columns(depths: int) -> int:
    """Columns of a row, with those of tokens up to `depths` ahead."""
    return NUM_COLUMNS + depths * PER_DEPTH


def column(depth: int, which: int) -> int:
    """The column TOKEN, LABEL, LOSS_MASK or (from depth 1) POSITION of the token `depth` ahead."""
    return which if depth == 0 else NUM_COLUMNS + (depth - 1) * PER_DEPTH + which


DatasetTriple = tuple["DocumentDataset | None", "DocumentDataset | None", "DocumentDataset | None"]


class DataArguments(Protocol):
    """The arguments of Megatron that are read here."""

    data_path: Sequence[str] | None
    split: str | None
    seq_length: int
    seed: int
    dataloader_type: str
    eval_iters: int


@dataclass(frozen=True, slots=True)
class DataOptions:
    """Options of the way from documents to samples."""

    seq_length: int
    seed: int
    policy: CutPolicy = "split"
    filling: Filling = "next_fit"
    vocab_size: int | None = None
    """Ids from here on cannot be embedded; None: not checked."""
    mmap: bool = True


class DocumentDataset(Dataset[dict[str, Tensor]]):
    """Samples 0 to num_samples - 1 of a stream of whole documents.

    Megatron's sampler asks for them in any order, on any rank.
    """

    def __init__(
        self,
        index: CorpusIndex,
        documents: range,
        num_samples: int | None,
        options: DataOptions,
        split: Split = Split.train,
    ) -> None:
        """Open the tokens and number the documents.

        Args:
            index: of a corpus that was checked at opening.
            documents: the part of the corpus this data set draws from.
            num_samples: how many samples Megatron will ask for; None: one epoch.
            options: context length, shuffle seed, cutting.
            split: Megatron's samplers read it to tell validation from training.
        """
        self.split = split
        self.options = options
        self.stream = DocumentStream(
            index.document_lengths, options.seq_length, options.seed, options.policy, documents, options.filling
        )
        self.num_samples = self.stream.num_samples(0) if num_samples is None else num_samples
        self._first_sequence = index.first_sequence
        self._lengths = index.document_lengths
        self._tokens = IndexedDataset(index.prefix, mmap=options.mmap)

    def __len__(self) -> int:
        return self.num_samples

    def sample_lengths(self, index: int) -> tuple[int, ...]:
        """Lengths of the sequences of sample `index`, from the index file alone."""
        return self.stream.lengths_of(index)

    @cached_property
    def _fingerprint(self) -> str:
        return self.stream.fingerprint()

    def fingerprint(self) -> str:
        """16 hex digits of all that decides which documents sample i holds, read once."""
        return self._fingerprint

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Sample `index`: tokens, labels, loss_mask, position_ids, each [S].

        The label of a token is the document's next token, also where the document was cut. Only a
        document's last token has none: its loss_mask is 0.
        """
        size = self.options.seq_length
        tokens, labels = np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.int64)
        loss_mask = np.zeros(size, dtype=np.float32)
        position_ids = np.full(size, PADDING, dtype=np.int64)
        at = 0
        for piece in self.stream.sample(index):
            length = piece.stop - piece.start
            read = self._read(piece)
            num_labels = min(length, len(read) - 1)
            tokens[at : at + length] = read[:length]
            labels[at : at + num_labels] = read[1 : 1 + num_labels]
            loss_mask[at : at + num_labels] = 1
            position_ids[at : at + length] = np.arange(length)
            at += length
        arrays = {"tokens": tokens, "labels": labels, "loss_mask": loss_mask, "position_ids": position_ids}
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def _read(self, piece: Piece) -> np.ndarray:
        """Tokens of a piece, and the one behind it where the document has one."""
        stop = min(piece.stop + 1, int(self._lengths[piece.document]))
        # A document's Megatron sequences lie one behind the other, so reading on from its first one
        # is reading the document.
        read = self._tokens.get(
            int(self._first_sequence[piece.document]), offset=piece.start, length=stop - piece.start
        )
        assert isinstance(read, np.ndarray)  # a multimodal corpus would give its mode as well; read_index refuses one
        limit = self.options.vocab_size
        if limit is not None and (int(read.max()) >= limit or int(read.min()) < 0):
            raise DataError(
                f"{self._tokens.path_prefix}.bin: document {piece.document} has token ids from {read.min()} to "
                f"{read.max()}, "
                f"the model's vocabulary has {limit}; use the tokenizer (or --vocab-size) that the corpus was made with"
            )
        return read


def unpack(microbatch: Mapping[str, Tensor], depths: int = 0, first_sample: int | None = None) -> Sequences:
    """The sequences of a collated microbatch, with columns TOKEN, LABEL and LOSS_MASK.

    Args:
        microbatch: tokens, labels, loss_mask and position_ids, each [B, S].
        depths: how many tokens ahead rows also say (`column`).
        first_sample: number of the first sample, where rows say theirs in a last column; None: they
            do not.

    Raises:
        DataError: the batch does not come from this data set (a sequence that does not open with
            position 0).
    """
    position_ids = microbatch["position_ids"]
    held = position_ids != PADDING
    positions = position_ids[held]
    opens = positions == 0
    if (held[:, 0] & (position_ids[:, 0] != 0)).any():
        raise DataError("a sample does not open with position 0: its batch was not made by the document data set")
    starts = torch.nonzero(opens).flatten().tolist()
    ends = [*starts[1:], len(positions)][: len(starts)]  # a sample may be padding alone
    lengths = tuple(stop - start for start, stop in zip(starts, ends, strict=True))
    columns = [microbatch["tokens"][held], microbatch["labels"][held], to_bits(microbatch["loss_mask"][held])]
    rows = torch.stack(columns, dim=1)
    wide = [rows, *_ahead(rows, positions, depths)]
    if first_sample is not None:
        wide.append(torch.nonzero(held)[:, :1] + first_sample)
    return Sequences(torch.cat(wide, dim=1), lengths)


def _ahead(rows: Tensor, positions: Tensor, depths: int) -> Iterator[Tensor]:
    """By depth from 1: rows [T, 4] of the tokens so far ahead."""
    wide = torch.cat([rows, positions[:, None]], dim=1)
    for depth in range(1, depths + 1):
        ahead = torch.zeros_like(wide)
        ahead[:-depth] = wide[depth:]
        ahead[ahead[:, POSITION] != positions + depth] = 0  # another sequence's, or none
        yield ahead


def document_datasets_provider(
    train_val_test_num_samples: Sequence[int | None],
    vp_stage: int | None = None,  # noqa: ARG001  Megatron passes it to providers; every stage reads the same documents
    *,
    policy: CutPolicy = "split",
    filling: Filling = "next_fit",
) -> DatasetTriple:
    """Megatron's data set provider: train, validation and test sets of whole documents.

    Raises:
        ConfigError: arguments that cannot work with whole documents.
        DataError: the corpus is damaged or empty.
    """
    from megatron.training import get_args

    return build_datasets(cast(DataArguments, get_args()), train_val_test_num_samples, policy, filling)


# Megatron asks every rank, not only tensor-parallel rank 0, if the provider says so.
document_datasets_provider.is_distributed = True  # pyright: ignore[reportFunctionMemberAccess]


def make_provider(policy: CutPolicy, filling: Filling = "next_fit") -> Callable[..., DatasetTriple]:
    """`document_datasets_provider` with cut policy and filling of the balance configuration."""
    provider = partial(document_datasets_provider, policy=policy, filling=filling)
    provider.is_distributed = True  # pyright: ignore[reportAttributeAccessIssue]
    return provider


def build_datasets(
    args: DataArguments, num_samples: Sequence[int | None], policy: CutPolicy, filling: Filling = "next_fit"
) -> DatasetTriple:
    """Data sets for Megatron's arguments.

    A split that no samples are asked of, or that holds no document, gives None.
    """
    prefix = corpus_prefix(args)
    index = read_index(prefix)
    options = DataOptions(
        args.seq_length,
        args.seed,
        policy,
        filling,
        vocab_size=getattr(args, "padded_vocab_size", None),
        mmap=getattr(args, "mmap_bin_files", True),
    )
    parts = split_documents(index.num_documents, parse_split(args.split))
    datasets: list[DocumentDataset | None] = []
    for part, wanted, split in zip(parts, num_samples, (Split.train, Split.valid, Split.test), strict=True):
        filled = bool(index.document_lengths[part.start : part.stop].any())
        if wanted != 0 and not filled and split is not Split.test:
            # Megatron would go on without the set and fail at its first step or evaluation, on an
            # iterator that is None.
            raise ConfigError(
                f"--split {args.split}: leaves no documents of {index.num_documents} in {prefix} for the {split.name} "
                "set; "
                f"give it a larger share{' or set --eval-iters 0' if split is Split.valid else ''}"
            )
        datasets.append(DocumentDataset(index, part, wanted, options, split) if wanted != 0 and filled else None)
    train, valid, test = datasets
    return train, valid, test


def data_reasons(args: DataArguments) -> list[str]:
    """The reasons why whole documents cannot be read under these arguments; empty: they can."""
    reasons: list[str] = []
    for name in ("train_data_path", "valid_data_path", "test_data_path", "data_args_path", "per_split_data_args_path"):
        if getattr(args, name, None):
            reasons.append(
                f"--{name.replace('_', '-')}: whole documents are read from one corpus; give --data-path PREFIX and "
                "--split"
            )
    if args.dataloader_type != "single":
        reasons.append(
            f"--dataloader-type {args.dataloader_type}: samples are shuffled by epoch already, and are read in order; "
            "use single"
        )
    if getattr(args, "phase_transition_iterations", None):
        reasons.append(
            "--phase-transition-iterations: every phase would begin at the first sample again; run the phases as one"
        )
    if getattr(args, "fim_data", False):
        reasons.append("--fim-data rearranges documents, and whole documents are delivered as they are; leave it out")
    path = _without_weight(args.data_path)
    if not path and not reasons:
        reasons.append(
            "--data-path: missing; name a corpus, PREFIX of `megatron-balance corpus build PREFIX` or of "
            "preprocess_data.py"
        )
    elif len(path) > 1:
        reasons.append(
            f"--data-path {' '.join(path)}: {len(path)} values, a blend; whole documents are read from exactly one "
            "PREFIX"
        )
    return reasons


def _without_weight(path: Sequence[str] | None) -> list[str]:
    """--data-path without the weight of a blend of one corpus, as in `1.0 PREFIX`."""
    given = list(path or ())
    return given[1:] if len(given) == 2 and re.fullmatch(r"[0-9]*\.?[0-9]+", given[0]) else given


def corpus_prefix(args: DataArguments) -> str:
    """The one corpus that --data-path names.

    Raises:
        ConfigError: none, several (a blend), or another way of naming data; all reasons at once.
    """
    reasons = data_reasons(args)
    if reasons:
        raise ConfigError("; ".join((*reasons, "or keep the script's own data set with 'data: script'")))
    return _without_weight(args.data_path)[0]


def parse_split(split: str | None) -> tuple[float, float, float]:
    """Weights of train, validation and test from --split ("969, 30, 1"), as Megatron reads it."""
    weights = [float(number) for number in re.findall(r"[.0-9]+", split or "")]
    if not 1 <= len(weights) <= len(Split) or sum(weights) <= 0:
        raise ConfigError(
            f"--split {split}: expected up to three weights for train, validation and test, for example 969,30,1"
        )
    train, valid, test = (*weights, 0.0, 0.0)[:3]
    return train, valid, test
