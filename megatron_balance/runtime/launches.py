"""Kernel launches of one rank: the pairs of its attention ops, looked up in its buffers, all ops of a phase at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import numpy as np
import torch

from megatron_balance.ir.arrays import Ints, concat, run_bounds
from megatron_balance.ir.columns import Pair
from megatron_balance.ir.intervals import key
from megatron_balance.ir.intervals import union as union_of
from megatron_balance.ir.program import Attend, AttendGrad, Kind, Op, RankProgram
from megatron_balance.runtime.entries import Fused, fuse, simple_pairs
from megatron_balance.runtime.kernels import Entries, Kernel
from megatron_balance.runtime.last_use import INPUTS
from megatron_balance.runtime.lowered import GradLaunch, Launch, Operand, Packed
from megatron_balance.runtime.regions import BUFFER, BUFFER_HEAD, BUFFER_ROW, NUM_HEADS, REGION, ROW, Run, Table, grouped_runs

_NOTHING = Packed((), 0, 0)
_CONSECUTIVE = (None,)

LaunchesOf: TypeAlias = dict[int, list[Launch | GradLaunch]]


class _Regions(NamedTuple):
    """Regions [5, n] and, [8, m], their pieces in `table`."""

    regions: Ints
    table: Table
    pieces: Ints

    def chosen(self, which: Ints, table: Table) -> tuple[Ints, Ints]:
        """Only these, in this order, and their pieces in another table, or the same."""
        regions = self.regions[:, which]
        if table is not self.table or self.pieces.shape[1] > self.regions.shape[1]:
            return regions, table.resolve(regions)
        pieces = self.pieces[:, which]  # one for each
        pieces[REGION] = np.arange(len(which))
        return regions, pieces


class LookedUp(NamedTuple):
    """The launches of a phase, by number. `queries`, `keys`: regions of all their simple pairs, `launch` [n]: whose each is; `entries`:
    of each launch, without rows of the output's gradient; `op_of`: the op of each launch.
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
        """The same for the backward, whose launches are the forward's in reverse."""
        indices = [[i for i, op in enumerate(ops) if isinstance(op, Attend | AttendGrad)] for ops in (program.forward, program.backward)]
        backward = dict(zip(indices[0], reversed(indices[1]), strict=True))
        return self._replace(op_of=[backward[op] for op in self.op_of])


class Launching:
    """Makes launches for one kernel on one device."""

    def __init__(self, device: torch.device, kernel: Kernel) -> None:
        self.device, self.kernel = device, kernel

    def look_up(self, ops: Sequence[Op], values: Mapping[Kind, Table]) -> LookedUp | None:
        """The launches of a phase; None: there are none. `values`: where it finds queries and keys."""
        indices = [i for i, op in enumerate(ops) if isinstance(op, Attend | AttendGrad)]
        tables = [op.pairs for op in ops if isinstance(op, Attend | AttendGrad)]
        if not indices:
            return None
        pairs, launch, op_of = _by_heads(concat(tables, Pair.WIDTH), np.repeat(indices, [len(t) for t in tables]))
        count = len(op_of)
        pairs, launch = simple_pairs(pairs.T, launch)
        sides = zip((pairs[:5], pairs[[0, 5, 6, 7, 8]]), (values[kind] for kind in INPUTS), strict=True)
        queries, keys = (_Regions(regions, table, table.resolve(regions)) for regions, table in sides)
        (q, q_row), (k, k_row) = (self.operands(regions, launch, count) for regions in (queries, keys))
        fused = fuse(pairs, launch, q_row, k_row)
        reads = [_reads(*operands) for operands in zip(q, k, strict=True)]
        return LookedUp(queries, keys, launch, fused, _entries(fused, count), q, k, reads, op_of)

    def operands(self, wanted_regions: _Regions, launch: Ints, count: int) -> tuple[list[Operand], Ints]:
        """For each launch an operand that holds its regions (of one head span), and the row where each region begins."""
        regions, table, pieces = wanted_regions
        region, begins_at = pieces[REGION], pieces[BUFFER_ROW] - pieces[ROW]
        first = region.searchsorted(np.arange(len(launch)))
        row, wanted = begins_at[first], regions[4] - regions[3]
        starts = launch.searchsorted(np.arange(count + 1))
        begin = first[starts[:-1]]  # of each launch, among the pieces
        in_row = (begins_at == row[region]) & (pieces[NUM_HEADS] == wanted[region])
        for column in (BUFFER, BUFFER_HEAD):
            in_row &= pieces[column] == np.repeat(pieces[column, begin], np.diff(np.append(begin, len(region))))
        direct = np.logical_and.reduceat(in_row, begin).tolist()
        starts, heads = starts.tolist(), wanted[starts[:-1]].tolist()
        places = zip(pieces[BUFFER, begin].tolist(), pieces[BUFFER_HEAD, begin].tolist(), heads, strict=True)
        found = [Operand(*place, _NOTHING) for place in places]
        for i in [i for i, is_direct in enumerate(direct) if not is_direct]:
            part = slice(starts[i], starts[i + 1])
            union = _union(regions[:, part])
            sizes = union[2] - union[1]
            runs = grouped_runs(sizes, table.resolve(union), np.zeros(len(sizes), dtype=np.int64), 1)[0]
            at = key(union[0], union[1]).searchsorted(key(regions[0, part], regions[1, part]), side="right") - 1
            row[part] = (sizes.cumsum() - sizes)[at] + regions[1, part] - union[1, at]
            found[i] = Operand(-1, 0, heads[i], pack_runs(runs, int(sizes.sum()), heads[i], self.device))
        return found, row

    def forward(self, looked_up: LookedUp | None, zones: Sequence[str], space: Mapping[Kind, Table]) -> LaunchesOf:
        """Launches of the forward by op index; an op has one for each head span of its pairs.

        `zones`: the zone's name of each op; `space`: where outputs and gradients lie.
        """
        found: LaunchesOf = {}
        if looked_up is None:
            return found
        queries, _, launch, fused, entries_of, q, k, reads, op_of = looked_up
        out = self.targets(space[Kind.Q], queries, launch, fused.q_pairs, len(op_of), distinct=True)
        for i, entries in enumerate(entries_of):
            prepared, calls, op = self.kernel.prepare(entries, self.device), self.kernel.launches(entries), op_of[i]
            found.setdefault(op, []).append(Launch(op, zones[op], q[i], k[i], prepared, out[i], (), reads[i], calls))
        return found

    def backward(self, looked_up: LookedUp | None, zones: Sequence[str], space: Mapping[Kind, Table]) -> LaunchesOf:
        """The same of the backward."""
        found: LaunchesOf = {}
        if looked_up is None:
            return found
        queries, keys, launch, fused, entries_of, q, k, reads, op_of = looked_up
        dq = self.targets(space[Kind.Q], queries, launch, fused.q_pairs, len(op_of))
        dk = self.targets(space[Kind.KV], keys, launch, fused.k_pairs, len(op_of))
        for i, entries in enumerate(_with_gradients(entries_of, fused, dq)):
            prepared, calls, op = self.kernel.prepare(entries, self.device), self.kernel.launches(entries), op_of[i]
            step = GradLaunch(op, zones[op], q[i], k[i], _final_rows(dq[i]), prepared, dq[i], dk[i], reads[i], calls)
            found.setdefault(op, []).append(step)
        return found

    def targets(self, table: Table, of: _Regions, launch: Ints, chosen: Ints, count: int, *, distinct: bool = False) -> list[Packed]:
        """Where the packed rows of each launch go in `table`: `chosen` of its regions, in order."""
        (regions, pieces), owner = of.chosen(chosen, table), launch[chosen]
        sizes = regions[2] - regions[1]
        runs = grouped_runs(sizes, pieces, owner, count, distinct=distinct)
        begin = owner.searchsorted(np.arange(count))
        heads = (regions[4, begin] - regions[3, begin]).tolist()
        return [pack_runs(*one, self.device) for one in zip(runs, np.add.reduceat(sizes, begin).tolist(), heads, strict=True)]


def pack_runs(runs: tuple[Run, ...], num_rows: int, num_heads: int, device: torch.device) -> Packed:
    """Runs as `Packed` rows, indices on the device."""
    if len(runs) == 1 and runs[0].index is None:
        return Packed(runs, num_rows, num_heads, _CONSECUTIVE, runs[0].num_heads == num_heads)
    indices = tuple(None if r.index is None else torch.from_numpy(r.index).to(device, non_blocking=True) for r in runs)
    return Packed(runs, num_rows, num_heads, indices, direct=False)


def _by_heads(pairs: Ints, op_index: Ints) -> tuple[Ints, Ints, list[int]]:
    """Pairs sorted by launch (an op and a head span), the launch of each pair, and the op of each launch."""
    keys = np.column_stack([op_index, pairs[:, 3], pairs[:, 4], pairs[:, 7], pairs[:, 8]])
    changes = (keys[1:] != keys[:-1]).any(axis=1)
    if int((changes & (keys[1:, 0] == keys[:-1, 0])).sum()):
        order = np.lexsort(keys.T[::-1])
        pairs, keys = pairs[order], keys[order]
        changes = (keys[1:] != keys[:-1]).any(axis=1)
    bounds = run_bounds(changes, len(pairs))
    return pairs, np.repeat(np.arange(len(bounds) - 1), np.diff(bounds)), keys[bounds[:-1], 0].tolist()


def _entries(fused: Fused, count: int) -> list[Entries]:
    """Per launch."""
    q = list(zip(fused.q_start.tolist(), fused.q_stop.tolist(), strict=True))
    k = list(zip(fused.k_start.tolist(), fused.k_stop.tolist(), strict=True))
    causal = fused.causal.tolist()
    bounds = fused.launch.searchsorted(np.arange(count + 1)).tolist()
    return [Entries(tuple(q[a:b]), tuple(k[a:b]), tuple(causal[a:b])) for a, b in pairwise(bounds)]


def _with_gradients(entries: list[Entries], fused: Fused, dq: list[Packed]) -> Iterator[Entries]:
    """The same with where their rows of the output gradient lie, which is where `dq` goes."""
    sizes = fused.q_stop - fused.q_start
    bounds = fused.launch.searchsorted(np.arange(len(entries) + 1))
    packed = sizes.cumsum() - sizes
    begins = np.array([to.runs[0].start if to.direct else 0 for to in dq], dtype=np.int64)
    start = packed + np.repeat(begins - packed[bounds[:-1]], np.diff(bounds))
    rows = list(zip(start.tolist(), (start + sizes).tolist(), strict=True))
    for one, (a, b) in zip(entries, pairwise(bounds.tolist()), strict=True):
        yield Entries(one.q, one.k, one.causal, tuple(rows[a:b]))


def _final_rows(packed: Packed) -> Operand:
    """The output's gradient, the output and its LSE of the packed rows: a view of one buffer, or gathered."""
    if packed.direct:
        return Operand(packed.runs[0].buffer, packed.runs[0].buffer_head, packed.num_heads, packed)
    return Operand(-1, 0, packed.num_heads, packed)


def _union(regions: Ints) -> Ints:
    """Disjoint regions [5, m], in order, over the same tokens as `regions` [5, n] (which have the same heads)."""
    spans = union_of(regions[:3].T)
    union = np.tile(regions[:, :1], len(spans))
    union[:3] = spans.T
    return union


def _reads(q: Operand, k: Operand) -> frozenset[tuple[Kind, int]]:
    if q.buffer >= 0 and k.buffer >= 0:
        return frozenset(((Kind.Q, q.buffer), (Kind.KV, k.buffer)))
    found: set[tuple[Kind, int]] = set()
    for kind, operand in ((Kind.Q, q), (Kind.KV, k)):
        found |= {(kind, operand.buffer)} if operand.buffer >= 0 else {(kind, run.buffer) for run in operand.packed.runs}
    return frozenset(found)
