"""The planners that choose nothing: one zone over all ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_balance import Batch, Cluster, Model, layout, make_planner
from megatron_balance.analysis.statistics import plan_statistics
from megatron_balance.errors import ConfigError, InfeasibleError
from tests.support import by_hand

MODEL = Model(8, 2, 16)
PATTERN_OF = {"te_ring": "ring", "llama_all_gather": "all_gather", "ulysses": "head_exchange"}


@pytest.mark.parametrize(("planner", "pattern"), PATTERN_OF.items())
def test_all_sequences_share_one_zone_over_all_ranks(planner: str, pattern: str) -> None:
    plan = make_planner(planner, Cluster(4, 2), MODEL)([5, 1, 30])
    assert plan == replace(by_hand.pool(pattern, (5, 1, 30), 4, ranks_per_node=2, heads=(8, 2)), planner=planner)


def test_a_plan_says_where_tokens_lie() -> None:
    plan = make_planner("te_ring", Cluster(2, 2), MODEL)([8, 4])
    assert layout(plan, 0).tolist() == [[0, 0, 2], [0, 6, 8], [1, 0, 1], [1, 3, 4]]
    for rank in (-1, 2):
        with pytest.raises(ConfigError, match=f"rank {rank}: expected a rank of the plan, 0 to 1"):
            layout(plan, rank)


def test_an_empty_batch_has_no_zones() -> None:
    assert [make_planner(name, Cluster(4, 2), MODEL)([]).zones for name in PATTERN_OF] == [()] * 3


@pytest.mark.parametrize("planner", PATTERN_OF)
def test_a_batch_as_large_as_the_pool_is_legal_and_one_token_more_is_not(planner: str) -> None:
    plan = make_planner(planner, Cluster(4, 2), MODEL, tokens_per_rank=10)
    assert plan([20, 20]).num_tokens == 40
    with pytest.raises(
        InfeasibleError,
        match=r"the batch has 41 tokens; 4 ranks x 10 tokens hold 40. Use at least 5 ranks, raise .* 11",
    ):
        plan([20, 21])


@pytest.mark.parametrize("planner", PATTERN_OF)
def test_a_sequence_longer_than_the_pool_is_named_with_what_it_needs(planner: str) -> None:
    with pytest.raises(
        InfeasibleError, match=r"sequence 1 has 95 tokens and needs 10 ranks of 10 tokens; 4 are available"
    ):
        make_planner(planner, Cluster(4, 2), MODEL, tokens_per_rank=10)([20, 95])


def test_the_ring_balances_attention_of_equal_sequences_exactly() -> None:
    report = plan_statistics(make_planner("te_ring", Cluster(4, 2), MODEL)([64, 64]), MODEL)
    assert report["imbalance"] == {"tokens": 1.0, "attention": 1.0}


def test_with_fewer_heads_than_ranks_ulysses_leaves_ranks_without_attention() -> None:
    report = plan_statistics(make_planner("ulysses", Cluster(4, 2), Model(2, 1, 16))([64]), Model(2, 1, 16))
    assert sorted(report["attention_pairs_per_rank"]) == [0, 0, 64 * 65 // 4, 64 * 65 // 4]


def test_lengths_and_a_batch_mean_the_same() -> None:
    plan = make_planner("te_ring", Cluster(4, 2), MODEL)
    assert plan([3, 4]) == plan(Batch((3, 4)))


def test_an_unknown_planner_is_an_error_with_a_suggestion() -> None:
    with pytest.raises(ConfigError, match=r"unknown planner 'te_rin'.*te_ring"):
        make_planner("te_rin", Cluster(4, 2), MODEL)


def test_an_unknown_option_is_an_error_with_a_suggestion() -> None:
    with pytest.raises(ConfigError, match=r"token_per_rank.*tokens_per_rank"):
        make_planner("te_ring", Cluster(4, 2), MODEL, token_per_rank=3)
