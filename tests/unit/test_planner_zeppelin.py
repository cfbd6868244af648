"""Zeppelin's partitioner: the printed rule on hand-worked batches, the costed rule on what it promises, and the edges of both."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_balance import Cluster, MicrobatchPlan, Model, make_planner, verify
from megatron_balance.core.plan import Zone
from megatron_balance.errors import ConfigError, InfeasibleError
from megatron_balance.schedules.figures import figures

MODEL = Model(32, 32, 128)
RULES = ("cost", "paper")


def plan_of(lengths: list[int], cluster: Cluster, **options: Any) -> MicrobatchPlan:
    return make_planner("zeppelin", cluster, MODEL, **options)(lengths)


def zones_of(plan: MicrobatchPlan) -> list[tuple[str, tuple[int, ...], list[int]]]:
    return [(z.name, z.ranks, [plan.lengths[s] for s in z.seqs]) for z in plan.zones if isinstance(z, Zone)]


# Rule: paper, by hand


def test_paper_rule_puts_a_sequence_longer_than_a_node_on_all_nodes_it_asks_for() -> None:
    # Node capacity 2 x 10; s_avg = 40 / 3, so ceil(30 / s_avg) = 3 nodes of 10 tokens; 10 is the threshold s0: split on one node.
    plan = plan_of([30, 10], Cluster(6, 2), rule="paper", tokens_per_rank=10)
    assert zones_of(plan) == [("inter_node", (0, 1, 2, 3, 4, 5), [30]), ("intra_node", (0, 1), [10])]


def test_paper_rule_gives_the_least_loaded_node_the_next_sequence_and_the_least_loaded_rank() -> None:
    # No sequence reaches a node's 24 tokens. 11 -> node 0, 9 -> node 1, 8 -> node 1 (9 < 11), 5 -> node 0; then each to the emptier rank.
    plan = plan_of([11, 9, 8, 5], Cluster(4, 2), rule="paper", tokens_per_rank=12)
    assert zones_of(plan) == [("local", (0,), [11]), ("local", (1,), [5]), ("local", (2,), [9]), ("local", (3,), [8])]


def test_paper_rule_lowers_the_node_threshold_until_the_rest_fits() -> None:
    # 9 + 8 fill node 0 and 1 of 10 tokens; 3 fits nowhere: s1 falls to 9, and 9 goes over ceil(9 / 10) = 1 empty node as a split sequence;
    # 3 still fits nowhere (9, 8): s1 falls to 8, then to 3: all are above the threshold, and 3 only fits over both nodes.
    plan = plan_of([9, 8, 3], Cluster(4, 2), rule="paper", tokens_per_rank=5)
    assert {name for name, _, _ in zones_of(plan)} == {"inter_node"}
    assert zones_of(plan) == [("inter_node", (0, 1, 2, 3), [9, 8, 3])]


def test_paper_rule_lowers_the_rank_threshold_until_the_local_ones_fit() -> None:
    # One node, ranks of 10. 7, 6, 5: 5 fits on neither rank, so s0 falls to 7. 7 alone has the budget c_avg = 49 / 2: 2 fragments of 4.
    # Then 6 -> rank 0 (10), 5 -> rank 1 (9).
    plan = plan_of([7, 6, 5], Cluster(2, 2), rule="paper", tokens_per_rank=10)
    assert zones_of(plan) == [("intra_node", (0, 1), [7]), ("local", (0,), [6]), ("local", (1,), [5])]


def test_paper_rule_deals_fragments_round_robin_by_squared_length() -> None:
    # s0 = 12: 40 and 20 are split. c_avg = (1600 + 400) / 4 = 500: ceil(3.2) = 4 and ceil(0.8) = 1 fragments, but 20 whole passes the
    # capacity of its rank (10 + 20 > 16), so it is split over all four.
    plan = plan_of([40, 20], Cluster(4, 4), rule="paper", tokens_per_rank=16)
    assert zones_of(plan) == [("intra_node", (0, 1, 2, 3), [40, 20])]


def test_paper_rule_without_slack_sends_everything_across_nodes() -> None:
    plan = plan_of([23, 19, 14, 8], Cluster(8, 4), rule="paper", tokens_per_rank=8)
    assert zones_of(plan) == [("inter_node", tuple(range(8)), [23, 19, 14, 8])]


def test_paper_rule_balances_tokens_only() -> None:
    # The trouble that the costed rule is for: with room enough, a long sequence stays on a node however much it computes there.
    lengths = [60000, *[2000] * 40]
    cluster = Cluster(16, 8)
    paper = figures(plan_of(lengths, cluster, rule="paper", tokens_per_rank=17500), MODEL)["imbalance"]["attention"]
    cost = figures(plan_of(lengths, cluster, rule="cost", tokens_per_rank=17500), MODEL)["imbalance"]["attention"]
    assert paper > 1.7
    assert cost < 1.1


# Rule: cost


def test_short_sequences_stay_local_where_attention_is_even() -> None:
    plan = plan_of([500] * 16, Cluster(8, 4))
    assert {name for name, _, _ in zones_of(plan)} == {"local"}
    assert figures(plan, MODEL)["imbalance"] == {"tokens": 1.0, "attention": 1.0}


def test_a_slow_network_keeps_sequences_inside_nodes() -> None:
    lengths = [60000, 58000, 9000, 8000]
    fast = plan_of(lengths, Cluster(16, 8, nic_bytes_per_s=400e9), slack=2.0)
    slow = plan_of(lengths, Cluster(16, 8, nic_bytes_per_s=1e9), slack=2.0)
    assert sum(figures(slow, MODEL)["kv_tokens_received_inter_node_per_rank"]) == 0
    assert figures(fast, MODEL)["imbalance"]["attention"] < figures(slow, MODEL)["imbalance"]["attention"]


def test_sequences_on_the_same_ranks_share_one_zone() -> None:
    plan = plan_of([1000] * 3, Cluster(2, 2), tokens_per_rank=1500)
    assert len({ranks for _, ranks, _ in zones_of(plan)}) == len(plan.zones)


def test_zones_are_issued_inter_node_then_intra_node_then_local() -> None:
    order = ["inter_node", "intra_node", "local"]
    names = [name for name, _, _ in zones_of(plan_of([60000, 30000, 20000, 9000, 4000, 3000, 500, 400], Cluster(32, 8)))]
    assert names == sorted(names, key=order.index)
    assert set(names) == set(order)


def test_tokens_stay_within_the_capacity() -> None:
    lengths = [24000, 19000, 14000, 8400, 300, 200, 100]
    for capacity in (4300, 5000, 8000):
        assert max(figures(plan_of(lengths, Cluster(16, 8), tokens_per_rank=capacity), MODEL)["tokens_per_rank"]) <= capacity


def test_without_weight_on_tokens_attention_is_more_even_and_tokens_less() -> None:
    lengths = [40000, 12000, 9000, *[700] * 20]
    even, free = (figures(plan_of(lengths, Cluster(16, 8), slack=3.0, weight_tokens=w), MODEL)["imbalance"] for w in (1.0, 0.0))
    assert free["attention"] <= even["attention"]
    assert free["tokens"] > even["tokens"]


def test_a_higher_weight_on_communication_moves_less_and_is_less_even() -> None:
    lengths = [8870, 12248, 17868, 1450, 15757, 8660]
    light, heavy = (figures(plan_of(lengths, Cluster(16, 8), weight_communication=w), MODEL) for w in (0.0, 0.3))
    assert sum(heavy["kv_tokens_received_per_rank"]) < sum(light["kv_tokens_received_per_rank"])
    assert heavy["imbalance"]["attention"] > light["imbalance"]["attention"]


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
@pytest.mark.parametrize("lengths", [[23, 19, 14, 8], [63, 1], [64], [1] * 64, [8] * 8, [17, 16, 16, 15], [50, 3, 3, 3, 3, 2]])
def test_a_capacity_equal_to_the_average_always_succeeds(rule: str, lengths: list[int]) -> None:
    plan = plan_of(lengths, Cluster(8, 4), rule=rule, tokens_per_rank=8)
    # Near-equal chunks of several sequences may pass the average by two tokens a sequence.
    assert max(figures(plan, MODEL)["tokens_per_rank"]) <= 8 + 2 * len(lengths)
    verify(plan)


def test_equal_sequences_that_fill_the_ranks_exactly_stay_local_without_slack() -> None:
    plan = plan_of([8] * 8, Cluster(8, 4), tokens_per_rank=8)
    assert {name for name, _, _ in zones_of(plan)} == {"local"}


@pytest.mark.parametrize("rule", RULES)
def test_a_sequence_longer_than_the_pool_is_named(rule: str) -> None:
    with pytest.raises(InfeasibleError, match="sequence 2 has 100 tokens and needs 13 ranks of 8 tokens; 8 are available"):
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
