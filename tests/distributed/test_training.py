"""Documents reach the ranks that compute them, and results come back; no Megatron."""

from __future__ import annotations

import pytest

from tests.support import training_jobs
from tests.support.pool import NUM_RANKS, Pool

pytestmark = pytest.mark.dist

# Two microbatches; one rank reads no document of the first, and one a document that fills two
# ranks.
LENGTHS = (((700, 3), (5,)), ((), (90, 1, 33)), ((40,), (200, 7)), ((1, 1, 60), (12,)))


@pytest.mark.parametrize(("planner", "ping_pong"), [("zeppelin", False), ("distca", True), ("te_ring", False)])
def test_rows_arrive_in_the_order_of_the_plan_and_results_come_back(pool: Pool, planner: str, ping_pong: bool) -> None:
    ranks = pool.run(training_jobs.step, len(LENGTHS), LENGTHS, planner, ping_pong)
    assert len(ranks[0].rows) == (4 if ping_pong else 2)
    for received in ranks:
        assert received.rows == received.planned
        assert received.back == received.read
    total = sum(n for of_rank in LENGTHS for microbatch in of_rank for n in microbatch)
    rows = [row for received in ranks for each in received.rows for row in each]
    assert len(rows) == len(set(rows)) == total


def test_a_pool_of_one_rank_exchanges_nothing(pool: Pool) -> None:
    (received,) = pool.run(training_jobs.step, 1, LENGTHS[1:2], "zeppelin", False)
    assert received.rows == received.planned
    assert received.back == received.read


def test_every_rank_hears_of_one_that_cannot_read(pool: Pool) -> None:
    heard = pool.run(training_jobs.read_with_failure, 4, 2)
    assert heard.pop(2) == "this rank was asked to fail"
    assert set(heard) == {"ranks [2] could not read their microbatches; the error of each of them says why"}


@pytest.mark.parametrize(
    ("tensor_parallel", "odd", "heard"),
    [
        (2, None, "2 microbatches"),
        (1, 1, "but ranks [0, 2, 3, 4, 5, 6, 7] run 2, ranks [1] run 3; give all ranks as many (Megatron: start all"),
        (2, 6, "but ranks [0, 2, 4] run 2, ranks [6] run 2 to 3 (with their tensor-parallel ranks); give all"),
    ],
)
def test_ranks_that_run_other_numbers_of_microbatches_are_named(
    pool: Pool, tensor_parallel: int, odd: int | None, heard: str
) -> None:
    numbers = [2 + (rank == odd) for rank in range(NUM_RANKS)]
    answers = pool.run(training_jobs.read_other_numbers, NUM_RANKS, numbers, tensor_parallel)
    for rank, answer in enumerate(answers):
        peer = rank % tensor_parallel  # each tensor-parallel coordinate has a pool of its own, and names that one's
        assert (answer if not peer else answer.replace("[1, 3, 5]", "[0, 2, 4]").replace("[7]", "[6]")).find(heard) >= 0


def test_every_group_of_a_pool_has_the_timeout_it_was_given(pool: Pool) -> None:
    timeouts = pool.run(training_jobs.timeouts_of_pools, NUM_RANKS, 7)
    assert [set(of_rank) for of_rank in timeouts] == [{7.0}] * NUM_RANKS
    assert all(len(of_rank) == 3 for of_rank in timeouts), "pool, node, joint pool"


def test_a_plain_process_group_is_a_pool(pool: Pool) -> None:
    everyone = tuple(range(NUM_RANKS))
    assert pool.run(training_jobs.pool_of_group, NUM_RANKS) == [(rank, NUM_RANKS, 4, everyone) for rank in everyone]
