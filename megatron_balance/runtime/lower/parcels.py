"""The wire format (`analysis.wire`) on tensors: messages packed into bytes, and read from them.

Source, target and proxies compute the same sizes, from rows, heads and element types alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from megatron_balance.analysis import wire
from megatron_balance.analysis.wire import ALIGN, Carried, padded
from megatron_balance.ir.model import GradientWire
from megatron_balance.runtime.shape import AttentionShape

Shape: TypeAlias = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True, slots=True)
class CallForm:
    """Element types of one attention call, and widths of its heads.

    `dim`: of queries and keys; `value_dim`: of values and outputs, None: the same; `latent_dim`: of
    what travels in place of keys and values, None: they do. `wide`: of partials and of summed
    gradients; `gradient`: in which gradients travel.
    """

    dim: int
    dtype: torch.dtype
    wide: torch.dtype
    gradient: torch.dtype
    value_dim: int | None = None
    latent_dim: int | None = None

    @classmethod
    def of(cls, shape: AttentionShape, dtype: torch.dtype, gradient_wire: GradientWire) -> CallForm:
        """The form of tensors of these heads in `dtype`."""
        wide = wide_dtype(dtype)
        gradient = torch.bfloat16 if gradient_wire == "bf16" else wide
        value_dim = None if shape.value_dim == shape.head_dim else shape.value_dim
        return cls(shape.head_dim, dtype, wide, gradient, value_dim, shape.latent_dim)

    @property
    def value_width(self) -> int:
        """Width of a head's values and outputs."""
        return self.dim if self.value_dim is None else self.value_dim

    @property
    def kv_widths(self) -> tuple[int, ...]:
        """Widths of keys and of values, or of what travels in their place."""
        return self.sizes.kv_widths

    @property
    def joined(self) -> bool:
        """Whether keys and values are of one width, so that one tensor carries both."""
        return self.value_dim is None and self.latent_dim is None

    @property
    def sizes(self) -> wire.HeadSizes:
        """Widths of a head and bytes of the elements."""
        elements = (self.dtype.itemsize, self.wide.itemsize, self.gradient.itemsize)
        return wire.HeadSizes(self.dim, *elements, self.value_dim, self.latent_dim)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type that partials are accumulated in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def shapes(message: Carried, form: CallForm) -> tuple[Shape, ...]:
    """Shapes and types of the tensors that carry a message (`wire.tensor_shapes`)."""
    types = {"narrow": form.dtype, "wide": form.wide, "gradient": form.gradient}
    return tuple([(shape, types[element]) for shape, element in wire.tensor_shapes(message, form.sizes)])


class BytesPlace(NamedTuple):
    """A contiguous tensor in packed bytes, from byte `begin` on."""

    begin: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def places_of(shapes: Sequence[Shape], behind: BytesPlace | None = None) -> tuple[BytesPlace, ...]:
    """Tensors one after the other, `behind` a place of the same memory if there is one."""
    places: list[BytesPlace] = []
    for shape, dtype in shapes:
        begin = 0 if behind is None else padded(behind.begin + behind.num_bytes)
        behind = BytesPlace(begin, dtype, shape, tuple(prod(shape[at:]) for at in range(1, len(shape) + 1)))
        places.append(behind)
    return tuple(places)


class Layout(NamedTuple):
    """Messages packed one after the other: bytes of all, and the tensors of each."""

    num_bytes: int
    places: tuple[tuple[BytesPlace, ...], ...]


@lru_cache(maxsize=4096)
def layout(messages: tuple[Carried, ...], form: CallForm) -> Layout:
    """The layout of messages; every layer asks for the same ones."""
    places: list[tuple[BytesPlace, ...]] = []
    begin = end = 0
    for message in messages:
        own: list[BytesPlace] = []
        for shape, dtype in shapes(message, form):
            strides = tuple(prod(shape[at:]) for at in range(1, len(shape) + 1))
            own.append(BytesPlace(begin, dtype, shape, strides))
            end = begin + prod(shape) * dtype.itemsize
            begin = padded(end)
        places.append(tuple(own))
    return Layout(end, tuple(places))


def parcel_bytes(messages: Sequence[Carried], form: CallForm) -> int:
    """Bytes of all messages from one rank to another in one exchange, packed."""
    return layout(tuple(messages), form).num_bytes


def as_bytes(x: Tensor) -> Tensor:
    """A contiguous tensor's memory, uint8 [bytes]: a view."""
    return x.view(-1).view(torch.uint8)


def adjacent_bytes(tensors: Sequence[Tensor]) -> Tensor | None:
    """The bytes of tensors that already lie packed in one memory: a view; else None."""
    first, at = tensors[0], tensors[0].data_ptr()
    memory = first.untyped_storage()
    for x in tensors:
        if x.data_ptr() != at or x.untyped_storage().data_ptr() != memory.data_ptr() or not x.is_contiguous():
            return None
        at = x.data_ptr() + padded(x.nbytes)
    size = tensors[-1].data_ptr() + tensors[-1].nbytes - first.data_ptr()
    return as_bytes(first).as_strided((size,), (1,))


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """Contiguous tensors as packed bytes: a view of one or of adjacent ones, else a copy."""
    if len(tensors) == 1:
        return as_bytes(tensors[0])
    together = adjacent_bytes(tensors)
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


def unpack(raw: Tensor, messages: Sequence[Carried], form: CallForm) -> list[list[Tensor]]:
    """The tensors of each message, as views of the bytes that `pack` made of them."""
    whole = raw.narrow(0, 0, raw.shape[0] // ALIGN * ALIGN)  # what can be seen as elements of any type
    seen: dict[torch.dtype, tuple[Tensor, int]] = {}
    unpacked: list[list[Tensor]] = []
    for places in layout(tuple(messages), form).places:
        tensors: list[Tensor] = []
        for begin, dtype, shape, strides in places:
            if dtype not in seen:
                typed = whole.view(dtype)
                seen[dtype] = typed, int(typed.storage_offset())
            typed, first = seen[dtype]
            tensors.append(typed.as_strided(shape, strides, first + begin // dtype.itemsize))
        unpacked.append(tensors)
    return unpacked
