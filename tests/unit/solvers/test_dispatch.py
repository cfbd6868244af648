"""Dispatch to unequal pipelines, and packing into microbatches."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_balance.errors import InfeasibleError
from megatron_balance.simulator.pipeline import ChunkPass, run
from megatron_balance.solvers.dispatch import (
    PipelineCost,
    clock_s,
    dispatch,
    exact,
    greedy,
    microbatch_s,
    pack,
    problem_of,
    slowest_s,
    util_tokens,
)
from megatron_balance.solvers.makespan import by_weights

# Published 32B times of an A800 (Hetu, generate_strategy_32b.py), in seconds.
TP16 = PipelineCost(1.378e-9, 1.0244e-4, 0.1457, 1, 52000)
TP8 = PipelineCost(2.125e-9, 1.4141e-4, 0.1229, 1, 28000)
TP4 = PipelineCost(3.870e-9, 2.3900e-4, 0.1207, 1, 11000)
TP4_PP2 = PipelineCost(2.046e-9, 1.1830e-4, 0.0654, 2, 16000)
TP2_PP4 = PipelineCost(1.970e-9, 1.0656e-4, 0.0429, 4, 9000)
KINDS = (TP16, TP8, TP4, TP4_PP2, TP2_PP4)


def drawn(draw: np.random.Generator, most: int) -> list[int]:
    return np.clip(draw.lognormal(5.6, 1.32, int(draw.integers(1, most))), 1, 32768).astype(int).tolist()


def test_every_sequence_goes_once_to_a_pipeline_that_holds_it() -> None:
    draw = np.random.default_rng(0)
    for _ in range(4):
        lengths = drawn(draw, 120)
        pipelines = (TP16, *(KINDS[k] for k in draw.integers(0, 5, 6)))
        for answer in (dispatch(lengths, pipelines), greedy(lengths, pipelines, trials=5)):
            assert sorted(seq for own in answer for seq in own) == list(range(len(lengths)))
            for own, pipeline in zip(answer, pipelines, strict=True):
                assert all(lengths[seq] <= pipeline.max_tokens for seq in own)
        bound_s, _ = by_weights(problem_of(lengths, pipelines), rounds=80)
        assert slowest_s(lengths, pipelines, dispatch(lengths, pipelines)) >= bound_s * (1 - 1e-9)


def test_the_program_is_never_worse_than_its_start() -> None:
    lengths, pipelines = [9000, 5000, 4000, 3000, 3000, 800, 400], [TP8, TP4, TP4_PP2]
    ours = slowest_s(lengths, pipelines, dispatch(lengths, pipelines))
    assert slowest_s(lengths, pipelines, exact(lengths, pipelines)) <= ours


def test_a_sequence_that_no_pipeline_holds_is_named() -> None:
    with pytest.raises(InfeasibleError, match="30000 tokens, the best pipeline's MaxLen is 28000"):
        dispatch([5, 30000], [TP8, TP4])
    with pytest.raises(InfeasibleError, match="30000 tokens, the pipeline's MaxLen is 28000"):
        pack([5, 30000], TP8)


@pytest.mark.parametrize(
    ("lengths", "pipelines"), [([100], [TP4] * 4), ([], [TP4]), ([500] * 8, [TP4] * 4), ([9000, 10], [TP4, TP2_PP4])]
)
def test_few_and_equal_sequences(lengths: list[int], pipelines: list[PipelineCost]) -> None:
    answer = dispatch(lengths, pipelines)
    assert sorted(seq for own in answer for seq in own) == list(range(len(lengths)))
    if lengths == [500] * 8:
        assert [len(own) for own in answer] == [2] * 4


@pytest.mark.parametrize("pipeline", KINDS, ids=str)
def test_microbatches_hold_every_sequence_once_and_fit(pipeline: PipelineCost) -> None:
    draw = np.random.default_rng(3)
    for _ in range(10):
        lengths = [min(length, pipeline.max_tokens) for length in drawn(draw, 60)]
        bins = pack(lengths, pipeline)
        assert sorted(seq for own in bins for seq in own) == list(range(len(lengths)))
        assert all(own and sum(lengths[seq] for seq in own) <= pipeline.max_tokens for own in bins)
        microbatches = [[lengths[seq] for seq in own] for own in bins]
        slowest = max((microbatch_s(own, pipeline) for own in microbatches), default=0.0)
        bound = (pipeline.stages - 1 + len(microbatches)) * slowest  # Eq. 1
        assert pipeline.bound_s(lengths) <= bound * (1 + 1e-9)
        assert clock_s(microbatches, pipeline) <= bound * (1 + 1e-9)


def test_the_program_packs_more_evenly_within_its_nodes() -> None:
    """Items of 5, 4, 3, 3 and 3 s into two microbatches: the longest first leaves 10 and 8 s."""
    pipeline = PipelineCost(0.0, 1.0, 5.0, 2, 10)
    lengths = [5, 4, 3, 3, 3]
    assert [sum(lengths[seq] for seq in own) for own in pack(lengths, pipeline)] == [8, 10]
    exactly = pack(lengths, pipeline, node_limit=20)
    assert sorted(sum(lengths[seq] for seq in own) for own in exactly) == [9, 9]
    # Three of 6 need three microbatches of 10, which the longest first finds; two hold none of them.
    assert pack([6, 6, 6], PipelineCost(0, 1, 100, 2, 10), node_limit=5) == ((0,), (1,), (2,))
    # The longest first needs four of 10 tokens, the program three.
    tight = [6, 5, 5, 4, 4, 3, 3]
    one = PipelineCost(0, 1, 1, 1, 10)
    assert (len(pack(tight, one)), len(pack(tight, one, node_limit=20))) == (4, 3)


def test_more_microbatches_than_the_range_where_none_of_it_is_feasible() -> None:
    # 3 x 6 tokens need three microbatches of 10, though 18 tokens would fill only two.
    assert pack([6, 6, 6], PipelineCost(0, 1, 100, 2, 10)) == ((0,), (1,), (2,))


def test_a_pipeline_of_one_stage_runs_as_few_microbatches_as_hold_its_sequences() -> None:
    assert len(pack([6, 3, 3, 2, 2], PipelineCost(0, 1, 100, 1, 16))) == 1
    assert len(pack([6, 3, 3, 2, 2], PipelineCost(0, 1, 1e-3, 1, 8))) == 2


@pytest.mark.parametrize(("stages", "count"), [(1, 3), (4, 2), (3, 7), (4, 4)])
def test_the_clock_is_the_simulators(stages: int, count: int) -> None:
    pipeline = PipelineCost(0.0, 1.0, 0.5, stages, 100)
    lengths = [[int(n)] for n in np.random.default_rng(count).integers(1, 90, count)]

    def each(stage: int, step: ChunkPass, begin: np.ndarray) -> np.ndarray:
        return begin + (lengths[step.microbatch][0] + 0.5) * (2 / 3 if step.backward else 1 / 3)

    clocks = run(stages, count, 1, 1, each, lambda _: np.zeros(1))
    assert clock_s(lengths, pipeline) == pytest.approx(clocks.total_s)


def test_util_tokens_is_the_first_length_near_the_best() -> None:
    util = util_tokens(TP8)

    def per_token(length: int) -> float:
        return (TP8.sequence_s(length) + TP8.c) / length

    best = min(per_token(length) for length in range(1, TP8.max_tokens + 1, 7))
    assert per_token(util) <= best / 0.85 * (1 + 1e-6) < per_token(util - 1) * (1 + 1e-6)
