"""Layers over two nano-batches, interleaved (`compile.ping_pong`) on one compute stream.

Two engines, as for one call. `events` joins the nano-batches' phases, layer after layer, to one
phase with the steps in the order of the segments. `rounds` is for task tables over many ranks: it
takes the segments one by one, all ranks at once; transfers of one exchange share NICs with one
another but not with those of the other traffic class, and kernels are not slowed by them.

All layers are alike, so a few are simulated and the rest counted: from the second layer on, each
takes what the last one did.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_balance.analysis.clocks import COPIED, MOVED, Clocks, Outcome, hosts_behind
from megatron_balance.analysis.machine import Machine
from megatron_balance.analysis.memory import Policy
from megatron_balance.analysis.rounds import stages, turned
from megatron_balance.analysis.tables import Tables, ZoneTable
from megatron_balance.compile import ping_pong
from megatron_balance.compile.order import RunLaunches, Step
from megatron_balance.compile.ping_pong import Cuts, Segment
from megatron_balance.compile.pipeline import compile_ranks
from megatron_balance.cost.base import LAUNCHES_OF_RUN, Floats, Ints
from megatron_balance.errors import ConfigError
from megatron_balance.ir.columns import Message
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.patterns import pattern_of
from megatron_balance.patterns.base import PointToPoint
from megatron_balance.simulator.attention import (
    SMALL,
    BothPhases,
    EngineName,
    Transport,
    check_engine,
    linear_s,
    play_events,
)
from megatron_balance.simulator.phase import SimulatedPhase, phase_of, ring_names

SIMULATED = 3
"""Layers that are simulated at most; the others are counted like the last of them."""


@dataclass(frozen=True, slots=True)
class PingPongMode:
    """Options of nano-batches through layers, two of them the ablations of DistCA's Fig. 11.

    `interleaved`: nano-batches take turns; else every exchange is waited for where it is issued
    ("Single Stream"). `signal`: transfers carry next to nothing, and nothing is packed, so that
    only computation takes time ("Signal").
    """

    policy: Policy = "keep"
    interleaved: bool = True
    signal: bool = False
    engine: EngineName = "auto"
    transport: Transport = "streams"


def layers(
    nano_batches: Sequence[MicrobatchPlan],
    machine: Machine,
    num_layers: int,
    mode: PingPongMode = PingPongMode(),
    experts: Sequence[tuple[Floats | float, Floats | float]] = ((0.0, 0.0),) * ping_pong.NUM_NANO_BATCHES,
) -> BothPhases:
    """Run both nano-batches through layers, all ranks entering at once.

    Args:
        nano_batches: their plans.
        machine: that runs them.
        num_layers: of the model, or of a pipeline chunk.
        mode: options.
        experts: by nano-batch, seconds that experts add to its linear step, forward and backward ([R],
            or the same on all ranks); their exchange shares no NIC with attention's transfers.

    Raises:
        ConfigError: the round engine is asked for what it does not know.
    """
    for nano_batch in nano_batches:
        machine.check(nano_batch)
    zones = [zone for nano_batch in nano_batches for zone in nano_batch.zones]
    point_to_point = all(pattern_of(zone).traffic is PointToPoint for zone in zones)
    rounds_apply = (
        point_to_point and not any(nano_batch.moves for nano_batch in nano_batches) and mode.transport == "streams"
    )
    check_engine(mode.engine, machine)
    if mode.engine == "rounds" and not rounds_apply:
        raise ConfigError(
            "the engine 'rounds' runs nano-batches of task tables on streams only; use the engine 'events'"
        )
    small = machine.num_ranks <= SMALL or machine.cost.contention.waits
    rounds = rounds_apply and (mode.engine == "rounds" or (mode.engine == "auto" and not small))
    linear = [
        (forward + own[0], backward + own[1])
        for (forward, backward), own in zip((linear_s(h, machine) for h in nano_batches), experts, strict=True)
    ]
    simulated = (
        _Rounds(nano_batches, machine, linear, mode) if rounds else _PingPongEvents(nano_batches, machine, linear, mode)
    )
    outcomes: list[Outcome] = []
    for backward in (False, True):
        if num_layers <= SIMULATED:
            outcomes.append(simulated.run(num_layers, backward=backward))
            continue
        less, more = (simulated.run(n, backward=backward) for n in (SIMULATED - 1, SIMULATED))
        outcomes.append(_extended(less, more, num_layers - SIMULATED))
    return BothPhases(*outcomes)


def _extended(less: Outcome, more: Outcome, times: int) -> Outcome:
    """`more` and as many layers again as `times`, each like its last."""

    def extended(a: Floats, b: Floats) -> Floats:
        return b + times * (b - a)

    return Outcome(
        extended(less.end_s, more.end_s),
        extended(less.compute_s, more.compute_s),
        extended(less.bytes_moved, more.bytes_moved),
    )


def _segments(num_layers: int, mode: PingPongMode, *, backward: bool) -> tuple[Segment, ...]:
    segments = (ping_pong.forward if mode.interleaved else ping_pong.one_by_one)(num_layers)
    return ping_pong.backward(segments) if backward else segments


def _is_layer(segment: Segment, num_layers: int) -> bool:
    """Whether a linear step counts: behind the last layer's attention there is none."""
    return segment.layer < num_layers


class _PingPongEvents:
    def __init__(
        self,
        nano_batches: Sequence[MicrobatchPlan],
        machine: Machine,
        linear: Sequence[tuple[Floats, Floats]],
        mode: PingPongMode,
    ) -> None:
        self.machine, self.linear, self.mode = machine, linear, mode
        self.nano_batches = [_NanoBatchPhases.of(nano_batch, machine, mode) for nano_batch in nano_batches]

    def run(self, num_layers: int, *, backward: bool) -> Outcome:
        ranks = self.machine.num_ranks
        seconds, blocks_s = ([list[float]() for _ in range(ranks)] for _ in range(2))
        joint = SimulatedPhase([()] * ranks, seconds, [list[int]() for _ in range(ranks)], blocks_s)
        steps: list[list[Step]] = [[] for _ in range(ranks)]
        stride = 1 + max(
            (max(ids, default=-1) for nano_batch in self.nano_batches for ids in nano_batch.phases[backward].exchanges),
            default=0,
        )
        for segment in _segments(num_layers, self.mode, backward=backward):
            if segment.part == "linear":
                if _is_layer(segment, num_layers):
                    for rank, seconds in enumerate(self.linear[segment.nano_batch][backward].tolist()):
                        steps[rank].append(RunLaunches(-1))
                        joint.seconds[rank].append(seconds)
                        joint.exchanges[rank].append(-1)
                        joint.blocks_s[rank].append(0.0)
                continue
            first = (segment.layer * len(self.nano_batches) + segment.nano_batch) * stride
            self._append(joint, steps, segment, first, backward=backward)
        joint.steps = [tuple(own) for own in steps]
        for layer in range(num_layers):
            for nano_batch, own in enumerate(self.nano_batches):
                first = (layer * len(self.nano_batches) + nano_batch) * stride
                phase = own.phases[backward]
                joint.flows += [replace(flow, exchange=first + flow.exchange) for flow in phase.flows]
                joint.collectives += [replace(each, exchange=first + each.exchange) for each in phase.collectives]
        return play_events(joint, self.machine, np.zeros(ranks), self.mode.transport)

    def _append(
        self, joint: SimulatedPhase, steps: list[list[Step]], segment: Segment, first: int, *, backward: bool
    ) -> None:
        """Append every rank's steps of one segment; `first`: added to the ids of its exchanges."""
        phase, cuts = (
            self.nano_batches[segment.nano_batch].phases[backward],
            self.nano_batches[segment.nano_batch].cuts[backward],
        )
        for rank, (attend, end) in enumerate(cuts):
            whole = len(phase.steps[rank])
            begin, stop = {"start": (0, attend), "attend": (attend, end), "end": (end, whole)}[segment.part]
            steps[rank] += phase.steps[rank][begin:stop]
            joint.seconds[rank] += phase.seconds[rank][begin:stop]
            joint.blocks_s[rank] += phase.blocks_s[rank][begin:stop]
            joint.exchanges[rank] += [first + at if at >= 0 else at for at in phase.exchanges[rank][begin:stop]]


@dataclass(slots=True)
class _NanoBatchPhases:
    """A nano-batch's phases, forward and backward, with each rank's steps cut into segments."""

    phases: tuple[SimulatedPhase, SimulatedPhase]
    cuts: tuple[list[Cuts], list[Cuts]]

    @staticmethod
    def of(plan: MicrobatchPlan, machine: Machine, mode: PingPongMode) -> _NanoBatchPhases:
        ranks = compile_ranks(plan, mode.policy)
        phases: list[SimulatedPhase] = []
        cuts: list[list[Cuts]] = []
        for backward in (False, True):
            phase = phase_of(
                ranks, machine, backward=backward, sums=mode.transport == "streams", rings=ring_names(plan)
            )
            if mode.signal:
                phase.flows = [replace(flow, num_bytes=1) for flow in phase.flows]
                for steps, seconds in zip(phase.steps, phase.seconds, strict=True):
                    seconds[:] = [
                        s if isinstance(step, RunLaunches) else 0.0 for step, s in zip(steps, seconds, strict=True)
                    ]
            phases.append(phase)
            cuts.append([(each.backward if backward else each.forward).cuts for each in ranks])
        return _NanoBatchPhases((phases[0], phases[1]), (cuts[0], cuts[1]))


class _Rounds:
    """The segments one by one, all ranks at once, both nano-batches on the same clocks: a stream is
    free when both are through with it.
    """

    def __init__(
        self,
        nano_batches: Sequence[MicrobatchPlan],
        machine: Machine,
        linear: Sequence[tuple[Floats, Floats]],
        mode: PingPongMode,
    ) -> None:
        self.machine, self.linear, self.mode = machine, linear, mode
        self.tables = [Tables(nano_batch, machine) for nano_batch in nano_batches]

    def run(self, num_layers: int, *, backward: bool) -> Outcome:
        outcome, issued = self._run(num_layers, None, backward=backward)
        behind = hosts_behind(issued, outcome.end_s)
        return self._run(num_layers, behind, backward=backward)[0] if behind.any() else outcome

    def _run(self, num_layers: int, behind: Floats | None, *, backward: bool) -> tuple[Outcome, Floats]:
        """The outcome, and what hosts issued. `behind`: as in `Clocks`."""
        enter_s = np.zeros(self.machine.num_ranks)
        clocks = Clocks(self.tables[0], self.mode.policy, enter_s, backward=backward, behind=behind)
        nano_batches = [_OnClocks(clocks, tables, self.mode) for tables in self.tables]
        for segment in _segments(num_layers, self.mode, backward=backward):
            match segment.part:
                case "linear":
                    if _is_layer(segment, num_layers):
                        _compute(clocks, self.linear[segment.nano_batch][backward])
                case "start":
                    nano_batches[segment.nano_batch].start()
                case "attend":
                    nano_batches[segment.nano_batch].attend()
                case "end":
                    nano_batches[segment.nano_batch].end()
        return Outcome(clocks.done, clocks.busy, clocks.bytes_moved), clocks.issued


def _compute(clocks: Clocks, seconds: Floats) -> None:
    clocks.done = clocks.done + seconds
    clocks.busy = clocks.busy + seconds


class _OnClocks:
    """A nano-batch's task tables, one call after the other.

    `coming`: exchanges on their way, by rank [R]: when each arrives, and how long it takes to unpack.
    """

    def __init__(self, clocks: Clocks, tables: Tables, mode: PingPongMode) -> None:
        self.clocks, self.tables, self.mode = clocks, tables, mode
        self.coming: list[tuple[Floats, Floats]] = []

    def start(self) -> None:
        self.coming = [self._send(messages, index, COPIED) for index, messages in self._inputs()]

    def attend(self) -> None:
        clocks, entered = self.clocks, self.clocks.done.copy()
        self.end()
        copied = not clocks.backward or self.mode.policy == "replay"
        for index, messages in self._passed_on() if copied else ():  # before anything else
            self.coming = [self._send(messages, index, COPIED)]
            self.end()
        for table in self.tables.zones:
            seconds = np.zeros(clocks.machine.num_ranks)
            seconds[table.ranks] = (table.backward_s if clocks.backward else table.forward_s)[:, 0]
            clocks.issue(np.arange(len(seconds)), 0, LAUNCHES_OF_RUN * (seconds > 0))
            _compute(clocks, seconds)
        clocks.entered = entered
        for index, messages in self._passed_on() if clocks.backward else ():
            self.coming = [self._send(turned(messages), index, MOVED)]
            self.end()
        self.coming = [self._send(messages, index, MOVED) for index, messages in self._results()]

    def end(self) -> None:
        """Receive what is coming."""
        for arrived, placed in self.coming:
            self.clocks.done = np.maximum(self.clocks.done, arrived)
            _compute(self.clocks, placed)
        self.coming = []

    def _inputs(self) -> list[tuple[int, Ints]]:
        """Messages of what goes to the launches, by zone."""
        messages: list[tuple[int, Ints]] = []
        for table in self.tables.zones:
            there, back = _point_to_point(table)
            if self.clocks.backward:
                messages.append((table.index, turned(back)))
            if not self.clocks.backward or self.mode.policy == "replay":
                messages.append((table.index, there[0]))
        return messages

    def _passed_on(self) -> list[tuple[int, Ints]]:
        """Messages of inputs that are passed on where they come to, by zone."""
        return [(table.index, on) for table in self.tables.zones for on in _point_to_point(table)[0][1:]]

    def _results(self) -> list[tuple[int, Ints]]:
        """Messages of what the launches compute, by zone."""
        both = [(table.index, _point_to_point(table)) for table in self.tables.zones]
        return [(index, turned(there[0]) if self.clocks.backward else back) for index, (there, back) in both]

    def _send(self, messages: Ints, index: int, traffic_class: int) -> tuple[Floats, Floats]:
        """Issue an exchange; when it arrives, and how long it takes to unpack."""
        clocks = self.clocks
        # Which transfers are routed is the plan's to say.
        clocks.plan, clocks.ready = self.tables.plan, clocks.done.copy()
        if self.mode.signal:
            messages = messages.copy()
            messages[:, Message.TOKENS], messages[:, Message.HEAD_STOP] = 1, messages[:, Message.HEAD_START] + 1
        _, arrived, placed = clocks.exchange(messages, index, traffic_class)
        return arrived, placed


def _point_to_point(table: ZoneTable) -> tuple[list[Ints], Ints]:
    """Messages to a zone's launches, exchange by exchange, and from them."""
    assert isinstance(table.traffic, PointToPoint), "point-to-point messages only"
    return stages(table.traffic.inputs), table.traffic.outputs
