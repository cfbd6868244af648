"""Room for a placement in waves: whether layers keep what they receive, by the memory of the step.

The search is told before there is a placement (`replays`), since the cheapest number of waves depends
on it. Fewer waves bring more at once, so a placement may leave most layers no room that had some
before it. Then the placement in more waves, and the search's other answer, are compared with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import ceil
from typing import NamedTuple

import numpy as np

from megatron_balance.analysis.backward import Decision, MicrobatchBytes
from megatron_balance.analysis.estimate import Estimate, best_first, estimate
from megatron_balance.analysis.estimate.times import PricedMachine
from megatron_balance.analysis.received import Loads, ReceivedBytes
from megatron_balance.analysis.statistics import tokens_per_rank
from megatron_balance.analysis.step_memory import StepMemory
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import MicrobatchPlan, SharedZone
from megatron_balance.planners.zeppelin.waves import Chosen


class PlannedInWaves(NamedTuple):
    """A plan in waves and its placement."""

    plan: MicrobatchPlan
    chosen: Chosen


def replays(num_tokens: int, cluster: Cluster, model: Model, memory: StepMemory | None) -> bool:
    """Whether most layers would receive keys again in the backward if tokens were even and all heads
    exchanged, by predicted memory of the step.
    """
    memory = memory or StepMemory.one_stage(model, cluster.num_ranks)
    tokens = np.full(1, -(-num_tokens // cluster.num_ranks), dtype=np.int64)
    inputs = tokens * (model.num_heads + 2 * model.num_kv_heads) * model.head_dim * model.bytes_per_element
    received = ReceivedBytes(inputs, np.zeros_like(tokens), np.zeros_like(tokens))
    return _mostly_replays(memory.decide(MicrobatchBytes(tokens, received), cluster.memory_bytes))


def surely_keeps(found: PlannedInWaves, machine: PricedMachine) -> bool:
    """Whether most layers keep even if a rank receives all keys of the sequences that its group has a
    share of.
    """
    memory = machine.memory or StepMemory.one_stage(machine.model, machine.cluster.num_ranks)
    return not _mostly_replays(memory.decide(most_bytes(found, machine), machine.cluster.memory_bytes))


def most_bytes(found: PlannedInWaves, machine: PricedMachine) -> MicrobatchBytes:
    """The most that a rank may own and receive, as of one rank."""
    plan, chosen = found
    size, heads = chosen.size, (plan.num_heads, plan.num_kv_heads)
    shared = [0] * (plan.num_ranks // size)
    for length, own in zip(chosen.lengths, chosen.of, strict=True):
        for group in own if len(own) > 1 else ():
            shared[group] += length
    own = tokens_per_rank(plan).max(keepdims=True)
    of_group, none = own * size * (size > 1), np.zeros_like(own)
    queries, keys = (each * ceil(of / size) for each, of in zip((of_group, of_group + max(shared)), heads, strict=True))
    loads = Loads(own, queries, keys, own * plan.num_heads * (size > 1), keys, none, none)
    return MicrobatchBytes(own, loads.bytes(heads, machine.row_bytes))


def with_room(
    found: PlannedInWaves,
    search_again: Callable[[], PlannedInWaves | None],
    numbers: Sequence[int],
    machine: PricedMachine,
) -> PlannedInWaves:
    """`found`, or where most of its layers would receive keys again, the best of it (`best_first`),
    itself in the fewest of `numbers` of waves that leave them room, and what `search_again` finds for
    such layers.
    """
    plan, chosen = found
    priced = [_Priced(found, own)] if (own := estimate(plan, machine)) is not None else []
    if not priced or not priced[0].replays:
        return found
    (zone,) = plan.zones
    assert isinstance(zone, SharedZone)
    for number in numbers:
        if number > zone.waves:
            more = replace(plan, zones=(replace(zone, waves=number),))
            known = estimate(more, machine)
            if known is not None and not (each := _Priced(PlannedInWaves(more, chosen), known)).replays:
                priced.append(each)
                break
    other = search_again()
    if other is not None and (known := estimate(other.plan, machine)) is not None:
        priced.append(_Priced(other, known))
    return priced[best_first([each.estimate for each in priced])[0]].placed


class _Priced(NamedTuple):
    placed: PlannedInWaves
    estimate: Estimate

    @property
    def replays(self) -> bool:
        return _mostly_replays(self.estimate.backward)


def _mostly_replays(decision: Decision) -> bool:
    """Whether most layers replay."""
    return 2 * decision.keeping < decision.layers
