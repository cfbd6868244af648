"""Per-token tensors between the ranks that read tokens and those that compute them, differentiable."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_balance.runtime.attention import differentiable_once
from megatron_balance.training.tokens import TokenExchange


def there(read: Tensor, exchange: TokenExchange) -> Tensor:
    """Values [rows read here, ...] to the ranks that compute them: [rows of this rank, ...].

    Differentiable. Collective over the pool, in the backward too.
    """
    return _There.apply(read, exchange)


def back(computed: Tensor, exchange: TokenExchange) -> Tensor:
    """The inverse of `there`: [rows of this rank, ...] to [rows read here, ...]."""
    return _Back.apply(computed, exchange)


class _There(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, read: Tensor, exchange: TokenExchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.there(read)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.exchange.back(grad), None


class _Back(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, computed: Tensor, exchange: TokenExchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.back(computed)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.exchange.there(grad), None
