"""Seconds and memory of a layer of a plan by closed forms, in about a millisecond: what planners are
compared by where simulating would take too long.

One launch of each kind is priced, on one rank of each zone, and what the others wait for is summed
up zone by zone by the rules of the round engine (`simulator.rounds`): exchanges of copied rows begin
before the work in front of them is done, outputs and gradients leave beside what follows. Launches
and messages are priced by the same code (`analysis.launches`, `analysis.transfers`).
Left out: zones that share a NIC, ranks of a zone that drift apart. A test holds it against the
simulator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_balance.analysis.backward import Decision, Loads, MicrobatchBytes, ReceivedBytes
from megatron_balance.analysis.estimate.bounds import Bounds
from megatron_balance.analysis.estimate.clocks import ZoneClocks
from megatron_balance.analysis.estimate.times import ZoneTimes, by_rank
from megatron_balance.analysis.estimate.zones import zone_times
from megatron_balance.analysis.machine import Machine
from megatron_balance.analysis.step_memory import StepMemory
from megatron_balance.cost.base import Floats, MachineCost
from megatron_balance.ir.arrays import as_array
from megatron_balance.ir.columns import Move
from megatron_balance.ir.plan import MicrobatchPlan

__all__ = ["ALIKE", "Bounds", "Estimate", "best_first", "estimate"]

ALIKE = 0.02
"""Share of a rank's memory by which plans that do not fit may need more than another and count as no
worse: a prediction is no nearer.
"""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Of one layer, modules outside attention included: seconds forward and backward.

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


class _Recent:
    """The last few plans that were estimated, by identity: a planner that compares plans, what lays
    layers around them and whoever compares planners ask for the same ones.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.known: tuple[tuple[MicrobatchPlan, Machine, Estimate | None], ...] = ()

    def of(self, plan: MicrobatchPlan, machine: Machine) -> Estimate | None:
        for known, on, found in self.known:
            if (
                known is plan
                and on.cost is machine.cost
                and on.cluster == machine.cluster
                and on.model == machine.model
                and on.memory == machine.memory
            ):
                return found
        found = _estimate(plan, machine)
        self.known = (plan, machine, found), *self.known[: self.most - 1]  # replaced: threads plan ahead
        return found


_RECENT = _Recent(4)


def estimate(plan: MicrobatchPlan, machine: Machine) -> Estimate | None:
    """The seconds of a layer, and the memory of a step whose microbatches are all like this one; None:
    a comm pattern of the plan has traffic without a closed form.

    Raises:
        InvalidProgramError: an unknown comm pattern.
    """
    return _RECENT.of(plan, machine)


def _estimate(plan: MicrobatchPlan, machine: Machine) -> Estimate | None:
    zones = zone_times(plan, machine)
    if zones is None:
        return None
    cost = machine.cost
    tokens = np.zeros(plan.num_ranks)
    for zone in zones:
        tokens[zone.at] += zone.tokens
    moves = as_array(plan.moves)
    taken, given = (by_rank(moves[:, end], moves[:, Move.TOKENS], plan.num_ranks) for end in (Move.DST, Move.SRC))
    owned = tokens + taken - given
    decision = _decision(_received(plan, zones, (taken, given), machine), owned, machine)
    keeping = decision.keeping / max(1, decision.layers)
    linear = [_linear_s(owned, cost, backward=backward) for backward in (False, True)]
    forward_s = ZoneClocks(plan, machine, linear[0]).forward(zones)
    backward_s = sum(
        share * ZoneClocks(plan, machine, linear[1]).backward(zones, replay=replay)
        for replay, share in ((False, keeping), (True, 1 - keeping))
        if share
    )
    return Estimate(forward_s, backward_s, decision)


def _linear_s(tokens: Floats, cost: MachineCost, *, backward: bool) -> Floats:
    """Seconds of each rank's modules outside attention, taken as linear between the fewest tokens
    and the most; of the experts' exchange, which waits for the most tokens, as many on every rank.
    """
    ends = [float(tokens.min()), float(tokens.max())]
    own = [cost.layer_s(n, backward=backward) - cost.experts_s(n) for n in ends]
    return np.interp(tokens, ends, own) + cost.experts_s(ends[1])


def _received(
    plan: MicrobatchPlan, zones: Sequence[ZoneTimes], moved: tuple[Floats, Floats], machine: Machine
) -> ReceivedBytes:
    """Bytes of received inputs that ranks hold: as `received_bytes`, from those that one rank of
    each zone receives.
    """
    taken, given = moved
    queries, keys, sent, held, largest = np.zeros((5, plan.num_ranks))
    for zone in zones:
        queries[zone.at] += zone.query_heads
        keys[zone.at] += zone.kv_heads
        sent[zone.at] += zone.sent
        held[zone.at] += zone.tokens
        largest[zone.at] = np.maximum(largest[zone.at], zone.largest)
    loads = Loads(held - given + taken, queries, keys, sent, largest, given, taken)
    return loads.bytes((plan.num_heads, plan.num_kv_heads), machine.row_bytes)


def _decision(received: ReceivedBytes, owned: Floats, machine: Machine) -> Decision:
    cluster = machine.cluster
    memory = machine.memory or StepMemory.one_stage(machine.model, cluster.num_ranks)
    return memory.decide(MicrobatchBytes(owned.round().astype(np.int64), received), cluster.memory_bytes)
