"""Multi-latent attention: keys wider than values, rotary embeddings inside attention."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("megatron.training")

from tests.megatron.conftest import Train, assert_same_training, at_once, started
from tests.megatron.test_parity import two_nodes
from tests.support.pipeline_runs import worst_gradient

pytestmark = pytest.mark.megatron

FLAGS: dict[str, Any] = {
    "multi-latent-attention": True,
    "group-query-attention": False,
    "num-query-groups": None,
    "q-lora-rank": 16,
    "kv-lora-rank": 8,
    "qk-head-dim": 4,
    "qk-pos-emb-head-dim": 4,
    "v-head-dim": 6,
    "qk-layernorm": True,
    "rope-type": "yarn",
    "rotary-scaling-factor": 4,
    "train-iters": 2,
}


def test_multi_latent_attention_trains_like_one_rank(train: Train, tmp_path_factory: pytest.TempPathFactory) -> None:
    flags = started(train, tmp_path_factory.mktemp("checkpoint"), FLAGS)
    one = train(1, "te_ring", at_once(flags), entry="gaps")
    run = train(4, "zeppelin", flags, config={**two_nodes(4), "remap": True}, entry="gaps")
    assert_same_training(run, one)
    assert worst_gradient(run.result.logs, one.result.logs, step=1) < 1e-5
    latent = train(4, "te_ring", flags, config={**two_nodes(4), "latent_kv": True}, entry="gaps")
    assert_same_training(latent, one)
    assert worst_gradient(latent.result.logs, one.result.logs, step=1) < 1e-5
    received = sum(latent.steps[1]["counters"]["bytes_received_forward"])
    tokens = sum(latent.steps[1]["counters"]["kv_tokens_received"])
    assert received == tokens * (8 + 4) * 4, "12 numbers of a token travel in place of 8 heads of 8 and 6"
    # Megatron's own layers lose part of a gradient (of the shared rotary key) to tensor parallelism,
    # so plan or none are compared under it.
    parallel = {"tensor-model-parallel-size": 2, "sequence-parallel": True, "train-iters": 1}
    again = {"recompute-granularity": "selective", "recompute-modules": "mla_up_proj"}
    two = train(2, "te_ring", {**flags, **parallel, "context-parallel-size": 1, "micro-batch-size": 2})
    run = train(4, "ulysses", {**flags, **parallel, **again, "context-parallel-size": 2})
    assert_same_training(run, two)
    assert run.column("loss") == pytest.approx(one.column("loss")[:1], rel=1e-5)
    again = {"recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 1}
    run = train(4, "te_ring", {**flags, **parallel, **again, "context-parallel-size": 2}, config={"latent_kv": True})
    assert_same_training(run, two)
