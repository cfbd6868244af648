"""Regions to rows: where in a rank's buffers the tokens and heads of a region lie. NumPy, once per
microbatch.

A rank holds *instances*: regions that lie as consecutive rows in one buffer (its own fragments in
buffer 0, each received message in a buffer of its own). `RegionIndex.resolve` turns regions into
*row ranges*, each in one buffer; `grouped_runs` joins those into the runs that are copied.

Tables here are transposed, a column of the table a row of the array: [columns, n].
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch

from megatron_balance.errors import InvalidProgramError
from megatron_balance.ir.arrays import Ints, key, key_bounds, ranges, run_bounds
from megatron_balance.ir.program import Kind
from megatron_balance.runtime.lower.steps import INPUTS, Packed, RowRun


class Instance:
    """Columns of a region that lies in one buffer, from its row `ROW` on."""

    WIDTH = 7
    SEQ, START, STOP, HEAD_START, HEAD_STOP, BUFFER, ROW = range(7)
    REGION = slice(0, 5)


class RowRange:
    """Columns of a part of a region that lies as consecutive rows in one buffer: rows [ROW, ROW +
    COUNT) and heads [HEAD, HEAD + NUM_HEADS) of region `REGION` are those from `BUFFER_ROW` and
    `BUFFER_HEAD` on of `BUFFER`.
    """

    WIDTH = 8
    REGION, ROW, COUNT, HEAD, NUM_HEADS, BUFFER, BUFFER_ROW, BUFFER_HEAD = range(8)


class RegionIndex:
    """The instances [n, `Instance.WIDTH`] of one kind of input on one rank, sorted to be searched."""

    def __init__(self, instances: Ints) -> None:
        order = np.argsort(key(instances[:, Instance.SEQ], instances[:, Instance.START]), kind="stable")
        self.columns = instances.T[:, order]
        self.start, self.stop = key_bounds(self.columns.T)
        self.disjoint = bool((self.stop[:-1] <= self.start[1:]).all())

    def resolve(self, regions: Ints) -> Ints:
        """Row ranges [`RowRange.WIDTH`, m] of regions [5, n]. InvalidProgramError: one is not held."""
        seq, start, stop, head_start, head_stop = regions
        begin, end = key(seq, start), key(seq, stop)
        if not self.disjoint or not len(self.start):
            return self._resolve_overlapping(regions, begin, end)
        # [n]: the last instance that begins at or before each region; -1: none does.
        first = self.start.searchsorted(begin, side="right") - 1
        whole = (end <= self.stop[first]).all()  # each lies in one instance, which is the rule
        region, instance = (
            (np.arange(len(first)), first) if whole else ranges(first, self.start.searchsorted(end, side="left"))
        )
        _, _, _, held_start, held_stop, buffer, row = self.columns[:, instance]
        began, wanted_begin, wanted_end = self.start[instance], begin, end
        if not whole:
            wanted_begin, wanted_end, head_start, head_stop = (
                begin[region],
                end[region],
                head_start[region],
                head_stop[region],
            )
        # Keys hold sequence and token in one number, so their differences are tokens.
        low, high = np.maximum(wanted_begin, began), np.minimum(wanted_end, self.stop[instance])
        count = high - low
        if not (
            (first >= 0).all()
            and (count > 0).all()
            and count.sum() == (end - begin).sum()
            and (held_start <= head_start).all()
            and (held_stop >= head_stop).all()
        ):
            return self._resolve_overlapping(regions, begin, end)
        row_ranges = np.empty((RowRange.WIDTH, len(region)), dtype=np.int64)
        row_ranges[RowRange.REGION], row_ranges[RowRange.ROW] = region, low - wanted_begin
        row_ranges[RowRange.COUNT], row_ranges[RowRange.HEAD] = count, 0
        row_ranges[RowRange.NUM_HEADS], row_ranges[RowRange.BUFFER] = head_stop - head_start, buffer
        row_ranges[RowRange.BUFFER_ROW], row_ranges[RowRange.BUFFER_HEAD] = row + low - began, head_start - held_start
        return row_ranges

    def _resolve_overlapping(self, regions: Ints, begin: Ints, end: Ints) -> Ints:
        """`resolve`, region by region, for instances that share tokens, as other heads of the same."""
        row_ranges: list[tuple[int, ...]] = []
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
                    buffer_row = row + x - int(self.start[at])
                    row_ranges.append((index, x - low, y - x, u - region[3], v - u, buffer, buffer_row, u - head_start))
                    # Still missing of tokens x heads: before, behind, above and below.
                    left += [(a, x, c, d), (y, b, c, d), (x, y, c, u), (x, y, v, d)]
                missing = [m for m in left if m[0] < m[1] and m[2] < m[3]]
            if missing:
                raise InvalidProgramError(
                    f"a rank does not hold all of s{region[0]}[{region[1]}:{region[2]}) heads [{region[3]}:{region[4]})"
                )
        table = np.array(row_ranges, dtype=np.int64).reshape(-1, RowRange.WIDTH)
        return table[np.lexsort((table[:, RowRange.HEAD], table[:, RowRange.ROW], table[:, RowRange.REGION]))].T


class Indexes(NamedTuple):
    """Regions of a rank by kind of input: queries, or keys."""

    # Where a remap sends owned regions to other ranks, `values` and `space` are without them:
    # attention may bring such keys again, and gradients of those belong to the buffer they came in.
    values: Mapping[Kind, RegionIndex]
    space: Mapping[Kind, RegionIndex]
    owned: Mapping[Kind, RegionIndex]

    def of(self, kind: Kind, *, owned: bool) -> RegionIndex:
        """Where to look up the rows of a message. `owned`: they are those of the linear layout."""
        side = Kind.KV if kind in (Kind.KV, Kind.KV_GRAD) else Kind.Q
        if owned:
            return self.owned[side]
        return self.values[side] if kind in INPUTS else self.space[side]


def without(instances: Ints, fragments: Ints) -> Ints:
    """Instances [n, 7] without overlap, less the tokens of `fragments` [m, 3]."""
    if not len(fragments):
        return instances
    begin, end = key_bounds(fragments)
    order = np.argsort(begin)
    begin, end = begin[order], np.maximum.accumulate(end[order])
    begin[1:] = np.maximum(begin[1:], end[:-1])
    start, stop = key_bounds(instances)
    # What lies between the fragments, with an open gap at either side: [m + 1].
    gap_start, gap_stop = np.append(-1, end), np.append(begin, np.iinfo(np.int64).max)
    row, gap = ranges(np.searchsorted(gap_stop, start, side="right"), np.searchsorted(gap_start, stop, side="left"))
    low, high = np.maximum(start[row], gap_start[gap]), np.minimum(stop[row], gap_stop[gap])
    left = instances[row]
    left[:, Instance.START] += low - start[row]
    left[:, Instance.STOP] -= stop[row] - high
    left[:, Instance.ROW] += low - start[row]
    return left[low < high]


def grouped_runs(
    sizes: Ints, row_ranges: Ints, group: Ints, num_groups: int, *, distinct: bool = False
) -> list[tuple[RowRun, ...]]:
    """For each of `num_groups` groups of regions, its rows packed one after the other, in as few
    runs as possible. `sizes`: tokens of each region [n]; `row_ranges`: of the regions
    [`RowRange.WIDTH`, m]; `group`: of each region (its message, its launch), ascending [n].
    `distinct`: no run names a row twice, for writing: partials of one query come from several
    entries of a launch.
    """
    runs_of: list[list[RowRun]] = [[] for _ in range(num_groups)]
    if not row_ranges.shape[1]:
        return [tuple(runs) for runs in runs_of]
    offsets = sizes.cumsum() - sizes
    region, count, begin = row_ranges[RowRange.REGION], row_ranges[RowRange.COUNT], row_ranges[RowRange.BUFFER_ROW]
    group_of = group[region]
    # Of each group the packed row, counted over all groups, at which it begins.
    base = offsets[np.minimum(group.searchsorted(np.arange(num_groups)), len(sizes) - 1)]
    # [m]: the packed row, within its group, of each range.
    row = offsets[region] + row_ranges[RowRange.ROW] - base[group_of]
    # [m - 1]: whether a range continues the one before it, in its buffer, and as packed rows.
    behind = begin[1:] == begin[:-1] + count[:-1]
    same = (group_of[1:] == group_of[:-1]) & (row[1:] == row[:-1] + count[:-1])
    for column in (RowRange.BUFFER, RowRange.HEAD, RowRange.NUM_HEADS, RowRange.BUFFER_HEAD):
        same &= row_ranges[column, 1:] == row_ranges[column, :-1]
    bounds = run_bounds(~same, len(row))
    begins, ends = bounds[:-1], bounds[1:]
    # A run lies consecutively in its buffer if no gap is counted between its first and its last range.
    gaps = np.zeros(len(row), dtype=np.int64)
    np.cumsum(~behind, out=gaps[1:])
    consecutive = gaps[ends - 1] == gaps[begins]
    counts = np.add.reduceat(count, begins)
    heads = (row_ranges[RowRange.HEAD], row_ranges[RowRange.NUM_HEADS], row_ranges[RowRange.BUFFER_HEAD])
    columns = (group_of, row, row_ranges[RowRange.BUFFER], begin, *heads)
    of_runs = zip(*(column[begins].tolist() for column in columns), counts.tolist(), consecutive.tolist(), strict=True)
    for at, (of, first, buffer, start, head, num_heads, buffer_head, total, together) in enumerate(of_runs):
        index = None
        if not together:
            a, b = int(begins[at]), int(ends[at])
            if distinct and _repeats(begin[a:b], count[a:b]):
                for packed_row, many, lies in zip(
                    row[a:b].tolist(), count[a:b].tolist(), begin[a:b].tolist(), strict=True
                ):
                    runs_of[of].append(
                        RowRun(packed_row, many, buffer, lies, lies + many, None, head, num_heads, buffer_head)
                    )
                continue
            index = ranges(begin[a:b], begin[a:b] + count[a:b])[1]
        runs_of[of].append(RowRun(first, total, buffer, start, start + total, index, head, num_heads, buffer_head))
    return [tuple(runs) for runs in runs_of]


def _repeats(begin: Ints, count: Ints) -> bool:
    order = np.argsort(begin)
    stop = begin[order] + count[order]
    return bool((begin[order[1:]] < stop[:-1]).any())


def pack_runs(runs: tuple[RowRun, ...], num_rows: int, num_heads: int) -> Packed:
    """Runs as `Packed` rows, indices on the host."""
    if len(runs) == 1 and runs[0].index is None:
        return Packed(runs, num_rows, num_heads, (None,), runs[0].num_heads == num_heads)
    indices = tuple(None if run.index is None else torch.from_numpy(run.index) for run in runs)
    return Packed(runs, num_rows, num_heads, indices, direct=False)
