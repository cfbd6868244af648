"""Shorten a program without changing its meaning: drop empty ops and rows, join regions that touch.

Joins are within one op: partials and messages stay as they were. Rows that repeat or overlap are
left alone; finding those is the business of `verify`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import assert_never

import numpy as np

from megatron_balance.ir.arrays import Ints, as_array, as_rows, run_bounds
from megatron_balance.ir.columns import Pair, Transfer, Value
from megatron_balance.ir.mask import Mask
from megatron_balance.ir.program import Attend, AttendGrad, Exchange, Merge, Op, Program
from megatron_balance.ir.rows import Rows
from megatron_balance.ir.visible import sees


def tidy(program: Program) -> Program:
    """`program` without empty ops and rows, with neighbouring regions of an op joined."""
    forward, backward = (tuple(_tidy(ops, program.mask)) for ops in (program.forward, program.backward))
    return replace(program, forward=forward, backward=backward)


def _tidy(ops: Sequence[Op], mask: Mask) -> Iterator[Op]:
    for op in ops:
        match op:
            case Exchange():
                transfers = as_rows(_join_neighbours(as_array(op.transfers), Transfer.START))
                if transfers:
                    yield replace(op, transfers=transfers)
            case Attend() | AttendGrad():
                pairs = _tidy_pairs(op.pairs, mask)
                if pairs:
                    yield replace(op, pairs=pairs)
            case Merge():
                values = as_rows(_join_neighbours(as_array(op.values), Value.START))
                if values:
                    yield replace(op, values=values)
            case _:
                assert_never(op)


def _tidy_pairs(pairs: Rows, mask: Mask) -> Rows:
    table = as_array(pairs)
    table = table[sees(table, mask)]
    before = len(table) + 1
    while len(table) < before:  # joining along queries can make neighbours along keys, and the other way round
        before = len(table)
        table = _join_neighbours(_join_neighbours(table, Pair.K_START), Pair.Q_START)
    return as_rows(table)


def _join_neighbours(table: Ints, start: int) -> Ints:
    """`table` with rows joined where one begins, in column `start`, where another stops, and all
    else is equal.

    The column behind `start` is the stop. Rows with nothing in [start, stop) are dropped. A joined
    row takes the place of the first of its rows.
    """
    stop = start + 1
    table = table[table[:, start] < table[:, stop]]
    if len(table) < 2:
        return table
    others = np.delete(table, (start, stop), axis=1)
    order = np.lexsort((table[:, stop], table[:, start], *others.T))
    rows, others = table[order], others[order]
    bounds = run_bounds((others[1:] != others[:-1]).any(axis=1) | (rows[1:, start] != rows[:-1, stop]), len(rows))
    first, last = bounds[:-1], bounds[1:] - 1
    joined = rows[first]
    joined[:, stop] = rows[last, stop]
    return joined[np.argsort(np.minimum.reduceat(order, first))]
