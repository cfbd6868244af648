"""Trees of rollouts in Megatron: the losses and gradients of the rollouts one by one."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_balance.errors import DataError
from megatron_balance.ir.forest import Segment, document
from megatron_balance.megatron import data
from megatron_balance.megatron.ways import way_reasons
from megatron_balance.planning.choice import load_config
from megatron_balance.training.tokens import from_bits
from tests.megatron.conftest import Run, Train, assert_same_training, refusal, started
from tests.megatron.test_arguments import EXPERTS, parse
from tests.megatron.test_families import LATENTS
from tests.support.megatron_run import Result
from tests.support.numbered_data import SCALE, rollouts_of
from tests.support.pipeline_runs import gradients, worst_gradient

STEPS, SAMPLES, VOCABULARY = 2, 4, 96
FLAGS: dict[str, Any] = {
    "train-iters": STEPS,
    "lr-decay-iters": STEPS,
    "global-batch-size": SAMPLES,
    "dataloader-type": "single",
}
SCRIPT: dict[str, Any] = {"data": "script"}


def test_trees_train_as_their_rollouts_one_by_one(train: Train, tmp_path: Path) -> None:
    given = started(train, tmp_path, FLAGS)
    # Weights are whole, so that the run without plans of trees has the same mean.
    apart = train(
        1, "te_ring", {**given, "context-parallel-size": 1, "micro-batch-size": SAMPLES}, config=SCRIPT, entry="apart"
    )
    two = {"context-parallel-size": 2}
    for planner, flags in (
        ("distca", two),  # two replicas of two ranks
        ("zeppelin", {**two, "tensor-model-parallel-size": 2, "sequence-parallel": True}),
        ("zeppelin", {**two, "pipeline-model-parallel-size": 2}),
    ):
        run = train(4, planner, {**given, **flags, "balance-trees": True}, config=SCRIPT, entry="trees")
        assert_same_training(run, apart)
        for step in range(1, STEPS + 1):
            assert worst_gradient(run.result.logs, apart.result.logs, step) < 1e-5, (planner, step)
        assert sum(run.column("num_tokens")) < 0.7 * sum(apart.column("num_tokens")), "shared rows are there once"
    assert_a_sum_is_divided_by_nothing(train, given, apart)


WINDOWS: dict[str, Any] = {"window-size": "15,0", "window-attn-skip-freq": "2"}
LATENT_LAYERS: dict[str, Any] = {**LATENTS, "kv-channels": 4, "rotary-base": 10000, "rotary-scaling-factor": 40}
LATENT_LAYERS |= {"mscale": 1.0, "mscale-all-dim": 1.0}


@pytest.mark.product
@pytest.mark.parametrize("model", [{}, WINDOWS, LATENT_LAYERS], ids=["plain", "windows", "latents"])
def test_trees_train_on_eight_ranks(train: Train, tmp_path: Path, model: dict[str, Any]) -> None:
    given = started(train, tmp_path, {**FLAGS, **model})
    apart = train(1, "te_ring", {**given, "micro-batch-size": SAMPLES}, config=SCRIPT, entry="apart")
    parallel: dict[str, Any] = {"context-parallel-size": 2, "pipeline-model-parallel-size": 2}
    latents = {"latent_kv": True, "ping_pong": False} if model is LATENT_LAYERS else {}
    parallel |= {} if latents else {"tensor-model-parallel-size": 2, "sequence-parallel": True}
    for planner in ("distca", "zeppelin"):
        config = {**SCRIPT, **latents, "pipeline": "stages"}
        run = train(8, planner, {**given, **parallel, "balance-trees": True}, config=config, entry="trees")
        assert_same_training(run, apart)
        for step in range(1, STEPS + 1):
            assert worst_gradient(run.result.logs, apart.result.logs, step) < 1e-5, (planner, step)


@pytest.mark.product
def test_trees_train_in_pipelines_side_by_side(train: Train, tmp_path: Path) -> None:
    given = started(train, tmp_path, FLAGS)
    alone = {"context-parallel-size": 1, "micro-batch-size": SAMPLES}
    apart = train(1, "te_ring", {**given, **alone}, config=SCRIPT, entry="apart")
    flags = {"context-parallel-size": 1, "pipeline-model-parallel-size": 2, "balance-trees": True}
    run = train(4, "hydraulis", {**given, **flags}, config=SCRIPT, entry="trees")
    assert_same_training(run, apart)
    for step in range(1, STEPS + 1):
        assert worst_gradient(run.result.logs, apart.result.logs, step) < 1e-5, step


@pytest.mark.product
def test_trees_train_with_experts_over_ranks(train: Train, tmp_path: Path) -> None:
    # A router decides by token, so a shared row goes to the experts of each rollout by itself.
    experts = {"num-experts": 8, "moe-router-topk": 2, "moe-token-dispatcher-type": "alltoall"}
    given = started(train, tmp_path, {**FLAGS, **experts, "moe-router-load-balancing-type": "none"})
    alone = {"context-parallel-size": 1, "micro-batch-size": SAMPLES}
    apart = train(1, "te_ring", {**given, **alone}, config=SCRIPT, entry="apart")
    flags = {"context-parallel-size": 2, "expert-model-parallel-size": 2, "balance-trees": True}
    run = train(4, "distca", {**given, **flags}, config=SCRIPT, entry="trees")
    assert_same_training(run, apart)


def assert_a_sum_is_divided_by_nothing(train: Train, given: dict[str, Any], apart: Run) -> None:
    # Weights that are no whole numbers, and below 0.
    flags = {**given, "context-parallel-size": 2, "balance-trees": "sum", "train-iters": 1}
    run = train(4, "distca", flags, config={**SCRIPT, "self_check": True}, entry="scaled")
    counted = [weight for at in range(SAMPLES) for _, weights in rollouts_of(at, VOCABULARY) for weight in weights[1:]]
    factor = SCALE * sum(counted)
    assert "self-check before step 1" in run.result.log(0)
    assert run.steps[0]["loss"] == pytest.approx(factor * apart.steps[0]["loss"], rel=1e-5)
    wanted, found = gradients(apart.result.logs, 1), gradients(run.result.logs, 1)
    for name, (whole,) in wanted.items():
        for got in found[name]:
            assert np.abs(got - factor * whole).max() < 1e-5 * np.abs(factor * whole).max(), name


def test_trees_that_wait_are_trained_after_a_kill_and_by_another_planner(train: Train, tmp_path: Path) -> None:
    # Weights do not change, so the sum over all steps is the same whenever a tree is trained; as one
    # sequence it would have another loss.
    steps, saved, killed = 6, 3, 4
    flags = {
        **FLAGS,
        "train-iters": steps,
        "lr": 0.0,
        "min-lr": 0.0,
        "balance-trees": "sum",
        "ckpt-format": "torch_dist",
    }
    delay = {"name": "wlb_llm", "thresholds": [100]}
    saving = {**flags, "save": tmp_path, "load": tmp_path, "save-interval": saved}
    ahead: dict[str, Any] = {"config": {**SCRIPT, "plan_ahead": True}, "entry": "trees"}

    def ended_by_kill(result: Result) -> None:
        assert set(result.codes) == {-9}, result.tail(result.failed or 0)
        assert "says what samples hold, so batches are planned ahead" in result.log(0)

    first = train(2, delay, saving, kill_after=killed, expect=ended_by_kill, **ahead)
    assert first.steps[saved - 1]["waiting_sequences"] > 0, "trees wait in the checkpoint"
    train(
        2,
        delay,
        {**saving, "save": None, "balance-trees": None},
        expect=refusal("waiting sequences are trees"),
        **ahead,
    )
    apart = train(1, "te_ring", {**flags, "context-parallel-size": 1}, config=SCRIPT, entry="apart")
    for planner, options in ((delay, {"plan_ahead": True}), ("distca", {"plan_ahead": False})):
        run = train(2, planner, {**saving, "save": None}, config={**SCRIPT, **options}, entry="trees")
        assert run.column("step") == list(range(saved + 1, steps + 1))
        assert run.steps[-1]["waiting_sequences"] == 0
        losses = first.column("loss")[:saved] + run.column("loss")
        assert sum(losses) == pytest.approx(sum(apart.column("loss")), rel=1e-5)
        if planner is delay:
            assert run.column("fingerprint")[: killed - saved] == first.column("fingerprint")[saved:killed]


def sample_of_two_branches() -> dict[str, torch.Tensor]:
    return data.rollout_sample([[5, 6, 7], [5, 6, 8, 9], [4]], [[0, 1, 2], [0, 0, 1, 1], [3]], 10)


def test_a_sample_of_rollouts_says_its_trees_and_what_each_row_counts() -> None:
    sample = sample_of_two_branches()
    assert sample["tokens"].tolist() == [5, 6, 8, 9, 6, 7, 4, 0, 0, 0]
    # The first of all, of which nothing is predicted, counts nowhere.
    assert sample["loss_mask"].tolist() == [1, 1, 1, 0, 2, 0, 0, 0, 0, 0]
    batch = {name: column[None] for name, column in sample.items()}
    read = data.unpack(batch, trees="mean")
    assert read.lengths == (6, 1)
    assert read.trees == ((Segment(1, -1), Segment(3, 0), Segment(2, 0)), document(1))
    assert from_bits(read.rows[:, data.LOSS_MASK]).tolist() == sample["loss_mask"][:7].tolist()
    with pytest.raises(DataError, match=r"rollouts of 7 rows, and a sample has 6 \(--seq-length\)"):
        data.rollout_sample([[5, 6, 7], [5, 6, 8, 9], [4]], [[0] * 3, [0] * 4, [0]], 6)


@pytest.mark.parametrize(
    ("changed", "loss", "told"),
    [
        ({"position_ids": [0, 1, 5]}, "mean", "position_ids of sequence 0 of a microbatch: position 5 of token 2"),
        ({"loss_mask": [1.0, 0.5, 1.0]}, "mean", "whole numbers from 0, of which the loss is a mean, got 0.5; give"),
        ({"loss_mask": [1.0, -1.0, 1.0]}, "mean", "got -1"),
        ({"loss_mask": [1.0, float("nan"), 1.0]}, "sum", "expected finite numbers, got nan"),
        ({"cu_seqlens": [0, 2, 3]}, "mean", "trees are read from position_ids, and this batch has cu_seqlens"),
    ],
)
def test_what_says_no_tree_or_no_weight_is_refused(changed: dict[str, list[float]], loss: Any, told: str) -> None:
    columns = {"tokens": [1, 2, 3], "labels": [2, 3, 0], "loss_mask": [1.0, 1.0, 0.0], "position_ids": [0, 1, 1]}
    batch = {name: torch.tensor([column]) for name, column in (columns | changed).items()}
    read, error = data.Reader(trees=loss).read(iter([batch]), 1)
    assert not read
    with pytest.raises(DataError, match=told):
        raise error or AssertionError("it was read")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--mtp-num-layers", "1"), "--mtp-num-layers predicts"),
        (("--hidden-dropout", "0.1"), "--hidden-dropout must be 0"),
        (("--hybrid-layer-pattern", "M*M*"), "a Mamba layer hands its state on"),
        (("--experimental-attention-variant", "gated_delta_net"), "gated_delta_net hands its state on"),
        ((*EXPERTS, "--moe-z-loss-coeff", "0.1"), "--balance-trees sum divides by no number of tokens"),
        (("--sft", "--eval-iters", "1"), "--sft averages evaluation"),
    ],
)
def test_what_goes_by_the_order_of_rows_is_refused(words: tuple[str, ...], told: str, tmp_path: Path) -> None:
    config = tmp_path / "balance.yaml"
    config.write_text("planner: zeppelin\n")
    usual = ("--hidden-dropout", "0") if "--hidden-dropout" not in words else ()
    for trees in ((), ("--balance-trees", "sum")):
        args = parse(*usual, *words, *trees)
        args.data_parallel_size = 1
        found = [each for each in way_reasons(args, load_config(config)) if each.startswith("--balance-trees: ")]
        assert [told in each for each in found] == [True] * bool(trees)
