"""Fewer ops and rows that mean the same: what is empty goes, regions that touch become one.

Within one op only: which partials exist, when, and what travels together stay as they were. Rows that repeat or overlap are
left alone; they are `verify`'s business.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import assert_never

import numpy as np

from megatron_balance.ir.arrays import Ints, as_array, as_rows
from megatron_balance.ir.program import Attend, AttendGrad, Exchange, Merge, Op, Program
from megatron_balance.ir.rows import Rows


def tidy(program: Program) -> Program:
    """`program` without empty ops and rows, with neighbouring regions of an op joined."""
    return replace(program, forward=tuple(_tidy(program.forward)), backward=tuple(_tidy(program.backward)))


def _tidy(ops: Sequence[Op]) -> Iterator[Op]:
    for op in ops:
        match op:
            case Exchange():
                transfers = as_rows(_joined(as_array(op.transfers), 2))
                if transfers:
                    yield replace(op, transfers=transfers)
            case Attend() | AttendGrad():
                pairs = _tidy_pairs(op.pairs)
                if pairs:
                    yield replace(op, pairs=pairs)
            case Merge():
                values = as_rows(_joined(as_array(op.values), 2))
                if values:
                    yield replace(op, values=values)
            case _:
                assert_never(op)


def _tidy_pairs(pairs: Rows) -> Rows:
    table = as_array(pairs)
    table = table[table[:, 5] < table[:, 2]]  # the rest asks for keys that none of its queries may see
    before = len(table) + 1
    while len(table) < before:  # joining along queries can make neighbours along keys, and the other way round
        before = len(table)
        table = _joined(_joined(table, 5), 1)
    return as_rows(table)


def _joined(table: Ints, start: int) -> Ints:
    """Rows of which the one begins, in column `start`, where the other stops, as one; all other columns must be equal.

    Rows with nothing in [start, stop) are dropped. A joined row takes the place of the first of its rows.
    """
    stop = start + 1
    table = table[table[:, start] < table[:, stop]]
    if len(table) < 2:
        return table
    others = np.delete(table, (start, stop), axis=1)
    order = np.lexsort((table[:, stop], table[:, start], *others.T))
    rows, others = table[order], others[order]
    fresh = np.ones(len(rows), dtype=bool)
    fresh[1:] = (others[1:] != others[:-1]).any(axis=1) | (rows[1:, start] != rows[:-1, stop])
    begin = np.flatnonzero(fresh)
    joined = rows[begin]
    joined[:, stop] = rows[np.append(begin[1:], len(rows)) - 1, stop]
    return joined[np.argsort(np.minimum.reduceat(order, begin))]
