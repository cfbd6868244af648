"""Transformer Engine's attention in models whose script builds the layer spec itself.

The layer spec is the way in where there is a model config (megatron/core_attention.py). A script
that hands `pretrain` a model provider of its own has built TEDotProductAttention already; its
forward then runs the plan that came with the microbatch, and everything else as before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from megatron_balance.megatron.core_attention import attend
from megatron_balance.megatron.packed import BalancedSeqParams
from megatron_balance.patches import Patch


def planned(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`TEDotProductAttention.forward` that runs the plan of a planned microbatch."""

    @functools.wraps(forward)
    def attention(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *args: Any,
        packed_seq_params: Any = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        if not isinstance(packed_seq_params, BalancedSeqParams):
            return forward(module, query, key, value, *args, packed_seq_params=packed_seq_params, **kwargs)
        return attend(query, key, value, packed_seq_params, module)

    return attention


PATCHES = (
    Patch(
        target="megatron.core.extensions.transformer_engine:TEDotProductAttention.forward",
        wrap=planned,
        role="wrapped",
        parameters=(
            "query",
            "key",
            "value",
            "packed_seq_params",
        ),
        why="Transformer Engine's context parallelism cuts every sequence alike over one static group; a plan does not",
    ),
)
