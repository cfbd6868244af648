"""The pool itself: a test that hangs or fails on one rank must say where."""

from __future__ import annotations

import pytest

from tests.support import jobs
from tests.support.pool import WORLDS, Pool, RankError

pytestmark = pytest.mark.dist


@pytest.mark.parametrize("size", WORLDS)
def test_every_world_has_exactly_its_ranks(pool: Pool, size: int) -> None:
    assert pool.run(jobs.add_ranks, size) == [size * (size - 1) // 2] * size


def test_a_failing_rank_is_named_with_its_traceback_and_the_next_job_runs(pool: Pool) -> None:
    with pytest.raises(RankError, match=r"rank 2 of 4 failed:[\s\S]*in fail_on[\s\S]*asked to fail"):
        pool.run(jobs.fail_on, 4, 2)
    assert pool.run(jobs.add_ranks, 4) == [6] * 4


def test_a_hanging_rank_is_named_with_its_stack() -> None:
    impatient = Pool(timeout_s=20.0)
    assert impatient.run(jobs.add_ranks, 2) == [1, 1]
    impatient.timeout_s = 1.0
    try:
        with pytest.raises(RankError, match=r"ranks \[1\] did not answer in time[\s\S]*in hang_on"):
            impatient.run(jobs.hang_on, 2, 1)
    finally:
        impatient.close()


def test_groups_that_some_ranks_make_are_an_error_and_not_a_hang_of_the_next_job() -> None:
    impatient = Pool(timeout_s=20.0)
    try:
        with pytest.raises(RankError, match=r"new_group_of_two made process groups on 2 of 8 ranks; make them on all"):
            impatient.run(jobs.new_group_of_two, 2)
    finally:
        impatient.close()
