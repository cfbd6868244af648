"""Hybrid models under plans: Megatron's mixers and whole training, like one rank."""

# Of kernels that need a GPU there are stand-ins (`stand_in_kernels`).

import functools
import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.megatron.conftest import EXPERTS, Run, Train, assert_same_training, at_once, loaded_run, train_with
from tests.megatron.test_families import LATENTS, logged
from tests.megatron.test_parity import two_nodes
from tests.support.megatron_run import ROOT, Job, Result, Trainer
from tests.support.numbered_data import write_packed
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
# Released configurations made small: Nemotron 3 Super (without --moe-latent-size, for which
# Megatron wants Transformer Engine), and of GPTs one of Qwen3-Next's kind.
NEMOTRON: dict[str, Any] = {**MAMBA, **EXPERTS, "hybrid-layer-pattern": "MEM*E/*E/*E", "mtp-num-layers": 2}
NEMOTRON |= {"position-embedding-type": "none", "swiglu": False, "squared-relu": True}
NEMOTRON |= {"moe-router-score-function": "sigmoid", "moe-router-enable-expert-bias": True, "moe-router-dtype": "fp32"}
NEMOTRON |= {"moe-router-topk-scaling-factor": 5.0, "moe-router-load-balancing-type": "seq_aux_loss"}
NEMOTRON |= {"moe-shared-expert-intermediate-size": 32, "mtp-loss-scaling-factor": 0.3, "moe-aux-loss-coeff": 0.5}
QWEN: dict[str, Any] = {**DELTA, **EXPERTS, "linear-attention-freq": 3, "num-layers": 3, "rotary-percent": 0.5}
QWEN |= {"attention-output-gate": True, "moe-shared-expert-intermediate-size": 32, "moe-shared-expert-gate": True}
QWEN |= {"moe-router-dtype": "fp32", "moe-router-topk": 4, "deterministic-mode": True}
# Of Kimi Linear's kind, of gated delta nets: the pattern alone says that attention is latent.
KIMI: dict[str, Any] = {**BOTH, **LATENTS, "multi-latent-attention": None, "hybrid-layer-pattern": "GEG+-"}
KIMI |= {"rope-type": "yarn", "rotary-scaling-factor": 4}
MODELS = {"mamba": MAMBA, "gated delta net": DELTA, "both, with experts": BOTH, "further tokens": AHEAD}
MODELS |= {"nemotron 3": NEMOTRON, "qwen3-next": QWEN, "kimi": KIMI}
EXPERTS_AND_TENSOR = {"expert-model-parallel-size": 2, "expert-tensor-parallel-size": 1}
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
        whole = "num-experts" in flags or "mtp-num-layers" in flags  # which have losses of a microbatch
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
        ("nemotron 3", "zeppelin", {**TENSOR, **EXPERTS_AND_TENSOR}, {}),
        ("qwen3-next", "te_ring", {**TENSOR, **EXPERTS_AND_TENSOR}, {}),
        ("kimi", "zeppelin", {}, {"remap": True}),
        ("kimi", "te_ring", {}, {"latent_kv": True}),
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
    for name in ("seq_load_balancing_loss", "load_balancing_loss", "mtp_1 loss", "mtp_2 loss"):
        assert logged(run.result, name) == pytest.approx(logged(one.result, name), rel=2e-6), name
    # Where parameters are those of one rank, and have their names.
    if not flags.keys() & {"tensor-model-parallel-size", "expert-model-parallel-size"} and planner != "ulysses":
        assert worst_gradient(run.result.logs, one.result.logs, step=1) < 1e-5


def test_a_killed_hybrid_model_goes_on_under_another_planner(train_hybrid: Train, tmp_path: Path) -> None:
    flags = {**MAMBA, "train-iters": 4, "ckpt-format": "torch_dist"}
    whole = train_hybrid(4, "zeppelin", flags, config=two_nodes(4))
    saving = {**flags, "save": tmp_path, "load": tmp_path, "save-interval": 2}

    def killed(result: Result) -> None:
        assert set(result.codes) == {-signal.SIGKILL}, result.tail(result.failed or 0)

    train_hybrid(4, "zeppelin", saving, config=two_nodes(4), kill_after=3, expect=killed)
    elsewhere = train_hybrid(2, "llama_all_gather", {**saving, "save": None}, config=two_nodes(2))
    assert_same_training(elsewhere, Run(whole.result, whole.steps[2:]))
    resumed = train_hybrid(4, "zeppelin", {**saving, "save": None}, config=two_nodes(4))
    assert resumed.column("loss") == whole.column("loss")[2:], "kernels on CPUs are deterministic"


def test_packed_samples_of_a_script_train_like_one_rank(
    train_hybrid: Train, of_one_rank: Callable[[str], tuple[dict[str, Any], Run]], tmp_path: Path
) -> None:
    # Megatron's SFTDataset, whose samples say by cu_seqlens where conversations end.
    given, _ = of_one_rank("mamba")
    flags = {**given, "sft": True, "data-path": write_packed(tmp_path / "conversations.jsonl", 12), "train-iters": 2}
    script = {"data": "script"}
    one = train_hybrid(1, "te_ring", at_once(flags), config=script, entry="packed")
    run = train_hybrid(4, "zeppelin", flags, config={**two_nodes(4), **script}, entry="packed")
    assert_same_training(run, one)


@pytest.mark.product
@pytest.mark.parametrize("planner", ["te_ring", "zeppelin", "distca", "ulysses", "llama_all_gather"])
@pytest.mark.parametrize(
    ("model", "num_ranks", "flags"),
    [
        ("mamba", 8, {}),
        ("mamba", 8, {**TENSOR, "pipeline-model-parallel-size": 2, "hybrid-layer-pattern": "M-M|*-M"}),
        ("gated delta net", 8, {"context-parallel-size": 4}),
    ],
)
def test_twenty_steps_on_eight_ranks_are_those_of_one(
    train_hybrid: Train, tmp_path: Path, planner: str, model: str, num_ranks: int, flags: dict[str, Any]
) -> None:
    given, one = loaded_run(train_hybrid, tmp_path, {**MODELS[model], "train-iters": 20, "lr-warmup-iters": 2})
    config = {**two_nodes(num_ranks), "pipeline": "stages"}
    run = train_hybrid(num_ranks, planner, {**given, **flags}, config=config)
    differences = [abs(a / b - 1) for a, b in zip(run.column("loss"), one.column("loss"), strict=True)]
    print(f"{model}, {planner}, {flags}: largest difference of a loss {max(differences):.1e}")  # noqa: T201
    assert max(differences[:10]) < 1e-5
    assert max(differences) < 1e-4, "AdamW divides the rounding noise of A_log by itself, so weights part"
