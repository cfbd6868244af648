"""Routers that look at more than a token's own scores: the routes and losses of one rank."""

from __future__ import annotations

import argparse
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.training")

from megatron.core.transformer.moe.moe_utils import sinkhorn
from megatron.core.transformer.moe.router import TopKRouter

from megatron_balance.errors import ConfigError
from megatron_balance.megatron.router import check_router, sinkhorn_of_pool
from megatron_balance.megatron.ways import check_samples
from megatron_balance.planners import PLANNERS
from tests.megatron.conftest import EXPERTS, Run, Train, assert_same_training, loaded_run
from tests.megatron.test_arguments import EXPERTS as WORDS
from tests.megatron.test_arguments import parse
from tests.megatron.test_parity import two_nodes
from tests.megatron.test_ping_pong_experts import logged
from tests.support.pipeline_runs import gradients, worst_gradient

pytestmark = pytest.mark.megatron

STEPS = 2
SINKHORN: dict[str, Any] = {
    **EXPERTS,
    "moe-router-load-balancing-type": "sinkhorn",
    "moe-aux-loss-coeff": 0,
    "moe-router-topk": 1,
    "train-iters": STEPS,
}


class Alone:
    """A group of one rank."""

    def size(self) -> int:
        return 1


def test_sinkhorn_is_megatrons_and_rows_of_no_sequence_count_nowhere() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(50, 8, generator=generator)
    alone: Any = Alone()
    torch.testing.assert_close(sinkhorn_of_pool(logits, None, alone), sinkhorn(logits))
    padding = torch.arange(60) >= 50
    padded = torch.cat([logits, torch.randn(10, 8, generator=generator)])
    found = sinkhorn_of_pool(padded, padding, alone)
    torch.testing.assert_close(found[:50], sinkhorn(logits))


def test_megatrons_own_router_is_refused_where_it_would_balance_the_rows_of_a_rank() -> None:
    router: Any = TopKRouter.__new__(TopKRouter)
    torch.nn.Module.__init__(router)
    router.routing_type = "aux_loss"
    check_router(router, "mlp.router")
    router.config = SimpleNamespace(moe_aux_loss_coeff=0.1)
    for kind in ("sinkhorn", "seq_aux_loss"):
        router.routing_type = kind
        with pytest.raises(ConfigError, match=r"mlp\.router is Megatron's own router.* from its model config"):
            check_router(router, "mlp.router")


@pytest.fixture(scope="module")
def sinkhorned(train: Train, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Run]:
    return loaded_run(train, tmp_path_factory.mktemp("checkpoint"), SINKHORN, entry="gaps")


# Flags that say how plain Megatron moves tokens and keys, and are switched off.
MOVED = {
    "moe-token-dispatcher-type": "allgather",
    "hierarchical-context-parallel-sizes": [2, 2],
    "cp-comm-type": "a2a+p2p",
}


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param({**MOVED, "micro-batch-size": 2}, id="one replica"),
        pytest.param({"context-parallel-size": 2, "expert-model-parallel-size": 2}, id="replicas that share experts"),
    ],
)
def test_sinkhorn_routes_as_one_rank_does(
    train: Train, sinkhorned: tuple[dict[str, Any], Run], flags: dict[str, Any]
) -> None:
    given, one = sinkhorned
    run = train(4, "zeppelin", {**given, **flags}, config=two_nodes(4), entry="gaps")
    assert_same_training(run, one)
    if "expert-model-parallel-size" not in flags:
        assert worst_gradient(run.result.logs, one.result.logs, step=1) < 1e-5
        assert "allgather was set to alltoall" in run.result.log(0)


BY_SAMPLE: dict[str, Any] = {
    **EXPERTS,
    "moe-router-load-balancing-type": ["aux_loss", "seq_aux_loss"],
    "moe-aux-loss-coeff": [0.1, 0.2],
    "moe-router-score-function": "sigmoid",
    "train-iters": STEPS,
}


def test_the_loss_of_a_sample_is_that_of_one_rank(train: Train, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Coefficients that show; samples of one microbatch on all ranks, in halves, and in stages."""
    flags, one = loaded_run(train, tmp_path_factory.mktemp("checkpoint"), BY_SAMPLE, entry="gaps")
    run = train(4, "zeppelin", {**flags, "micro-batch-size": 2}, config=two_nodes(4), entry="gaps")
    assert_same_training(run, one)
    assert worst_gradient(run.result.logs, one.result.logs, step=1) < 1e-5
    name = "seq_load_balancing_loss"
    assert len(logged(one.result, name)) == STEPS
    assert logged(run.result, name) == pytest.approx(logged(one.result, name), rel=1e-5)
    halves = {**flags, "micro-batch-size": 2, "recompute-granularity": "full", "recompute-method": "uniform"}
    run = train(
        2, "distca", {**halves, "recompute-num-layers": 1}, config={"cluster": {"ranks_per_node": 2}}, entry="gaps"
    )
    assert_same_training(run, one)
    stages = {"pipeline-model-parallel-size": 2, "tensor-model-parallel-size": 2, "sequence-parallel": True}
    run = train(4, "te_ring", {**flags, **stages, "context-parallel-size": 1, "micro-batch-size": 2, "train-iters": 1})
    assert_same_training(run, Run(one.result, one.steps[:1]))
    two = {
        **flags,
        **stages,
        "context-parallel-size": 1,
        "micro-batch-size": 2,
        "global-batch-size": 4,
        "train-iters": 1,
    }
    again = {"recompute-granularity": "selective", "recompute-modules": ["moe", "mlp"]}
    # The first stage routes again for its first microbatch when it has gone on to the second.
    kept, recomputed = (train(4, "te_ring", {**two, **more}, entry="gradients") for more in ({}, again))
    assert_same_training(recomputed, kept, tolerance=1e-6)
    for name, found in gradients(recomputed.result.logs, 1).items():
        for got, wanted in zip(found, gradients(kept.result.logs, 1)[name], strict=True):
            assert got == pytest.approx(wanted, rel=1e-4, abs=1e-6 * float(abs(wanted).max())), name


def test_a_sample_alone_in_its_microbatch_has_megatrons_loss(
    train: Train, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Then the loss over a sample is that over the microbatch, which is Megatron's own code."""
    flags = {**BY_SAMPLE, "global-batch-size": 1, "micro-batch-size": 1, "moe-aux-loss-coeff": 0.2, "train-iters": 1}
    ours, megatrons = (
        train(1, "te_ring", {**flags, "moe-router-load-balancing-type": kind}) for kind in ("seq_aux_loss", "aux_loss")
    )
    assert_same_training(ours, megatrons)
    assert logged(ours.result, "seq_load_balancing_loss") == pytest.approx(
        logged(megatrons.result, "load_balancing_loss"), rel=1e-5
    )


def test_planners_that_part_samples_are_refused() -> None:
    args = parse(*WORDS, "--moe-router-load-balancing-type", "seq_aux_loss")
    for name in ("wlb_llm", "hydraulis", "megatron"):
        config: Any = SimpleNamespace(planner=SimpleNamespace(name=name, planner=PLANNERS[name]))
        with pytest.raises(ConfigError, match=f"planner {name} makes microbatches of its own"):
            check_samples(args, config)
        with pytest.raises(ConfigError, match=r"seq_aux_loss is a loss.*; --sft averages evaluation"):
            check_samples(argparse.Namespace(**{**vars(args), "sft": True}), config)
        check_samples(parse("--sft", "--eval-iters", "0"), config)
    config = SimpleNamespace(planner=SimpleNamespace(name="zeppelin", planner=PLANNERS["zeppelin"]))
    check_samples(args, config)
