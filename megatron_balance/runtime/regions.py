"""Regions to rows: where in a rank's buffers the tokens and heads of a region lie. NumPy, once per microbatch.

A rank holds *instances*: regions that lie as consecutive rows in one buffer (its own fragments in buffer 0, each received
message in a buffer of its own). `Table.resolve` turns regions into *pieces*, runs of rows of one buffer.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megatron_balance.errors import InvalidProgramError
from megatron_balance.ir.arrays import Ints, run_bounds
from megatron_balance.ir.intervals import key, key_bounds, ranges

REGION, ROW, COUNT, HEAD, NUM_HEADS, BUFFER, BUFFER_ROW, BUFFER_HEAD = range(8)


class Table:
    """The instances of one kind on one rank, as rows (seq, start, stop, head_start, head_stop, buffer, first row)."""

    def __init__(self, instances: Ints) -> None:
        order = np.argsort(key(instances[:, 0], instances[:, 1]), kind="stable")
        self.columns = instances.T[:, order]
        self.start = key(self.columns[0], self.columns[1])
        self.stop = key(self.columns[0], self.columns[2])
        self.disjoint = bool((self.stop[:-1] <= self.start[1:]).all())

    def resolve(self, regions: Ints) -> Ints:
        """Pieces [8, m] of regions [5, n]: (region, row in it, count, head in it, heads, buffer, buffer row, buffer head) of each.

        Raises InvalidProgramError: part of a region is not held.
        """
        seq, start, stop, head_start, head_stop = regions
        begin, end = key(seq, start), key(seq, stop)
        if not self.disjoint or not len(self.start):
            return self._resolve_overlapping(regions, begin, end)
        first = self.start.searchsorted(begin, side="right") - 1
        whole = (end <= self.stop[first]).all()  # each lies in one instance, which is the rule
        region, found = (np.arange(len(first)), first) if whole else ranges(first, self.start.searchsorted(end, side="left"))
        _, _, _, held_start, held_stop, buffer, row = self.columns[:, found]
        began, wanted_begin, wanted_end = self.start[found], begin, end
        if not whole:
            wanted_begin, wanted_end, head_start, head_stop = begin[region], end[region], head_start[region], head_stop[region]
        low, high = np.maximum(wanted_begin, began), np.minimum(wanted_end, self.stop[found])
        count = high - low
        if not (
            (first >= 0).all()
            and (count > 0).all()
            and count.sum() == (end - begin).sum()
            and (held_start <= head_start).all()
            and (held_stop >= head_stop).all()
        ):
            return self._resolve_overlapping(regions, begin, end)
        pieces = np.empty((8, len(region)), dtype=np.int64)
        pieces[REGION], pieces[ROW], pieces[COUNT], pieces[HEAD] = region, low - wanted_begin, count, 0
        pieces[NUM_HEADS], pieces[BUFFER] = head_stop - head_start, buffer
        pieces[BUFFER_ROW], pieces[BUFFER_HEAD] = row + low - began, head_start - held_start
        return pieces

    def _resolve_overlapping(self, regions: Ints, begin: Ints, end: Ints) -> Ints:
        """The same for instances that share tokens (other heads of the same tokens, say): region by region."""
        pieces: list[tuple[int, ...]] = []
        for index, (region, low, high) in enumerate(zip(regions.T.tolist(), begin.tolist(), end.tolist(), strict=True)):
            missing = [(low, high, region[3], region[4])]
            for at in np.flatnonzero((self.start < high) & (self.stop > low)).tolist():
                _, _, _, head_start, head_stop, buffer, row = self.columns[:, at].tolist()
                left: list[tuple[int, int, int, int]] = []
                for a, b, c, d in missing:
                    x, y = max(a, int(self.start[at])), min(b, int(self.stop[at]))
                    u, v = max(c, head_start), min(d, head_stop)
                    if x >= y or u >= v:
                        left.append((a, b, c, d))
                        continue
                    pieces.append((index, x - low, y - x, u - region[3], v - u, buffer, row + x - int(self.start[at]), u - head_start))
                    left += [(a, x, c, d), (y, b, c, d), (x, y, c, u), (x, y, v, d)]
                missing = [m for m in left if m[0] < m[1] and m[2] < m[3]]
            if missing:
                raise InvalidProgramError(
                    f"a rank does not hold all of s{region[0]}[{region[1]}:{region[2]}) heads [{region[3]}:{region[4]})"
                )
        table = np.array(pieces, dtype=np.int64).reshape(-1, 8)
        return table[np.lexsort((table[:, HEAD], table[:, ROW], table[:, REGION]))].T


def without(instances: Ints, regions: Ints) -> Ints:
    """Instances (see `Table`) without overlap, less the tokens of `regions` [m, 3], rows (seq, start, stop)."""
    if not len(regions):
        return instances
    order = np.argsort(key(regions[:, 0], regions[:, 1]))
    begin, end = key_bounds(regions[order])
    end = np.maximum.accumulate(end)
    begin[1:] = np.maximum(begin[1:], end[:-1])
    start, stop = key_bounds(instances)
    gap_start, gap_stop = np.append(-1, end), np.append(begin, np.iinfo(np.int64).max)  # between the regions
    row, gap = ranges(np.searchsorted(gap_stop, start, side="right"), np.searchsorted(gap_start, stop, side="left"))
    low, high = np.maximum(start[row], gap_start[gap]), np.minimum(stop[row], gap_stop[gap])
    left = instances[row]
    left[:, 1] += low - start[row]
    left[:, 2] -= stop[row] - high
    left[:, 6] += low - start[row]
    return left[low < high]


class Run(NamedTuple):
    """Consecutive rows [row, row + count) of a packed tensor <-> rows of `buffer`.

    `start` to `stop` are the buffer's rows if they are consecutive, else `index` lists them. Heads [head, head + num_heads)
    of the packed rows are heads [buffer_head, buffer_head + num_heads) of the buffer.
    """

    row: int
    count: int
    buffer: int
    start: int
    stop: int
    index: Ints | None
    head: int
    num_heads: int
    buffer_head: int


def grouped_runs(sizes: Ints, pieces: Ints, owner: Ints, num_owners: int, *, distinct: bool = False) -> list[tuple[Run, ...]]:
    """For each owner, the pieces [8, m] of its regions packed one after the other, joined into as few runs as possible.

    `sizes`, `owner` [n]: tokens of each region, and whose it is, ascending. `distinct`: no run names a row twice (for writing: partials
    of one query from several entries of a launch).
    """
    found: list[list[Run]] = [[] for _ in range(num_owners)]
    if not pieces.shape[1]:
        return [tuple(f) for f in found]
    offsets = sizes.cumsum() - sizes
    region, count, begin = pieces[REGION], pieces[COUNT], pieces[BUFFER_ROW]
    whose = owner[region]
    base = offsets[np.minimum(owner.searchsorted(np.arange(num_owners)), len(sizes) - 1)]
    row = offsets[region] + pieces[ROW] - base[whose]
    behind = begin[1:] == begin[:-1] + count[:-1]
    same = (whose[1:] == whose[:-1]) & (row[1:] == row[:-1] + count[:-1])
    for column in (BUFFER, HEAD, NUM_HEADS, BUFFER_HEAD):
        same &= pieces[column, 1:] == pieces[column, :-1]
    bounds = run_bounds(~same, len(row))
    begins, ends = bounds[:-1], bounds[1:]
    gaps = np.zeros(len(row), dtype=np.int64)
    np.cumsum(~behind, out=gaps[1:])
    consecutive = gaps[ends - 1] == gaps[begins]
    counts = np.add.reduceat(count, begins)
    columns = (whose, row, pieces[BUFFER], begin, pieces[HEAD], pieces[NUM_HEADS], pieces[BUFFER_HEAD])
    of_runs = zip(*(column[begins].tolist() for column in columns), counts.tolist(), consecutive.tolist(), strict=True)
    for at, (who, first, buffer, start, head, num_heads, buffer_head, total, together) in enumerate(of_runs):
        index = None
        if not together:
            a, b = int(begins[at]), int(ends[at])
            if distinct and _repeats(begin[a:b], count[a:b]):
                for rows in zip(row[a:b].tolist(), count[a:b].tolist(), begin[a:b].tolist(), strict=True):
                    one, many, lies = rows
                    found[who].append(Run(one, many, buffer, lies, lies + many, None, head, num_heads, buffer_head))
                continue
            index = ranges(begin[a:b], begin[a:b] + count[a:b])[1]
        found[who].append(Run(first, total, buffer, start, start + total, index, head, num_heads, buffer_head))
    return [tuple(f) for f in found]


def _repeats(begin: Ints, count: Ints) -> bool:
    """Whether two of the ranges [begin, begin + count) share anything."""
    order = np.argsort(begin)
    stop = begin[order] + count[order]
    return bool((begin[order[1:]] < stop[:-1]).any())
