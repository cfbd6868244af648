"""All variants of the Triton kernels that attention calls use, built before the first step.

Compiling one takes from a part of a second to several; in a step that would stop this rank, and
with it every rank that waits for it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from megatron_balance.runtime.lower.parcels import wide_dtype
from megatron_balance.runtime.movers.triton.kernels import AddBlock, CopyBlock, add_rows, copy_rows
from megatron_balance.runtime.movers.triton.mover import PARTS, PLACES, TritonMover, launch, merge_parts, partial_of
from megatron_balance.runtime.movers.triton.tables import BlockTable


class LaunchTypes(NamedTuple):
    """Types of the sources and targets of one launch, and elements of a head."""

    source: torch.dtype
    target: torch.dtype
    dim: int


def copies(dtype: torch.dtype, head_dim: int) -> list[LaunchTypes]:
    """Kinds that are copied: inputs and outputs, LSE, gradients, and these converted."""
    wide = wide_dtype(dtype)
    kinds = [(a, b, head_dim) for a in (dtype, wide) for b in (dtype, wide)]
    return [LaunchTypes(*kind) for kind in dict.fromkeys((*kinds, (wide, wide, 1)))]


def additions(dtype: torch.dtype, head_dim: int) -> list[LaunchTypes]:
    """Kinds that are added: gradients as a kernel leaves them, and as they travel."""
    wide = wide_dtype(dtype)
    return [LaunchTypes(a, wide, head_dim) for a in dict.fromkeys((dtype, wide))]


def build(device: torch.device, dtype: torch.dtype, head_dim: int) -> int:
    """Launch each variant once, on nothing; their number.

    `dtype`: of queries, keys and values.
    """
    mover = TritonMover(device)
    launches = 0
    for kernel, width, kinds in (
        (copy_rows, CopyBlock.WIDTH, copies(dtype, head_dim)),
        (add_rows, AddBlock.WIDTH, additions(dtype, head_dim)),
    ):
        blocks = torch.zeros((1, width), dtype=torch.int32, device=device)  # one block of no rows
        table = BlockTable((), blocks, mover.blank(torch.int32), 1)
        for kind in kinds:
            for places in PLACES:
                x, y = (torch.zeros((1, 1, kind.dim), dtype=d, device=device) for d in (kind.source, kind.target))
                launch(kernel, table, [x] * places, [y] * places)
                launches += 1
    wide = wide_dtype(dtype)
    lse = torch.zeros((1, 1), dtype=wide, device=device)
    part = partial_of(torch.zeros((1, 1, head_dim), dtype=dtype, device=device), lse)
    for num_parts in PARTS:
        for out_dtype in dict.fromkeys((dtype, wide)):
            out = torch.empty((1, 1, head_dim), dtype=out_dtype, device=device)
            merge_parts(mover, [part] * num_parts, out, torch.empty_like(lse))
            launches += 1
    return launches
