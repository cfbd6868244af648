"""Ranks that planned differently hear it, all of them, before anyone waits in an exchange."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_balance.ir.batch import Batch
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import MicrobatchPlan
from tests.support import jobs
from tests.support.pool import NUM_RANKS, Pool
from tests.support.strategies import Case, plan

pytestmark = pytest.mark.dist


def plans(num_ranks: int) -> list:
    case = Case(Batch((50, 7, 3)), Cluster(num_ranks, num_ranks), Model(4, 2, 8), None, seed=0)
    return [plan("te_ring", case)] * num_ranks


@pytest.mark.parametrize("num_ranks", [1, 2, 8])
def test_ranks_with_the_same_plan_agree(pool: Pool, num_ranks: int) -> None:
    assert pool.run(jobs.compare_plans, num_ranks, plans(num_ranks)) == ["agreed"] * num_ranks


def test_every_rank_hears_who_differs(pool: Pool) -> None:
    mixed = plans(4)
    mixed[2] = replace(mixed[2], lengths=(50, 8, 3))
    heard = pool.run(jobs.compare_plans, 4, mixed)
    assert len(set(heard)) == 1
    assert f"3 of 4 ranks have plan {mixed[0].fingerprint()}, but rank 2 has {mixed[2].fingerprint()}" in heard[0]
    assert "same configuration" in heard[0]


def test_when_no_two_agree_all_but_the_first_are_named(pool: Pool) -> None:
    mixed = [replace(p, lengths=(50 + rank, 7, 3)) for rank, p in enumerate(plans(3))]
    heard = pool.run(jobs.compare_plans, 3, mixed)
    assert len(set(heard)) == 1
    assert "rank 1 has" in heard[0]
    assert "rank 2 has" in heard[0]


def test_tensor_parallel_peers_that_plan_otherwise_are_an_error_on_every_rank(pool: Pool) -> None:
    (ours, _) = plans(2)
    other = replace(ours, lengths=(50, 8, 3))

    def answers(*plans_: MicrobatchPlan) -> list[str]:
        return pool.run(jobs.compare_with_peers, NUM_RANKS, plans_)[: len(plans_)]

    assert answers(ours, ours, ours, ours) == ["agreed"] * 4
    for said in answers(ours, ours, other, other):
        assert "their tensor-parallel peers have others" in said
    for rank, said in enumerate(answers(ours, other, ours, ours)):
        assert ("rank 1 has" in said) == (rank < 2)
        assert "ranks planned differently" in said
