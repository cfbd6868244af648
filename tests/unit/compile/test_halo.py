"""Plans under a sliding window: tokens stay where they are, and only keys that are needed travel."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_balance.analysis.statistics import plan_statistics
from megatron_balance.compile.halo import under
from megatron_balance.compile.pipeline import Projector, layout
from megatron_balance.compile.proof.runs import prove
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.ir.batch import Batch
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.mask import CAUSAL, SlidingWindow
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import REMAP, MicrobatchPlan
from megatron_balance.ir.program import Attend, Exchange, Kind
from megatron_balance.planning.choice import choose_planner
from megatron_balance.simulator import simulate
from tests.support.strategies import ALL_PLANNERS, Case, plan

CAUSAL_MODEL = Model(8, 8, 4, hidden_size=32, ffn_size=64)
WINDOW = SlidingWindow(10)
LENGTHS = (150, 61, 24, 7, 7, 3)


def case(model: Model = CAUSAL_MODEL, **options: object) -> Case:
    return Case(Batch(LENGTHS), Cluster(4, 2), model, None, seed=3, **options)  # pyright: ignore[reportArgumentType]


def needed(planned: MicrobatchPlan, rank: int) -> set[tuple[int, int]]:
    """Keys that the queries of a rank see and that it does not hold, token by token."""
    held = Projector(planned).attention_layout(rank).tolist()
    own = {(seq, token) for seq, start, stop in held for token in range(start, stop)}
    first = WINDOW.size - 1
    return {(seq, key) for seq, query in own for key in range(max(0, query - first), query)} - own


@pytest.mark.parametrize("planner", ALL_PLANNERS)
def test_a_rank_is_brought_the_keys_that_it_needs_and_no_others(planner: str) -> None:
    """In one exchange before one launch, whatever the comm patterns of the causal plan."""
    windowed = under(plan(planner, case()), WINDOW)
    program = prove(windowed, "keep")
    arrived: list[set[tuple[int, int]]] = [set() for _ in range(windowed.num_ranks)]
    launches = [0] * windowed.num_ranks
    for op in program.forward:
        if isinstance(op, Exchange):
            for kind, seq, start, stop, _, _, _, dst in op.transfers:
                assert kind == Kind.KV
                new = {(seq, token) for token in range(start, stop)}
                assert not new & arrived[dst], "a key comes once"
                arrived[dst] |= new
        elif isinstance(op, Attend):
            launches[op.rank] += 1
    assert arrived == [needed(windowed, rank) for rank in range(windowed.num_ranks)]
    assert launches == [int(len(Projector(windowed).attention_layout(rank)) > 0) for rank in range(windowed.num_ranks)]


@pytest.mark.parametrize("planner", ALL_PLANNERS)
def test_tokens_stay_where_the_causal_plan_has_them(planner: str) -> None:
    """Also after a remap, which the layers of both masks make; the window's may be routed alone."""
    causal = plan(planner, case(remapped=True, routing=(1, 1)))
    windowed = under(causal, WINDOW)
    assert [layout(windowed, r).tolist() for r in range(4)] == [layout(causal, r).tolist() for r in range(4)]
    assert causal.routing is not None
    assert windowed.routing == replace(causal.routing, zones=(REMAP,))
    prove(windowed, "replay")


def test_a_window_that_shows_whole_sequences_leaves_the_plan_as_it_is() -> None:
    causal = plan("te_ring", case())
    assert under(causal, SlidingWindow(150)) is causal
    assert under(causal, CAUSAL) is causal
    assert under(causal, SlidingWindow(149)).mask == SlidingWindow(149)


@pytest.mark.parametrize("planner", ["te_ring", "ulysses", "distca", "zeppelin"])
def test_a_model_of_windows_is_planned_with_its_pairs_and_bytes(planner: str) -> None:
    model, cluster = replace(CAUSAL_MODEL, attention=WINDOW.name), Cluster(4, 2)
    found = choose_planner(planner, {}).plan(Batch(LENGTHS), cluster, model, AnalyticCost(cluster, model))
    figures = plan_statistics(found, model)
    assert sum(figures["attention_pairs_per_rank"]) == sum(map(WINDOW.num_pairs, LENGTHS))
    received = [len(needed(found, rank)) for rank in range(4)]
    assert figures["kv_tokens_received_per_rank"] == received
    assert figures["bytes_received_per_rank"]["total"] == [n * model.kv_bytes_per_token for n in received]


def test_the_simulator_sees_the_keys_that_do_not_travel() -> None:
    """GPT-OSS's window of 128 keys on one long sequence over two nodes."""
    model = Model(64, 8, 64, attention="window_128")
    cluster = Cluster(16, 8)

    def layer(model: Model) -> dict[str, float]:
        cost = AnalyticCost(cluster, model)
        planned = choose_planner("te_ring", {}).plan(Batch((131_072,)), cluster, model, cost)
        received = sum(plan_statistics(planned, model)["bytes_received_per_rank"]["total"])
        return {"bytes": received, "s": simulate(planned, cluster, model)["phases_s"]["forward_attention"]}

    causal, windowed = layer(replace(model, attention="causal")), layer(model)
    # Each of 16 ranks has two chunks, and 15 + 16 begin behind others' tokens: 127 keys each; the two
    # chunks in the middle lie on one rank.
    assert windowed["bytes"] == 30 * 127 * model.kv_bytes_per_token
    assert windowed["bytes"] < causal["bytes"] / 200
    assert windowed["s"] < causal["s"] / 100
