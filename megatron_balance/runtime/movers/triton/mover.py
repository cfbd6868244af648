"""Rows moved by Triton. Tables of launches are made once, and kept with the bound plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from megatron_balance.runtime.lower.steps import Packed
from megatron_balance.runtime.movers.base import Fill, Partials, Place, Space
from megatron_balance.runtime.movers.triton.kernels import BLOCK_ROWS, add_rows, copy_rows, merge_rows
from megatron_balance.runtime.movers.triton.tables import BlockTable, RowMap, add_tables, copy_tables, row_maps

ACCESS_BYTES = 16
TILE_BYTES = 2048
"""Of one row in a program: eight such rows are 128 bytes for each of its 128 threads."""
MAX_PARTS = 9
"""Partials of one merge, an accumulator among them. The kernel is unrolled over them."""
MERGE_TILE = 2048
"""Elements of one program of the merge: one head of some rows."""


class TritonMover:
    """See `runtime.movers.base.Mover`.

    Tables belong to the packed tensors of one bound plan, which are kept.
    """

    name = "triton"

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._tables: dict[tuple[object, ...], list[BlockTable]] = {}
        self._row_maps: dict[int, tuple[RowMap, ...]] = {}
        self._kept: list[Packed] = []

    def fill(self, fills: Sequence[Fill]) -> None:
        for table in self._of("fill", fills, lambda packed: copy_tables(packed, self.device, take=True)):
            sources = [fills[place].sources[run] for place, run in table.pairs]
            _launch(copy_rows, table, sources, [fills[place].target for place, _ in table.pairs])

    def place(self, places: Sequence[Place]) -> None:
        for table in self._of("place", places, lambda packed: copy_tables(packed, self.device, take=False)):
            targets = [places[place].targets[run] for place, run in table.pairs]
            _launch(copy_rows, table, [places[place].source for place, _ in table.pairs], targets)

    def add(self, places: Sequence[Place]) -> None:
        for table in self._of("add", places, lambda packed: add_tables(packed, self.device)):
            targets = [places[place].targets[run] for place, run in table.pairs]
            _launch(add_rows, table, [places[place].source for place, _ in table.pairs], targets)

    def partials(self, space: Space) -> Partials:
        return TritonPartials(space, self)

    def row_maps(self, packed: Packed, space: Space) -> tuple[RowMap, ...]:
        """Row maps of the packed rows, made once."""
        if id(packed) not in self._row_maps:
            self._kept.append(packed)
            self._row_maps[id(packed)] = row_maps(
                packed, {buffer: rows for buffer, (rows, _) in space.sizes.items()}, self.device
            )
        return self._row_maps[id(packed)]

    def _of(
        self, what: str, moves: Sequence[Fill] | Sequence[Place], make: Callable[[list[Packed]], list[BlockTable]]
    ) -> list[BlockTable]:
        key = (what, *(id(move.packed) for move in moves))
        if key not in self._tables:
            packed = [move.packed for move in moves]
            self._kept += packed  # the key holds their ids: they must not go away
            self._tables[key] = make(packed)
        return self._tables[key]


def _launch(kernel: Any, table: BlockTable, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Launch over the blocks of a table.

    `sources`, `targets`: of each of its pairs, [T, H, ...].
    """
    if not len(table.blocks):
        return
    sources = [x if _in_rows(x) else x.contiguous() for x in sources]
    assert all(_in_rows(x) for x in targets), "a target with gaps inside its rows"
    dims = tuple(prod(x.shape[2:]) for x in targets)
    element_bytes = min(x.element_size() for x in (*sources, *targets))
    cols = min(triton.next_power_of_2(table.heads * max(dims)), TILE_BYTES // element_bytes)
    kernel[(len(table.blocks), triton.cdiv(table.heads * max(dims), cols))](
        tuple(sources),
        tuple(targets),
        tuple(x.stride(0) for x in sources),
        tuple(x.stride(0) for x in targets),
        table.blocks,
        table.index,
        DIMS=dims,
        VECS=tuple(_vector(x, y, dim) for x, y, dim in zip(sources, targets, dims, strict=True)),
        ROWS=BLOCK_ROWS,
        COLS=cols,
    )


def _in_rows(x: Tensor) -> bool:
    """Whether the elements of a row of [T, H, ...] have no gaps."""
    return x.numel() == 0 or x[0].is_contiguous()


def _vector(source: Tensor, target: Tensor, dim: int) -> int:
    """Elements of one access: 16 bytes of the narrower type where `dim` allows, else 1."""
    wanted = ACCESS_BYTES // min(source.element_size(), target.element_size())
    return wanted if dim % wanted == 0 else 1


class _Partial(NamedTuple):
    """A partial of some rows of a buffer. `owned`: made here, so that it may be written again."""

    out: Tensor
    lse: Tensor
    row_map: RowMap
    owned: bool = False


class TritonPartials:
    """See `runtime.movers.base.Partials`.

    Some partials are held as they came, and merged in one launch with the final conversion.
    """

    def __init__(self, space: Space, mover: TritonMover) -> None:
        self.space, self.mover = space, mover
        self.held: dict[int, list[_Partial]] = {}

    def add(self, packed: Packed, merges: tuple[bool, ...], out: Tensor, lse: Tensor) -> None:
        del merges  # rows without a partial are known here by their row map
        for row_map in self.mover.row_maps(packed, self.space):
            held = self.held.setdefault(row_map.buffer, [])
            held.append(_Partial(out, lse, row_map))
            if len(held) > self.space.held:
                self.held[row_map.buffer] = [self.accumulated(row_map.buffer, held)]

    def accumulated(self, buffer: int, held: list[_Partial]) -> _Partial:
        """All partials of a buffer as one, in the wide type.

        In the memory of the first, if that was made so before.
        """
        rows, heads = self.space.sizes[buffer]
        target = held[0]
        if not target.owned:
            out = self.space.empty((rows, heads, self.space.dim), self.space.wide)
            target = _Partial(
                out, self.space.empty((rows, heads), self.space.wide), RowMap(buffer, None, 0, heads, 0), owned=True
            )
        merge_parts(held, target.out, target.lse)
        return target

    def send(self, packed: Packed, into: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        shape = (packed.num_rows, packed.num_heads)
        out, lse = into or (
            self.space.empty((*shape, self.space.dim), self.space.dtype),
            self.space.empty(shape, self.space.wide),
        )
        for run, index in zip(packed.runs, packed.indices, strict=True):
            own = (slice(run.row, run.row + run.count), slice(run.head, run.head + run.num_heads))
            merge_parts(
                self.held.get(run.buffer, []),
                out[own],
                lse[own],
                rows=index,
                first_row=run.start,
                first_head=run.buffer_head,
            )
        return out, lse

    def final(self) -> tuple[Tensor, Tensor]:
        rows, heads = self.space.sizes[0]
        held = self.held.get(0, [])
        if len(held) == 1 and held[0].row_map.covers(heads) and held[0].out.dtype == self.space.dtype:
            return held[0].out, held[0].lse  # the only one, of all rows: nothing to merge
        device = self.mover.device
        out = torch.empty((rows, heads, self.space.dim), dtype=self.space.dtype, device=device)
        lse = torch.empty((rows, heads), dtype=self.space.wide, device=device)
        merge_parts(held, out, lse)
        return out, lse


def merge_parts(
    held: Sequence[_Partial],
    out: Tensor,
    lse: Tensor,
    *,
    rows: Tensor | None = None,
    first_row: int = 0,
    first_head: int = 0,
) -> None:
    """Merge partials of a buffer into rows of `out` [N, H, D] and `lse` [N, H].

    The buffer's heads from `first_head` on; without partials: zero and -inf.

    `rows`: the buffer's row of each, or None: from `first_row` on. `out` and `lse` may be the first
    partial's own.
    """
    if not held:
        out.zero_()
        lse.fill_(-torch.inf)
        return
    assert len(held) <= MAX_PARTS, f"{len(held)} partials in one merge"
    assert out.stride(2) == 1 or out.shape[2] == 1, "heads with gaps inside"
    count, num_heads, dim = out.shape
    if not count or not num_heads:
        return
    outs = tuple(part.out if part.out.stride(2) == 1 else part.out.contiguous() for part in held)
    lses = tuple(part.lse for part in held)
    cols = triton.next_power_of_2(dim)
    block = max(1, min(MERGE_TILE // cols, triton.next_power_of_2(count)))
    launch: Any = merge_rows[(triton.cdiv(count, block), num_heads)]
    launch(
        outs,
        lses,
        tuple(part.lse if part.row_map.rows is None else part.row_map.rows for part in held),
        tuple(x.stride(0) for x in outs),
        tuple(x.stride(1) for x in outs),
        tuple(x.stride(0) for x in lses),
        tuple(x.stride(1) for x in lses),
        tuple(part.row_map.buffer_head for part in held),
        tuple(part.row_map.num_heads for part in held),
        tuple(part.row_map.head for part in held),
        lse if rows is None else rows,
        out,
        lse,
        (out.stride(0), out.stride(1)),
        (lse.stride(0), lse.stride(1)),
        count,
        first_row,
        first_head,
        MAPPED=tuple(part.row_map.rows is not None for part in held),
        LISTED=rows is not None,
        DIM=dim,
        ROWS=block,
        COLS=cols,
    )
