"""megatron_dynamic: both of Megatron's rules on cases worked by hand, and what one microbatch makes
of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_balance import Batch, Cluster, Model, make_planner, verify
from megatron_balance.analysis.statistics import plan_statistics
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.errors import ConfigError, InfeasibleError
from megatron_balance.ir.plan import MicrobatchPlan, Zone
from megatron_balance.planners.megatron import RULES, MegatronDynamicOptions, Microbatch, plan_batch, plan_with

MODEL = Model(8, 2, 16)
each_rules = pytest.mark.parametrize("rules", RULES)


def plan_of(lengths: Sequence[int], cluster: Cluster, **options: Any) -> MicrobatchPlan:
    return make_planner("megatron_dynamic", cluster, MODEL, **options)(lengths)


def zones_of(plan: MicrobatchPlan) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [(zone.ranks, zone.seqs) for zone in plan.zones if isinstance(zone, Zone)]


def test_dynamic_packs_sequences_into_groups_where_the_largest_work_stays_lowest() -> None:
    # 100 takes a rank, work 10000 of at most 10500, and fills it. 60 on one rank or two leaves the
    # largest work as it is: one wins. 40 has room beside 60 and leaves it, too: the older group
    # wins. The two ranks left over double one group, then the other.
    assert RULES["dynamic"]([100, 60, 40], 100, 4) == [((2, (0,)), (2, (1, 2)))]


def test_dynamic_leaves_for_the_next_microbatch_what_fits_nowhere() -> None:
    # Two of 100 fill two ranks; the third and 50 have no tokens' room.
    assert RULES["dynamic"]([100, 100, 100, 50], 100, 2) == [((1, (0,)), (1, (1,))), ((1, (2,)), (1, (3,)))]


def test_dynamic_gives_a_microbatch_to_all_ranks_where_powers_of_two_do_not_come_out() -> None:
    # On 7 ranks: 4 for 400, 2 for 190; one is left, which neither 2 -> 4 nor 4 -> 7 can use.
    assert RULES["dynamic"]([400, 190], 100, 7) == [((7, (0, 1)),)]


def test_hybrid_takes_the_fewest_ranks_and_ends_when_work_is_even() -> None:
    # A rank of a 200 has work 20000, of a 100 work 10000. The first four 100 make all six ranks
    # even, so the fifth is left.
    first = ((2, (0,)), (2, (1,)), (1, (2, 4)), (1, (3, 5)))
    assert RULES["hybrid"]([200, 200, 100, 100, 100, 100, 100], 100, 6) == [first, ((6, (6,)),)]


def test_hybrid_puts_back_the_last_sequence_of_the_most_loaded_group() -> None:
    # No size comes down, so all are taken, also 60 beside 100: 10000, 10000 + 3600. Without it work
    # is even.
    assert RULES["hybrid"]([100, 100, 60], 100, 2) == [((1, (0,)), (1, (1,))), ((2, (2,)),)]


def test_ranks_left_over_double_the_smallest_group() -> None:
    assert [rules([300], 100, 8) for rules in RULES.values()] == [[((8, (0,)),)]] * 2


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
def test_the_microbatches_of_a_schedule_follow_one_another_in_one_plan_if_a_rank_holds_them(rules: str) -> None:
    def two(lengths: Sequence[int], tokens: int, num_ranks: int) -> list[Microbatch]:
        assert (tuple(lengths), num_ranks) == ((8, 8, 8, 8), 2)
        return [((1, (0,)), (1, (1,))), ((2, (2, 3)),)] if tokens < 20 else [((1, (0, 1, 2)), (1, (3,)))]

    cluster = Cluster(2, 2)
    options = MegatronDynamicOptions(tokens_per_rank=20, rules=rules)  # pyright: ignore[reportArgumentType]
    plan = plan_with(two, Batch((8, 8, 8, 8)), cluster, MODEL, options)
    assert zones_of(plan) == [
        ((0, 1), (2, 3)),
        ((0,), (0,)),
        ((1,), (1,)),
    ]  # not the first schedule: it has 24 tokens on a rank


@each_rules
def test_a_capacity_equal_to_the_average_is_legal(rules: str) -> None:
    for lengths in ([23, 19, 14, 8], [64], [1] * 64, [8] * 8, [63, 1]):
        plan = plan_of(lengths, Cluster(8, 4), tokens_per_rank=8, rules=rules)
        verify(plan)
        assert max(plan_statistics(plan, MODEL)["tokens_per_rank"]) <= 8 + 2 * len(lengths)


@each_rules
def test_microbatches_are_those_of_the_schedule(rules: str) -> None:
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


def test_a_sequence_longer_than_the_pool_is_named() -> None:
    with pytest.raises(InfeasibleError, match="sequence 1 has 900 tokens"):
        plan_of([5, 900], Cluster(8, 4), tokens_per_rank=100)


@pytest.mark.parametrize(("option", "value"), [("slack", 0.9), ("rules", "newest")])
def test_options_out_of_range_are_errors(option: str, value: object) -> None:
    with pytest.raises(ConfigError, match=option):
        plan_of([4], Cluster(8, 4), **{option: value})
