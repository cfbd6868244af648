"""The model a plan is made for: only what changes attention, tokens and bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from megatron_balance.errors import ConfigError
from megatron_balance.ir.mask import KNOWN, Mask, mask_named
from megatron_balance.ir.whole import at_least

GradientWire: TypeAlias = Literal["fp32", "bf16"]
"""The type that gradients of queries, keys and values travel in between ranks: fp32 (fp64 for fp64),
or bf16, as in Transformer Engine's ring, where each rank adds its own and rounds."""


@dataclass(frozen=True, slots=True)
class Model:
    """A transformer. `num_kv_heads` divides `num_heads` (MHA: equal; GQA: fewer).
    `bytes_per_element` of activations.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_layers: int = 32
    hidden_size: int = 4096
    ffn_size: int = 11008
    gated_ffn: bool = True
    name: str = "custom"
    bytes_per_element: int = 2
    num_experts: int = 0
    experts_per_token: int = 0
    vocab_size: int = 32000
    gradient_wire: GradientWire = "fp32"
    tokens_per_rank: int | None = None
    """Tokens a rank is given per microbatch in the published evaluation, if one is known."""
    attention: str = "causal"
    """Name of the mask of every sequence (`ir.mask.mask_named`): "causal", or "full" as in diffusion
    transformers, whose text and image tokens of one sample are one sequence, or "window_4096" where
    a query sees the 4,096 keys up to its own."""
    other_attention: str = ""
    """Name of the mask of some of the layers, if not all have the same: plans are made for
    `attention`, priced by it, and run under this one there (`compile.halo`)."""

    def __post_init__(self) -> None:
        for what in ("num_heads", "num_kv_heads", "head_dim", "num_layers", "hidden_size", "ffn_size"):
            object.__setattr__(self, what, at_least(1, f"model {self.name}: {what}", getattr(self, what)))
        for name in filter(None, (self.attention, self.other_attention)):
            try:
                mask_named(name)
            except ConfigError:
                raise ConfigError(
                    f"model {self.name}: attention {name!r} is not a known mask; known: {KNOWN}"
                ) from None
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"model {self.name}: num_kv_heads {self.num_kv_heads} does not divide num_heads {self.num_heads}"
            )

    def share(self, tensor: int) -> Model:
        """The model as one of `tensor` tensor-parallel ranks has it: its part of heads and MLP."""
        return replace(
            self,
            num_heads=self.num_heads // tensor,
            num_kv_heads=max(1, self.num_kv_heads // tensor),
            ffn_size=max(1, self.ffn_size // tensor),
        )

    @property
    def mask(self) -> Mask:
        """The mask of every sequence."""
        return mask_named(self.attention)

    @property
    def masks(self) -> tuple[Mask, ...]:
        """Masks of its layers, the one that plans are made for first."""
        return (self.mask, mask_named(self.other_attention)) if self.other_attention else (self.mask,)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of the keys and values of one token, one layer."""
        return 2 * self.num_kv_heads * self.head_dim * self.bytes_per_element

    @property
    def linear_flops_per_token(self) -> float:
        """Forward FLOPs of one token in one layer's projections and MLP (2 per multiply-add)."""
        hidden, width = self.hidden_size, self.num_heads * self.head_dim
        attention = hidden * (2 * width + 2 * self.num_kv_heads * self.head_dim)
        mlp = (3 if self.gated_ffn else 2) * hidden * self.ffn_size * max(1, self.experts_per_token)
        return 2.0 * (attention + mlp)

    @property
    def attention_flops_per_pair(self) -> float:
        """Forward FLOPs of one (query, key) pair in one layer: scores and weighted values, all
        heads.
        """
        return 4.0 * self.num_heads * self.head_dim
