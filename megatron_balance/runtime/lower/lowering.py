"""From one rank's program to its steps: every region looked up, all ops of a phase at once.

A ring over 64 ranks has 64 launches and 126 messages a phase; looked up one by one they would cost
more than the step saves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import numpy as np
import torch

from megatron_balance.compile import order
from megatron_balance.compile.ping_pong import Cuts
from megatron_balance.compile.pipeline import CompiledRank, PhaseName
from megatron_balance.compile.transpose import OpZones, Policy
from megatron_balance.compile.transpose import places as places_of
from megatron_balance.ir import arrays
from megatron_balance.ir.arrays import union as union_of
from megatron_balance.ir.columns import Fragment, Pair, Region, Transfer
from megatron_balance.ir.mask import CAUSAL, Band, Mask
from megatron_balance.ir.program import Attend, AttendGrad, Exchange, Kind, Op, RankProgram
from megatron_balance.runtime.kernels.base import Entries, Kernel
from megatron_balance.runtime.lower import steps
from megatron_balance.runtime.lower.memory import AttentionShape
from megatron_balance.runtime.lower.messages import PhaseMessages
from megatron_balance.runtime.lower.regions import Indexes, RegionIndex, RowRange, grouped_runs, pack_runs, without

_ZONES = ("inter_node", "intra_node", "local")
_TOKENS = {Kind.Q: "q_tokens_received", Kind.KV: "kv_tokens_received", Kind.OUT: "partial_tokens_received"}


class Setting(NamedTuple):
    """Surroundings of a rank's program. `phases`: those that will run."""

    ranks_per_node: int
    nano_batch: int
    phases: Collection[PhaseName]


class Lowering:
    """The phases of one rank by one policy.

    `sizes`: (rows, heads) of its buffers, by kind of input and number.

    `like`: of the same plan by another policy, whose forward it shares.
    """

    def __init__(
        self,
        compiled: CompiledRank,
        shape: AttentionShape,
        policy: Policy,
        kernel: Kernel,
        setting: Setting,
        like: Lowering | None = None,
    ) -> None:
        self.compiled, self.program, self.setting = compiled, compiled.program, setting
        self.launching = _Launching(kernel, self.program.mask)
        self.phases: dict[PhaseName, steps.Phase] = {}
        if like is not None and "forward" in setting.phases and self.shares_forward(like):
            # What policy keep hands to the backward, policy replay lets go.
            self.lookup, phase = like.lookup, like.phases["forward"]
            self.phases["forward"] = replace(phase, last_uses=_last_uses(phase.steps))
        else:
            self.lookup = self.look_up_forward(shape)
            if "forward" in setting.phases:
                self.phases["forward"] = self.forward(free=policy == "replay")
        self.sizes = {kind: dict(of) for kind, of in self.lookup.sizes.items()}
        if "backward" in setting.phases:
            self.phases["backward"] = self.backward(again=policy == "replay")

    def shares_forward(self, like: Lowering) -> bool:
        """Whether the forward of another lowering is this one's, but for what it lets go."""
        own, other = self.compiled.forward, like.compiled.forward
        return (own.steps, own.cuts, self.program.forward, self.program.remap_in) == (
            *(other.steps, other.cuts, like.program.forward, like.program.remap_in),
        )

    def look_up_forward(self, shape: AttentionShape) -> _ForwardLookup:
        """Look up the forward's rows, beside which the backward's gradients lie."""
        program = self.program
        owned = arrays.as_array(program.owned)
        rows = owned[:, Fragment.STOP] - owned[:, Fragment.START]
        heads = {Kind.Q: shape.num_heads, Kind.KV: shape.num_kv_heads}
        # The columns of `Instance`: the rank's own fragments, one behind the other in buffer 0.
        begins = np.cumsum(rows) - rows
        own = {
            kind: np.column_stack([owned, np.tile([0, heads[kind], 0], (len(owned), 1)), begins]).astype(np.int64)
            for kind in steps.INPUTS
        }
        kept = {kind: _kept(program, own[kind]) for kind in steps.INPUTS}
        messages = PhaseMessages(program, program.forward, forward=True)
        space = {kind: RegionIndex(np.concatenate([kept[kind], messages.instances[kind]])) for kind in steps.INPUTS}
        indexes = Indexes(space, space, {kind: RegionIndex(own[kind]) for kind in steps.INPUTS})
        sizes = {kind: {0: (int(rows.sum()), heads[kind]), **messages.sizes[kind]} for kind in steps.INPUTS}
        launches = self.launching.look_up(program.forward, space) if "forward" in self.setting.phases else None
        return _ForwardLookup(messages, kept, indexes, launches, sizes)

    def forward(self, *, free: bool) -> steps.Phase:
        messages, _, indexes, launches, sizes = self.lookup
        places = places_of(self.program, backward=False)
        launched = self.launching.forward(launches, places.zones, indexes)
        return self.phase(messages, indexes, places, launched, sizes, free=free)

    def backward(self, *, again: bool) -> steps.Phase:
        """`again`: inputs are received once more, into buffers of their own."""
        program, (before, kept, indexes, launches, _) = self.program, self.lookup
        messages = PhaseMessages(program, program.backward, forward=False, num_buffers=before.num_buffers)
        for kind in steps.INPUTS:
            self.sizes[kind].update(messages.sizes[kind])
        places = places_of(program, backward=True)
        if again:
            values = {
                kind: RegionIndex(np.concatenate([kept[kind], messages.instances[kind]])) for kind in steps.INPUTS
            }
            indexes = indexes._replace(values=values)
            launches = self.launching.look_up(program.backward, values)
        elif launches is not None:  # the same launches in reverse, over the same rows
            launches = launches.reversed(program)
        launched = self.launching.backward(launches, places.zones, indexes)
        return self.phase(messages, indexes, places, launched, self.sizes, free=True)

    def phase(
        self,
        messages: PhaseMessages,
        indexes: Indexes,
        places: OpZones,
        launches: LaunchesOf,
        sizes: _SizesOf,
        *,
        free: bool,
    ) -> steps.Phase:
        """One phase of exchanges and launches. `free`: drop inputs that nothing reads any more."""
        forward, ops, program = messages.forward, messages.ops, self.program
        ranks_per_node, nano_batch, _ = self.setting
        exchanges, relay_tasks = messages.exchanges(indexes, places, ranks_per_node, nano_batch)
        taken: list[steps.Step] = []
        ordered, where, _ = self.compiled.forward if forward else self.compiled.backward
        begins: list[int] = []  # of each step in the order: its first one here
        for step in ordered:
            begins.append(len(taken))
            match step:
                case order.Start(op):
                    taken.append(steps.IssueStep(exchanges[op]))
                case order.Finish(op):
                    taken.append(steps.FinishStep(exchanges[op]))
                case order.RunLaunches(op):
                    taken += launches[op]
        begins.append(len(taken))
        blank: tuple[int, ...] = ()
        if forward:
            taken, blank = _mark_merges(taken, sizes[Kind.Q])
        else:
            taken = _mark_sums(taken, sizes)
        remap_out = program.num_exchanges - 1 if program.remap_in else None
        attended = ("attended_pairs", _attended_pairs(ops, program.mask))
        work = (*_counts(taken, forward=forward, remap_out=remap_out), attended)
        cuts = Cuts(*(begins[at] for at in where))
        return steps.Phase(
            tuple(taken), cuts, _last_uses(taken) if free else ((),) * len(taken), blank, work, relay_tasks
        )


class _ForwardLookup(NamedTuple):
    """Rows of the forward, on which the backward rests."""

    messages: PhaseMessages
    # By kind of input, instances of owned rows that are not remapped.
    kept: dict[Kind, arrays.Ints]
    indexes: Indexes
    launches: _LookedUp | None
    sizes: dict[Kind, dict[int, tuple[int, int]]]


def _mark_merges(
    taken: Sequence[steps.Step], sizes: Mapping[int, tuple[int, int]]
) -> tuple[list[steps.Step], tuple[int, ...]]:
    """Say of every output run whether its rows hold a partial already; and the blank buffers."""
    # Buffers in which that differs by row start blank.
    outputs = [s.out for s in taken if isinstance(s, steps.Launch)]
    outputs += [
        m.packed for s in taken if isinstance(s, steps.FinishStep) for m in s.exchange.receives if m.kind == Kind.OUT
    ]
    # No run splits heads: a flag a row is enough.
    by_rows = all(run.num_heads == sizes[run.buffer][1] for packed in outputs for run in packed.runs)
    written = {buffer: np.zeros((rows, 1 if by_rows else heads), dtype=bool) for buffer, (rows, heads) in sizes.items()}
    blank: set[int] = set()
    whole: set[tuple[int, ...]] = set()  # (buffer, start, stop, head, heads), all written

    def mark(packed: steps.Packed) -> tuple[bool, ...]:
        merges: list[bool] = []
        for run in packed.runs:
            place = (run.buffer, run.start, run.stop, run.buffer_head, run.num_heads)
            if run.index is None and place in whole:
                merges.append(True)
                continue
            rows = (
                slice(run.start, run.stop) if run.index is None else run.index,
                slice(run.buffer_head, run.buffer_head + run.num_heads),
            )
            before = written[run.buffer][rows]
            merges.append(bool(before.any()))
            if merges[-1] and not before.all():
                blank.add(run.buffer)
            if not merges[-1] or run.buffer in blank:
                written[run.buffer][rows] = True
            if run.index is None:
                whole.add(place)
        return tuple(merges)

    marked: list[steps.Step] = []
    for step in taken:
        if isinstance(step, steps.Launch):
            marked.append(step._replace(merges=mark(step.out)))
        elif isinstance(step, steps.FinishStep):
            marked.append(_received_as(step, (Kind.OUT,), lambda m: m._replace(merges=mark(m.packed))))
        else:
            marked.append(step)
    return marked, tuple(sorted(blank))


def _received_as(
    step: steps.FinishStep, kinds: tuple[Kind, ...], mark: Callable[[steps.PeerMessage], steps.PeerMessage]
) -> steps.FinishStep:
    """A step with its messages of these kinds marked."""
    exchange = step.exchange
    if not any(m.kind in kinds for m in exchange.receives):
        return step
    return steps.FinishStep(
        exchange._replace(receives=tuple(mark(m) if m.kind in kinds else m for m in exchange.receives))
    )


def _kept(program: RankProgram, own: arrays.Ints) -> arrays.Ints:
    tables = [op.transfers for op in program.forward if isinstance(op, Exchange) and op.id < program.remap_in]
    given = arrays.concat(tables, Transfer.WIDTH)
    sent = (given[:, Transfer.SRC] == program.rank) & (given[:, Transfer.KIND] == Kind.KV)
    return without(own, given[sent][:, Transfer.SPAN])


_SizesOf = Mapping[Kind, Mapping[int, tuple[int, int]]]  # (rows, heads) of buffers by kind of input and number


def _mark_sums(taken: Sequence[steps.Step], sizes: _SizesOf) -> list[steps.Step]:
    """Say of every gradient that a step brings which of its runs are kept and which are added."""
    # A ring's launch gives the gradients of all keys of the buffer that it read, in order: the
    # first of a buffer is kept as it comes, so that nothing has to be zeroed for it, or added to
    # zero.
    begun: set[steps.Value] = set()
    marked: list[steps.Step] = []
    for step in taken:
        match step:
            case steps.GradLaunch():
                dq, dk = (
                    _sums(packed, kind, begun, sizes)
                    for packed, kind in ((step.dq, Kind.Q_GRAD), (step.dk, Kind.KV_GRAD))
                )
                marked.append(step._replace(dq_sums=dq, dk_sums=dk))
            case steps.FinishStep():
                marked.append(
                    _received_as(step, steps.GRADS, lambda m: m._replace(sums=_sums(m.packed, m.kind, begun, sizes)))
                )
            case _:
                marked.append(step)
    return marked


def _sums(packed: steps.Packed, kind: Kind, begun: set[steps.Value], sizes: _SizesOf) -> steps.Sums:
    of = sizes[Kind.Q if kind == Kind.Q_GRAD else Kind.KV]
    named = Counter(run.buffer for run in packed.runs)
    keeps = [
        named[run.buffer] == 1 and (kind, run.buffer) not in begun and steps.is_whole(run, packed, of[run.buffer])
        for run in packed.runs
    ]
    begun |= {(kind, run.buffer) for run in packed.runs}
    if True not in keeps:
        return steps.Sums((), packed)
    rest = [i for i, keep in enumerate(keeps) if not keep]
    added = packed._replace(
        runs=tuple(packed.runs[i] for i in rest), indices=tuple(packed.indices[i] for i in rest), direct=False
    )
    return steps.Sums(tuple(run for run, keep in zip(packed.runs, keeps, strict=True) if keep), added)


def _counts(taken: Sequence[steps.Step], *, forward: bool, remap_out: int | None = None) -> tuple[tuple[str, int], ...]:
    """(name, count) pairs that one run of these steps adds to its `runtime.recorder.Counters`.
    `remap_out`: the exchange that takes a remap's outputs back to their owners.
    """
    count: Counter[str] = Counter()
    count["forward_calls" if forward else "backward_calls"] = 1
    for step in taken:
        match step:
            case steps.Launch() | steps.GradLaunch():
                count["kernel_calls"] += step.calls
                count[f"kernel_calls_{step.zone if step.zone in _ZONES else 'other'}"] += step.calls
            case steps.IssueStep(exchange):
                count[f"exchanges_{exchange.collective}"] += bool(exchange.sends or exchange.receives or exchange.group)
                count["routed_transfers"] += len(exchange.routed_sends)
                if forward and exchange.id != remap_out:
                    for message in exchange.receives:
                        count[_TOKENS[message.kind]] += message.packed.num_rows
                elif forward:  # one output for each token remapped to this rank
                    remapped = sum(message.packed.num_rows for message in exchange.sends)
                    count["remap_tokens_received"] += remapped
                    count["q_tokens_received"] -= remapped
                    count["kv_tokens_received"] -= remapped
            case steps.FinishStep():
                pass
    return tuple(count.items())


def _last_uses(taken: Sequence[steps.Step]) -> tuple[tuple[steps.Value, ...], ...]:
    """For each step, the received inputs, and gradients beside them, that no later step touches."""
    last: dict[steps.Value, int] = {}
    for index, step in enumerate(taken):
        match step:
            case steps.IssueStep(exchange):
                sent = [m for m in exchange.sends if m.kind in steps.INPUTS]
                touched = {(m.kind, run.buffer) for m in sent for run in m.packed.runs}
            case steps.FinishStep(exchange):
                touched = {(m.kind, m.buffer) for m in exchange.receives}
            case steps.Launch() | steps.GradLaunch():
                touched = step.reads
        for value in (*touched, *steps.grads_of(step)):
            if value[1] > 0:
                last[value] = index
    last_of: list[list[steps.Value]] = [[] for _ in taken]
    for value, index in sorted(last.items()):
        last_of[index].append(value)
    return tuple(tuple(values) for values in last_of)


# Kernel launches of one rank: the pairs of its attention ops, looked up in its buffers, all ops of
# a phase at once.
#
# Pairs become kernel entries: as few (query rows, key rows) blocks as the buffers' order allows. An
# entry is *full* (every query sees every key) or *causal*, aligned at the bottom right: its last
# query sees its last key, as in FlashAttention. A pair that is neither is split in two. Neighbouring
# pairs that lie side by side in their buffers become one entry: in a zigzag ring every round then has
# one entry a sequence. Under a sliding window every pair is an entry, of FlashAttention's
# `window_size`.

_HOST = torch.device("cpu")
_NOTHING = steps.Packed((), 0, 0)
LaunchesOf: TypeAlias = dict[int, list[steps.Launch | steps.GradLaunch]]


class _Regions(NamedTuple):
    regions: arrays.Ints
    index: RegionIndex
    row_ranges: arrays.Ints

    def chosen(self, which: arrays.Ints, index: RegionIndex) -> tuple[arrays.Ints, arrays.Ints]:
        """Only the regions `which`, in this order, and their row ranges in `index`."""
        regions = self.regions[:, which]
        if index is not self.index or self.row_ranges.shape[1] > self.regions.shape[1]:
            return regions, index.resolve(regions)
        row_ranges = self.row_ranges[:, which]  # one for each
        row_ranges[RowRange.REGION] = np.arange(len(which))
        return regions, row_ranges


class _LookedUp(NamedTuple):
    """The launches of a phase, by number."""

    queries: _Regions
    keys: _Regions
    launch: arrays.Ints
    fused: _Fused
    entries: list[Entries]
    q: list[steps.Operand]
    k: list[steps.Operand]
    reads: list[frozenset[tuple[Kind, int]]]
    op_of: list[int]

    def reversed(self, program: RankProgram) -> _LookedUp:
        """The launches of the backward, which are the forward's in reverse."""
        indices = [
            [i for i, op in enumerate(ops) if isinstance(op, Attend | AttendGrad)]
            for ops in (program.forward, program.backward)
        ]
        backward = dict(zip(indices[0], reversed(indices[1]), strict=True))
        return self._replace(op_of=[backward[op] for op in self.op_of])


class _Launching:
    """Makes launches for one kernel under one mask."""

    def __init__(self, kernel: Kernel, mask: Mask) -> None:
        self.kernel, self.mask = kernel, mask

    def look_up(self, ops: Sequence[Op], values: Mapping[Kind, RegionIndex]) -> _LookedUp | None:
        """The launches of a phase; None: it has none. `values`: where it finds queries and keys."""
        tables = [(i, op.pairs) for i, op in enumerate(ops) if isinstance(op, Attend | AttendGrad)]
        if not tables:
            return None
        pairs, launch, op_of = _by_heads(*arrays.numbered(tables, Pair.WIDTH))
        count = len(op_of)
        pairs, launch = _simple_pairs(pairs.T, launch, self.mask)
        sides = zip((pairs[Pair.QUERY], pairs[list(Pair.KEY)]), (values[kind] for kind in steps.INPUTS), strict=True)
        queries, keys = (_Regions(regions, index, index.resolve(regions)) for regions, index in sides)
        (q, q_row), (k, k_row) = (self.operands(regions, launch, count) for regions in (queries, keys))
        fused = _fuse(pairs, launch, q_row, k_row, self.mask)
        reads = [_reads(*operands) for operands in zip(q, k, strict=True)]
        return _LookedUp(queries, keys, launch, fused, _entries(fused, count), q, k, reads, op_of)

    def operands(
        self, wanted_regions: _Regions, launch: arrays.Ints, count: int
    ) -> tuple[list[steps.Operand], arrays.Ints]:
        """Of each launch (one head span) the operand, and the row where each of its regions begins."""
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
        operands = [steps.Operand(*place, _NOTHING) for place in places]
        for i in [i for i, is_direct in enumerate(direct) if not is_direct]:
            own = slice(starts[i], starts[i + 1])
            union = _union(regions[:, own])
            sizes = union[Region.STOP] - union[Region.START]
            runs = grouped_runs(sizes, index.resolve(union), np.zeros(len(sizes), dtype=np.int64), 1)[0]
            # Row of each region: where its span of the union begins, and how far inside it lies.
            keys = arrays.key(regions[Region.SEQ, own], regions[Region.START, own])
            at = arrays.key(union[Region.SEQ], union[Region.START]).searchsorted(keys, side="right") - 1
            row[own] = (sizes.cumsum() - sizes)[at] + regions[Region.START, own] - union[Region.START, at]
            operands[i] = steps.Operand(-1, 0, heads[i], pack_runs(runs, int(sizes.sum()), heads[i]))
        return operands, row

    def forward(self, looked_up: _LookedUp | None, zones: Sequence[str], indexes: Indexes) -> LaunchesOf:
        """Launches of the forward by op index. `zones`: the zone's name of each op."""
        launches: LaunchesOf = {}
        if looked_up is None:
            return launches
        queries, _, launch, fused, entries_of, q, k, reads, op_of = looked_up
        out = self.targets(indexes.space[Kind.Q], queries, launch, fused.q_pairs, len(op_of), distinct=True)
        for i, entries in enumerate(entries_of):
            prepared, op = self.kernel.prepare(entries, _HOST), op_of[i]
            calls = self.kernel.launches(prepared)
            launches.setdefault(op, []).append(
                steps.Launch(op, zones[op], q[i], k[i], prepared, out[i], (), reads[i], calls)
            )
        return launches

    def backward(self, looked_up: _LookedUp | None, zones: Sequence[str], indexes: Indexes) -> LaunchesOf:
        launches: LaunchesOf = {}
        if looked_up is None:
            return launches
        queries, keys, launch, fused, entries_of, q, k, reads, op_of = looked_up
        dq = self.targets(indexes.space[Kind.Q], queries, launch, fused.q_pairs, len(op_of))
        dk = self.targets(indexes.space[Kind.KV], keys, launch, fused.k_pairs, len(op_of))
        for i, entries in enumerate(_with_gradients(entries_of, fused, dq, dk)):
            prepared, op = self.kernel.prepare(entries, _HOST), op_of[i]
            calls = self.kernel.launches(prepared)
            step = steps.GradLaunch(
                op, zones[op], q[i], k[i], _final_rows(dq[i]), prepared, dq[i], dk[i], reads[i], calls
            )
            launches.setdefault(op, []).append(step)
        return launches

    def targets(
        self,
        index: RegionIndex,
        of: _Regions,
        launch: arrays.Ints,
        chosen: arrays.Ints,
        count: int,
        *,
        distinct: bool = False,
    ) -> list[steps.Packed]:
        """Where in `index` the packed rows of each launch go: `chosen` of its regions, in order."""
        (regions, row_ranges), launch_of = of.chosen(chosen, index), launch[chosen]
        sizes = regions[Region.STOP] - regions[Region.START]
        runs = grouped_runs(sizes, row_ranges, launch_of, count, distinct=distinct)
        begin = launch_of.searchsorted(np.arange(count))
        heads = (regions[Region.HEAD_STOP, begin] - regions[Region.HEAD_START, begin]).tolist()
        return [pack_runs(*one) for one in zip(runs, np.add.reduceat(sizes, begin).tolist(), heads, strict=True)]


def _attended_pairs(ops: Sequence[Op], mask: Mask) -> int:
    """Visible (query, key) pairs times query heads of all launches of a phase."""
    pairs = arrays.concat([op.pairs for op in ops if isinstance(op, Attend | AttendGrad)], Pair.WIDTH)
    visible = arrays.num_pairs(pairs[:, Pair.SEQ], arrays.Rectangles(*pairs[:, Pair.SPANS].T), mask)
    return int((visible * (pairs[:, Pair.Q_HEAD_STOP] - pairs[:, Pair.Q_HEAD_START])).sum())


def _by_heads(pairs: arrays.Ints, op_index: arrays.Ints) -> tuple[arrays.Ints, arrays.Ints, list[int]]:
    """Pairs by launch (an op and a head span), the launch of each pair, and the op of each launch."""
    keys = np.column_stack([op_index, pairs[:, Pair.Q_HEADS], pairs[:, Pair.KV_HEADS]])
    changes = (keys[1:] != keys[:-1]).any(axis=1)
    # An op of one head span has its pairs together already, and they keep their order.
    if int((changes & (keys[1:, 0] == keys[:-1, 0])).sum()):
        order = np.lexsort(keys.T[::-1])
        pairs, keys = pairs[order], keys[order]
        changes = (keys[1:] != keys[:-1]).any(axis=1)
    bounds = arrays.run_bounds(changes, len(pairs))
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


def _with_gradients(
    entries: list[Entries], fused: _Fused, dq: list[steps.Packed], dk: list[steps.Packed]
) -> Iterator[Entries]:
    """Entries with their rows of the output gradient, which lie where `dq` goes."""
    sizes = fused.q_stop - fused.q_start
    bounds = fused.launch.searchsorted(np.arange(len(entries) + 1))
    # Rows of `dout` are the buffer's where `dq` goes to consecutive ones, else packed from 0 on.
    packed = sizes.cumsum() - sizes
    begins = np.array([to.runs[0].start if to.direct else 0 for to in dq], dtype=np.int64)
    start = packed + np.repeat(begins - packed[bounds[:-1]], np.diff(bounds))
    rows = list(zip(start.tolist(), (start + sizes).tolist(), strict=True))
    for one, (a, b), *grads in zip(entries, pairwise(bounds.tolist()), dq, dk, strict=True):
        heads = (grads[0].num_heads, grads[1].num_heads)
        yield Entries(one.q, one.k, one.causal, tuple(rows[a:b]), one.windows, heads)


def _final_rows(packed: steps.Packed) -> steps.Operand:
    """Operand of the output's gradient, the output and its LSE: a view, or gathered."""
    if packed.direct:
        return steps.Operand(packed.runs[0].buffer, packed.runs[0].buffer_head, packed.num_heads, packed)
    return steps.Operand(-1, 0, packed.num_heads, packed)


def _union(regions: arrays.Ints) -> arrays.Ints:
    """Disjoint regions [5, m], in order, over the tokens of `regions` [5, n] of one head span."""
    spans = union_of(regions[Region.SPAN].T)
    return np.concatenate([spans.T, np.tile(regions[Region.HEADS, :1], len(spans))])


def _reads(q: steps.Operand, k: steps.Operand) -> frozenset[tuple[Kind, int]]:
    if q.buffer >= 0 and k.buffer >= 0:
        return frozenset(((Kind.Q, q.buffer), (Kind.KV, k.buffer)))
    buffers: set[tuple[Kind, int]] = set()
    for kind, operand in ((Kind.Q, q), (Kind.KV, k)):
        buffers |= (
            {(kind, operand.buffer)} if operand.buffer >= 0 else {(kind, run.buffer) for run in operand.packed.runs}
        )
    return frozenset(buffers)


def _band(pairs: arrays.Ints, mask: Mask) -> Band:
    """The part of each pair, transposed [9, n], that a kernel computes."""
    return mask.band(pairs[Pair.SEQ], pairs[Pair.Q_START], pairs[Pair.K_START])


def _simple_pairs(pairs: arrays.Ints, launch: arrays.Ints, mask: Mask = CAUSAL) -> tuple[arrays.Ints, arrays.Ints]:
    """Pairs, transposed [9, n], each full or causal at the bottom right, and their launches."""
    # Queries and keys that take no part are left out.
    band = _band(pairs, mask)
    pairs = arrays.trim_pairs(pairs.T, mask).T
    if band.windowed:
        return pairs, launch
    neither = band.causal & (pairs[Pair.K_STOP] > pairs[Pair.Q_START] + 1) & (pairs[Pair.K_STOP] < pairs[Pair.Q_STOP])
    if not neither.any():
        return pairs, launch
    upper, lower = pairs.copy(), pairs[:, neither]
    upper[Pair.Q_STOP, neither] = upper[Pair.K_STOP, neither]  # queries up to the last key: causal
    lower[Pair.Q_START] = lower[Pair.K_STOP]  # the queries behind it see all of the keys
    order = np.argsort(np.concatenate([np.arange(len(launch)), np.flatnonzero(neither)]), kind="stable")
    return np.concatenate([upper, lower], axis=1)[:, order], np.concatenate([launch, launch[neither]])[order]


@dataclass(frozen=True, slots=True)
class _Fused:
    """Kernel entries of many launches, [n] each. Rows are rows of the launch's operands."""

    # Ascending.
    launch: arrays.Ints

    q_start: arrays.Ints
    q_stop: arrays.Ints
    k_start: arrays.Ints
    k_stop: arrays.Ints
    causal: arrays.Bools
    # Indices into the simple pairs whose query (key) regions, in order, make up the entries' packed
    # rows.
    q_pairs: arrays.Ints
    k_pairs: arrays.Ints
    # [n, 2]: where the mask has a window.
    windows: arrays.Ints | None = None

    def __len__(self) -> int:
        return len(self.q_start)


def _fuse(
    pairs: arrays.Ints, launch: arrays.Ints, q_row: arrays.Ints, k_row: arrays.Ints, mask: Mask = CAUSAL
) -> _Fused:
    """Join simple `pairs` [9, n] into entries. `launch` [n]: of each pair, ascending; `q_row`,
    `k_row` [n]: operand rows where its regions begin.
    """
    q_stop = q_row + pairs[Pair.Q_STOP] - pairs[Pair.Q_START]
    k_stop = k_row + pairs[Pair.K_STOP] - pairs[Pair.K_START]
    band = _band(pairs, mask)
    if band.windowed:
        # Of a trimmed pair less than the reach; negative where queries see keys behind their own.
        behind = pairs[Pair.Q_STOP] - pairs[Pair.K_STOP]
        num_q, num_k = (pairs[stop] - pairs[stop - 1] for stop in (Pair.Q_STOP, Pair.K_STOP))
        left, right = band.reach - 1 - behind, np.where(band.causal, behind, num_q)
        # One number for all sides that hide nothing: entries of unlike windows are calls of their own.
        wide = mask.window_size - 1
        left = np.where((left >= num_k - 1) & (wide >= num_k - 1), wide, left)
        right = np.where((right >= num_q - 1) & (wide >= num_q - 1) & (right > 0), wide, right)
        windows, each = np.stack([left, right], axis=1), np.arange(len(launch))
        return _Fused(launch, q_row, q_stop, k_row, k_stop, np.zeros(len(launch), dtype=bool), each, each, windows)
    causal = (pairs[Pair.K_STOP] > pairs[Pair.Q_START] + 1) & band.causal
    # One after the other, the keys of the same queries: all but the last must be full.
    linked = (q_row[1:] == q_row[:-1]) & (q_stop[1:] == q_stop[:-1]) & (k_stop[:-1] == k_row[1:]) & ~causal[:-1]
    linked &= (pairs[Pair.SEQ, 1:] == pairs[Pair.SEQ, :-1]) & (launch[1:] == launch[:-1])
    bounds = arrays.run_bounds(~linked, len(launch))
    first, last = bounds[:-1], bounds[1:] - 1
    a, b, c, d, e = q_row[first], q_stop[first], k_row[first], k_stop[last], causal[last]
    # One below the other, queries of the same keys: all full over the same keys, or a staircase
    # that is causal as a whole.
    below = b[:-1] == a[1:]
    full = ~e[1:] & ~e[:-1] & (c[1:] == c[:-1]) & (d[1:] == d[:-1])
    stairs = e[1:] & e[:-1] & (c[1:] == c[:-1]) & (d[1:] - d[:-1] == b[1:] - b[:-1])
    linked = below & (full | stairs) & (launch[first[1:]] == launch[first[:-1]])
    bounds = arrays.run_bounds(~linked, len(first))
    top, bottom = bounds[:-1], bounds[1:] - 1
    lengths = last[bottom] - first[bottom] + 1
    offsets = np.cumsum(lengths) - lengths
    # The ranges [first, last] of each entry's bottom row, one behind the other.
    k_pairs = np.repeat(first[bottom] - offsets, lengths) + np.arange(int(lengths.sum()))
    return _Fused(launch[first[top]], a[top], b[bottom], c[bottom], d[bottom], e[bottom], first, k_pairs)
