"""Hybrid models under plans: Megatron's mixers and whole training, like one rank."""

# Of kernels that need a GPU there are stand-ins (`stand_in_kernels`).

import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.megatron.conftest import EXPERTS, Run, Train, assert_same_training, loaded_run, train_with
from tests.megatron.test_parity import two_nodes
from tests.support.megatron_run import ROOT, Job, Trainer
from tests.support.pipeline_runs import worst_gradient

SUPPORT = ROOT / "tests" / "support"


@pytest.fixture(scope="module")
def hybrid_trainer() -> Iterator[Trainer]:
    trainer = Trainer(path=[str(SUPPORT / "stand_in_kernels")])
    yield trainer
    trainer.close()


@pytest.fixture(scope="module")
def train_hybrid(hybrid_trainer: Trainer, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Train:
    return train_with(hybrid_trainer, corpus, tmp_path_factory)


@pytest.mark.parametrize("tensor", [1, 2])
def test_a_mixer_of_megatrons_equals_itself_with_each_document_alone(
    hybrid_trainer: Trainer, tmp_path: Path, tensor: int
) -> None:
    file = tmp_path / "found.json"
    argv = (str(SUPPORT / "hybrid_modules.py"), str(file), str(tensor))
    result = hybrid_trainer.run(Job("plain", 4, argv, str(tmp_path)))
    assert result.failed is None, result.tail(result.failed or 0)
    for name, by_fault in json.loads(file.read_text()).items():
        for fault, found in by_fault.items():
            worst = max(found.values())
            assert (worst > 1e-3) if fault else (worst < 2e-6), (name, fault, found)


# Whole training, with states that last.

STEPS = 3
SPEC = "tests.support.hybrid_models"
MAMBA: dict[str, Any] = {"spec": (SPEC, "stack"), "num-layers": None, "mamba-num-heads": 8, "mamba-head-dim": 8}
MAMBA |= {"mamba-state-dim": 8, "mamba-num-groups": 2, "hybrid-layer-pattern": "M-M*-M"}
DELTA: dict[str, Any] = {"spec": (SPEC, "gpt"), "num-layers": 4, "linear-attention-freq": 2}
DELTA |= {"experimental-attention-variant": "gated_delta_net", "linear-key-head-dim": 8, "linear-value-head-dim": 8}
DELTA |= {"linear-num-key-heads": 4, "linear-num-value-heads": 8, "linear-conv-kernel-dim": 4}
BOTH: dict[str, Any] = {**MAMBA, **EXPERTS, "linear-key-head-dim": 8, "linear-value-head-dim": 8}
BOTH |= {"linear-num-key-heads": 4, "linear-num-value-heads": 8, "linear-conv-kernel-dim": 4}
BOTH |= {"hybrid-layer-pattern": "MEG*E"}
AHEAD: dict[str, Any] = {**MAMBA, "hybrid-layer-pattern": "M-M*/M*/M*", "mtp-num-layers": 2}
AHEAD |= {"mtp-loss-scaling-factor": 0.5}
MODELS = {"mamba": MAMBA, "gated delta net": DELTA, "both, with experts": BOTH, "further tokens": AHEAD}
TENSOR = {"tensor-model-parallel-size": 2, "context-parallel-size": 2, "sequence-parallel": True}
STAGES = {"pipeline-model-parallel-size": 2, "context-parallel-size": 2}
AGAIN = {"recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 1}


@pytest.fixture(scope="module")
def of_one_rank(
    train_hybrid: Train, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[dict[str, Any], Run]]:
    @functools.cache
    def run(model: str) -> tuple[dict[str, Any], Run]:
        flags = {**MODELS[model], "train-iters": STEPS}
        whole = model in ("both, with experts", "further tokens")  # which have losses of a microbatch
        return loaded_run(train_hybrid, tmp_path_factory.mktemp("weights"), flags, whole=whole, entry="gradients")

    return run


@pytest.mark.parametrize(
    ("model", "planner", "flags", "config"),
    [
        ("mamba", "zeppelin", {}, {"remap": True, "self_check": True}),
        ("mamba", "distca", TENSOR, {}),
        ("mamba", "te_ring", {**STAGES, **AGAIN, "hybrid-layer-pattern": "M-M|*-M"}, {}),
        ("mamba", "ulysses", {**STAGES, "hybrid-layer-pattern": "M-|M|*-|M"}, {}),
        ("gated delta net", "zeppelin", {**AGAIN, "context-parallel-size": 2}, {"remap": True, "self_check": True}),
        ("gated delta net", "te_ring", TENSOR, {}),
        ("gated delta net", "distca", STAGES, {"pipeline": "stages"}),
        ("both, with experts", "zeppelin", {"expert-model-parallel-size": 2}, {}),
        ("further tokens", "zeppelin", {}, {}),
    ],
)
def test_a_hybrid_model_trains_like_one_rank(
    train_hybrid: Train,
    of_one_rank: Callable[[str], tuple[dict[str, Any], Run]],
    model: str,
    planner: str,
    flags: dict[str, Any],
    config: dict[str, Any],
) -> None:
    given, one = of_one_rank(model)
    run = train_hybrid(4, planner, {**given, **flags}, config={**two_nodes(4), **config}, entry="gradients")
    assert_same_training(run, one)
    # Where parameters are those of one rank, and have their names.
    if not flags.keys() & {"tensor-model-parallel-size", "expert-model-parallel-size"} and planner != "ulysses":
        assert worst_gradient(run.result.logs, one.result.logs, step=1) < 1e-5
