"""Tables of blocks for the kernels of `runtime.movers.triton.kernels`, from the runs of packed tensors. NumPy, once for a bound plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_balance.ir.arrays import Ints
from megatron_balance.runtime.lower.regions import Run
from megatron_balance.runtime.lower.steps import Packed
from megatron_balance.runtime.movers.triton.kernels import ADD_WIDTH, BLOCK_ROWS, COPY_WIDTH

MAX_PAIRS = 8
"""Tensor pairs of one launch. The kernels have a branch for each."""

Pair = tuple[int, int]
"""(place of a packed tensor in the call, run of it whose buffer is meant)."""


@dataclass(frozen=True, slots=True)
class BlockTable:
    """One launch. `pairs`: whose tensors it is given; `blocks`: int32 [n, width]; `index`: int32 rows; `heads`: most of any block."""

    pairs: tuple[Pair, ...]
    blocks: Tensor
    index: Tensor
    heads: int


class _TableBuilder:
    """A launch as it is put together. Block columns that say where a list begins are set by `listed`."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.pairs: list[Pair] = []
        self.blocks: list[Ints] = []
        self.index: list[Ints] = []
        self.num_index = 0

    def listed(self, rows: Ints) -> int:
        """Where in `index` the rows begin."""
        self.index.append(rows)
        self.num_index += len(rows)
        return self.num_index - len(rows)

    def done(self, device: torch.device) -> BlockTable:
        blocks = np.concatenate(self.blocks) if self.blocks else np.empty((0, self.width), dtype=np.int64)
        index = np.concatenate(self.index) if self.index else np.zeros(1, dtype=np.int64)
        heads = int(blocks[:, -1].max()) if len(blocks) else 0
        return BlockTable(tuple(self.pairs), _to(device, blocks), _to(device, index), heads)


def _to(device: torch.device, values: Ints) -> Tensor:
    """Values as int32 on the device.

    Raises AssertionError: a row number that needs more than 31 bits; a rank has no 2**31 tokens.
    """
    assert values.size == 0 or int(values.max()) < 1 << 31, int(values.max())
    return torch.from_numpy(values.astype(np.int32)).to(device, non_blocking=True)  # the host waits for nothing


def copy_tables(packed: Sequence[Packed], device: torch.device, *, take: bool) -> list[BlockTable]:
    """Launches that copy all runs of the packed tensors: from their buffers (`take`), or to them. Usually one.

    Block: (pair, source row, source list or -1, target row, target list or -1, count, source head, target head, heads).
    """
    launches: list[_TableBuilder] = []
    numbers: dict[Pair, int] = {}
    for place, one in enumerate(packed):
        for run_at, run in enumerate(one.runs):
            if not run.count:
                continue
            pair = _numbered(launches, numbers, (place, run.buffer), (place, run_at), COPY_WIDTH)
            launch = launches[-1]
            starts = np.arange(0, run.count, BLOCK_ROWS)
            at = -1 if run.index is None else launch.listed(run.index)
            inside = (starts + run.start, np.full(len(starts), -1)) if at < 0 else (starts, starts + at)
            packed_side = (starts + run.row, np.full(len(starts), -1))
            heads = (run.buffer_head, run.head) if take else (run.head, run.buffer_head)
            source, target = (inside, packed_side) if take else (packed_side, inside)
            blocks = np.empty((len(starts), COPY_WIDTH), dtype=np.int64)
            blocks[:, 0] = pair
            blocks[:, 1], blocks[:, 2] = source
            blocks[:, 3], blocks[:, 4] = target
            blocks[:, 5] = np.minimum(BLOCK_ROWS, run.count - starts)
            blocks[:, 6], blocks[:, 7], blocks[:, 8] = *heads, run.num_heads
            launch.blocks.append(blocks)
    return [launch.done(device) for launch in launches]


def _numbered(launches: list[_TableBuilder], numbers: dict[Pair, int], key: Pair, pair: Pair, width: int) -> int:
    """The number of a pair of tensors in the last launch, a new one begun if that is full. `key`: the same for the same tensors."""
    if key not in numbers:
        if not launches or len(launches[-1].pairs) == MAX_PAIRS:
            launches.append(_TableBuilder(width))
            numbers.clear()
        numbers[key] = len(launches[-1].pairs)
        launches[-1].pairs.append(pair)
    return numbers[key]


def add_tables(packed: Sequence[Packed], device: torch.device) -> list[BlockTable]:
    """Launches that add all runs of the packed tensors to their buffers. Usually one; more where heads of the same rows are cut
    differently, since no two programs of a launch may write the same element.

    Block: (pair, list of target rows, list of first sources, list of numbers of sources, count, most sources, source head, target
    head, heads). The first source of a row is a place in the list of source rows.
    """
    waves: list[list[_TableBuilder]] = []
    for place, one in enumerate(packed):
        for wave, runs in enumerate(_waves(one)):
            if wave == len(waves):
                waves.append([])
            launches = waves[wave]
            for run_at, rows in runs:
                if not launches or len(launches[-1].pairs) == MAX_PAIRS:
                    launches.append(_TableBuilder(ADD_WIDTH))
                _add_blocks(launches[-1], one.runs[run_at], rows, (place, run_at))
    return [launch.done(device) for wave in waves for launch in wave]


def _waves(packed: Packed) -> list[list[tuple[int, Ints]]]:
    """Runs with the same buffer and heads joined: (one of the runs, rows (of the buffer, packed) [n, 2]); in one wave none overlap."""
    joined: dict[tuple[int, int, int, int], list[int]] = {}
    for at, run in enumerate(packed.runs):
        if run.count:
            joined.setdefault((run.buffer, run.buffer_head, run.head, run.num_heads), []).append(at)
    waves: list[list[tuple[int, Ints]]] = []
    taken: list[list[tuple[int, int, int]]] = []  # of each wave: buffer and heads
    for (buffer, buffer_head, _, num_heads), runs in joined.items():
        rows = np.concatenate([_rows(packed.runs[at]) for at in runs])
        free = (
            wave
            for wave, held in enumerate(taken)
            if not any(b == buffer and low < buffer_head + num_heads and buffer_head < high for b, low, high in held)
        )
        wave = next(free, len(waves))
        if wave == len(waves):
            waves.append([])
            taken.append([])
        waves[wave].append((runs[0], rows))
        taken[wave].append((buffer, buffer_head, buffer_head + num_heads))
    return waves


def _rows(run: Run) -> Ints:
    """Rows (of the buffer, packed) of a run, [count, 2]."""
    inside = np.arange(run.start, run.stop) if run.index is None else run.index
    return np.column_stack([inside, np.arange(run.row, run.row + run.count)])


def _add_blocks(launch: _TableBuilder, run: Run, rows: Ints, pair: Pair) -> None:
    rows = rows[np.argsort(rows[:, 0], kind="stable")]
    targets, first, number = np.unique(rows[:, 0], return_index=True, return_counts=True)
    target_at = launch.listed(targets)
    sources_at = launch.num_index + 2 * len(targets)  # behind the two lists that come next
    first_at = launch.listed(first + sources_at)
    number_at = launch.listed(number)
    launch.listed(rows[:, 1])
    starts = np.arange(0, len(targets), BLOCK_ROWS)
    blocks = np.empty((len(starts), ADD_WIDTH), dtype=np.int64)
    blocks[:, 0] = len(launch.pairs)
    for column, begin in enumerate((target_at, first_at, number_at), start=1):
        blocks[:, column] = starts + begin
    blocks[:, 4] = np.minimum(BLOCK_ROWS, len(targets) - starts)
    blocks[:, 5] = np.maximum.reduceat(number, starts)
    blocks[:, 6], blocks[:, 7], blocks[:, 8] = run.head, run.buffer_head, run.num_heads
    launch.blocks.append(blocks)
    launch.pairs.append(pair)


@dataclass(frozen=True, slots=True)
class Layer:
    """Part of a packed partial that has each row of a buffer at most once.

    `rows`: int32 [rows of the buffer], the packed row of each or -1; None: all rows, in order. Heads [head, head + num_heads) of the
    packed rows are those at `buffer_head` of the buffer.
    """

    buffer: int
    rows: Tensor | None
    head: int
    num_heads: int
    buffer_head: int

    def covers(self, num_heads: int) -> bool:
        """Whether it is all of a buffer of so many heads, in order."""
        return self.rows is None and (self.head, self.num_heads, self.buffer_head) == (0, num_heads, 0)


def layers(packed: Packed, num_rows: dict[int, int], device: torch.device) -> tuple[Layer, ...]:
    """The packed rows as layers. `num_rows`: of each buffer."""
    open_layers: dict[tuple[int, int, int, int], list[Ints]] = {}
    for run in packed.runs:
        held = open_layers.setdefault((run.buffer, run.head, run.num_heads, run.buffer_head), [])
        rows = _rows(run)
        for layer in held:
            if (layer[rows[:, 0]] < 0).all() and len(np.unique(rows[:, 0])) == len(rows):
                layer[rows[:, 0]] = rows[:, 1]
                break
        else:
            held += _split(rows, num_rows[run.buffer])
    found: list[Layer] = []
    for (buffer, head, num_heads, buffer_head), held in open_layers.items():
        for layer in held:
            whole = bool((layer == np.arange(len(layer))).all())
            found.append(Layer(buffer, None if whole else _to(device, layer), head, num_heads, buffer_head))
    return tuple(found)


def _split(rows: Ints, num_rows: int) -> list[Ints]:
    """Layers [num_rows] that hold each (buffer row, packed row), the k-th for a buffer row in the k-th."""
    order = np.argsort(rows[:, 0], kind="stable")
    ordered = rows[order]
    first = np.searchsorted(ordered[:, 0], ordered[:, 0])
    depth = np.arange(len(rows)) - first
    found = [np.full(num_rows, -1, dtype=np.int64) for _ in range(int(depth.max(initial=-1)) + 1)]
    for k, layer in enumerate(found):
        layer[ordered[depth == k, 0]] = ordered[depth == k, 1]
    return found
