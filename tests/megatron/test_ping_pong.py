"""Microbatches as two nano-batches interleaved: losses of one rank, and of the planner without."""

import re
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_balance.errors import ConfigError
from megatron_balance.megatron import ping_pong
from tests.megatron.conftest import EXPERTS, MODEL, Run, Train, assert_same_training, at_once, loaded_run, refusal
from tests.megatron.test_arguments import parse
from tests.support.megatron_run import Result

# Eight samples a step: one microbatch of eight ranks, two of four.
EIGHT = {"global-batch-size": 8, "context-parallel-size": 1}
STEPS = 2


def two_nodes(num_ranks: int) -> dict[str, Any]:
    return {"cluster": {"ranks_per_node": num_ranks // 2}}


def interleaves(run: Run, num_ranks: int, forwards: int = MODEL["num-layers"]) -> None:
    # Every microbatch ran as two: each layer attended twice, forward (`forwards` in all of a
    # nano-batch) and backward.
    for step in run.steps:
        nano_batches = 2 * step["num_microbatches"]
        assert step["counters"]["forward_calls"] == [forwards * nano_batches] * num_ranks
        assert step["counters"]["backward_calls"] == [MODEL["num-layers"] * nano_batches] * num_ranks
        assert step["num_sequences"] > step["num_microbatches"]


@pytest.fixture(scope="module")
def one_rank(train: Train) -> Run:
    run = train(1, flags=at_once({**EIGHT, "train-iters": STEPS}))
    assert len(run.steps) == STEPS
    return run


def test_replayed_and_recomputed_backwards_train_the_same(train: Train, one_rank: Run) -> None:
    # Planned ahead, as two plans for each microbatch; of two layers one is computed again.
    again = {"recompute-granularity": "full", "recompute-method": "block", "recompute-num-layers": 1}
    flags = {**EIGHT, **again, "train-iters": STEPS}
    run = train(4, "distca", flags, config={**two_nodes(4), "backward": "replay", "plan_ahead": True})
    assert_same_training(run, one_rank)
    interleaves(run, 4, MODEL["num-layers"] + 1)
    assert "planning on the spot" not in run.result.log(0)


def test_any_planner_with_both_layers_around_it(train: Train, one_rank: Run) -> None:
    config = {**two_nodes(4), "ping_pong": True, "routing": "always", "remap": True}
    planner = {"name": "zeppelin", "slack": 2.0, "rule": "groups", "group_size": 1}
    run = train(4, planner, {**EIGHT, "train-iters": STEPS}, config=config)
    assert_same_training(run, one_rank)
    interleaves(run, 4)
    assert min(sum(run.column("remapped_tokens")), sum(run.column("routed_transfers"))) > 0


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
BIASED: dict[str, Any] = {"moe-router-score-function": "sigmoid", "moe-router-enable-expert-bias": True}
BIASED |= {"moe-router-bias-update-rate": 0.05}
# Coefficients that show in the gradient, so that one row too many does.
BALANCED: dict[str, Any] = {"moe-router-load-balancing-type": ["aux_loss", "global_aux_loss"]}
BALANCED |= {"moe-aux-loss-coeff": [0.2, 0.2], "moe-z-loss-coeff": 1e-2}
SHARED = {"expert-model-parallel-size": 2, "expert-tensor-parallel-size": 1}
IN_PARALLEL = {"tensor-model-parallel-size": 2, "sequence-parallel": True, "context-parallel-size": 2}
RECOMPUTED = {"recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 1}


@pytest.fixture(scope="module")
def loaded(train: Train, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Run]:
    flags = {**EXPERTS, **BIASED, **BALANCED, **TWO, "moe-shared-expert-intermediate-size": 32}
    return loaded_run(train, tmp_path_factory.mktemp("checkpoint"), flags, whole=True)


def logged(result: Result, name: str) -> list[float]:
    printed = [re.findall(rf"iteration +\d+/.* {name}: (\S+)", result.log(rank)) for rank in range(len(result.codes))]
    return [float(value) for values in printed for value in values]


def test_the_losses_of_a_router_are_those_of_whole_microbatches(
    train: Train, loaded: tuple[dict[str, Any], Run]
) -> None:
    # With one replica they are taken over the tokens of a microbatch, wherever these are: on
    # tensor-parallel ranks that cut their rows and share experts.
    flags, one = loaded
    again = {"recompute-granularity": "selective", "recompute-modules": "mlp"}
    run = train(4, "distca", {**flags, **SHARED, **IN_PARALLEL, **again}, config={"cluster": {"ranks_per_node": 1}})
    assert_same_training(run, one)
    interleaves(run, 2)
    for name in ("load_balancing_loss", "global_load_balancing_loss"):
        assert logged(run.result, name) == pytest.approx(logged(one.result, name), rel=1e-5)
        assert len(logged(run.result, name)) == EXPERT_STEPS


def test_stages_that_attend_together_route_half_batches(train: Train, loaded: tuple[dict[str, Any], Run]) -> None:
    # Tick by tick, with a stage's layers computed again in the backward, sequence-parallel rows
    # among them.
    flags, one = loaded
    parallel = {**IN_PARALLEL, "pipeline-model-parallel-size": 2}
    run = train(8, "distca", {**flags, **SHARED, **parallel, **RECOMPUTED}, config={"cluster": {"ranks_per_node": 2}})
    assert_same_training(run, one)
    ticks = run.steps[0]["num_ticks"] // 2
    for step in run.steps:
        assert set(step["counters"]["backward_calls"]) == {2 * ticks}, "one layer, two nano-batches"
        assert set(step["counters"]["forward_calls"]) == {2 * 2 * ticks}, "and each computed again"
    name = "load_balancing_loss"
    assert logged(run.result, name) == pytest.approx(logged(one.result, name), rel=1e-5)


def test_a_stage_behind_the_first_knows_its_padding(train: Train, loaded: tuple[dict[str, Any], Run]) -> None:
    # Microbatches in one piece under Megatron's own schedule, rows cut by sequence parallelism.
    flags, one = loaded
    parallel = {**IN_PARALLEL, "pipeline-model-parallel-size": 2, "context-parallel-size": 1}
    run = train(4, "te_ring", {**flags, **parallel, "expert-tensor-parallel-size": 1})
    assert_same_training(run, one)


def test_replicas_share_experts(train: Train, loaded: tuple[dict[str, Any], Run]) -> None:
    # Replicas take a load-balancing loss apart, over the tokens that a plan gave each: without it
    # nothing differs, with it little.
    unbalanced = {**loaded[0], "moe-router-load-balancing-type": "none", "moe-aux-loss-coeff": 0}
    balanced = {**loaded[0], "moe-router-load-balancing-type": "aux_loss", "moe-aux-loss-coeff": 0.01}
    planner = {"name": "zeppelin", "slack": 2.0}
    config = {"cluster": {"ranks_per_node": 2}, "ping_pong": True}
    recomputed = {"recompute-granularity": "selective", "recompute-modules": "shared_experts"}
    replicas = {**SHARED, **recomputed, "context-parallel-size": 1, "micro-batch-size": 1}
    run = train(4, planner, {**unbalanced, **replicas}, config=config)
    assert_same_training(run, train(1, "te_ring", at_once(unbalanced)))
    interleaves(run, 4)
    pooled, one = train(4, planner, {**balanced, **replicas}, config=config), train(1, "te_ring", at_once(balanced))
    assert pooled.column("loss")[0] == pytest.approx(one.column("loss")[0], rel=1e-6), "the loss itself has no such"
    assert pooled.column("loss") == pytest.approx(one.column("loss"), rel=1e-3)


ALLTOALL = ("--num-experts", "8", "--moe-token-dispatcher-type", "alltoall")
DISTCA: Any = SimpleNamespace(ping_pong=True, planner=SimpleNamespace(name="distca"))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--moe-token-dispatcher-type", "flex"), "dispatcher-type flex has not been tried .* use alltoall"),
        (
            ("--recompute-granularity", "selective", "--recompute-modules", "moe"),
            "only mlp, moe_act, shared_experts can",
        ),
        (("--overlap-dispatch-backward-with-experts-wgrad",), "puts a layer's weight gradients off"),
        (("--hybrid-layer-pattern", "M*E"), "layers that exchange states"),
    ],
    ids=["flex", "moe", "wgrad", "hybrid"],
)
def test_what_is_not_exact_or_not_tried_is_refused(words: tuple[str, ...], sentence: str) -> None:
    assert ping_pong.wanted(parse(*ALLTOALL), DISTCA)
    with pytest.raises(ConfigError, match=sentence):
        ping_pong.wanted(parse(*ALLTOALL, *words), DISTCA)
    for name in ("head_wise_attn_gate", "moe_n_hash_layers"):  # of a layer of the branch dev
        args = parse(*ALLTOALL)
        setattr(args, name, 1)
        with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')}"):
            ping_pong.wanted(args, DISTCA)
