"""From one rank's program to its steps: every region looked up, all ops of a phase at once.

A ring over 64 ranks has 64 launches and 126 messages a phase; looked up one by one they would cost
more than the step saves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from megatron_balance.compile import order
from megatron_balance.compile.ping_pong import Cuts
from megatron_balance.compile.pipeline import PhaseOrder
from megatron_balance.compile.transpose import OpZones, Policy
from megatron_balance.compile.transpose import places as places_of
from megatron_balance.ir.arrays import Ints, as_array, concat
from megatron_balance.ir.columns import Fragment, Transfer
from megatron_balance.ir.program import Exchange, Kind, Op, RankProgram
from megatron_balance.runtime.counters import counts
from megatron_balance.runtime.kernels.base import Kernel
from megatron_balance.runtime.lower.launches import LaunchesOf, Launching, LookedUp, attended_pairs
from megatron_balance.runtime.lower.memory import AttentionShape, is_whole
from megatron_balance.runtime.lower.messages import Indexes, MessageLookup, Messages, lower_routes
from megatron_balance.runtime.lower.regions import RegionIndex, without
from megatron_balance.runtime.lower.steps import (
    GRADS,
    INPUTS,
    FinishStep,
    GradLaunch,
    IssueStep,
    Launch,
    Packed,
    Phase,
    PhaseName,
    Step,
    Sums,
    Value,
    last_uses,
)


class Setting(NamedTuple):
    """Surroundings of a rank's program."""

    ranks_per_node: int
    orders: tuple[PhaseOrder, PhaseOrder]
    nano_batch: int
    phases: Collection[PhaseName]


class Lowering:
    """The phases of one rank, and `sizes`: (rows, heads) of its buffers by kind of input.

    `like`: of the same plan by another policy, whose forward it shares.
    """

    def __init__(
        self,
        program: RankProgram,
        shape: AttentionShape,
        policy: Policy,
        kernel: Kernel,
        setting: Setting,
        like: Lowering | None = None,
    ) -> None:
        self.program = program
        self.ranks_per_node, self.orders, self.nano_batch, phases = setting
        self.messages = MessageLookup(program, self.ranks_per_node, self.nano_batch)
        self.launching = Launching(kernel, program.mask)
        self.looked_up: LookedUp | None = None
        self.phases: dict[PhaseName, Phase] = {}
        self.sizes = self.messages.sizes
        if like is not None and "forward" in phases and self.shares_forward(like):
            self.share(like)
        else:
            self.lower_forward(shape, free=policy == "replay", lowered="forward" in phases)
        if "backward" in phases:
            self.phases["backward"] = self.backward(self.kept, again=policy == "replay")

    def shares_forward(self, like: Lowering) -> bool:
        """Whether the forward of another lowering is this one's, but for what it lets go."""
        own, other = self.orders[0], like.orders[0]
        return (own.steps, own.cuts, self.program.forward, self.program.remap_in) == (
            *(other.steps, other.cuts, like.program.forward, like.program.remap_in),
        )

    def share(self, like: Lowering) -> None:
        """Take the forward of another lowering: policy replay lets go what policy keep does not."""
        for kind in INPUTS:
            self.sizes[kind].update(like.forward_sizes[kind])
        self.messages.num_buffers = like.num_forward_buffers
        self.kept, self.indexes, self.looked_up = like.kept, like.forward_indexes, like.looked_up
        forward = like.phases["forward"]
        self.phases["forward"] = replace(forward, last_uses=last_uses(forward.steps))
        self.note_forward()

    def note_forward(self) -> None:
        self.forward_sizes = {kind: dict(of) for kind, of in self.sizes.items()}
        self.num_forward_buffers, self.forward_indexes = self.messages.num_buffers, self.indexes

    def lower_forward(self, shape: AttentionShape, *, free: bool, lowered: bool) -> None:
        """Look up the forward's messages, on which the backward rests, too, and, if `lowered`, its
        steps.
        """
        program = self.program
        owned = as_array(program.owned)
        sizes = owned[:, Fragment.STOP] - owned[:, Fragment.START]
        heads = {Kind.Q: shape.num_heads, Kind.KV: shape.num_kv_heads}
        for kind in INPUTS:
            self.sizes[kind][0] = (int(sizes.sum()), heads[kind])
        own = {
            kind: np.column_stack(
                [owned, np.tile([0, heads[kind], 0], (len(owned), 1)), np.cumsum(sizes) - sizes]
            ).astype(np.int64)
            for kind in INPUTS
        }
        self.kept = {kind: _kept(program, own[kind]) for kind in INPUTS}
        # Gradients lie beside what the forward received, so this is looked up for the backward
        # alone too.
        sent, received, instances = self.messages.sides(program.forward, forward=True)
        space = {kind: RegionIndex(np.concatenate([self.kept[kind], instances[kind]])) for kind in INPUTS}
        self.indexes = Indexes(space, space, {kind: RegionIndex(own[kind]) for kind in INPUTS})
        if lowered:
            self.phases["forward"] = self.forward((sent, received), free=free)
        self.note_forward()

    def forward(self, sides: tuple[Messages, Messages], *, free: bool) -> Phase:
        ops, places = self.program.forward, places_of(self.program, backward=False)
        self.looked_up = self.launching.look_up(ops, self.indexes.values)
        launches = self.launching.forward(self.looked_up, places[1], self.indexes.space)
        return self.phase(ops, sides, places, launches, forward=True, free=free)

    def backward(self, kept: dict[Kind, Ints], *, again: bool) -> Phase:
        """`kept`: owned rows that are not remapped; `again`: inputs are received once more."""
        ops, places = self.program.backward, places_of(self.program, backward=True)
        sent, received, instances = self.messages.sides(ops, forward=False)
        if again:
            values = {kind: RegionIndex(np.concatenate([kept[kind], instances[kind]])) for kind in INPUTS}
            self.indexes = self.indexes._replace(values=values)
            looked_up = self.launching.look_up(ops, values)
        else:  # the same launches in reverse, over the same rows
            looked_up = None if self.looked_up is None else self.looked_up.reversed(self.program)
        launches = self.launching.backward(looked_up, places[1], self.indexes.space)
        return self.phase(ops, (sent, received), places, launches, forward=False, free=True)

    def phase(
        self,
        ops: Sequence[Op],
        sides: tuple[Messages, Messages],
        places: OpZones,
        launches: LaunchesOf,
        *,
        forward: bool,
        free: bool,
    ) -> Phase:
        """Steps of one phase. `free`: drop received inputs once nothing reads them."""
        queues, zones = places
        routed, relay_tasks = lower_routes(
            ops, queues, self.program.rank, self.ranks_per_node, forward=forward, nano_batch=self.nano_batch
        )
        exchanges = self.messages.exchanges(ops, sides, zones, routed, self.indexes, forward=forward)
        steps: list[Step] = []
        ordered, where, _ = self.orders[0 if forward else 1]
        begins: list[int] = []  # of each step in the order: its first one here
        for step in ordered:
            begins.append(len(steps))
            match step:
                case order.Start(op):
                    steps.append(IssueStep(exchanges[op]))
                case order.Finish(op):
                    steps.append(FinishStep(exchanges[op]))
                case order.RunLaunches(op):
                    steps += launches[op]
        begins.append(len(steps))
        blank: tuple[int, ...] = ()
        if forward:
            steps, blank = self.mark_merges(steps)
        else:
            steps = _mark_sums(steps, self.sizes)
        remap_out = self.program.num_exchanges - 1 if self.program.remap_in else None
        attended = ("attended_pairs", attended_pairs(ops, self.program.mask))
        work = (*counts(steps, forward=forward, remap_out=remap_out), attended)
        cuts = Cuts(*(begins[at] for at in where))
        return Phase(tuple(steps), cuts, last_uses(steps) if free else ((),) * len(steps), blank, work, relay_tasks)

    def mark_merges(self, steps: list[Step]) -> tuple[list[Step], tuple[int, ...]]:
        """Say of every output run whether its rows hold a partial already; and buffers that start
        blank, since that differs by row.
        """
        outputs = [s.out for s in steps if isinstance(s, Launch)]
        outputs += [
            m.packed for s in steps if isinstance(s, FinishStep) for m in s.exchange.receives if m.kind == Kind.OUT
        ]
        sizes = self.sizes[Kind.Q]
        # No run splits heads: a flag a row is enough.
        by_rows = all(run.num_heads == sizes[run.buffer][1] for packed in outputs for run in packed.runs)
        written = {
            buffer: np.zeros((rows, 1 if by_rows else heads), dtype=bool) for buffer, (rows, heads) in sizes.items()
        }
        blank: set[int] = set()
        whole: set[tuple[int, ...]] = set()  # (buffer, start, stop, head, heads), all written

        def mark(packed: Packed) -> tuple[bool, ...]:
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

        marked: list[Step] = []
        for step in steps:
            if isinstance(step, Launch):
                marked.append(step._replace(merges=mark(step.out)))
            elif isinstance(step, FinishStep) and any(m.kind == Kind.OUT for m in step.exchange.receives):
                receives = tuple(
                    m._replace(merges=mark(m.packed)) if m.kind == Kind.OUT else m for m in step.exchange.receives
                )
                marked.append(FinishStep(step.exchange._replace(receives=receives)))
            else:
                marked.append(step)
        return marked, tuple(sorted(blank))


def _kept(program: RankProgram, own: Ints) -> Ints:
    tables = [op.transfers for op in program.forward if isinstance(op, Exchange) and op.id < program.remap_in]
    given = concat(tables, Transfer.WIDTH)
    sent = (given[:, Transfer.SRC] == program.rank) & (given[:, Transfer.KIND] == Kind.KV)
    return without(own, given[sent][:, Transfer.SPAN])


_SizesOf = Mapping[Kind, Mapping[int, tuple[int, int]]]
"""(rows, heads) of buffers by kind of input and number."""


def _mark_sums(steps: Sequence[Step], sizes: _SizesOf) -> list[Step]:
    """Say of every gradient that a step brings which of its runs are kept and which are added.

    A ring's launch gives the gradients of all keys of the buffer that it read, in order: the first
    of a buffer is kept as it comes, so that nothing has to be zeroed for it, and nothing added to
    zero.
    """
    begun: set[Value] = set()
    marked: list[Step] = []
    for step in steps:
        match step:
            case GradLaunch():
                dq, dk = (
                    _sums(packed, kind, begun, sizes)
                    for packed, kind in ((step.dq, Kind.Q_GRAD), (step.dk, Kind.KV_GRAD))
                )
                marked.append(step._replace(dq_sums=dq, dk_sums=dk))
            case FinishStep(exchange) if any(m.kind in GRADS for m in exchange.receives):
                receives = tuple(
                    m._replace(sums=_sums(m.packed, m.kind, begun, sizes)) if m.kind in GRADS else m
                    for m in exchange.receives
                )
                marked.append(FinishStep(exchange._replace(receives=receives)))
            case _:
                marked.append(step)
    return marked


def _sums(packed: Packed, kind: Kind, begun: set[Value], sizes: _SizesOf) -> Sums:
    of = sizes[Kind.Q if kind == Kind.Q_GRAD else Kind.KV]
    named = Counter(run.buffer for run in packed.runs)
    keeps = [
        named[run.buffer] == 1 and (kind, run.buffer) not in begun and is_whole(run, packed, of[run.buffer])
        for run in packed.runs
    ]
    begun |= {(kind, run.buffer) for run in packed.runs}
    if True not in keeps:
        return Sums((), packed)
    rest = [i for i, keep in enumerate(keeps) if not keep]
    added = packed._replace(
        runs=tuple(packed.runs[i] for i in rest), indices=tuple(packed.indices[i] for i in rest), direct=False
    )
    return Sums(tuple(run for run, keep in zip(packed.runs, keeps, strict=True) if keep), added)
