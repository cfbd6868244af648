"""Training with microbatches as two half batches in turns: the losses of one rank, and of the same planner without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.megatron.conftest import MODEL, Run, Train, assert_same_training, started
from tests.support.megatron_run import Result

pytestmark = pytest.mark.megatron

TWO_NODES = {"cluster": {"ranks_per_node": 4}}


def halved(run: Run, num_ranks: int) -> None:
    """Every microbatch ran as two: each layer attended twice, forward and backward."""
    for step in run.steps:
        calls = 2 * MODEL["num-layers"] * step["num_microbatches"]
        assert step["counters"]["forward_calls"] == step["counters"]["backward_calls"] == [calls] * num_ranks
        assert step["num_sequences"] > step["num_microbatches"]


EIGHT = {"global-batch-size": 8, "context-parallel-size": 1}
"""Eight samples a step: one microbatch of eight ranks, two of four."""


@pytest.fixture(scope="module")
def one_rank(train: Train) -> Run:
    run = train(1, flags=EIGHT)
    losses = run.column("loss")
    assert len(losses) == 20
    assert losses[-1] < 0.98 * losses[0], "a model that learns nothing would prove nothing"
    return run


@pytest.mark.parametrize(("policy", "steps"), [("keep", 20), ("replay", 5)])
def test_eight_ranks_train_like_one(train: Train, one_rank: Run, policy: str, steps: int) -> None:
    """With planner distca halves are the default; planned ahead, as two plans for each microbatch."""
    config = {**TWO_NODES, "backward": policy, "plan_ahead": policy == "replay"}
    run = train(8, "distca", {**EIGHT, "train-iters": steps}, config=config)
    assert_same_training(run, Run(one_rank.result, one_rank.steps[:steps]))
    halved(run, 8)
    assert "planning on the spot" not in run.result.log(0)


def test_one_stream_trains_the_same(train: Train, one_rank: Run) -> None:
    run = train(8, "distca", {**EIGHT, "train-iters": 2}, config={**TWO_NODES, "ping_pong": False})
    assert_same_training(run, Run(one_rank.result, one_rank.steps[:2]))
    assert run.steps[0]["counters"]["forward_calls"] == [MODEL["num-layers"]] * 8


def test_any_planner_with_both_layers_around_it(train: Train, one_rank: Run) -> None:
    config = {**TWO_NODES, "ping_pong": True, "routing": "always", "remap": True}
    run = train(8, {"name": "zeppelin", "slack": 2.0}, {**EIGHT, "train-iters": 2}, config=config)
    assert_same_training(run, Run(one_rank.result, one_rank.steps[:2]))
    halved(run, 8)
    assert min(sum(run.column("remapped_tokens")), sum(run.column("routed_transfers"))) > 0


def test_tensor_parallel_ranks_share_both_halves(train: Train, tmp_path: Path) -> None:
    """Two tensor-parallel by four data-parallel ranks, with and without sequence parallelism and recomputation."""
    load = started(train, tmp_path, {**EIGHT, "train-iters": 2})
    reference = train(1, "te_ring", load)
    ways: dict[str, dict[str, Any]] = {
        "keep": {"sequence-parallel": True, "recompute-granularity": "selective", "recompute-modules": "mlp"},
        "replay": {"recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 1},
    }
    for policy, flags in ways.items():
        config = {"cluster": {"ranks_per_node": 2}, "backward": policy}
        run = train(8, "distca", {**load, "tensor-model-parallel-size": 2, **flags}, config=config)
        assert_same_training(run, reference)
        assert sum(run.steps[0]["counters"]["forward_calls"]) > 0


def test_pipeline_stages_hand_on_both_halves(train: Train, tmp_path: Path) -> None:
    load = started(train, tmp_path, {**EIGHT, "train-iters": 2})
    config = {"cluster": {"ranks_per_node": 2}, "ping_pong": True, "pipeline": "stages"}
    again = {"recompute-granularity": "full", "recompute-method": "block", "recompute-num-layers": 1}
    run = train(4, "te_ring", {**load, **again, "pipeline-model-parallel-size": 2}, config=config)
    assert_same_training(run, train(1, "te_ring", load))


def test_what_cannot_be_taken_apart_is_refused_with_one_sentence(train: Train) -> None:
    def refused(result: Result) -> None:
        assert result.codes == (2, 2)
        lines = [line for line in result.log(0).splitlines() if line.startswith("error")]
        assert len(lines) == 1
        assert "recompute whole layers" in lines[0]

    def whole(result: Result) -> None:
        assert set(result.codes) == {0}, result.tail(result.failed or 0)
        assert "microbatches run whole, not as two half batches: --recompute-granularity selective" in result.log(0)

    flags = {"recompute-granularity": "selective", "train-iters": 1}
    train(2, "te_ring", flags, config={"ping_pong": True}, expect=refused, deadline_s=60)
    train(2, "distca", flags, expect=whole)
