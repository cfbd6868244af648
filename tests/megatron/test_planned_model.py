"""The model that plans and predictions see, with layers of every kind, by Megatron's arguments."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
import torch

from megatron_balance.analysis.backward import Recomputed
from megatron_balance.ir.model import Model
from megatron_balance.megatron.planning import planned_model, stages_of
from megatron_balance.planning.choice import Run
from megatron_balance.runtime.bind import AttentionShape

pytest.importorskip("megatron.training")


pytestmark = pytest.mark.megatron


def seen(tensor: int = 1, **more: Any) -> Model:
    args = argparse.Namespace(
        **{
            "num_layers": 4, "hidden_size": 64, "ffn_hidden_size": 256, "num_experts": 8, "moe_ffn_hidden_size": 32,
            "expert_model_parallel_size": 1, "expert_tensor_parallel_size": None,
            "moe_router_topk": 2, "moe_layer_freq": 1, "moe_shared_expert_intermediate_size": None, "swiglu": True,
            "window_size": None, "window_attn_skip_freq": None, "params_dtype": torch.bfloat16,
            "padded_vocab_size": 96, "multi_latent_attention": False, "mtp_num_layers": None,
            "untie_embeddings_and_output_weights": True,
        } | more
    )  # fmt: skip
    return planned_model(args, Run(source="balance.yaml"), AttentionShape(4, 4, 16, None, None), tensor)


def test_experts_shared_ones_and_layers_without_any() -> None:
    model = seen(moe_shared_expert_intermediate_size=64, moe_layer_freq=[0, 1, 1, 1])
    assert (model.ffn_size, model.shared_ffn_size, model.dense_layers) == (32, 64, 1)
    assert seen(moe_layer_freq=2).dense_layers == 2
    assert seen(2, moe_shared_expert_intermediate_size=64).shared_ffn_size == 32
    assert seen(2, expert_model_parallel_size=4, expert_tensor_parallel_size=1).expert_split == 2
    assert seen(num_experts=None, moe_layer_freq=[0, 1, 1, 1]).dense_layers == 0


def test_layers_that_predict_further_tokens_and_tied_tables() -> None:
    model = seen(mtp_num_layers=1, untie_embeddings_and_output_weights=False)
    assert (model.num_layers, model.mtp_layers, model.tied_embeddings) == (5, 1, True)
    assert not seen().tied_embeddings


def test_layers_with_a_window() -> None:
    model = seen(window_size=(63, 0), window_attn_skip_freq=4)
    assert (model.attention, model.other_attention, model.other_layers) == ("causal", "window_64", 3)
    assert seen(window_size=(63, 0)).other_layers == 0


def job_args(**more: Any) -> argparse.Namespace:
    return argparse.Namespace(
        **{
            "num_layers": 8, "mtp_num_layers": None, "virtual_pipeline_model_parallel_size": None,
            "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "context_parallel_size": 2,
            "data_parallel_size": 4,
            "use_distributed_optimizer": True, "grad_reduce_in_bf16": False, "recompute_granularity": None,
        } | more
    )  # fmt: skip


def test_the_last_stage_holds_the_layers_of_further_tokens() -> None:
    args, model = job_args(mtp_num_layers=1), seen()
    assert [stage.num_layers for stage in stages_of(args, model, 1, 4)] == [2, 2, 2, 3]
    args.mtp_num_layers = None
    assert [stage.num_layers for stage in stages_of(args, model, 1, 1)] == [8]


def test_state_is_of_the_stages_and_of_a_ranks_own_experts() -> None:
    """2 tensor-parallel ranks, 2 stages of 2 layers, 8 ranks beside them; each has 2 experts
    of 8, whole. The sum on paper.
    """
    model = seen(2, expert_model_parallel_size=4, expert_tensor_parallel_size=1)
    stages = stages_of(job_args(num_layers=4), model, 2, 2)
    attention = 64 * 3 * 4 * 16 + 4 * 16 * 64  # `seen` gives a rank four heads
    others = 2 * (attention + 2 * 64 + 64 * 8) + 64 * 96 / 2
    experts = 2 * 2 * (3 * 64 * 32)
    first = 6 * (others + experts) + 12 * (others / 8 + experts / 4)
    assert stages[0].state_bytes == pytest.approx(first)
    args = job_args(num_layers=4, use_distributed_optimizer=False, grad_reduce_in_bf16=True)
    whole = stages_of(args, model, 2, 2)
    assert whole[0].state_bytes == pytest.approx(16 * (others + experts))
    both = stages_of(args, seen(2, expert_tensor_parallel_size=1), 2, 2)  # each tensor-parallel rank has all
    assert both[0].state_bytes == pytest.approx(16 * (others + 4 * experts))
    apart = stages_of(job_args(num_layers=4), seen(2, expert_model_parallel_size=4), 2, 2)
    assert apart[0].sharding.experts == 4
    assert apart[0].state_bytes == pytest.approx(6 * (others + experts / 2) + 12 * (others / 8 + experts / 2 / 2))
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    assert stages_of(job_args(**full), seen(), 1, 1)[0].recompute == Recomputed("uniform")
