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
from megatron_balance.compile.pipeline import CompiledRank
from megatron_balance.compile.transpose import OpZones, Policy
from megatron_balance.compile.transpose import places as places_of
from megatron_balance.ir.arrays import Ints, as_array, concat
from megatron_balance.ir.columns import Fragment, Transfer
from megatron_balance.ir.program import Exchange, Kind, RankProgram
from megatron_balance.runtime.kernels.base import Kernel
from megatron_balance.runtime.lower.launches import LaunchesOf, Launching, LookedUp, attended_pairs
from megatron_balance.runtime.lower.memory import AttentionShape
from megatron_balance.runtime.lower.messages import PhaseMessages
from megatron_balance.runtime.lower.regions import Indexes, RegionIndex, without
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
    is_whole,
    last_uses,
)

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
        self.launching = Launching(kernel, self.program.mask)
        self.phases: dict[PhaseName, Phase] = {}
        if like is not None and "forward" in setting.phases and self.shares_forward(like):
            # What policy keep hands to the backward, policy replay lets go.
            self.lookup, phase = like.lookup, like.phases["forward"]
            self.phases["forward"] = replace(phase, last_uses=last_uses(phase.steps))
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
        """Look up the forward's rows, on which the backward rests, too: its gradients lie beside what
        the forward received.
        """
        program = self.program
        owned = as_array(program.owned)
        rows = owned[:, Fragment.STOP] - owned[:, Fragment.START]
        heads = {Kind.Q: shape.num_heads, Kind.KV: shape.num_kv_heads}
        # The columns of `Instance`: the rank's own fragments, one behind the other in buffer 0.
        begins = np.cumsum(rows) - rows
        own = {
            kind: np.column_stack([owned, np.tile([0, heads[kind], 0], (len(owned), 1)), begins]).astype(np.int64)
            for kind in INPUTS
        }
        kept = {kind: _kept(program, own[kind]) for kind in INPUTS}
        messages = PhaseMessages(program, program.forward, forward=True)
        space = {kind: RegionIndex(np.concatenate([kept[kind], messages.instances[kind]])) for kind in INPUTS}
        indexes = Indexes(space, space, {kind: RegionIndex(own[kind]) for kind in INPUTS})
        sizes = {kind: {0: (int(rows.sum()), heads[kind]), **messages.sizes[kind]} for kind in INPUTS}
        launches = self.launching.look_up(program.forward, space) if "forward" in self.setting.phases else None
        return _ForwardLookup(messages, kept, indexes, launches, sizes)

    def forward(self, *, free: bool) -> Phase:
        messages, _, indexes, launches, sizes = self.lookup
        places = places_of(self.program, backward=False)
        steps = self.launching.forward(launches, places.zones, indexes)
        return self.phase(messages, indexes, places, steps, sizes, free=free)

    def backward(self, *, again: bool) -> Phase:
        """`again`: inputs are received once more, into buffers of their own."""
        program, (before, kept, indexes, launches, _) = self.program, self.lookup
        messages = PhaseMessages(program, program.backward, forward=False, num_buffers=before.num_buffers)
        for kind in INPUTS:
            self.sizes[kind].update(messages.sizes[kind])
        places = places_of(program, backward=True)
        if again:
            values = {kind: RegionIndex(np.concatenate([kept[kind], messages.instances[kind]])) for kind in INPUTS}
            indexes = indexes._replace(values=values)
            launches = self.launching.look_up(program.backward, values)
        elif launches is not None:  # the same launches in reverse, over the same rows
            launches = launches.reversed(program)
        steps = self.launching.backward(launches, places.zones, indexes)
        return self.phase(messages, indexes, places, steps, self.sizes, free=True)

    def phase(
        self,
        messages: PhaseMessages,
        indexes: Indexes,
        places: OpZones,
        launches: LaunchesOf,
        sizes: _SizesOf,
        *,
        free: bool,
    ) -> Phase:
        """One phase from its exchanges and launches. `free`: drop received inputs once nothing reads
        them.
        """
        forward, ops, program = messages.forward, messages.ops, self.program
        ranks_per_node, nano_batch, _ = self.setting
        exchanges, relay_tasks = messages.steps(indexes, places, ranks_per_node, nano_batch)
        steps: list[Step] = []
        ordered, where, _ = self.compiled.forward if forward else self.compiled.backward
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
            steps, blank = _mark_merges(steps, sizes[Kind.Q])
        else:
            steps = _mark_sums(steps, sizes)
        remap_out = program.num_exchanges - 1 if program.remap_in else None
        attended = ("attended_pairs", attended_pairs(ops, program.mask))
        work = (*_counts(steps, forward=forward, remap_out=remap_out), attended)
        cuts = Cuts(*(begins[at] for at in where))
        return Phase(tuple(steps), cuts, last_uses(steps) if free else ((),) * len(steps), blank, work, relay_tasks)


class _ForwardLookup(NamedTuple):
    """Rows of the forward, on which the backward rests."""

    messages: PhaseMessages
    # By kind of input, instances of owned rows that are not remapped.
    kept: dict[Kind, Ints]
    indexes: Indexes
    launches: LookedUp | None
    sizes: dict[Kind, dict[int, tuple[int, int]]]


def _mark_merges(steps: Sequence[Step], sizes: Mapping[int, tuple[int, int]]) -> tuple[list[Step], tuple[int, ...]]:
    """Say of every output run whether its rows hold a partial already; and buffers that start
    blank, since that differs by row.
    """
    outputs = [s.out for s in steps if isinstance(s, Launch)]
    outputs += [m.packed for s in steps if isinstance(s, FinishStep) for m in s.exchange.receives if m.kind == Kind.OUT]
    # No run splits heads: a flag a row is enough.
    by_rows = all(run.num_heads == sizes[run.buffer][1] for packed in outputs for run in packed.runs)
    written = {buffer: np.zeros((rows, 1 if by_rows else heads), dtype=bool) for buffer, (rows, heads) in sizes.items()}
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


def _counts(steps: Sequence[Step], *, forward: bool, remap_out: int | None = None) -> tuple[tuple[str, int], ...]:
    """(name, count) pairs that one run of these steps adds to its `runtime.counters.Counters`.

    `remap_out`: the exchange that takes a remap's outputs back to their owners.
    """
    count: Counter[str] = Counter()
    count["forward_calls" if forward else "backward_calls"] = 1
    for step in steps:
        match step:
            case Launch() | GradLaunch():
                count["kernel_calls"] += step.calls
                count[f"kernel_calls_{step.zone if step.zone in _ZONES else 'other'}"] += step.calls
            case IssueStep(exchange):
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
            case FinishStep():
                pass
    return tuple(count.items())
