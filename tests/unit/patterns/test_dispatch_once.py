"""Rows that several ranks of a node need cross once, and are passed on inside."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megatron_balance import Cluster, MicrobatchPlan, Model, make_planner, verify
from megatron_balance.analysis.statistics import plan_statistics
from megatron_balance.compile.pipeline import expand
from megatron_balance.compile.transpose import Policy
from megatron_balance.ir import text
from megatron_balance.ir.layers import Layers
from megatron_balance.patterns.dispatch import task_table
from megatron_balance.simulator import simulate
from tests.support import by_hand

CLUSTER, MODEL = Cluster(8, 4, nic_bytes_per_s=1e9), Model(num_heads=4, num_kv_heads=2, head_dim=16)
LENGTHS = [7000, 2000, 900, 333, 120, 50]


def once(plan: MicrobatchPlan) -> MicrobatchPlan:
    return replace(plan, zones=tuple(replace(zone, pattern="dispatch_once") for zone in plan.zones))


def small() -> MicrobatchPlan:
    """Rank 0 owns the keys; ranks 2 and 3 of the other node own queries that see them."""
    fragments = [(0, 0, 0, 8), (2, 0, 8, 12), (3, 0, 12, 16)]
    tasks = [(0, 0, 0, 8, 0, 8), (2, 0, 8, 12, 0, 12), (3, 0, 12, 16, 0, 16)]
    zone = task_table("tasks", np.array(fragments), np.array(tasks))
    return by_hand.plan((16,), 4, zone, ranks_per_node=2, heads=(1, 1))


@pytest.mark.parametrize("policy", ["keep", "replay"])
@pytest.mark.parametrize("cluster", [CLUSTER, Cluster(8, 2), Cluster(6, 3)], ids=str)
def test_it_computes_attention_and_its_gradient_once(cluster: Cluster, policy: Policy) -> None:
    for options in ({"block": 16, "tolerance": 0.0}, {"block": 16, "servers": "pool"}):
        verify(once(make_planner("distca", cluster, MODEL, **options)(LENGTHS)), policy)


def test_a_row_crosses_once_and_is_passed_on_inside() -> None:
    lines = text.text(expand(once(small()))).splitlines()
    assert [line.split() for line in lines if " <- " in line] == [
        ["r2", "<-", "r0", "kv", "s0[0:8)"],
        ["r3", "<-", "r2", "kv", "s0[8:12)"],
        ["r3", "<-", "r2", "kv", "s0[0:8)"],
    ]


def test_the_layer_chooses_it_where_the_busiest_nic_gains() -> None:
    plain = make_planner("distca", CLUSTER, MODEL, block=16)(LENGTHS)
    chosen = make_planner("distca", CLUSTER, MODEL, Layers(once_per_node=True), block=16)(LENGTHS)
    assert chosen == once(plain)
    sent = [max(map(max, plan_statistics(plan, MODEL)["bytes_sent_per_nic"])) for plan in (plain, chosen)]
    assert sent[1] < sent[0]
    seconds = [simulate(plan, CLUSTER, MODEL)["mean_step_s"] for plan in (plain, chosen)]
    assert seconds[1] < seconds[0]
    alone = Cluster(8, 8)
    assert make_planner("distca", alone, MODEL, Layers(once_per_node=True))(LENGTHS).zones[0].pattern == "dispatch"
