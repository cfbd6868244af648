"""Regions to rows: where in a rank's buffers the tokens and heads of a region lie. NumPy, once per microbatch.

A rank holds *instances*: regions that lie as consecutive rows in one buffer (its own fragments in buffer 0, each received
message in a buffer of its own). `Table.resolve` turns regions into *pieces*, runs of rows of one buffer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_balance.errors import InvalidProgramError
from megatron_balance.passes.atoms import ranges
from megatron_balance.passes.tables import Ints, run_bounds

_SHIFT = 40
REGION, ROW, COUNT, HEAD, NUM_HEADS, BUFFER, BUFFER_ROW, BUFFER_HEAD = range(8)


class Table:
    """The instances of one kind on one rank, as rows (seq, start, stop, head_start, head_stop, buffer, first row)."""

    def __init__(self, instances: Ints) -> None:
        order = np.argsort((instances[:, 0] << _SHIFT) | instances[:, 1], kind="stable")
        self.rows = instances[order]
        self.start = (self.rows[:, 0] << _SHIFT) | self.rows[:, 1]
        self.stop = (self.rows[:, 0] << _SHIFT) | self.rows[:, 2]
        self.disjoint = bool((self.stop[:-1] <= self.start[1:]).all())

    def resolve(self, regions: Ints) -> Ints:
        """Pieces of regions [n, 5]: rows (region, row in it, count, head in it, heads, buffer, buffer row, buffer head).

        Raises InvalidProgramError: part of a region is not held.
        """
        begin = (regions[:, 0] << _SHIFT) | regions[:, 1]
        end = (regions[:, 0] << _SHIFT) | regions[:, 2]
        if not self.disjoint or not len(self.rows):
            return self._resolve_overlapping(regions, begin, end)
        first = np.searchsorted(self.start, begin, side="right") - 1
        region, found = ranges(first, np.searchsorted(self.start, end, side="left"))
        low = np.maximum(begin[region], self.start[found])
        high = np.minimum(end[region], self.stop[found])
        held, wanted = self.rows[found], regions[region]
        pieces = np.empty((len(region), 8), dtype=np.int64)
        pieces[:, REGION] = region
        pieces[:, ROW] = low - begin[region]
        pieces[:, COUNT] = high - low
        pieces[:, HEAD] = 0
        pieces[:, NUM_HEADS] = wanted[:, 4] - wanted[:, 3]
        pieces[:, BUFFER] = held[:, 5]
        pieces[:, BUFFER_ROW] = held[:, 6] + low - self.start[found]
        pieces[:, BUFFER_HEAD] = wanted[:, 3] - held[:, 3]
        whole = int(np.maximum(pieces[:, COUNT], 0).sum()) == int((end - begin).sum()) and (pieces[:, COUNT] > 0).all()
        if not (whole and (found >= 0).all() and (held[:, 3] <= wanted[:, 3]).all() and (held[:, 4] >= wanted[:, 4]).all()):
            return self._resolve_overlapping(regions, begin, end)
        return pieces

    def _resolve_overlapping(self, regions: Ints, begin: Ints, end: Ints) -> Ints:
        """The same for instances that share tokens (other heads of the same tokens, say): region by region."""
        pieces: list[tuple[int, ...]] = []
        for index, (region, low, high) in enumerate(zip(regions.tolist(), begin.tolist(), end.tolist(), strict=True)):
            missing = [(low, high, region[3], region[4])]
            for at in np.flatnonzero((self.start < high) & (self.stop > low)).tolist():
                _, _, _, head_start, head_stop, buffer, row = self.rows[at].tolist()
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
        return table[np.lexsort((table[:, HEAD], table[:, ROW], table[:, REGION]))]


def without(instances: Ints, regions: Ints) -> Ints:
    """Instances (see `Table`) without overlap, less the tokens of `regions` [m, 3], rows (seq, start, stop)."""
    if not len(regions):
        return instances
    order = np.argsort((regions[:, 0] << _SHIFT) | regions[:, 1])
    begin, end = ((regions[order, 0] << _SHIFT) | regions[order, column] for column in (1, 2))
    end = np.maximum.accumulate(end)
    begin[1:] = np.maximum(begin[1:], end[:-1])
    start, stop = ((instances[:, 0] << _SHIFT) | instances[:, column] for column in (1, 2))
    gap_start, gap_stop = np.append(-1, end), np.append(begin, np.iinfo(np.int64).max)  # between the regions
    row, gap = ranges(np.searchsorted(gap_stop, start, side="right"), np.searchsorted(gap_start, stop, side="left"))
    low, high = np.maximum(start[row], gap_start[gap]), np.minimum(stop[row], gap_stop[gap])
    left = instances[row]
    left[:, 1] += low - start[row]
    left[:, 2] -= stop[row] - high
    left[:, 6] += low - start[row]
    return left[low < high]


@dataclass(frozen=True, slots=True)
class Run:
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


def grouped_runs(regions: Ints, pieces: Ints, owner: Ints, num_owners: int, *, distinct: bool = False) -> list[tuple[Run, ...]]:
    """For each owner, the pieces of its regions packed one after the other, joined into as few runs as possible.

    `owner` [n], ascending: whose each region is. `distinct`: no run names a row twice (for writing: partials of one query from
    several entries of a launch).
    """
    found: list[list[Run]] = [[] for _ in range(num_owners)]
    if not len(pieces):
        return [tuple(f) for f in found]
    sizes = regions[:, 2] - regions[:, 1]
    offsets = np.cumsum(sizes) - sizes
    whose = owner[pieces[:, REGION]]
    base = offsets[np.minimum(np.searchsorted(owner, np.arange(num_owners)), len(regions) - 1)]
    row = offsets[pieces[:, REGION]] + pieces[:, ROW] - base[whose]
    behind = pieces[1:, BUFFER_ROW] == pieces[:-1, BUFFER_ROW] + pieces[:-1, COUNT]
    same = (whose[1:] == whose[:-1]) & (row[1:] == row[:-1] + pieces[:-1, COUNT])
    for column in (BUFFER, HEAD, NUM_HEADS, BUFFER_HEAD):
        same &= pieces[1:, column] == pieces[:-1, column]
    bounds = run_bounds(~same, len(pieces))
    begins, ends = bounds[:-1], bounds[1:]
    gaps = np.zeros(len(pieces), dtype=np.int64)
    np.cumsum(~behind, out=gaps[1:])
    consecutive = (gaps[ends - 1] == gaps[begins]).tolist()
    counts = np.add.reduceat(pieces[:, COUNT], begins).tolist()
    columns = pieces[begins][:, [BUFFER, BUFFER_ROW, HEAD, NUM_HEADS, BUFFER_HEAD]].tolist()
    for at, (a, b) in enumerate(zip(begins.tolist(), ends.tolist(), strict=True)):
        buffer, start, head, num_heads, buffer_head = columns[at]
        if consecutive[at]:
            found[whose[a]].append(Run(int(row[a]), counts[at], buffer, start, start + counts[at], None, head, num_heads, buffer_head))
            continue
        index = ranges(pieces[a:b, BUFFER_ROW], pieces[a:b, BUFFER_ROW] + pieces[a:b, COUNT])[1]
        if distinct and not (index[1:] > index[:-1]).all() and len(set(index.tolist())) < len(index):
            for one in range(a, b):
                begin, count = int(pieces[one, BUFFER_ROW]), int(pieces[one, COUNT])
                found[whose[a]].append(Run(int(row[one]), count, buffer, begin, begin + count, None, head, num_heads, buffer_head))
            continue
        found[whose[a]].append(Run(int(row[a]), counts[at], buffer, start, start + counts[at], index, head, num_heads, buffer_head))
    return [tuple(f) for f in found]
