"""packing: packs of one size, what is cut attends to its own beginning only, redundant attention
counted apart.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megatron_balance import Cluster, Model, make_planner, verify
from megatron_balance.analysis.statistics import plan_statistics
from megatron_balance.ir.plan import MicrobatchPlan, TaskTable, Zone
from megatron_balance.planners.baselines import redundant_pairs
from megatron_balance.solvers.packing import best_fit

MODEL = Model(8, 2, 16)


def plan_of(lengths: list[int], num_ranks: int = 4) -> MicrobatchPlan:
    return make_planner("packing", Cluster(num_ranks, num_ranks), MODEL)(lengths)


def test_sequences_that_fill_packs_stay_whole() -> None:
    plan = plan_of([6, 4, 10, 3, 7, 8, 2])
    assert plan.zones == (
        Zone("local", "ring", (0,), (2,)),
        Zone("local", "ring", (1,), (5, 6)),
        Zone("local", "ring", (2,), (3, 4)),
        Zone("local", "ring", (3,), (0, 1)),
    )


def test_what_fits_no_pack_is_cut_where_packs_end_and_sees_all_its_earlier_keys() -> None:
    plan = plan_of([25, 9, 6])  # packs of 10: 9 and 6 whole, 25 into what is left, 1 + 4 + 10 + 10
    cut = plan.zones[0]
    assert isinstance(cut, TaskTable)
    assert list(cut.fragments) == [(0, 0, 0, 1), (1, 0, 1, 5), (2, 0, 5, 15), (3, 0, 15, 25)]
    assert list(cut.tasks) == [(0, 0, 0, 1, 0, 1), (1, 0, 1, 5, 0, 5), (2, 0, 5, 15, 0, 15), (3, 0, 15, 25, 0, 25)]
    assert plan.zones[1:] == (Zone("local", "ring", (0,), (1,)), Zone("local", "ring", (1,), (2,)))
    assert plan_statistics(plan, MODEL)["kv_tokens_received_per_rank"] == [0, 1, 5, 15]
    verify(plan, "replay")


@given(lengths=st.lists(st.integers(1, 300), max_size=12), num_ranks=st.integers(1, 9))
def test_every_rank_has_the_same_tokens(lengths: list[int], num_ranks: int) -> None:
    tokens = plan_statistics(plan_of(lengths, num_ranks), MODEL)["tokens_per_rank"]
    assert max(tokens) - min(tokens) <= 1


def test_redundant_pairs_are_those_of_each_query_with_the_sequences_before_its_own() -> None:
    assert redundant_pairs([3, 2, 4]) == (0, 6, 20)
    assert redundant_pairs([]) == ()


@given(pack=st.lists(st.integers(1, 100), max_size=8))
def test_a_pack_with_its_redundant_pairs_is_one_causal_sequence(pack: list[int]) -> None:
    own = sum(n * (n + 1) // 2 for n in pack)
    assert own + sum(redundant_pairs(pack)) == sum(pack) * (sum(pack) + 1) // 2


def test_best_fit_takes_the_bin_with_the_least_room_and_the_lower_of_two() -> None:
    assert best_fit([5, 5, 4, 9, 2], [6, 5, 10, 10]) == [1, 0, 2, 3, 2]
    assert best_fit([3, 3], [3]) == [0, None]
    assert best_fit([], []) == []
