"""Multi-latent attention: keys wider than values, rotary embeddings inside attention."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.training")

import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch._C._distributed_c10d import HashStore
from torch.utils import cpp_extension

from megatron_balance.cost.modules import layer_modules
from megatron_balance.megatron.planning import planned_model
from megatron_balance.planning.choice import Run
from megatron_balance.runtime.bind import AttentionShape
from tests.megatron.conftest import Train, assert_same_training, loaded_run
from tests.megatron.test_parity import two_nodes
from tests.support.pipeline_runs import worst_gradient

pytestmark = pytest.mark.megatron

FLAGS: dict[str, Any] = {
    "multi-latent-attention": True,
    "num-attention-heads": 6,  # a number that four ranks do not divide, nor two those of each of two
    "kv-channels": 8,
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


@contextmanager
def one_process() -> Iterator[None]:
    """Megatron's groups of one rank, in this process."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        mpu.initialize_model_parallel()
        yield
    finally:
        mpu.destroy_model_parallel()
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def _extension() -> None:
    """Build what Megatron compiles when it first recomputes a projection: a minute of a quiet core,
    which is no part of a job's time. The lock of a build that was killed, for which torch waits for
    ever, goes.
    """
    lock = Path(cpp_extension._get_build_directory("share_storage_ext", verbose=False)) / "lock"
    if lock.exists() and time.time() - lock.stat().st_mtime > 900:
        lock.unlink()
    build = "from megatron.core.tensor_parallel import random; random._get_share_storage()"
    subprocess.run([sys.executable, "-c", build], check=True, timeout=900)


@pytest.mark.usefixtures("_extension")
def test_multi_latent_attention_trains_like_one_rank(train: Train, tmp_path_factory: pytest.TempPathFactory) -> None:
    flags, one = loaded_run(train, tmp_path_factory.mktemp("checkpoint"), FLAGS, entry="gaps")
    run = train(4, "zeppelin", flags, config={**two_nodes(4), "remap": True, "latent_kv": "pays"}, entry="gaps")
    assert_same_training(run, one)
    assert "latent_kv: pays: keys and values travel: predicted are " in run.result.log(0)
    assert worst_gradient(run.result.logs, one.result.logs, step=1) < 1e-5
    fast = {"cluster": {**two_nodes(4)["cluster"], "flops_per_s": 1e13}}  # transfers are what takes time
    latent = train(4, "te_ring", flags, config={**fast, "latent_kv": "pays"}, entry="gaps")
    assert_same_training(latent, one)
    assert worst_gradient(latent.result.logs, one.result.logs, step=1) < 1e-5
    received = sum(latent.steps[1]["counters"]["bytes_received_forward"])
    tokens = sum(latent.steps[1]["counters"]["kv_tokens_received"])
    assert received == tokens * (8 + 4) * 4, "12 numbers of a token travel in place of 6 heads of 8 and 6"
    # Megatron's own layers lose part of a gradient (of the shared rotary key) to tensor parallelism,
    # so plan or none are compared under it.
    parallel = {"tensor-model-parallel-size": 2, "sequence-parallel": True, "train-iters": 1}
    again = {"recompute-granularity": "selective", "recompute-modules": "mla_up_proj"}
    two = train(2, "te_ring", {**flags, **parallel, "context-parallel-size": 1, "micro-batch-size": 2})
    by_heads = {**flags, **parallel, **again, "context-parallel-size": 2}
    run = train(4, "ulysses", by_heads, config={"latent_kv": "pays"})
    assert_same_training(run, two)
    (told,) = re.findall("latent_kv: pays: keys and values travel, since latents cannot: .*", run.result.log(0))
    assert "mla_up_proj" in told
    assert "the planner parts heads" in told
    assert run.column("loss") == pytest.approx(one.column("loss")[:1], rel=1e-5)
    again = {"recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 1}
    run = train(4, "te_ring", {**flags, **parallel, **again, "context-parallel-size": 2}, config={"latent_kv": True})
    assert_same_training(run, two)


@pytest.mark.parametrize(("query_rank", "travels"), [(16, False), (None, False), (16, True)])
def test_projections_are_priced_by_the_parameters_of_megatrons_layer(
    query_rank: int | None, travels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A product of a token with a matrix takes two FLOPs for each of its elements."""
    sizes: dict[str, Any] = {
        "num_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 48, "q_lora_rank": query_rank,
        "kv_lora_rank": 8, "qk_head_dim": 4, "qk_pos_emb_head_dim": 2, "v_head_dim": 6,
    }  # fmt: skip
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))  # for its rotary frequencies
    with one_process():
        config = MLATransformerConfig(
            **sizes, add_bias_linear=False, gated_linear_unit=True, rope_type="rope",
            use_cpu_initialization=True, gradient_accumulation_fusion=False,
        )  # fmt: skip
        spec: Any = get_gpt_layer_local_spec(multi_latent_attention=True)
        spec.submodules.self_attention.submodules.core_attention = IdentityOp  # its own takes no keys of other width
        layer: Any = build_module(spec, config=config, layer_number=1)
    of = {name: parameter.numel() for name, parameter in layer.named_parameters() if parameter.dim() == 2}
    args = argparse.Namespace(
        **sizes, window_size=None, window_attn_skip_freq=None, num_experts=None, moe_ffn_hidden_size=None, swiglu=True,
        params_dtype=torch.bfloat16, padded_vocab_size=96, multi_latent_attention=True, sequence_parallel=False,
        mtp_num_layers=None, untie_embeddings_and_output_weights=True,
    )  # fmt: skip
    shape = AttentionShape(4, 1 if travels else 4, 6, None, (8, 2) if travels else None)
    model = planned_model(args, Run(source="balance.yaml"), shape, 1)
    up = of["self_attention.linear_kv_up_proj.weight"]
    assert model.linear_flops_per_token == 2 * (sum(of.values()) - up * travels)
    assert model.latent_flops == 2 * up
    assert sum(module.weights for module in layer_modules(model)) - 2 * model.hidden_size == sum(of.values())
    halves = model.share(2)
    assert 2 * halves.linear_flops_per_token == model.linear_flops_per_token
