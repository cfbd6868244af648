"""Tables of blocks for the kernels of `movers.triton.kernels`, from the runs of packed tensors.

NumPy, once for a bound plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_balance.ir.arrays import Ints
from megatron_balance.runtime.lower.regions import Run
from megatron_balance.runtime.lower.steps import Packed
from megatron_balance.runtime.movers.triton.kernels import BLOCK_ROWS, AddBlock, CopyBlock

MAX_PAIRS = 8
"""Tensor pairs of one launch. The kernels have a branch for each."""

Pair = tuple[int, int]
"""(place of a packed tensor in the call, run of it whose buffer is meant)."""


@dataclass(frozen=True, slots=True)
class BlockTable:
    """Blocks of one launch.

    Attributes:
        pairs: whose tensors it is given.
        blocks: int32 [n, `CopyBlock.WIDTH` or `AddBlock.WIDTH`].
        index: int32 rows.
        heads: most of any block.
    """

    pairs: tuple[Pair, ...]
    blocks: Tensor
    index: Tensor
    heads: int


class _TableBuilder:
    """A launch as it is put together."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.pairs: list[Pair] = []
        self.blocks: list[Ints] = []
        self.index: list[Ints] = []
        self.num_index = 0

    def listed(self, rows: Ints) -> int:
        """Append rows to `index`; where they begin."""
        self.index.append(rows)
        self.num_index += len(rows)
        return self.num_index - len(rows)

    def done(self, device: torch.device) -> BlockTable:
        blocks = np.concatenate(self.blocks) if self.blocks else np.empty((0, self.width), dtype=np.int64)
        index = np.concatenate(self.index) if self.index else np.zeros(1, dtype=np.int64)
        heads = int(blocks[:, CopyBlock.HEADS].max()) if len(blocks) else 0  # last of both
        return BlockTable(tuple(self.pairs), _to(device, blocks), _to(device, index), heads)


def _to(device: torch.device, values: Ints) -> Tensor:
    """Values as int32 on the device.

    Raises:
        AssertionError: a row number needs more than 31 bits; a rank has no 2**31 tokens.
    """
    assert values.size == 0 or int(values.max()) < 1 << 31, int(values.max())
    return torch.from_numpy(values.astype(np.int32)).to(device, non_blocking=True)  # no wait


def copy_tables(packed: Sequence[Packed], device: torch.device, *, take: bool) -> list[BlockTable]:
    """Launches that copy all runs of the packed tensors: usually one. Blocks: `CopyBlock`.

    `take`: from their buffers, else to them.
    """
    launches: list[_TableBuilder] = []
    numbers: dict[Pair, int] = {}
    for place, one in enumerate(packed):
        for run_at, run in enumerate(one.runs):
            if not run.count:
                continue
            pair = _numbered(launches, numbers, (place, run.buffer), (place, run_at), CopyBlock.WIDTH)
            launch = launches[-1]
            starts = np.arange(0, run.count, BLOCK_ROWS)
            at = -1 if run.index is None else launch.listed(run.index)
            inside = (starts + run.start, np.full(len(starts), -1)) if at < 0 else (starts, starts + at)
            packed_side = (starts + run.row, np.full(len(starts), -1))
            heads = (run.buffer_head, run.head) if take else (run.head, run.buffer_head)
            source, target = (inside, packed_side) if take else (packed_side, inside)
            blocks = np.empty((len(starts), CopyBlock.WIDTH), dtype=np.int64)
            blocks[:, CopyBlock.PAIR] = pair
            blocks[:, CopyBlock.SOURCE_ROW], blocks[:, CopyBlock.SOURCE_LIST] = source
            blocks[:, CopyBlock.TARGET_ROW], blocks[:, CopyBlock.TARGET_LIST] = target
            blocks[:, CopyBlock.COUNT] = np.minimum(BLOCK_ROWS, run.count - starts)
            blocks[:, CopyBlock.SOURCE_HEAD], blocks[:, CopyBlock.TARGET_HEAD] = heads
            blocks[:, CopyBlock.HEADS] = run.num_heads
            launch.blocks.append(blocks)
    return [launch.done(device) for launch in launches]


def _numbered(launches: list[_TableBuilder], numbers: dict[Pair, int], key: Pair, pair: Pair, width: int) -> int:
    """The number of a pair of tensors in the last launch; a new one is begun if that is full.

    `key`: equal for equal tensors.
    """
    if key not in numbers:
        if not launches or len(launches[-1].pairs) == MAX_PAIRS:
            launches.append(_TableBuilder(width))
            numbers.clear()
        numbers[key] = len(launches[-1].pairs)
        launches[-1].pairs.append(pair)
    return numbers[key]


def add_tables(packed: Sequence[Packed], device: torch.device) -> list[BlockTable]:
    """Launches that add all runs of the packed tensors to their buffers. Blocks: `AddBlock`.

    Usually one; more where heads of the same rows are split differently, since no two programs of a
    launch may write the same element.
    """
    waves: list[list[_TableBuilder]] = []
    for place, one in enumerate(packed):
        for wave, runs in enumerate(_waves(one)):
            if wave == len(waves):
                waves.append([])
            launches = waves[wave]
            for run_at, rows in runs:
                if not launches or len(launches[-1].pairs) == MAX_PAIRS:
                    launches.append(_TableBuilder(AddBlock.WIDTH))
                _add_blocks(launches[-1], one.runs[run_at], *rows, (place, run_at))
    return [launch.done(device) for wave in waves for launch in wave]


def _waves(packed: Packed) -> list[list[tuple[int, tuple[Ints, Ints]]]]:
    """Runs with the same buffer and heads as one: (one of the runs, rows as in `_rows`).

    In one wave none overlap.
    """
    alike: dict[tuple[int, int, int, int], list[int]] = {}
    for at, run in enumerate(packed.runs):
        if run.count:
            alike.setdefault((run.buffer, run.buffer_head, run.head, run.num_heads), []).append(at)
    waves: list[list[tuple[int, tuple[Ints, Ints]]]] = []
    taken: list[list[tuple[int, int, int]]] = []  # of each wave: buffer and heads
    for (buffer, buffer_head, _, num_heads), runs in alike.items():
        rows = np.concatenate([_rows(packed.runs[at]) for at in runs], axis=1)
        free = (
            wave
            for wave, held in enumerate(taken)
            if not any(b == buffer and low < buffer_head + num_heads and buffer_head < high for b, low, high in held)
        )
        wave = next(free, len(waves))
        if wave == len(waves):
            waves.append([])
            taken.append([])
        waves[wave].append((runs[0], (rows[0], rows[1])))
        taken[wave].append((buffer, buffer_head, buffer_head + num_heads))
    return waves


def _rows(run: Run) -> tuple[Ints, Ints]:
    """Rows of the buffer, and packed rows, of a run, [count] each."""
    of_buffer = np.arange(run.start, run.stop) if run.index is None else run.index
    return of_buffer, np.arange(run.row, run.row + run.count)


def _add_blocks(launch: _TableBuilder, run: Run, of_buffer: Ints, packed: Ints, pair: Pair) -> None:
    order = np.argsort(of_buffer, kind="stable")
    targets, first, number = np.unique(of_buffer[order], return_index=True, return_counts=True)
    target_at = launch.listed(targets)
    sources_at = launch.num_index + 2 * len(targets)  # behind the two lists that come next
    first_at = launch.listed(first + sources_at)
    number_at = launch.listed(number)
    launch.listed(packed[order])
    starts = np.arange(0, len(targets), BLOCK_ROWS)
    blocks = np.empty((len(starts), AddBlock.WIDTH), dtype=np.int64)
    blocks[:, AddBlock.PAIR] = len(launch.pairs)
    blocks[:, AddBlock.TARGET_LIST] = starts + target_at
    blocks[:, AddBlock.FIRST_LIST] = starts + first_at
    blocks[:, AddBlock.NUMBER_LIST] = starts + number_at
    blocks[:, AddBlock.COUNT] = np.minimum(BLOCK_ROWS, len(targets) - starts)
    blocks[:, AddBlock.MOST_SOURCES] = np.maximum.reduceat(number, starts)
    blocks[:, AddBlock.SOURCE_HEAD], blocks[:, AddBlock.TARGET_HEAD] = run.head, run.buffer_head
    blocks[:, AddBlock.HEADS] = run.num_heads
    launch.blocks.append(blocks)
    launch.pairs.append(pair)


@dataclass(frozen=True, slots=True)
class RowMap:
    """Packed rows of a partial by row of a buffer, each at most once.

    `rows`: int32 [rows of the buffer], the packed row of each or -1; None: all rows, in order.
    Heads [head, head + num_heads) of the packed rows are those at `buffer_head` of the buffer.
    """

    buffer: int
    rows: Tensor | None
    head: int
    num_heads: int
    buffer_head: int

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
            made.append(RowMap(buffer, None if whole else _to(device, one), head, num_heads, buffer_head))
    return tuple(made)


def _maps_of_run(of_buffer: Ints, packed_rows: Ints, num_rows: int) -> list[Ints]:
    """Packed rows by buffer row, [num_rows] each; the k-th for a buffer row in the k-th."""
    order = np.argsort(of_buffer, kind="stable")
    of_buffer, packed_rows = of_buffer[order], packed_rows[order]
    depth = np.arange(len(of_buffer)) - np.searchsorted(of_buffer, of_buffer)
    maps = [np.full(num_rows, -1, dtype=np.int64) for _ in range(int(depth.max(initial=-1)) + 1)]
    for k, one in enumerate(maps):
        one[of_buffer[depth == k]] = packed_rows[depth == k]
    return maps
