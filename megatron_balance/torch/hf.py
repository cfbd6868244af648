"""Balanced attention in Transformers' models, unmodified: registered by name.

model = AutoModelForCausalLM.from_pretrained(name, attn_implementation=hf.register())
logits = model(**hf.inputs(batch)).logits[0]
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_balance.errors import ConfigError
from megatron_balance.ir.mask import CAUSAL, FULL, SlidingWindow
from megatron_balance.torch.attention import balanced_attention
from megatron_balance.torch.batch import BalancedBatch
from megatron_balance.torch.model import check_layer

NAME = "balanced"
"""Of the attention, as `attn_implementation` takes it."""


def register() -> str:
    """Register the attention with Transformers, and return its name. Safe to call twice.

    Raises:
        ConfigError: Transformers is missing, or too old to have an interface for attention.
    """
    try:
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface
    except ImportError as error:
        raise ConfigError(
            f"expected transformers 5.0 or later, with its AttentionInterface: {error}; pip install "
            "megatron-balance[torch]"
        ) from None
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, no_mask)
    return NAME


def inputs(batch: BalancedBatch) -> dict[str, Any]:
    """Arguments of a model's forward: a batch of one row, without a cache of keys and values.

    Raises:
        ConfigError: not a batch of a balancer.
    """
    if not isinstance(batch, BalancedBatch):
        raise ConfigError(f"expected the BalancedBatch that the balancer returned, got {type(batch).__name__}")
    return {
        "input_ids": batch.tokens[None],
        "position_ids": batch.position_ids[None],
        "use_cache": False,
        NAME: batch,
    }


def no_mask(*_: Any, **__: Any) -> None:
    """No mask: the plan knows what every query sees."""


def attend(  # noqa: PLR0913  Transformers' signature
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    balanced: BalancedBatch | None = None,
    scaling: float | None = None,
    **given: Any,
) -> tuple[Tensor, None]:
    """Attention in Transformers' shapes.

    Query [1, H, T, D], key and value [1, G, T, D]; returns [1, T, H, D].

    Raises:
        ConfigError: the model was called without the batch, or asks for what a plan does not have:
            dropout, soft-capped scores, a mask of its own or another than the plan's.
    """
    name = type(module).__name__
    if balanced is None:
        raise ConfigError(
            f"{name} was called without a batch; call model(**hf.inputs(batch)), and use a model that hands keywords "
            "through to its attention"
        )
    check_layer(module, balanced.accept)
    window, plan = given.get("sliding_window"), balanced.plan
    if window is not None and window >= max(plan.lengths, default=0):
        window = None  # it shows whole documents
    own = plan.mask.size if isinstance(plan.mask, SlidingWindow) else None
    causal = given["is_causal"] if given.get("is_causal") is not None else getattr(module, "is_causal", None)
    asked = {
        "an attention mask": attention_mask is not None,
        "dropout": bool(given.get("dropout")),
        f"a sliding window of {window} tokens": window is not None and plan.mask not in (CAUSAL, SlidingWindow(window)),
        "attention without a window": window is None and own is not None,
        "soft-capped scores": given.get("softcap") is not None,
        "attention that is not causal": plan.mask != FULL and causal is False,
        "causal attention, and the batch is planned for another mask": plan.mask == FULL and causal is True,
    }
    wrong = [what for what, is_asked in asked.items() if is_asked]
    if wrong:
        raise ConfigError(
            f"{name} asks for {', '.join(wrong)}; balanced attention is {plan.mask.name} attention within "
            "each document. Use a configuration without it, such as attention_dropout=0"
        )
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return balanced_attention(q, k, v, balanced, scaling, window=window, sink=given.get("s_aux")), None
