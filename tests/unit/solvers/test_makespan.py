"""Sequences to unlike pipelines: near the best, and no slower than the paper's way."""

from __future__ import annotations

import random

import numpy as np
import pytest

from megatron_balance.solvers import makespan
from megatron_balance.solvers.dispatch import (
    PipelineCost,
    dispatch,
    greedy,
    lower_bound_s,
    problem_of,
)
from tools.bench.dispatch import drawn, least_of_all, seconds

CASES = [drawn(random.Random(number), mixed=number % 3 == 0) for number in range(18)]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_every_sequence_goes_once_to_a_pipeline_that_holds_it(case: int) -> None:
    lengths, pipelines = CASES[case]
    found = dispatch(lengths, pipelines)
    assert sorted(seq for seqs in found for seq in seqs) == list(range(len(lengths)))
    for pipeline, seqs in zip(pipelines, found, strict=True):
        assert all(lengths[seq] <= pipeline.max_tokens for seq in seqs)
    assert dispatch(lengths, pipelines) == found
    assert lower_bound_s(lengths, pipelines) <= seconds(lengths, pipelines, found) * (1 + 1e-9)


def test_it_is_no_slower_than_algorithm_1() -> None:
    """By a tenth of a per cent at most, and faster in the mean; many more: tools/bench/dispatch.py."""
    ratios = [
        seconds(lengths, pipelines, dispatch(lengths, pipelines))
        / seconds(lengths, pipelines, greedy(lengths, pipelines, trials=20))
        for lengths, pipelines in CASES
    ]
    assert max(ratios) <= 1.001
    assert np.mean(ratios) < 0.995


def test_small_cases_are_as_good_as_all_assignments() -> None:
    ratios: list[float] = []
    for number in range(8):
        lengths, pipelines = drawn(random.Random(100 + number), mixed=number % 2 == 0)
        pipelines = sorted(pipelines, key=lambda each: -each.max_tokens)[:3]
        lengths = lengths[:7]
        ratios.append(seconds(lengths, pipelines, dispatch(lengths, pipelines)) / least_of_all(lengths, pipelines))
    assert max(ratios) <= 1.01
    assert sum(ratio < 1 + 1e-9 for ratio in ratios) >= 7


def test_fewer_sequences_than_pipelines_and_c_once_a_microbatch() -> None:
    cost = PipelineCost(0.0, 1.0, 5.0, 2, 10)
    assert sorted(map(len, dispatch([4, 4], [cost] * 3))) == [0, 1, 1]
    assert cost.bound_s([4, 4, 4]) == 12 + 12 / 10 * 5 + (4 + 4 / 10 * 5 + 5)
    assert cost.bound_s([]) == 0.0


def test_of_many_sequences_only_some_pipelines_with_stages_take_long_ones() -> None:
    """Each such pipeline waits for its longest microbatch again."""
    pipelines = [PipelineCost(1e-9, 1e-5, 5e-3, 2, 16384)] * 4
    rng = random.Random(1)
    lengths = [min(16384, max(1, int(rng.lognormvariate(5.6, 1.5)))) for _ in range(400)]
    problem = problem_of(lengths, pipelines)
    plain = makespan.greedy(problem, np.argsort(-problem.work.min(axis=0), kind="stable").tolist())
    found = seconds(lengths, pipelines, dispatch(lengths, pipelines))
    assert lower_bound_s(lengths, pipelines) <= found < 0.98 * problem.seconds(plain).max()


def alike(num_items: int) -> makespan.Problem:
    """Two machines of one kind, items of 3, 3, 2, 2 and 2 seconds, and then of none."""
    work = np.zeros((1, num_items))
    work[0, :5] = 3, 3, 2, 2, 2
    return makespan.Problem(work, np.zeros(2, dtype=np.int64), np.zeros(2), np.zeros(2), np.ones(num_items, np.int64))


def test_a_swap_makes_the_longest_first_even() -> None:
    problem = alike(5)
    found = makespan.greedy(problem, range(5))
    assert problem.seconds(found).tolist() == [7, 5]
    makespan.improve(problem, found, 0.0)
    assert problem.seconds(found).tolist() == [6, 6]
    many = alike(makespan.FEW + 1)  # too many for the depth-first search
    assert many.seconds(makespan.assign(many, searches=1)).tolist() == [6, 6]


def test_machines_that_end_together_still_change_what_is_cheaper_on_the_other() -> None:
    """The longest first ends even, with sequences where they cost more; no move or swap helps."""
    lengths, pipelines = drawn(random.Random(403), mixed=False)
    problem = problem_of(lengths, pipelines)
    even = makespan.greedy(problem, np.argsort(-problem.work.min(axis=0), kind="stable").tolist())
    makespan.improve(problem, even, 0.0)
    seconds_of = problem.seconds(even)
    assert seconds_of.max() < seconds_of.min() * 1.001
    assert problem.seconds(makespan.assign(problem)).max() < 0.997 * seconds_of.max()


def test_the_bound_is_that_of_the_best_weights_of_unlike_machines() -> None:
    """One kind does long items in less time, the other short ones: half a second each is the least."""
    work = np.array([[1.0] * 4 + [2.0] * 4, [2.0] * 4 + [1.0] * 4]) / 8
    kind = np.array([0, 1])
    problem = makespan.Problem(work, kind, np.zeros(2), np.zeros(2), np.ones(8, dtype=np.int64))
    assert makespan.lower_bound(problem) == pytest.approx(0.5)
    slow = makespan.Problem(work * [[1.0], [3.0]], kind, np.zeros(2), np.zeros(2), problem.sizes)
    # All items on the first take 1.5 s; the second takes 2.25 of its 4 at 3/8 s.
    assert makespan.lower_bound(slow) == pytest.approx(0.9, rel=1e-3)
