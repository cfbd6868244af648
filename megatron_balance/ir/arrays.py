"""`Rows` as NumPy arrays and back, without a copy on the way in."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from megatron_balance.ir.columns import Rows

Ints: TypeAlias = NDArray[np.int64]
Bools: TypeAlias = NDArray[np.bool_]


def as_array(rows: Rows) -> Ints:
    """The table as a read-only int64 array [len(rows), rows.width]."""
    return np.frombuffer(rows.data, dtype="<i8").reshape(-1, rows.width)


def as_rows(table: Ints) -> Rows:
    return Rows(table.shape[1], np.ascontiguousarray(table, dtype="<i8").tobytes())


def run_starts(changes: Bools, length: int) -> Bools:
    """Where runs of equal elements begin: bool [length]. `changes` [length - 1]: from the last."""
    starts = np.ones(length, dtype=bool)
    starts[1:] = changes
    return starts


def run_bounds(changes: Bools, length: int) -> Ints:
    """Indices where runs of equal elements begin, and `length`: int64 [runs + 1]."""
    # `changes` as in `run_starts`. Without any element the bounds are [0].
    mask = np.ones(length + 1, dtype=bool)
    mask[1:length] = changes
    return np.flatnonzero(mask)


def concat(tables: list[Rows], width: int) -> Ints:
    """All rows of `tables` below one another, [sum of lengths, width]."""
    return np.frombuffer(b"".join(t.data for t in tables), dtype="<i8").reshape(-1, width)


def sums(index: Ints, amounts: Ints, size: int) -> Ints:
    """The sum of the amounts of each index in [0, size): int64 [size]."""
    totals = np.zeros(size, dtype=np.int64)
    np.add.at(totals, index, amounts)
    return totals
