"""Rows moved by Triton. Tables of launches are made once, and kept with the bound plan.

A launch moves tensors of one kind: type of the sources, type of the targets, elements of a head. It
has `PLACES` for them and fills what it does not need, so that its compiled variants are those of
`movers.triton.variants`, built when training starts.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from megatron_balance.runtime.lower.moves import Call, Move
from megatron_balance.runtime.lower.steps import Packed
from megatron_balance.runtime.lower.tables import tensors_in
from megatron_balance.runtime.movers.base import Fill, Partials, Place, Space
from megatron_balance.runtime.movers.plain import PlainMover
from megatron_balance.runtime.movers.triton.kernels import BLOCK_ROWS, add_rows, copy_rows, disguised, merge_rows
from megatron_balance.runtime.movers.triton.tables import (
    MAX_PAIRS,
    BlockTable,
    RowMap,
    add_tables,
    copy_tables,
    row_maps,
)

_HOST = torch.device("cpu")
ACCESS_BYTES = 16
TILE_BYTES = 2048
"""Of one row in a program: eight such rows are 128 bytes for each of its 128 threads."""
PLACES = (2, MAX_PAIRS)
"""Tensor pairs of one launch: as many places as a launch may have."""
PARTS = (2, 5, 9)
"""Partials of one merge, beside an accumulator. The kernel is unrolled over them."""
LSE_COLS = 128
"""Heads of one row in a program, where a head has one element."""
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
        self._plain = PlainMover()
        self._blank: dict[torch.dtype, Tensor] = {}

    def blank(self, dtype: torch.dtype) -> Tensor:
        """A tensor for places of a launch that it does not need."""
        if dtype not in self._blank:
            self._blank[dtype] = torch.zeros(16, dtype=dtype, device=self.device)
        return self._blank[dtype]

    def prepare(self, moves: Iterable[Move], rows: Mapping[int, int]) -> Sequence[Tensor]:
        """See `Mover`: tables and row maps of these calls, on the host until they are shipped."""
        made: list[BlockTable] = []
        maps: list[RowMap] = []
        for call, moved in moves:
            if call == "partial":
                maps += self._map_rows(moved[0].packed, rows, _HOST)
                continue
            kinds: dict[Hashable, list[Packed]] = {}
            for packed, kind in moved:
                if packed.runs:
                    kinds.setdefault(kind, []).append(packed)
            for some in kinds.values():
                made += self._table(call, some, _HOST)
        return list(tensors_in((made, maps)))

    def fill(self, fills: Sequence[Fill]) -> None:
        if not _aligned([x for fill in fills for x in (*fill.sources, fill.target)]):
            self._plain.fill(fills)
            return
        for some in _by_kind([(*fill.sources[:1], fill.target, fill) for fill in fills if fill.sources]):
            for table in self._of("fill", some):
                sources = [some[place].sources[run] for place, run in table.pairs]
                launch(copy_rows, table, sources, [some[place].target for place, _ in table.pairs])

    def place(self, places: Sequence[Place]) -> None:
        if not _aligned([x for place in places for x in (place.source, *place.targets)]):
            self._plain.place(places)
            return
        self._to_rows("place", places, copy_rows)

    def add(self, places: Sequence[Place]) -> None:
        if not _aligned([x for place in places for x in (place.source, *place.targets)]):
            self._plain.add(places)
            return
        self._to_rows("add", places, add_rows)

    def _to_rows(self, call: Call, places: Sequence[Place], kernel: Any) -> None:
        for some in _by_kind([(place.source, *place.targets[:1], place) for place in places if place.targets]):
            for table in self._of(call, some):
                targets = [some[place].targets[run] for place, run in table.pairs]
                launch(kernel, table, [some[place].source for place, _ in table.pairs], targets)

    def partials(self, space: Space) -> Partials:
        return TritonPartials(space, self)

    def row_maps(self, packed: Packed, space: Space) -> tuple[RowMap, ...]:
        """Row maps of the packed rows, made once."""
        maps = self._row_maps.get(id(packed))
        if maps is None:
            maps = self._map_rows(packed, {buffer: rows for buffer, (rows, _) in space.sizes.items()}, self.device)
        return maps

    def _map_rows(self, packed: Packed, rows: Mapping[int, int], device: torch.device) -> tuple[RowMap, ...]:
        self._kept.append(packed)
        self._row_maps[id(packed)] = maps = row_maps(packed, rows, device)
        return maps

    def _of(self, call: Call, moves: Sequence[Fill] | Sequence[Place]) -> list[BlockTable]:
        return self._table(call, [move.packed for move in moves], self.device)

    def _table(self, call: Call, packed: Sequence[Packed], device: torch.device) -> list[BlockTable]:
        """Tables of a call on these packed tensors, made once.

        On the host by `prepare`, else here and now, each with a copy of its own.
        """
        key = (call, *map(id, packed))
        if key not in self._tables:
            self._kept += packed  # the key holds their ids: they must not go away
            self._tables[key] = (
                add_tables(packed, device) if call == "add" else copy_tables(packed, device, take=call == "fill")
            )
        return self._tables[key]


def launch(kernel: Any, table: BlockTable, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Launch over the blocks of a table.

    `sources`, `targets`: of each of its pairs, [T, H, ...], each of one type.
    """
    num_blocks = table.blocks.shape[0]
    if not num_blocks:
        return
    sources = [x if _in_rows(x) else x.contiguous() for x in sources]
    assert all(_in_rows(x) for x in targets), "a target with gaps inside its rows"
    dim = prod(targets[0].shape[2:])
    element_bytes = min(sources[0].element_size(), targets[0].element_size())
    vec = _vector(dim, element_bytes)
    cols = LSE_COLS if dim == 1 else TILE_BYTES // element_bytes
    places = next(places for places in PLACES if places >= len(sources))
    sources, targets = _padded(sources, places), _padded(targets, places)
    kernel[(num_blocks, triton.cdiv(table.heads * dim, cols))](
        sources,
        targets,
        _disguised([x.stride(0) // vec for x in sources]),
        _disguised([x.stride(0) // vec for x in targets]),
        table.blocks,
        table.index,
        DIM=dim,
        VEC=vec,
        ROWS=BLOCK_ROWS,
        COLS=cols,
    )


def _disguised(values: Iterable[int]) -> tuple[int, ...]:
    """As the kernels take integers in tuples."""
    return tuple([disguised(value) for value in values])


def _padded(tensors: Sequence[Tensor], places: int) -> tuple[Tensor, ...]:
    return (*tensors, *([tensors[0]] * (places - len(tensors))))


def _by_kind(moves: Sequence[tuple[Any, ...]]) -> list[list[Any]]:
    """Moves (source, target, move) whose tensors have one type and one size of a head."""
    kinds: dict[tuple[object, ...], list[Any]] = {}
    for source, target, move in moves:
        kinds.setdefault((source.dtype, target.dtype, target.shape[2:]), []).append(move)
    return list(kinds.values())


def _aligned(tensors: Iterable[Tensor]) -> bool:
    """Whether all begin where accesses of 16 bytes may; all that the pool lends do."""
    return not any(x.data_ptr() % ACCESS_BYTES for x in tensors)


def _in_rows(x: Tensor) -> bool:
    """Whether the elements of a row of [T, H, ...] have no gaps."""
    if x.is_contiguous():
        return True
    expected = 1
    for size, stride in zip(x.shape[:0:-1], x.stride()[:0:-1], strict=True):
        if stride != expected and size > 1:
            return x.numel() == 0
        expected *= size
    return True


def _vector(dim: int, element_bytes: int) -> int:
    """Elements of one access: 16 bytes of the narrower type where `dim` allows, else 1."""
    wanted = ACCESS_BYTES // element_bytes
    return wanted if dim % wanted == 0 else 1


class _Partial(NamedTuple):
    """A partial of some rows of a buffer. `owned`: made here, so that it may be written again."""

    out: Tensor
    lse: Tensor
    row_map: RowMap
    owned: bool = False


def partial_of(out: Tensor, lse: Tensor) -> _Partial:
    """A partial of all rows and heads of a buffer."""
    return _Partial(out, lse, RowMap(0, None, 0, out.shape[1], 0))


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
        merge_parts(self.mover, held, target.out, target.lse)
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
                self.mover,
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
        merge_parts(self.mover, held, out, lse)
        return out, lse


def merge_parts(  # noqa: PLR0913  what is merged, into what, and which rows and head of it
    mover: TritonMover,
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
    assert out.stride(2) == 1 or out.shape[2] == 1, "heads with gaps inside"
    count, num_heads, dim = out.shape
    if not count or not num_heads:
        return
    # An accumulator of another type than the partials has a place of its own, the first.
    gathered = held[:1] if held[0].owned else ()
    parts = held[len(gathered) :]
    dtype = parts[0].out.dtype if parts else out.dtype
    places = next((places for places in PARTS if places >= len(parts)), 0)
    assert places, f"{len(parts)} partials in one merge, at most {PARTS[-1]}"
    none = _Partial(mover.blank(dtype).view(1, 1, -1), mover.blank(lse.dtype).view(1, -1), RowMap(-1, None, 0, 0, 0))
    first = none._replace(out=mover.blank(lse.dtype).view(1, 1, -1))
    slots = [*(gathered or (first,)), *parts, *([none] * (places - len(parts)))]
    outs = tuple([part.out if part.out.stride(2) == 1 else part.out.contiguous() for part in slots])
    lses = tuple([part.lse for part in slots])
    vec = _vector(dim, min(x.element_size() for x in (*outs, out)))
    cols = triton.next_power_of_2(dim)
    block = max(1, MERGE_TILE // cols)
    merge: Any = merge_rows[(triton.cdiv(count, block), num_heads)]
    no_map, row_lists = mover.blank(torch.int32), [part.row_map.rows for part in slots]
    merge(
        outs,
        lses,
        tuple([no_map if rows is None else rows for rows in row_lists]),
        _disguised([int(rows is not None) for rows in row_lists]),
        _disguised([x.stride(0) // vec for x in outs]),
        _disguised([x.stride(1) // vec for x in outs]),
        _disguised([x.stride(0) for x in lses]),
        _disguised([x.stride(1) for x in lses]),
        _disguised([part.row_map.buffer_head for part in slots]),
        _disguised([part.row_map.num_heads for part in slots]),
        _disguised([part.row_map.head for part in slots]),
        mover.blank(torch.int64) if rows is None else rows,
        int(rows is not None),
        out,
        lse,
        _disguised((out.stride(0) // vec, out.stride(1) // vec)),
        _disguised((lse.stride(0), lse.stride(1))),
        count,
        first_row,
        first_head,
        DIM=dim,
        VEC=vec,
        ROWS=block,
        COLS=cols,
    )
