"""Tables of blocks for the kernels of `movers.triton.kernels`, from the runs of packed tensors.
NumPy, once for a bound plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_balance.ir.arrays import Ints
from megatron_balance.runtime.lower.moves import Moved, Site
from megatron_balance.runtime.lower.steps import Packed, RowRun
from megatron_balance.runtime.movers.triton.kernels import BLOCK_ROWS, AddBlock, CopyBlock

MAX_PAIRS = 8
"""Tensor pairs of one launch. The kernels have a branch for each."""

UNIT = 16
"""Bytes that begins in a table are counted in."""

Pair = tuple[int, int]
"""(place of a packed tensor in the call, run of it whose buffer is meant)."""


class Share(NamedTuple):
    """A tensor that lies in the memory of a pair's, which stands for it: `begin` bytes and `rows`
    of its rows behind that one. `own`: the packed rows, not the buffer.
    """

    own: bool
    pair: Pair
    stands_for: Pair
    begin: int
    rows: int


@dataclass(frozen=True, slots=True)
class BlockTable:
    """Blocks of one launch.

    `pairs`: the tensors that it is given. `blocks`: int32 [blocks, `CopyBlock.WIDTH` or
    `AddBlock.WIDTH`]; `index`: int32, the lists that blocks name by where they begin. `heads`: of the
    widest block. `shares`: tensors that it is not given, since they lie in another's memory.
    """

    pairs: tuple[Pair, ...]
    blocks: Tensor
    index: Tensor
    heads: int
    shares: tuple[Share, ...] = ()


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
        self.pairs: list[Pair] = []
        self.sides: list[_Sides] = []  # of each pair
        self.shares: list[Share] = []
        self.blocks: list[Ints] = []
        self.index: list[Ints] = []
        self.num_index = 0

    def behind(self, number: int, sides: _Sides, pair: Pair) -> tuple[list[int], list[int]]:
        """How far the tensors of a move lie behind those of pair `number`: units, and rows."""
        begins, rows = [], []
        for own, (site, base) in enumerate(zip(sides, self.sides[number], strict=True)):
            begin, row = site.begin - base.begin, site.first_row - base.first_row
            begins.append(begin // UNIT)
            rows.append(row)
            if pair != self.pairs[number]:
                self.shares.append(Share(bool(own), pair, self.pairs[number], begin, row))
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


def copy_tables(moved: Sequence[Moved], device: torch.device, *, take: bool) -> list[BlockTable]:
    """Launches that copy all runs of the packed tensors: usually one. `take`: from their buffers,
    else to them.
    """
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
    launches: list[_TableBuilder], numbers: dict[tuple[object, ...], int], sides: _Sides, pair: Pair, width: int
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
    pair: Pair
    of_buffer: Ints
    packed: Ints


@dataclass(slots=True)
class _Sum:
    """Rows that one program may add: to the same heads of one tensor, from one memory. `low`,
    `high`: bounds of the target rows.
    """

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


def add_tables(moved: Sequence[Moved], device: torch.device) -> list[BlockTable]:
    """Launches that add all runs of the packed tensors to their buffers. Blocks: `AddBlock`.

    Usually one; more where an element gets rows from several memories, or heads of the same rows are
    split differently, since no two programs of a launch may write the same element.
    """
    sums: dict[tuple[object, ...], _Sum] = {}
    fresh: dict[Site, tuple[tuple[int, int], _Sides, Pair]] = {}
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
            for heads, rows in _blank([one for one in of_wave if one.target == target], size):
                number = _numbered(launches, numbers, sides, pair, AddBlock.WIDTH)
                begins, behind = launches[-1].behind(number, sides, pair)
                _blank_blocks(launches[-1], number, (begins[0], heads), rows + behind[0])
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
    blocks = _blocks_to(launch, number, targets, (first + sources, counts))
    blocks[:, AddBlock.SOURCE_HEAD], blocks[:, AddBlock.TARGET_HEAD] = one.head, one.buffer_head
    blocks[:, AddBlock.HEADS], blocks[:, AddBlock.BEHIND] = one.num_heads, len(packed)
    blocks[:, AddBlock.TARGET_BEGIN], blocks[:, AddBlock.FRESH] = lies[0][0][0], fresh
    launch.blocks.append(blocks)


def _blank_blocks(launch: _TableBuilder, number: int, lies: tuple[int, tuple[int, int]], rows: Ints) -> None:
    """Rows of a fresh tensor that get nothing: they become zero. `lies`: where it begins, and which
    (head, heads).
    """
    none = np.zeros(len(rows), dtype=np.int64)
    blocks = _blocks_to(launch, number, rows, (none, none))
    blocks[:, AddBlock.SOURCE_HEAD], blocks[:, AddBlock.BEHIND] = 0, 0
    blocks[:, AddBlock.TARGET_HEAD], blocks[:, AddBlock.HEADS] = lies[1]
    blocks[:, AddBlock.TARGET_BEGIN], blocks[:, AddBlock.FRESH] = lies[0], 1
    launch.blocks.append(blocks)


def _blocks_to(launch: _TableBuilder, number: int, targets: Ints, sources: tuple[Ints, Ints]) -> Ints:
    """Blocks for target rows, without heads and begins. `sources`: of each the place of the first
    and their number.
    """
    target_at, first_at, number_at = launch.listed(targets), launch.listed(sources[0]), launch.listed(sources[1])
    starts = np.arange(0, len(targets), BLOCK_ROWS)
    blocks = np.empty((len(starts), AddBlock.WIDTH), dtype=np.int64)
    blocks[:, AddBlock.PAIR] = number
    blocks[:, AddBlock.TARGET_LIST] = starts + target_at
    blocks[:, AddBlock.FIRST_LIST] = starts + first_at
    blocks[:, AddBlock.NUMBER_LIST] = starts + number_at
    blocks[:, AddBlock.COUNT] = np.minimum(BLOCK_ROWS, len(targets) - starts)
    blocks[:, AddBlock.MOST_SOURCES] = np.maximum.reduceat(sources[1], starts)
    return blocks


@dataclass(frozen=True, slots=True)
class RowMap:
    """Packed rows of a partial by row of a buffer, each at most once.

    `rows`: int32 [rows of the buffer], the packed row of each or -1; None: all rows, in order.
    Heads [head, head + num_heads) of the packed rows are those at `buffer_head` of the buffer.
    `count`: rows of it.
    """

    buffer: int
    rows: Tensor | None
    head: int
    num_heads: int
    buffer_head: int
    count: int = 0

    def covers(self, num_heads: int) -> bool:
        """Whether it is all of a buffer of `num_heads` heads, in order."""
        return self.rows is None and (self.head, self.num_heads, self.buffer_head) == (0, num_heads, 0)


def row_maps(packed: Packed, num_rows: Mapping[int, int], device: torch.device) -> tuple[RowMap, ...]:
    """The packed rows as row maps, as few as hold them. `num_rows`: of each buffer."""
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
    made: list[RowMap] = []
    for (buffer, head, num_heads, buffer_head), maps in maps_of.items():
        for one in maps:
            whole = bool((one == np.arange(len(one))).all())
            rows = None if whole else _to(device, one)
            made.append(RowMap(buffer, rows, head, num_heads, buffer_head, int((one >= 0).sum())))
    return tuple(made)


class Entry(NamedTuple):
    """A partial of a buffer: equal `part` for the rows of one launch or message. `owned`: it is an
    accumulator.
    """

    part: int
    row_map: RowMap
    owned: bool = False


@dataclass(frozen=True, slots=True)
class SendTable:
    """One merge of partials into all messages of an exchange: n rows, message by message.

    `parts`: (buffer, number of the partial held of it); `row_maps`: of each part, by row of the
    result. `out_begins`, `lse_begins`: int32 [n], where each row begins behind the first message's
    output, in units of 16 bytes, and behind its LSE, in elements. `shares`: (bytes of the output,
    bytes of the LSE) of each message behind the first's.
    """

    parts: tuple[tuple[int, int], ...]
    row_maps: tuple[RowMap, ...]
    out_begins: Tensor
    lse_begins: Tensor
    num_heads: int
    first_head: int
    shares: tuple[tuple[int, int], ...]


def send_table(
    outs: Sequence[Moved], lses: Sequence[Moved], held: Mapping[int, Sequence[Entry]], row_bytes: tuple[int, int]
) -> SendTable | None:
    """The table of messages of outputs in one memory, or None where one merge does not do.

    `held`: the partials of each buffer then; `row_bytes`: of a head of a row, output and LSE.
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
    maps: dict[tuple[object, int, int, int], list[tuple[tuple[int, int], Ints]]] = {}
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
                whole = row_map.rows is None
                found = of_buffer if whole else row_map.rows.numpy()[of_buffer]  # pyright: ignore[reportOptionalMemberAccess]
                key = (part, row_map.head, row_map.num_heads, row_map.buffer_head)
                _enter(maps.setdefault(key, []), packed + at, found, total, (run.buffer, number))
        at += len(rows)
    parts = [(key, place, one) for key, own in maps.items() for place, one in own]
    row_maps = [RowMap(place[0], _to(_CPU, one), *key[1:]) for key, place, one in parts]
    made = SendTable(
        tuple(place for _, place, _ in parts),
        tuple(row_maps),
        _to(_CPU, out_begins),
        _to(_CPU, lse_begins),
        num_heads,
        first_head,
        tuple((a, b) for a, b in shares),
    )
    return made if parts else None


_CPU = torch.device("cpu")


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
