"""The wire format (`analysis.wire`) on tensors: packing messages into bytes, and reading them where they arrive.

Source, target and proxies compute the same sizes, from rows, heads and element types alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

import torch
from torch import Tensor

from megatron_balance.analysis import wire
from megatron_balance.analysis.wire import ALIGN, Carried, padded
from megatron_balance.analysis.wire import piece_bounds as cut

__all__ = ["ALIGN", "Carried", "Form", "as_bytes", "cut", "joined", "pack", "padded", "parcel_bytes", "shapes", "unpacked", "wide_dtype"]

Shape: TypeAlias = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True, slots=True)
class Form:
    """Element types and head dim of one attention call. `wide`: of partials and gradients."""

    dim: int
    dtype: torch.dtype
    wide: torch.dtype


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type that partials are accumulated in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def shapes(message: Carried, form: Form) -> tuple[Shape, ...]:
    """The tensors that carry a message (`wire.tensor_shapes`), with their types."""
    return tuple((shape, form.wide if wide else form.dtype) for shape, wide in wire.tensor_shapes(message, form.dim))


def parcel_bytes(messages: Sequence[Carried], form: Form) -> int:
    """Bytes of all messages from one rank to another in one exchange, packed one after the other, each tensor aligned."""
    return wire.parcel_bytes(messages, wire.Sizes(form.dim, form.dtype.itemsize, form.wide.itemsize))


def as_bytes(x: Tensor) -> Tensor:
    """A contiguous tensor's memory, uint8 [bytes]: a view."""
    return x.view(-1).view(torch.uint8)


def joined(tensors: Sequence[Tensor]) -> Tensor | None:
    """The bytes of tensors that lie one after the other in one memory already, each aligned as `unpacked` has them: a view; else None."""
    first, at = tensors[0], tensors[0].data_ptr()
    memory = first.untyped_storage()
    for x in tensors:
        if x.data_ptr() != at or x.untyped_storage().data_ptr() != memory.data_ptr() or not x.is_contiguous():
            return None
        at = x.data_ptr() + padded(x.nbytes)
    size = tensors[-1].data_ptr() + tensors[-1].nbytes - first.data_ptr()
    return as_bytes(first).as_strided((size,), (1,))


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """Contiguous tensors as one run of bytes: a view of the only one or of what is `joined`, else a copy."""
    if len(tensors) == 1:
        return as_bytes(tensors[0])
    together = joined(tensors)
    if together is not None:
        return together
    starts, at = [], 0
    for x in tensors:
        starts.append(at)
        at = padded(at + x.nbytes)
    raw = torch.empty(starts[-1] + tensors[-1].nbytes, dtype=torch.uint8, device=tensors[0].device)
    for start, x in zip(starts, tensors, strict=True):
        raw[start : start + x.nbytes].copy_(as_bytes(x))
    return raw


def unpacked(raw: Tensor, messages: Sequence[Carried], form: Form) -> list[list[Tensor]]:
    """The tensors of each message, as views of the bytes that `pack` made of them."""
    found: list[list[Tensor]] = []
    at = 0
    for message in messages:
        tensors: list[Tensor] = []
        for shape, dtype in shapes(message, form):
            stop = at + prod(shape) * dtype.itemsize
            tensors.append(raw[at:stop].view(dtype).view(shape))
            at = padded(stop)
        found.append(tensors)
    return found
