"""Samples made of documents: the tokens of Megatron's sample number i, computed from (seed, i)
alone.

A *piece* is what is left of a document after cutting at the context length: a row (document, start,
stop). Each piece is one sequence of its own: attention never joins the pieces of a cut document. A
*sample* is a run of whole pieces of at most `seq_length` tokens; Megatron asks for samples by
number, in order, and never sees an epoch.

Epochs and global batches: epoch e takes all pieces in an order drawn from (seed, e), packs them and
numbers its samples on from where epoch e - 1 stopped. A global batch is `global_batch_size`
consecutive numbers, so one that begins in epoch e's last samples takes its rest from epoch e + 1:
nothing is dropped, padded or repeated. Since there is no state beside the number, a run that
resumes at `consumed_samples` continues exactly, on any number of ranks.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_balance.errors import ConfigError, DataError
from megatron_balance.workloads.idx import read_index
from megatron_balance.workloads.order_cache import Corpus

CutPolicy = Literal["split", "truncate"]
"""`split`: what is left of a document longer than the context is a document of its own; `truncate`:
it is dropped.
"""

Filling = Literal["next_fit", "best_fit"]
"""`next_fit`: a piece that no longer fits opens the next sample; `best_fit`: it goes into the fullest
sample that has room, of the `WINDOW` last ones that are not full.
"""

DEFAULT_FILLING: Filling = "best_fit"
WINDOW = 64

# A global batch spans two epochs at most, unless an epoch is smaller than a batch.
KEPT_EPOCHS = 2


class DocumentPiece(NamedTuple):
    """Tokens [start, stop) of a document of the corpus; one sequence of a sample."""

    document: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True, eq=False)
class Epoch:
    """One pass over the corpus. Sample s holds pieces order[bounds[s] : bounds[s + 1]]."""

    order: NDArray[np.int64]
    bounds: NDArray[np.int64]

    @property
    def num_samples(self) -> int:
        return len(self.bounds) - 1


def cut(document_lengths: NDArray[np.int64], context_length: int, policy: CutPolicy = "split") -> NDArray[np.int64]:
    """Pieces of at most `context_length` tokens, in document order.

    Args:
        document_lengths: [documents] in tokens; a document of 0 tokens gives no piece.
        context_length: most tokens of a piece.
        policy: what becomes of the rest of a longer document.

    Returns:
        [pieces, 3] rows (document, start, stop).
    """
    lengths = document_lengths if policy == "split" else np.minimum(document_lengths, context_length)
    counts = -(-lengths // context_length)
    documents = np.repeat(np.arange(len(lengths), dtype=np.int64), counts)
    first_piece = np.cumsum(counts) - counts
    starts = (np.arange(len(documents), dtype=np.int64) - first_piece[documents]) * context_length
    stops = np.minimum(starts + context_length, lengths[documents])
    return np.stack([documents, starts, stops], axis=1)


def pack(piece_lengths: NDArray[np.int64], seq_length: int) -> NDArray[np.int64]:
    """Bounds [samples + 1] of samples filled in the given order: a piece that no longer fits opens
    the next sample (next-fit).

    Args:
        piece_lengths: [pieces] in tokens, each at most `seq_length`.
        seq_length: most tokens of a sample.
    """
    assert len(piece_lengths), "an epoch has at least one piece"
    assert piece_lengths.max() <= seq_length, "pieces are cut before they are packed"
    ends = np.cumsum(piece_lengths)
    # For every piece: if it opened a sample, which piece would open the next one. Then only the
    # openers are walked.
    following = np.searchsorted(ends, ends - piece_lengths + seq_length, side="right")
    bounds = [0]
    while bounds[-1] < len(ends):
        bounds.append(following.item(bounds[-1]))
    return np.array(bounds, dtype=np.int64)


def pack_best_fit(piece_lengths: NDArray[np.int64], seq_length: int) -> Epoch:
    """Samples filled by best fit over a window, the pieces in the given order: each goes into the open
    sample with the least room that holds it, or opens one. Of more than `WINDOW` open samples the
    fullest is closed; samples are numbered as they close.

    Args:
        piece_lengths: [pieces] in tokens, each at most `seq_length`.
        seq_length: most tokens of a sample.

    Returns:
        Positions in `piece_lengths`, sample after sample.
    """
    assert len(piece_lengths), "an epoch has at least one piece"
    assert piece_lengths.max() <= seq_length, "pieces are cut before they are packed"
    rooms: list[tuple[int, int]] = []  # (room, sample) of open samples, ascending
    sample_of = [0] * len(piece_lengths)
    closed: list[int] = []
    opened = 0
    for piece, length in enumerate(piece_lengths.tolist()):
        at = bisect_left(rooms, (length, -1))
        if at < len(rooms):
            room, sample = rooms.pop(at)
        else:
            room, sample = seq_length, opened
            opened += 1
        sample_of[piece] = sample
        if room == length:
            closed.append(sample)
            continue
        insort(rooms, (room - length, sample))
        if len(rooms) > WINDOW:
            closed.append(rooms.pop(0)[1])
    closed += [sample for _, sample in rooms]
    number = np.empty(opened, dtype=np.int64)
    number[closed] = np.arange(opened)
    place = number[np.array(sample_of, dtype=np.int64)]
    order = np.argsort(place, kind="stable").astype(np.int64, copy=False)
    return Epoch(order, np.concatenate([[0], np.cumsum(np.bincount(place, minlength=opened))]).astype(np.int64))


def shuffled(count: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """A permutation of range(count) drawn from (seed, epoch).

    Sorts the raw output of the bit generator, which NumPy keeps the same in all versions; what
    `Generator.permutation` returns may change with an upgrade between two resumes.
    """
    keys = np.random.PCG64(np.random.SeedSequence((seed, epoch))).random_raw(count)
    return np.argsort(keys, kind="stable").astype(np.int64, copy=False)


class DocumentStream:
    """The endless sequence of samples over part of a corpus; sample(i) depends on the arguments
    below and i, nothing else.

    Mutable only as a cache: numbers of samples of the epochs asked for so far, and the last epochs
    packed.
    """

    def __init__(
        self,
        corpus: NDArray[np.int64] | Corpus,
        seq_length: int,
        seed: int,
        policy: CutPolicy = "split",
        documents: range | None = None,
        filling: Filling = DEFAULT_FILLING,
    ) -> None:
        """Cut and number the documents; nothing is packed before a sample is asked for.

        Args:
            corpus: opened, or the lengths [documents] of all its documents, in tokens. Where it has a
                cache, pieces and orders are mapped from its files.
            seq_length: context length and most tokens of a sample.
            seed: of the shuffles, at least 0.
            policy: `split` or `truncate`.
            documents: the part of the corpus to draw from, one of a train/valid/test split; None:
                all of it.
            filling: of samples.

        Raises:
            ConfigError: seq_length or seed that cannot be.
            DataError: the documents chosen hold no token.
        """
        if seq_length < 1:
            raise ConfigError(f"seq_length {seq_length}: a sample needs room for at least 1 token")
        if seed < 0:
            raise ConfigError(f"seed {seed}: the document shuffle needs a seed of at least 0")
        if policy not in ("split", "truncate"):
            raise ConfigError(f"document policy {policy!r}: choose 'split' or 'truncate'")
        if filling not in ("next_fit", "best_fit"):
            raise ConfigError(f"filling of samples {filling!r}: choose 'next_fit' or 'best_fit'")
        cache = corpus.cache if isinstance(corpus, Corpus) else None
        num_documents = corpus.index.num_documents if isinstance(corpus, Corpus) else len(corpus)
        part = range(num_documents) if documents is None else documents
        if part.step != 1 or part.start < 0 or part.stop > num_documents:
            raise ConfigError(f"documents {part} are not a run of the corpus's {num_documents} documents")

        def pieces() -> NDArray[np.int64]:
            lengths = corpus.index.document_lengths if isinstance(corpus, Corpus) else corpus
            found = cut(lengths[part.start : part.stop], seq_length, policy)
            found[:, 0] += part.start
            return found

        self._cut = None if cache is None else cache.under("pieces", seq_length, policy, part)
        self._cache = None if cache is None else cache.under(seq_length, seed, policy, part, filling, WINDOW)
        self._pieces = pieces() if self._cut is None else self._cut.get("pieces", pieces)
        if not len(self._pieces):
            raise DataError(
                f"documents {part.start} to {part.stop} of the corpus hold no token; choose another split or corpus"
            )
        self.seq_length = seq_length
        self.seed = seed
        self.policy: CutPolicy = policy
        self.filling: Filling = filling
        self._first_sample = [0]  # of each epoch known so far
        self._epochs: dict[int, Epoch] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Without the arrays that are mapped: pickled, they would be copies."""
        return self.__dict__ if self._cut is None else {**self.__dict__, "_pieces": None, "_epochs": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._cut is not None:
            self._pieces = self._cut.get("pieces", _missing)

    @property
    def num_tokens(self) -> int:
        """Tokens of one epoch."""
        return int(_lengths(self._pieces).sum())

    @property
    def num_pieces(self) -> int:
        """Sequences of one epoch."""
        return len(self._pieces)

    def num_samples(self, epoch: int) -> int:
        """Samples of one epoch; it varies a little, since every order packs differently."""
        return self.first_sample(epoch + 1) - self.first_sample(epoch)

    def first_sample(self, epoch: int) -> int:
        """Number of the sample that opens `epoch`."""
        while len(self._first_sample) <= epoch:
            self._count_epoch()
        return self._first_sample[epoch]

    def locate(self, index: int) -> tuple[int, int]:
        """Epoch of sample `index`, and its place there."""
        if index < 0:
            raise IndexError(f"sample {index}: samples are numbered from 0")
        while self._first_sample[-1] <= index:
            self._count_epoch()
        epoch = bisect_right(self._first_sample, index) - 1
        return epoch, index - self._first_sample[epoch]

    def sample(self, index: int) -> tuple[DocumentPiece, ...]:
        """Pieces of sample `index`, in the order of its tokens."""
        return tuple(DocumentPiece(*row) for row in self._pieces[self._members(index)].tolist())

    def lengths_of(self, index: int) -> tuple[int, ...]:
        """Lengths in tokens of the sequences of sample `index`."""
        return tuple(_lengths(self._pieces[self._members(index)]).tolist())

    def lengths_between(self, start: int, stop: int) -> tuple[int, ...]:
        """Lengths of all sequences of samples [start, stop), in order: what a pool reads in one
        microbatch or global batch.
        """
        return tuple(length for index in range(start, stop) for length in self.lengths_of(index))

    def fingerprint(self) -> str:
        """16 hex digits of everything sample(i) depends on; a resumed run that shows another one
        would lose or repeat tokens.
        """
        if self._cache is None:
            return self._digest()
        return bytes(self._cache.get("fingerprint", lambda: np.frombuffer(self._digest().encode(), np.uint8))).decode()

    def _digest(self) -> str:
        how = self.policy if self.filling == "next_fit" else f"{self.policy} {self.filling} {WINDOW}"
        digest = hashlib.sha256(f"{self.seq_length} {self.seed} {how} ".encode())
        digest.update(self._pieces.astype("<i8").tobytes())
        return digest.hexdigest()[:16]

    def _members(self, index: int) -> NDArray[np.int64]:
        epoch, place = self.locate(index)
        packed = self._epoch(epoch)
        return packed.order[packed.bounds[place] : packed.bounds[place + 1]]

    def _count_epoch(self) -> None:
        """Learn where the next unknown epoch begins."""
        epoch = len(self._first_sample) - 1
        self._first_sample.append(self._first_sample[-1] + self._epoch(epoch).num_samples)

    def _filled(self, order: NDArray[np.int64]) -> Epoch:
        """The samples of pieces in that order."""
        lengths = _lengths(self._pieces)[order]
        if self.filling == "next_fit":
            return Epoch(order, pack(lengths, self.seq_length))
        packed = pack_best_fit(lengths, self.seq_length)
        return Epoch(order[packed.order], packed.bounds)

    def _packed(self, epoch: int) -> Epoch:
        """The samples of an epoch, computed or from the cache."""

        def make() -> Epoch:
            return self._filled(shuffled(len(self._pieces), self.seed, epoch))

        if self._cache is None:
            return make()

        def flat() -> NDArray[np.int64]:
            made = make()
            return np.concatenate([made.order, made.bounds])

        found = self._cache.get(f"epoch{epoch}", flat)
        return Epoch(found[: len(self._pieces)], found[len(self._pieces) :])

    def _epoch(self, epoch: int) -> Epoch:
        packed = self._epochs.pop(epoch, None)
        if packed is None:
            packed = self._packed(epoch)
            if len(self._epochs) == KEPT_EPOCHS:
                del self._epochs[next(iter(self._epochs))]
        self._epochs[epoch] = packed  # last in the dict: the least recently used one goes first
        return packed


def _missing() -> NDArray[np.int64]:
    raise DataError("the cached order of the documents is gone from its folder; start the run again")


def _lengths(pieces: NDArray[np.int64]) -> NDArray[np.int64]:
    """Tokens of pieces [n, 3]."""
    return pieces[:, 2] - pieces[:, 1]


def open_stream(
    prefix: str,
    seq_length: int,
    seed: int,
    policy: CutPolicy = "split",
    documents: range | None = None,
    filling: Filling = DEFAULT_FILLING,
) -> DocumentStream:
    """The stream over a Megatron corpus, from its index alone: any process plans ahead with it,
    without torch and without the tokens.
    """
    return DocumentStream(Corpus(read_index(prefix)), seq_length, seed, policy, documents, filling)


def split_documents(num_documents: int, weights: tuple[float, ...]) -> tuple[range, ...]:
    """Runs of documents in proportion to `weights` (train, valid, test), rounded as Megatron rounds
    its splits.
    """
    total = sum(weights)
    if total <= 0 or min(weights) < 0:
        raise ConfigError(
            f"--split {','.join(f'{weight:g}' for weight in weights)}: weights must not be negative and not all zero"
        )
    bounds = [round(sum(weights[:i]) / total * num_documents) for i in range(len(weights) + 1)]
    return tuple(range(start, stop) for start, stop in pairwise(bounds))
