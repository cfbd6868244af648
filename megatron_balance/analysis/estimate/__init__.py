"""Seconds and memory of a layer of a plan by closed forms, in about a millisecond: what planners are
compared by where simulating would take too long.

It is the round engine (`analysis.rounds`) with two short cuts: of zones whose ranks are alike one
launch of each kind is priced, on one rank, and exchanges inside groups are closed forms. Left out:
zones that share a NIC, ranks of a group that drift apart. A test holds it against the simulator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_balance.analysis.backward import Decision, Loads
from megatron_balance.analysis.estimate.bounds import Bounds
from megatron_balance.analysis.estimate.phase import EstimatedPhase
from megatron_balance.analysis.estimate.zones import ZoneTimes, by_rank, zone_times
from megatron_balance.analysis.machine import Machine
from megatron_balance.analysis.memory import Policy
from megatron_balance.analysis.rounds import coupled, in_step
from megatron_balance.analysis.step_memory import StepMemory
from megatron_balance.analysis.tables import ZoneTable
from megatron_balance.cost.base import Floats, MachineCost
from megatron_balance.ir.arrays import as_array
from megatron_balance.ir.columns import Move
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.ir.program import Kind
from megatron_balance.patterns import pattern_of
from megatron_balance.patterns.base import Context, Load

__all__ = ["ALIKE", "Bounds", "Estimate", "best_first", "estimate"]

ALIKE = 0.02
"""Share of a rank's memory by which plans that do not fit may need more than another and count as no
worse: a prediction is no nearer.
"""


_KNOTS = 9
"""Numbers of tokens for which modules outside attention are priced: reading the weights of many
experts takes as long for few tokens as for more.
"""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Of one layer, modules outside attention included: seconds forward and backward of the rank whose
    sum of both is largest.

    `backward`: how many layers keep what they received, and whether a rank's memory holds the step,
    by prediction.
    """

    forward_s: float
    backward_s: float
    backward: Decision

    @property
    def layer_s(self) -> float:
        return self.forward_s + self.backward_s


def best_first(estimates: Sequence[Estimate]) -> list[int]:
    """Numbers of the estimates in order: those that fit, by time; where none does, those that need
    about as much memory as the one that needs least (`ALIKE`), by time; then the others, by memory.
    """
    least = min((each.backward.peak_bytes for each in estimates), default=0.0)

    def order(number: int) -> tuple[int, float]:
        found, decision = estimates[number], estimates[number].backward
        if decision.fits:
            return 0, found.layer_s
        alike = decision.peak_bytes <= least + ALIKE * (decision.memory_bytes or 0.0)
        return (1, found.layer_s) if alike else (2, decision.peak_bytes)

    return sorted(range(len(estimates)), key=order)


_RECENT: list[tuple[MicrobatchPlan, Machine, Estimate]] = []
"""The last few plans that were estimated, by identity: a planner that compares plans, what lays layers
around them and whoever compares planners ask for the same ones.
"""


def estimate(plan: MicrobatchPlan, machine: Machine) -> Estimate:
    """The seconds of a layer, and the memory of a step whose microbatches are all like this one, on a
    machine without slow ranks and whose hosts keep up.

    Raises:
        InvalidProgramError: an unknown comm pattern.
    """
    assert not machine.slowdown, "an estimate takes ranks as alike; simulate a machine with slow ones"
    asked = machine.cluster, machine.model, machine.memory
    for known, on, found in tuple(_RECENT):  # a copy: threads plan ahead
        if known is plan and on.cost is machine.cost and (on.cluster, on.model, on.memory) == asked:
            return found
    found = _estimate(plan, machine)
    _RECENT[:] = [(plan, machine, found), *_RECENT[:3]]
    return found


def _estimate(plan: MicrobatchPlan, machine: Machine) -> Estimate:
    tables, zones = zone_times(plan, machine)
    loads = _loads(plan, zones)
    memory = machine.memory or StepMemory.one_stage(machine.model, machine.cluster.num_ranks)
    microbatch = loads.bytes((plan.num_heads, plan.num_kv_heads), machine.row_bytes)
    decision = memory.decide(microbatch, machine.cluster.memory_bytes)
    keeping = decision.keeping / max(1, decision.layers)

    group = coupled(plan)

    def seconds(policy: Policy, *, backward: bool) -> Floats:
        entered = _linear_s(np.asarray(loads.own, dtype=np.float64), machine.cost, backward=backward)
        return in_step(EstimatedPhase((tables, zones), policy, entered, backward=backward).run().end_s, group)

    shares: list[tuple[Policy, float]] = [("keep", keeping), ("replay", 1 - keeping)]
    forward_s = seconds("keep", backward=False)
    backward_s = np.sum([share * seconds(policy, backward=True) for policy, share in shares if share], axis=0)
    slowest = int((forward_s + backward_s).argmax())
    return Estimate(float(forward_s[slowest]), float(backward_s[slowest]), decision)


def _linear_s(tokens: Floats, cost: MachineCost, *, backward: bool) -> Floats:
    """Seconds of each rank's modules outside attention, taken as linear between `_KNOTS` numbers of
    tokens; of the experts' exchange, which waits for the most tokens, as many on every rank.
    """
    knots = np.unique(np.linspace(tokens.min(), tokens.max(), _KNOTS))
    own = [cost.layer_s(n, backward=backward) - cost.experts_s(n) for n in knots.tolist()]
    return np.interp(tokens, knots, own) + cost.experts_s(float(knots[-1]))


def _loads(plan: MicrobatchPlan, zones: Sequence[ZoneTimes | ZoneTable]) -> Loads:
    """Return what ranks hold and receive, as in `microbatch_bytes`, from one rank of each zone whose
    ranks are alike.
    """
    context, load, moves = Context.of(plan), Load(plan.num_ranks), as_array(plan.moves)
    queries, keys, sent, held, largest = np.zeros((5, plan.num_ranks))
    for zone in zones:
        if isinstance(zone, ZoneTimes):
            queries[zone.at] += zone.query_heads
            keys[zone.at] += zone.kv_heads
            sent[zone.at] += zone.sent
            held[zone.at] += zone.tokens
            largest[zone.at] = np.maximum(largest[zone.at], zone.largest)
            continue
        of_plan = plan.zones[zone.index]
        pattern = pattern_of(of_plan)
        held += pattern.tokens([of_plan], context)
        if pattern.num_exchanges(of_plan):
            pattern.receive(load, of_plan, context)
            largest[zone.ranks] = np.maximum(largest[zone.ranks], pattern.largest_exchange(of_plan, context))
    given, taken = (by_rank(moves[:, end], moves[:, Move.TOKENS], plan.num_ranks) for end in (Move.SRC, Move.DST))
    queries, keys, sent = (
        own + load.token_heads[kind] for own, kind in ((queries, Kind.Q), (keys, Kind.KV), (sent, Kind.OUT))
    )
    return Loads(held - given + taken, queries, keys, sent, largest, given, taken)
