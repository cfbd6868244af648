"""Attention inside graphs of torch.compile: an operator of torch, with a fake implementation and a
backward, and what stands for a batch in a graph.

A graph holds tensors, and a batch is none. Two stand for it: `number`, whose value names the plan in
a table, and `room`, without elements, whose size says how many elements a call receives for its
backward. So the operator can return these as one tensor, which autograd keeps: hooks on saved
tensors, checkpointing and offloading, see all that a call keeps, and nothing is kept elsewhere.

Shapes: q [T, H, D], k [T, G, D], v [T, G, V], rows of padding included; output [T, H, V].
"""

# ruff: noqa: ARG001, PLR0913, PLR0917  arguments are an operator's, and those of its fake implementation

import weakref
from dataclasses import replace
from itertools import count
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_balance.errors import ConfigError
from megatron_balance.ir.mask import SlidingWindow
from megatron_balance.runtime.attention import attend_flat, attend_flat_back, room_of
from megatron_balance.runtime.bind import AttentionShape, Bound
from megatron_balance.runtime.lower.memory import wide_dtype

_SPARE = 2  # elements of `room` beyond what is needed: torch.compile treats sizes 0 and 1 as constants


_Key: TypeAlias = tuple[torch.dtype, torch.device, int | None, float, AttentionShape | None]


class _InGraphs(NamedTuple):
    """A batch, which a backward may outlive, and its plan as forwards looked it up."""

    batch: weakref.ref[Any]
    bounds: dict[_Key, Bound]


# By the value of `number`. An entry lasts as long as the number's memory: the batch has it, and so has
# every graph of autograd that goes back through its attention.
_held: dict[int, _InGraphs] = {}
_numbers = count()


def number_of(batch: object) -> Tensor:
    """A number, int64 [], that stands for a batch in graphs."""
    value = next(_numbers)
    number = torch.tensor(value)
    _held[value] = _InGraphs(weakref.ref(batch), {})
    weakref.finalize(number.untyped_storage(), _held.pop, value).atexit = False
    return number


def room_for(bound: Bound) -> Tensor:
    """A tensor without elements, whose first size says what a call receives for its backward."""
    return mark_dynamic(torch.empty(room_of(bound) + _SPARE, 0))


def mark_dynamic(x: Tensor) -> Tensor:
    """Tell torch.compile that the first size of `x` differs from step to step."""
    from torch._dynamo import maybe_mark_dynamic

    maybe_mark_dynamic(x, 0)
    return x


def _bound(number: Tensor, q: Tensor, k: Tensor, v: Tensor, window: int | None, softcap: float, own: bool) -> Bound:
    held = _held.get(int(number))
    shape = AttentionShape(q.shape[1], k.shape[1], q.shape[2], v.shape[2]) if own else None
    key: _Key = (q.dtype, q.device, window, softcap, shape)
    if held is not None and (bound := held.bounds.get(key)) is not None:
        return bound
    batch = None if held is None else held.batch()
    if held is None or batch is None:
        raise ConfigError(
            "the backward goes through attention of a batch that is gone; where hooks on saved tensors move what a "
            "graph saves, keep the batch until the backward is done"
        )
    mask = None if window is None else SlidingWindow(window)
    bound = batch.bound(q.dtype, q.device, mask, replace(shape or batch.shape, softcap=softcap))
    return held.bounds.setdefault(key, bound)


@torch.library.custom_op("megatron_balance::attention", mutates_args=())
def attention(
    number: Tensor,
    room: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    scale: float | None,
    window: int | None,
    softcap: float,
    layers: int | None,
    own_heads: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output [T, H, V], LSE [T, H], and what was received for the backward. Collective."""
    bound = _bound(number, q, k, v, window, softcap, own_heads)
    batch, rows = _held[int(number)].batch(), bound.num_tokens
    if batch is not None and {len(q), len(k), len(v)} != {batch.num_rows}:
        raise ConfigError(
            f"expected q, k and v with the {batch.num_rows} rows of batch.tokens, got {len(q)}, {len(k)} and {len(v)}"
        )
    with torch.autocast(q.device.type, enabled=False):
        out, lse, kept = attend_flat(bound, q[:rows], k[:rows], v[:rows], scale, sink, len(room))
    if batch is not None:
        batch.count_call(layers, out)
    behind = len(q) - rows
    return _apart(F.pad(out, (0, 0, 0, 0, 0, behind)), F.pad(lse, (0, 0, 0, behind)), kept)


@attention.register_fake
def _(number, room, q, k, v, sink, scale, window, softcap, layers, own_heads):
    out = q.new_empty(q.shape[0], q.shape[1], v.shape[2])
    return out, q.new_empty(q.shape[:2], dtype=wide_dtype(q.dtype)), q.new_empty(room.shape[0])


@torch.library.custom_op("megatron_balance::attention_backward", mutates_args=())
def _attention_backward(
    number: Tensor,
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    out: Tensor,
    lse: Tensor,
    kept: Tensor,
    scale: float | None,
    window: int | None,
    softcap: float,
    own_heads: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and the sink, an empty one where there is none. Collective."""
    bound = _bound(number, q, k, v, window, softcap, own_heads)
    rows = bound.num_tokens
    with torch.autocast(q.device.type, enabled=False):
        grads, of_sink = attend_flat_back(
            bound, grad[:rows].contiguous(), (q[:rows], k[:rows], v[:rows]), (out[:rows], lse[:rows]), kept, scale, sink
        )
    padded = [F.pad(x, (0, 0, 0, 0, 0, len(q) - rows)) for x in grads]
    return _apart(*padded, q.new_empty(0) if of_sink is None else of_sink)


@_attention_backward.register_fake
def _(number, grad, q, k, v, sink, out, lse, kept, scale, window, softcap, own_heads):
    grads = (x.new_empty(x.shape) for x in (q, k, v))
    return *grads, q.new_empty(0) if sink is None else sink.new_empty(sink.shape)


def attend(
    number: Tensor,
    room: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    how: tuple[float | None, int | None, float, int | None, bool],
) -> Tensor:
    """`balanced_attention` as a graph has it; `how`: scale, window, softcap, layers, own heads."""
    shape = q.shape
    device = q.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    if q.ndim == 4:
        q, k, v = q.squeeze(0), k.squeeze(0), v.squeeze(0)
    out, _, _ = attention(number, room, q, k, v, sink, *how)
    return out.view(*shape[:-1], v.shape[-1])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    number, _, q, k, v, sink, *ctx.how, _, ctx.own = inputs
    ctx.save_for_backward(number, q, k, v, sink, *output)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    number, q, k, v, sink, *output = ctx.saved_tensors
    *grads, of_sink = _attention_backward(number, grad, q, k, v, sink, *output, *ctx.how, ctx.own)
    return None, None, *grads, None if sink is None else of_sink, *[None] * 5


attention.register_autograd(_backward, setup_context=_setup)


def _apart(*tensors: Tensor) -> tuple[Any, ...]:
    """The tensors, each in memory of its own, as an operator returns them."""
    seen: set[int] = set()
    found: list[Tensor] = []
    for x in tensors:
        memory = x.untyped_storage().data_ptr()
        found.append(x.clone() if x.numel() and memory in seen else x)
        seen.add(memory)
    return tuple(found)
