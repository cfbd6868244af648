"""Seconds that experts add to a layer: their exchange, and waiting for the busiest rank."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megatron_balance.compile.layouts import layouts
from megatron_balance.cost.base import Floats
from megatron_balance.cost.experts import ExpertLoad, expert_part
from megatron_balance.ir.columns import Placed
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.simulator.around import Around
from megatron_balance.simulator.attention import linear_tokens


class ExpertSeconds(NamedTuple):
    """Seconds of a layer on each rank [R], beside its modules on the rank's own tokens."""

    forward_s: Floats
    backward_s: Floats


def added_s(plan: MicrobatchPlan, around: Around, pool: int | None = None) -> ExpertSeconds:
    """Seconds that experts add, by `Setup.expert_load`. Not given: visits are even, and each rank
    computes for as many as its own tokens make.

    With a load, the ranks that share the experts (consecutive ones) share their visits, and wait for
    the busiest of them, whose part of the layer's products grows with its visits.

    Args:
        plan: of a microbatch.
        around: the machine and the setup.
        pool: ranks of one pipeline stage, the first `pool` ranks being the first stage's; not given:
            all.
    """
    size, model, load = pool or plan.num_ranks, around.machine.model, around.setup.expert_load
    if not model.num_experts or around.setup.experts == 1:
        return ExpertSeconds(np.zeros(plan.num_ranks), np.zeros(plan.num_ranks))
    tokens = linear_tokens(plan)
    if load is None:
        most = tokens.reshape(-1, size).max(axis=1)
        exchange = np.repeat([around.experts_s(float(each)) if each else 0.0 for each in most], size)
        return ExpertSeconds(exchange, exchange)
    visits = _visits(plan, load, around)
    exchange = np.array([around.experts_s(each) if each else 0.0 for each in visits.tolist()])
    part, cost, slow = expert_part(model), around.machine.cost, around.machine.slow()
    found: list[Floats] = []
    for backward in (False, True):
        own, busiest = (
            np.array([cost.layer_s(each, backward=backward) for each in counts.tolist()]) for counts in (tokens, visits)
        )
        found.append(exchange + part * (busiest - own) * slow)
    return ExpertSeconds(*found)


def _visits(plan: MicrobatchPlan, load: ExpertLoad, around: Around) -> Floats:
    """Of the busiest rank of each rank's group, as tokens [R]."""
    ranks, model = around.setup.experts, around.machine.model
    rows = layouts(plan)
    tokens = np.zeros((plan.num_ranks // ranks, len(plan.lengths)))
    at = (rows[:, Placed.RANK] // ranks, rows[:, Placed.SEQ])
    np.add.at(tokens, at, rows[:, Placed.STOP] - rows[:, Placed.START])
    return np.repeat(load.busiest(tokens, model, ranks), ranks)
