"""Training with microbatches as two nano-batches interleaved: the losses of one rank, and of the
same planner without."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_balance.errors import ConfigError
from megatron_balance.megatron import ping_pong
from tests.megatron.conftest import (
    EXPERTS,
    MODEL,
    Run,
    Train,
    assert_same_training,
    at_once,
    loaded_run,
    refusal,
    started,
)
from tests.megatron.test_arguments import parse
from tests.support.megatron_run import Result

# Eight samples a step: one microbatch of eight ranks, two of four.
EIGHT = {"global-batch-size": 8, "context-parallel-size": 1}
STEPS = 3


def two_nodes(num_ranks: int) -> dict[str, Any]:
    return {"cluster": {"ranks_per_node": num_ranks // 2}}


def interleaves(run: Run, num_ranks: int, forwards: int = MODEL["num-layers"]) -> None:
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
    run = train(8, "distca", {**EIGHT, "train-iters": STEPS}, config={**two_nodes(8), "backward": "keep"})
    assert_same_training(run, one_rank)
    interleaves(run, 8)


def test_replayed_and_recomputed_backwards_train_the_same(train: Train, one_rank: Run) -> None:
    """Planned ahead, as two plans for each microbatch; of two layers one is computed again."""
    again = {"recompute-granularity": "full", "recompute-method": "block", "recompute-num-layers": 1}
    flags = {**EIGHT, **again, "train-iters": STEPS}
    run = train(4, "distca", flags, config={**two_nodes(4), "backward": "replay", "plan_ahead": True})
    assert_same_training(run, one_rank)
    interleaves(run, 4, MODEL["num-layers"] + 1)
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
    interleaves(run, 4)
    assert min(sum(run.column("remapped_tokens")), sum(run.column("routed_transfers"))) > 0


def test_tensor_parallel_ranks_share_both_nano_batches(train: Train, tmp_path: Path) -> None:
    """Two tensor-parallel by four data-parallel ranks, a microbatch a step."""
    load = started(train, tmp_path, {**EIGHT, "global-batch-size": 4, "train-iters": 2})
    flags = {"sequence-parallel": True, "recompute-granularity": "selective", "recompute-modules": "mlp"}
    run = train(8, "distca", {**load, "tensor-model-parallel-size": 2, **flags}, config=two_nodes(4))
    assert_same_training(run, train(1, "te_ring", at_once(load)))
    interleaves(run, 4)  # of one tensor-parallel coordinate


def test_what_cannot_be_taken_apart_is_refused_with_one_sentence(train: Train) -> None:
    def whole(result: Result) -> None:
        assert set(result.codes) == {0}, result.tail(result.failed or 0)
        assert "microbatches run whole, not as two nano-batches: --recompute-granularity selective" in result.log(0)

    flags = {"recompute-granularity": "selective", "train-iters": 1}
    train(2, "te_ring", flags, config={"ping_pong": True}, expect=refusal("recompute whole layers"), deadline_s=60)
    train(2, "distca", flags, expect=whole)


# Experts and two nano-batches interleaved: the losses of one rank that takes microbatches whole,
# the router's own among them.

EXPERT_STEPS = 2
# Two microbatches a step, of two samples, so that none is one document; a router's losses are
# averages over microbatches.
TWO = {"micro-batch-size": 2, "global-batch-size": 4, "train-iters": EXPERT_STEPS}
BIASED = {
    "moe-router-score-function": "sigmoid",
    "moe-router-enable-expert-bias": True,
    "moe-router-bias-update-rate": 0.05,
}
# Coefficients that show in the gradient, so that one row too many does.
BALANCED = {
    "moe-router-load-balancing-type": ["aux_loss", "global_aux_loss"],
    "moe-aux-loss-coeff": [0.2, 0.2],
    "moe-z-loss-coeff": 1e-2,
}
SHARED = {"expert-model-parallel-size": 2, "expert-tensor-parallel-size": 1}
RECOMPUTED = {"recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 1}


@pytest.fixture(scope="module")
def loaded(train: Train, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Run]:
    flags = {**EXPERTS, **BIASED, **BALANCED, **TWO, "moe-shared-expert-intermediate-size": 32}
    return loaded_run(train, tmp_path_factory.mktemp("checkpoint"), flags, whole=True)


def logged(result: Result, name: str) -> list[float]:
    """The values that Megatron printed of one of its losses."""
    printed = [re.findall(rf"iteration +\d+/.* {name}: (\S+)", result.log(rank)) for rank in range(len(result.codes))]
    return [float(value) for values in printed for value in values]


def ran_as_two(run: Run, layers: int, again: int) -> bool:
    """Every microbatch ran as two: each layer of a stage attended twice, and as often again in a
    recomputed backward.
    """
    calls = [
        (step["counters"]["forward_calls"], step["counters"]["backward_calls"], step["num_microbatches"])
        for step in run.steps
    ]
    return all(set(f) == {(1 + again) * 2 * m * layers} and set(b) == {2 * m * layers} for f, b, m in calls)


@pytest.mark.parametrize(
    "sharing", [pytest.param({}, id="each its own"), pytest.param(SHARED, id="two share", marks=pytest.mark.product)]
)
def test_the_losses_of_a_router_are_those_of_whole_microbatches(
    train: Train, loaded: tuple[dict[str, Any], Run], sharing: dict[str, Any]
) -> None:
    """With one replica they are taken over the tokens of a microbatch, wherever these are."""
    flags, one = loaded
    run = train(4, "distca", {**flags, **sharing}, config={"cluster": {"ranks_per_node": 2}})
    assert_same_training(run, one)
    assert ran_as_two(run, MODEL["num-layers"], again=0)
    for name in ("load_balancing_loss", "global_load_balancing_loss"):
        assert logged(run.result, name) == pytest.approx(logged(one.result, name), rel=1e-5)
        assert len(logged(run.result, name)) == EXPERT_STEPS


def test_stages_that_attend_together_route_half_batches(train: Train, loaded: tuple[dict[str, Any], Run]) -> None:
    """Tick by tick, with a stage's layers computed again in the backward, sequence-parallel rows
    among them.
    """
    flags, one = loaded
    parallel = {
        "pipeline-model-parallel-size": 2,
        "tensor-model-parallel-size": 2,
        "sequence-parallel": True,
        "context-parallel-size": 2,
    }
    run = train(8, "distca", {**flags, **SHARED, **parallel, **RECOMPUTED}, config={"cluster": {"ranks_per_node": 2}})
    assert_same_training(run, one)
    ticks = run.steps[0]["num_ticks"] // 2
    assert all(set(step["counters"]["backward_calls"]) == {2 * ticks} for step in run.steps), (
        "one layer, two nano-batches"
    )
    name = "load_balancing_loss"
    assert logged(run.result, name) == pytest.approx(logged(one.result, name), rel=1e-5)


def test_a_stage_behind_the_first_knows_its_padding(train: Train, loaded: tuple[dict[str, Any], Run]) -> None:
    """Microbatches in one piece under Megatron's own schedule, rows cut by sequence parallelism."""
    flags, one = loaded
    parallel = {
        "pipeline-model-parallel-size": 2,
        "tensor-model-parallel-size": 2,
        "sequence-parallel": True,
        "context-parallel-size": 1,
    }
    run = train(4, "te_ring", {**flags, **parallel, "expert-tensor-parallel-size": 1})
    assert_same_training(run, one)


def test_replicas_share_experts(train: Train, loaded: tuple[dict[str, Any], Run]) -> None:
    """Replicas take a load-balancing loss apart, so without it."""
    unbalanced = {**loaded[0], "moe-router-load-balancing-type": "none", "moe-aux-loss-coeff": 0}
    config = {"cluster": {"ranks_per_node": 2}, "ping_pong": True}
    recomputed = {"recompute-granularity": "selective", "recompute-modules": "shared_experts"}
    flags = {**unbalanced, **SHARED, **recomputed, "context-parallel-size": 1, "micro-batch-size": 1}
    run = train(4, {"name": "zeppelin", "slack": 2.0}, flags, config=config)
    assert_same_training(run, train(1, "te_ring", at_once(unbalanced)))
    assert ran_as_two(run, MODEL["num-layers"], again=0)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ("--moe-token-dispatcher-type", "flex"),
            "--moe-token-dispatcher-type flex has not been tried .* use alltoall",
        ),
        (
            ("--recompute-granularity", "selective", "--recompute-modules", "moe"),
            "of the modules only mlp, moe_act, shared_experts can be",
        ),
        (("--overlap-dispatch-backward-with-experts-wgrad",), "puts a layer's weight gradients off"),
    ],
    ids=["flex", "moe", "wgrad"],
)
def test_what_is_not_exact_or_not_tried_is_refused(words: tuple[str, ...], sentence: str) -> None:
    config: Any = SimpleNamespace(ping_pong=True, planner=SimpleNamespace(name="distca"))
    alltoall = ("--moe-token-dispatcher-type", "alltoall")
    assert ping_pong.wanted(parse("--num-experts", "8", *alltoall), config)
    with pytest.raises(ConfigError, match=sentence):
        ping_pong.wanted(parse("--num-experts", "8", *alltoall, *words), config)


@pytest.mark.parametrize("name", ["head_wise_attn_gate", "moe_n_hash_layers"])
def test_what_a_layer_of_the_branch_dev_does_beside_attention_is_refused(name: str) -> None:
    config: Any = SimpleNamespace(ping_pong=True, planner=SimpleNamespace(name="distca"))
    args = parse("--num-experts", "8", "--moe-token-dispatcher-type", "alltoall")
    setattr(args, name, 1)
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')}"):
        ping_pong.wanted(args, config)
