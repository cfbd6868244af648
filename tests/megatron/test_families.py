"""Models as their makers train them, scaled down: their real flags, against Megatron alone.

DeepSeek-V3's, Mixtral's and the dense Nemotron's are release configurations, which
`python -m tools.release` runs; GPT-OSS's flags are in test_window.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.training")

from tests.megatron.conftest import Train, assert_same_training, started
from tests.megatron.test_launch import ON_CPU, printed_losses
from tests.megatron.test_parity import two_nodes
from tests.support.pipeline_runs import worst_gradient

pytestmark = pytest.mark.megatron

SCRIPT = str(Path(__file__).resolve().parents[1] / "support" / "plain_documents.py")
TRAINED: dict[str, Any] = {
    "init-method-std": 0.0134,
    "decoupled-lr": 5e-3,
    "decoupled-min-lr": 4.5e-4,
    "lr-decay-style": "cosine",
    "clip-grad": 1.0,
    "weight-decay": 0.1,
    "adam-beta1": 0.9,
    "adam-beta2": 0.95,
    "manual-gc": True,
    "train-iters": 2,
}
# Of Megatron's examples/llama/train_llama3_8b_h100_fp8.sh, smaller. Left out: fp8, bf16 and what only
# Transformer Engine has (fused attention, LayerNorm1p, the fused loss).
LLAMA_3: dict[str, Any] = {**TRAINED, "num-query-groups": 2, "kv-channels": 8, "rotary-base": 1_000_000}
LLAMA_3 |= {"rotary-percent": 1.0}
# Of its functional test gpt3_15b_8t_release, smaller, whose model is Nemotron-4 15B; likewise.
NEMOTRON_4: dict[str, Any] = {**TRAINED, "normalization": "LayerNorm", "swiglu": None, "squared-relu": True}
NEMOTRON_4 |= {"num-attention-heads": 6, "kv-channels": 8, "num-query-groups": 2, "rotary-percent": 0.5}
PARALLEL = {"tensor-model-parallel-size": 2, "context-parallel-size": 2, "sequence-parallel": True}
SHARDED = {"use-distributed-optimizer": True, "overlap-grad-reduce": True, "overlap-param-gather": True}


@pytest.mark.parametrize("family", [LLAMA_3, NEMOTRON_4], ids=["Llama 3", "Nemotron-4"])
def test_its_flags_train_like_megatron_alone(
    train: Train, tmp_path_factory: pytest.TempPathFactory, family: dict[str, Any]
) -> None:
    """Losses of two steps, every gradient of the first, on two tensor-parallel ranks of two nodes; and
    the same with the optimizer's state shared out."""
    flags = started(train, tmp_path_factory.mktemp("checkpoint"), family)
    folder = tmp_path_factory.mktemp("gradients")
    plain = train(1, "te_ring", {**flags, **ON_CPU}, entry="plain", before=(SCRIPT, str(folder)))
    run = train(4, "zeppelin", {**flags, **PARALLEL}, config=two_nodes(2), entry="gradients")
    losses = run.column("loss")
    # Megatron's second line is the mean of the first two steps.
    assert printed_losses(plain.result, 0) == pytest.approx([losses[0], (losses[0] + losses[1]) / 2], rel=1e-5)
    assert worst_gradient(run.result.logs, folder, step=1) < 1e-5
    assert_same_training(train(4, "zeppelin", {**flags, **PARALLEL, **SHARDED}, config=two_nodes(2)), run)
