"""Layers over two nano-batches, interleaved (`compile.ping_pong`) on one compute stream.

Two engines, as for one call. `events` joins the nano-batches' phases, layer after layer, to one
phase with the steps in the order of the segments. `rounds` is for task tables over many ranks: it
takes the segments one by one, all ranks at once; transfers of one exchange share NICs with one
another but not with those of the other traffic class, and kernels are not slowed by them.

All layers are alike, so a few are simulated and the rest counted: from the second layer on, each
takes what the last one did.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import numpy as np

from megatron_balance.analysis.clocks import COPIED, MOVED, Clocks, Outcome, hosts_behind
from megatron_balance.analysis.machine import Machine
from megatron_balance.analysis.memory import Policy
from megatron_balance.analysis.rounds import stages, turned
from megatron_balance.analysis.tables import Tables
from megatron_balance.compile import ping_pong
from megatron_balance.compile.order import RunLaunches, Step
from megatron_balance.compile.ping_pong import Cuts, NanoSegment
from megatron_balance.compile.pipeline import compile_ranks
from megatron_balance.cost.base import LAUNCHES_OF_RUN
from megatron_balance.errors import ConfigError
from megatron_balance.ir.arrays import Floats, Ints
from megatron_balance.ir.columns import Message
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.patterns import pattern_of
from megatron_balance.patterns.base import PointToPoint
from megatron_balance.simulator import attention
from megatron_balance.simulator.phase import SimulatedPhase, phase_of, ring_names

# Layers that are simulated at most; the others are counted like the last of them.
SIMULATED = 3

# By nano-batch: seconds of its linear step by rank, forward and backward.
_Linear: TypeAlias = Sequence[tuple[Floats, Floats]]


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
    engine: attention.EngineName = "auto"
    transport: attention.Transport = "streams"


def layers(
    nano_batches: Sequence[MicrobatchPlan],
    machine: Machine,
    num_layers: int,
    mode: PingPongMode = PingPongMode(),
    experts: Sequence[tuple[Floats | float, Floats | float]] = ((0.0, 0.0),) * ping_pong.NUM_NANO_BATCHES,
) -> attention.BothPhases:
    """Run both nano-batches through layers, all ranks entering at once.

    `num_layers`: of the model, or of a pipeline chunk; `experts`: by nano-batch, seconds that experts
    add to its linear step, forward and backward ([R], or the same on all ranks); their exchange shares
    no NIC with attention's transfers. Raises ConfigError: the round engine is asked for what it does
    not know.
    """
    for nano_batch in nano_batches:
        machine.check(nano_batch)
    zones = [zone for nano_batch in nano_batches for zone in nano_batch.zones]
    point_to_point = all(pattern_of(zone).traffic is PointToPoint for zone in zones)
    remapped = any(nano_batch.moves for nano_batch in nano_batches)
    rounds_apply = point_to_point and not remapped and mode.transport == "streams"
    attention.check_engine(mode.engine, machine)
    if mode.engine == "rounds" and not rounds_apply:
        raise ConfigError(
            "the engine 'rounds' runs nano-batches of task tables on streams only; use the engine 'events'"
        )
    small = machine.num_ranks <= attention.SMALL or machine.cost.contention.waits
    rounds = rounds_apply and (mode.engine == "rounds" or (mode.engine == "auto" and not small))
    both = zip((attention.linear_s(plan, machine) for plan in nano_batches), experts, strict=True)
    linear = [(forward + own[0], backward + own[1]) for (forward, backward), own in both]
    simulated = (_Rounds if rounds else _PingPongEvents)(nano_batches, machine, linear, mode)
    outcomes: list[Outcome] = []
    for backward in (False, True):
        if num_layers <= SIMULATED:
            outcomes.append(simulated.run(num_layers, backward=backward))
            continue
        less, more = (simulated.run(n, backward=backward) for n in (SIMULATED - 1, SIMULATED))
        outcomes.append(_extended(less, more, num_layers - SIMULATED))
    return attention.BothPhases(*outcomes)


def _extended(less: Outcome, more: Outcome, times: int) -> Outcome:
    # `more` and as many layers again as `times`, each like its last.
    names = ("end_s", "compute_s", "bytes_moved")
    both = ((getattr(less, name), getattr(more, name)) for name in names)
    return Outcome(*(b + times * (b - a) for a, b in both))


def _segments(num_layers: int, mode: PingPongMode, *, backward: bool) -> tuple[NanoSegment, ...]:
    segments = (ping_pong.forward if mode.interleaved else ping_pong.one_by_one)(num_layers)
    return ping_pong.backward(segments) if backward else segments


def _is_layer(segment: NanoSegment, num_layers: int) -> bool:
    # Whether a linear step counts: behind the last layer's attention there is none.
    return segment.layer < num_layers


class _PingPongEvents:
    def __init__(self, plans: Sequence[MicrobatchPlan], machine: Machine, linear: _Linear, mode: PingPongMode) -> None:
        self.machine, self.linear, self.mode = machine, linear, mode
        self.nano_batches = [_phases_of(nano_batch, machine, mode) for nano_batch in plans]

    def run(self, num_layers: int, *, backward: bool) -> Outcome:
        ranks = self.machine.num_ranks
        seconds, blocks_s = ([list[float]() for _ in range(ranks)] for _ in range(2))
        joint = SimulatedPhase([()] * ranks, seconds, [list[int]() for _ in range(ranks)], blocks_s)
        steps: list[list[Step]] = [[] for _ in range(ranks)]
        phases = [nano_batch[backward] for nano_batch in self.nano_batches]
        stride = 1 + max((max(ids, default=-1) for phase, _ in phases for ids in phase.exchanges), default=0)
        for segment in _segments(num_layers, self.mode, backward=backward):
            if segment.part == "linear":
                if _is_layer(segment, num_layers):
                    for rank, seconds in enumerate(self.linear[segment.nano_batch][backward].tolist()):
                        steps[rank].append(RunLaunches(-1))
                        joint.seconds[rank].append(seconds)
                        joint.exchanges[rank].append(-1)
                        joint.blocks_s[rank].append(0.0)
                continue
            first = (segment.layer * len(phases) + segment.nano_batch) * stride
            phase, cuts = phases[segment.nano_batch]
            for rank, (attend, end) in enumerate(cuts):
                whole = len(phase.steps[rank])
                begin, stop = {"start": (0, attend), "attend": (attend, end), "end": (end, whole)}[segment.part]
                steps[rank] += phase.steps[rank][begin:stop]
                joint.seconds[rank] += phase.seconds[rank][begin:stop]
                joint.blocks_s[rank] += phase.blocks_s[rank][begin:stop]
                joint.exchanges[rank] += [first + at if at >= 0 else at for at in phase.exchanges[rank][begin:stop]]
        joint.steps = [tuple(own) for own in steps]
        for layer in range(num_layers):
            for nano_batch, (phase, _) in enumerate(phases):
                first = (layer * len(phases) + nano_batch) * stride
                joint.flows += [replace(flow, exchange=first + flow.exchange) for flow in phase.flows]
                joint.collectives += [replace(each, exchange=first + each.exchange) for each in phase.collectives]
        return attention.play_events(joint, self.machine, np.zeros(ranks), self.mode.transport)


def _phases_of(plan: MicrobatchPlan, machine: Machine, mode: PingPongMode) -> list[tuple[SimulatedPhase, list[Cuts]]]:
    # A nano-batch's phases, forward and backward, each with every rank's steps cut into segments.
    ranks, sums, rings = compile_ranks(plan, mode.policy), mode.transport == "streams", ring_names(plan)
    found: list[tuple[SimulatedPhase, list[Cuts]]] = []
    for backward in (False, True):
        phase = phase_of(ranks, machine.for_trees(plan.mask), backward=backward, sums=sums, rings=rings)
        if mode.signal:
            phase.flows = [replace(flow, num_bytes=1) for flow in phase.flows]
            for steps, seconds in zip(phase.steps, phase.seconds, strict=True):
                launches = (isinstance(step, RunLaunches) for step in steps)
                seconds[:] = [s if launch else 0.0 for launch, s in zip(launches, seconds, strict=True)]
        found.append((phase, [(each.backward if backward else each.forward).cuts for each in ranks]))
    return found


class _Rounds:
    """The segments one by one, all ranks at once, both nano-batches on the same clocks: a stream is
    free when both are through with it.
    """

    def __init__(self, plans: Sequence[MicrobatchPlan], machine: Machine, linear: _Linear, mode: PingPongMode) -> None:
        self.machine, self.linear, self.mode = machine, linear, mode
        self.tables = [Tables(nano_batch, machine.for_trees(nano_batch.mask)) for nano_batch in plans]

    def run(self, num_layers: int, *, backward: bool) -> Outcome:
        outcome, issued = self._run(num_layers, None, backward=backward)
        behind = hosts_behind(issued, outcome.end_s)
        return self._run(num_layers, behind, backward=backward)[0] if behind.any() else outcome

    def _run(self, num_layers: int, behind: Floats | None, *, backward: bool) -> tuple[Outcome, Floats]:
        # The outcome, and what hosts issued. `behind`: as in `Clocks`.
        enter_s = np.zeros(self.machine.num_ranks)
        clocks = Clocks(self.tables[0], self.mode.policy, enter_s, backward=backward, behind=behind)
        nano_batches = [self._messages(tables, backward=backward) for tables in self.tables]
        coming: list[list[tuple[Floats, Floats]]] = [[] for _ in self.tables]
        for segment in _segments(num_layers, self.mode, backward=backward):
            tables, messages = self.tables[segment.nano_batch], nano_batches[segment.nano_batch]
            clocks.plan = tables.plan  # which transfers are routed is the plan's to say
            match segment.part:
                case "linear":
                    if _is_layer(segment, num_layers):
                        _compute(clocks, self.linear[segment.nano_batch][backward])
                case "start":
                    coming[segment.nano_batch] = [self._send(clocks, *each, COPIED) for each in messages.inputs]
                case "attend":
                    entered = clocks.done.copy()
                    _receive(clocks, coming[segment.nano_batch])
                    for each in messages.passed_on:  # before anything else
                        _receive(clocks, [self._send(clocks, *each, COPIED)])
                    for table in tables.zones:
                        seconds = np.zeros(clocks.machine.num_ranks)
                        seconds[table.ranks] = (table.backward_s if backward else table.forward_s)[:, 0]
                        clocks.issue(np.arange(len(seconds)), 0, LAUNCHES_OF_RUN * (seconds > 0))
                        _compute(clocks, seconds)
                    clocks.entered = entered
                    for each in messages.sent_back:
                        _receive(clocks, [self._send(clocks, *each, MOVED)])
                    coming[segment.nano_batch] = [self._send(clocks, *each, MOVED) for each in messages.results]
                case "end":
                    _receive(clocks, coming[segment.nano_batch])
        return Outcome(clocks.done, clocks.busy, clocks.bytes_moved), clocks.issued

    def _messages(self, tables: Tables, *, backward: bool) -> "_NanoBatchMessages":
        found, copied = _NanoBatchMessages([], [], [], []), not backward or self.mode.policy == "replay"
        for table in tables.zones:
            assert isinstance(table.traffic, PointToPoint), "point-to-point messages only"
            (first, *on), back = stages(table.traffic.inputs), table.traffic.outputs
            inputs = ([turned(back)] if backward else []) + ([first] if copied else [])
            found.inputs.extend((table.index, each) for each in inputs)
            found.passed_on.extend((table.index, each) for each in on if copied)
            found.sent_back.extend((table.index, turned(each)) for each in on if backward)
            found.results.append((table.index, turned(first) if backward else back))
        return found

    def _send(self, clocks: Clocks, index: int, messages: Ints, traffic_class: int) -> tuple[Floats, Floats]:
        # Issue an exchange of a zone; when it arrives, and how long it takes to unpack.
        clocks.ready = clocks.done.copy()
        if self.mode.signal:
            messages = messages.copy()
            messages[:, Message.TOKENS], messages[:, Message.HEAD_STOP] = 1, messages[:, Message.HEAD_START] + 1
        _, arrived, placed = clocks.exchange(messages, index, traffic_class)
        return arrived, placed


class _NanoBatchMessages(NamedTuple):
    """Messages of a nano-batch's task tables in a phase, each with its zone: what launches wait for,
    what is passed on where it came to, before them and behind, and what they compute.
    """

    inputs: list[tuple[int, Ints]]
    passed_on: list[tuple[int, Ints]]
    sent_back: list[tuple[int, Ints]]
    results: list[tuple[int, Ints]]


def _compute(clocks: Clocks, seconds: Floats) -> None:
    clocks.done = clocks.done + seconds
    clocks.busy = clocks.busy + seconds


def _receive(clocks: Clocks, coming: list[tuple[Floats, Floats]]) -> None:
    # Receive what is coming: when each exchange arrives, and how long it takes to unpack, by rank.
    for arrived, placed in coming:
        clocks.done = np.maximum(clocks.done, arrived)
        _compute(clocks, placed)
    coming.clear()
