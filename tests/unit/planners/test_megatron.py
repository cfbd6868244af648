"""Megatron's own ways: packed samples over replicas, dynamic and hybrid context parallelism."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_balance import Batch, Cluster, Model, make_planner, verify
from megatron_balance.analysis.statistics import plan_statistics
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.errors import ConfigError, InfeasibleError
from megatron_balance.ir.plan import MicrobatchPlan, Zone
from megatron_balance.ir.step import EMPTY, StepPlan
from megatron_balance.planners import baselines
from megatron_balance.planners.base import StepContext
from megatron_balance.planners.baselines import HybridDpOptions
from megatron_balance.planners.megatron import RULES, MegatronDynamicOptions, Microbatch, plan_batch, plan_with
from megatron_balance.planning.choice import choose_planner
from megatron_balance.solvers.groups import context_sizes
from megatron_balance.solvers.packing import first_fit_decreasing, first_fit_evenly

MODEL = Model(8, 2, 16)
CLUSTER = Cluster(8, 4)
CONTEXT = StepContext(CLUSTER, MODEL, AnalyticCost(CLUSTER, MODEL))


def planned(lengths: tuple[tuple[int, ...], ...], context: StepContext = CONTEXT, **options: Any) -> StepPlan:
    step, after = choose_planner("megatron", options).plan_step(lengths, context)
    assert after == EMPTY
    return step


def rings(step: StepPlan) -> list[list[tuple[tuple[int, ...], int]]]:
    # By microbatch, ranks of each zone and tokens in it.
    return [
        [(zone.ranks, sum(plan.lengths[seq] for seq in zone.seqs)) for zone in plan.zones if isinstance(zone, Zone)]
        for plan in step.plans
    ]


def test_full_samples_go_to_replicas_of_the_fewest_ranks_in_turn() -> None:
    # 90 + 10, 60 + 40 and 50 + 50 fill three samples of 100 tokens; 70 + 30 a fourth.
    step = planned(((90, 50, 10, 60), (40, 70, 30, 50)), tokens_per_rank=25, context_parallel=4)
    assert rings(step) == [[((0, 1, 2, 3), 100), ((4, 5, 6, 7), 100)]] * 2
    assert sorted(seq for (seqs,) in step.members for seq in seqs) == list(range(8))
    assert [[plan.lengths[at] for at in zone.seqs] for plan in step.plans for zone in plan.zones] == [
        [90, 10],
        [70, 30],
        [60, 40],
        [50, 50],
    ]
    # Without a word the fewest ranks hold the longest sequence.
    fewest = rings(planned(((90, 20, 20),), tokens_per_rank=50))
    assert {ranks for zones in fewest for ranks, _ in zones} == {(0, 1), (2, 3)}
    (everywhere,) = rings(planned(((90, 20, 20),)))
    assert everywhere == [(tuple(range(8)), 130)]  # nothing limits a rank
    # A ring is transformer engines inside its replica.
    (plan,) = planned(((64, 64),), tokens_per_rank=16, context_parallel=4).plans
    found = plan_statistics(plan, MODEL)
    assert found["kv_tokens_received_inter_node_per_rank"] == [0] * 8
    alone = plan_statistics(make_planner("te_ring", Cluster(4, 4), MODEL)([64]), MODEL)
    assert found["kv_tokens_received_per_rank"] == 2 * alone["kv_tokens_received_per_rank"]
    # Microbatches that are dealt keep their sequences.
    dealt = replace(CONTEXT, own_microbatches=False)
    step = planned(((30, 30, 30), (90,)), dealt, tokens_per_rank=15)
    assert step.members == (((0, 1, 2),), ((3,),))
    with pytest.raises(InfeasibleError, match=r"do not pack into 4 samples of 30 tokens .*context_parallel"):
        planned(((20, 20, 20, 20, 20),), dealt, tokens_per_rank=15, context_parallel=2)


def test_replicas_and_sequences_that_cannot_be_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"context_parallel 3: 8 ranks on nodes of 4 make replicas of 1, 2, 4, 8"):
        planned(((9,),), context_parallel=3)
    with pytest.raises(ConfigError, match="says the replicas already"):
        planned(((9,),), context_parallel=2, strategy="8*tp1-pp1-cp1", tokens_per_rank=99)
    with pytest.raises(InfeasibleError, match=r"95 tokens and needs 4 ranks of 25"):
        planned(((95,),), context_parallel=2, tokens_per_rank=25)
    assert context_sizes(Cluster(12, 4)) == (1, 2, 4, 12)
    # A sequence longer than the pool is named.
    with pytest.raises(InfeasibleError, match="sequence 1 has 900 tokens"):
        plan_of([5, 900], Cluster(8, 4), tokens_per_rank=100)
    cluster, options = Cluster(8, 4), HybridDpOptions(tokens_per_rank=100)
    with pytest.raises(InfeasibleError, match="sequence 1 has 801 tokens and needs 9 ranks of 100 tokens; 8 are"):
        baselines.hybrid_dp_batch(Batch((5, 801)), cluster, HYBRID, AnalyticCost(cluster, HYBRID), options)


sizes = st.lists(st.integers(1, 60), min_size=1, max_size=12)


@given(sizes, st.integers(1, 5), st.integers(0, 40))
def test_first_fit_into_bins_of_one_size_keeps_every_item_and_some_of_its_bins_fit_again(
    items: list[int], num_bins: int, more: int
) -> None:
    most = max(*items, -(-sum(items) // num_bins)) + more
    bins = first_fit_evenly(items, num_bins, most)
    if bins is None:
        assert len(first_fit_decreasing(items, most)) > num_bins
        return
    assert len(bins) == num_bins
    assert sorted(item for each in bins for item in each) == list(range(len(items)))
    assert max(sum(items[item] for item in each) for each in bins) <= most
    part = [items[item] for each in bins[::2] for item in each]
    assert first_fit_evenly(part, len(bins[::2]), most) is not None


# megatron_dynamic: both of Megatron's rules on cases worked by hand, and what one microbatch makes
# of them.
each_rules = pytest.mark.parametrize("rules", RULES)


def plan_of(lengths: Sequence[int], cluster: Cluster, **options: Any) -> MicrobatchPlan:
    return make_planner("megatron_dynamic", cluster, MODEL, **options)(lengths)


def zones_of(plan: MicrobatchPlan) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [(zone.ranks, zone.seqs) for zone in plan.zones if isinstance(zone, Zone)]


# Rules, lengths, ranks (of 100 tokens each) and the microbatches of groups: (ranks, sequences).
BY_HAND: list[tuple[str, list[int], int, list[Microbatch]]] = [
    # 100 takes a rank, work 10000 of at most 10500, and fills it. 60 on one rank or two leaves the
    # largest work as it is: one wins. 40 has room beside 60 and leaves it, too: the older group
    # wins. The two ranks left over double one group, then the other.
    ("dynamic", [100, 60, 40], 4, [((2, (0,)), (2, (1, 2)))]),
    # Two of 100 fill two ranks; the third and 50 have no tokens' room, and wait.
    ("dynamic", [100, 100, 100, 50], 2, [((1, (0,)), (1, (1,))), ((1, (2,)), (1, (3,)))]),
    # On 7 ranks, where powers of two do not come out: 4 for 400, 2 for 190; one is left, which
    # neither 2 -> 4 nor 4 -> 7 can use.
    ("dynamic", [400, 190], 7, [((7, (0, 1)),)]),
    # A rank of a 200 has work 20000, of a 100 work 10000. The first four 100 make all six ranks
    # even, so the fifth is left.
    (*("hybrid", [200, 200, *[100] * 5], 6), [((2, (0,)), (2, (1,)), (1, (2, 4)), (1, (3, 5))), ((6, (6,)),)]),
    # No size comes down, so all are taken, also 60 beside 100: 10000, 10000 + 3600. Without the last
    # of the most loaded group work is even: it is put back.
    ("hybrid", [100, 100, 60], 2, [((1, (0,)), (1, (1,))), ((2, (2,)),)]),
    *((rules, [300], 8, [((8, (0,)),)]) for rules in RULES),  # ranks left over double the smallest group
]


@pytest.mark.parametrize(("rules", "lengths", "num_ranks", "microbatches"), BY_HAND)
def test_a_schedule_is_what_the_rules_make_by_hand(
    rules: str, lengths: list[int], num_ranks: int, microbatches: list[Microbatch]
) -> None:
    assert RULES[rules](lengths, 100, num_ranks) == microbatches


@given(
    lengths=st.lists(st.integers(1, 3000), min_size=1, max_size=40),
    tokens=st.sampled_from([100, 1000]),
    num_ranks=st.integers(1, 17),
    rules=st.sampled_from(list(RULES)),
)
def test_a_schedule_has_every_sequence_once_and_uses_every_rank(
    lengths: list[int], tokens: int, num_ranks: int, rules: str
) -> None:
    microbatches = RULES[rules](lengths, tokens, num_ranks)
    assert sorted(seq for groups in microbatches for _, seqs in groups for seq in seqs) == list(range(len(lengths)))
    for groups in microbatches:
        assert sum(size for size, _ in groups) == num_ranks
        assert all(size == num_ranks or size & (size - 1) == 0 for size, _ in groups)
        assert all(seqs for _, seqs in groups)


@given(lengths=st.lists(st.integers(1, 800), min_size=1, max_size=20), num_ranks=st.sampled_from([4, 6, 8]))
def test_dynamic_groups_hold_no_more_than_the_tokens_of_their_ranks(lengths: list[int], num_ranks: int) -> None:
    for groups in RULES["dynamic"](lengths, 200, num_ranks):
        assert all(sum(lengths[seq] for seq in seqs) <= 200 * size + 1e-6 for size, seqs in groups)


@each_rules
def test_the_rules_of_microbatches(rules: str) -> None:
    # A capacity equal to the average is legal.
    for lengths in ([23, 19, 14, 8], [64], [1] * 64, [8] * 8, [63, 1]):
        plan = plan_of(lengths, Cluster(8, 4), tokens_per_rank=8, rules=rules)
        verify(plan)
        assert max(plan_statistics(plan, MODEL)["tokens_per_rank"]) <= 8 + 2 * len(lengths)
    # Microbatches are those of the schedule.
    cluster, lengths = Cluster(8, 4), (300, 100, 90, 80, 70, 60, 50, 300, 300, 40, 20, 7)
    options = MegatronDynamicOptions(tokens_per_rank=100, rules=rules)  # pyright: ignore[reportArgumentType]
    made = plan_batch(Batch(lengths), cluster, MODEL, AnalyticCost(cluster, MODEL), options)
    schedule = RULES[rules](lengths, 100, 8)
    assert len(made.plans) == len(schedule) > 1
    for plan, (seqs,), groups in zip(made.plans, made.members, schedule, strict=True):
        assert plan.lengths == tuple(lengths[seq] for seq in seqs)
        verify(plan)
        first, ranks_of = 0, {}
        for size, ids in groups:
            ranks_of |= dict.fromkeys(ids, tuple(range(first, first + size)))
            first += size
        assert {seqs[i]: ranks for ranks, own in zones_of(plan) for i in own} == ranks_of

    # The microbatches of a schedule follow one another in one plan if a rank holds them.
    def two(lengths: Sequence[int], tokens: int, num_ranks: int) -> list[Microbatch]:
        assert (tuple(lengths), num_ranks) == ((8, 8, 8, 8), 2)
        return [((1, (0,)), (1, (1,))), ((2, (2, 3)),)] if tokens < 20 else [((1, (0, 1, 2)), (1, (3,)))]

    cluster = Cluster(2, 2)
    options = MegatronDynamicOptions(tokens_per_rank=20, rules=rules)  # pyright: ignore[reportArgumentType]
    plan = plan_with(two, Batch((8, 8, 8, 8)), cluster, MODEL, options)
    # Not the first schedule: it has 24 tokens on a rank.
    assert zones_of(plan) == [((0, 1), (2, 3)), ((0,), (0,)), ((1,), (1,))]


# hybrid_dp: short sequences alone, long ones in rings, FLOPs within the tolerance, memory by
# microbatches.
HYBRID = Model(8, 2, 16, hidden_size=128, ffn_size=256)


def hybrid_plan(lengths: list[int], cluster: Cluster, **options: Any) -> MicrobatchPlan:
    return make_planner("hybrid_dp", cluster, HYBRID, **options)(lengths)


def hybrid_rings(plan: MicrobatchPlan) -> list[tuple[tuple[int, ...], list[int]]]:
    assert all(isinstance(zone, Zone) and zone.pattern == "ring" for zone in plan.zones)
    return [(zone.ranks, [plan.lengths[seq] for seq in zone.seqs]) for zone in plan.zones if isinstance(zone, Zone)]


def flops(plan: MicrobatchPlan) -> list[float]:
    report = plan_statistics(plan, HYBRID)
    return [
        pairs * HYBRID.attention_flops_per_pair + tokens * HYBRID.linear_flops_per_token
        for pairs, tokens in zip(report["attention_pairs_per_rank"], report["tokens_per_rank"], strict=True)
    ]


def test_hybrid_dp_takes_the_fewest_ranks_that_memory_and_flops_allow() -> None:
    # Short sequences stay on one rank and a long one takes a ring inside its node.
    # The long one has about half of all FLOPs, so half of the ranks take it; the others take the
    # short ones.
    plan = hybrid_plan([8000, *[4000] * 4], Cluster(8, 4), slack=2.5)
    assert hybrid_rings(plan) == [((0, 1, 2, 3), [8000]), *(((rank,), [4000]) for rank in range(4, 8))]
    # The fewest ranks are taken that memory and FLOPs allow.
    # 16 is four times a rank's capacity of 4; linear work outweighs these few pairs, so FLOPs ask
    # for no more.
    assert hybrid_rings(hybrid_plan([16, 4, 4, 4, 4], Cluster(8, 8), tokens_per_rank=4)) == [
        ((0, 1, 2, 3), [16]),
        *(((rank,), [4]) for rank in range(4, 8)),
    ]
    # Without slack all sequences go over all ranks.
    assert hybrid_rings(hybrid_plan([23, 19, 14, 8], Cluster(8, 4), tokens_per_rank=8)) == [
        (tuple(range(8)), [23, 19, 14, 8])
    ]


def test_flops_are_even_within_the_tolerance_and_over_microbatches() -> None:
    # FLOPs are within the tolerance of the mean and more of it moves less.
    # FLOPs are within the tolerance of the mean.
    lengths = [24957, 8593, 25756, 17251, 59657, 28869, 6177, 26620, 5610, 592, 9331, 15506]
    for tolerance in (0.02, 0.05, 0.2):
        work = flops(hybrid_plan(lengths, Cluster(64, 8), slack=2.0, tolerance=tolerance))
        assert max(work) <= (1 + tolerance) * sum(work) / 64 * 1.001  # chunks of a ring are near equal
    # More tolerance moves less.
    strict, lax = (hybrid_plan(lengths, Cluster(64, 8), slack=2.0, tolerance=t) for t in (0.02, 0.5))
    moved = [sum(plan_statistics(plan, HYBRID)["kv_tokens_received_per_rank"]) for plan in (strict, lax)]
    assert moved[1] < moved[0]
    # Microbatches even out FLOPs over their sum.
    # More short sequences than memory holds: those ranks run more microbatches while the ring's
    # ranks have done their part.
    cluster, lengths = Cluster(8, 4), (32000, *[1000] * 256)
    made = baselines.hybrid_dp_batch(
        Batch(lengths), cluster, HYBRID, AnalyticCost(cluster, HYBRID), HybridDpOptions(tokens_per_rank=8000)
    )
    assert len(made.plans) > 1
    verify(made.plans[0])
    work = [sum(rank) for rank in zip(*(flops(plan) for plan in made.plans), strict=True)]
    assert max(work) <= 1.05 * sum(work) / 8 * 1.001
    assert len({zone.ranks for zone in made.plans[-1].zones if isinstance(zone, Zone)}) < 8


@given(
    lengths=st.lists(st.integers(1, 500), min_size=1, max_size=12),
    cluster=st.sampled_from([Cluster(1, 1), Cluster(6, 3), Cluster(8, 4), Cluster(5, 5)]),
    slack=st.sampled_from([1.0, 1.1, 1.5, 3.0]),
)
def test_ranks_keep_within_their_capacity_unless_only_all_of_them_hold_the_batch(
    lengths: list[int], cluster: Cluster, slack: float
) -> None:
    capacity = int(slack * -(-sum(lengths) // cluster.num_ranks))
    plan = hybrid_plan(lengths, cluster, tokens_per_rank=capacity)
    everywhere = [ranks for ranks, _ in hybrid_rings(plan)] == [tuple(range(cluster.num_ranks))]
    assert max(plan_statistics(plan, HYBRID)["tokens_per_rank"]) <= capacity + (2 * len(lengths) if everywhere else 0)


@given(
    lengths=st.lists(st.integers(1, 400), max_size=14),
    cluster=st.sampled_from([Cluster(4, 2), Cluster(6, 3), Cluster(8, 4)]),
)
def test_microbatches_hold_every_sequence_once_within_the_capacity(lengths: list[int], cluster: Cluster) -> None:
    options = HybridDpOptions(tokens_per_rank=100)
    made = baselines.hybrid_dp_batch(Batch(tuple(lengths)), cluster, HYBRID, AnalyticCost(cluster, HYBRID), options)
    assert sorted(seq for (seqs,) in made.members for seq in seqs) == list(range(len(lengths)))
    for plan, (seqs,) in zip(made.plans, made.members, strict=True):
        assert plan.lengths == tuple(lengths[seq] for seq in seqs)
        assert max(plan_statistics(plan, HYBRID)["tokens_per_rank"]) <= 100
