"""Seconds that experts add to a simulated layer: the busiest rank of a group, by its tokens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megatron_balance.cost.modules import ExpertLoad, expert_part
from megatron_balance.cost.parallel import all_to_all_s, group_of
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.simulator.setup import Setup, StageSetup, added_s
from megatron_balance.simulator.step import simulate_step
from tests.support import by_hand
from tests.support.flat_cost import MODEL, flat_machine

LAYER_S = 0.01
MOE = replace(MODEL, num_experts=4, experts_per_token=1)
SKEWED = ExpertLoad.counted([2, 2, 1, 1])
"""Of two ranks that share four experts, the first one has two thirds of the visits."""


def machine(num_ranks: int, ranks_per_node: int, model: Model = MOE):
    return replace(flat_machine(num_ranks, ranks_per_node, launch=0.0, layer=LAYER_S), model=model)


def local(*lengths: int) -> MicrobatchPlan:
    count = len(lengths)
    return by_hand.plan(lengths, count, *by_hand.each_local(count), ranks_per_node=2, heads=(2, 2))


def exchange_s(around: StageSetup, tokens: float) -> float:
    group = group_of(around.machine.cluster, 2, 2, busy_nics=True)
    return 2 * all_to_all_s(tokens * MOE.hidden_size * MOE.bytes_per_element, group)


def test_ranks_that_share_experts_wait_for_the_busiest_of_them():
    around = StageSetup(machine(4, 2), Setup(experts=2, expert_load=SKEWED))
    found = added_s(local(100, 300, 50, 10), around)
    part = expert_part(MOE)
    # visits of the busiest: two thirds of 400 and of 60 tokens; the backward takes twice as long
    busiest, own = np.array([800 / 3, 800 / 3, 40, 40]), np.array([100, 300, 50, 10])
    exchange = np.array([exchange_s(around, each) for each in busiest])
    assert found[0] == pytest.approx(exchange + part * LAYER_S * (busiest - own))
    assert found[1] == pytest.approx(exchange + 2 * part * LAYER_S * (busiest - own))


def test_tokens_visit_experts_from_where_they_lie_outside_attention():
    """A remap moves 60 of 100 tokens to the other node, whose experts they visit then."""
    plan = by_hand.plan((100, 1), 4, *by_hand.each_local(2), ranks_per_node=2, heads=(2, 2), moves=[(0, 2, 60)])
    around = StageSetup(machine(4, 2), Setup(experts=2, expert_load=SKEWED))
    part, own = expert_part(MOE), np.array([40, 1, 60, 0])
    busiest = np.array([41, 41, 60, 60]) * 2 / 3
    exchange = np.array([exchange_s(around, each) for each in busiest])
    assert added_s(plan, around)[0] == pytest.approx(exchange + part * LAYER_S * (busiest - own))


def test_without_a_load_each_rank_computes_for_its_own_tokens():
    around = StageSetup(machine(4, 2), Setup(experts=2))
    found = added_s(local(100, 300, 50, 10), around)
    assert found[0] == pytest.approx(np.full(4, exchange_s(around, 300)))
    for model, setup in ((MODEL, Setup(experts=2, expert_load=SKEWED)), (MOE, Setup(expert_load=SKEWED))):
        assert not np.any(added_s(local(100, 300, 50, 10), StageSetup(machine(4, 2, model), setup)))


def test_a_step_takes_as_much_longer():
    on, plan = machine(2, 2), local(100, 100)
    even, skewed = (
        simulate_step([plan], on, Setup(experts=2, expert_load=load)).step_s for load in (ExpertLoad(), SKEWED)
    )
    around = StageSetup(on, Setup(experts=2, expert_load=SKEWED))
    longer = 3 * expert_part(MOE) * LAYER_S * (400 / 3 - 100) + 2 * (
        exchange_s(around, 400 / 3) - exchange_s(around, 100)
    )
    assert skewed - even == pytest.approx(on.model.num_layers * longer, rel=1e-6)
