"""Masks and softmax offsets of Megatron's layers, by its own flags.

`--window-size L,R`: a query sees L keys before its own and R behind it; without negative numbers or
keys behind, that is a sliding window of L + 1 keys. `--window-attn-skip-freq` says which layers see
all keys. `--softmax-type`: an attention sink, one more logit in the softmax of every query, without
a value: a parameter of each head (learnable), or zero (off-by-one).
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.utils import is_layer_window_attention

from megatron_balance.ir.mask import CAUSAL, Mask, SlidingWindow


def mask_of_layer(config: Any, layer_number: int) -> Mask:
    """The mask of the layer of this number, counted from 1 as Megatron does.

    `config`: Megatron's arguments or model config.
    """
    if is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
        return SlidingWindow(config.window_size[0] + 1)
    return CAUSAL


def masks_of(args: Any) -> tuple[Mask, ...]:
    """Masks of the model's layers: the one that plans are made for, then any other."""
    # Layers that predict further tokens are numbered from 1 again.
    numbers = range(1, max(args.num_layers, getattr(args, "mtp_num_layers", None) or 0) + 1)
    found = {mask_of_layer(args, number) for number in numbers}
    return tuple(sorted(found, key=lambda mask: (mask != CAUSAL, mask.name)))


def mask_of(core_attention: Any) -> Mask:
    """The mask of a core attention, ours or patched Transformer Engine's."""
    return mask_of_layer(core_attention.config, core_attention.layer_number)


def sink_of(core_attention: Any) -> torch.Tensor | None:
    """The logit [H] that each head has beside its keys, of this tensor-parallel rank; None: none."""
    offset = getattr(core_attention, "softmax_offset", None)
    return None if offset is None else offset.view(-1)
