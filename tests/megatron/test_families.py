"""Models as their makers train them, scaled down: their real flags, against Megatron alone.

Those of experts are held against one rank of ours, since alone Megatron takes a router's losses
document by document. GPT-OSS's flags are in test_window.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.training")

from tests.megatron.conftest import Train, assert_same_training, started
from tests.megatron.test_launch import ON_CPU, printed_losses
from tests.megatron.test_parity import options_of, two_nodes
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
# Of its release configurations mixtral_8x7b_alltoall_tp2pp4ep4 and deepseekv3_proxy_flex: what makes
# the model, smaller, with one expert after the other and the dispatcher that needs no GPU.
MIXTRAL: dict[str, Any] = {
    "use-distributed-optimizer": True,
    "disable-bias-linear": True,
    "untie-embeddings-and-output-weights": True,
    "position-embedding-type": "rope",
    "rotary-percent": 0.5,
    "normalization": "RMSNorm",
    "swiglu": True,
    "num-layers": 4,
    "hidden-size": 32,
    "ffn-hidden-size": 64,
    "num-attention-heads": 8,
    "group-query-attention": True,
    "num-query-groups": 4,
    "clip-grad": 1.0,
    "weight-decay": 0.1,
    "num-experts": 8,
    "moe-router-load-balancing-type": "aux_loss",
    "moe-router-topk": 2,
    "moe-aux-loss-coeff": 1e-2,
    "moe-token-dispatcher-type": "alltoall",
    "init-method-std": 0.010,
}
DEEPSEEK_V3: dict[str, Any] = {
    "group-query-attention": False,
    "num-query-groups": None,
    "use-distributed-optimizer": True,
    "disable-bias-linear": True,
    "untie-embeddings-and-output-weights": True,
    "position-embedding-type": "rope",
    "rotary-base": 10000,
    "normalization": "RMSNorm",
    "norm-epsilon": 1e-6,
    "swiglu": True,
    "num-layers": 4,
    "hidden-size": 32,
    "ffn-hidden-size": 64,
    "num-attention-heads": 8,
    "kv-channels": 4,
    "multi-latent-attention": True,
    "qk-layernorm": True,
    "q-lora-rank": 16,
    "kv-lora-rank": 8,
    "qk-head-dim": 4,
    "qk-pos-emb-head-dim": 4,
    "v-head-dim": 6,
    "rotary-scaling-factor": 40,
    "mscale": 1.0,
    "mscale-all-dim": 1.0,
    "mtp-num-layers": 1,
    "mtp-loss-scaling-factor": 0.1,
    "clip-grad": 1.0,
    "weight-decay": 0.1,
    "num-experts": 8,
    "moe-layer-freq": "([0]*1+[1]*3)",
    "moe-ffn-hidden-size": 32,
    "moe-shared-expert-intermediate-size": 32,
    "moe-router-load-balancing-type": "seq_aux_loss",
    "moe-router-topk": 2,
    "moe-router-group-topk": 2,
    "moe-router-num-groups": 4,
    "moe-router-topk-scaling-factor": 2.5,
    "moe-router-score-function": "sigmoid",
    "moe-router-pre-softmax": True,
    "moe-router-enable-expert-bias": True,
    "moe-router-bias-update-rate": 1e-3,
    "moe-router-dtype": "fp32",
    "moe-aux-loss-coeff": 1e-4,
    "moe-token-dispatcher-type": "alltoall",
}
PARALLEL = {"tensor-model-parallel-size": 2, "context-parallel-size": 2, "sequence-parallel": True}
SHARDED = {"use-distributed-optimizer": True, "overlap-grad-reduce": True, "overlap-param-gather": True}


@pytest.mark.parametrize("family", [LLAMA_3, NEMOTRON_4], ids=["Llama 3", "Nemotron-4"])
def test_its_flags_train_like_megatron_alone(
    train: Train, tmp_path_factory: pytest.TempPathFactory, family: dict[str, Any]
) -> None:
    """Losses of two steps, every gradient of the first, on two tensor-parallel ranks of two nodes; and
    of one, the same with the optimizer's state shared out."""
    flags = started(train, tmp_path_factory.mktemp("checkpoint"), family)
    folder = tmp_path_factory.mktemp("gradients")
    plain = train(1, "te_ring", {**flags, **ON_CPU}, entry="plain", before=(SCRIPT, str(folder)))
    run = train(4, "zeppelin", {**flags, **PARALLEL}, config=two_nodes(2), entry="gradients")
    losses = run.column("loss")
    # Megatron's second line is the mean of the first two steps.
    assert printed_losses(plain.result, 0) == pytest.approx([losses[0], (losses[0] + losses[1]) / 2], rel=1e-5)
    assert worst_gradient(run.result.logs, folder, step=1) < 1e-5
    if family is LLAMA_3:
        assert_same_training(train(4, "zeppelin", {**flags, **PARALLEL, **SHARDED}, config=two_nodes(2)), run)


EXPERTS = {"context-parallel-size": 2, "expert-model-parallel-size": 2, "expert-tensor-parallel-size": 1}


@pytest.mark.parametrize(
    ("family", "ranks", "parallel"),
    [(MIXTRAL, 4, {**PARALLEL, **EXPERTS}), (DEEPSEEK_V3, 2, EXPERTS)],
    ids=["Mixtral", "DeepSeek-V3"],
)
def test_families_of_experts_train_like_one_rank(
    train: Train, tmp_path: Path, family: dict[str, Any], ranks: int, parallel: dict[str, Any]
) -> None:
    flags = started(train, tmp_path, {**family, "train-iters": 2})
    one = train(1, "te_ring", flags)
    run = train(ranks, options_of("zeppelin"), {**flags, **parallel}, config=two_nodes(2))
    assert_same_training(run, one)
    assert sum(sum(step["counters"]["kv_tokens_received"]) for step in run.steps) > 0, "attention was not cut"
