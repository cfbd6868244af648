"""All tables of a bound plan in one block, with one copy to the device.

Row indices, cu_seqlens and the movers' tables are made on the host, hundreds of them. Copied one by
one, each from pageable memory, they hold up the host for longer than a layer's kernels run. Here
they are packed into one pinned block, which goes over in one copy; each tensor becomes a view of
the device's block, where it stands: whoever holds it need not be told.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_balance.runtime.lower.steps import FinishStep, GradLaunch, IssueStep, Launch, Packed, Phase

ALIGN = 16
"""Bytes. Triton compiles a kernel anew for pointers that are not aligned so."""


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in a value: itself, or those in its tuples, lists and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from tensors_in(each)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name))


def tables_of(phase: Phase) -> Iterator[Tensor]:
    """The tables in a phase's steps; some may come twice."""
    for step in phase.steps:
        match step:
            case Launch():
                yield from _of_packed(step.q.packed, step.k.packed, step.out)
                yield from tensors_in(step.entries)
            case GradLaunch():
                yield from _of_packed(step.q.packed, step.k.packed, step.dout.packed, step.dq, step.dk)
                yield from tensors_in(step.entries)
            case IssueStep(exchange):
                yield from _of_packed(*(message.packed for message in exchange.sends))
            case FinishStep(exchange):
                yield from _of_packed(*(message.packed for message in exchange.receives))


def _of_packed(*packed: Packed) -> Iterator[Tensor]:
    return (index for one in packed for index in one.indices if index is not None)


def ship(tables: Iterable[Tensor], device: torch.device) -> int:
    """Make tables on the host views of one block on `device`; the bytes of that block.

    In place: the tensors are the same objects afterwards. The copy is issued to the device's
    current stream, and the host does not wait for it.
    """
    by_dtype: defaultdict[torch.dtype, dict[int, Tensor]] = defaultdict(dict)
    for table in tables:
        by_dtype[table.dtype][id(table)] = table
    parts: list[tuple[torch.dtype, list[Tensor], list[int], int]] = []
    num_bytes = 0
    for dtype, named in by_dtype.items():
        held, step = list(named.values()), max(1, ALIGN // dtype.itemsize)
        sizes = [-(-table.numel() // step) * step for table in held]
        parts.append((dtype, held, sizes, num_bytes))
        num_bytes += sum(sizes) * dtype.itemsize
    if not num_bytes:
        return 0
    pinned = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    for dtype, held, sizes, begin in parts:
        for table, place in zip(held, _places(pinned, dtype, sizes, begin), strict=True):
            place[: table.numel()] = table.numpy().reshape(-1)
    block = pinned.to(device, non_blocking=True)
    for dtype, held, sizes, begin in parts:
        views = block[begin : begin + sum(sizes) * dtype.itemsize].view(dtype).split(sizes)
        for table, view in zip(held, views, strict=True):
            table.data = view[: table.numel()].view(table.shape)
    return num_bytes


def _places(pinned: Tensor, dtype: torch.dtype, sizes: Sequence[int], begin: int) -> Iterator[Any]:
    """The places of tables of one type in the host's block, as NumPy views."""
    values = pinned[begin : begin + sum(sizes) * dtype.itemsize].view(dtype).numpy()
    at = 0
    for size in sizes:
        yield values[at : at + size]
        at += size
