"""Key-value heads that several ranks of a node share cross once, and are passed on inside."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megatron_balance import Cluster, MicrobatchPlan, Model, make_planner
from megatron_balance.analysis.machine import Machine
from megatron_balance.analysis.statistics import plan_statistics
from megatron_balance.compile.pipeline import expand
from megatron_balance.config import load_cluster, load_model
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.ir import text
from megatron_balance.ir.arrays import as_array
from megatron_balance.ir.columns import Transfer
from megatron_balance.ir.program import Exchange, Kind
from megatron_balance.ir.step import Layers
from megatron_balance.patterns import pattern_of
from megatron_balance.patterns.base import Context
from megatron_balance.patterns.head_exchange import HeadShares
from megatron_balance.patterns.once_per_node import ON
from megatron_balance.patterns.sends import Send
from megatron_balance.planners import PLANNERS
from megatron_balance.planners.base import StepContext
from megatron_balance.planning.choice import choose_planner
from megatron_balance.planning.layers import with_layers
from megatron_balance.simulator import simulate
from megatron_balance.simulator.attention import attention_call
from megatron_balance.simulator.setup import Setup
from megatron_balance.simulator.ticks import simulate_planned
from megatron_balance.workloads.lengths import draw
from tests.support import by_hand

LLAMA3 = load_model("llama3-8b")


def pool(name: str, lengths: tuple[int, ...], shape: tuple[int, int], heads: tuple[int, int]) -> MicrobatchPlan:
    return by_hand.pool(name, lengths, shape[0], ranks_per_node=shape[1], heads=heads)


def test_a_head_crosses_once_to_ranks_in_turns_and_is_passed_on_inside() -> None:
    # Four ranks share one key-value head: of tokens of node 0 rank 2 receives those of rank 0, rank
    # 3 those of rank 1.
    program = expand(pool("head_exchange_once", (8,), (4, 2), (4, 1)), "keep")
    forward, backward = text.text(program).split("backward\n")

    def moved(phase: str, kind: str, *ends: str) -> list[list[str]]:
        lines = [line.split() for line in phase.splitlines() if f" {kind} " in line and " <- " in line]
        return [[line[2], line[0], line[4]] for line in lines if {line[0], line[2]} & set(ends)]

    keys = [row for row in moved(forward, "kv", "r2", "r3") if row[2] in ("s0[0:2)", "s0[2:4)")]
    assert keys == [["r0", "r2", "s0[0:2)"], ["r1", "r3", "s0[2:4)"], ["r2", "r3", "s0[0:2)"], ["r3", "r2", "s0[2:4)"]]
    gradients = [row for row in moved(backward, "dkv", "r2", "r3") if row[2] in ("s0[0:2)", "s0[2:4)")]
    assert gradients[:2] == [["r2", "r3", "s0[2:4)"], ["r3", "r2", "s0[0:2)"]]
    assert gradients[2:] == [["r2", "r0", "s0[0:2)"], ["r3", "r1", "s0[2:4)"]]


@pytest.mark.parametrize("heads", [(32, 8), (32, 2), (6, 3), (12, 6)], ids=str)
def test_every_rank_has_all_its_heads_of_every_owner_and_none_comes_twice(heads: tuple[int, int]) -> None:
    per_node, num_ranks = 8, 16
    plan = pool("head_exchange_once", (5000,), (num_ranks, per_node), heads)
    sends = pattern_of(plan.zones[0]).sends(plan.zones[0], Context.of(plan)).rows
    columns = [Send.EXCHANGE, Send.BLOCK, Send.SRC, Send.DST, Send.HEAD_START, Send.HEAD_STOP]
    rows = sends[sends[:, Send.KIND] == Kind.KV][:, columns].tolist()
    came = [(owner, dst, head) for _, owner, _, dst, a, b in rows for head in range(a, b)]
    needed = {
        (owner, dst, head)
        for dst, own in enumerate(HeadShares.of(*heads, num_ranks).slices)
        for one in own
        for head in range(one.kv_start, one.kv_stop)
        for owner in range(num_ranks)
        if owner != dst
    }
    assert len(came) == len(set(came))
    assert set(came) == needed
    crossing = [
        (owner, dst // per_node, head)
        for _, owner, src, dst, a, b in rows
        for head in range(a, b)
        if src // per_node != dst // per_node
    ]
    assert len(crossing) == len(set(crossing))
    assert all(src // per_node == dst // per_node for number, _, src, dst, _, _ in rows if number == ON)


@pytest.mark.parametrize("num_kv_heads", [8, 4, 2])
def test_no_head_and_no_gradient_crosses_twice(num_kv_heads: int) -> None:
    # Of 512 tokens on 16 ranks each node receives 256 with its half of the heads; forward, replay
    # and gradients.
    for pattern, times in (("head_exchange", 16 / num_kv_heads), ("head_exchange_once", 1)):
        program = expand(pool(pattern, (512,), (16, 8), (32, num_kv_heads)), "replay")
        for ops, kinds in ((program.forward, [Kind.KV]), (program.backward, [Kind.KV, Kind.KV_GRAD])):
            rows = np.concatenate([as_array(op.transfers) for op in ops if isinstance(op, Exchange)])
            rows = rows[rows[:, Transfer.SRC] // 8 != rows[:, Transfer.DST] // 8]
            heads = (rows[:, Transfer.STOP] - rows[:, Transfer.START]) * np.diff(rows[:, Transfer.HEADS])[:, 0]
            for kind in kinds:
                assert heads[rows[:, Transfer.KIND] == kind].sum() == 2 * 256 * num_kv_heads / 2 * times, kind


def test_the_layer_chooses_it_where_it_is_faster_and_only_there() -> None:
    # Short batches do not pay for the call that passes heads on.
    for name in ("a800", "h100"):
        for num_ranks, tokens_per_rank in ((16, 8), (16, 32), (16, 512), (32, 8), (32, 256)):
            cluster = load_cluster(name).build(num_ranks=num_ranks, ranks_per_node=8)
            cost = AnalyticCost(cluster, LLAMA3)
            plain = pool("head_exchange", (num_ranks * tokens_per_rank,), (num_ranks, 8), (32, 8))
            once = replace(plain, zones=(replace(plain.zones[0], pattern="head_exchange_once"),))
            machine = Machine(cluster, LLAMA3, cost)
            chosen = with_layers(plain, cluster, cost, Layers(once_per_node=True))
            seconds = [sum(phase.end_s.max() for phase in attention_call(each, machine)) for each in (plain, once)]
            assert chosen == (once if seconds[1] < seconds[0] else plain), (name, num_ranks, tokens_per_rank)
            assert with_layers(plain, cluster, cost, Layers()) == plain
    # What no ranks of a node share stays a head exchange.
    layers = Layers(once_per_node=True)
    for shape, heads in (((16, 8), (32, 32)), ((16, 8), (16, 16)), ((8, 8), (32, 1)), ((16, 1), (32, 8))):
        cluster = Cluster(*shape, nic_bytes_per_s=1e9)
        plain = pool("head_exchange", (4096,), shape, heads)
        assert with_layers(plain, cluster, AnalyticCost(cluster, Model(*heads, 64)), layers) == plain


@pytest.mark.parametrize(
    ("name", "options", "pattern"),
    [("ulysses", {}, "head_exchange_once"), ("knapformer", {"topology": "g16n1"}, "chunk_exchange_once")],
)
def test_planners_that_exchange_heads_come_with_it(name: str, options: dict[str, Any], pattern: str) -> None:
    cluster = load_cluster("a800").build(num_ranks=16, ranks_per_node=8)
    plan = make_planner(name, cluster, LLAMA3, **options)([30000, 20000])
    assert [zone.pattern for zone in plan.zones] == [pattern]
    assert PLANNERS["flexsp"].layers.once_per_node


# Rows that several ranks of a node need cross once, and are passed on inside.
CLUSTER, MODEL = Cluster(8, 4, nic_bytes_per_s=1e9), Model(num_heads=4, num_kv_heads=2, head_dim=16)
LENGTHS = [7000, 2000, 900, 333, 120, 50]


def once(plan: MicrobatchPlan) -> MicrobatchPlan:
    return replace(plan, zones=tuple(replace(zone, pattern="dispatch_once") for zone in plan.zones))


def test_a_row_crosses_once_and_is_passed_on_inside() -> None:
    # Rank 0 owns the keys; ranks 2 and 3 of the other node own queries that see them.
    fragments = [(0, 0, 0, 8), (2, 0, 8, 12), (3, 0, 12, 16)]
    tasks = [(0, 0, 0, 8, 0, 8), (2, 0, 8, 12, 0, 12), (3, 0, 12, 16, 0, 16)]
    small = by_hand.plan((16,), 4, by_hand.task_table(fragments, tasks), ranks_per_node=2, heads=(1, 1))
    lines = text.text(expand(once(small))).splitlines()
    moved = [line.strip() for line in lines if " <- " in line]
    assert moved == ["r2 <- r0 kv s0[0:8)", "r3 <- r2 kv s0[8:12)", "r3 <- r2 kv s0[0:8)"]


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
    # a800, llama-7b, 131,072 tokens of github on 32 ranks: each row to each of its ranks, it does.
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
