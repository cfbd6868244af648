"""Megatron's own way: packed samples, one a replica, each over its context-parallel ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_balance import Cluster, Model, make_planner
from megatron_balance.analysis.statistics import plan_statistics
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.errors import ConfigError, InfeasibleError
from megatron_balance.ir.plan import Zone
from megatron_balance.ir.step import EMPTY, StepPlan
from megatron_balance.planners.base import StepContext
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
    """By microbatch, ranks of each zone and tokens in it."""
    return [
        [(zone.ranks, sum(plan.lengths[seq] for seq in zone.seqs)) for zone in plan.zones if isinstance(zone, Zone)]
        for plan in step.plans
    ]


def test_full_samples_go_to_the_replicas_in_turn() -> None:
    """90 + 10, 60 + 40 and 50 + 50 fill three samples of 100 tokens; 70 + 30 a fourth."""
    step = planned(((90, 50, 10, 60), (40, 70, 30, 50)), tokens_per_rank=25, context_parallel=4)
    assert rings(step) == [[((0, 1, 2, 3), 100), ((4, 5, 6, 7), 100)]] * 2
    assert sorted(seq for (seqs,) in step.members for seq in seqs) == list(range(8))
    assert [[plan.lengths[at] for at in zone.seqs] for plan in step.plans for zone in plan.zones] == [
        [90, 10],
        [70, 30],
        [60, 40],
        [50, 50],
    ]


def test_a_ring_is_transformer_engines_inside_its_replica() -> None:
    (plan,) = planned(((64, 64),), tokens_per_rank=16, context_parallel=4).plans
    found = plan_statistics(plan, MODEL)
    assert found["kv_tokens_received_inter_node_per_rank"] == [0] * 8
    assert (
        found["kv_tokens_received_per_rank"]
        == plan_statistics(make_planner("te_ring", Cluster(4, 4), MODEL)([64]), MODEL)["kv_tokens_received_per_rank"]
        * 2
    )


def test_without_a_word_the_fewest_ranks_hold_the_longest_sequence() -> None:
    assert {ranks for (zones) in rings(planned(((90, 20, 20),), tokens_per_rank=50)) for ranks, _ in zones} == {
        (0, 1),
        (2, 3),
    }
    (everywhere,) = rings(planned(((90, 20, 20),)))
    assert everywhere == [(tuple(range(8)), 130)]  # nothing limits a rank


def test_microbatches_that_are_dealt_keep_their_sequences() -> None:
    dealt = replace(CONTEXT, own_microbatches=False)
    step = planned(((30, 30, 30), (90,)), dealt, tokens_per_rank=15)
    assert step.members == (((0, 1, 2),), ((3,),))
    with pytest.raises(InfeasibleError, match=r"do not pack into 4 samples of 30 tokens .*context_parallel"):
        planned(((20, 20, 20, 20, 20),), dealt, tokens_per_rank=15, context_parallel=2)


def test_replicas_that_cannot_be_are_refused_with_those_that_can() -> None:
    with pytest.raises(ConfigError, match=r"context_parallel 3: 8 ranks on nodes of 4 make replicas of 1, 2, 4, 8"):
        planned(((9,),), context_parallel=3)
    with pytest.raises(ConfigError, match="says the replicas already"):
        planned(((9,),), context_parallel=2, strategy="8*tp1-pp1-cp1", tokens_per_rank=99)
    with pytest.raises(InfeasibleError, match=r"95 tokens and needs 4 ranks of 25"):
        planned(((95,),), context_parallel=2, tokens_per_rank=25)
    assert context_sizes(Cluster(12, 4)) == (1, 2, 4, 12)


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
