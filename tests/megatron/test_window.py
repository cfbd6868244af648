"""Sliding windows in all layers or in some, and attention sinks, against Megatron alone: losses and
every gradient.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.training")

from tests.megatron.conftest import Run, Train, started
from tests.megatron.test_launch import ON_CPU, printed_losses
from tests.megatron.test_parity import options_of, two_nodes
from tests.support.pipeline_runs import gradients, worst_gradient

pytestmark = pytest.mark.megatron

SCRIPT = str(Path(__file__).resolve().parents[1] / "support" / "plain_documents.py")
PLANNERS = ("te_ring", "zeppelin", "distca", "ulysses", "llama_all_gather")
ONE_STEP = {"train-iters": 1}
MHA = {"group-query-attention": False, "num-query-groups": None}
SMALL: dict[str, dict[str, Any]] = {
    "window, MHA": {**MHA, "window-size": "23,0", **ONE_STEP},
    "both masks, sinks, GQA 8:1": {
        "num-query-groups": 1,
        "window-size": "(23,0)",
        "window-attn-skip-freq": 2,
        "softmax-type": "learnable",
        **ONE_STEP,
    },
    "off by one": {"softmax-type": "off-by-one", **ONE_STEP},
}
# Of Megatron's examples/gptoss/02_train.sh, smaller, with the experts' losses of its 20B
# configuration, which are zero: alone, Megatron takes them document by document.
GPT_OSS: dict[str, Any] = {
    "num-layers": 4,
    "num-query-groups": 1,
    "kv-channels": 8,
    "attention-softmax-in-fp32": True,
    "window-size": "23,0",
    "window-attn-skip-freq": 2,
    "softmax-type": "learnable",
    "swiglu": None,
    "quick-geglu": True,
    "glu-linear-offset": 1.0,
    "activation-func-clamp-value": 7.0,
    "num-experts": 4,
    "moe-router-topk": 2,
    "moe-ffn-hidden-size": 32,
    "moe-router-dtype": "fp32",
    "moe-router-load-balancing-type": "aux_loss",
    "moe-aux-loss-coeff": 0.0,
    "moe-token-dispatcher-type": "alltoall",
    "train-iters": 2,
}
MODELS: dict[str, dict[str, Any]] = {**SMALL, "GPT-OSS": GPT_OSS}
IN_THE_SUITE = {
    *(("window, MHA", "zeppelin"), ("off by one", "distca")),
    *(("both masks, sinks, GQA 8:1", planner) for planner in ("zeppelin", "distca", "ulysses")),
}
"""Others have sinks in tests/distributed/test_executor.py, and windows are one comm pattern."""
RUNS = [
    pytest.param(*run, marks=() if run in IN_THE_SUITE else (pytest.mark.product,))
    for run in itertools.product(SMALL, PLANNERS)
]
Alone = Callable[[str], tuple[dict[str, Any], Run, Path]]


@pytest.fixture(scope="module")
def alone(train: Train, tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """By model: flags to start from the same weights, Megatron alone on one rank, and the folder of
    its gradients.
    """
    made: dict[str, tuple[dict[str, Any], Run, Path]] = {}

    def run(model: str) -> tuple[dict[str, Any], Run, Path]:
        if model not in made:
            # Megatron draws sinks and routers past its own generators.
            own = MODELS[model].get("softmax-type") == "learnable"
            flags = started(train, tmp_path_factory.mktemp("checkpoint"), MODELS[model]) if own else MODELS[model]
            folder = tmp_path_factory.mktemp("gradients")
            plain = train(1, "te_ring", {**flags, **ON_CPU}, entry="plain", before=(SCRIPT, str(folder)))
            made[model] = flags, plain, folder
        return made[model]

    return run


@pytest.mark.parametrize(("model", "planner"), RUNS)
def test_a_planner_trains_like_megatron_alone(train: Train, alone: Alone, model: str, planner: str) -> None:
    flags, plain, folder = alone(model)
    config = {**two_nodes(4), "remap": planner == "zeppelin"}
    run = train(4, options_of(planner), flags, config=config, entry="gradients")
    assert run.column("loss") == pytest.approx(printed_losses(plain.result, 0), rel=1e-5)
    assert worst_gradient(run.result.logs, folder, step=1) < 1e-5


def test_gpt_oss_trains_like_megatron_alone(train: Train, alone: Alone) -> None:
    """Its flags, scaled down; sinks over two tensor-parallel ranks, core attention computed again, and
    a self-check, which attends without a plan.
    """
    flags, plain, folder = alone("GPT-OSS")
    parallel = {"tensor-model-parallel-size": 2, "context-parallel-size": 2, "sequence-parallel": True}
    again = {"recompute-activations": True}
    config = {**two_nodes(2), "self_check": True}
    run = train(4, "zeppelin", {**flags, **parallel, **again}, config=config, entry="gradients")
    expected = printed_losses(plain.result, 0)
    losses = run.column("loss")
    # Megatron's second line is the mean of the first two steps.
    assert expected == pytest.approx([losses[0], (losses[0] + losses[1]) / 2], rel=1e-5)
    assert worst_gradient(run.result.logs, folder, step=1) < 1e-5
    assert "self-check before step 1" in run.result.log(0)
    sinks = [name for name in gradients(folder, 1) if name.endswith("core_attention.softmax_offset")]
    assert len(sinks) == 4, "a sink of each head in each layer"
    assert all(abs(each).min() > 0 for name in sinks for each in gradients(folder, 1)[name])
