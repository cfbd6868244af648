"""Zeppelin's partitioner: the printed rule on hand-worked batches, rings of groups on what they
promise, and the edges of all rules.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from megatron_balance import Cluster, MicrobatchPlan, Model, make_planner
from megatron_balance.analysis.estimate import estimate
from megatron_balance.analysis.machine import Machine
from megatron_balance.analysis.statistics import plan_statistics
from megatron_balance.config import load_cluster
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.errors import ConfigError
from megatron_balance.ir.plan import Zone
from megatron_balance.planners import zeppelin
from megatron_balance.planners.zeppelin.price import GroupCosts, rings_s
from megatron_balance.planners.zeppelin.shares import aligned

MODEL = Model(32, 32, 128)


def plan_of(lengths: list[int], cluster: Cluster, **options: Any) -> MicrobatchPlan:
    """Rings of single ranks, unless another rule is named."""
    return make_planner("zeppelin", cluster, MODEL, **{"rule": "groups", "group_size": 1, **options})(lengths)


def zones_of(plan: MicrobatchPlan) -> list[tuple[str, tuple[int, ...], list[int]]]:
    return [(z.name, z.ranks, [plan.lengths[s] for s in z.seqs]) for z in plan.zones if isinstance(z, Zone)]


def fast(num_ranks: int) -> Cluster:
    """Nodes of 8 ranks with links that hide behind attention, so that what is seen is balance
    alone.
    """
    return Cluster(num_ranks, 8, intra_bytes_per_s=4e14, nic_bytes_per_s=5e13)


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


# Rule: groups


def test_short_sequences_stay_local_where_attention_is_even() -> None:
    plan = plan_of([500] * 16, Cluster(8, 4))
    assert {name for name, _, _ in zones_of(plan)} == {"local"}
    assert plan_statistics(plan, MODEL)["imbalance"] == {"tokens": 1.0, "attention": 1.0}


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


def test_sequences_are_on_the_fewest_neighbours_that_stay_below_the_target() -> None:
    """Of four groups with 19.25 seconds each in the mean."""
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
    """Long-tailed lengths of 64 tokens a rank of 16 ranks, to the token, and more than one sequence
    of a length.
    """
    rng = random.Random(seed)
    weights = [rng.lognormvariate(0, 1.2) for _ in range(num_seqs)]
    lengths = [max(1, int(1024 * weight / sum(weights))) for weight in weights]
    return [lengths[0] + 1024 - sum(lengths), *lengths[1:]]


# Rule: paper, thresholds


@pytest.mark.parametrize("seed", range(20))
def test_thresholds_that_are_passed_over_would_not_have_fit(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Whether nothing is known of what found no room before; without slack, hardly any threshold
    works out.
    """
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


def test_equal_sequences_that_fill_the_ranks_exactly_stay_local_without_slack() -> None:
    plan = plan_of([8] * 8, Cluster(8, 4), tokens_per_rank=8)
    assert {name for name, _, _ in zones_of(plan)} == {"local"}


@pytest.mark.parametrize(
    ("option", "value"), [("slack", 0.9), ("group_size", 3), ("num_waves", 0), ("rule", "printed")]
)
def test_options_out_of_range_are_errors(option: str, value: object) -> None:
    with pytest.raises(ConfigError, match=option):
        plan_of([4], Cluster(8, 4), **{option: value})
