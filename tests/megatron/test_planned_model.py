"""The model that plans and predictions see, with layers of every kind, by Megatron's arguments."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

pytest.importorskip("megatron.training")

import torch

from megatron_balance.analysis.layer_runs import Recompute
from megatron_balance.ir.model import Model
from megatron_balance.megatron.memory import stages_of
from megatron_balance.megatron.planned_model import planned_model
from megatron_balance.planning.run import Run
from megatron_balance.runtime.bind import AttentionShape

pytestmark = pytest.mark.megatron


def seen(tensor: int = 1, **more: Any) -> Model:
    args = argparse.Namespace(
        **{
            "num_layers": 4, "hidden_size": 64, "ffn_hidden_size": 256, "num_experts": 8, "moe_ffn_hidden_size": 32,
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
    assert seen(num_experts=None, moe_layer_freq=[0, 1, 1, 1]).dense_layers == 0


def test_layers_that_predict_further_tokens_and_tied_tables() -> None:
    model = seen(mtp_num_layers=1, untie_embeddings_and_output_weights=False)
    assert (model.num_layers, model.mtp_layers, model.tied_embeddings) == (5, 1, True)
    assert not seen().tied_embeddings


def test_layers_with_a_window() -> None:
    model = seen(window_size=(63, 0), window_attn_skip_freq=4)
    assert (model.attention, model.other_attention, model.other_layers) == ("causal", "window_64", 3)
    assert seen(window_size=(63, 0)).other_layers == 0


def test_the_last_stage_holds_the_layers_of_further_tokens() -> None:
    args = argparse.Namespace(num_layers=8, mtp_num_layers=1, virtual_pipeline_model_parallel_size=None)
    assert [stage.num_layers for stage in stages_of(args, 4, Recompute())] == [2, 2, 2, 3]
    args.mtp_num_layers = None
    assert [stage.num_layers for stage in stages_of(args, 1, Recompute())] == [8]
