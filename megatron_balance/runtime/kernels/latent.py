"""Attention over the latent of multi-latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

Keys and values are made of it inside a launch, and their gradients become the latent's there, so that
nothing else of a call knows more than its rows [T, 1, L].

Shape legend: as `runtime.kernels.base`; C rank of the latent, R width of the rotary key that all
heads share, L = C + R.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from megatron_balance.errors import ConfigError
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.runtime.kernels.base import Entries, Kernel
from megatron_balance.runtime.lower.memory import AttentionShape

# Comm patterns in which a rank attends with some of the heads.
BY_HEADS = ("head_exchange", "chunk_exchange", "head_exchange_once", "chunk_exchange_once", "head_ring")


def check_latent(plan: MicrobatchPlan) -> None:
    """Raise ConfigError for a plan that parts heads, as the latent is of all of them."""
    for zone in plan.zones:
        if zone.pattern in BY_HEADS or (zone.pattern == "waves" and getattr(zone, "group_size", 1) > 1):
            raise ConfigError(
                f"planner {plan.planner}: zone {zone.name} parts heads ({zone.pattern}), and with 'latent_kv: true' "
                "all heads come in one latent; choose another planner, or 'latent_kv: false'"
            )


class _LatentEntries(NamedTuple):
    inner: Any
    keys: tuple[tuple[int, int], ...]


class LatentKernel:
    """`kernel`, which takes keys and values of heads, over latents.

    See `runtime.kernels.base.Kernel`, where k is the latent and there is no v. `with_weight` gives the
    kernel of a layer: this one only prepares.
    """

    def __init__(self, kernel: Kernel, shape: AttentionShape, weight: Tensor | None = None) -> None:
        """`weight` [H * (D - R + V), C]: makes keys without rotary part, and values, by head."""
        assert shape.latent is not None, "a shape without latent"
        self.kernel, self.name, self.shape, self.weight = kernel, kernel.name, shape, weight
        self.rank, self.rope = shape.latent
        self.plain = shape.head_dim - self.rope
        self.weight_grad: Tensor | None = None  # of this rank's launches so far, in fp32

    def with_weight(self, weight: Tensor) -> "LatentKernel":
        return LatentKernel(self.kernel, self.shape, weight)

    def launches(self, entries: _LatentEntries) -> int:
        return self.kernel.launches(entries.inner)

    def prepare(self, entries: Entries, device: torch.device) -> _LatentEntries:
        return _LatentEntries(self.kernel.prepare(entries, device), entries.k)

    def forward(self, entries: _LatentEntries, q: Tensor, latent: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        return self.kernel.forward(entries.inner, q, *self.keys_and_values(latent), scale)

    def backward(
        self, entries: _LatentEntries, dout: tuple[Tensor, Tensor, Tensor], q: Tensor, latent: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Packed dq [N, H, D] and the latent's gradient [M, 1, L]; `weight_grad` grows."""
        assert self.weight is not None, "a layer's weight makes keys of a latent"
        dq, dk, dv = self.kernel.backward(entries.inner, dout, q, *self.keys_and_values(latent), scale)
        # [M, H * (D - R + V)]: gradients of what the weight made of each packed key row's latent.
        of_heads = torch.cat([dk[..., : self.plain], dv], dim=-1).flatten(1).to(self.weight.dtype)
        rows = torch.cat([latent[start:stop, 0, : self.rank] for start, stop in entries.keys])
        grown = (of_heads.T @ rows).float() if self.weight.dtype != torch.float64 else of_heads.T @ rows
        self.weight_grad = grown if self.weight_grad is None else self.weight_grad.add_(grown)
        # The rotary key is one for all heads, so its gradient is their sum.
        rope = dk[..., self.plain :].sum(dim=1).to(self.weight.dtype)
        return dq, torch.cat([of_heads @ self.weight, rope], dim=-1)[:, None]

    def keys_and_values(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        assert self.weight is not None, "a layer's weight makes keys of a latent"
        return keys_and_values(latent, self.weight, self.shape)


def keys_and_values(latent: Tensor, weight: Tensor, shape: AttentionShape) -> tuple[Tensor, Tensor]:
    """k [T, H, D], v [T, H, V] of latents [T, 1, L] by weight [H * (D - R + V), C]; differentiable."""
    # Of a head's rows of the weight the first D - R make its key, and the last V its value; the
    # last R elements of every key are the latent's, rotated already.
    assert shape.latent is not None, "a shape without latent"
    rank, rope = shape.latent
    heads, plain = shape.num_heads, shape.head_dim - rope
    both = linear(latent[:, 0, :rank], weight).unflatten(1, (heads, plain + shape.value_width))
    k = torch.cat([both[..., :plain], latent[..., rank:].expand(-1, heads, -1)], dim=-1)
    return k, both[..., plain:]
