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

LAYERS = (
    Patch(
        target="megatron.core.transformer.transformer_block:TransformerBlock.forward",
        wrap=interleaved,
        reviewed={
            "194039641fa3": "0.19.x, 0.18.2",
            "b0248f0dec10": "0.20 of 2026-08",
            "0e79266b8535": "dev of 2026-08",
        },
        why="the layers' loop calls one layer after the other; two nano-batches take turns inside the layers",
    ),
    Patch(
        target="megatron.core.transformer.transformer_layer:TransformerLayer._forward_attention",
        wrap=read,
        reviewed={
            "0b95d95abd32": "0.19.x",
            "7f7145882040": "0.18.2",
            "ff81dbaed790": "0.20 of 2026-08",
            "181f10a1f703": "dev of 2026-08",
        },
        why=_TAKEN_APART,
    ),
    Patch(
        target="megatron.core.transformer.transformer_layer:TransformerLayer.forward",
        wrap=read,
        reviewed={
            "8a9854499f12": "0.19.x",
            "4ef11ae0cef8": "0.18.2",
            "01a4c56bdff4": "0.20 of 2026-08",
            "d541a2b5f9e9": "dev of 2026-08",
        },
        why=_TAKEN_APART,
    ),
    Patch(
        target="megatron.core.transformer.attention:Attention.forward",
        wrap=read,
        reviewed={
            "f15d3a7a34fd": "0.19.x",
            "03d782de9aec": "0.18.2",
            "eedc5cdd0ad5": "0.20 of 2026-08",
            "75446d3da083": "dev of 2026-08",
        },
        why=_TAKEN_APART,
    ),
)
ROUTER = (
    Patch(
        target="megatron.core.transformer.moe.router:TopKRouter.routing",
        wrap=read,
        reviewed={
            "09d9a85f7dba": "0.19.x, 0.20 of 2026-08",
            "3fa170311845": "0.18.2",
            "92e70f4bb86d": "dev of 2026-08",
        },
        why=_TAKEN_TOGETHER,
    ),
    Patch(
        target="megatron.core.transformer.moe.router:TopKRouter.apply_z_loss",
        wrap=read,
        reviewed={
            "d6d01030e61f": "0.19.x, 0.20 of 2026-08",
            "257081afd8ac": "0.18.2",
            "c735cee33b9a": "dev of 2026-08",
        },
        why=_TAKEN_TOGETHER,
    ),
    Patch(
        target="megatron.core.transformer.moe.router:TopKRouter._apply_aux_loss",
        wrap=read,
        reviewed={"993a3b59cab2": "0.19.x, 0.18.2, 0.20 of 2026-08", "42da73451aff": "dev of 2026-08"},
        why=_TAKEN_TOGETHER,
    ),
    Patch(
        target="megatron.core.transformer.moe.router:TopKRouter._apply_global_aux_loss",
        wrap=read,
        reviewed={"ac86fc2005fc": "0.19.x, 0.18.2, 0.20 of 2026-08", "e799e848102f": "dev of 2026-08"},
        why=_TAKEN_TOGETHER,
    ),
)
PATCHES = (*LAYERS, *ROUTER)
