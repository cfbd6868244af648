"""Zeppelin's partitioner: the printed rule on hand-worked batches, rings of groups on what they
promise, and the edges of all rules."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_balance import Cluster, MicrobatchPlan, Model, make_planner
from megatron_balance.analysis.backward import microbatch_bytes
from megatron_balance.analysis.estimate import estimate
from megatron_balance.analysis.machine import Machine
from megatron_balance.analysis.statistics import plan_statistics, tokens_per_rank
from megatron_balance.config import load_cluster, load_model
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.ir.batch import Batch
from megatron_balance.ir.plan import SharedZone, Zone
from megatron_balance.model_config import pretrained
from megatron_balance.planners import zeppelin
from megatron_balance.planners.base import StepContext
from megatron_balance.planners.zeppelin import InWaves, Search, ZeppelinOptions, most_bytes
from megatron_balance.planners.zeppelin.price import GroupCosts, rings_s
from megatron_balance.planners.zeppelin.shares import aligned
from megatron_balance.planning.choice import planning_cost
from megatron_balance.simulator.setup import Setup, StageSetup, step_memory
from megatron_balance.simulator.step import simulate_step
from tests.support.deepseek import DEEPSEEK_V3

MODEL = Model(32, 32, 128)


def plan_of(lengths: list[int], cluster: Cluster, **options: Any) -> MicrobatchPlan:
    # Rings of single ranks, unless another rule is named.
    return make_planner("zeppelin", cluster, MODEL, **{"rule": "groups", "group_size": 1, **options})(lengths)


def zones_of(plan: MicrobatchPlan) -> list[tuple[str, tuple[int, ...], list[int]]]:
    return [(z.name, z.ranks, [plan.lengths[s] for s in z.seqs]) for z in plan.zones if isinstance(z, Zone)]


# Rule: paper, by hand

# Lengths, ranks and ranks a node, tokens a rank holds, and the zones of rule paper.
PAPERS_RULE: list[tuple[list[int], tuple[int, int], int, list[tuple[str, tuple[int, ...], list[int]]]]] = [
    # A sequence longer than a node goes to all nodes it asks for. Node capacity 2 x 10; s_avg =
    # 40 / 3, so ceil(30 / s_avg) = 3 nodes of 10 tokens; 10 is the threshold s0: split on one node.
    ([30, 10], (6, 2), 10, [("inter_node", (0, 1, 2, 3, 4, 5), [30]), ("intra_node", (0, 1), [10])]),
    # The least loaded node gets the next sequence, and the least loaded rank. No sequence reaches a
    # node's 24 tokens. 11 -> node 0, 9 -> node 1, 8 -> node 1 (9 < 11), 5 -> node 0; then each to
    # the emptier rank.
    ([11, 9, 8, 5], (4, 2), 12, [("local", (rank,), [n]) for rank, n in enumerate((11, 5, 9, 8))]),
    # The node threshold falls until the rest fits. 9 + 8 fill node 0 and 1 of 10 tokens; 3 fits
    # nowhere: s1 falls to 9, and 9 goes over ceil(9 / 10) = 1 empty node as a split sequence; 3 still
    # fits nowhere (9, 8): s1 falls to 8, then to 3: all are above the threshold, and 3 only fits over
    # both nodes.
    ([9, 8, 3], (4, 2), 5, [("inter_node", (0, 1, 2, 3), [9, 8, 3])]),
    # The rank threshold falls until the local ones fit. One node, ranks of 10. 7, 6, 5: 5 fits on
    # neither rank, so s0 falls to 7. 7 alone has the budget c_avg = 49 / 2: 2 fragments of 4. Then 6
    # -> rank 0 (10), 5 -> rank 1 (9).
    ([7, 6, 5], (2, 2), 10, [("intra_node", (0, 1), [7]), ("local", (0,), [6]), ("local", (1,), [5])]),
    # Fragments are dealt round robin by squared length. s0 = 12: 40 and 20 are split. c_avg = (1600
    # + 400) / 4 = 500: ceil(3.2) = 4 and ceil(0.8) = 1 fragments, but 20 whole passes the capacity of
    # its rank (10 + 20 > 16), so it is split over all four.
    ([40, 20], (4, 4), 16, [("intra_node", (0, 1, 2, 3), [40, 20])]),
    # Without slack everything goes across nodes.
    ([23, 19, 14, 8], (8, 4), 8, [("inter_node", tuple(range(8)), [23, 19, 14, 8])]),
]


@pytest.mark.parametrize(("lengths", "ranks", "tokens", "zones"), PAPERS_RULE)
def test_paper_rule_by_hand(lengths, ranks, tokens, zones) -> None:
    plan = plan_of(lengths, Cluster(*ranks), rule="paper", tokens_per_rank=tokens)
    assert zones_of(plan) == zones


# Rule: groups


def test_zones_of_rings_are_local_where_attention_is_even_shared_and_in_order() -> None:
    # Short sequences stay local where attention is even.
    plan = plan_of([500] * 16, Cluster(8, 4))
    assert {name for name, _, _ in zones_of(plan)} == {"local"}
    assert plan_statistics(plan, MODEL)["imbalance"] == {"tokens": 1.0, "attention": 1.0}
    # Equal sequences that fill the ranks exactly stay local without slack.
    plan = plan_of([8] * 8, Cluster(8, 4), tokens_per_rank=8)
    assert {name for name, _, _ in zones_of(plan)} == {"local"}
    # Sequences on the same ranks share one zone.
    plan = plan_of([1000] * 3, Cluster(2, 2), tokens_per_rank=1500)
    assert len({ranks for _, ranks, _ in zones_of(plan)}) == len(plan.zones)
    # Zones are issued inter node then intra node then local.
    order = ["inter_node", "intra_node", "local"]
    names = [
        name for name, _, _ in zones_of(plan_of([60000, 30000, 20000, 9000, 4000, 3000, 500, 400], Cluster(32, 8)))
    ]
    assert names == sorted(names, key=order.index)
    assert set(names) == set(order)


def test_sequences_are_on_the_fewest_neighbours_that_stay_below_the_target() -> None:
    # Of four groups with 19.25 seconds each in the mean.
    seconds, tokens = [40.0, 30.0, 5.0, 2.0], [4, 3, 2, 1]
    assert aligned(seconds, tokens, 4, 27.0, 100) == [(0, 1), (2, 3), (2,), (3,)]
    assert aligned(seconds, tokens, 4, 22.0, 100) == [(0, 1), (2, 3), (2,), (3,)]
    assert aligned(seconds, tokens, 4, 16.0, 100) == [(0, 1, 2), (0, 1, 2, 3), (3,), (3,)]
    assert aligned(seconds, tokens, 4, 0.0, 100) == [(0, 1, 2, 3)] * 4
    assert aligned(seconds, tokens, 4, 27.0, 3) == [(0, 1), (2, 3), (2, 3), (2, 3)], "no room on one"


@pytest.mark.parametrize("name", ["h200", "a800"])
@pytest.mark.parametrize("mask", ["causal", "full"])
def test_the_closed_form_of_rings_of_groups_is_near_the_estimate_of_their_plan(name: str, mask: str) -> None:
    own, model = load_cluster(name).build(num_ranks=64, ranks_per_node=8), replace(MODEL, attention=mask)
    cost = AnalyticCost(own, model)
    for lengths in ([60000, 50000, 40000, 9000, 5000, *[1500] * 60], [200000, 30000, 9000]):
        plan = make_planner("zeppelin", own, model, rule="groups")(lengths)
        groups: list[tuple[int, ...]] = [()] * len(lengths)
        for zone in plan.zones:
            assert isinstance(zone, Zone)
            for seq in zone.seqs:
                groups[seq] = tuple(sorted({rank // 8 for rank in zone.ranks}))
        found = estimate(plan, Machine(own, model, cost))
        assert found is not None
        seconds = rings_s(groups, lengths, GroupCosts(cost, own, model, 8))
        assert 0.9 * found.layer_s < seconds < 1.03 * found.layer_s


def drawn(seed: int, num_seqs: int = 60) -> list[int]:
    # Long-tailed lengths of 64 tokens a rank of 16 ranks, to the token, and more than one sequence
    # of a length.
    rng = random.Random(seed)
    weights = [rng.lognormvariate(0, 1.2) for _ in range(num_seqs)]
    lengths = [max(1, int(1024 * weight / sum(weights))) for weight in weights]
    return [lengths[0] + 1024 - sum(lengths), *lengths[1:]]


# Rule: paper, thresholds


@pytest.mark.parametrize("seed", range(20))
def test_thresholds_that_are_passed_over_would_not_have_fit(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    # Whether nothing is known of what found no room before; without slack, hardly any threshold
    # works out.
    lengths, cluster, zone = drawn(seed), Cluster(16, 4), zeppelin._InterNodeZone  # pyright: ignore[reportPrivateUsage]
    slack = 64 + seed // 5
    found, tries = zeppelin.paper_placement(lengths, cluster, slack), list[int]()
    put, fill = zone.put, zeppelin._least_loaded  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(zone, "put", lambda self, seq: put(self, seq) and False)
    monkeypatch.setattr(
        zeppelin, "_least_loaded", lambda sizes, *limits: tries.append(len(sizes)) or fill(sizes, *limits)
    )
    assert zeppelin.paper_placement(lengths, cluster, slack) == found
    assert len(tries) > 4


# Capacities, refusals and odd batches: tests/property/test_planners.py, of all planners


# Whether layers keep what they receive under a placement in waves, and what is taken where not.

EXPERTS, STAGES = 32, 16
DEEPSEEK = replace(
    Model(**pretrained({**DEEPSEEK_V3, "num_nextn_predict_layers": 1})), num_layers=64, expert_split=EXPERTS
)
SETUP = Setup("auto", experts=EXPERTS, pipeline=STAGES, recompute="full", engine="rounds")
# As in a microbatch of 256k tokens: two waves of it leave no room on 32 H800 a stage, three do.
LONG = (212_365, 42_000, 7_779)


def planned(lengths: tuple[int, ...], **options: Any) -> tuple[MicrobatchPlan, Machine, Machine]:
    # A plan for 512 H800, told their memory; prices and the simulated machine.
    cluster = load_cluster("h800").build(num_ranks=32)
    machine, cost = Machine(cluster, DEEPSEEK, AnalyticCost(cluster, DEEPSEEK)), planning_cost(cluster, DEEPSEEK, None)
    memory = step_memory(StageSetup(machine, SETUP)).of_microbatches(STAGES)
    context = StepContext(cluster, DEEPSEEK, cost, memory=memory, options=ZeppelinOptions(**options))
    return zeppelin.plan_in(Batch(lengths), context), Machine(cluster, DEEPSEEK, cost, memory=memory), machine


def waves_of(plan: MicrobatchPlan) -> int:
    (zone,) = plan.zones
    assert isinstance(zone, SharedZone)
    return zone.waves


def test_a_placement_comes_in_the_waves_whose_keys_layers_have_room_to_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    # Three waves of a long sequence are faster than two whose keys come again, as simulated too. In
    # two, one such microbatch of 16 made all layers of the step replay.
    kept, prices, machine = planned(LONG)
    monkeypatch.setattr(zeppelin, "_surely_keeps", lambda *_: True)
    replayed, *_ = planned(LONG)
    assert (waves_of(replayed), waves_of(kept)) == (2, 3)
    seconds: list[float] = []
    for plan, keeps in ((kept, True), (replayed, False)):
        found, step = estimate(plan, prices), simulate_step([plan] * STAGES, machine, SETUP)
        assert found is not None
        assert (found.backward.in_words, step.backward.in_words) == (("keep" if keeps else "replay"),) * 2
        forward_s, with_again_s = step.layer_s
        assert found.layer_s == pytest.approx(with_again_s, rel=0.05)
        assert found.forward_s == pytest.approx(forward_s, rel=0.05)
        seconds.append(step.step_s)
    assert seconds[0] < 0.98 * seconds[1]


def test_the_search_is_made_again_for_layers_that_replay_unless_waves_are_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told, placed = list[bool](), Search.placed

    def noted(self: Search, *, replays: bool) -> InWaves | None:
        told.append(replays)
        return placed(self, replays=replays)

    monkeypatch.setattr(Search, "placed", noted)
    planned(LONG)
    assert told == [False, True]
    # A number of waves that is asked for stays.
    plan, *_ = planned(LONG, num_waves=2)
    assert waves_of(plan) == 2


def test_plans_with_room_are_not_estimated_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(Search, "with_room", never)
    cluster, model = load_cluster("h200").build(num_ranks=16), load_model("llama-7b")
    cost = AnalyticCost(cluster, model)
    assert zeppelin.plan(Batch((20_000, 9_000, *[1_000] * 20)), cluster, model, cost, ZeppelinOptions()).zones
    with pytest.raises(AssertionError):
        planned(LONG)


@settings(max_examples=40)
@given(
    st.lists(st.integers(1, 60_000), min_size=1, max_size=30),
    st.sampled_from(("llama-7b", "llama3-8b", "llama-30b", "deepseek")),
    st.sampled_from((8, 16)),
    st.sampled_from((1, 2, 4, 8)),
)
def test_no_rank_owns_or_receives_more_than_the_bound(lengths: list[int], name: str, ranks: int, size: int) -> None:
    cluster, model = load_cluster("h100").build(num_ranks=ranks), DEEPSEEK if name == "deepseek" else load_model(name)
    cost = AnalyticCost(cluster, model)
    found = search_of(lengths, StepContext(cluster, model, cost, options=ZeppelinOptions(group_size=size)))
    in_waves = found.placed(replays=False)
    assert in_waves is not None
    plan = in_waves.plan
    most, held = most_bytes(in_waves, found.machine), microbatch_bytes([plan], model)
    assert tokens_per_rank(plan).max() <= most.tokens
    for what in ("kept", "replayed", "working"):
        assert getattr(held, what).max() <= getattr(most, what), what


def test_without_waves_that_leave_room_the_faster_of_both_searches_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    # Of those that fit, the one of the shorter layer.
    (kept, prices, _), (replayed, *_) = planned(LONG), planned(LONG, num_waves=2)
    context = StepContext(prices.cluster, prices.model, prices.cost, memory=prices.memory, options=ZeppelinOptions())
    search = search_of(LONG, context)
    found = search.placed(replays=False)
    assert found is not None
    chosen = found.chosen
    own, other, slow = (InWaves(plan, chosen) for plan in (replayed, kept, replace(replayed, zones=_in(replayed, 8))))

    def best(again: InWaves | None, numbers: tuple[int, ...], memory_bytes: float | None = None) -> InWaves:
        monkeypatch.setattr(zeppelin, "WAVES", numbers)
        monkeypatch.setattr(Search, "placed", lambda *_, **__: again)
        cluster = prices.cluster if memory_bytes is None else replace(prices.cluster, memory_bytes=memory_bytes)
        return search_of(LONG, replace(context, cluster=cluster)).with_room(own)

    assert best(other, ()) == other
    assert best(None, ()) == own
    assert best(own, (2,)) == own
    assert best(None, (1, 2, 3)).plan == replace(replayed, zones=_in(replayed, 3))
    cramped = replace(prices, cluster=replace(prices.cluster, memory_bytes=70e9))
    seconds = [known.layer_s for each in (own, slow) if (known := estimate(each.plan, cramped))]
    assert seconds[0] < seconds[1]
    assert best(slow, (), 70e9) == slow, "which fits"


def _in(plan: MicrobatchPlan, number: int) -> tuple[SharedZone]:
    (zone,) = plan.zones
    assert isinstance(zone, SharedZone)
    return (replace(zone, waves=number),)


def search_of(lengths: Sequence[int], context: StepContext) -> Search:
    # The search for a plan of one microbatch, whatever it holds.
    return Search(tuple(lengths), context, sum(lengths))
