"""The document data set: whole documents of a `.bin/.idx`, as samples for Megatron's samplers.

Shapes: S = --seq-length, B = micro batch, T = tokens of a microbatch without padding. A sample is a
dict of tensors [S]. `position_ids` carries the boundaries: position 0 opens a sequence, -1 is
padding. Every piece of a cut document begins at position 0 again, since attention does not join
them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TypeAlias, cast

import numpy as np
import torch
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.utils import Split
from torch import Tensor
from torch.utils.data import Dataset

from megatron_balance.errors import ConfigError, DataError
from megatron_balance.megatron.corpora import DataArguments, data_reasons, no_documents, open_corpus, sources
from megatron_balance.training.sequences import Sequences, to_bits
from megatron_balance.workloads.documents import (
    DEFAULT_FILLING,
    Blend,
    Corpus,
    CutPolicy,
    DocumentPiece,
    DocumentStream,
    Filling,
    shares,
    split_documents,
)

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


DatasetTriple: TypeAlias = "tuple[Documents | None, Documents | None, Documents | None]"


@dataclass(frozen=True, slots=True)
class DataOptions:
    """Options of the way from documents to samples."""

    seq_length: int
    seed: int
    policy: CutPolicy = "split"
    filling: Filling = DEFAULT_FILLING
    vocab_size: int | None = None
    """Ids from here on cannot be embedded; None: not checked."""
    mmap: bool = True


class DocumentDataset(Dataset[dict[str, Tensor]]):
    """Samples 0 to num_samples - 1 of a stream of whole documents.

    Megatron's sampler asks for them in any order, on any rank.
    """

    def __init__(
        self,
        corpus: Corpus,
        documents: range,
        num_samples: int,
        options: DataOptions,
        split: Split = Split.train,
    ) -> None:
        """Open the tokens and number the documents.

        Args:
            corpus: opened and checked.
            documents: the part of the corpus this data set draws from.
            num_samples: how many samples Megatron will ask for.
            options: context length, shuffle seed, cutting.
            split: Megatron's samplers read it to tell validation from training.
        """
        self.split = split
        self.options = options
        self.stream = DocumentStream(
            corpus, options.seq_length, options.seed, options.policy, documents, options.filling
        )
        self.num_samples = num_samples
        self._index = corpus.index
        self._tokens = IndexedDataset(corpus.index.prefix, mmap=options.mmap)

    def __len__(self) -> int:
        return self.num_samples

    def sample_lengths(self, index: int) -> tuple[int, ...]:
        """Lengths of the sequences of sample `index`, from the index file alone."""
        return self.stream.lengths_of(index)

    @cached_property
    def _fingerprint(self) -> str:
        digest = hashlib.sha256(self.stream.fingerprint().encode())
        digest.update(self._index.some_tokens().tobytes())
        return digest.hexdigest()[:16]

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

    def _read(self, piece: DocumentPiece) -> np.ndarray:
        """Tokens of a piece, and the one behind it where the document has one."""
        stop = min(piece.stop + 1, self._index.tokens_of(range(piece.document, piece.document + 1)))
        # A document's Megatron sequences lie one behind the other, so reading on from its first one
        # is reading the document.
        read = self._tokens.get(
            int(self._index.first_sequence[piece.document]), offset=piece.start, length=stop - piece.start
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


class DocumentBlend(Dataset[dict[str, Tensor]]):
    """Samples of several corpora in turn, in proportion to weights; each sample is of one corpus."""

    def __init__(self, parts: Sequence[DocumentDataset], weights: Sequence[float] | None, num_samples: int) -> None:
        """Deal samples of `parts`.

        Args:
            parts: the corpora, of one split.
            weights: of each, in samples; None: as many as an epoch of each has.
            num_samples: how many samples Megatron will ask for.

        Raises:
            ConfigError: weights that cannot be.
        """
        self.parts = tuple(parts)
        self.split = parts[0].split
        self.blend = Blend([part.stream.num_samples(0) for part in parts] if weights is None else shares(weights))
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def sample_lengths(self, index: int) -> tuple[int, ...]:
        """Lengths of the sequences of sample `index`."""
        corpus, at = self.blend.locate(index)
        return self.parts[corpus].sample_lengths(at)

    @cached_property
    def _fingerprint(self) -> str:
        each = [part.fingerprint() for part in self.parts]
        return hashlib.sha256(f"{each} {self.blend.counts.tolist()}".encode()).hexdigest()[:16]

    def fingerprint(self) -> str:
        """16 hex digits of all that decides which documents sample i holds."""
        return self._fingerprint

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Sample `index`, as a `DocumentDataset` has it."""
        corpus, at = self.blend.locate(index)
        return self.parts[corpus][at]


Documents: TypeAlias = DocumentDataset | DocumentBlend
"""Samples of whole documents, by number."""


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
    train_val_test_num_samples: Sequence[int],
    vp_stage: int | None = None,  # noqa: ARG001  Megatron passes it to providers; every stage reads the same documents
    *,
    policy: CutPolicy = "split",
    filling: Filling = DEFAULT_FILLING,
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


def make_provider(policy: CutPolicy, filling: Filling = DEFAULT_FILLING) -> Callable[..., DatasetTriple]:
    """`document_datasets_provider` with cut policy and filling of the balance configuration."""
    provider = partial(document_datasets_provider, policy=policy, filling=filling)
    provider.is_distributed = True  # pyright: ignore[reportAttributeAccessIssue]
    return provider


def build_datasets(
    args: DataArguments, num_samples: Sequence[int], policy: CutPolicy, filling: Filling = DEFAULT_FILLING
) -> DatasetTriple:
    """Data sets for Megatron's arguments.

    A split that no samples are asked of, or that holds no document, gives None.

    Raises:
        ConfigError: arguments that cannot work with whole documents.
        DataError: a corpus is damaged or empty.
    """
    reasons = data_reasons(args)
    if reasons:
        raise ConfigError("; ".join((*reasons, "or keep the script's own data set with 'data: script'")))
    options = DataOptions(
        args.seq_length,
        args.seed,
        policy,
        filling,
        vocab_size=getattr(args, "padded_vocab_size", None),
        mmap=getattr(args, "mmap_bin_files", True),
    )
    opened: dict[str, Corpus] = {}
    datasets: list[Documents | None] = []
    for source, wanted, split in zip(sources(args), num_samples, (Split.train, Split.valid, Split.test), strict=True):
        parts: list[DocumentDataset] = []
        weights: list[float] = []
        for at, prefix in enumerate(source.prefixes if wanted != 0 else ()):
            if prefix not in opened:
                opened[prefix] = open_corpus(prefix, args)
            index = opened[prefix].index
            documents = split_documents(index.num_documents, source.split)[source.part]
            if index.tokens_of(documents):
                parts.append(DocumentDataset(opened[prefix], documents, wanted, options, split))
                weights += [] if source.weights is None else [source.weights[at]]
        if wanted != 0 and not parts and split is not Split.test:
            # Megatron would go on without the set and fail at its first step or evaluation, on an
            # iterator that is None.
            raise ConfigError(no_documents(source, split.name))
        alone = parts[0] if len(parts) == 1 else None
        datasets.append(alone or (DocumentBlend(parts, weights or None, wanted) if parts else None))
    train, valid, test = datasets
    return train, valid, test
