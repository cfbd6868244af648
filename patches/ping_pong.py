"""A transformer block over two ping-pong nano-batches."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron_balance.megatron.packed import BalancedSeqParams
from megatron_balance.megatron.ping_pong import run_block
from megatron_balance.patches import Patch, read


def interleaved(forward: Callable[..., Any]) -> Callable[..., Any]:
    """`TransformerBlock.forward` that runs ping-pong nano-batches, and everything else as before."""

    @functools.wraps(forward)
    def block(
        module: Any,
        hidden_states: Any,
        attention_mask: Any,
        *args: Any,
        rotary_pos_emb: Any = None,
        packed_seq_params: Any = None,
        padding_mask: Any = None,
        **kwargs: Any,
    ) -> Any:
        if isinstance(packed_seq_params, BalancedSeqParams) and packed_seq_params.nano_batches:
            return run_block(module, hidden_states, rotary_pos_emb, padding_mask, packed_seq_params)
        given = {"rotary_pos_emb": rotary_pos_emb, "packed_seq_params": packed_seq_params, "padding_mask": padding_mask}
        return forward(module, hidden_states, attention_mask, *args, **given, **kwargs)

    return block


_TAKEN_APART = "a layer is run in two steps, before and behind core attention; no method of Megatron's ends there"
_TAKEN_TOGETHER = (
    "a subclass (`megatron.router`) takes a router's losses over both nano-batches; it relies on "
    "what each method computes"
)

PATCHES = (
    Patch(
        target="megatron.core.transformer.transformer_block:TransformerBlock.forward",
        wrap=interleaved,
        digest="e20defb813f6",
        why="the layers' loop calls one layer after the other; two nano-batches take turns inside the layers",
    ),
    Patch(
        target="megatron.core.transformer.transformer_layer:TransformerLayer._forward_attention",
        wrap=read,
        digest="257c7c162bd0",
        why=_TAKEN_APART,
    ),
    Patch(
        target="megatron.core.transformer.transformer_layer:TransformerLayer.forward",
        wrap=read,
        digest="bdfecfb342cb",
        why=_TAKEN_APART,
    ),
    Patch(
        target="megatron.core.transformer.attention:Attention.forward",
        wrap=read,
        digest="b144e903f3ca",
        why=_TAKEN_APART,
    ),
    Patch(
        target="megatron.core.transformer.moe.router:TopKRouter.routing",
        wrap=read,
        digest="e93abc48c2d9",
        why=_TAKEN_TOGETHER,
    ),
    Patch(
        target="megatron.core.transformer.moe.router:TopKRouter.apply_z_loss",
        wrap=read,
        digest="bce126c6a499",
        why=_TAKEN_TOGETHER,
    ),
    Patch(
        target="megatron.core.transformer.moe.router:TopKRouter._apply_aux_loss",
        wrap=read,
        digest="6ae2521667b8",
        why=_TAKEN_TOGETHER,
    ),
    Patch(
        target="megatron.core.transformer.moe.router:TopKRouter._apply_global_aux_loss",
        wrap=read,
        digest="d0754632a4ab",
        why=_TAKEN_TOGETHER,
    ),
)
