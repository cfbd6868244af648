"""hybrid_dp: short sequences alone, long ones in rings, FLOPs within the tolerance, memory by
microbatches.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_balance import Batch, Cluster, Model, make_planner, verify
from megatron_balance.analysis.statistics import plan_statistics
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.errors import ConfigError, InfeasibleError
from megatron_balance.ir.plan import MicrobatchPlan, Zone
from megatron_balance.planners.baselines import HybridDpOptions, hybrid_dp_batch

MODEL = Model(8, 2, 16, hidden_size=128, ffn_size=256)


def plan_of(lengths: list[int], cluster: Cluster, **options: Any) -> MicrobatchPlan:
    return make_planner("hybrid_dp", cluster, MODEL, **options)(lengths)


def rings(plan: MicrobatchPlan) -> list[tuple[tuple[int, ...], list[int]]]:
    assert all(isinstance(zone, Zone) and zone.pattern == "ring" for zone in plan.zones)
    return [(zone.ranks, [plan.lengths[seq] for seq in zone.seqs]) for zone in plan.zones if isinstance(zone, Zone)]


def flops(plan: MicrobatchPlan) -> list[float]:
    report = plan_statistics(plan, MODEL)
    return [
        pairs * MODEL.attention_flops_per_pair + tokens * MODEL.linear_flops_per_token
        for pairs, tokens in zip(report["attention_pairs_per_rank"], report["tokens_per_rank"], strict=True)
    ]


def test_short_sequences_stay_on_one_rank_and_a_long_one_takes_a_ring_inside_its_node() -> None:
    # The long one has about half of all FLOPs, so half of the ranks take it; the others take the
    # short ones.
    plan = plan_of([8000, *[4000] * 4], Cluster(8, 4), slack=2.5)
    assert rings(plan) == [((0, 1, 2, 3), [8000]), *(((rank,), [4000]) for rank in range(4, 8))]


def test_the_fewest_ranks_are_taken_that_memory_and_flops_allow() -> None:
    # 16 is four times a rank's capacity of 4; linear work outweighs these few pairs, so FLOPs ask
    # for no more.
    assert rings(plan_of([16, 4, 4, 4, 4], Cluster(8, 8), tokens_per_rank=4)) == [
        ((0, 1, 2, 3), [16]),
        *(((rank,), [4]) for rank in range(4, 8)),
    ]


def test_flops_are_within_the_tolerance_of_the_mean() -> None:
    lengths = [24957, 8593, 25756, 17251, 59657, 28869, 6177, 26620, 5610, 592, 9331, 15506]
    for tolerance in (0.02, 0.05, 0.2):
        work = flops(plan_of(lengths, Cluster(64, 8), slack=2.0, tolerance=tolerance))
        assert max(work) <= (1 + tolerance) * sum(work) / 64 * 1.001  # chunks of a ring are near equal


def test_more_tolerance_moves_less() -> None:
    lengths = [24957, 8593, 25756, 17251, 59657, 28869, 6177, 26620, 5610, 592, 9331, 15506]
    strict, lax = (plan_of(lengths, Cluster(64, 8), slack=2.0, tolerance=t) for t in (0.02, 0.5))
    assert sum(plan_statistics(lax, MODEL)["kv_tokens_received_per_rank"]) < sum(
        plan_statistics(strict, MODEL)["kv_tokens_received_per_rank"]
    )


def test_without_slack_all_sequences_go_over_all_ranks() -> None:
    assert rings(plan_of([23, 19, 14, 8], Cluster(8, 4), tokens_per_rank=8)) == [(tuple(range(8)), [23, 19, 14, 8])]


@given(
    lengths=st.lists(st.integers(1, 500), min_size=1, max_size=12),
    cluster=st.sampled_from([Cluster(1, 1), Cluster(6, 3), Cluster(8, 4), Cluster(5, 5)]),
    slack=st.sampled_from([1.0, 1.1, 1.5, 3.0]),
)
def test_ranks_keep_within_their_capacity_unless_only_all_of_them_hold_the_batch(
    lengths: list[int], cluster: Cluster, slack: float
) -> None:
    capacity = int(slack * -(-sum(lengths) // cluster.num_ranks))
    plan = plan_of(lengths, cluster, tokens_per_rank=capacity)
    everywhere = [ranks for ranks, _ in rings(plan)] == [tuple(range(cluster.num_ranks))]
    assert max(plan_statistics(plan, MODEL)["tokens_per_rank"]) <= capacity + (2 * len(lengths) if everywhere else 0)


@given(
    lengths=st.lists(st.integers(1, 400), max_size=14),
    cluster=st.sampled_from([Cluster(4, 2), Cluster(6, 3), Cluster(8, 4)]),
)
def test_microbatches_hold_every_sequence_once_within_the_capacity(lengths: list[int], cluster: Cluster) -> None:
    options = HybridDpOptions(tokens_per_rank=100)
    made = hybrid_dp_batch(Batch(tuple(lengths)), cluster, MODEL, AnalyticCost(cluster, MODEL), options)
    assert sorted(seq for (seqs,) in made.members for seq in seqs) == list(range(len(lengths)))
    for plan, (seqs,) in zip(made.plans, made.members, strict=True):
        assert plan.lengths == tuple(lengths[seq] for seq in seqs)
        assert max(plan_statistics(plan, MODEL)["tokens_per_rank"]) <= 100


def test_microbatches_even_out_flops_over_their_sum() -> None:
    # More short sequences than memory holds: those ranks run more microbatches while the ring's
    # ranks have done their part.
    cluster, lengths = Cluster(8, 4), (32000, *[1000] * 256)
    made = hybrid_dp_batch(
        Batch(lengths), cluster, MODEL, AnalyticCost(cluster, MODEL), HybridDpOptions(tokens_per_rank=8000)
    )
    assert len(made.plans) > 1
    verify(made.plans[0])
    work = [sum(rank) for rank in zip(*(flops(plan) for plan in made.plans), strict=True)]
    assert max(work) <= 1.05 * sum(work) / 8 * 1.001
    assert len({zone.ranks for zone in made.plans[-1].zones if isinstance(zone, Zone)}) < 8


def test_a_sequence_longer_than_the_pool_is_named() -> None:
    cluster = Cluster(8, 4)
    with pytest.raises(
        InfeasibleError, match="sequence 1 has 801 tokens and needs 9 ranks of 100 tokens; 8 are available"
    ):
        hybrid_dp_batch(
            Batch((5, 801)), cluster, MODEL, AnalyticCost(cluster, MODEL), HybridDpOptions(tokens_per_rank=100)
        )


@pytest.mark.parametrize(("option", "value"), [("slack", 0.9), ("tolerance", -0.1)])
def test_options_out_of_range_are_errors(option: str, value: float) -> None:
    with pytest.raises(ConfigError, match=option):
        plan_of([4], Cluster(8, 4), **{option: value})
