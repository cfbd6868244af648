"""Rows moved by Triton. Tables of launches are made once, and kept with the bound plan.

A launch moves tensors of one kind: type of the sources, type of the targets, elements of a head. It
has `PLACES` for them and fills what it does not need, so that its compiled variants are those of
`movers.triton.variants`, built when training starts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple, TypeVar

import torch
import triton
from torch import Tensor

from megatron_balance.runtime.lower.memory import CallForm, made, wide_dtype
from megatron_balance.runtime.lower.moves import Alike, Call, Moved, MoverCall, Site
from megatron_balance.runtime.lower.steps import Packed
from megatron_balance.runtime.movers.base import HELD_PARTS, Partials, PlainMover, RowMove, Sent, Space
from megatron_balance.runtime.movers.triton.kernels import (
    BLOCK_ROWS,
    AddBlock,
    CopyBlock,
    add_rows,
    copy_rows,
    disguised,
    merge_rows,
)
from megatron_balance.runtime.movers.triton.tables import (
    MAX_PAIRS,
    BlockTable,
    Entry,
    Pair,
    RowMap,
    SendTable,
    Share,
    add_tables,
    copy_tables,
    row_maps,
    send_table,
)

_HOST = torch.device("cpu")
T = TypeVar("T")
ACCESS_BYTES = 16
TILE_BYTES = 2048
"""Of one row in a program: eight such rows are 128 bytes for each of its 128 threads."""
PLACES = (2, MAX_PAIRS)
"""Tensor pairs of one launch: as many places as a launch may have."""
PARTS = (2, 5, 9)
"""Partials of one merge, beside an accumulator. The kernel is unrolled over them."""
LSE_COLS = 128
"""Heads of one row in a program, where a head has one element."""
MERGE_TILE, MERGE_ROWS = 2048, 16
"""Most elements of one program of the merge, one head of some rows, and most rows: Triton 3.7 does
not compile it for Hopper with 32 or 64 rows on four warps, which heads of 17 to 64 elements had."""


class TritonMover:
    """See `runtime.movers.base.Mover`. Tables belong to the packed tensors of one bound plan, which
    are kept.
    """

    name = "triton"

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._tables: dict[tuple[object, ...], list[BlockTable]] = {}
        self._row_maps: dict[int, tuple[RowMap, ...]] = {}
        self._kept: list[Packed] = []
        self._launches: dict[tuple[object, ...], list[tuple[BlockTable, tuple[Pair, ...]]]] = {}
        self._unchecked: set[tuple[object, ...]] = set()  # tables that no launch has used
        self._sends: dict[tuple[object, ...], SendTable] = {}
        self._plain = PlainMover()
        self._blank: dict[torch.dtype, Tensor] = {}

    def blank(self, dtype: torch.dtype) -> Tensor:
        if dtype not in self._blank:
            self._blank[dtype] = torch.zeros(16, dtype=dtype, device=self.device)
        return self._blank[dtype]

    def prepare(
        self, moves: Iterable[MoverCall], sizes: Mapping[int, tuple[int, int]], form: CallForm
    ) -> Sequence[Tensor]:
        tables: list[BlockTable] = []
        maps: list[RowMap] = []
        expected = _Expected(sizes)
        sends: list[SendTable] = []
        for call, moved in moves:
            if call == "partial":
                own = self._map_rows(moved[0].packed, {buffer: rows for buffer, (rows, _) in sizes.items()}, _HOST)
                expected.add(own)
                maps += own
                continue
            if call == "send":
                sends += self._send_table(moved, expected, form)
                continue
            kinds: dict[Alike, list[Moved]] = {}
            for one in moved:
                assert one.kind is not None, "rows of no kind"
                if one.packed.runs:
                    kinds.setdefault(one.kind, []).append(one)
            for (_, _, width), some in kinds.items():
                tables += self._table(call, width, some, _HOST)
        maps += [row_map for table in sends for row_map in table.row_maps]
        return [
            *(x for table in tables for x in (table.blocks, table.index)),
            *(row_map.rows for row_map in maps if row_map.rows is not None),
            *(x for table in sends for x in (table.out_begins, table.lse_begins)),
        ]

    def _send_table(self, moved: Sequence[Moved], expected: _Expected, form: CallForm) -> Iterator[SendTable]:
        """The merge of all messages of outputs of an exchange, if that is one and they are several."""
        if sum(len(one.packed.runs) for one in moved) <= 2:
            return
        key = tuple([id(one.packed) for one in moved[::2]])
        if key in self._sends:
            yield self._sends[key]
            return
        row_bytes = (form.value_width * form.dtype.itemsize, form.wide.itemsize)
        table = send_table(moved[::2], moved[1::2], expected.entries, row_bytes)
        if table is not None and len(table.parts) <= PARTS[-1]:
            self._kept += [one.packed for one in moved[::2]]
            self._sends[key] = table
            self._unchecked.add(key)
            yield table

    def send_table(self, messages: Sequence[Sent]) -> SendTable | None:
        """The table of the merge of all these messages, if there is one."""
        key = tuple([id(message.packed) for message in messages])
        table = self._sends.get(key)
        if table is not None and key in self._unchecked:
            self._unchecked.discard(key)
            first = messages[0]
            for behind, message in zip(table.shares, messages, strict=True):
                for num_bytes, x, base in zip(behind, message[1:], first[1:], strict=True):
                    assert made(x).is_contiguous(), "a message with gaps"
                    assert made(x).data_ptr() - made(base).data_ptr() == num_bytes, "a message that lies elsewhere"
        return table

    def fill(self, moves: Sequence[RowMove]) -> None:
        self._move("fill", copy_rows, moves)

    def place(self, moves: Sequence[RowMove]) -> None:
        self._move("place", copy_rows, moves)

    def add(self, moves: Sequence[RowMove]) -> None:
        self._move("add", add_rows, moves)

    def _move(self, call: Call, kernel: Any, moves: Sequence[RowMove]) -> None:
        """Launch what moves these rows; by the plain mover where a tensor is not aligned."""
        moves = [move for move in moves if move.buffers]
        key = (call, _fresh(call, moves), *[id(move.packed) for move in moves])
        found = self._launches.get(key)
        if found is None:
            found = self._launches[key] = self._launches_of(call, moves)
        launches: list[tuple[BlockTable, list[Tensor], list[Tensor]]] = []
        for table, pairs in found:
            buffers = [moves[place].buffers[run] for place, run in pairs]
            packed = [made(moves[place].own) for place, _ in pairs]
            if not _aligned(buffers) or not _aligned(packed):
                getattr(self._plain, call)(moves)
                return
            launches.append((table, buffers, packed))
        for table, buffers, packed in launches:
            launch(kernel, table, *((buffers, packed) if call == "fill" else (packed, buffers)))

    def _launches_of(self, call: Call, moves: Sequence[RowMove]) -> list[tuple[BlockTable, tuple[Pair, ...]]]:
        """Launches of a call, alike in every layer: tables, and where their pairs are in `moves`."""
        found: list[tuple[BlockTable, tuple[Pair, ...]]] = []
        for numbers in _by_kind(moves):
            some = [moves[number] for number in numbers]
            self._kept += [move.packed for move in some]  # the key holds their ids: they must not go away
            for table in self._tables_of(call, some):
                found.append((table, tuple([(numbers[place], run) for place, run in table.pairs])))
        return found

    def partials(self, space: Space) -> Partials:
        return _TritonPartials(space, self)

    def row_maps(self, packed: Packed, space: Space) -> tuple[RowMap, ...]:
        maps = self._row_maps.get(id(packed))
        if maps is None:
            maps = self._map_rows(packed, {buffer: rows for buffer, (rows, _) in space.sizes.items()}, self.device)
        return maps

    def _map_rows(self, packed: Packed, rows: Mapping[int, int], device: torch.device) -> tuple[RowMap, ...]:
        if id(packed) in self._row_maps:  # of a forward that plans of two policies share
            return self._row_maps[id(packed)]
        self._kept.append(packed)
        self._row_maps[id(packed)] = maps = row_maps(packed, rows, device)
        return maps

    def _tables_of(self, call: Call, moves: Sequence[RowMove]) -> list[BlockTable]:
        width = prod(made(moves[0].own).shape[2:])
        key = (call, width, _fresh(call, moves), *[id(move.packed) for move in moves])
        tables = self._tables.get(key)
        if tables is None:
            return self._table(call, width, [_unprepared(call, move) for move in moves], self.device)
        if key in self._unchecked:  # where tensors lie is the same in every layer
            self._unchecked.discard(key)
            for table in tables:
                _check(table.shares, moves)
        return tables

    def _table(self, call: Call, width: int, moved: Sequence[Moved], device: torch.device) -> list[BlockTable]:
        """Tables of a call on these packed tensors, made once: on the host by `prepare`, else here
        and now, each with a copy of its own.

        `width`: elements of a head; keys and values of two widths have the same packed rows, and
        lie apart in a message.
        """
        packed = [one.packed for one in moved]
        fresh = tuple([tuple([number for number, _ in one.fresh]) for one in moved])
        key = (call, width, fresh if any(fresh) else (), *map(id, packed))
        if key not in self._tables:
            self._kept += packed  # the key holds their ids: they must not go away
            self._tables[key] = (
                add_tables(moved, device) if call == "add" else copy_tables(moved, device, take=call == "fill")
            )
            self._unchecked.add(key)
        return self._tables[key]


def _fresh(call: Call, moves: Sequence[RowMove]) -> tuple[tuple[int, ...], ...]:
    if call != "add" or not any(move.fresh for move in moves):
        return ()
    return tuple([move.fresh for move in moves])


def _unprepared(call: Call, move: RowMove) -> Moved:
    """A move that was not expected. Of an addition: which tensors are the same, and which fresh."""
    if call != "add":
        return Moved(move.packed)
    of = tuple([Site(("at", x.data_ptr(), x.stride())) for x in move.buffers])
    sizes = [(at, move.buffers[at].shape[:2]) for at in move.fresh]
    return Moved(move.packed, of=of, fresh=tuple([(at, (rows, heads)) for at, (rows, heads) in sizes]))


def _check(shares: Sequence[Share], moves: Sequence[RowMove]) -> None:
    """Check that tensors that a launch is not given lie where its table has them: else their rows
    would go astray.
    """
    for share in shares:
        x, base = (
            made(moves[place].own) if share.own else moves[place].buffers[run]
            for place, run in (share.pair, share.stands_for)
        )
        assert x.stride()[1:] == base.stride()[1:] or x.shape[1:] != base.shape[1:], "memory shared by other rows"
        behind = share.begin + share.rows * base.stride(0) * base.element_size()
        assert x.stride(0) == base.stride(0) and x.data_ptr() == base.data_ptr() + behind, (  # noqa: PT018
            f"rows that were to lie {behind} bytes behind others lie {x.data_ptr() - base.data_ptr()} behind"
        )


def launch(kernel: Any, table: BlockTable, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Launch over the blocks of a table. `sources`, `targets`: of each of its pairs, [T, H, ...],
    each of one type.
    """
    num_blocks = table.blocks.shape[0]
    if not num_blocks:
        return
    sources = [x if x.is_contiguous() or _in_rows(x) else x.contiguous() for x in sources]
    assert all([x.is_contiguous() or _in_rows(x) for x in targets]), "a target with gaps inside its rows"  # noqa: C419
    dim = prod(targets[0].shape[2:])
    element_bytes = min(sources[0].element_size(), targets[0].element_size())
    vec = _vector(dim, element_bytes)
    cols = LSE_COLS if dim == 1 else TILE_BYTES // element_bytes
    places = next(places for places in PLACES if places >= len(sources))
    kernel[(num_blocks, triton.cdiv(table.heads * dim, cols))](
        _padded(sources, places),
        _padded(targets, places),
        _padded([disguised(x.stride(0) // vec) for x in sources], places),
        _padded([disguised(x.stride(0) // vec) for x in targets], places),
        table.blocks,
        table.index,
        DIM=dim,
        VEC=vec,
        ROWS=BLOCK_ROWS,
        COLS=cols,
    )


def _disguised(values: Iterable[int]) -> tuple[int, ...]:
    return tuple([disguised(value) for value in values])


def _padded(values: Sequence[T], places: int) -> tuple[T, ...]:
    return (*values, *([values[0]] * (places - len(values))))


def _by_kind(moves: Sequence[RowMove]) -> list[list[int]]:
    """Numbers of the moves whose tensors have one type and one size of a head."""
    kinds: dict[tuple[object, ...], list[int]] = {}
    for number, move in enumerate(moves):
        buffer, packed = move.buffers[0], made(move.own)
        kinds.setdefault((buffer.dtype, packed.dtype, packed.shape[2:]), []).append(number)
    return list(kinds.values())


def _aligned(tensors: Iterable[Tensor]) -> bool:
    """Whether all begin where accesses of 16 bytes may; all that the pool lends do."""
    return not any([x.data_ptr() % ACCESS_BYTES for x in tensors])  # noqa: C419  a list is sooner there


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


class _Expected:
    """The partials that a call will hold, before there are any: as `_TritonPartials` holds them."""

    def __init__(self, sizes: Mapping[int, tuple[int, int]]) -> None:
        self.sizes = sizes
        self.entries: dict[int, list[Entry]] = {}
        self.number = 0

    def add(self, row_maps: Sequence[RowMap]) -> None:
        self.number += 1
        for row_map in row_maps:
            buffer = row_map.buffer
            held = self.entries.setdefault(buffer, [])
            if _is_full(held):
                held[:] = [self.accumulated(buffer)]
            held.append(Entry(self.number, row_map))
            if _is_much(held, self.sizes[buffer], HELD_PARTS):
                held[:] = [self.accumulated(buffer)]

    def accumulated(self, buffer: int) -> Entry:
        self.number += 1
        return Entry(self.number, _whole_map(buffer, self.sizes[buffer]), owned=True)


def _whole_map(buffer: int, size: tuple[int, int]) -> RowMap:
    return RowMap(buffer, None, 0, size[1], 0, size[0])


def _is_full(held: Sequence[Entry] | Sequence[_Partial]) -> bool:
    """Whether one merge can take no more partials; an accumulator has a place of its own."""
    return len(held) - held[0].owned >= PARTS[-1] if held else False


def _is_much(held: Sequence[Entry] | Sequence[_Partial], size: tuple[int, int], most: int) -> bool:
    """Whether partials of a buffer are merged at once: their rows and heads are more than `most` of
    all.
    """
    return sum([part.row_map.count * part.row_map.num_heads for part in held]) > most * size[0] * size[1]


class _TritonPartials:
    """See `runtime.movers.base.Partials`. Some are held as they came, and merged in one launch with
    the final conversion.
    """

    def __init__(self, space: Space, mover: TritonMover) -> None:
        self.space, self.mover = space, mover
        self.held: dict[int, list[_Partial]] = {}

    def add(self, packed: Packed, merges: tuple[bool, ...], out: Tensor, lse: Tensor) -> None:
        del merges  # rows without a partial are known here by their row map
        for row_map in self.mover.row_maps(packed, self.space):
            buffer = row_map.buffer
            held = self.held.setdefault(buffer, [])
            if _is_full(held):
                held[:] = [self.accumulated(buffer, held)]
            held.append(_Partial(out, lse, row_map))
            if _is_much(held, self.space.sizes[buffer], self.space.held):
                held[:] = [self.accumulated(buffer, held)]

    def accumulated(self, buffer: int, held: list[_Partial]) -> _Partial:
        """All partials of a buffer as one, in the wide type: in the memory of the first, if that
        was made so before.
        """
        rows, heads = self.space.sizes[buffer]
        target = held[0]
        if not target.owned:
            out = self.space.empty((rows, heads, self.space.dim), self.space.wide)
            target = _Partial(
                out, self.space.empty((rows, heads), self.space.wide), _whole_map(buffer, (rows, heads)), owned=True
            )
        merge_parts(self.mover, held, target.out, target.lse)
        return target

    def as_they_lie(self, packed: Packed) -> tuple[Tensor, Tensor] | None:
        del packed
        return None

    def send(self, messages: Sequence[Sent]) -> None:
        table = self.mover.send_table(messages)
        if table is not None:
            self.send_together(messages[0], table)
            return
        for packed, *both in messages:
            out, lse = map(made, both)
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

    def send_together(self, first: Sent, table: SendTable) -> None:
        parts = [
            self.held[buffer][number]._replace(row_map=row_map)
            for (buffer, number), row_map in zip(table.parts, table.row_maps, strict=True)
        ]
        assert not any(part.owned for part in parts), "rows that were merged before they were sent"
        merge_parts(self.mover, parts, made(first.out), made(first.lse), first_head=table.first_head, table=table)

    def final(self) -> tuple[Tensor, Tensor]:
        rows, heads = self.space.sizes[0]
        held = self.held.get(0, [])
        if len(held) == 1 and held[0].row_map.covers(heads):
            only = held[0].out
            if only.dtype == self.space.dtype and only.is_contiguous():
                return only, held[0].lse  # of all rows: nothing to merge
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
    table: SendTable | None = None,
) -> None:
    """Merge partials of a buffer into rows of `out` [N, H, D] and `lse` [N, H]: its heads from
    `first_head` on, of row `rows` each or from `first_row` on. Without partials: zero and -inf.
    `out` and `lse` may be the first partial's own.

    `table`: the result is all messages of an exchange, of which these are the first.
    """
    if not held:
        out.zero_()
        lse.fill_(-torch.inf)
        return
    assert out.stride(2) == 1 or out.shape[2] == 1, "heads with gaps inside"
    count, num_heads, dim = out.shape
    if table is not None:
        count = len(table.out_begins)
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
    block = max(1, min(MERGE_ROWS, MERGE_TILE // cols))
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
        no_map if table is None else table.out_begins,
        no_map if table is None else table.lse_begins,
        int(table is not None),
        DIM=dim,
        VEC=vec,
        ROWS=block,
        COLS=cols,
    )


class _LaunchTypes(NamedTuple):
    source: torch.dtype
    target: torch.dtype
    dim: int


def _copies(dtype: torch.dtype, head_dim: int) -> list[_LaunchTypes]:
    """Kinds that are copied: inputs and outputs, LSE, gradients, and these converted."""
    wide = wide_dtype(dtype)
    kinds = [(a, b, head_dim) for a in (dtype, wide) for b in (dtype, wide)]
    return [_LaunchTypes(*kind) for kind in dict.fromkeys((*kinds, (wide, wide, 1)))]


def _additions(dtype: torch.dtype, head_dim: int) -> list[_LaunchTypes]:
    """Kinds that are added: gradients as a kernel leaves them, and as they travel."""
    wide = wide_dtype(dtype)
    return [_LaunchTypes(a, wide, head_dim) for a in dict.fromkeys((dtype, wide))]


def build(device: torch.device, dtype: torch.dtype, head_dim: int) -> int:
    """Launch each variant of the kernels once, on nothing, before the first step; their number.

    Compiling one takes from a part of a second to several; in a step that would stop this rank, and
    with it every rank that waits for it.
    """
    mover = TritonMover(device)
    launches = 0
    for kernel, width, kinds in (
        (copy_rows, CopyBlock.WIDTH, _copies(dtype, head_dim)),
        (add_rows, AddBlock.WIDTH, _additions(dtype, head_dim)),
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
