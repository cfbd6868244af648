"""Rows that several ranks of a node need cross once, and are passed on inside."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_balance import Cluster, MicrobatchPlan, Model, make_planner
from megatron_balance.analysis.machine import Machine
from megatron_balance.analysis.statistics import plan_statistics
from megatron_balance.compile.pipeline import expand
from megatron_balance.config import load_cluster, load_model
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.ir import text
from megatron_balance.ir.step import Layers
from megatron_balance.planners.base import StepContext
from megatron_balance.planning.choice import choose_planner
from megatron_balance.simulator import simulate
from megatron_balance.simulator.setup import Setup
from megatron_balance.simulator.ticks import simulate_planned
from megatron_balance.workloads.lengths import draw
from tests.support import by_hand

CLUSTER, MODEL = Cluster(8, 4, nic_bytes_per_s=1e9), Model(num_heads=4, num_kv_heads=2, head_dim=16)
LENGTHS = [7000, 2000, 900, 333, 120, 50]


def once(plan: MicrobatchPlan) -> MicrobatchPlan:
    return replace(plan, zones=tuple(replace(zone, pattern="dispatch_once") for zone in plan.zones))


def small() -> MicrobatchPlan:
    """Rank 0 owns the keys; ranks 2 and 3 of the other node own queries that see them."""
    fragments = [(0, 0, 0, 8), (2, 0, 8, 12), (3, 0, 12, 16)]
    tasks = [(0, 0, 0, 8, 0, 8), (2, 0, 8, 12, 0, 12), (3, 0, 12, 16, 0, 16)]
    return by_hand.plan((16,), 4, by_hand.task_table(fragments, tasks), ranks_per_node=2, heads=(1, 1))


def test_a_row_crosses_once_and_is_passed_on_inside() -> None:
    lines = text.text(expand(once(small()))).splitlines()
    assert [line.split() for line in lines if " <- " in line] == [
        ["r2", "<-", "r0", "kv", "s0[0:8)"],
        ["r3", "<-", "r2", "kv", "s0[8:12)"],
        ["r3", "<-", "r2", "kv", "s0[0:8)"],
    ]


def test_the_layer_chooses_it_where_the_busiest_nic_gains() -> None:
    plain = make_planner("distca", CLUSTER, MODEL, Layers(), block=16)(LENGTHS)
    chosen = make_planner("distca", CLUSTER, MODEL, Layers(once_per_node=True), block=16)(LENGTHS)
    assert chosen == once(plain)
    sent = [max(map(max, plan_statistics(plan, MODEL)["bytes_sent_per_nic"])) for plan in (plain, chosen)]
    assert sent[1] < sent[0]
    seconds = [simulate(plan, CLUSTER, MODEL)["mean_step_s"] for plan in (plain, chosen)]
    assert seconds[1] < seconds[0]
    alone = Cluster(8, 8)
    assert make_planner("distca", alone, MODEL)(LENGTHS).zones[0].pattern == "dispatch"


@pytest.mark.parametrize("ping_pong", [True, False])
def test_distca_does_not_lose_to_a_ring_on_slow_links(ping_pong: bool) -> None:
    """a800, llama-7b, 131,072 tokens of github on 32 ranks: each row to each of its ranks, it does."""
    cluster, model = load_cluster("a800").build(num_ranks=32, ranks_per_node=8), load_model("llama-7b")
    machine = Machine(cluster, model, AnalyticCost(cluster, model))
    lengths = (tuple(draw("github", 131072, 1, 0)[0]),)

    def step_s(name: str, layers: Layers | None = None) -> float:
        choice = choose_planner(name, {}, layers=layers)
        asked = StepContext(cluster, model, machine.cost, ping_pong=ping_pong and name == "distca")
        step, _ = choice.plan_step(lengths, asked)
        return simulate_planned(step, machine, machine, Setup()).step_s

    whole, once_only = step_s("distca"), step_s("distca", Layers(once_per_node=True))
    assert whole < once_only < step_s("te_ring") < step_s("distca", Layers())
