"""All pipeline stages attending together, tick by tick: the losses of one rank, and idle stages that work."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_balance.errors import ConfigError
from megatron_balance.megatron.arguments import check_joint_arguments
from megatron_balance.megatron.pipeline_ticks import backward_calls
from tests.megatron.conftest import Run, Train, assert_same_training, started
from tests.megatron.test_arguments import parse
from tests.megatron.test_pipeline import EVALUATION, LAYERS
from tests.megatron.test_training import validation_losses

pytestmark = pytest.mark.megatron

STEPS, BATCH = 20, 8
# Blocks so small that these documents are cut, and a balance so strict that they must be.
DISTCA = {"name": "distca", "block": 16, "tolerance": 0.02}
TWO_NODES = {"cluster": {"ranks_per_node": 4}}
OVERLAPPED = {"overlap-grad-reduce": True, "overlap-param-gather": True}
RECOMPUTED = {"recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 1}


@pytest.fixture(scope="module")
def loaded(train: Train, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Run]:
    """Flags to start from one rank's weights, and one rank's run from there."""
    flags = started(train, tmp_path_factory.mktemp("checkpoint"), {"num-layers": LAYERS, "global-batch-size": BATCH})
    return flags, train(1, "te_ring", flags)


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "PP2 x DP4": (2, {}),
    "PP4 x DP2": (4, {}),
    "PP2 x DP4, interleaved": (
        2,
        {"num-virtual-stages-per-pipeline-rank": 2, "train-iters": 6, "use-distributed-optimizer": True, **OVERLAPPED},
    ),
    "PP2 x TP2 x DP2": (2, {"tensor-model-parallel-size": 2, "sequence-parallel": True, "train-iters": 4, **RECOMPUTED}),
}


@pytest.mark.parametrize(("stages", "flags"), LAYOUTS.values(), ids=LAYOUTS)
def test_stages_that_attend_together_train_like_one_rank(
    train: Train, loaded: tuple[dict[str, Any], Run], stages: int, flags: dict[str, Any]
) -> None:
    start, one = loaded
    parallel = {"pipeline-model-parallel-size": stages, "context-parallel-size": 1, **flags}
    run = train(8, DISTCA, {**start, **parallel}, config={**TWO_NODES, "plan_ahead": True})
    steps = flags.get("train-iters", STEPS)
    assert_same_training(run, Run(one.result, one.steps[:steps]))
    assert run.column("step") == list(range(1, steps + 1))
    assert run.column("plan_wait_ms")[0] == run.column("plan_ms")[0], "the first step is planned on the spot"
    assert sum(run.column("plan_wait_ms")[2:]) < sum(run.column("plan_ms")[2:])
    assert "planning on the spot" not in run.result.log(0)
    chunks = flags.get("num-virtual-stages-per-pipeline-rank", 1)
    replicas = 8 // stages // flags.get("tensor-model-parallel-size", 1)
    assert_ticks_ran(
        run, 2 * (BATCH // replicas * chunks + stages - 1), LAYERS // (stages * chunks), 1 + (RECOMPUTED.keys() <= flags.keys())
    )


def assert_ticks_ran(run: Run, num_ticks: int, layers: int, forwards: int) -> None:
    """Every rank attends in every layer of every tick, also for others while its own stage has nothing to do."""
    for step in run.steps:
        counted = step["counters"]
        assert step["num_ticks"] == num_ticks
        calls = num_ticks // 2 * layers
        assert counted["backward_calls"] == [calls] * len(counted["backward_calls"])
        assert counted["forward_calls"] == [forwards * calls] * len(counted["forward_calls"])
    assert all(sum(step["counters"]["idle_tasks"][rank] for step in run.steps) > 0 for rank in range(len(counted["idle_tasks"])))


def test_a_resumed_run_ends_with_the_same_bits(train: Train, tmp_path: Path) -> None:
    flags = {"num-layers": LAYERS, "global-batch-size": 4, "train-iters": 4, "ckpt-format": "torch_dist", **EVALUATION}
    flags |= {"pipeline-model-parallel-size": 2, "context-parallel-size": 1, "save": tmp_path, "load": tmp_path, "save-interval": 2}
    whole = train(4, DISTCA, flags)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    resumed = train(4, DISTCA, {**flags, "save": None})
    assert resumed.column("step") == [3, 4]
    for name in ("loss", "grad_norm", "fingerprint"):
        assert resumed.column(name) == whole.column(name)[2:]
    losses = validation_losses(whole.result.log(3))
    assert len(losses) == 3
    assert validation_losses(resumed.result.log(3)) == losses[1:]


REFUSED = {
    "--pipeline-model-parallel-layout": ("--decoder-first-pipeline-num-layers", "3"),
    "--num-layers": ("--num-layers", "3"),
    "--defer-embedding-wgrad-compute": ("--defer-embedding-wgrad-compute",),
}


@pytest.mark.parametrize(("sentence", "words"), REFUSED.items(), ids=REFUSED)
def test_flags_that_keep_stages_apart_are_refused(sentence: str, words: tuple[str, ...]) -> None:
    args = parse("--num-layers", "4", "--pipeline-model-parallel-size", "2", *words)
    args.virtual_pipeline_model_parallel_size = None
    with pytest.raises(ConfigError, match=f"cannot attend together: .*{sentence}.*pipeline: stages"):
        check_joint_arguments(args)


@pytest.mark.parametrize(
    ("options", "calls"),
    [
        ({}, "bbb"),
        ({"recompute_granularity": "selective", "recompute_modules": ["layernorm"]}, "bbb"),
        ({"recompute_granularity": "selective"}, "fbfbfb"),
        ({"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2}, "fbffbb"),
        ({"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2}, "bfbfb"),
        ({"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 9}, "fbfbfb"),
    ],
)
def test_an_idle_stage_makes_the_calls_of_a_recomputed_backward(options: dict[str, Any], calls: str) -> None:
    config = SimpleNamespace(**{"recompute_granularity": None, "recompute_modules": ["core_attn"], **options})
    assert backward_calls(config, 3) == tuple(call == "b" for call in calls)
