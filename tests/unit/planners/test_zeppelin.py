"""Zeppelin's partitioner: the printed rule on hand-worked batches, the costed rule on what it
promises, and the edges of both.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from megatron_balance import Cluster, MicrobatchPlan, Model, make_planner, verify
from megatron_balance.analysis.statistics import plan_statistics
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.cost.remap import remap_s
from megatron_balance.errors import ConfigError, InfeasibleError
from megatron_balance.ir.layers import Layers
from megatron_balance.ir.plan import Zone
from megatron_balance.planners.zeppelin import ZeppelinOptions, costed, pricing, printed
from megatron_balance.planners.zeppelin.price import Prices, Pricing
from megatron_balance.solvers.packing import least_loaded
from megatron_balance.solvers.placed import Placement

MODEL = Model(32, 32, 128)
RULES = ("cost", "paper")


def plan_of(lengths: list[int], cluster: Cluster, **options: Any) -> MicrobatchPlan:
    """A plan of the rule `cost`, unless another is named."""
    return make_planner("zeppelin", cluster, MODEL, **{"rule": "cost", **options})(lengths)


def zones_of(plan: MicrobatchPlan) -> list[tuple[str, tuple[int, ...], list[int]]]:
    return [(z.name, z.ranks, [plan.lengths[s] for s in z.seqs]) for z in plan.zones if isinstance(z, Zone)]


def fast(num_ranks: int) -> Cluster:
    """Nodes of 8 ranks with links that hide behind attention, so that what is seen is balance
    alone.
    """
    return Cluster(num_ranks, 8, intra_bytes_per_s=4e14, nic_bytes_per_s=5e13)


def attention_of(plan: MicrobatchPlan) -> float:
    return plan_statistics(plan, MODEL)["imbalance"]["attention"]


def held_of(plan: MicrobatchPlan) -> list[int]:
    """Tokens of each rank in the attention layout."""
    return plan_statistics(plan, MODEL)["attention_tokens_per_rank"]


# Rule: paper, by hand


def test_paper_rule_puts_a_sequence_longer_than_a_node_on_all_nodes_it_asks_for() -> None:
    # Node capacity 2 x 10; s_avg = 40 / 3, so ceil(30 / s_avg) = 3 nodes of 10 tokens; 10 is the
    # threshold s0: split on one node.
    plan = plan_of([30, 10], Cluster(6, 2), rule="paper", tokens_per_rank=10)
    assert zones_of(plan) == [("inter_node", (0, 1, 2, 3, 4, 5), [30]), ("intra_node", (0, 1), [10])]


def test_paper_rule_gives_the_least_loaded_node_the_next_sequence_and_the_least_loaded_rank() -> None:
    # No sequence reaches a node's 24 tokens. 11 -> node 0, 9 -> node 1, 8 -> node 1 (9 < 11), 5 ->
    # node 0; then each to the emptier rank.
    plan = plan_of([11, 9, 8, 5], Cluster(4, 2), rule="paper", tokens_per_rank=12)
    assert zones_of(plan) == [("local", (0,), [11]), ("local", (1,), [5]), ("local", (2,), [9]), ("local", (3,), [8])]


def test_paper_rule_lowers_the_node_threshold_until_the_rest_fits() -> None:
    # 9 + 8 fill node 0 and 1 of 10 tokens; 3 fits nowhere: s1 falls to 9, and 9 goes over ceil(9 /
    # 10) = 1 empty node as a split sequence; 3 still fits nowhere (9, 8): s1 falls to 8, then to 3:
    # all are above the threshold, and 3 only fits over both nodes.
    plan = plan_of([9, 8, 3], Cluster(4, 2), rule="paper", tokens_per_rank=5)
    assert {name for name, _, _ in zones_of(plan)} == {"inter_node"}
    assert zones_of(plan) == [("inter_node", (0, 1, 2, 3), [9, 8, 3])]


def test_paper_rule_lowers_the_rank_threshold_until_the_local_ones_fit() -> None:
    # One node, ranks of 10. 7, 6, 5: 5 fits on neither rank, so s0 falls to 7. 7 alone has the
    # budget c_avg = 49 / 2: 2 fragments of 4. Then 6 -> rank 0 (10), 5 -> rank 1 (9).
    plan = plan_of([7, 6, 5], Cluster(2, 2), rule="paper", tokens_per_rank=10)
    assert zones_of(plan) == [("intra_node", (0, 1), [7]), ("local", (0,), [6]), ("local", (1,), [5])]


def test_paper_rule_deals_fragments_round_robin_by_squared_length() -> None:
    # s0 = 12: 40 and 20 are split. c_avg = (1600 + 400) / 4 = 500: ceil(3.2) = 4 and ceil(0.8) = 1
    # fragments, but 20 whole passes the capacity of its rank (10 + 20 > 16), so it is split over
    # all four.
    plan = plan_of([40, 20], Cluster(4, 4), rule="paper", tokens_per_rank=16)
    assert zones_of(plan) == [("intra_node", (0, 1, 2, 3), [40, 20])]


def test_paper_rule_without_slack_sends_everything_across_nodes() -> None:
    plan = plan_of([23, 19, 14, 8], Cluster(8, 4), rule="paper", tokens_per_rank=8)
    assert zones_of(plan) == [("inter_node", tuple(range(8)), [23, 19, 14, 8])]


def test_paper_rule_balances_tokens_only() -> None:
    # The trouble that the costed rule is for: with room enough, a long sequence stays on a node
    # however much it computes there.
    lengths = [60000, *[2000] * 40]
    cluster = fast(16)
    assert attention_of(plan_of(lengths, cluster, rule="paper", tokens_per_rank=17500)) > 1.7
    assert attention_of(plan_of(lengths, cluster, rule="cost", tokens_per_rank=17500)) < 1.1


# Rule: cost


def test_short_sequences_stay_local_where_attention_is_even() -> None:
    plan = plan_of([500] * 16, Cluster(8, 4))
    assert {name for name, _, _ in zones_of(plan)} == {"local"}
    assert plan_statistics(plan, MODEL)["imbalance"] == {"tokens": 1.0, "attention": 1.0}


def test_a_slow_network_keeps_sequences_inside_nodes() -> None:
    lengths = [60000, 58000, 9000, 8000]
    slow = plan_of(lengths, Cluster(16, 8, nic_bytes_per_s=1e9), slack=2.0)
    assert "inter_node" not in {name for name, _, _ in zones_of(slow)}
    assert attention_of(plan_of(lengths, fast(16), slack=2.0)) < attention_of(slow)


def test_sequences_on_the_same_ranks_share_one_zone() -> None:
    plan = plan_of([1000] * 3, Cluster(2, 2), tokens_per_rank=1500)
    assert len({ranks for _, ranks, _ in zones_of(plan)}) == len(plan.zones)


def test_zones_are_issued_inter_node_then_intra_node_then_local() -> None:
    order = ["inter_node", "intra_node", "local"]
    names = [
        name for name, _, _ in zones_of(plan_of([60000, 30000, 20000, 9000, 4000, 3000, 500, 400], Cluster(32, 8)))
    ]
    assert names == sorted(names, key=order.index)
    assert set(names) == set(order)


def test_tokens_stay_within_the_capacity() -> None:
    lengths = [24000, 19000, 14000, 8400, 300, 200, 100]
    for capacity in (4300, 5000, 8000):
        assert max(held_of(plan_of(lengths, Cluster(16, 8), tokens_per_rank=capacity))) <= capacity


def test_sequences_that_take_part_of_a_node_share_it() -> None:
    # Pairs as 13 : 12 : 7 of 32 ranks; on whole nodes the second would have one or two of them, and
    # max/mean be 1.5.
    plan = plan_of([36056, 34641, 26458], fast(32), slack=2.0)
    ranks = [set(ranks) for _, ranks, _ in zones_of(plan)]
    assert sum(map(len, ranks)) == len(set.union(*ranks))
    assert attention_of(plan) < 1.1


def test_with_a_remap_attention_is_even_where_tokens_are_not_and_without_it_the_other_way_round() -> None:
    lengths, cluster = [16000, 9000, 7000, *[1000] * 7], fast(8)
    remapped, plain = (plan_of(lengths, cluster, slack=3.0, layers=Layers(remap=on)) for on in (True, False))
    assert attention_of(remapped) < 1.05
    assert max(held_of(remapped)) > 1.5 * 39000 / 8
    assert plan_statistics(remapped, MODEL)["imbalance"]["tokens"] < 1.001
    assert attention_of(plain) > 1.2
    assert max(held_of(plain)) < 1.05 * 39000 / 8


def test_without_a_remap_attention_is_less_even_where_tokens_cost_more() -> None:
    lengths, cluster = [24000, 9000, *[2000] * 8], fast(8)
    held = [held_of(plan_of(lengths, cluster, slack=3.0, remapped=False, weight_tokens=w)) for w in (0.0, 1.0, 5.0)]
    assert [max(h) for h in held] == sorted((max(h) for h in held), reverse=True)
    assert max(held[0]) > max(held[-1])


def test_a_higher_weight_on_communication_moves_less_and_is_less_even() -> None:
    lengths = [15000, 11000, 18000, 18000, 13000, 16000, 1000, 6000]
    light, heavy = (plan_of(lengths, fast(16), weight_communication=w) for w in (0.0, 0.3))
    kv_tokens = [sum(plan_statistics(plan, MODEL)["kv_tokens_received_per_rank"]) for plan in (light, heavy)]
    assert kv_tokens[1] < kv_tokens[0]
    assert attention_of(heavy) > attention_of(light)


# The price, in closed form

CLUSTER = Cluster(
    16, 8, intra_bytes_per_s=400e9, nic_bytes_per_s=50e9, ranks_per_nic=2, intra_alpha_s=2e-6, inter_alpha_s=9e-6
)
COST = AnalyticCost(CLUSTER, MODEL)
KV_BYTES = 2 * 32 * 128 * 2  # of a token


def prices(lengths: list[int], cluster: Cluster = CLUSTER, **options: Any) -> Prices:
    return Prices(lengths, cluster, AnalyticCost(cluster, MODEL), pricing(ZeppelinOptions(**options)))


def test_a_ring_inside_a_node_takes_its_rounds_and_what_a_rank_receives() -> None:
    assert prices([]).hops_s(8000, 4, inter_node=False) == pytest.approx(3 * 2e-6 + 6000 * KV_BYTES / 400e9)
    assert prices([]).hops_s(8000, 1, inter_node=False) == 0


def test_a_ring_between_nodes_takes_one_nic_unless_it_is_routed() -> None:
    num_bytes = 32000 * 15 / 16 * KV_BYTES
    direct_s = 15 * 9e-6 + num_bytes / 50e9
    # Eq. 1 with 4 NICs a node: 3/4 to the send proxies, a quarter over each NIC, 3/4 from the
    # receive proxies, each with its alpha.
    routed_s = 15 * (2e-6 + 9e-6 + 2e-6) + num_bytes * (3 / 4 / 400e9 + 1 / 4 / 50e9 + 3 / 4 / 400e9)
    assert prices([], routed=False).hops_s(32000, 16, inter_node=True) == pytest.approx(direct_s)
    assert prices([], routed=True).hops_s(32000, 16, inter_node=True) == pytest.approx(routed_s)
    assert routed_s < direct_s / 2


def test_a_ring_is_priced_as_routed_only_where_that_is_faster() -> None:
    one_nic = Cluster(16, 8, ranks_per_nic=8)
    for cluster, tokens in ((one_nic, 32000), (CLUSTER, 16)):
        routed, direct = (prices([], cluster, routed=on).hops_s(tokens, 16, inter_node=True) for on in (True, False))
        assert routed == direct


def test_routed_rings_over_one_node_share_its_nics() -> None:
    num_bytes = 30000 * 11 / 12 * KV_BYTES
    alone, shared = (prices([]).hops_s(30000, 12, inter_node=True, rings=rings) for rings in (1, 2))
    assert shared - alone == pytest.approx(num_bytes / 4 / 50e9)


def test_of_two_rings_over_one_node_both_are_longer() -> None:
    cluster = Cluster(24, 8, ranks_per_nic=2)
    lengths = [60000, 60000]
    apart: Placement = [tuple(range(12)), (12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23)]
    one: Placement = [tuple(range(12)), (16, 17, 18, 19, 20, 21, 22, 23)]
    found = prices(lengths, cluster)
    sharing = found.predict(apart).hops_s - 2 * 12 * found.hops_s(60000, 12, inter_node=True)
    assert sharing == pytest.approx(2 * 12 * 60000 * 11 / 12 * KV_BYTES / 4 / 50e9)
    assert found.predict(one).hops_s == pytest.approx(
        12 * found.hops_s(60000, 12, inter_node=True) + 8 * found.hops_s(60000, 8, inter_node=False)
    )


@pytest.mark.parametrize("nic_bytes_per_s", [1e9, 1e15])
def test_a_zone_takes_the_longer_of_attention_and_transfers_with_the_last_round(nic_bytes_per_s: float) -> None:
    cluster = Cluster(16, 8, nic_bytes_per_s=nic_bytes_per_s, intra_bytes_per_s=1e15, intra_alpha_s=0, inter_alpha_s=0)
    found = prices([64000], cluster)
    attention_s = found.attention_s(64000, 16) + found.cost.launch_s(16)
    hops_s = found.hops_s(64000, 16, inter_node=True)
    expected = hops_s + attention_s / 16 if nic_bytes_per_s == 1e9 else attention_s
    assert (hops_s > attention_s) == (nic_bytes_per_s == 1e9)
    assert found.predict([tuple(range(16))]).attention_s == pytest.approx(expected)


def test_a_rank_takes_the_sum_of_its_zones() -> None:
    found = prices([6000, 3000, 500, 400])
    local_s = COST.attention_s(500 * 501 / 2, 500) + COST.attention_s(400 * 401 / 2, 400) + COST.launch_s(1)
    rings_s = found.share(6000, 4)[0] + found.share(3000, 2)[0]
    assert found.predict([(0, 1, 2, 3), (0, 1), (0,), (0,)]).attention_s == pytest.approx(rings_s + local_s)


def test_a_remap_takes_the_fullest_or_emptiest_ranks_link_and_the_nics_of_such_a_node() -> None:
    token_bytes = 2 * KV_BYTES  # query, key, value and output, all of one size here
    found = prices([])
    assert remap_s([1000.0] * 16, found.cluster, found.cost) == 0
    inside = [1600.0, 700, 700, *[1000.0] * 13]
    assert remap_s(inside, found.cluster, found.cost) == pytest.approx(2 * 2e-6 + 600 * token_bytes / 400e9)
    across = [*[1100.0] * 8, *[900.0] * 8]
    over_nics = 2 * 9e-6 + 800 * token_bytes / 4 / 50e9
    assert remap_s(across, found.cluster, found.cost) == pytest.approx(2 * 2e-6 + 100 * token_bytes / 400e9 + over_nics)


def test_the_price_counts_the_remap_or_the_longest_linear_time() -> None:
    lengths, placement = [3000, 1000], [(0,), (1,)]
    cluster = Cluster(2, 2)
    remapped, plain = (prices(lengths, cluster, remapped=on, weight_communication=0.0) for on in (True, False))
    attention_s = plain.predict(placement).attention_s
    assert remapped.price_s(placement) == pytest.approx(
        attention_s + remap_s([3000, 1000], remapped.cluster, remapped.cost)
    )
    assert plain.price_s(placement) == pytest.approx(attention_s + AnalyticCost(cluster, MODEL).linear_s(3000))
    assert remapped.predict(placement).moved_tokens == 1000


def test_a_remap_takes_the_weight_off_tokens_unless_one_is_given() -> None:
    assert [pricing(ZeppelinOptions(remapped=on)).weight_tokens for on in (True, False)] == [0.0, 1.0]
    assert pricing(ZeppelinOptions(remapped=True, weight_tokens=0.5)) == Pricing(0.5, 0.05, routed=True, remapped=True)


def test_where_moving_costs_more_than_even_tokens_save_the_placement_without_a_remap_is_taken() -> None:
    lengths = [27000, 19000, 6000, 7000, 6000, 7000, 6000, 22000, 22000, 3000]
    slow = Cluster(16, 8, intra_bytes_per_s=4e9, nic_bytes_per_s=4e9)
    either, without = (plan_of(lengths, slow, slack=3.0, remapped=remapped) for remapped in (True, False))
    assert either.zones == without.zones
    assert not either.moves


def test_over_slow_links_fewer_tokens_are_remapped_and_attention_is_less_even() -> None:
    lengths = [27000, 19000, 6000, 7000, 6000, 7000, 6000, 22000, 22000, 3000]
    quick, slow = (plan_of(lengths, Cluster(16, 8, intra_bytes_per_s=rate), slack=3.0) for rate in (4e12, 4e10))
    assert sum(row[2] for row in slow.moves) < sum(row[2] for row in quick.moves) / 2
    assert attention_of(slow) > attention_of(quick)


def drawn(seed: int, num_seqs: int = 60) -> list[int]:
    """Long-tailed lengths of 64 tokens a rank of 16 ranks, to the token, and more than one sequence
    of a length.
    """
    rng = random.Random(seed)
    weights = [rng.lognormvariate(0, 1.2) for _ in range(num_seqs)]
    lengths = [max(1, int(1024 * weight / sum(weights))) for weight in weights]
    return [lengths[0] + 1024 - sum(lengths), *lengths[1:]]


@pytest.mark.parametrize("seed", range(5))
def test_a_batch_judged_twice_is_placed_as_if_each_were_the_first_time(seed: int) -> None:
    lengths = [1000 * length for length in drawn(seed)]
    weights = [pricing(ZeppelinOptions(remapped=on)) for on in (True, False)]
    shared = costed.CostedSearch(prices(lengths))
    for own in weights:
        found = costed.place(shared, 80_000, own)
        alone = costed.place(costed.CostedSearch(Prices(lengths, CLUSTER, COST, own)), 80_000, own)
        assert found.placement == alone.placement
        assert found.prediction == prices(lengths).predict(found.placement)


# Rule: paper, thresholds


@pytest.mark.parametrize("seed", range(20))
def test_thresholds_that_are_passed_over_would_not_have_fit(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Whether nothing is known of what found no room before; without slack, hardly any threshold
    works out.
    """
    lengths, cluster, zone = drawn(seed), Cluster(16, 4), printed._InterNodeZone  # pyright: ignore[reportPrivateUsage]
    slack = 64 + seed // 5
    found, tries = printed.place(lengths, cluster, slack), list[int]()
    put, fill = zone.put, printed.least_loaded
    monkeypatch.setattr(zone, "put", lambda self, seq: put(self, seq) and False)
    monkeypatch.setattr(
        printed, "least_loaded", lambda sizes, *limits: tries.append(len(sizes)) or fill(sizes, *limits)
    )
    assert printed.place(lengths, cluster, slack) == found
    assert len(tries) > 4


def test_items_go_to_the_least_loaded_bin_until_one_does_not_fit() -> None:
    assert least_loaded([5, 4, 3, 3, 9, 1], [0, 2, 0], 9) == [0, 2, 1, 2]


# The edges of both


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("lengths", "cluster"),
    [
        ([], Cluster(4, 2)),
        ([1], Cluster(4, 2)),
        ([1] * 3, Cluster(4, 2)),
        ([7], Cluster(1, 1)),
        ([5, 9, 2], Cluster(1, 1)),
        ([100, 3], Cluster(4, 4)),
        ([100, 3], Cluster(4, 1)),
        ([1] * 64 + [50], Cluster(8, 4)),
        ([3, 5], Cluster(4, 8)),
    ],
)
def test_unusual_batches_and_clusters_are_legal(rule: str, lengths: list[int], cluster: Cluster) -> None:
    plan = plan_of(lengths, cluster, rule=rule)
    verify(plan, "replay")
    assert sorted(seq for zone in plan.zones for seq in zone.seqs) == list(range(len(lengths)))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "lengths", [[23, 19, 14, 8], [63, 1], [64], [1] * 64, [8] * 8, [17, 16, 16, 15], [50, 3, 3, 3, 3, 2]]
)
def test_a_capacity_equal_to_the_average_always_succeeds(rule: str, lengths: list[int]) -> None:
    plan = plan_of(lengths, Cluster(8, 4), rule=rule, tokens_per_rank=8)
    # Near-equal chunks of several sequences may pass the average by two tokens a sequence.
    assert max(held_of(plan)) <= 8 + 2 * len(lengths)
    verify(plan)


def test_equal_sequences_that_fill_the_ranks_exactly_stay_local_without_slack() -> None:
    plan = plan_of([8] * 8, Cluster(8, 4), tokens_per_rank=8)
    assert {name for name, _, _ in zones_of(plan)} == {"local"}


@pytest.mark.parametrize("rule", RULES)
def test_a_sequence_longer_than_the_pool_is_named(rule: str) -> None:
    with pytest.raises(
        InfeasibleError, match="sequence 2 has 100 tokens and needs 13 ranks of 8 tokens; 8 are available"
    ):
        plan_of([4, 4, 100], Cluster(8, 4), rule=rule, tokens_per_rank=8)


@pytest.mark.parametrize("rule", RULES)
def test_a_batch_larger_than_the_pool_is_infeasible(rule: str) -> None:
    with pytest.raises(InfeasibleError, match="the batch has 65 tokens; 8 ranks x 8 tokens hold 64"):
        plan_of([40, 25], Cluster(8, 4), rule=rule, tokens_per_rank=8)


@pytest.mark.parametrize(
    ("option", "value"), [("slack", 0.9), ("weight_tokens", -1.0), ("weight_communication", -0.1), ("rule", "printed")]
)
def test_options_out_of_range_are_errors(option: str, value: object) -> None:
    with pytest.raises(ConfigError, match=option):
        plan_of([4], Cluster(8, 4), **{option: value})
