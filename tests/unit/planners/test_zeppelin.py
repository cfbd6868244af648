"""Zeppelin's partitioner: the printed rule by hand, rings of groups, waves, edges of all rules."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_balance import Batch, Cluster, MicrobatchPlan, Model, make_planner
from megatron_balance.analysis.backward import microbatch_bytes
from megatron_balance.analysis.estimate import estimate
from megatron_balance.analysis.machine import Machine
from megatron_balance.analysis.recurrent import Pieces
from megatron_balance.analysis.states import piece_s
from megatron_balance.analysis.statistics import plan_statistics, tokens_per_rank
from megatron_balance.compile.pipeline import compile_ranks
from megatron_balance.compile.proof.runs import issued, verify_issue_order
from megatron_balance.compile.remap import fragments
from megatron_balance.config import load_cluster, load_model
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.cost.kernel import TILE_TOKENS, law_of
from megatron_balance.errors import ConfigError
from megatron_balance.ir.mask import FULL
from megatron_balance.ir.plan import SharedZone, Zone
from megatron_balance.model_config import pretrained
from megatron_balance.patterns.waves import schedule
from megatron_balance.planners import zeppelin
from megatron_balance.planners.base import StepContext
from megatron_balance.planners.zeppelin import Search, ZeppelinOptions, _InWaves, most_bytes
from megatron_balance.planners.zeppelin import shares as sharing
from megatron_balance.planners.zeppelin.price import WAVES, GroupCosts, cheapest, rings_s, with_lead
from megatron_balance.planners.zeppelin.shares import Shares, Trimmed, _zigzag_edges, aligned, placements
from megatron_balance.planning.choice import choose_planner, planning_cost
from megatron_balance.simulator.setup import Setup, StageSetup, step_memory
from megatron_balance.simulator.step import simulate_step
from megatron_balance.workloads.lengths import draw
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


def test_whole_sequences_are_swapped_until_groups_are_even() -> None:
    # Longest first alone is 8 + 5 + 3, 7 + 6, and ends at 16 of 29 seconds.
    seconds = [8.0, 7.0, 6.0, 5.0, 3.0]
    of = sharing.whole(seconds, 2)
    assert sorted(sum(own for own, at in zip(seconds, of, strict=True) if at == (group,)) for group in (0, 1)) == [
        14,
        15,
    ]


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

    def noted(self: Search, *, replays: bool) -> _InWaves | None:
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
    own, other, slow = (_InWaves(plan, chosen) for plan in (replayed, kept, replace(replayed, zones=_in(replayed, 8))))

    def best(again: _InWaves | None, numbers: tuple[int, ...], memory_bytes: float | None = None) -> _InWaves:
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


# Zeppelin's rule `waves`: shares that are even in work and tokens, priced, within the capacity.
ONE_LAYER = Model(32, 32, 128, num_layers=1)
# A batch of 262,144 tokens, as drawn for Zeppelin's Table 2 (github).
MIXED = (60698, 59330, 47518, 43678, 13144, 7420, 6199, 5543, 4986, 3068, 3036, 1698, 1676, 1543, 1513, 1094)

# Another one.
RINGS = (37494, 12045, 1911, 1371, 1606, 4688, 4088, 34290, 14505, 1803, 3809, 3117, 1849, 4009, 3111, 5313, 127135)


def cluster(num_ranks: int = 64) -> Cluster:
    # Nodes of eight H200.
    return Cluster(num_ranks, 8, attention_efficiency=0.374)


def plan_in_waves(
    lengths: Sequence[int], own: Cluster | None = None, model: Model | None = None, **options: Any
) -> MicrobatchPlan:
    return make_planner("zeppelin", own or cluster(), model or ONE_LAYER, **options)(list(lengths))


def zone_of(plan: MicrobatchPlan) -> SharedZone:
    (zone,) = plan.zones
    assert isinstance(zone, SharedZone)
    return zone


def step_s(plan: MicrobatchPlan, own: Cluster) -> float:
    return simulate_step([plan], Machine(own, ONE_LAYER, AnalyticCost(own, ONE_LAYER))).step_s


def test_rings_of_groups_are_taken_where_they_are_ahead_of_waves(monkeypatch: pytest.MonkeyPatch) -> None:
    # 12 heads over groups of 8: as even as that can be is a third more than groups of 4 take.
    own = replace(load_cluster("h200").build(num_ranks=16, ranks_per_node=8), attention_kernel="flash_attn")
    model = load_model("moe-8x550m")
    prices = Machine(own, model, AnalyticCost(own, model))
    lengths = (63121, 2415)
    found, in_waves = (make_planner("zeppelin", own, model, num_waves=waves)(lengths) for waves in (None, 1))
    assert (found.zones[0].pattern, in_waves.zones[0].pattern) == ("head_ring", "waves")
    of_both = [estimate(each, prices) for each in (found, in_waves)]
    assert of_both[0] is not None
    assert of_both[1] is not None
    assert of_both[0].layer_s < 0.81 * of_both[1].layer_s
    # The estimate of whole plans decides, where the prices are close.
    lengths, own = RINGS, load_cluster("h100").build(num_ranks=64, ranks_per_node=8)
    rings = plan_in_waves(lengths, own)
    assert all(zone.pattern in ("head_ring", "head_exchange", "ring") for zone in rings.zones), rings.zones
    monkeypatch.setattr(zeppelin, "_SHOWS", inf)
    assert step_s(rings, own) < step_s(plan_in_waves(lengths, own), own)
    assert isinstance(plan_in_waves(lengths, own).zones[0], SharedZone)


def test_by_default_work_and_tokens_are_even_at_once() -> None:
    plan = plan_in_waves(MIXED)
    statistics = plan_statistics(plan, ONE_LAYER)
    assert isinstance(plan_in_waves(MIXED, tokens_per_rank=4096).zones[0], SharedZone), "a capacity of the average, too"
    assert zone_of(plan).group_size == 8
    assert statistics["imbalance"]["attention"] < 1.03
    assert statistics["imbalance"]["tokens"] < 1.03
    for backward in (False, True):
        verify_issue_order(issued(compile_ranks(plan, "keep"), plan.ranks_per_node, backward=backward))
    # Short sequences stay whole on single ranks.
    zone = zone_of(plan_in_waves([4096] * 64))
    assert (zone.name, zone.group_size) == ("local", 1)
    assert sorted(zone.fragments) == [(rank, rank, 0, 4096) for rank in range(64)] or len(zone.fragments) == 64
    # Over slow links fewer keys travel.
    slow = replace(cluster(), nic_bytes_per_s=5e9)
    plans = plan_in_waves(MIXED), plan_in_waves(MIXED, slow)
    received = [sum(plan_statistics(plan, ONE_LAYER)["kv_tokens_received_inter_node_per_rank"]) for plan in plans]
    assert received[1] < 0.6 * received[0]


def test_waves_are_faster_than_rings_also_where_keys_show() -> None:
    ways: tuple[dict[str, Any], ...] = ({}, {"rule": "groups"}, {"rule": "groups", "group_size": 1})
    waves, groups, rings = (step_s(plan_in_waves(MIXED, **options), cluster()) for options in ways)
    assert waves < groups < 0.95 * rings
    # Where keys show it also begins with rings of groups.
    # Without that it took 0.6 % longer than the rings, with it 0.7 % less.
    lengths, own = (19597, 18312, 8898, 10139, 8108, 482), cluster(16)  # as drawn for arXiv, 64k
    assert step_s(plan_in_waves(lengths, own), own) < step_s(plan_in_waves(lengths, own, rule="groups"), own)


def test_group_size_and_number_of_waves_can_be_named_where_nics_are_shared_evenly() -> None:
    zone = zone_of(plan_in_waves(MIXED, group_size=4, num_waves=3))
    assert (zone.group_size, zone.waves) == (4, 3)
    with pytest.raises(ConfigError, match="group_size 3 does not tile 64 ranks"):
        plan_in_waves(MIXED, group_size=3)
    with pytest.raises(ConfigError, match="num_waves: expected at least 1, got 0"):
        plan_in_waves(MIXED, num_waves=0)
    # Sizes of groups share NICs evenly and go beyond a node.
    for own, sizes in (Cluster(32, 8), "1, 2, 4, 8, 16, 32"), (Cluster(24, 6, ranks_per_nic=2), "1, 2, 6, 12, 24"):
        with pytest.raises(ConfigError, match=f"use one of {sizes}$"):
            plan_in_waves(MIXED, own, group_size=5)


@pytest.mark.parametrize("name", ["zeppelin", "auto"])
def test_a_size_of_groups_that_does_not_fit_the_nics_is_left_out_of_the_search(name: str) -> None:
    # Nodes of three ranks, of which two share a NIC: rings over groups of a node cannot be priced.
    cluster = load_cluster("a800").build(num_ranks=6, ranks_per_node=3)
    assert make_planner(name, cluster, load_model("llama-7b"))([9000, 700, 300]).num_tokens == 10000


def test_shares_of_every_placement_add_up_and_the_last_is_even() -> None:
    costs = GroupCosts(AnalyticCost(cluster(), ONE_LAYER), cluster(), ONE_LAYER, 8)
    work = costs.works_s(MIXED)
    placed: Shares | None = None
    for placed in placements(work, MIXED, 8):
        assert all(sum(groups.values()) == pytest.approx(1.0, abs=1e-2) for groups in placed.of)
        for group in range(8):
            shares = {seq: groups[group] for seq, groups in enumerate(placed.of) if group in groups}
            assert placed.load[group] == pytest.approx(sum(p * work[seq] for seq, p in shares.items()), rel=0.01)
    assert placed is not None
    assert max(placed.load) < 1.02 * placed.mean_work
    assert max(placed.held) < 1.02 * placed.mean_tokens
    # With a group that holds nothing there is nothing to trade.
    placed = Shares.begin([1.0] * 30, [10] * 30, 2, [{0: 1.0}] * 30)
    assert list(sharing._level_tokens(placed)) == [150.0], "tokens above the mean, and nothing after that"
    # Edges of a zigzag are as wide as the shares.
    assert _zigzag_edges(1200, [1, 2, 3], 128) == [0, 100, 300, 900, 1100, 1200]
    edges = _zigzag_edges(100_000, [0.5, 0.25, 0.25], 128)
    assert [edge % 128 for edge in edges[:3]] == [0, 0, 0]
    assert edges[0] == 0
    assert edges[-1] == 100_000
    assert _zigzag_edges(1, [0.5, 0.5], 128) == [0, 0, 1, 1]


def test_what_groups_of_many_sequences_offer_is_kept_up_as_they_trade_and_equal_ones_are_told_by_number() -> None:
    lengths = [1000 + 250 * (seq % 7) for seq in range(120)]
    work = [length * (length + 4096) / 1e9 for length in lengths]
    placed = Shares.begin(work, lengths, 3, [{seq % 2: 1.0} for seq in range(120)])
    offers, means = sharing._Offers(placed), (0.9 * lengths[0] / work[0], lengths[3] / work[3])

    def offered(of: sharing._Offers) -> list[list[tuple[float, int, float]]]:
        return [sorted(of.of(group, mean, more=more)) for group in (0, 1) for mean in means for more in (True, False)]

    for number, seq in enumerate((0, 2, 4, *range(6, 90, 2), 0, 4, 8)):
        placed.hand(seq, 0, 1, work[seq] * (0.4, 1.0)[number % 2])
        for group in (0, 1):
            offers.update(seq, group)
        assert offered(offers) == offered(sharing._Offers(placed))
        for of in offered(offers):
            assert len(of) == 12
    first = [
        seq
        for _, seq, _ in sharing._Offers(Shares.begin([1.0] * 30, [5] * 30, 1, [{0: 1.0}] * 30)).of(0, 1.0, more=True)
    ]
    assert sorted(first) == list(range(12))


def test_the_estimate_is_near_the_simulator() -> None:
    own = cluster()
    context = StepContext(own, ONE_LAYER, AnalyticCost(own, ONE_LAYER), options=ZeppelinOptions())
    found = Search(MIXED, context, 10**6).placed(replays=False)
    assert found is not None
    chosen = found.chosen
    simulated = simulate_step([plan_in_waves(MIXED)], Machine(own, ONE_LAYER, AnalyticCost(own, ONE_LAYER)))
    layer_s = simulated.step_s - sum(simulated.phases_s[name] for name in ("head", "gradient_sync", "optimizer"))
    assert chosen.price.seconds == pytest.approx(layer_s, rel=0.02)
    costs = GroupCosts(AnalyticCost(own, ONE_LAYER), own, ONE_LAYER, 8)
    work = costs.works_s(MIXED)
    best = cheapest(Trimmed.without([Shares.begin(work, MIXED, costs.num_groups, chosen.of)]), costs)
    assert best is not None
    again = with_lead(best[1], MIXED, chosen.of, costs, WAVES)
    assert again.seconds == pytest.approx(chosen.price.seconds, rel=3e-3)


WIDE = Model(64, 8, 128, num_layers=1, hidden_size=1024, ffn_size=1024)


def test_a_lead_ends_with_a_row_where_that_is_cheapest() -> None:
    # The rest of a row that it cuts sees the lead's keys, too: a piece more in the backward.
    own = replace(load_cluster("h100").build(num_ranks=16, ranks_per_node=8), attention_kernel="flash_attn_3")
    zone = zone_of(plan_in_waves((32_768, *[6144] * 5, *[1536] * 44), own, model=WIDE))
    # The first half of the longest sequence's share, and another one whole.
    assert (zone.group_size, zone.lead) == (8, 7680 + 6144)


def test_inside_a_node_all_sizes_of_groups_are_compared() -> None:
    # Groups of four cost more than one of eight, but single ranks less.
    own = replace(load_cluster("h100").build(num_ranks=8, ranks_per_node=8), attention_kernel="flash_attn_3")
    machine, lengths = Machine(own, WIDE, AnalyticCost(own, WIDE)), (16_384, *[2048] * 16, *[1024] * 16)
    plans = [plan_in_waves(lengths, own, model=WIDE, group_size=size) for size in (None, 1, 4, 8)]
    found, one, four, eight = (estimate(plan, machine).layer_s for plan in plans)
    assert found == one < 0.9 * eight < 0.9 * four


def test_rings_are_asked_for_among_many_groups_where_the_longest_sequence_fills_a_few() -> None:
    own = replace(load_cluster("h200").build(num_ranks=264, ranks_per_node=8), attention_kernel="flash_attn")
    model = load_model("llama-7b")
    machine, lengths = Machine(own, model, AnalyticCost(own, model)), draw("arxiv", 264 * 4096, 1, 1)[0]
    plans = [plan_in_waves(lengths, own, model=model, group_size=size) for size in (None, 8)]
    found, waves = (estimate(plan, machine).layer_s for plan in plans)
    assert found < 0.8 * waves


def test_the_estimate_knows_that_pieces_of_queries_have_blocks_of_keys_of_their_own() -> None:
    # FlashAttention-3's backward. Other kernels have none.
    model = Model(64, 8, 128, hidden_size=8192, num_layers=1)
    hopper = load_cluster("h100").build(num_ranks=64)
    assert GroupCosts(AnalyticCost(hopper, model), hopper, model, 8).piece_s == 0.0
    own = replace(hopper, attention_kernel="flash_attn_3")
    cost, law = AnalyticCost(own, model), law_of("flash_attn_3")
    assert law.key_blocks is not None
    pair_s = law.backward_factor * cost.attention_s(1.0)
    sums_s = 8 * 128 * law.key_blocks.key_bytes[0] / own.memory_bytes_per_s
    expected_s = law.key_blocks.block_tiles * TILE_TOKENS * pair_s + sums_s
    assert GroupCosts(cost, own, model, 8).piece_s == pytest.approx(expected_s, rel=0.01)
    found = Search(MIXED, StepContext(own, model, cost, options=ZeppelinOptions()), 10**6).placed(replays=False)
    assert found is not None
    simulated = simulate_step([found.plan], Machine(own, model, cost))
    layer_s = simulated.step_s - sum(simulated.phases_s[name] for name in ("head", "gradient_sync", "optimizer"))
    # As parts of whole sequences' backwards, 2.0 % too long.
    assert found.chosen.price.seconds == pytest.approx(layer_s, rel=0.012)


def test_a_lead_hides_the_exchange_of_heads_and_slow_hosts_make_fewer_waves() -> None:
    # A lead hides the exchange of heads.
    # As much as its attention takes: without one the step is 2 % longer.
    plan, own = plan_in_waves(MIXED), cluster()
    zone = zone_of(plan)
    assert zone.lead > 0
    without = replace(plan, zones=(replace(zone, lead=0),))
    assert 1.01 * step_s(plan, own) < step_s(without, own)
    ahead = schedule(zone).tokens[0]
    assert np.ptp(ahead, axis=1).max() <= 1, "every rank of a group holds as much of the lead"
    # Hosts that are the limit make fewer waves.
    # Every wave takes a host two group calls and ten launches, forward and backward.
    own = cluster()
    slow = replace(own, host_call_s=350e-6, host_launch_s=300e-6)
    machine = Machine(slow, ONE_LAYER, AnalyticCost(slow, ONE_LAYER), host=AnalyticCost(slow, ONE_LAYER).host)
    with_hosts, without = plan_in_waves(MIXED, slow), plan_in_waves(MIXED, own)
    assert zone_of(with_hosts).waves < zone_of(without).waves
    at = {plan: simulate_step([plan], machine).step_s for plan in (with_hosts, without)}
    assert 1.05 * at[with_hosts] < at[without]
    usual = replace(own, host_call_s=35e-6, host_launch_s=30e-6)  # ahead of their devices
    assert plan_in_waves(MIXED, usual) == without


@pytest.mark.parametrize("lengths", [MIXED[:4], MIXED])
def test_a_model_that_attends_fully_is_planned_in_waves_too(lengths: tuple[int, ...]) -> None:
    own, model = cluster(16), replace(ONE_LAYER, attention="full")
    machine = Machine(own, model, AnalyticCost(own, model))
    ways: tuple[dict[str, Any], ...] = ({}, {"rule": "groups"}, {"rule": "groups", "group_size": 1})
    waves, groups, rings = (make_planner("zeppelin", own, model, **options)(lengths) for options in ways)
    assert zone_of(waves).lead == 0
    assert waves.mask == FULL
    seconds = [simulate_step([plan], machine).step_s for plan in (waves, groups, rings)]
    assert seconds[0] < 1.01 * seconds[1]
    assert seconds[1] < seconds[2]


@pytest.mark.parametrize("name", ["h200", "a800"])
def test_the_price_of_waves_under_a_full_mask_is_near_the_simulator(name: str) -> None:
    own = load_cluster(name).build(num_ranks=64, ranks_per_node=8)
    model = replace(ONE_LAYER, attention="full")
    machine = Machine(own, model, AnalyticCost(own, model))
    context = StepContext(own, model, machine.cost, options=ZeppelinOptions())
    found = Search(MIXED, context, 10**6).placed(replays=False)
    assert found is not None
    step = simulate_step([found.plan], machine)
    layer_s = step.step_s - sum(step.phases_s[name] for name in ("head", "gradient_sync", "optimizer"))
    assert found.chosen.price.seconds == pytest.approx(layer_s, rel=0.03)


def test_under_a_window_every_rank_has_one_run_of_tokens() -> None:
    # As many as the others; so that of a sequence only the keys before a run lie on another rank.
    lengths, own, model = MIXED, cluster(), replace(ONE_LAYER, attention="window_1024")
    plan = make_planner("zeppelin", own, model)(lengths)
    held = fragments(plan)
    assert np.ptp(tokens_per_rank(plan)) <= 1
    assert len(held) <= own.num_ranks + len(lengths)
    machine = Machine(own, model, AnalyticCost(own, model))
    paper = make_planner("zeppelin", own, model, rule="paper")(lengths)
    assert simulate_step([plan], machine).step_s < simulate_step([paper], machine).step_s
    # A window that hides nothing is planned as a causal mask.
    lengths = MIXED[4:]
    plans = [
        make_planner("zeppelin", cluster(16), replace(ONE_LAYER, attention=mask))(lengths)
        for mask in ("window_65536", "causal")
    ]
    assert plans[0] == plans[1]


@pytest.mark.parametrize(
    ("name", "ranks", "tokens", "kernel"),
    [
        ("llama-3b", 64, 4096, "flash_attn_3"),
        ("nemotron-h-8b", 512, 8192, "flash_attn_3"),
        ("nemotron-h-8b", 32, 8192, "te_fused"),
    ],
)
def test_waves_are_never_behind_rings_of_groups_where_pieces_cost_more_than_attention(
    name: str, ranks: int, tokens: int, kernel: str
) -> None:
    # By closed forms alone waves came out ahead here, and took 1.04 and 1.05 times as long: backwards
    # pay for pieces of queries, and recurrent layers for pieces of documents.
    cluster, model = load_cluster("h100").build(num_ranks=ranks).with_kernel(kernel), load_model(name)
    cost, lengths = AnalyticCost(cluster, model), tuple(draw("arxiv", tokens * ranks, 1, 0))
    machine = Machine(cluster, model, cost)
    context = StepContext(cluster, model, cost)
    waves, rings = (
        estimate(choose_planner("zeppelin", options).plan_step(lengths, context)[0].plans[0], machine).layer_s
        for options in ({}, {"rule": "groups"})
    )
    assert waves <= rings * (1 + 1e-9)


def test_waves_of_a_hybrid_model_cut_less_than_attention_alone_would_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    own, model = cluster(), replace(load_model("qwen3.5-35b-a3b"), expert_split=32)
    machine = Machine(own, model, AnalyticCost(own, model))
    drawn = np.random.default_rng(1).lognormal(8.5, 1.3, 90).astype(int) + 64
    lengths = tuple(np.minimum(drawn, 131_072).tolist())
    plan = make_planner("zeppelin", own, model)(lengths)
    monkeypatch.setattr("megatron_balance.planners.zeppelin.price.piece_s", lambda *_: 0.0)
    unaware = make_planner("zeppelin", own, model)(lengths)
    assert len(Pieces.of(plan).held) < len(Pieces.of(unaware).held)
    assert estimate(plan, machine).layer_s < 0.97 * estimate(unaware, machine).layer_s
    assert piece_s(MODEL, own, machine.cost) == 0.0


def test_many_groups_that_begin_far_above_what_is_to_be_beaten_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    inner = Search._tried

    def counted(search: Search, work: Any, costs: Any, starts: Any) -> Iterator[Any]:
        for placed in inner(search, work, costs, starts):
            tried.append(costs.num_groups)
            yield placed

    monkeypatch.setattr(Search, "_tried", counted)
    make = make_planner("zeppelin", Cluster(64, 8), Model(32, 8, 128), slack=1.25)
    rng = random.Random(20261120)
    lengths = [max(1, int(rng.lognormvariate(6.1, 1.3))) for _ in range(512)]
    plan = make(lengths)
    assert tried.count(64) == 1
    monkeypatch.setattr(zeppelin, "_HOPELESS", inf)
    assert make(lengths) == plan
    assert tried.count(64) > 2
