"""Kernel launches of one rank: the pairs of its attention ops, looked up in its buffers.

All ops of a phase at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import numpy as np
import torch

from megatron_balance.ir.arrays import Ints, concat, run_bounds
from megatron_balance.ir.columns import Pair, Region
from megatron_balance.ir.intervals import Rectangles, key, num_pairs
from megatron_balance.ir.intervals import union as union_of
from megatron_balance.ir.mask import Mask
from megatron_balance.ir.program import Attend, AttendGrad, Kind, Op, RankProgram
from megatron_balance.runtime.kernels.base import Entries, Kernel
from megatron_balance.runtime.lower.entries import Fused, fuse, simple_pairs
from megatron_balance.runtime.lower.last_use import INPUTS
from megatron_balance.runtime.lower.regions import RegionIndex, RowRange, RowRun, grouped_runs
from megatron_balance.runtime.lower.steps import GradLaunch, Launch, Operand, Packed

_NOTHING = Packed((), 0, 0)
_CONSECUTIVE = (None,)

LaunchesOf: TypeAlias = dict[int, list[Launch | GradLaunch]]


class _Regions(NamedTuple):
    """Regions [5, n] and their row ranges in `index`, [`RowRange.WIDTH`, m]."""

    regions: Ints
    index: RegionIndex
    row_ranges: Ints

    def chosen(self, which: Ints, index: RegionIndex) -> tuple[Ints, Ints]:
        """Only the regions `which`, in this order, and their row ranges in `index`."""
        regions = self.regions[:, which]
        if index is not self.index or self.row_ranges.shape[1] > self.regions.shape[1]:
            return regions, index.resolve(regions)
        row_ranges = self.row_ranges[:, which]  # one for each
        row_ranges[RowRange.REGION] = np.arange(len(which))
        return regions, row_ranges


class LookedUp(NamedTuple):
    """The launches of a phase, by number.

    Attributes:
        queries: regions of all simple pairs.
        keys: regions of all simple pairs.
        launch: of each simple pair, [n].
        fused: kernel entries of all launches.
        entries: of each launch, without rows of the output's gradient.
        q: operand of each launch.
        k: operand of each launch.
        reads: buffers that each launch reads.
        op_of: the op of each launch.
    """

    queries: _Regions
    keys: _Regions
    launch: Ints
    fused: Fused
    entries: list[Entries]
    q: list[Operand]
    k: list[Operand]
    reads: list[frozenset[tuple[Kind, int]]]
    op_of: list[int]

    def reversed(self, program: RankProgram) -> LookedUp:
        """The launches of the backward, which are the forward's in reverse."""
        indices = [
            [i for i, op in enumerate(ops) if isinstance(op, Attend | AttendGrad)]
            for ops in (program.forward, program.backward)
        ]
        backward = dict(zip(indices[0], reversed(indices[1]), strict=True))
        return self._replace(op_of=[backward[op] for op in self.op_of])


class Launching:
    """Makes launches for one kernel on one device, under one mask."""

    def __init__(self, device: torch.device, kernel: Kernel, mask: Mask) -> None:
        self.device, self.kernel, self.mask = device, kernel, mask

    def look_up(self, ops: Sequence[Op], values: Mapping[Kind, RegionIndex]) -> LookedUp | None:
        """The launches of a phase, or None where it has none.

        `values`: where the phase finds queries and keys.
        """
        indices = [i for i, op in enumerate(ops) if isinstance(op, Attend | AttendGrad)]
        tables = [op.pairs for op in ops if isinstance(op, Attend | AttendGrad)]
        if not indices:
            return None
        pairs, launch, op_of = _by_heads(concat(tables, Pair.WIDTH), np.repeat(indices, [len(t) for t in tables]))
        count = len(op_of)
        pairs, launch = simple_pairs(pairs.T, launch, self.mask)
        sides = zip((pairs[Pair.QUERY], pairs[list(Pair.KEY)]), (values[kind] for kind in INPUTS), strict=True)
        queries, keys = (_Regions(regions, index, index.resolve(regions)) for regions, index in sides)
        (q, q_row), (k, k_row) = (self.operands(regions, launch, count) for regions in (queries, keys))
        fused = fuse(pairs, launch, q_row, k_row, self.mask)
        reads = [_reads(*operands) for operands in zip(q, k, strict=True)]
        return LookedUp(queries, keys, launch, fused, _entries(fused, count), q, k, reads, op_of)

    def operands(self, wanted_regions: _Regions, launch: Ints, count: int) -> tuple[list[Operand], Ints]:
        """For each launch an operand that holds its regions, and the row where each region begins.

        The regions of a launch have one head span.
        """
        regions, index, row_ranges = wanted_regions
        region, begins_at = row_ranges[RowRange.REGION], row_ranges[RowRange.BUFFER_ROW] - row_ranges[RowRange.ROW]
        first = region.searchsorted(np.arange(len(launch)))
        row, wanted = begins_at[first], regions[Region.HEAD_STOP] - regions[Region.HEAD_START]
        starts = launch.searchsorted(np.arange(count + 1))
        begin = first[starts[:-1]]  # of each launch, among the row ranges
        in_row = (begins_at == row[region]) & (row_ranges[RowRange.NUM_HEADS] == wanted[region])
        for column in (RowRange.BUFFER, RowRange.BUFFER_HEAD):
            in_row &= row_ranges[column] == np.repeat(row_ranges[column, begin], np.diff(np.append(begin, len(region))))
        direct = np.logical_and.reduceat(in_row, begin).tolist()
        starts, heads = starts.tolist(), wanted[starts[:-1]].tolist()
        places = zip(
            row_ranges[RowRange.BUFFER, begin].tolist(),
            row_ranges[RowRange.BUFFER_HEAD, begin].tolist(),
            heads,
            strict=True,
        )
        operands = [Operand(*place, _NOTHING) for place in places]
        for i in [i for i, is_direct in enumerate(direct) if not is_direct]:
            own = slice(starts[i], starts[i + 1])
            union = _union(regions[:, own])
            sizes = union[Region.STOP] - union[Region.START]
            runs = grouped_runs(sizes, index.resolve(union), np.zeros(len(sizes), dtype=np.int64), 1)[0]
            keys = key(regions[Region.SEQ, own], regions[Region.START, own])
            at = key(union[Region.SEQ], union[Region.START]).searchsorted(keys, side="right") - 1
            row[own] = (sizes.cumsum() - sizes)[at] + regions[Region.START, own] - union[Region.START, at]
            operands[i] = Operand(-1, 0, heads[i], pack_runs(runs, int(sizes.sum()), heads[i], self.device))
        return operands, row

    def forward(
        self, looked_up: LookedUp | None, zones: Sequence[str], space: Mapping[Kind, RegionIndex]
    ) -> LaunchesOf:
        """Launches of the forward by op index; an op has one for each head span of its pairs.

        `zones`: the zone's name of each op; `space`: where outputs and gradients lie.
        """
        launches: LaunchesOf = {}
        if looked_up is None:
            return launches
        queries, _, launch, fused, entries_of, q, k, reads, op_of = looked_up
        out = self.targets(space[Kind.Q], queries, launch, fused.q_pairs, len(op_of), distinct=True)
        for i, entries in enumerate(entries_of):
            prepared, calls, op = self.kernel.prepare(entries, self.device), self.kernel.launches(entries), op_of[i]
            launches.setdefault(op, []).append(Launch(op, zones[op], q[i], k[i], prepared, out[i], (), reads[i], calls))
        return launches

    def backward(
        self, looked_up: LookedUp | None, zones: Sequence[str], space: Mapping[Kind, RegionIndex]
    ) -> LaunchesOf:
        """Launches of the backward by op index; arguments as for `forward`."""
        launches: LaunchesOf = {}
        if looked_up is None:
            return launches
        queries, keys, launch, fused, entries_of, q, k, reads, op_of = looked_up
        dq = self.targets(space[Kind.Q], queries, launch, fused.q_pairs, len(op_of))
        dk = self.targets(space[Kind.KV], keys, launch, fused.k_pairs, len(op_of))
        for i, entries in enumerate(_with_gradients(entries_of, fused, dq)):
            prepared, calls, op = self.kernel.prepare(entries, self.device), self.kernel.launches(entries), op_of[i]
            step = GradLaunch(op, zones[op], q[i], k[i], _final_rows(dq[i]), prepared, dq[i], dk[i], reads[i], calls)
            launches.setdefault(op, []).append(step)
        return launches

    def targets(
        self, index: RegionIndex, of: _Regions, launch: Ints, chosen: Ints, count: int, *, distinct: bool = False
    ) -> list[Packed]:
        """Where in `index` the packed rows of each launch go: `chosen` of its regions, in order."""
        (regions, row_ranges), launch_of = of.chosen(chosen, index), launch[chosen]
        sizes = regions[Region.STOP] - regions[Region.START]
        runs = grouped_runs(sizes, row_ranges, launch_of, count, distinct=distinct)
        begin = launch_of.searchsorted(np.arange(count))
        heads = (regions[Region.HEAD_STOP, begin] - regions[Region.HEAD_START, begin]).tolist()
        return [
            pack_runs(*one, self.device)
            for one in zip(runs, np.add.reduceat(sizes, begin).tolist(), heads, strict=True)
        ]


def attended_pairs(ops: Sequence[Op], mask: Mask) -> int:
    """Visible (query, key) pairs times query heads of all launches of a phase."""
    pairs = concat([op.pairs for op in ops if isinstance(op, Attend | AttendGrad)], Pair.WIDTH)
    columns = (Pair.Q_START, Pair.Q_STOP, Pair.K_START, Pair.K_STOP)
    visible = num_pairs(Rectangles(*(pairs[:, column] for column in columns)), mask)
    return int((visible * (pairs[:, Pair.Q_HEAD_STOP] - pairs[:, Pair.Q_HEAD_START])).sum())


def pack_runs(runs: tuple[RowRun, ...], num_rows: int, num_heads: int, device: torch.device) -> Packed:
    """Runs as `Packed` rows, indices on the device."""
    if len(runs) == 1 and runs[0].index is None:
        return Packed(runs, num_rows, num_heads, _CONSECUTIVE, runs[0].num_heads == num_heads)
    indices = tuple(None if r.index is None else torch.from_numpy(r.index).to(device, non_blocking=True) for r in runs)
    return Packed(runs, num_rows, num_heads, indices, direct=False)


def _by_heads(pairs: Ints, op_index: Ints) -> tuple[Ints, Ints, list[int]]:
    """Pairs sorted by launch, the launch of each pair, and the op of each launch.

    A launch is an op and a head span.
    """
    keys = np.column_stack([op_index, pairs[:, Pair.Q_HEADS], pairs[:, Pair.KV_HEADS]])
    changes = (keys[1:] != keys[:-1]).any(axis=1)
    if int((changes & (keys[1:, 0] == keys[:-1, 0])).sum()):
        order = np.lexsort(keys.T[::-1])
        pairs, keys = pairs[order], keys[order]
        changes = (keys[1:] != keys[:-1]).any(axis=1)
    bounds = run_bounds(changes, len(pairs))
    return pairs, np.repeat(np.arange(len(bounds) - 1), np.diff(bounds)), keys[bounds[:-1], 0].tolist()


def _entries(fused: Fused, count: int) -> list[Entries]:
    """Kernel entries of each launch."""
    q = list(zip(fused.q_start.tolist(), fused.q_stop.tolist(), strict=True))
    k = list(zip(fused.k_start.tolist(), fused.k_stop.tolist(), strict=True))
    causal = fused.causal.tolist()
    windows = [] if fused.windows is None else list(map(tuple, fused.windows.tolist()))
    bounds = fused.launch.searchsorted(np.arange(count + 1)).tolist()
    return [
        Entries(tuple(q[a:b]), tuple(k[a:b]), tuple(causal[a:b]), windows=tuple(windows[a:b]))
        for a, b in pairwise(bounds)
    ]


def _with_gradients(entries: list[Entries], fused: Fused, dq: list[Packed]) -> Iterator[Entries]:
    """Entries with their rows of the output gradient, which lie where `dq` goes."""
    sizes = fused.q_stop - fused.q_start
    bounds = fused.launch.searchsorted(np.arange(len(entries) + 1))
    packed = sizes.cumsum() - sizes
    begins = np.array([to.runs[0].start if to.direct else 0 for to in dq], dtype=np.int64)
    start = packed + np.repeat(begins - packed[bounds[:-1]], np.diff(bounds))
    rows = list(zip(start.tolist(), (start + sizes).tolist(), strict=True))
    for one, (a, b) in zip(entries, pairwise(bounds.tolist()), strict=True):
        yield Entries(one.q, one.k, one.causal, tuple(rows[a:b]), one.windows)


def _final_rows(packed: Packed) -> Operand:
    """Operand of the output's gradient, the output and its LSE: a view, or gathered."""
    if packed.direct:
        return Operand(packed.runs[0].buffer, packed.runs[0].buffer_head, packed.num_heads, packed)
    return Operand(-1, 0, packed.num_heads, packed)


def _union(regions: Ints) -> Ints:
    """Disjoint regions [5, m], in order, over the tokens of `regions` [5, n] of one head span."""
    spans = union_of(regions[Region.SPAN].T)
    return np.concatenate([spans.T, np.tile(regions[Region.HEADS, :1], len(spans))])


def _reads(q: Operand, k: Operand) -> frozenset[tuple[Kind, int]]:
    if q.buffer >= 0 and k.buffer >= 0:
        return frozenset(((Kind.Q, q.buffer), (Kind.KV, k.buffer)))
    buffers: set[tuple[Kind, int]] = set()
    for kind, operand in ((Kind.Q, q), (Kind.KV, k)):
        buffers |= (
            {(kind, operand.buffer)} if operand.buffer >= 0 else {(kind, run.buffer) for run in operand.packed.runs}
        )
    return frozenset(buffers)
