"""Sliding windows in all layers or in some, against Megatron alone: losses and every gradient."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.training")

from tests.megatron.conftest import Run, Train
from tests.megatron.test_launch import ON_CPU, printed_losses
from tests.megatron.test_parity import options_of, two_nodes
from tests.support.pipeline_runs import worst_gradient

pytestmark = pytest.mark.megatron

SCRIPT = str(Path(__file__).resolve().parents[1] / "support" / "plain_documents.py")
PLANNERS = ("te_ring", "zeppelin", "distca", "ulysses", "llama_all_gather")
MHA = {"group-query-attention": False, "num-query-groups": None}
GQA = {"num-query-groups": 1}
MODELS: dict[str, dict[str, Any]] = {
    "window, MHA": {**MHA, "window-size": "23,0"},
    "window in every other layer, GQA 8:1": {**GQA, "window-size": "(23,0)", "window-attn-skip-freq": 2},
}

Alone = Callable[[str], tuple[Run, Path]]


@pytest.fixture(scope="module")
def alone(train: Train, tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """One step of Megatron alone, on one rank, by model."""
    made: dict[str, tuple[Run, Path]] = {}

    def run(model: str) -> tuple[Run, Path]:
        if model not in made:
            folder = tmp_path_factory.mktemp("gradients")
            flags = {**MODELS[model], **ON_CPU, "train-iters": 1}
            made[model] = train(1, "te_ring", flags, entry="plain", before=(SCRIPT, str(folder))), folder
        return made[model]

    return run


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("model", MODELS)
def test_a_planner_trains_like_megatron_alone(train: Train, alone: Alone, planner: str, model: str) -> None:
    plain, gradients = alone(model)
    flags = {**MODELS[model], "train-iters": 1}
    run = train(
        4, options_of(planner), flags, config={**two_nodes(4), "remap": planner == "zeppelin"}, entry="gradients"
    )
    assert run.column("loss") == pytest.approx(printed_losses(plain.result, 0), rel=1e-5)
    assert worst_gradient(run.result.logs, gradients, step=1) < 1e-5
