"""`Rows` as NumPy arrays and back, without a copy on the way in."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias, overload

import numpy as np
from numpy.typing import NDArray

from megatron_balance.ir.columns import Fragment, Pair, Rows
from megatron_balance.ir.forest import Forest
from megatron_balance.ir.mask import CAUSAL, Band, Mask

Ints: TypeAlias = NDArray[np.int64]
Bools: TypeAlias = NDArray[np.bool_]
Floats: TypeAlias = NDArray[np.float64]


def as_array(rows: Rows) -> Ints:
    """The table as a read-only int64 array [len(rows), rows.width]."""
    return np.frombuffer(rows.data, dtype="<i8").reshape(-1, rows.width)


def as_rows(table: Ints) -> Rows:
    return Rows(table.shape[1], np.ascontiguousarray(table, dtype="<i8").tobytes())


def run_starts(changes: Bools, length: int) -> Bools:
    """Where runs of equal elements begin: bool [length]. `changes` [length - 1]: from the last."""
    starts = np.ones(length, dtype=bool)
    starts[1:] = changes
    return starts


def run_bounds(changes: Bools, length: int) -> Ints:
    """Indices where runs of equal elements begin, and `length`: int64 [runs + 1]."""
    # `changes` as in `run_starts`. Without any element the bounds are [0].
    mask = np.ones(length + 1, dtype=bool)
    mask[1:length] = changes
    return np.flatnonzero(mask)


def concat(tables: list[Rows], width: int) -> Ints:
    """All rows of `tables` below one another, [sum of lengths, width]."""
    return np.frombuffer(b"".join(t.data for t in tables), dtype="<i8").reshape(-1, width)


def numbered(tables: Sequence[tuple[int, Rows]], width: int) -> tuple[Ints, Ints]:
    """All rows of numbered tables below one another [n, width], and the number of each row."""
    numbers, counts = np.array([(at, len(rows)) for at, rows in tables], dtype=np.int64).reshape(-1, 2).T
    return concat([rows for _, rows in tables], width), np.repeat(numbers, counts)


def sums(index: Ints, amounts: Ints, size: int) -> Ints:
    """The sum of the amounts of each index in [0, size): int64 [size]."""
    totals = np.zeros(size, dtype=np.int64)
    np.add.at(totals, index, amounts)
    return totals


# Arithmetic on token intervals of many sequences at once: overlaps, unions, atoms.
#
# A token is one integer, `key(seq, position)`: keys ascend by sequence, then by position, so one
# sorted array serves the intervals of all sequences. No other module packs sequences and positions.

# Positions of a sequence are below 2 ** POSITION_BITS.
POSITION_BITS = 40

_POSITION = (1 << POSITION_BITS) - 1

_DENSE = 8  # a table with one entry per token is made where there are at most this many tokens a region


@overload
def key(seq: Ints, position: Ints | int) -> Ints: ...


@overload
def key(seq: int, position: int) -> int: ...


def key(seq: Ints | int, position: Ints | int) -> Ints | int:
    """One integer for each token; ascends by sequence, then by position."""
    return (seq << POSITION_BITS) | position


def key_seq(keys: Ints) -> Ints:
    return keys >> POSITION_BITS


def key_position(keys: Ints) -> Ints:
    return keys & _POSITION


def key_bounds(fragments: Ints) -> tuple[Ints, Ints]:
    """Keys of the start and the stop of each row (seq, start, stop, ...)."""
    seq = fragments[:, Fragment.SEQ] << POSITION_BITS
    return seq | fragments[:, Fragment.START], seq | fragments[:, Fragment.STOP]


def ranges(start: Ints, stop: Ints) -> tuple[Ints, Ints]:
    """(row, value) of every value of every half-open range [start[row], stop[row]), row by row."""
    counts = np.maximum(stop - start, 0)
    row = np.repeat(np.arange(len(counts)), counts)
    offset = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    return row, start[row] + offset


def laid(lengths: Ints, bounds: Ints) -> Ints:
    """Items of these lengths laid end to end and cut at `bounds`, which rise from 0 to the sum: rows
    (part, item, start, stop) in order, part i from bounds[i] to bounds[i + 1].
    """
    ends = np.cumsum(lengths)
    cuts = np.unique(np.concatenate([bounds, ends]))
    begin, end = cuts[:-1], cuts[1:]
    item = np.searchsorted(ends, begin, side="right")
    part = np.searchsorted(bounds, begin, side="right") - 1
    before = (ends - lengths)[item]
    return np.column_stack([part, item, begin - before, end - before])


def overlap_bounds(wanted: Ints, held: Ints) -> tuple[Ints, Ints]:
    """First and one past the last row of `held` that shares a token with each row of `wanted`.

    Both have rows (seq, start, stop, ...); those of `held` ascend by (seq, start).
    """
    # If rows of `held` overlap one another, some rows between the bounds may share nothing; empty
    # rows of `wanted` share nothing.
    return _overlap_bounds(*key_bounds(wanted), *key_bounds(held))


def _overlap_bounds(begin: Ints, end: Ints, start: Ints, stop: Ints) -> tuple[Ints, Ints]:
    # `overlap_bounds` of intervals of keys: [begin, end) wanted, [start, stop) held.
    # No later row meets a row that ends before it begins: the furthest end so far bounds the search
    # from below.
    first = np.searchsorted(np.maximum.accumulate(stop), begin, side="right")
    last = np.searchsorted(start, end, side="left")
    return first, np.where(begin < end, last, 0)


def overlaps(wanted: Ints, held: Ints) -> tuple[Ints, Ints]:
    """(row of `wanted`, row of `held`) of every pair that shares a token, by row of `wanted`.

    Both: (seq, start, stop, ...), in any order; rows of `held` are not empty, and may overlap.
    """
    begin, end = key_bounds(wanted)
    start, stop = key_bounds(held)
    order = np.argsort(start, kind="stable")
    start, stop = start[order], stop[order]
    row, place = ranges(*_overlap_bounds(begin, end, start, stop))
    meet = stop[place] > begin[row]
    return row[meet], order[place[meet]]


def union(intervals: Ints) -> Ints:
    """Disjoint intervals over the same tokens, ascending; touching ones are joined, no empty ones."""
    # Rows (..., start, stop): what precedes the last two columns is the group (a sequence; a rank
    # and a sequence) within which intervals are joined.
    rows = intervals[intervals[:, -2] < intervals[:, -1]]
    rows = rows[np.lexsort(rows[:, -2::-1].T)]
    fresh = run_starts((rows[1:, :-2] != rows[:-1, :-2]).any(axis=1), len(rows))
    reach = np.maximum.accumulate(key(np.cumsum(fresh), rows[:, -1]))  # the group, then the furthest end so far in it
    fresh[1:] |= rows[1:, -2] > key_position(reach[:-1])
    first = np.flatnonzero(fresh)
    joined = rows[first]
    joined[:, -1] = key_position(reach[np.append(first[1:], len(rows)) - 1]) if len(rows) else joined[:, -1]
    return joined


def held_twice(fragments: Ints) -> Ints:
    """Tokens that two or more of `fragments` hold: rows (seq, start, stop), ascending and disjoint."""
    boundary = np.concatenate(key_bounds(fragments))
    order = np.argsort(boundary, kind="stable")
    boundary, depth = boundary[order], np.cumsum(np.repeat([1, -1], len(fragments))[order])
    first = np.flatnonzero(depth[:-1] >= 2)
    start, stop = boundary[first], boundary[first + 1]
    return union(np.column_stack([key_seq(start), key_position(start), key_position(stop)]))


def _ascending(values: Ints) -> Ints:
    # The distinct values, ascending (sorting is several times faster here than NumPy's hashing
    # `unique`).
    values = np.sort(values)
    return values[run_starts(values[1:] != values[:-1], len(values))]


@dataclass(frozen=True, slots=True)
class Atoms:
    """Elementary token runs and head runs of a set of regions: regions cut at every boundary that
    occurs.

    Atoms are equal or disjoint, so sets of tokens become sets of integers. `cuts`: sorted keys of
    every boundary; token atom i runs from cuts[i] to cuts[i + 1]. `heads`: sorted head boundaries;
    head atom i runs from heads[i] to heads[i + 1].
    """

    cuts: Ints
    heads: Ints
    table: tuple[Ints, Ints] | None = None
    """To look boundaries up instead of searching: where each sequence begins, and the atom that
    begins there or next."""

    @classmethod
    def of(cls, seq: Ints, start: Ints, stop: Ints, heads: Ints) -> "Atoms":
        """Atoms of regions with these (concatenated) columns; `heads` holds every head boundary."""
        longest = np.zeros(int(seq.max()) + 1 if len(seq) else 0, dtype=np.int64)
        np.maximum.at(longest, seq, stop)
        ends = np.cumsum(longest + 1)
        if not len(seq) or ends[-1] > _DENSE * len(seq):
            return cls(_ascending(np.concatenate([key(seq, start), key(seq, stop)])), _ascending(heads))
        first = ends - longest - 1
        marks = np.zeros(int(ends[-1]), dtype=bool)
        marks[first[seq] + start] = marks[first[seq] + stop] = True
        place = np.flatnonzero(marks)
        owner = np.searchsorted(first, place, side="right") - 1
        return cls(key(owner, place - first[owner]), _ascending(heads), (first, np.cumsum(marks) - marks))

    @property
    def num_token_atoms(self) -> int:
        return len(self.cuts)

    @property
    def num_head_atoms(self) -> int:
        return max(len(self.heads) - 1, 1)

    def tokens(self, seq: Ints, start: Ints, stop: Ints) -> tuple[Ints, Ints]:
        """First and one past the last token atom of each region."""
        if self.table is not None:
            first, atom = self.table
            return atom[first[seq] + start], atom[first[seq] + stop]
        return np.searchsorted(self.cuts, key(seq, start)), np.searchsorted(self.cuts, key(seq, stop))

    def head_range(self, start: Ints, stop: Ints) -> tuple[Ints, Ints]:
        """First and one past the last head atom of each region."""
        return np.searchsorted(self.heads, start), np.searchsorted(self.heads, stop)

    def seq(self, token_atom: Ints) -> Ints:
        return key_seq(self.cuts[token_atom])

    def start(self, token_atom: Ints) -> Ints:
        return key_position(self.cuts[token_atom])

    def stop(self, token_atom: Ints) -> Ints:
        return key_position(self.cuts[token_atom + 1])

    def expand(self, seq: Ints, start: Ints, stop: Ints, head_start: Ints, head_stop: Ints) -> tuple[Ints, Ints]:
        """(row, atom) of every region's atoms; an atom is token atom * num_head_atoms + head atom."""
        row, token = ranges(*self.tokens(seq, start, stop))
        if self.num_head_atoms == 1:
            return row, token
        first, last = self.head_range(head_start, head_stop)
        again, head = ranges(first[row], last[row])
        return row[again], token[again] * self.num_head_atoms + head

    def at(self, seq: Ints, position: Ints) -> Ints:
        """The token atom that each position lies in."""
        return np.searchsorted(self.cuts, key(seq, position), side="right") - 1

    def regions(self, group: Ints, atom: Ints) -> tuple[Ints, Ints]:
        """Join atoms, unique in each group, into the fewest regions: (group [n], `Region` rows)."""
        token, head = np.divmod(atom, self.num_head_atoms)
        # Along tokens first, per head atom; then along heads where the token runs are the same.
        order = np.argsort((group * self.num_head_atoms + head) * (self.num_token_atoms + 1) + token, kind="stable")
        group, token, head = group[order], token[order], head[order]
        seq = self.seq(token)
        changes = (
            (group[1:] != group[:-1]) | (head[1:] != head[:-1]) | (token[1:] != token[:-1] + 1) | (seq[1:] != seq[:-1])
        )
        bounds = run_bounds(changes, len(token))
        begin, end = bounds[:-1], bounds[1:] - 1
        group, first, last, head = group[begin], token[begin], token[end], head[begin]
        head_last = head
        if self.num_head_atoms > 1:
            order = np.lexsort((head, last, first, group))
            group, first, last, head = group[order], first[order], last[order], head[order]
            changes = (
                (group[1:] != group[:-1])
                | (first[1:] != first[:-1])
                | (last[1:] != last[:-1])
                | (head[1:] != head[:-1] + 1)
            )
            bounds = run_bounds(changes, len(head))
            begin, end = bounds[:-1], bounds[1:] - 1
            group, first, last, head, head_last = group[begin], first[begin], last[begin], head[begin], head[end]
        rows = np.stack(
            [self.seq(first), self.start(first), self.stop(last), self.heads[head], self.heads[head_last + 1]], 1
        )
        return group, rows


class Rectangles(NamedTuple):
    """Queries [q_start, q_stop) by keys [k_start, k_stop), one of each for a row: int64 [n] each."""

    q_start: Ints
    q_stop: Ints
    k_start: Ints
    k_stop: Ints

    @property
    def some(self) -> Bools:
        """Whether there are queries and keys."""
        return (self.q_start < self.q_stop) & (self.k_start < self.k_stop)

    # How all that read a program's rows read them, kernels included.
    def trimmed(self, band: Band) -> "Rectangles":
        """Without queries that see none of the keys, and keys that none of the queries sees; where
        that is all, both starts lie at or behind their stops.
        """
        q_start, q_stop, k_start, k_stop = self
        return Rectangles(
            np.where(band.causal, np.maximum(q_start, k_start), q_start),
            np.minimum(q_stop, k_stop - 1 + band.reach),
            np.maximum(k_start, q_start - band.reach + 1),
            np.where(band.causal, np.minimum(k_stop, q_stop), k_stop),
        )

    def num_pairs(self, band: Band) -> Ints:
        """Pairs that count: of all, or of those up to the diagonal, those that no window hides."""
        q_start, q_stop, k_start, k_stop = self
        hidden = _up_to_diagonal(q_start - band.reach, q_stop - band.reach, k_start, k_stop) if band.windowed else 0
        every = np.maximum(q_stop - q_start, 0) * np.maximum(k_stop - k_start, 0)
        return np.where(band.causal, _up_to_diagonal(*self), every) - hidden


def _up_to_diagonal(q_start: Ints, q_stop: Ints, k_start: Ints, k_stop: Ints) -> Ints:
    def seen(edge: Ints) -> Ints:
        # Of keys from `edge` on, by the queries before `q_stop` less those before `q_start`.
        return CAUSAL.num_pairs(np.maximum(q_stop - edge, 0)) - CAUSAL.num_pairs(np.maximum(q_start - edge, 0))

    return seen(k_start) - seen(k_stop)


def _trim(seq: Ints, rectangles: Rectangles, mask: Mask) -> Rectangles:
    """Each rectangle without what the mask hides at its sides (`Rectangles.trimmed`)."""
    return rectangles.trimmed(mask.band(seq, rectangles.q_start, rectangles.k_start))


def keys_of(seq: Ints, start: Ints, stop: Ints, mask: Mask) -> tuple[Ints, Ints]:
    """The keys [first, stop) among which all are that the queries [start, stop) see."""
    # From the root on where a window is on paths: those of later branches may go far back.
    first = np.zeros_like(start) if isinstance(mask, Forest) else mask.keys(seq, start)[0]
    return first, mask.keys(seq, stop - 1)[1]


def split(seq: Ints, rectangles: Rectangles, mask: Mask) -> tuple[Ints, Rectangles]:
    """Cells of each rectangle: all that the mask shows of it and nothing else is in them, and each is
    what one kernel entry computes. Also the row [m] that each is of, ascending.
    """
    row = np.arange(len(seq))
    if isinstance(mask, Forest):
        row, rectangles = mask.segments.parts(seq, rectangles)
    shown = _trim(seq[row], rectangles, mask)
    return row[shown.some], Rectangles(*(side[shown.some] for side in shown))


def split_rows(rows: Ints, seq: int, spans: Sequence[int], mask: Mask) -> Ints:
    """Rows of a table, each as those of its cells; `seq` and `spans`: the columns of the sequence and
    of `Rectangles`.
    """
    row, cells = split(rows[:, seq], Rectangles(*rows[:, spans].T), mask)
    rows = rows[row]
    for column, values in zip(spans, cells, strict=True):
        rows[:, column] = values
    return rows


def trim_pairs(pairs: Ints, mask: Mask) -> Ints:
    """`Pair` rows, each trimmed to what the mask shows of it."""
    trimmed = pairs.copy()
    shown = _trim(pairs[:, Pair.SEQ], Rectangles(*pairs[:, Pair.SPANS].T), mask)
    for column, values in zip(Pair.SPANS, shown, strict=True):
        trimmed[:, column] = values
    return trimmed


def sees(pairs: Ints, mask: Mask) -> Bools:
    """Whether any query of each `Pair` row sees any of its keys."""
    return _trim(pairs[:, Pair.SEQ], Rectangles(*pairs[:, Pair.SPANS].T), mask).some


def num_pairs(seq: Ints, rectangles: Rectangles, mask: Mask) -> Ints:
    """Visible (query, key) pairs of each rectangle."""
    if isinstance(mask, Forest):
        row, cells = split(seq, rectangles, mask)
        return sums(row, cells.num_pairs(mask.band(seq[row], cells.q_start, cells.k_start)), len(seq))
    return rectangles.num_pairs(mask.band(seq, rectangles.q_start, rectangles.k_start))
