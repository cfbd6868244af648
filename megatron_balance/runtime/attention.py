"""Attention by a plan, as one differentiable call."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from megatron_balance.errors import ConfigError
from megatron_balance.runtime.bind import Bound
from megatron_balance.runtime.executor import run_backward, run_forward


def balanced_attention(q: Tensor, k: Tensor, v: Tensor, bound: Bound, softmax_scale: float | None = None) -> Tensor:
    """Causal attention of this rank's queries within their sequences, wherever the keys lie. Differentiable.

    q [T, H, D], k and v [T, G, D] in the order of `bound.home`; returns [T, H, D]. `softmax_scale`: default 1 / sqrt(D).
    Collective: every rank of the pool calls it, also one without tokens (T = 0).

    Raises ConfigError: the tensors do not have the plan's rows and heads.
    """
    shape = bound.shape
    for name, x, heads in (("q", q, shape.num_heads), ("k", k, shape.num_kv_heads), ("v", v, shape.num_kv_heads)):
        if tuple(x.shape) != (bound.num_tokens, heads, shape.head_dim):
            raise ConfigError(f"{name} is {tuple(x.shape)}, the plan gives this rank {(bound.num_tokens, heads, shape.head_dim)}")
    scale = 1.0 / math.sqrt(shape.head_dim) if softmax_scale is None else softmax_scale
    return _Attention.apply(q, k, v, bound, scale)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bound: Bound, scale: float) -> Tensor:
        out, lse, ctx.received = run_forward(bound, q, k, v, scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.bound, ctx.scale = bound, scale
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        grads = run_backward(ctx.bound, dout, (q, k, v), (out, lse), ctx.received, ctx.scale)
        ctx.received = None
        return (*grads, None, None)
