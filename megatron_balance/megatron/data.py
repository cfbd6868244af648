"""The document data set: whole documents of the corpora that the command line names, as samples for
Megatron's samplers; a script's own batches as columns; and a step's microbatches as this rank reads
them, before they are planned.

Every replica's context-parallel rank 0 reads samples; with pipeline stages on the first and the
last one, each its own copy of the same samples.

Shapes: S = --seq-length, B = micro batch, T = tokens of a microbatch without padding, N = entries of
cu_seqlens. A sample is a dict of tensors [S]. `position_ids` carries the boundaries: position 0 opens
a sequence, or a piece of a cut document, -1 is padding. Packed samples (`--sft`,
`--dataloader-inter-document-masking`) come with cu_seqlens [B, N] int32: a row begins with 0,
rises, and ends with S, which is repeated to fill it, or with -1 behind it, as NeMo and
Megatron-Bridge do, where cu_seqlens_argmin [B, 1] counts the entries in front. Megatron-Bridge's
are named cu_seqlens_q, and may be [N] for a batch of one row. Samples of unequal lengths
(`--use-varlen-dataset`) come as a list of dicts, each one sequence.
"""

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.utils import Split
from torch import Tensor
from torch.utils.data import Dataset

from megatron_balance.errors import BalanceError, ConfigError, DataError
from megatron_balance.ir.forest import Tree, document, tree_of
from megatron_balance.megatron import flags
from megatron_balance.training.ledger import HeldDocument
from megatron_balance.training.plans import Draw, PlannedStep
from megatron_balance.training.pool import Pool, TensorParallel
from megatron_balance.training.tokens import NOTHING, Recalled, Sequences, to_bits
from megatron_balance.workloads import documents
from megatron_balance.workloads.idx import CorpusIndex, prefix_of
from megatron_balance.workloads.rollouts import as_trees

PADDING = -1

# Columns of the rows that travel with each token. The loss mask travels as its bits.
TOKEN, LABEL, LOSS_MASK = range(3)
NUM_COLUMNS = 3
# Behind the three columns, for every token that is predicted further: those of the token so far
# ahead, and its position. Zeros where the sequence has none.
POSITION = 3
PER_DEPTH = 4


def column(depth: int, which: int) -> int:
    """The column TOKEN, LABEL, LOSS_MASK or (from depth 1) POSITION of the token `depth` ahead."""
    return which if depth == 0 else NUM_COLUMNS + (depth - 1) * PER_DEPTH + which


# What a step's loss is where sequences are trees (`--balance-trees`): the mean over what their weights
# count, or the weighted sum itself.
TreeLoss: TypeAlias = Literal["mean", "sum"]

# Samples of a validation set. Megatron asks for fewer than it reads with --start-eval-at-iter, and
# where a resume evaluates more often; its own data sets end later, with an epoch.
ENDLESS = 2**40

DatasetTriple: TypeAlias = "tuple[Documents | None, Documents | None, Documents | None]"


class DocumentDataset(Dataset[dict[str, Tensor]]):
    """Samples 0 to num_samples - 1 of a stream of whole documents, in any order, on any rank."""

    def __init__(
        self,
        index: CorpusIndex,
        stream: documents.DocumentStream,
        num_samples: int,
        split: Split = Split.train,
        *,
        vocab_size: int | None = None,
        mmap: bool = True,
    ) -> None:
        """Open the tokens of the `stream`'s corpus. `split`: Megatron's samplers read it to tell
        validation from training. `vocab_size`: ids from here on are errors; None: not checked.
        """
        self.split, self.stream, self.num_samples = split, stream, num_samples
        self._index, self._vocab_size = index, vocab_size
        self._tokens = IndexedDataset(index.prefix, mmap=mmap)

    def __len__(self) -> int:
        return self.num_samples

    def sample_lengths(self, index: int) -> tuple[int, ...]:
        return self.stream.lengths_of(index)

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits of all that decides which documents sample i holds, read once."""
        digest = hashlib.sha256(self.stream.fingerprint().encode())
        digest.update(self._index.some_tokens().tobytes())
        return digest.hexdigest()[:16]

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """tokens, labels, loss_mask (0 at a document's last token), position_ids [S] of a sample."""
        size = self.stream.seq_length
        tokens, labels = np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.int64)
        loss_mask = np.zeros(size, dtype=np.float32)
        position_ids = np.full(size, PADDING, dtype=np.int64)
        at = 0
        for piece in self.stream.sample(index):
            length = piece.stop - piece.start
            read = self._read(piece)
            # A token's label is the document's next token, also behind a cut: one more is read for
            # it.
            num_labels = min(length, len(read) - 1)
            tokens[at : at + length] = read[:length]
            labels[at : at + num_labels] = read[1 : 1 + num_labels]
            loss_mask[at : at + num_labels] = 1
            # Attention does not join the pieces of a cut document, so every one begins at position
            # 0.
            position_ids[at : at + length] = np.arange(length)
            at += length
        arrays = {"tokens": tokens, "labels": labels, "loss_mask": loss_mask, "position_ids": position_ids}
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def _read(self, piece: documents.DocumentPiece) -> np.ndarray:
        stop = min(piece.stop + 1, self._index.tokens_of(range(piece.document, piece.document + 1)))
        # A document's Megatron sequences lie one behind the other, so reading on from its first one
        # is reading the document.
        read = self._tokens.get(
            int(self._index.first_sequence[piece.document]), offset=piece.start, length=stop - piece.start
        )
        assert isinstance(read, np.ndarray)  # a multimodal corpus would give its mode as well; read_index refuses one
        limit = self._vocab_size
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
        """Deal samples of `parts`, of one split. `weights`: in samples; None: an epoch of each."""
        self.parts = tuple(parts)
        self.split = parts[0].split
        self.blend = documents.Blend(
            [part.stream.num_samples(0) for part in parts] if weights is None else documents.shares(weights)
        )
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def sample_lengths(self, index: int) -> tuple[int, ...]:
        corpus, at = self.blend.locate(index)
        return self.parts[corpus].sample_lengths(at)

    @cached_property
    def fingerprint(self) -> str:
        each = [part.fingerprint for part in self.parts]
        return hashlib.sha256(f"{each} {self.blend.counts.tolist()}".encode()).hexdigest()[:16]

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        corpus, at = self.blend.locate(index)
        return self.parts[corpus][at]


Documents: TypeAlias = DocumentDataset | DocumentBlend


class NumberedSamples(Protocol):
    """A training set that says what a sample holds by its number, the same whenever it is asked:
    steps are planned ahead, and sequences may wait. `sample_trees(index)` likewise, where there are
    trees.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Tensor]: ...

    def sample_lengths(self, index: int) -> tuple[int, ...]: ...


def is_numbered(dataset: Any, args: Any) -> bool:
    """Whether a script's training set is `NumberedSamples`, read in order."""
    named = ("sample_lengths", "sample_trees") if args.balance_trees else ("sample_lengths",)
    return args.dataloader_type == "single" and all(callable(getattr(dataset, name, None)) for name in named)


def unpack(
    microbatch: Mapping[str, Tensor], depths: int = 0, first_sample: int | None = None, trees: TreeLoss | None = None
) -> Sequences:
    """The sequences of a collated microbatch (tokens, labels, loss_mask and position_ids, each [B,
    S]), with columns TOKEN, LABEL and LOSS_MASK.

    `depths`: how many tokens ahead rows also say (`column`). `first_sample`: number of the first
    sample, where rows say theirs in a last column. `trees`: positions are along the paths of trees,
    depth first, and loss masks are weights. DataError: the batch does not come from this data set, or
    is of trees that nobody announced or that are none.
    """
    position_ids = microbatch["position_ids"]
    held = position_ids != PADDING
    # held [B, S]; positions [T], sample by sample.
    positions = position_ids[held]
    opens = positions == 0
    if (held[:, 0] & (position_ids[:, 0] != 0)).any():
        raise DataError("a sample does not open with position 0: its batch was not made by the document data set")
    if trees is None and not (opens[1:] | (positions.diff() == 1)).all():
        # Taken for one sequence, the branches of a tree would see one another.
        raise DataError(
            "positions of a sequence do not count up by one: give --balance-trees for trees of rollouts, whose "
            "positions run along paths (docs/trees.md); other positions are not kept"
        )
    starts = torch.nonzero(opens).flatten().tolist()
    ends = [*starts[1:], len(positions)][: len(starts)]  # a sample may be padding alone
    lengths = tuple(stop - start for start, stop in zip(starts, ends, strict=True))
    found: list[Tree] = []
    if trees is not None:
        _check_weights(microbatch["loss_mask"][held], trees)
        for number, (start, stop) in enumerate(zip(starts, ends, strict=True)):
            try:
                found.append(tree_of(positions[start:stop].tolist()))
            except ConfigError as error:
                raise DataError(f"position_ids of sequence {number} of a microbatch: {error}") from None
    # rows [T, C]: token, label, the bits of the loss mask, then what lies ahead.
    columns = [microbatch["tokens"][held], microbatch["labels"][held], to_bits(microbatch["loss_mask"][held])]
    rows = torch.stack(columns, dim=1)
    wide = [rows, *_ahead(rows, positions, depths)]
    if first_sample is not None:
        # The sample's number in the microbatch of the pool, of each token [T, 1].
        wide.append(torch.nonzero(held)[:, :1] + first_sample)
    return Sequences(torch.cat(wide, dim=1), lengths, tuple(found))


def _check_weights(weights: Tensor, loss: TreeLoss) -> None:
    # The number that Megatron divides by is a whole one, on every rank.
    wrong = ~weights.isfinite() if loss == "sum" else (weights < 0) | (weights != weights.round())
    if wrong.any():
        expected = "finite numbers" if loss == "sum" else "whole numbers from 0, of which the loss is a mean"
        raise DataError(
            f"loss_mask of trees: expected {expected}, got {float(weights[wrong][0]):g}; give --balance-trees sum for "
            "weights such as advantages, whose loss is the weighted sum"
        )


def rollout_sample(rollouts: Sequence[Any], weights: Sequence[Any], seq_length: int) -> dict[str, Tensor]:
    """A sample [S] of rollouts that share what they begin with, for `--balance-trees`.

    Arguments as of `workloads.rollouts.as_trees` and `Rollouts.weights`. DataError also: they have
    more than `seq_length` rows.
    """
    made = as_trees(rollouts)
    room = seq_length - len(made.tokens)
    if room < 0:
        raise DataError(
            f"rollouts of {len(made.tokens)} rows, and a sample has {seq_length} (--seq-length); give it fewer, or "
            "longer samples"
        )
    columns = {"tokens": made.tokens, "labels": made.labels.clip(min=0), "loss_mask": made.weights(weights)}
    sample = {name: torch.from_numpy(np.pad(column, (0, room))) for name, column in columns.items()}
    positions = np.pad(made.position_ids, (0, room), constant_values=PADDING)
    return {**sample, "loss_mask": sample["loss_mask"].float(), "position_ids": torch.from_numpy(positions)}


def _ahead(rows: Tensor, positions: Tensor, depths: int) -> Iterator[Tensor]:
    """By depth from 1: rows [T, 4] of the tokens so far ahead."""
    wide = torch.cat([rows, positions[:, None]], dim=1)
    for depth in range(1, depths + 1):
        ahead = torch.zeros_like(wide)
        ahead[:-depth] = wide[depth:]
        ahead[ahead[:, POSITION] != positions + depth] = 0  # another sequence's, or none
        yield ahead


def make_provider(
    policy: documents.CutPolicy, filling: documents.Filling = documents.DEFAULT_FILLING
) -> Callable[..., DatasetTriple]:
    """Megatron's data set provider: train, validation and test sets. Errors as of `build_datasets`."""

    def provide(train_val_test_num_samples: Sequence[int], vp_stage: int | None = None) -> DatasetTriple:  # noqa: ARG001  every stage reads the same documents
        from megatron.training import get_args

        return build_datasets(get_args(), train_val_test_num_samples, policy, filling)

    # Megatron asks every rank, not only tensor-parallel rank 0, if the provider says so.
    provide.is_distributed = True  # pyright: ignore[reportFunctionMemberAccess]
    provide.__qualname__ = provide.__name__ = "document_datasets_provider"  # as the log names it
    return provide


document_datasets_provider = make_provider("split")


def build_datasets(
    args: Any,
    num_samples: Sequence[int],
    policy: documents.CutPolicy,
    filling: documents.Filling = documents.DEFAULT_FILLING,
) -> DatasetTriple:
    """Data sets for Megatron's arguments; None for a split that no samples are asked of, or without
    documents. ConfigError: arguments against it. DataError: a damaged or empty corpus.
    """
    reasons = data_reasons(args)
    if reasons:
        raise ConfigError("; ".join((*reasons, "or keep the script's own data set with 'data: script'")))
    limits = {"vocab_size": getattr(args, "padded_vocab_size", None), "mmap": getattr(args, "mmap_bin_files", True)}
    opened: dict[str, documents.Corpus] = {}
    datasets: list[Documents | None] = []
    for source, wanted, split in zip(_sources(args), num_samples, (Split.train, Split.valid, Split.test), strict=True):
        parts: list[DocumentDataset] = []
        weights: list[float] = []
        length = ENDLESS if wanted and split is Split.valid else wanted
        for at, prefix in enumerate(source.prefixes if wanted != 0 else ()):
            if prefix not in opened:
                opened[prefix] = _open_corpus(prefix, args)
            index = opened[prefix].index
            own = documents.split_documents(index.num_documents, source.split)[source.part]
            if index.tokens_of(own):
                stream = documents.DocumentStream(opened[prefix], args.seq_length, args.seed, policy, own, filling)
                parts.append(DocumentDataset(index, stream, length, split, **limits))
                weights += [] if source.weights is None else [source.weights[at]]
        if wanted != 0 and not parts and split is not Split.test:
            # Megatron would go on without the set and fail at its first step or evaluation, on an
            # iterator that is None.
            raise ConfigError(_no_documents(source, split.name))
        alone = parts[0] if len(parts) == 1 else None
        datasets.append(alone or (DocumentBlend(parts, weights or None, length) if parts else None))
    train, valid, test = datasets
    return train, valid, test


CORPUS_OPTIONS = (
    *("train_data_path", "valid_data_path", "test_data_path", "per_split_data_args_path"),
    *("data_path", "data_args_path"),
)


@dataclass(frozen=True, slots=True)
class _SplitSource:
    """Corpora of a split, with weights (None: by an epoch's samples), and which part, by `flag`."""

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None
    split: tuple[float, float, float]
    part: int
    flag: str


WHOLE = (1.0, 0.0, 0.0)


def _sources(args: Any) -> tuple[_SplitSource, _SplitSource, _SplitSource]:
    """The corpora of training, validation and test, as Megatron reads them from the command line.
    ConfigError: a file of paths that cannot be read, or weights for some of the corpora only.
    """
    from megatron.training.utils import get_blend_and_blend_per_split

    try:
        blend, per_split = get_blend_and_blend_per_split(args)
    except OSError as error:
        raise ConfigError(f"{error.filename}: cannot be read ({error.strerror}); it is a file of data paths") from error
    except (AssertionError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            "the data paths: expected PREFIX, PREFIX PREFIX ..., or WEIGHT PREFIX WEIGHT PREFIX ... (in "
            '--per-split-data-args-path, JSON with "train", "valid" and "test" of these)'
        ) from error
    if per_split is not None:
        named = zip(("--train-data-path", "--valid-data-path", "--test-data-path"), per_split, strict=True)
        train, valid, test = (_SplitSource(*_prefixes(given), WHOLE, 0, flag) for flag, given in named)
    else:
        shared = (*_prefixes(blend), _parse_split(args.split))
        train, valid, test = (_SplitSource(*shared, part, f"--split {args.split}") for part in range(3))
    return train, valid, test


def _prefixes(
    blend: tuple[Sequence[str], Sequence[float] | None] | None,
) -> tuple[tuple[str, ...], tuple[float, ...] | None]:
    prefixes, weights = blend or ((), None)
    return tuple(map(prefix_of, prefixes)), None if weights is None else tuple(weights)


CACHED_FROM = 100_000  # pieces from which on their order is kept on disk. Fewer are sorted in a tenth of a second.


def _open_corpus(prefix: str, args: Any) -> documents.Corpus:
    """A corpus, a large one with a cache of its orders. DataError: it is damaged or empty."""
    index = CorpusIndex.mapped(prefix)
    if index.num_documents + index.num_tokens // args.seq_length < CACHED_FROM:
        index.check()
        return documents.Corpus(index)

    def check() -> np.ndarray:
        index.check()
        return np.ones(1, dtype=np.int8)

    index.check_bin()
    cache = documents.OrderCache.of_corpus(index, getattr(args, "data_cache_path", None))
    # The index is checked whole once; where its cache says so, not again.
    cache.under("checked").get("checked", check)
    return documents.Corpus(index, cache)


def data_reasons(args: Any) -> list[str]:
    """The reasons why whole documents cannot be read under these arguments."""
    reasons = flags.reasons(args, "documents")
    if not names_corpus(args) and not reasons:
        reasons.append(
            "--data-path: missing; name a corpus, PREFIX of `megatron-balance corpus build PREFIX` or of "
            "preprocess_data.py"
        )
    return reasons


def corpus_reasons(args: Any) -> list[str]:
    """Why the corpora of the command line cannot be read, as far as opening the files shows."""
    reasons: list[str] = []
    try:
        # Opening the files costs the same whatever their size: an index that is damaged inside is
        # found when its documents are numbered.
        named = _sources(args)
    except BalanceError as error:
        return [str(error)]
    wanted = (not getattr(args, "skip_train", False), bool(args.eval_iters), False)
    num_documents: dict[str, int] = {}
    for source in named:
        for prefix in dict.fromkeys(source.prefixes):
            if prefix not in num_documents:
                num_documents[prefix] = 0
                try:
                    index = CorpusIndex.mapped(prefix)
                    index.check_bin()
                    num_documents[prefix] = index.num_documents
                except BalanceError as error:
                    reasons.append(str(error))
    for weights in dict.fromkeys(source.weights for source in named if source.weights is not None):
        try:
            documents.shares(weights)
        except BalanceError as error:
            reasons.append(str(error))
    if reasons:
        return reasons
    for source, asked, name in zip(named, wanted, ("train", "valid", "test"), strict=True):
        parts = [
            documents.split_documents(num_documents[prefix], source.split)[source.part] for prefix in source.prefixes
        ]
        if asked and not any(parts):
            reasons.append(_no_documents(source, name))
    return reasons


def _no_documents(source: _SplitSource, name: str) -> str:
    less = " or set --eval-iters 0" if name == "valid" else ""
    return (
        f"{source.flag}: leaves no documents of {' '.join(source.prefixes) or 'any corpus'} for the {name} set; give "
        f"it a larger share{less}"
    )


def _parse_split(split: str | None) -> tuple[float, float, float]:
    weights = [float(number) for number in re.findall(r"[.0-9]+", split or "")]
    if not 1 <= len(weights) <= len(Split) or sum(weights) <= 0:
        raise ConfigError(
            f"--split {split}: expected up to three weights for train, validation and test, for example 969,30,1"
        )
    train, valid, test = (*weights, 0.0, 0.0)[:3]
    return train, valid, test


def names_corpus(args: Any) -> bool:
    return any(getattr(args, name, None) for name in CORPUS_OPTIONS)


def numbered(
    data: NumberedSamples, draw: Draw, micro_batch_size: int, pool: Pool
) -> Iterator[Mapping[str, torch.Tensor]]:
    """The microbatches of this rank's replica by the numbers of their samples."""
    # In place of Megatron's iterator, which counts on where a step drew less.
    assert draw.first is not None
    for microbatch in range(draw.num_microbatches):
        # As Megatron's sampler deals them: `micro_batch_size` samples to each replica in turn.
        start = draw.first + (microbatch * pool.num_replicas + pool.replica) * micro_batch_size
        samples = [data[index] for index in range(start, start + micro_batch_size)]
        yield {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


# Where a batch may say them, the first that is there taking precedence.
BOUNDARIES = ("cu_seqlens_padded", "cu_seqlens_q_padded", "cu_seqlens", "cu_seqlens_q")

COLUMNS = ("tokens", "labels", "loss_mask", "position_ids")


@dataclass(frozen=True, slots=True)
class Reader:
    """How batches are read. Those of samples with positions of their own stay as they are."""

    # Tokens of a sub-sequence behind the last one whose loss counts are not read.
    leave_out_tails: bool = True
    # Positions are embedded by position_ids, which have to agree.
    learned: bool = False
    # As for `unpack`.
    depths: int = 0
    first_sample: int | None = None
    trees: TreeLoss | None = None

    def read(self, batches: Iterator[Any], num_microbatches: int) -> tuple[list[Sequences], Exception | None]:
        """The sequences of this rank's microbatches, on the host, or the error that prevented it."""
        found: list[Sequences] = []
        try:
            for _ in range(num_microbatches):
                found.append(unpack(self.columns(next(batches)), self.depths, self.first_sample, self.trees))
        except Exception as error:  # raised again by share_lengths, on all ranks
            return [], error
        return found, None

    def columns(self, batch: Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """The columns of a batch; position_ids say where sequences open. DataError: by cu_seqlens."""
        if not isinstance(batch, Mapping):
            self._refuse_trees("samples of unequal lengths, each one sequence")
            return self._without_tails(_side_by_side(batch))
        found = {name: batch[name] for name in COLUMNS}
        # With cu_seqlens_padded beside it, Megatron attends by that one, and so do we.
        name = next((name for name in BOUNDARIES if batch.get(name) is not None), None)
        if name is None:
            return found
        self._refuse_trees(name)
        positions = _positions_of(batch[name], found["tokens"].shape, batch.get(f"{name}_argmin"))
        if self.learned and not positions.equal(found["position_ids"]):
            raise DataError(
                "cu_seqlens and position_ids open sub-sequences at different tokens: learned positions would be "
                "others than Megatron's; let position_ids begin with 0 at each entry of cu_seqlens"
            )
        return self._without_tails({**found, "position_ids": positions})

    def _refuse_trees(self, found: str) -> None:
        if self.trees is not None:
            raise DataError(
                f"--balance-trees: trees are read from position_ids, and this batch has {found}; expected "
                f"{', '.join(COLUMNS)} alone, in which position 0 opens a tree"
            )

    def _without_tails(self, columns: dict[str, Tensor]) -> dict[str, Tensor]:
        if not self.leave_out_tails:
            return columns
        positions = columns["position_ids"]
        # No other token attends to them and no loss comes of them, so no number of a dense model
        # depends on them: padding up to --seq-length costs nothing.
        kept = _counts_or_precedes(positions == 0, columns["loss_mask"] != 0)
        return {**columns, "position_ids": positions.masked_fill(~kept, PADDING)}


def recall(
    planned: PlannedStep,
    data: NumberedSamples | None,
    pool: Pool,
    parallel: TensorParallel,
    device: torch.device,
    reader: Reader,
) -> Recalled:
    """Read a step's documents of earlier ones again, each on one of the ranks that read. Collective
    over the joint pool where there are some. DataError on every rank: one could not read.
    """
    wanted = planned.recalled
    if not wanted:
        return NOTHING
    assert data is not None, "documents wait only where they can be read again"
    # Each on another rank that reads, in turn.
    owners = tuple(pool.readers[at % len(pool.readers)] for at in range(len(wanted)))
    rows: list[tuple[int, torch.Tensor]] = []
    failure: Exception | None = None
    if pool.reads and pool.has_tokens and parallel.is_source:
        try:
            trees = planned.recalled_trees or [document(held.length) for held in wanted]
            for held, tree, owner in zip(wanted, trees, owners, strict=True):
                if owner == pool.rank:
                    rows.append((held.number, _read_again(data, held, tree, reader)))
        except Exception as error:  # raised below, on all ranks
            failure = error
    # All ranks raise, so none waits for another.
    failed = torch.tensor([failure is not None], dtype=torch.int64, device=device)
    if pool.joint.size > 1:
        dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=pool.joint.pool)
    if parallel.size > 1:
        dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=parallel.group)
    if int(failed):
        if isinstance(failure, BalanceError):
            raise failure
        raise DataError("a rank could not read a document that waited; the reason is in its log") from failure
    return Recalled(tuple((held.number, held.length) for held in wanted), owners, tuple(rows), planned.recalled_trees)


def _read_again(data: NumberedSamples, held: HeldDocument, tree: Tree, reader: Reader) -> torch.Tensor:
    sample = unpack(
        {name: tensor[None] for name, tensor in data[held.sample].items()}, reader.depths, trees=reader.trees
    )
    lengths = sample.lengths
    if held.place >= len(lengths) or lengths[held.place] != held.length:
        raise DataError(
            f"document {held.place} of sample {held.sample}: expected {held.length} tokens that waited, got a sample "
            f"of {list(lengths)}; the corpus has changed since it was drawn"
        )
    if sample.trees and sample.trees[held.place] != tree:
        raise DataError(
            f"document {held.place} of sample {held.sample}: expected the tree of {len(tree)} segments that waited, "
            "got another one; the data set has changed since it was drawn"
        )
    first = sum(lengths[: held.place])
    return sample.rows[first : first + held.length]


def _side_by_side(samples: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Columns [B, longest] of samples [n], each one sequence, not padded; DataError: an empty one."""
    lengths = [int(sample.get("original_seq_len", sample["padded_seq_len"])) for sample in samples]
    if not lengths or min(lengths) < 1:
        raise DataError(
            f"samples of {lengths} tokens (original_seq_len): expected at least one sample, and no empty one"
        )
    made = {
        name: torch.nn.utils.rnn.pad_sequence(
            [sample[name].reshape(-1)[:length] for sample, length in zip(samples, lengths, strict=True)],
            batch_first=True,
        )
        for name in COLUMNS
    }
    at = torch.arange(max(lengths)).expand_as(made["tokens"])
    made["position_ids"] = at.masked_fill(at >= torch.tensor(lengths)[:, None], PADDING)
    return made


def _positions_of(cu_seqlens: Tensor, shape: torch.Size, argmin: Tensor | None = None) -> Tensor:
    """Positions [B, S] of tokens in the sub-sequences of cu_seqlens [B, N] or [N]; DataError: these
    do not rise from 0 to S. `argmin`: how many entries of each row count [B]; None: up to the first
    -1.
    """
    batch, size = shape
    ends = cu_seqlens.long()
    if ends.dim() == 1 and batch == 1:
        ends = ends[None]
    right = ends.dim() == 2 and ends.shape[0] == batch and ends.shape[1] > 1
    if right:
        # [B, N]: the first -1 and all behind it, or what argmin does not count.
        fill = (ends == -1).cummax(dim=1).values if argmin is None else _behind(argmin, ends)
        # Entries that do not count become S, behind which no sequence opens.
        ends = ends.masked_fill(fill, size)
        right = not (fill[:, :2].any() or (ends.diff(dim=1) < 0).any())
        right = right and not ((ends[:, 0] != 0).any() or (ends.masked_fill(fill, 0).amax(dim=1) != size).any())
    if not right:
        counted = "" if argmin is None else f"; entries that count (cu_seqlens_argmin): {argmin.reshape(-1).tolist()}"
        raise DataError(
            f"cu_seqlens of shape {list(cu_seqlens.shape)}: expected a row for each of {batch} samples, rising from 0 "
            f"to {size}, and filled with {size} or -1; first row: {cu_seqlens.reshape(-1)[:8].tolist()} ...{counted}"
        )
    # [B, S + 1] marks, whose last column takes the ends; a token's position is its column less that
    # of the last mark up to it.
    opens = torch.zeros(batch, size + 1, dtype=torch.bool).scatter_(1, ends, True)[:, :size]
    at = torch.arange(size).expand(batch, size)
    return at - at.masked_fill(~opens, 0).cummax(dim=1).values


def _behind(argmin: Tensor, ends: Tensor) -> Tensor:
    """Entries [B, N] that do not count; all where `argmin` is not a count of entries for each row."""
    counts = argmin.reshape(-1, 1).long()
    if counts.shape[0] != ends.shape[0] or (counts > ends.shape[1]).any():
        return torch.ones_like(ends, dtype=torch.bool)
    return torch.arange(ends.shape[1]) >= counts


def _counts_or_precedes(opens: Tensor, counts: Tensor) -> Tensor:
    """Tokens [B, S] that count, precede one that does in their sub-sequence, or open it."""
    size = opens.shape[1]
    at = torch.arange(size).expand_as(opens)
    # [B, S]: the next column that counts, and the next sub-sequence's opening, from each on.
    next_count = _nearest_from(at.masked_fill(~counts, size))
    next_open = torch.nn.functional.pad(_nearest_from(at.masked_fill(~opens, size))[:, 1:], (0, 1), value=size)
    return opens | (next_count < next_open)


def _nearest_from(marks: Tensor) -> Tensor:
    return marks.flip(1).cummin(dim=1).values.flip(1)
