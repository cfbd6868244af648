"""Attention of a balanced batch: the call in a model's layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import disable

from megatron_balance.errors import ConfigError
from megatron_balance.ir.mask import Mask, SlidingWindow
from megatron_balance.runtime import attention
from megatron_balance.torch.batch import BalancedBatch


def balanced_attention(  # noqa: PLR0913  three tensors and how to attend
    q: Tensor,
    k: Tensor,
    v: Tensor,
    batch: BalancedBatch,
    scale: float | None = None,
    *,
    window: int | None = None,
    sink: Tensor | None = None,
    layers: int | None = None,
) -> Tensor:
    """Attention of this rank's queries within their documents, wherever the keys lie.

    Differentiable. Collective: every rank of the pool calls it in every layer, in the forward, in
    the backward, and where checkpointing computes a forward again. Under `torch.compile` the graph
    breaks here. Rows of padding give zeros.

    Args:
        q: [T, H, D], or [1, T, H, D]; T as in `batch.tokens`.
        k: [T, G, D]; G divides H. Positions are in it already.
        v: [T, G, V]; V as the model's `value_dim`, D where it has none.
        batch: of the model's inputs.
        scale: of the scores; default 1 / sqrt(D).
        window: keys that a query sees, its own the last; None: all that the batch's mask shows.
        sink: [H], a logit of each head beside the keys of every query, without a value.
        layers: calls of this that a forward makes, where the model is another than the balancer's,
            as a reference model; the batch counts them (`BalancedBatch`).

    Returns:
        The output, in the shape of `q`, V wide.

    Raises:
        ConfigError: the tensors do not have the batch's rows, or other heads than the balancer's
            model, or are on several devices; a window under another mask than the causal one.
    """
    mask = None if window is None else SlidingWindow(window)
    return _outside_graphs(q, k, v, batch, _How(scale, mask, sink, layers))


class _How(NamedTuple):
    """Facts of a call beside tensors and batch; None: as they have it."""

    scale: float | None
    mask: Mask | None
    sink: Tensor | None
    layers: int | None


def _attend(q: Tensor, k: Tensor, v: Tensor, batch: BalancedBatch, how: _How) -> Tensor:
    if not isinstance(batch, BalancedBatch):
        raise ConfigError(
            f"expected the BalancedBatch that the balancer returned, got {type(batch).__name__}; hand it through the "
            "model's forward to its attention"
        )
    for name, x in zip("qkv", (q, k, v), strict=True):
        if not isinstance(x, Tensor):
            raise ConfigError(f"{name}: expected a tensor [rows, heads, head_dim], got {type(x).__name__}")
    if not q.device == k.device == v.device == batch.tokens.device:
        raise ConfigError(
            f"expected q, k and v on the batch's device {batch.tokens.device}, got {q.device}, {k.device} and "
            f"{v.device}"
        )
    device = q.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        q, k, v = (x.to(dtype) for x in (q, k, v))
    if not q.dtype == k.dtype == v.dtype:
        raise ConfigError(f"expected q, k and v of one type, got {q.dtype}, {k.dtype} and {v.dtype}")
    rows = [x[0] if x.ndim == 4 and len(x) == 1 else x for x in (q, k, v)]
    for name, x in zip("qkv", rows, strict=True):
        if x.ndim != 3 or len(x) != batch.num_rows:
            raise ConfigError(
                f"{name}: expected [rows, heads, head_dim] with the {batch.num_rows} rows of batch.tokens, got "
                f"{list(x.shape)}"
            )
    bound = batch.bound(q.dtype, q.device, how.mask)
    owned = [x[: bound.num_tokens] for x in rows]
    with torch.autocast(device, enabled=False):
        out = attention.balanced_attention(owned[0], owned[1], owned[2], bound, how.scale, hooked=True, sink=how.sink)
    batch.count_call(how.layers)
    return F.pad(out, (0, 0, 0, 0, 0, batch.num_rows - bound.num_tokens)).view(*q.shape[:-1], v.shape[-1])


_outside_graphs = cast("Callable[[Tensor, Tensor, Tensor, BalancedBatch, _How], Tensor]", disable(_attend))
