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

In a `Blend` sample i is a sample of one corpus, by i alone too. Orders of large corpora are kept in
files that all processes of a node map (`OrderCache`).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import math
import os
import tempfile
import zlib
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from megatron_balance.errors import ConfigError, DataError
from megatron_balance.ir.arrays import Ints
from megatron_balance.workloads.idx import CorpusIndex, bin_path, idx_path

# `split`: what is left of a document longer than the context is a document of its own; `truncate`:
# it is dropped.
CutPolicy = Literal["split", "truncate"]
# `next_fit`: a piece that no longer fits opens the next sample; `best_fit`: it goes into the
# fullest sample that has room, of the `WINDOW` last ones that are not full.
Filling = Literal["next_fit", "best_fit"]
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
class _Epoch:
    """One pass over the corpus. Sample s holds pieces order[bounds[s] : bounds[s + 1]]."""

    order: Ints
    bounds: Ints

    @property
    def num_samples(self) -> int:
        return len(self.bounds) - 1


def cut(document_lengths: Ints, context_length: int, policy: CutPolicy = "split") -> Ints:
    """Pieces [pieces, 3] (document, start, stop) of at most `context_length` tokens, in their order.

    `policy`: what becomes of the rest of a longer document. One of 0 tokens gives no piece.
    """
    lengths = document_lengths if policy == "split" else np.minimum(document_lengths, context_length)
    counts = -(-lengths // context_length)
    documents = np.repeat(np.arange(len(lengths), dtype=np.int64), counts)
    # [documents]: number of each one's first piece, so that a piece knows its place in the document.
    first_piece = np.cumsum(counts) - counts
    starts = (np.arange(len(documents), dtype=np.int64) - first_piece[documents]) * context_length
    stops = np.minimum(starts + context_length, lengths[documents])
    return np.stack([documents, starts, stops], axis=1)


def pack(piece_lengths: Ints, seq_length: int) -> Ints:
    """Bounds [samples + 1] of samples filled in the given order: next-fit."""
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


def _pack_best_fit(piece_lengths: Ints, seq_length: int) -> _Epoch:
    """Samples filled by best fit over a window; `order`: positions in `piece_lengths`."""
    # Each piece goes into the open sample with the least room that holds it, or opens one. Of more
    # than `WINDOW` open samples the fullest is closed; samples are numbered as they close.
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
    # Stable: pieces of one sample stay in their order.
    order = np.argsort(place, kind="stable").astype(np.int64, copy=False)
    return _Epoch(order, np.concatenate([[0], np.cumsum(np.bincount(place, minlength=opened))]).astype(np.int64))


def shuffled(count: int, *entropy: int) -> Ints:
    """A permutation of range(count) drawn from seed and epoch."""
    # The raw output of the bit generator is the same in all versions of NumPy; what
    # `Generator.permutation` returns may change with an upgrade between two resumes.
    keys = np.random.PCG64(np.random.SeedSequence(entropy)).random_raw(count)
    return np.argsort(keys, kind="stable").astype(np.int64, copy=False)


class DocumentStream:
    """The endless sequence of samples of a corpus; sample(i) depends on the arguments below and i.

    Mutable only as a cache of the epochs asked for so far.
    """

    def __init__(
        self,
        corpus: Ints | Corpus,
        seq_length: int,
        seed: int,
        policy: CutPolicy = "split",
        documents: range | None = None,
        filling: Filling = DEFAULT_FILLING,
    ) -> None:
        """Cut and number the documents; nothing is packed before a sample is asked for.

        `corpus`: opened, or the lengths [documents] of all its documents, in tokens; where it has a
        cache, pieces and orders are mapped from its files. `seq_length`: context length and most
        tokens of a sample. `documents`: the part to draw from, one of a train/valid/test split; None:
        all.
        """
        if seq_length < 1:
            raise ConfigError(f"seq_length {seq_length}: a sample needs room for at least 1 token")
        if seed < 0:
            raise ConfigError(f"seed {seed}: the document shuffle needs a seed of at least 0")
        cache = corpus.cache if isinstance(corpus, Corpus) else None
        num_documents = corpus.index.num_documents if isinstance(corpus, Corpus) else len(corpus)
        part = range(num_documents) if documents is None else documents
        if part.step != 1 or part.start < 0 or part.stop > num_documents:
            raise ConfigError(f"documents {part} are not a run of the corpus's {num_documents} documents")

        def pieces() -> Ints:
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
        self._epochs: dict[int, _Epoch] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Without the arrays that are mapped: pickled, they would be copies."""
        return self.__dict__ if self._cut is None else {**self.__dict__, "_pieces": None, "_epochs": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._cut is not None:
            self._pieces = self._cut.get("pieces", _missing)

    @property
    def num_tokens(self) -> int:
        """Of one epoch."""
        return int(_lengths(self._pieces).sum())

    @property
    def num_pieces(self) -> int:
        return len(self._pieces)

    def num_samples(self, epoch: int) -> int:
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

    def fingerprint(self) -> str:
        """16 hex digits of everything sample(i) depends on."""
        # A resumed run that shows another one would lose or repeat tokens.
        if self._cache is None:
            return self._digest()
        return bytes(self._cache.get("fingerprint", lambda: np.frombuffer(self._digest().encode(), np.uint8))).decode()

    def _digest(self) -> str:
        how = self.policy if self.filling == "next_fit" else f"{self.policy} {self.filling} {WINDOW}"
        digest = hashlib.sha256(f"{self.seq_length} {self.seed} {how} ".encode())
        digest.update(self._pieces.astype("<i8").tobytes())
        return digest.hexdigest()[:16]

    def _members(self, index: int) -> Ints:
        epoch, place = self.locate(index)
        packed = self._epoch(epoch)
        return packed.order[packed.bounds[place] : packed.bounds[place + 1]]

    def _count_epoch(self) -> None:
        epoch = len(self._first_sample) - 1
        self._first_sample.append(self._first_sample[-1] + self._epoch(epoch).num_samples)

    def _packed(self, epoch: int) -> _Epoch:
        def make() -> _Epoch:
            order = shuffled(len(self._pieces), self.seed, epoch)
            lengths = _lengths(self._pieces)[order]
            if self.filling == "next_fit":
                return _Epoch(order, pack(lengths, self.seq_length))
            packed = _pack_best_fit(lengths, self.seq_length)
            return _Epoch(order[packed.order], packed.bounds)

        if self._cache is None:
            return make()

        def flat() -> Ints:
            made = make()
            return np.concatenate([made.order, made.bounds])

        found = self._cache.get(f"epoch{epoch}", flat)
        return _Epoch(found[: len(self._pieces)], found[len(self._pieces) :])

    def _epoch(self, epoch: int) -> _Epoch:
        packed = self._epochs.pop(epoch, None)
        if packed is None:
            packed = self._packed(epoch)
            if len(self._epochs) == KEPT_EPOCHS:
                del self._epochs[next(iter(self._epochs))]
        self._epochs[epoch] = packed  # last in the dict: the least recently used one goes first
        return packed


def _missing() -> Ints:
    raise DataError("the cached order of the documents is gone from its folder; start the run again")


def _lengths(pieces: Ints) -> Ints:
    """Tokens of pieces [n, 3]."""
    return pieces[:, 2] - pieces[:, 1]


def split_documents(num_documents: int, weights: tuple[float, ...]) -> tuple[range, ...]:
    """Runs of documents in proportion to `weights`, rounded as Megatron rounds its splits."""
    total = sum(weights)
    if total <= 0 or min(weights) < 0:
        raise ConfigError(
            f"--split {','.join(f'{weight:g}' for weight in weights)}: weights must not be negative and not all zero"
        )
    bounds = [round(sum(weights[:i]) / total * num_documents) for i in range(len(weights) + 1)]
    return tuple(range(start, stop) for start, stop in pairwise(bounds))


# Samples in which shares are exact, to one sample.
PERIOD = 1 << 16


def shares(weights: Sequence[float], period: int = PERIOD) -> tuple[int, ...]:
    """Samples of each corpus in a period, in proportion to weights (largest remainder), at least one.

    Raises:
        ConfigError: a weight that is not positive and finite, or more corpora than samples.
    """
    wrong = [weight for weight in weights if not (math.isfinite(weight) and weight > 0)]
    if wrong or not weights:
        raise ConfigError(
            f"weights of a blend {list(weights)}: expected numbers above 0; leave a corpus of no weight out"
        )
    if len(weights) > period:
        raise ConfigError(f"a blend of {len(weights)} corpora: at most {period} are read")
    total = math.fsum(weights)
    # Every corpus has its one sample; the others are dealt in proportion to what is still missing.
    wanted = np.maximum(np.array([period * weight / total for weight in weights]) - 1, 0)
    if wanted.any():
        wanted *= (period - len(weights)) / wanted.sum()
    counts = np.floor(wanted).astype(np.int64)
    left = period - len(weights) - int(counts.sum())
    counts[np.argsort(counts - wanted, kind="stable")[:left]] += 1
    return tuple((counts + 1).tolist())


class Blend:
    """The endless sequence of (corpus, sample) of a blend."""

    def __init__(self, counts: Sequence[int]) -> None:
        """Spread `counts` samples of each corpus over a period of sum(counts)."""
        # The k-th of n samples stands at (k + 1/2) / n of the period; of two at one place the
        # earlier corpus's comes first.
        counted = np.array(counts, dtype=np.int64)
        corpora = np.repeat(np.arange(len(counts)), counted)
        place = np.arange(len(corpora)) - (np.cumsum(counted) - counted)[corpora]
        order = np.argsort((place + 0.5) / counted[corpora], kind="stable")
        self.counts: Ints = counted
        self._corpus, self._place = corpora[order], place[order]

    def locate(self, index: int) -> tuple[int, int]:
        """Corpus of sample `index`, and the number of the sample there."""
        if index < 0:
            raise IndexError(f"sample {index}: samples are numbered from 0")
        period, at = divmod(index, len(self._corpus))
        corpus = int(self._corpus[at])
        return corpus, period * int(self.counts[corpus]) + int(self._place[at])


log = logging.getLogger(__name__)
Array: TypeAlias = NDArray[Any]
# Of what the files hold.
VERSION = 2
# At a file's end: CRC-32 of all before it.
CHECKSUM_BYTES = 4


@dataclass(frozen=True, slots=True)
class OrderCache:
    """The files of one order: `folder`/`key`.NAME.npy."""

    folder: Path
    key: str

    @classmethod
    def of_corpus(cls, index: CorpusIndex, folder: str | os.PathLike[str] | None) -> OrderCache:
        """The cache of a corpus, in `folder` or beside it."""
        # Other files, or a newer index, have another one.
        index_status, tokens_status = idx_path(index.prefix).stat(), bin_path(index.prefix).stat()
        name = Path(index.prefix).name
        what = (VERSION, name, index_status.st_size, index_status.st_mtime_ns, tokens_status.st_size)
        return cls(Path(folder or Path(index.prefix).parent / "cache" / "balance"), repr(what))

    def under(self, *settings: object) -> OrderCache:
        """The files of that order which these settings decide, beside the corpus."""
        return OrderCache(self.folder, hashlib.sha256(f"{self.key} {settings!r}".encode()).hexdigest()[:16])

    def get(self, name: str, make: Callable[[], Array]) -> Array:
        """An array, mapped; computed by `make` and written first, where it is not there."""
        # Where the folder cannot be written, the log says so, and the array stays in this process.
        found = self._load(name)
        if found is not None:
            return found
        made: Array | None = None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with self._locked():
                found = self._load(name)  # another process may have been first
                if found is None:
                    made = make()
                    self._write(name, made)
                    found = self._load(name)
        except OSError as error:
            log.warning(
                "%s: cannot be written (%s), so every rank sorts the documents for itself; name a folder by "
                "--data-cache-path",
                self.folder,
                error.strerror,
            )
        if found is not None:
            return found
        return make() if made is None else made

    def _path(self, name: str) -> Path:
        return self.folder / f"{self.key}.{name}.npy"

    def _load(self, name: str) -> Array | None:
        path = self._path(name)
        try:
            data = np.memmap(path, np.uint8, mode="r")
            if zlib.crc32(data[:-CHECKSUM_BYTES]) != int.from_bytes(data[-CHECKSUM_BYTES:].tobytes(), "little"):
                raise ValueError("it is damaged: its checksum is another")
            return np.load(path, mmap_mode="r", allow_pickle=False)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, EOFError) as error:
            log.warning("%s: cannot be read (%s); it is computed again", path, error)
            return None

    def _write(self, name: str, array: Array) -> None:
        """Write a file that appears under its name when it is whole."""
        descriptor, temporary = tempfile.mkstemp(dir=self.folder, prefix=f".{self.key}.", suffix=".npy")
        try:
            with os.fdopen(descriptor, "wb") as stream:
                np.save(stream, array, allow_pickle=False)
                stream.flush()
                checksum = zlib.crc32(np.memmap(temporary, np.uint8, mode="r"))
                stream.write(checksum.to_bytes(CHECKSUM_BYTES, "little"))
            Path(temporary).chmod(0o644)
            Path(temporary).replace(self._path(name))
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise

    @contextlib.contextmanager
    def _locked(self) -> Generator[None]:
        """Hold the lock of this order; the system frees that of a process that died."""
        with (self.folder / f"{self.key}.lock").open("a") as stream:
            # A file system without locks: processes may compute a thing twice, and write the same.
            with contextlib.suppress(OSError):
                fcntl.flock(stream, fcntl.LOCK_EX)
            yield


@dataclass(frozen=True, slots=True)
class Corpus:
    """A corpus, and where the orders of its documents are kept; None: in memory."""

    index: CorpusIndex
    cache: OrderCache | None = None
