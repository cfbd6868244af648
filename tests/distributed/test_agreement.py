"""Ranks that planned differently hear it, all of them, before anyone waits in an exchange."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_balance.ir.batch import Batch
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import MicrobatchPlan
from tests.support import jobs, training_jobs
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


A, B = "00000000fffffffe", "0123456789abcdef"


@pytest.mark.parametrize(
    ("announced", "heard"),
    [
        ([A] * NUM_RANKS, A),
        ([""] * NUM_RANKS, ""),
        ([A, A, A, A, B, B, A, A], f"3 of 4 ranks have plan {A}, but rank 4 has {B}"),
        ([A, A, A, A, A, B, A, A], f"3 of 4 ranks have plan {A}, but rank 4 has others than its tensor-parallel peers"),
        ([A, A, "", "", A, A, A, A], f"3 of 4 ranks have plan {A}, but rank 2 has none"),
    ],
)
def test_a_plan_made_before_reading_is_compared_with_the_lengths(pool: Pool, announced: list[str], heard: str) -> None:
    """In two pools of every other rank; neighbours are tensor-parallel peers."""
    answers = pool.run(training_jobs.announce, NUM_RANKS, announced, 2)
    (answer,) = set(map(_of_first_pool, answers))
    assert heard in answer
    assert bool(answer) == bool(heard)


def _of_first_pool(answer: str) -> str:
    """An answer of the pool of odd ranks, with the ranks of the other one."""
    return answer.replace("rank 5", "rank 4").replace("rank 3", "rank 2")
