"""Kernel launches of one rank: the pairs of its attention ops, looked up in its buffers, all ops of
a phase at once.

Pairs become kernel entries: as few (query rows, key rows) blocks as the buffers' order allows. An
entry is *full* (every query sees every key) or *causal*, aligned at the bottom right: its last
query sees its last key, as in FlashAttention. A pair that is neither is split in two. Neighbouring
pairs that lie side by side in their buffers become one entry: in a zigzag ring every round then has
one entry a sequence. Under a sliding window every pair is an entry, of FlashAttention's
`window_size`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import numpy as np
import torch

from megatron_balance.ir.arrays import Bools, Ints, concat, run_bounds
from megatron_balance.ir.columns import Pair, Region
from megatron_balance.ir.intervals import Rectangles, key, num_pairs, trim_pairs
from megatron_balance.ir.intervals import union as union_of
from megatron_balance.ir.mask import CAUSAL, Mask, SlidingWindow
from megatron_balance.ir.program import Attend, AttendGrad, Kind, Op, RankProgram
from megatron_balance.runtime.kernels.base import Entries, Kernel
from megatron_balance.runtime.lower.regions import Indexes, RegionIndex, RowRange, grouped_runs, pack_runs
from megatron_balance.runtime.lower.steps import INPUTS, GradLaunch, Launch, Operand, Packed

_HOST = torch.device("cpu")
_NOTHING = Packed((), 0, 0)
LaunchesOf: TypeAlias = dict[int, list[Launch | GradLaunch]]


class _Regions(NamedTuple):
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
    """The launches of a phase, by number."""

    queries: _Regions
    keys: _Regions
    launch: Ints
    fused: _Fused
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
    """Makes launches for one kernel under one mask."""

    def __init__(self, kernel: Kernel, mask: Mask) -> None:
        self.kernel, self.mask = kernel, mask

    def look_up(self, ops: Sequence[Op], values: Mapping[Kind, RegionIndex]) -> LookedUp | None:
        """The launches of a phase, or None where it has none. `values`: where the phase finds
        queries and keys.
        """
        indices = [i for i, op in enumerate(ops) if isinstance(op, Attend | AttendGrad)]
        tables = [op.pairs for op in ops if isinstance(op, Attend | AttendGrad)]
        if not indices:
            return None
        pairs, launch, op_of = _by_heads(concat(tables, Pair.WIDTH), np.repeat(indices, [len(t) for t in tables]))
        count = len(op_of)
        pairs, launch = _simple_pairs(pairs.T, launch, self.mask)
        sides = zip((pairs[Pair.QUERY], pairs[list(Pair.KEY)]), (values[kind] for kind in INPUTS), strict=True)
        queries, keys = (_Regions(regions, index, index.resolve(regions)) for regions, index in sides)
        (q, q_row), (k, k_row) = (self.operands(regions, launch, count) for regions in (queries, keys))
        fused = _fuse(pairs, launch, q_row, k_row, self.mask)
        reads = [_reads(*operands) for operands in zip(q, k, strict=True)]
        return LookedUp(queries, keys, launch, fused, _entries(fused, count), q, k, reads, op_of)

    def operands(self, wanted_regions: _Regions, launch: Ints, count: int) -> tuple[list[Operand], Ints]:
        """For each launch an operand that holds its regions, and the row where each region begins.
        A launch has one head span.
        """
        regions, index, row_ranges = wanted_regions
        region, begins_at = row_ranges[RowRange.REGION], row_ranges[RowRange.BUFFER_ROW] - row_ranges[RowRange.ROW]
        # [regions]: the first row range of each; a region may lie in several.
        first = region.searchsorted(np.arange(len(launch)))
        # The row at which a region begins, if all of it lies where its first range does.
        row, wanted = begins_at[first], regions[Region.HEAD_STOP] - regions[Region.HEAD_START]
        starts = launch.searchsorted(np.arange(count + 1))
        begin = first[starts[:-1]]  # of each launch, among the row ranges
        # A launch is a view if all of its row ranges continue the first: one buffer, the same heads.
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
            # Row of each region: where its span of the union begins, and how far inside it lies.
            keys = key(regions[Region.SEQ, own], regions[Region.START, own])
            at = key(union[Region.SEQ], union[Region.START]).searchsorted(keys, side="right") - 1
            row[own] = (sizes.cumsum() - sizes)[at] + regions[Region.START, own] - union[Region.START, at]
            operands[i] = Operand(-1, 0, heads[i], pack_runs(runs, int(sizes.sum()), heads[i]))
        return operands, row

    def forward(self, looked_up: LookedUp | None, zones: Sequence[str], indexes: Indexes) -> LaunchesOf:
        """Launches of the forward by op index. `zones`: the zone's name of each op."""
        launches: LaunchesOf = {}
        if looked_up is None:
            return launches
        queries, _, launch, fused, entries_of, q, k, reads, op_of = looked_up
        out = self.targets(indexes.space[Kind.Q], queries, launch, fused.q_pairs, len(op_of), distinct=True)
        for i, entries in enumerate(entries_of):
            prepared, calls, op = self.kernel.prepare(entries, _HOST), self.kernel.launches(entries), op_of[i]
            launches.setdefault(op, []).append(Launch(op, zones[op], q[i], k[i], prepared, out[i], (), reads[i], calls))
        return launches

    def backward(self, looked_up: LookedUp | None, zones: Sequence[str], indexes: Indexes) -> LaunchesOf:
        launches: LaunchesOf = {}
        if looked_up is None:
            return launches
        queries, keys, launch, fused, entries_of, q, k, reads, op_of = looked_up
        dq = self.targets(indexes.space[Kind.Q], queries, launch, fused.q_pairs, len(op_of))
        dk = self.targets(indexes.space[Kind.KV], keys, launch, fused.k_pairs, len(op_of))
        for i, entries in enumerate(_with_gradients(entries_of, fused, dq)):
            prepared, calls, op = self.kernel.prepare(entries, _HOST), self.kernel.launches(entries), op_of[i]
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
        return [pack_runs(*one) for one in zip(runs, np.add.reduceat(sizes, begin).tolist(), heads, strict=True)]


def attended_pairs(ops: Sequence[Op], mask: Mask) -> int:
    """Visible (query, key) pairs times query heads of all launches of a phase."""
    pairs = concat([op.pairs for op in ops if isinstance(op, Attend | AttendGrad)], Pair.WIDTH)
    columns = (Pair.Q_START, Pair.Q_STOP, Pair.K_START, Pair.K_STOP)
    visible = num_pairs(Rectangles(*(pairs[:, column] for column in columns)), mask)
    return int((visible * (pairs[:, Pair.Q_HEAD_STOP] - pairs[:, Pair.Q_HEAD_START])).sum())


def _by_heads(pairs: Ints, op_index: Ints) -> tuple[Ints, Ints, list[int]]:
    """Pairs sorted by launch (an op and a head span), the launch of each pair, and the op of each
    launch.
    """
    keys = np.column_stack([op_index, pairs[:, Pair.Q_HEADS], pairs[:, Pair.KV_HEADS]])
    changes = (keys[1:] != keys[:-1]).any(axis=1)
    # An op of one head span has its pairs together already, and they keep their order.
    if int((changes & (keys[1:, 0] == keys[:-1, 0])).sum()):
        order = np.lexsort(keys.T[::-1])
        pairs, keys = pairs[order], keys[order]
        changes = (keys[1:] != keys[:-1]).any(axis=1)
    bounds = run_bounds(changes, len(pairs))
    return pairs, np.repeat(np.arange(len(bounds) - 1), np.diff(bounds)), keys[bounds[:-1], 0].tolist()


def _entries(fused: _Fused, count: int) -> list[Entries]:
    q = list(zip(fused.q_start.tolist(), fused.q_stop.tolist(), strict=True))
    k = list(zip(fused.k_start.tolist(), fused.k_stop.tolist(), strict=True))
    causal = fused.causal.tolist()
    windows = [] if fused.windows is None else list(map(tuple, fused.windows.tolist()))
    bounds = fused.launch.searchsorted(np.arange(count + 1)).tolist()
    return [
        Entries(tuple(q[a:b]), tuple(k[a:b]), tuple(causal[a:b]), windows=tuple(windows[a:b]))
        for a, b in pairwise(bounds)
    ]


def _with_gradients(entries: list[Entries], fused: _Fused, dq: list[Packed]) -> Iterator[Entries]:
    """Entries with their rows of the output gradient, which lie where `dq` goes."""
    sizes = fused.q_stop - fused.q_start
    bounds = fused.launch.searchsorted(np.arange(len(entries) + 1))
    # Rows of `dout` are the buffer's where `dq` goes to consecutive ones, else packed from 0 on.
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


def _simple_pairs(pairs: Ints, launch: Ints, mask: Mask = CAUSAL) -> tuple[Ints, Ints]:
    """Pairs, transposed [9, n], each either full or causal at the bottom right, and their launches;
    queries and keys that take no part are left out.
    """
    if isinstance(mask, SlidingWindow):
        return trim_pairs(pairs.T, mask).T, launch
    if mask != CAUSAL:
        return pairs, launch
    pairs = pairs.copy()
    pairs[Pair.Q_START] = np.maximum(pairs[Pair.Q_START], pairs[Pair.K_START])
    pairs[Pair.K_STOP] = np.minimum(pairs[Pair.K_STOP], pairs[Pair.Q_STOP])
    neither = (pairs[Pair.K_STOP] > pairs[Pair.Q_START] + 1) & (pairs[Pair.K_STOP] < pairs[Pair.Q_STOP])
    if not neither.any():
        return pairs, launch
    upper, lower = pairs.copy(), pairs[:, neither]
    upper[Pair.Q_STOP, neither] = upper[Pair.K_STOP, neither]  # queries up to the last key: causal
    lower[Pair.Q_START] = lower[Pair.K_STOP]  # the queries behind it see all of the keys
    order = np.argsort(np.concatenate([np.arange(len(launch)), np.flatnonzero(neither)]), kind="stable")
    return np.concatenate([upper, lower], axis=1)[:, order], np.concatenate([launch, launch[neither]])[order]


@dataclass(frozen=True, slots=True)
class _Fused:
    """Kernel entries of many launches, [n] each. Rows are rows of the launch's operands.

    `launch` is ascending. `q_pairs`, `k_pairs`: indices into the simple pairs whose query (key)
    regions, in order, make up the entries' packed rows. `windows` [n, 2]: where the mask is a
    sliding window.
    """

    launch: Ints

    q_start: Ints
    q_stop: Ints
    k_start: Ints
    k_stop: Ints
    causal: Bools
    q_pairs: Ints
    k_pairs: Ints
    windows: Ints | None = None

    def __len__(self) -> int:
        return len(self.q_start)


def _fuse(pairs: Ints, launch: Ints, q_row: Ints, k_row: Ints, mask: Mask = CAUSAL) -> _Fused:
    """Join simple `pairs` [9, n] into entries.

    `launch` [n]: of each pair, ascending; `q_row`, `k_row` [n]: operand rows where its regions
    begin.
    """
    q_stop = q_row + pairs[Pair.Q_STOP] - pairs[Pair.Q_START]
    k_stop = k_row + pairs[Pair.K_STOP] - pairs[Pair.K_START]
    if isinstance(mask, SlidingWindow):
        behind = pairs[Pair.Q_STOP] - pairs[Pair.K_STOP]  # of a trimmed pair neither negative nor a whole window
        windows, each = np.stack([mask.size - 1 - behind, behind], axis=1), np.arange(len(launch))
        return _Fused(launch, q_row, q_stop, k_row, k_stop, np.zeros(len(launch), dtype=bool), each, each, windows)
    causal = (pairs[Pair.K_STOP] > pairs[Pair.Q_START] + 1) & (mask == CAUSAL)
    # One after the other, the keys of the same queries: all but the last must be full.
    linked = (q_row[1:] == q_row[:-1]) & (q_stop[1:] == q_stop[:-1]) & (k_stop[:-1] == k_row[1:]) & ~causal[:-1]
    linked &= (pairs[Pair.SEQ, 1:] == pairs[Pair.SEQ, :-1]) & (launch[1:] == launch[:-1])
    bounds = run_bounds(~linked, len(launch))
    first, last = bounds[:-1], bounds[1:] - 1
    a, b, c, d, e = q_row[first], q_stop[first], k_row[first], k_stop[last], causal[last]
    # One below the other, queries of the same keys: all full over the same keys, or a staircase
    # that is causal as a whole.
    below = b[:-1] == a[1:]
    full = ~e[1:] & ~e[:-1] & (c[1:] == c[:-1]) & (d[1:] == d[:-1])
    stairs = e[1:] & e[:-1] & (c[1:] == c[:-1]) & (d[1:] - d[:-1] == b[1:] - b[:-1])
    linked = below & (full | stairs) & (launch[first[1:]] == launch[first[:-1]])
    bounds = run_bounds(~linked, len(first))
    top, bottom = bounds[:-1], bounds[1:] - 1
    lengths = last[bottom] - first[bottom] + 1
    offsets = np.cumsum(lengths) - lengths
    # The ranges [first, last] of each entry's bottom row, one behind the other.
    k_pairs = np.repeat(first[bottom] - offsets, lengths) + np.arange(int(lengths.sum()))
    return _Fused(launch[first[top]], a[top], b[bottom], c[bottom], d[bottom], e[bottom], first, k_pairs)
