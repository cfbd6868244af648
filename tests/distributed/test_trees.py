"""Rollouts trained as trees over ranks give the gradients of each rollout by itself."""

from collections.abc import Iterator

import pytest
import torch

from megatron_balance.workloads.rollouts import as_trees
from tests.support import tree_jobs
from tests.support.pool import Pool
from tests.support.tree_jobs import Case

FP32 = torch.float32


@pytest.fixture(scope="module", params=[2, 4])
def world(request: pytest.FixtureRequest) -> Iterator[Pool]:
    ranks = Pool(timeout_s=120.0, num_ranks=request.param)
    yield ranks
    ranks.close()


CASES = [
    Case(),
    Case("distca", backward="replay", options=(("block", 8),)),
    Case("te_ring", loss="linear"),
    Case("ulysses", loss="linear", dtype=FP32, backward="replay"),
    Case("zeppelin", dtype=FP32, fsdp=True),
    # A planner of whole steps, and one that asks others.
    Case("wlb_llm", options=(("thresholds", ()),)),
    Case("auto", loss="linear"),
]
MODELS = [
    Case(model="Llama", fsdp=True),
    Case("distca", "Qwen3", loss="linear", dtype=FP32, options=(("block", 8),)),
    Case(model="GptOss"),
]
MORE_MODELS = [
    Case("distca", "Qwen3", loss="linear", options=(("block", 8),)),
    Case("zeppelin", "Qwen3", dtype=FP32, backward="replay"),
    Case("te_ring", "Llama", loss="linear", dtype=FP32),
]


def most(case: Case) -> float:
    # The most that a loss or a gradient may differ, relative to the largest of its parameter. Where
    # a clipped ratio multiplies, fp32 rounds the exponential of a difference.
    if case.dtype == torch.float64:
        return 1e-12
    return 1e-6 if case.loss == "linear" else 1e-4


def wrong(world: Pool, cases: list[Case]) -> dict[str, float]:
    # Of the cases that differ by more than they may, the largest difference.
    expected = [tree_jobs.alone(case.model, case.loss, world.num_ranks) for case in cases]
    found: dict[str, float] = {}
    for trained in world.run(tree_jobs.train, world.num_ranks, cases):
        for case, (loss, gradients, _), (whole, alone) in zip(cases, trained, expected, strict=True):
            each = [float((a - b).abs().max() / b.abs().max()) for a, b in zip(gradients, alone, strict=True)]
            worst = max([*each, abs(loss - whole) / abs(whole)])
            if not worst <= most(case):
                found[case.name()] = worst
    return found


def test_gradients_are_those_of_rollouts_one_by_one(world: Pool) -> None:
    assert wrong(world, CASES) == {}


def test_trees_wait_and_are_planned_ahead_and_another_planner_goes_on(world: Pool) -> None:
    whole, alone = tree_jobs.alone("gpt", "clipped", world.num_ranks)
    counts = [len(of_rank) for of_rank in tree_jobs.drawn(world.num_ranks)]
    for count, runs in zip(counts, world.run(tree_jobs.wait, world.num_ranks, [None, "zeppelin"]), strict=True):
        assert runs[0].held[1] > 0, "nothing waits at the resume"
        for waited in runs:
            trained = [number for step in waited.trained for number in step]
            assert sorted(trained) == list(range(count)), "every rollout once"
            assert waited.held[-1] == 0
            assert waited.ahead >= 1
            assert waited.loss == pytest.approx(whole, rel=1e-12)
            for ours, theirs in zip(waited.gradients, alone, strict=True):
                assert float((ours - theirs).abs().max() / theirs.abs().max()) < 1e-12


@pytest.mark.parametrize("cases", [MODELS, pytest.param(MORE_MODELS, marks=pytest.mark.product)], ids=len)
def test_models_of_transformers_take_trees_as_they_are(world: Pool, cases: list[Case]) -> None:
    pytest.importorskip("transformers")
    assert wrong(world, cases) == {}


# GRPO of a step on eight ranks, as `tree_jobs.grpo` says it.
GRPO = [
    Case(planner, model, loss, dtype, fsdp=True)
    for planner, model in (("zeppelin", "Llama"), ("distca", "Qwen3"))
    for loss, dtype in (("clipped", torch.float64), ("clipped", FP32), ("linear", torch.float64), ("linear", FP32))
]


@pytest.mark.product
def test_grpo_on_eight_ranks_is_that_of_rollouts_one_by_one() -> None:
    pytest.importorskip("transformers")
    ranks = Pool(timeout_s=300.0, num_ranks=8)
    try:
        assert wrong(ranks, GRPO) == {}
    finally:
        ranks.close()


def test_a_prefix_is_a_full_root_and_positions_in_three_dimensions_go_through(world: Pool) -> None:
    pytest.importorskip("transformers")
    ranks = world.run(tree_jobs.prefixes, world.num_ranks)
    assert max(worst for worst, *_ in ranks) < 1e-6, "eager attention has its softmax in fp32"
    assert max(counts for _, counts, *_ in ranks) > 0.1, "a prefix matters"
    for *_, in_two, plain in ranks:
        assert "one block of all tokens of a type, which are several full segments of a tree" in in_two
        assert "blocks that see themselves both ways, other than the full segments of its trees" in plain
    for worst, counts in world.run(tree_jobs.three_positions, world.num_ranks):
        assert worst < 1e-5, "eager attention has its softmax in fp32"
        assert counts > 1e-3


@pytest.mark.parametrize("window", [8, 512])
def test_image_blocks_of_gemma_are_full_segments(world: Pool, window: int) -> None:
    pytest.importorskip("transformers")
    ranks = world.run(tree_jobs.images, world.num_ranks, window)
    assert max(worst for worst, *_ in ranks) < 1e-6, "eager attention has its softmax in fp32"
    assert max(counts for _, counts, *_ in ranks) > 0.1, "blocks matter"
    for *_, windows, told in ranks:
        assert windows == ({0, 8} if window == 8 else {0})
        assert "blocks that see themselves both ways, other than the full segments of its trees" in told


@pytest.mark.parametrize("planner", ["zeppelin", "ulysses"])
def test_results_come_back_along_the_paths_of_rollouts(world: Pool, planner: str) -> None:
    given = tree_jobs.drawn(world.num_ranks)
    passes = [0.0, 0.0]  # rows, and how often rollouts pass them
    for of_rank in given:
        sharing = as_trees([each.tokens for each in of_rank]).sharing
        passes = [passes[0] + sharing.rows, passes[1] + sharing.tokens]
    ranks = world.run(tree_jobs.gather, world.num_ranks, planner)
    assert all(right for right, _ in ranks), "tokens, positions and labels are those of the rollout"
    gradients = [each for _, of_rank in ranks for each in of_rank]
    assert len(gradients) == passes[0]
    # 3 for each of two columns, summed over ranks' losses: one of them has it, times all ranks.
    assert sum(gradients) == 6 * world.num_ranks * passes[1]


@pytest.mark.parametrize(
    ("given", "weights", "told"),
    [
        ([[[1, 2]], [[]]], [None, None], "rollout 0: expected token ids"),
        (
            [[[1, 2]], [[1, 2, 3]]],
            [[[1.0, 1.0]], None],
            "expected documents with the same tensors for each token on all ranks",
        ),
        ([[[1, 2]], []], [[[1.0]], None], "weights of rollout 0: expected 2 finite numbers"),
    ],
)
def test_what_one_rank_gives_wrong_ends_the_step_on_all(world: Pool, given: list, weights: list, told: str) -> None:  # pyright: ignore
    none = [[] for _ in range(world.num_ranks - 2)]
    ranks = world.run(tree_jobs.tell, world.num_ranks, "zeppelin", given + none, weights + [None for _ in none])
    assert any(told in each for each in ranks), ranks
    assert all(each != "none" for each in ranks), ranks
