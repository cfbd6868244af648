"""Traces of simulated steps (`analysis.trace_format`): every stream of every rank through the
microbatches and layers of a step, or through one layer.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_balance.analysis import trace_format
from megatron_balance.analysis.machine import Machine
from megatron_balance.analysis.memory import Policy
from megatron_balance.analysis.trace_format import Trace, TrackSpan
from megatron_balance.compile.pipeline import compile_ranks
from megatron_balance.errors import ConfigError
from megatron_balance.ir.arrays import Floats
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.simulator.attention import events, linear_s
from megatron_balance.simulator.phase import SimulatedPhase, phase_of, ring_names
from megatron_balance.simulator.setup import PLAIN, Setup, StageSetup, settled
from megatron_balance.simulator.step import Played, PlayedStep, play_step

# The event engine traces: it keeps every op of every rank.
MOST_RANKS = 128
# Of a step; where its layers have more, the first ones of each pass are drawn, and the others as
# one.
_MOST_SPANS = 300_000

HEAD, RECOMPUTE = "head", "recompute"


def layer_trace(plan: MicrobatchPlan, machine: Machine, policy: Policy = "keep") -> Trace:
    """The trace of one layer: on every rank its modules, then the attention call; forward, then
    backward. Raises ConfigError: more ranks than can be traced.
    """
    _check(machine.num_ranks)
    forward, backward = _layers(plan, machine, policy)
    second = max(span.stop_s for span in forward)
    spans = [*forward, *(span.later(second) for span in backward)]
    return Trace(spans, _names(machine), {"kind": "simulated", "planner": plan.planner})


def step_trace(
    plans: Sequence[MicrobatchPlan], machine: Machine, setup: Setup = PLAIN, *, most_spans: int = _MOST_SPANS
) -> Trace:
    """The trace of a whole step of these microbatches. Rank r of stage s is process s * ranks + r.

    Where some layers keep and some replay, all are drawn as most of them are. Raises ConfigError: as
    `simulate_step`, or more ranks than can be traced.
    """
    _check(machine.num_ranks * setup.pipeline)
    setup = settled(plans, StageSetup(machine, setup))
    policy = setup.drawn
    played = play_step(plans, machine, replace(setup, engine="events"))
    known: dict[str, tuple[list[TrackSpan], list[TrackSpan]]] = {}
    for plan in plans:
        if plan.fingerprint() not in known:
            known[plan.fingerprint()] = _layers(plan, machine, policy)
    of_layer = [known[plan.fingerprint()] for plan in plans]
    num = sum(len(of_layer[each.step.microbatch][each.step.backward]) for each in played.passes)
    drawn = max(1, min(played.layers_per_chunk, most_spans // max(1, num)))
    sizes = (drawn, setup.interleave, machine.num_ranks)
    spans = [span for each in played.passes for span in _pass(each, of_layer, played, *sizes)]
    spans += _end(played, machine.num_ranks * setup.pipeline)
    names = {
        stage * machine.num_ranks + rank: f"stage {stage}, {name}" if setup.pipeline > 1 else name
        for stage in range(setup.pipeline)
        for rank, name in _names(machine).items()
    }
    facts = {
        "kind": "simulated",
        "planner": plans[0].planner,
        "policy": policy,
        "layers": played.layers_per_chunk,
        "layers_drawn": drawn,
    }
    return Trace(spans, names, facts)


def _check(num_ranks: int) -> None:
    if num_ranks > MOST_RANKS:
        raise ConfigError(
            f"a trace of {num_ranks} ranks is too large to open; trace at most {MOST_RANKS}, with --ranks"
        )


def _names(machine: Machine) -> dict[int, str]:
    return {rank: trace_format.rank_name(rank, rank // machine.cluster.node_size) for rank in range(machine.num_ranks)}


# One pass of a microbatch through a model chunk


def _pass(
    each: Played,
    of_layer: Sequence[tuple[list[TrackSpan], list[TrackSpan]]],
    step: PlayedStep,
    drawn: int,
    num_chunks: int,
    num_ranks: int,
) -> Iterator[TrackSpan]:
    # The spans of a pass: its layers one after the other, the head behind or before them.
    backward, microbatch = each.step.backward, each.step.microbatch
    phase = "backward" if backward else "forward"
    first = each.stage * num_ranks
    place = _DrawnAt(first, microbatch, phase)
    at = np.array(each.begin_s)
    end = at + step.layers_per_chunk * each.layer_s + each.head_s
    for rank in range(num_ranks):
        yield place.span(rank, trace_format.STEP, f"{phase} {microbatch}", at[rank], end[rank])
    if backward:
        yield from place.block(HEAD, at, each.head_s)
        at = at + each.head_s
    # Calls are counted in their phase, and backwards begin with the last chunk.
    chunk = num_chunks - 1 - each.step.chunk if backward else each.step.chunk
    for layer in range(drawn):
        begin = at + layer * each.layer_s
        if backward:
            yield from place.block(RECOMPUTE, begin, each.again_s)
            begin = begin + each.again_s
        call = layer + step.layers_per_chunk * chunk
        for span in of_layer[microbatch][backward]:
            yield place.put(span, float(begin[span.rank]), call)
    rest = step.layers_per_chunk - drawn
    if rest:
        first, last = (0, rest - 1) if backward else (drawn, step.layers_per_chunk - 1)
        what = f"layers {first} to {last}"
        yield from place.block(what, at + drawn * each.layer_s, rest * each.layer_s)
    if not backward:
        yield from place.block(HEAD, at + step.layers_per_chunk * each.layer_s, each.head_s)


@dataclass(frozen=True, slots=True)
class _DrawnAt:
    """Where a pass is drawn. `first`: the number of its stage's first rank."""

    first: int
    microbatch: int
    phase: str

    def span(self, rank: int, track: str, what: str, start_s: float, stop_s: float) -> TrackSpan:
        return TrackSpan(self.first + rank, track, what, float(start_s), float(stop_s), self.phase, self.microbatch)

    def block(self, what: str, begin_s: Floats, seconds: Floats) -> Iterator[TrackSpan]:
        # A span on every rank that it takes time on.
        for rank, (start, duration) in enumerate(zip(begin_s.tolist(), seconds.tolist(), strict=True)):
            if duration > 0:
                yield self.span(rank, trace_format.COMPUTE, what, start, start + duration)

    def put(self, span: TrackSpan, offset_s: float, call: int) -> TrackSpan:
        # A span of a layer.
        sent, received = (
            {self.first + peer: num_bytes for peer, num_bytes in each.items()} for each in (span.sent, span.received)
        )
        return replace(
            span.later(offset_s),
            rank=self.first + span.rank,
            microbatch=self.microbatch,
            call=call,
            sent=sent,
            received=received,
        )


def _end(step: PlayedStep, num_ranks: int) -> Iterator[TrackSpan]:
    at = step.done_s
    for what, seconds in ((trace_format.GRADIENT_SYNC, step.sync_s), (trace_format.OPTIMIZER, step.optimizer_s)):
        if seconds:
            for rank in range(num_ranks):
                yield TrackSpan(rank, trace_format.STEP, what, at, at + seconds)
        at += seconds


# One layer


def _layers(plan: MicrobatchPlan, machine: Machine, policy: Policy) -> tuple[list[TrackSpan], list[TrackSpan]]:
    # Spans of a layer's forward and of its backward, each from 0 on.
    linear = linear_s(plan, machine)
    call = events(plan, machine, policy, linear, trace=True)
    ranks = compile_ranks(plan, policy)
    made: list[list[TrackSpan]] = []
    for phase, backward, outcome in (("forward", False, call.forward), ("backward", True, call.backward)):
        modules = [
            TrackSpan(rank, trace_format.COMPUTE, trace_format.LINEAR, 0.0, seconds, phase)
            for rank, seconds in enumerate(linear[backward].tolist())
            if seconds
        ]
        played = phase_of(ranks, machine, backward=backward, rings=ring_names(plan))
        made.append([*modules, *_exchanging(outcome.occupied, played, phase)])
    return made[0], made[1]


def _exchanging(occupied: Iterable[TrackSpan], played: SimulatedPhase, phase: str) -> list[TrackSpan]:
    # Spans of an attention call; those of exchanges with their bytes.
    zones = played.zones_of_exchanges()
    sent: defaultdict[tuple[int, int, str, str], dict[int, int]] = defaultdict(dict)
    received: defaultdict[tuple[int, int, str, str], dict[int, int]] = defaultdict(dict)
    for a, b, exchange, leg, stream, num_bytes in _hops(played):
        for of, end, other in ((sent, a, b), (received, b, a)):
            at = of[end, exchange, leg, stream]
            at[other] = at.get(other, 0) + num_bytes
    return [
        replace(
            each,
            phase=phase,
            zone=each.zone or zones.get((each.rank, each.exchange), ""),
            sent=sent.get((each.rank, each.exchange, each.what, each.track), {}),
            received=received.get((each.rank, each.exchange, each.what, each.track), {}),
        )
        for each in occupied
    ]


def _hops(played: SimulatedPhase) -> Iterator[tuple[int, int, int, str, str, int]]:
    # From, to, exchange, leg, stream and bytes of every hop.
    #
    # A collective is as many hops as pairs of ranks that it moves something between.
    for flow in played.flows:
        yield flow.a, flow.b, flow.exchange, flow.leg, flow.stream, flow.num_bytes
    for group in played.collectives:
        for row, a in enumerate(group.ranks):
            for column, b in enumerate(group.ranks):
                num_bytes = int(group.num_bytes[row, column])
                if num_bytes and row != column:
                    yield a, b, group.exchange, "direct", group.stream, num_bytes
