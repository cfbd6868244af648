"""Rows moved by Triton. Tables of launches are made once, and kept with the bound plan.

A launch moves tensors of one kind: type of the sources, type of the targets, elements of a head. It
has `PLACES` for them and fills what it does not need, so that its compiled variants are those that
`variants` makes when training starts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import gcd, prod
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
import triton
from torch import Tensor

from megatron_balance.ir.arrays import Ints
from megatron_balance.runtime.lower.memory import CallForm, made
from megatron_balance.runtime.lower.moves import Alike, Call, Moved, MoverCall, Site
from megatron_balance.runtime.lower.steps import Packed, RowRun
from megatron_balance.runtime.movers.base import HELD_PARTS, Partials, PlainMover, RowMove, Sent, Space
from megatron_balance.runtime.movers.triton.kernels import (
    BLOCK_ROWS,
    AddBlock,
    CopyBlock,
    MapHeader,
    add_rows,
    copy_rows,
    disguised,
    merge_rows,
)

_CPU = torch.device("cpu")
_NO_TABLE = torch.empty(0, dtype=torch.int32)
T = TypeVar("T")
MAX_PAIRS = 8  # tensor pairs of one launch
UNIT = 16  # bytes that begins in a table are counted in
ACCESS_BYTES = 16
# Of one row in a program, in the wider type: eight of them are 128 bytes for each of its 128 threads.
# Fewer where accesses are narrower than 16 bytes, since each takes registers for its address.
TILE_BYTES = 2048
PLACES = (2, MAX_PAIRS)  # tensor pairs of one launch: as many places as a launch may have
PARTS = (5, 9)  # partials of one merge, beside an accumulator
# Most elements of one program of the merge, one head of some rows, and most rows: Triton 3.7 does
# not compile it for Hopper with 32 or 64 rows on four warps, which heads of 17 to 64 elements had.
MERGE_TILE, MERGE_ROWS = 2048, 16
_WARP_ELEMENTS = 256  # of them: 16 bytes of bf16 for each thread of a warp

# Tables of blocks for the kernels, from the runs of packed tensors. NumPy, once for a bound plan.
_TablePair = tuple[int, int]  # (place of a packed tensor in the call, run of it whose buffer is meant)


class _Share(NamedTuple):
    """A tensor in the memory of another pair's, `begin` bytes and `rows` of its rows behind that."""

    # The packed rows, not the buffer.
    own: bool
    pair: _TablePair
    stands_for: _TablePair
    begin: int
    rows: int


@dataclass(frozen=True, slots=True)
class BlockTable:
    """Blocks of one launch."""

    # The tensors that it is given.
    pairs: tuple[_TablePair, ...]
    # int32 [blocks, `CopyBlock.WIDTH` or `AddBlock.WIDTH`].
    blocks: Tensor
    # int32, the lists that blocks name by where they begin.
    index: Tensor
    # Of the widest block.
    heads: int
    # Tensors that it is not given, since they lie in another's memory.
    shares: tuple[_Share, ...] = ()


class _Sides(NamedTuple):
    buffer: Site
    own: Site

    @classmethod
    def of(cls, moved: Moved, place: int, run_at: int) -> _Sides:
        buffer = moved.of[run_at] if moved.of else Site(("buffer", place, moved.packed.runs[run_at].buffer))
        return cls(buffer, moved.own or Site(("own", place)))

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for moves that one pair of tensors serves."""
        return tuple([(site.memory, site.row, site.begin % UNIT) for site in self])


class _TableBuilder:
    """A launch as it is put together."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.pairs: list[_TablePair] = []
        self.sides: list[_Sides] = []  # of each pair
        self.shares: list[_Share] = []
        self.blocks: list[Ints] = []
        self.index: list[Ints] = []
        self.num_index = 0

    def behind(self, number: int, sides: _Sides, pair: _TablePair) -> tuple[list[int], list[int]]:
        """How far the tensors of a move lie behind those of pair `number`: units, and rows."""
        begins, rows = [], []
        for own, (site, base) in enumerate(zip(sides, self.sides[number], strict=True)):
            begin, row = site.begin - base.begin, site.first_row - base.first_row
            begins.append(begin // UNIT)
            rows.append(row)
            if pair != self.pairs[number]:
                self.shares.append(_Share(bool(own), pair, self.pairs[number], begin, row))
        return begins, rows

    def listed(self, rows: Ints) -> int:
        self.index.append(rows)
        self.num_index += len(rows)
        return self.num_index - len(rows)

    def done(self, device: torch.device) -> BlockTable:
        blocks = np.concatenate(self.blocks) if self.blocks else np.empty((0, self.width), dtype=np.int64)
        index = np.concatenate(self.index) if self.index else np.zeros(1, dtype=np.int64)
        heads = int(blocks[:, CopyBlock.HEADS].max()) if len(blocks) else 0  # the same column of both
        shares = tuple(dict.fromkeys(self.shares))
        return BlockTable(tuple(self.pairs), _to(device, blocks), _to(device, index), heads, shares)


def _to(device: torch.device, values: Ints) -> Tensor:
    """Values as int32 on the device: no row number needs more than 31 bits."""
    assert values.size == 0 or int(values.max()) < 1 << 31, int(values.max())
    return torch.from_numpy(values.astype(np.int32)).to(device, non_blocking=True)  # no wait


def _copy_tables(moved: Sequence[Moved], device: torch.device, *, take: bool) -> list[BlockTable]:
    """Launches (usually one) that copy all runs of packed tensors: from buffers (`take`), or there."""
    launches: list[_TableBuilder] = []
    numbers: dict[tuple[object, ...], int] = {}
    for place, one in enumerate(moved):
        for run_at, run in enumerate(one.packed.runs):
            if not run.count:
                continue
            sides = _Sides.of(one, place, run_at)
            pair = _numbered(launches, numbers, sides, (place, run_at), CopyBlock.WIDTH)
            launch = launches[-1]
            begins, rows = launch.behind(pair, sides, (place, run_at))
            starts = np.arange(0, run.count, BLOCK_ROWS)
            # (first row, place of its list in the index) of each block, of both sides; -1: no list.
            at = -1 if run.index is None else launch.listed(run.index + rows[0])
            inside = (starts + run.start + rows[0], np.full(len(starts), -1)) if at < 0 else (starts, starts + at)
            packed_side = (starts + run.row + rows[1], np.full(len(starts), -1))
            heads = (run.buffer_head, run.head)
            sources, targets = (inside, packed_side), (packed_side, inside)
            source, target = sources if take else targets
            blocks = np.empty((len(starts), CopyBlock.WIDTH), dtype=np.int64)
            blocks[:, CopyBlock.PAIR] = pair
            blocks[:, CopyBlock.SOURCE_ROW], blocks[:, CopyBlock.SOURCE_LIST] = source
            blocks[:, CopyBlock.TARGET_ROW], blocks[:, CopyBlock.TARGET_LIST] = target
            blocks[:, CopyBlock.COUNT] = np.minimum(BLOCK_ROWS, run.count - starts)
            blocks[:, CopyBlock.SOURCE_HEAD], blocks[:, CopyBlock.TARGET_HEAD] = heads if take else heads[::-1]
            blocks[:, CopyBlock.SOURCE_BEGIN], blocks[:, CopyBlock.TARGET_BEGIN] = begins if take else begins[::-1]
            blocks[:, CopyBlock.HEADS] = run.num_heads
            launch.blocks.append(blocks)
    return [launch.done(device) for launch in launches]


def _numbered(
    launches: list[_TableBuilder], numbers: dict[tuple[object, ...], int], sides: _Sides, pair: _TablePair, width: int
) -> int:
    """The number of a pair of tensors in the last launch; a new one is begun if that is full."""
    key = sides.key
    if key not in numbers:
        if not launches or len(launches[-1].pairs) == MAX_PAIRS:
            launches.append(_TableBuilder(width))
            numbers.clear()
        numbers[key] = len(launches[-1].pairs)
        launches[-1].pairs.append(pair)
        launches[-1].sides.append(sides)
    return numbers[key]


def _rows(run: RowRun) -> tuple[Ints, Ints]:
    """Rows of the buffer, and packed rows, of a run, [count] each."""
    of_buffer = np.arange(run.start, run.stop) if run.index is None else run.index
    return of_buffer, np.arange(run.row, run.row + run.count)


class _AddedRows(NamedTuple):
    sides: _Sides
    pair: _TablePair
    of_buffer: Ints
    packed: Ints


@dataclass(slots=True)
class _Sum:
    """Rows that one program may add: to target rows [low, high) of the same heads, from one memory."""

    head: int
    buffer_head: int
    num_heads: int
    added: list[_AddedRows] = field(default_factory=list[_AddedRows])
    low: int = 0
    high: int = 0

    @property
    def target(self) -> Site:
        return self.added[0].sides.buffer

    def append(self, one: _AddedRows) -> None:
        low, high = int(one.of_buffer.min()), int(one.of_buffer.max()) + 1
        self.low, self.high = (min(self.low, low), max(self.high, high)) if self.added else (low, high)
        self.added.append(one)

    def meets(self, other: _Sum) -> bool:
        if (
            self.target != other.target
            or self.buffer_head >= other.buffer_head + other.num_heads
            or other.buffer_head >= self.buffer_head + self.num_heads
            or self.low >= other.high
            or other.low >= self.high
        ):
            return False
        return bool(np.isin(self.target_rows(), other.target_rows()).any())

    def target_rows(self) -> Ints:
        return np.concatenate([one.of_buffer for one in self.added])


def _add_tables(moved: Sequence[Moved], device: torch.device) -> list[BlockTable]:
    """Launches that add all runs of the packed tensors to their buffers. Blocks: `AddBlock`."""
    # Usually one; more where an element gets rows from several memories, or heads of the same rows
    # are split differently, since no two programs of a launch may write the same element.
    sums: dict[tuple[object, ...], _Sum] = {}
    fresh: dict[Site, tuple[tuple[int, int], _Sides, _TablePair]] = {}
    for place, one in enumerate(moved):
        sizes = dict(one.fresh)
        for run_at, run in enumerate(one.packed.runs):
            sides = _Sides.of(one, place, run_at)
            if run_at in sizes:
                fresh[sides.buffer] = sizes[run_at], sides, (place, run_at)
            if run.count:
                heads = (run.head, run.buffer_head, run.num_heads)
                key = (sides.buffer, sides.key, *heads)
                sums.setdefault(key, _Sum(*heads)).append(_AddedRows(sides, (place, run_at), *_rows(run)))
    waves: list[list[_Sum]] = [[]]
    for one in sums.values():
        # Behind the last launch that writes a row and head in common.
        at = next((at + 1 for at in range(len(waves) - 1, -1, -1) if any(map(one.meets, waves[at]))), 0)
        if at == len(waves):
            waves.append([])
        waves[at].append(one)
    tables: list[BlockTable] = []
    for wave, of_wave in enumerate(waves):
        launches: list[_TableBuilder] = []
        numbers: dict[tuple[object, ...], int] = {}
        first = {} if wave else fresh
        for one in of_wave:
            number = _numbered(launches, numbers, one.added[0].sides, one.added[0].pair, AddBlock.WIDTH)
            _add_blocks(launches[-1], number, one, fresh=one.target in first)
        for target, (size, sides, pair) in first.items():
            for (head, heads), rows in _blank([one for one in of_wave if one.target == target], size):
                number = _numbered(launches, numbers, sides, pair, AddBlock.WIDTH)
                begins, behind = launches[-1].behind(number, sides, pair)
                # These rows of a fresh tensor get nothing: they become zero.
                none = np.zeros(len(rows), dtype=np.int64)
                _blocks_to(launches[-1], number, rows + behind[0], (none, none), (0, head, heads, 0, begins[0], 1))
        tables += [launch.done(device) for launch in launches]
    return tables


def _blank(sums: Sequence[_Sum], size: tuple[int, int]) -> Iterator[tuple[tuple[int, int], Ints]]:
    """Rows and heads of a tensor of `size` (rows, heads) that no sum writes: ((head, heads), rows)."""
    edges = sorted({0, size[1], *(e for one in sums for e in (one.buffer_head, one.buffer_head + one.num_heads))})
    for head, stop in pairwise(edges):
        written = np.zeros(size[0], dtype=np.bool_)
        for one in sums:
            if one.buffer_head <= head < one.buffer_head + one.num_heads:
                written[one.target_rows()] = True
        if not written.all():
            yield (head, stop - head), np.flatnonzero(~written)


def _add_blocks(launch: _TableBuilder, number: int, one: _Sum, *, fresh: bool) -> None:
    lies = [launch.behind(number, each.sides, each.pair) for each in one.added]
    of_buffer = np.concatenate([each.of_buffer + rows[0] for each, (_, rows) in zip(one.added, lies, strict=True)])
    packed = np.concatenate([each.packed + rows[1] for each, (_, rows) in zip(one.added, lies, strict=True)])
    begin = np.concatenate([np.full(len(each.packed), at[1]) for each, (at, _) in zip(one.added, lies, strict=True)])
    # Sources of one target row stand together, in the order of the plan: sums do not depend on time.
    order = np.argsort(of_buffer, kind="stable")
    # `first`, `counts`: where the sources of each target row begin in `order`, and how many there are.
    targets, first, counts = np.unique(of_buffer[order], return_index=True, return_counts=True)
    sources = launch.listed(packed[order])
    launch.listed(begin[order])
    heads = (one.head, one.buffer_head, one.num_heads, len(packed), lies[0][0][0], fresh)
    _blocks_to(launch, number, targets, (first + sources, counts), heads)


def _blocks_to(
    launch: _TableBuilder, number: int, targets: Ints, sources: tuple[Ints, Ints], rest: tuple[int, ...]
) -> None:
    """Blocks for target rows; `sources`: first and number of each; `rest`: from SOURCE_HEAD on."""
    target_at, first_at, number_at = launch.listed(targets), launch.listed(sources[0]), launch.listed(sources[1])
    starts = np.arange(0, len(targets), BLOCK_ROWS)
    blocks = np.empty((len(starts), AddBlock.WIDTH), dtype=np.int64)
    blocks[:, AddBlock.PAIR] = number
    blocks[:, AddBlock.TARGET_LIST] = starts + target_at
    blocks[:, AddBlock.FIRST_LIST] = starts + first_at
    blocks[:, AddBlock.NUMBER_LIST] = starts + number_at
    blocks[:, AddBlock.COUNT] = np.minimum(BLOCK_ROWS, len(targets) - starts)
    blocks[:, AddBlock.MOST_SOURCES] = np.maximum.reduceat(sources[1], starts)
    blocks[:, AddBlock.SOURCE_HEAD :] = rest
    launch.blocks.append(blocks)


@dataclass(frozen=True, slots=True)
class _RowMap:
    """Packed rows of a partial by row of a buffer, each at most once."""

    buffer: int
    # int32: a `MapHeader` and, where it says so, the packed row of each row of the buffer or -1.
    table: Tensor
    # Rows x heads of the buffer that it has.
    elements: int
    # Heads of the buffer, if they are all of the packed ones, and rows likewise, in order; else 0.
    covers: int = 0

    @property
    def header(self) -> list[int]:
        return self.table[: MapHeader.WIDTH].tolist()

    @classmethod
    def of(cls, buffer: int, rows: Ints, heads: tuple[int, int, int], size: tuple[int, int]) -> _RowMap:
        """Of packed tensors of `size`, (rows, heads): the row of each buffer row or -1, and heads
        (head, number, head of the buffer). On the host.
        """
        head, num_heads, buffer_head = heads
        mapped = bool((rows != np.arange(len(rows))).any())
        header = np.array([buffer_head, num_heads, head, mapped, *size, 0, 0])
        table = _to(_CPU, np.concatenate([header, rows]) if mapped else header)
        covers = not mapped and (head, buffer_head, len(rows), num_heads) == (0, 0, *size)
        return cls(buffer, table, num_heads * int((rows >= 0).sum()), num_heads * covers)

    def rows_of(self, rows: Ints) -> Ints:
        """Packed rows of these rows of the buffer, from a table on the host."""
        return self.table[MapHeader.WIDTH :].numpy()[rows] if self.header[MapHeader.MAPPED] else rows


def _row_maps(packed: Packed, num_rows: Mapping[int, int]) -> tuple[_RowMap, ...]:
    """The packed rows as row maps on the host, as few as hold them. `num_rows`: of each buffer."""
    maps_of: dict[tuple[int, int, int, int], list[Ints]] = {}
    for run in packed.runs:
        maps = maps_of.setdefault((run.buffer, run.head, run.num_heads, run.buffer_head), [])
        of_buffer, packed_rows = _rows(run)
        for one in maps:
            if (one[of_buffer] < 0).all() and len(np.unique(of_buffer)) == len(of_buffer):
                one[of_buffer] = packed_rows
                break
        else:
            maps += _maps_of_run(of_buffer, packed_rows, num_rows[run.buffer])
    made: list[_RowMap] = []
    for (buffer, *heads), maps in maps_of.items():
        for one in maps:
            made.append(_RowMap.of(buffer, one, (heads[0], heads[1], heads[2]), (packed.num_rows, packed.num_heads)))
    return tuple(made)


class _Entry(NamedTuple):
    """A partial that will be held: equal `part` for the rows of one launch or message."""

    part: int
    row_map: _RowMap
    owned: bool = False


@dataclass(frozen=True, slots=True)
class _SendTable:
    """One merge of partials into all messages of an exchange: n rows, message by message."""

    # (buffer, number of the partial held of it).
    parts: tuple[tuple[int, int], ...]
    # Of each part, by row of the result.
    row_maps: tuple[_RowMap, ...]
    # int32 [n], where each row begins behind the first message's output, in units of 16 bytes, and
    # behind its LSE, in elements.
    out_begins: Tensor
    lse_begins: Tensor
    num_heads: int
    first_head: int
    # (bytes of the output, bytes of the LSE) of each message behind the first's.
    shares: tuple[tuple[int, int], ...]


def _send_table(
    outs: Sequence[Moved], lses: Sequence[Moved], held: Mapping[int, Sequence[_Entry]], row_bytes: tuple[int, int]
) -> _SendTable | None:
    """The table of messages of outputs in one memory, or None where one merge does not do. `held`:
    the partials of each buffer then; `row_bytes`: of a head of a row, output and LSE.
    """
    heads = {
        (run.buffer_head, run.num_heads, run.head, one.packed.num_heads) for one in outs for run in one.packed.runs
    }
    if len(heads) != 1 or any(one.own is None for one in (*outs, *lses)):
        return None
    ((first_head, num_heads, head, of_message),) = heads
    sites = [(out.own, lse.own) for out, lse in zip(outs, lses, strict=True) if out.own and lse.own]
    if (
        head
        or num_heads != of_message
        or num_heads * row_bytes[0] % UNIT
        or len({s.memory for p in sites for s in p}) > 1
    ):
        return None
    total = sum(one.packed.num_rows for one in outs)
    maps: dict[tuple[int, ...], list[tuple[tuple[int, int], Ints]]] = {}
    out_begins, lse_begins = np.empty(total, dtype=np.int64), np.empty(total, dtype=np.int64)
    at = 0
    shares = [tuple(own.begin - base.begin for own, base in zip(pair, sites[0], strict=True)) for pair in sites]
    for one, (out_begin, lse_begin) in zip(outs, shares, strict=True):
        rows = np.arange(one.packed.num_rows)
        if out_begin % UNIT or lse_begin % row_bytes[1]:
            return None
        out_begins[at : at + len(rows)] = (out_begin + rows * num_heads * row_bytes[0]) // UNIT
        lse_begins[at : at + len(rows)] = lse_begin // row_bytes[1] + rows * num_heads
        for run in one.packed.runs:
            of_buffer, packed = _rows(run)
            for number, (part, row_map, owned) in enumerate(held.get(run.buffer, ())):
                if owned:
                    return None
                found, header = row_map.rows_of(of_buffer), row_map.header
                key = (part, *header[: MapHeader.MAPPED], *header[MapHeader.ROWS : MapHeader.HEADS + 1])
                _enter(maps.setdefault(key, []), packed + at, found, total, (run.buffer, number))
        at += len(rows)
    parts = [(key, place, one) for key, own in maps.items() for place, one in own]
    row_maps = [
        _RowMap.of(place[0], one, (head, heads, buffer_head), (size[0], size[1]))
        for (_, buffer_head, heads, head, *size), place, one in parts
    ]
    made = _SendTable(
        tuple(place for _, place, _ in parts),
        tuple(row_maps),
        _to(_CPU, out_begins),
        _to(_CPU, lse_begins),
        num_heads,
        first_head,
        tuple((a, b) for a, b in shares),
    )
    return made if parts else None


def _enter(
    maps: list[tuple[tuple[int, int], Ints]], rows: Ints, found: Ints, total: int, place: tuple[int, int]
) -> None:
    """Enter packed rows of a partial for some rows sent, in the first map that has none for them."""
    for _, one in maps:
        if (one[rows] < 0).all():
            one[rows] = found
            return
    one = np.full(total, -1, dtype=np.int64)
    one[rows] = found
    maps.append((place, one))


def _maps_of_run(of_buffer: Ints, packed_rows: Ints, num_rows: int) -> list[Ints]:
    """Packed rows by buffer row, [num_rows] each; the k-th for a buffer row in the k-th."""
    order = np.argsort(of_buffer, kind="stable")
    of_buffer, packed_rows = of_buffer[order], packed_rows[order]
    # How many packed rows of the same buffer row stand before each.
    depth = np.arange(len(of_buffer)) - np.searchsorted(of_buffer, of_buffer)
    maps = [np.full(num_rows, -1, dtype=np.int64) for _ in range(int(depth.max(initial=-1)) + 1)]
    for k, one in enumerate(maps):
        one[of_buffer[depth == k]] = packed_rows[depth == k]
    return maps


# Launches


class TritonMover:
    """See `runtime.movers.base.Mover`. Tables belong to the packed tensors, kept, of one plan."""

    name = "triton"

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._tables: dict[tuple[object, ...], list[BlockTable]] = {}
        self._row_maps: dict[int, tuple[_RowMap, ...]] = {}
        self._kept: list[Packed] = []
        self._launches: dict[tuple[object, ...], list[tuple[BlockTable, tuple[_TablePair, ...]]]] = {}
        self._unchecked: set[tuple[object, ...]] = set()  # tables that no launch has used
        self._sends: dict[tuple[object, ...], _SendTable] = {}
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
        maps: list[_RowMap] = []
        expected = _Expected(sizes, HELD_PARTS)
        sends: list[_SendTable] = []
        for call, moved in moves:
            if call == "partial":
                own = self._map_rows(moved[0].packed, sizes)
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
                tables += self._table(call, width, some, _CPU)
        maps += [row_map for table in sends for row_map in table.row_maps]
        return [
            *(x for table in tables for x in (table.blocks, table.index)),
            *(row_map.table for row_map in maps),
            *(x for table in sends for x in (table.out_begins, table.lse_begins)),
        ]

    def _send_table(self, moved: Sequence[Moved], expected: _Expected, form: CallForm) -> Iterator[_SendTable]:
        """The merge of all messages of outputs of an exchange, if that is one and they are several."""
        if sum(len(one.packed.runs) for one in moved) <= 2:
            return
        key = tuple([id(one.packed) for one in moved[::2]])
        if key in self._sends:
            yield self._sends[key]
            return
        row_bytes = (form.value_width * form.dtype.itemsize, form.wide.itemsize)
        table = _send_table(moved[::2], moved[1::2], expected.held, row_bytes)
        if table is not None and len(table.parts) <= PARTS[-1]:
            self._kept += [one.packed for one in moved[::2]]
            self._sends[key] = table
            self._unchecked.add(key)
            yield table

    def send_table(self, messages: Sequence[Sent]) -> _SendTable | None:
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

    def _launches_of(self, call: Call, moves: Sequence[RowMove]) -> list[tuple[BlockTable, tuple[_TablePair, ...]]]:
        """Launches of a call, alike in every layer: tables, and where their pairs are in `moves`."""
        found: list[tuple[BlockTable, tuple[_TablePair, ...]]] = []
        for numbers in _by_kind(moves):
            some = [moves[number] for number in numbers]
            self._kept += [move.packed for move in some]  # the key holds their ids: they must not go away
            for table in self._tables_of(call, some):
                found.append((table, tuple([(numbers[place], run) for place, run in table.pairs])))
        return found

    def partials(self, space: Space) -> Partials:
        return _TritonPartials(space, self)

    def row_maps(self, packed: Packed, space: Space) -> tuple[_RowMap, ...]:
        maps = self._row_maps.get(id(packed))
        if maps is None:
            made = self._map_rows(packed, space.sizes)
            maps = tuple([replace(one, table=one.table.to(self.device)) for one in made])
            self._row_maps[id(packed)] = maps
        return maps

    def _map_rows(self, packed: Packed, sizes: Mapping[int, tuple[int, int]]) -> tuple[_RowMap, ...]:
        if id(packed) in self._row_maps:  # of a forward that plans of two policies share
            return self._row_maps[id(packed)]
        self._kept.append(packed)
        self._row_maps[id(packed)] = maps = _row_maps(packed, {buffer: rows for buffer, (rows, _) in sizes.items()})
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
        """Tables of a call on these packed tensors, made once: by `prepare`, or here and now."""
        # `width`: elements of a head; keys and values of two widths have the same packed rows, and
        # lie apart in a message.
        packed = [one.packed for one in moved]
        fresh = tuple([tuple([number for number, _ in one.fresh]) for one in moved])
        key = (call, width, fresh if any(fresh) else (), *map(id, packed))
        if key not in self._tables:
            self._kept += packed  # the key holds their ids: they must not go away
            self._tables[key] = (
                _add_tables(moved, device) if call == "add" else _copy_tables(moved, device, take=call == "fill")
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


def _check(shares: Sequence[_Share], moves: Sequence[RowMove]) -> None:
    """Check that tensors that a launch is not given lie where its table has them."""
    # Else their rows would go astray.
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
    """Launch over a table's blocks. `sources`, `targets`: of its pairs, [T, H, ...], of one type."""
    num_blocks = table.blocks.shape[0]
    if not num_blocks:
        return
    sources = [x if x.is_contiguous() or _in_rows(x) else x.contiguous() for x in sources]
    assert all([x.is_contiguous() or _in_rows(x) for x in targets]), "a target with gaps inside its rows"  # noqa: C419
    dim = prod(targets[0].shape[2:])
    both = sources[0].element_size(), targets[0].element_size()
    vec = _vector(dim, min(both))
    cols = TILE_BYTES // max(both) * vec * min(both) // ACCESS_BYTES
    places = next(places for places in PLACES if places >= len(sources))
    kernel[(num_blocks, triton.cdiv(table.heads * dim, cols))](
        _padded(sources, places),
        _padded(targets, places),
        _padded([disguised(x.stride(0) // vec) for x in sources], places),
        _padded([disguised(x.stride(0) // vec) for x in targets], places),
        table.blocks,
        table.index,
        dim // vec,
        VEC=vec,
        ROWS=BLOCK_ROWS,
        COLS=cols,
    )


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
    """Elements of one access: 16 bytes of the narrower type, or as many of them as divide `dim`."""
    return gcd(dim, ACCESS_BYTES // element_bytes)


class _Partial(NamedTuple):
    """A partial of some rows of a buffer. `owned`: made here, so that it may be written again."""

    out: Tensor
    lse: Tensor
    row_map: _RowMap
    owned: bool = False


def partial_of(out: Tensor, lse: Tensor) -> _Partial:
    """A partial of all rows and heads of a buffer."""
    row_map = _RowMap.of(0, np.arange(out.shape[0]), (0, out.shape[1], 0), (out.shape[0], out.shape[1]))
    return _Partial(out, lse, replace(row_map, table=row_map.table.to(out.device)))


_P = TypeVar("_P", _Partial, _Entry)


class _HeldPartials(Generic[_P]):
    """The partials of one forward by query buffer: held as they came, unless they are too many.

    `sizes`: (rows, heads) of each buffer; `most`: as `HELD_PARTS`.
    """

    def __init__(self, sizes: Mapping[int, tuple[int, int]], most: int) -> None:
        self.sizes, self.most = sizes, most
        self.held: dict[int, list[_P]] = {}

    def hold(self, row_maps: Sequence[_RowMap], partial_of: Callable[[_RowMap], _P]) -> None:
        for row_map in row_maps:
            buffer, (rows, heads) = row_map.buffer, self.sizes[row_map.buffer]
            held = self.held.setdefault(buffer, [])
            # One merge can take no more partials; an accumulator has a place of its own.
            if held and len(held) - held[0].owned >= PARTS[-1]:
                held[:] = [self.accumulated(buffer, held)]
            held.append(partial_of(row_map))
            if sum([part.row_map.elements for part in held]) > self.most * rows * heads:
                held[:] = [self.accumulated(buffer, held)]

    def accumulated(self, buffer: int, held: list[_P]) -> _P:
        """All partials of a buffer as one."""
        raise NotImplementedError

    def whole(self, buffer: int) -> _RowMap:
        """Of an accumulator, which the kernel takes without a row map."""
        rows, heads = self.sizes[buffer]
        return _RowMap(buffer, _NO_TABLE, rows * heads, heads)


class _Expected(_HeldPartials[_Entry]):
    """The partials that a call will hold, before there are any: as `_TritonPartials` holds them."""

    number = 0

    def add(self, row_maps: Sequence[_RowMap]) -> None:
        self.number += 1
        self.hold(row_maps, lambda row_map: _Entry(self.number, row_map))

    def accumulated(self, buffer: int, held: list[_Entry]) -> _Entry:
        del held
        self.number += 1
        return _Entry(self.number, self.whole(buffer), owned=True)


class _TritonPartials(_HeldPartials[_Partial]):
    """See `movers.base.Partials`: some are held, and merged in one launch with the conversion."""

    def __init__(self, space: Space, mover: TritonMover) -> None:
        super().__init__(space.sizes, space.held)
        self.space, self.mover = space, mover

    def add(self, packed: Packed, merges: tuple[bool, ...], out: Tensor, lse: Tensor) -> None:
        del merges  # rows without a partial are known here by their row map
        self.hold(self.mover.row_maps(packed, self.space), lambda row_map: _Partial(out, lse, row_map))

    def accumulated(self, buffer: int, held: list[_Partial]) -> _Partial:
        """In the wide type: in the memory of the first, if that was made so before."""
        target = held[0]
        if not target.owned:
            out = self.space.empty((*self.sizes[buffer], self.space.dim), self.space.wide)
            lse = self.space.empty(self.sizes[buffer], self.space.wide)
            target = _Partial(out, lse, self.whole(buffer), owned=True)
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

    def send_together(self, first: Sent, table: _SendTable) -> None:
        parts = [
            self.held[buffer][number]._replace(row_map=row_map)
            for (buffer, number), row_map in zip(table.parts, table.row_maps, strict=True)
        ]
        assert not any(part.owned for part in parts), "rows that were merged before they were sent"
        merge_parts(self.mover, parts, made(first.out), made(first.lse), first_head=table.first_head, table=table)

    def final(self) -> tuple[Tensor, Tensor]:
        rows, heads = self.space.sizes[0]
        held = self.held.get(0, [])
        if len(held) == 1 and held[0].row_map.covers == heads:
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
    table: _SendTable | None = None,
    kernel: Any = None,
) -> None:
    """Merge partials of a buffer into rows of `out` [N, H, D] and `lse` [N, H]: its heads from
    `first_head` on, of row `rows` each or from `first_row` on. Without partials: zero and -inf.
    `out` and `lse` may be the first partial's own.

    `table`: the result is all messages of an exchange, of which these are the first. `kernel`: in
    place of `merge_rows`.
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
    # An accumulator of another type than the partials has a place of its own.
    gathered, parts = (held[0], held[1:]) if held[0].owned else (None, held)
    wide = mover.blank(lse.dtype)
    outs = [x if x.is_contiguous() else x.contiguous() for x, *_ in parts] or [mover.blank(out.dtype)]
    lses, by_head = [], 0
    for bit, part in enumerate(parts):
        turned = not part.lse.is_contiguous()
        by_head |= turned << bit
        # The libraries return LSE by row or by head, without gaps.
        lses.append(part.lse if not turned or part.lse.T.is_contiguous() else part.lse.T.contiguous().T)
    places = next((places for places in PARTS if places >= len(parts)), 0)
    assert places, f"{len(parts)} partials in one merge, at most {PARTS[-1]}"
    narrow = min(outs[0].element_size(), out.element_size())
    vec = _vector(dim, narrow)
    cols = triton.next_power_of_2(dim)
    block = max(1, min(MERGE_ROWS, MERGE_TILE // cols * vec * narrow // ACCESS_BYTES))
    no_map = mover.blank(torch.int32)
    merge: Any = (kernel or merge_rows)[(triton.cdiv(count, block), num_heads)]
    merge(
        _padded(outs, places),
        _padded(lses or [wide], places),
        _padded([part.row_map.table for part in parts] or [no_map], places),
        by_head,
        len(parts),
        wide if gathered is None else gathered.out,
        wide if gathered is None else gathered.lse,
        0 if gathered is None else gathered.out.shape[1],
        mover.blank(torch.int64) if rows is None else rows,
        int(rows is not None),
        out,
        lse,
        out.stride(0) // vec,
        out.stride(1) // vec,
        *lse.stride(),
        count,
        first_row,
        first_head,
        no_map if table is None else table.out_begins,
        no_map if table is None else table.lse_begins,
        int(table is not None),
        dim // vec,
        VEC=vec,
        ROWS=block,
        COLS=cols,
        num_warps=max(1, min(4, block * cols // _WARP_ELEMENTS)),
    )
