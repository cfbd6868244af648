"""Training with microbatches as two nano-batches interleaved: the losses of one rank, and of the
same planner without.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.megatron.conftest import MODEL, Run, Train, assert_same_training, at_once, refusal, started
from tests.support.megatron_run import Result

pytestmark = pytest.mark.megatron

EIGHT = {"global-batch-size": 8, "context-parallel-size": 1}
"""Eight samples a step: one microbatch of eight ranks, two of four."""
STEPS = 6


def two_nodes(num_ranks: int) -> dict[str, Any]:
    return {"cluster": {"ranks_per_node": num_ranks // 2}}


def ping_pong(run: Run, num_ranks: int, forwards: int = MODEL["num-layers"]) -> None:
    """Every microbatch ran as two: each layer attended twice, forward (`forwards` in all of a
    nano-batch) and backward.
    """
    for step in run.steps:
        nano_batches = 2 * step["num_microbatches"]
        assert step["counters"]["forward_calls"] == [forwards * nano_batches] * num_ranks
        assert step["counters"]["backward_calls"] == [MODEL["num-layers"] * nano_batches] * num_ranks
        assert step["num_sequences"] > step["num_microbatches"]


@pytest.fixture(scope="module")
def one_rank(train: Train) -> Run:
    """Of the model that learns in test_parity.py."""
    run = train(1, flags=at_once({**EIGHT, "train-iters": STEPS}))
    assert len(run.steps) == STEPS
    return run


@pytest.mark.product  # four ranks, below, stand for them
def test_eight_ranks_train_like_one(train: Train, one_rank: Run) -> None:
    """With planner distca nano-batches are the default."""
    run = train(8, "distca", {**EIGHT, "train-iters": 6}, config={**two_nodes(8), "backward": "keep"})
    assert_same_training(run, Run(one_rank.result, one_rank.steps[:6]))
    ping_pong(run, 8)


def test_replayed_and_recomputed_backwards_train_the_same(train: Train, one_rank: Run) -> None:
    """Planned ahead, as two plans for each microbatch; of two layers one is computed again."""
    again = {"recompute-granularity": "full", "recompute-method": "block", "recompute-num-layers": 1}
    flags = {**EIGHT, **again, "train-iters": 5}
    run = train(4, "distca", flags, config={**two_nodes(4), "backward": "replay", "plan_ahead": True})
    assert_same_training(run, Run(one_rank.result, one_rank.steps[:5]))
    ping_pong(run, 4, MODEL["num-layers"] + 1)
    assert "planning on the spot" not in run.result.log(0)


def test_one_stream_trains_the_same(train: Train, one_rank: Run) -> None:
    run = train(4, "distca", {**EIGHT, "train-iters": 2}, config={**two_nodes(4), "ping_pong": False})
    assert_same_training(run, Run(one_rank.result, one_rank.steps[:2]))
    assert run.steps[0]["counters"]["forward_calls"] == [2 * MODEL["num-layers"]] * 4


def test_any_planner_with_both_layers_around_it(train: Train, one_rank: Run) -> None:
    config = {**two_nodes(4), "ping_pong": True, "routing": "always", "remap": True}
    run = train(
        4,
        {"name": "zeppelin", "slack": 2.0, "rule": "groups", "group_size": 1},
        {**EIGHT, "train-iters": 2},
        config=config,
    )
    assert_same_training(run, Run(one_rank.result, one_rank.steps[:2]))
    ping_pong(run, 4)
    assert min(sum(run.column("remapped_tokens")), sum(run.column("routed_transfers"))) > 0


def test_tensor_parallel_ranks_share_both_nano_batches(train: Train, tmp_path: Path) -> None:
    """Two tensor-parallel by four data-parallel ranks, a microbatch a step."""
    load = started(train, tmp_path, {**EIGHT, "global-batch-size": 4, "train-iters": 5})
    flags = {"sequence-parallel": True, "recompute-granularity": "selective", "recompute-modules": "mlp"}
    run = train(8, "distca", {**load, "tensor-model-parallel-size": 2, **flags}, config=two_nodes(4))
    assert_same_training(run, train(1, "te_ring", at_once(load)))
    assert len(run.steps) == 5
    ping_pong(run, 4)  # of one tensor-parallel coordinate


def test_what_cannot_be_taken_apart_is_refused_with_one_sentence(train: Train) -> None:
    def whole(result: Result) -> None:
        assert set(result.codes) == {0}, result.tail(result.failed or 0)
        assert "microbatches run whole, not as two nano-batches: --recompute-granularity selective" in result.log(0)

    flags = {"recompute-granularity": "selective", "train-iters": 1}
    train(2, "te_ring", flags, config={"ping_pong": True}, expect=refusal("recompute whole layers"), deadline_s=60)
    train(2, "distca", flags, expect=whole)
