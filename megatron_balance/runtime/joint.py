"""Attention calls that several pipeline stages make together (DistCA, section 4.1).

A stage attends forward with the stages that are in its forward tick, and backward with those in its backward tick, which are others: two
plans, bound apart. A stage without a microbatch of its own in a tick serves: it makes the same calls without rows of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_balance.errors import InvalidProgramError
from megatron_balance.runtime.bind import Bound
from megatron_balance.runtime.executor import run_backward, run_forward
from megatron_balance.runtime.phase_run import Received, wide_dtype


@dataclass(slots=True)
class BackwardSlot:
    """Where a microbatch finds the plan of its backward tick, which is put here before the backward pass begins."""

    bound: Bound | None = None


def joint_attention(q: Tensor, k: Tensor, v: Tensor, bound: Bound, backward: BackwardSlot, scale: float) -> Tensor:
    """`balanced_attention` whose backward runs the plan that is in the slot by then. Both plans are bound with policy `replay`.

    Raises:
        InvalidProgramError: in the backward, no plan, or one that has other rows of this rank at home.
    """
    return _JointAttention.apply(q, k, v, (bound, backward, scale))


class _JointAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: tuple[Bound, BackwardSlot, float]) -> Tensor:
        bound, ctx.slot, ctx.scale = call
        ctx.num_tokens = bound.num_tokens
        out, lse, _ = run_forward(bound, q, k, v, ctx.scale)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        bound: Bound | None = ctx.slot.bound
        if bound is None or bound.num_tokens != ctx.num_tokens:
            held = "none" if bound is None else f"one with {bound.num_tokens}"
            raise InvalidProgramError(f"the backward of {ctx.num_tokens} rows needs the plan of its tick with as many at home, got {held}")
        return (*run_backward(bound, dout, (q, k, v), (out, lse), Received(), ctx.scale), None)


def serve(bound: Bound, dtype: torch.dtype, device: torch.device, scale: float, *, backward: bool) -> None:
    """One attention call of a rank that has no rows in it: what others sent it, and back.

    Raises:
        InvalidProgramError: the plan has rows of this rank at home.
    """
    if bound.num_tokens:
        raise InvalidProgramError(f"rank {bound.rank} has {bound.num_tokens} rows of its own in a call that it only serves")
    shape = bound.shape
    q = torch.empty(0, shape.num_heads, shape.head_dim, dtype=dtype, device=device)
    kv = torch.empty(0, shape.num_kv_heads, shape.head_dim, dtype=dtype, device=device)
    if backward:
        lse = torch.empty(0, shape.num_heads, dtype=wide_dtype(dtype), device=device)
        run_backward(bound, torch.empty_like(q), (q, kv, kv), (q, lse), Received(), scale)
    else:
        run_forward(bound, q, kv, kv, scale)
