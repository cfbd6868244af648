"""The bound: a lone rank reaches it, and no planner goes below it."""

from __future__ import annotations

import pytest

from megatron_balance import make_planner
from megatron_balance.analysis.machine import Machine
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.model import Model
from megatron_balance.planners import PLANNERS
from megatron_balance.simulator.setup import Setup
from megatron_balance.simulator.step import bound_s, simulate_step
from tests.support import by_hand

MODEL = Model(num_heads=8, num_kv_heads=8, head_dim=128, num_layers=4, hidden_size=1024, ffn_size=4096)
LENGTHS = (9000, 700, 4000, 2500, 128)


def machine(ranks: int) -> Machine:
    cluster = Cluster(ranks, min(ranks, 4), nic_bytes_per_s=25e9, num_sms=108)
    return Machine(cluster, MODEL, AnalyticCost(cluster, MODEL))


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_lone_rank_reaches_the_bound(recompute):
    alone = machine(1)
    plan = by_hand.plan(LENGTHS, 1, by_hand.head_exchange((0,), *range(len(LENGTHS))), heads=(8, 8))
    setup = Setup(recompute=recompute)
    step = simulate_step((plan,), alone, setup)
    # Beside it there are the optimizer and the summing of gradients, which moves memory only.
    compute_s, least_s = step.step_s - step.phases_s["optimizer"], bound_s((LENGTHS,), alone, setup)
    assert least_s < compute_s < 1.03 * least_s


@pytest.mark.parametrize("name", [name for name in PLANNERS if PLANNERS[name].plan is not None])
def test_no_planner_goes_below_the_bound(name):
    four = machine(8)
    plan = make_planner(name, four.cluster, MODEL)(LENGTHS)
    assert simulate_step((plan,), four).step_s > bound_s((LENGTHS,), four)


def test_stages_share_the_work_and_microbatches_add_up():
    two = machine(2)
    once = bound_s((LENGTHS,), two)
    assert bound_s((LENGTHS, LENGTHS), two) == pytest.approx(2 * once)
    assert bound_s((LENGTHS,), two, Setup(pipeline=2)) == pytest.approx(once / 2)
