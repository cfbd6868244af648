"""The model as planners see it, by Megatron's arguments."""

from __future__ import annotations

import argparse
from typing import Any

from megatron_balance.ir.mask import Mask
from megatron_balance.ir.model import Model
from megatron_balance.megatron.masks import mask_of_layer, masks_of
from megatron_balance.planning.choice import Run
from megatron_balance.runtime.bind import AttentionShape


def planned_model(args: argparse.Namespace, config: Run, shape: AttentionShape, tensor: int) -> Model:
    """One tensor-parallel rank's share of heads and MLP; `shape`: its heads, `tensor`: such ranks."""
    first, *others = masks_of(args)
    inner = (args.moe_ffn_hidden_size if args.num_experts else None) or args.ffn_hidden_size
    further = args.mtp_num_layers or 0
    return Model(
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        value_dim=shape.value_dim,
        **_latents(args, tensor),
        latent_travels=shape.latent is not None,
        num_layers=args.num_layers + further,
        mtp_layers=further,
        hidden_size=args.hidden_size,
        ffn_size=max(1, inner // tensor),
        gated_ffn=bool(args.swiglu),
        name="job",
        bytes_per_element=args.params_dtype.itemsize,
        num_experts=args.num_experts or 0,
        **_experts(args, tensor),
        vocab_size=args.padded_vocab_size or args.vocab_size or 1,
        gradient_wire=config.gradient_wire,
        attention=first.name,
        other_attention=others[0].name if others else "",
        other_layers=_with_other_mask(args, first) if others else 0,
        tied_embeddings=not args.untie_embeddings_and_output_weights,
    )


def _experts(args: argparse.Namespace, tensor: int) -> dict[str, int]:
    """Fields of layers with experts."""
    if not args.num_experts:
        return {}
    every = args.moe_layer_freq
    dense = (
        [at % every != 0 for at in range(args.num_layers)] if isinstance(every, int) else [not each for each in every]
    )
    return {
        "experts_per_token": args.moe_router_topk,
        "expert_split": args.expert_model_parallel_size * (args.expert_tensor_parallel_size or tensor) / tensor,
        "shared_ffn_size": (args.moe_shared_expert_intermediate_size or 0) // tensor,
        "dense_layers": sum(dense),
    }


def _with_other_mask(args: argparse.Namespace, first: Mask) -> int:
    """Layers of another mask than `first`; those that predict further tokens are numbered from 1."""
    further = args.mtp_num_layers or 0
    numbers = [*range(1, args.num_layers + 1), *range(1, further + 1)]
    return sum(mask_of_layer(args, number) != first for number in numbers)


def _latents(args: argparse.Namespace, tensor: int) -> dict[str, Any]:
    """Fields of multi-latent attention. Projections down are not split by tensor-parallel ranks, but
    under sequence parallelism each has a part of the rows.
    """
    if not args.multi_latent_attention:
        return {}
    return {
        "latent_rank": args.kv_lora_rank,
        "latent_rope": args.qk_pos_emb_head_dim,
        "query_rank": args.q_lora_rank or 0,
        "latent_split": tensor if args.sequence_parallel else 1,
    }
