"""Dispatch: any task table of the (query, key) triangle. Queries and keys go to the rank of each task, outputs come back to the owner.

The general comm pattern (DistCA, section 4): one Exchange in, one Attend a rank, one Exchange back, one Merge where a fragment's
partials meet.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from megatron_balance.ir.arrays import Ints, as_array, as_rows
from megatron_balance.ir.intervals import ranges
from megatron_balance.ir.plan import TaskTable
from megatron_balance.ir.program import MERGE_WIDTH, PAIR_WIDTH, Kind, Op
from megatron_balance.ir.rows import Rows
from megatron_balance.patterns.base import Context, Share, attend, exchange, merge

_SHIFT = 40  # a token's position needs fewer bits than this
_RANK, _SEQ, _QUERIES, _KEYS = 0, 1, 2, 4  # columns of tasks: of two each, where the queries and the keys begin


def num_exchanges(zone: TaskTable) -> int:
    """In and back, whether or not anything moves (unused ids cost nothing)."""
    return 2 if zone.fragments else 0


def place(zone: TaskTable, lengths: Ints, rank: int) -> Ints:
    """Rows (seq, start, stop) of `rank`, as the planner listed them."""
    del lengths
    table = as_array(zone.fragments)
    return table[table[:, 0] == rank][:, 1:]


def project(zone: TaskTable, context: Context, rank: int) -> Share:
    """The ops of `rank`."""
    there, back = (as_array(rows) for rows in transfers(zone, context.num_heads, context.num_kv_heads))
    there, back = (rows[(rows[:, 6] == rank) | (rows[:, 7] == rank)] for rows in (there, back))
    ops: list[Op] = [exchange(context, 0, there)] if len(there) else []
    tasks = _visible(zone, rank) if context.attends else np.empty((0, 6), dtype=np.int64)
    if len(tasks):
        pairs = np.zeros((len(tasks), PAIR_WIDTH), dtype=np.int64)
        pairs[:, :3] = tasks[:, 1:4]
        pairs[:, 4] = context.num_heads
        pairs[:, 5:7] = tasks[:, 4:6]
        pairs[:, 8] = context.num_kv_heads
        ops.append(attend(rank, pairs))
    if len(back):
        ops.append(exchange(context, 1, back))
    if context.attends:
        values = _merges(tasks, place(zone, context.lengths, rank), back[back[:, 7] == rank], context.num_heads)
        ops += [merge(rank, values)] if len(values) else []
    return Share(ops)


def _visible(zone: TaskTable, rank: int | None = None) -> Ints:
    """The tasks (of a rank) without queries that see none of their keys and keys that none of their queries sees: those stay at the owner."""
    table = as_array(zone.tasks)
    tasks = table.copy() if rank is None else table[table[:, _RANK] == rank]
    tasks[:, 2] = np.maximum(tasks[:, 2], tasks[:, 4])
    tasks[:, 5] = np.minimum(tasks[:, 5], tasks[:, 3])
    return tasks


@lru_cache(maxsize=64)
def transfers(zone: TaskTable, num_heads: int, num_kv_heads: int) -> tuple[Rows, Rows]:
    """All transfers in and all transfers back, for every rank."""
    tasks, owned = _visible(zone), as_array(zone.fragments)
    there: list[Ints] = []
    for kind, column, heads in ((Kind.Q, _QUERIES, num_heads), (Kind.KV, _KEYS, num_kv_heads)):
        needs = _union(tasks[:, [_RANK, _SEQ, column, column + 1]])
        need, at, start, stop = _met(needs[:, 1:], owned[:, 1:])
        rows = np.column_stack([need, owned[at, 1], start, stop, need, need, owned[at, 0], needs[need, 0]])
        rows[:, 0], rows[:, 4], rows[:, 5] = kind, 0, heads
        there.append(rows[rows[:, 6] != rows[:, 7]])
    back = there[0][:, [0, 1, 2, 3, 4, 5, 7, 6]]
    back[:, 0] = Kind.OUT
    return as_rows(np.concatenate(there)), as_rows(back)


def _union(intervals: Ints) -> Ints:
    """Rows (a, b, start, stop) in order: of each (a, b), disjoint intervals that cover the same tokens as its `intervals`, rows of the
    same form. Touching ones are joined, empty ones left out.
    """
    rows = intervals[intervals[:, 2] < intervals[:, 3]]
    rows = rows[np.lexsort((rows[:, 2], rows[:, 1], rows[:, 0]))]
    fresh = np.ones(len(rows), dtype=bool)
    fresh[1:] = (rows[1:, :2] != rows[:-1, :2]).any(axis=1)
    reach = np.maximum.accumulate((np.cumsum(fresh) << _SHIFT) | rows[:, 3])  # the group, then the furthest end so far in it
    fresh[1:] |= rows[1:, 2] > (reach[:-1] & ((1 << _SHIFT) - 1))
    begin = np.flatnonzero(fresh)
    joined = rows[begin]
    joined[:, 3] = reach[np.append(begin[1:], len(rows)) - 1] & ((1 << _SHIFT) - 1) if len(rows) else joined[:, 3]
    return joined


def _met(wanted: Ints, held: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """(row of wanted, row of held, start, stop) of all tokens that a row of both has, by row of `wanted`, then of `held`; rows of both
    are (seq, start, stop).
    """
    order = np.argsort((held[:, 0] << _SHIFT) | held[:, 1], kind="stable")
    seq, start, stop = held[order].T
    # What ends before a row begins is met by no later row: the furthest end so far bounds the search from below.
    reach = np.maximum.accumulate((seq << _SHIFT) | stop)
    begin, end = ((wanted[:, 0] << _SHIFT) | wanted[:, column] for column in (1, 2))
    row, found = ranges(np.searchsorted(reach, begin, side="right"), np.searchsorted((seq << _SHIFT) | start, end, side="left"))
    low, high = np.maximum(wanted[row, 1], start[found]), np.minimum(wanted[row, 2], stop[found])
    meet = (low < high) & (wanted[row, 0] == seq[found])
    row, found, low, high = row[meet], order[found[meet]], low[meet], high[meet]
    order = np.lexsort((found, row))
    return row[order], found[order], low[order], high[order]


def _merges(tasks: Ints, owned: Ints, brought: Ints, num_heads: int) -> Ints:
    """Regions of which a rank holds two partials or more once all outputs are owner.

    `tasks`: of the rank; `owned`: rows (seq, start, stop) of its fragments; `brought`: transfers of outputs to it.
    """
    computed = _union(tasks[:, [_RANK, _SEQ, _QUERIES, _QUERIES + 1]])  # one partial however many pairs the launch had
    _, at, start, stop = _met(computed[:, 1:], owned)  # only what stays here
    seq = np.concatenate([owned[at, 0], brought[:, 1]])
    start, stop = np.concatenate([start, brought[:, 2]]), np.concatenate([stop, brought[:, 3]])
    # How many partials lie over one another behind each boundary.
    boundary = np.concatenate([(seq << _SHIFT) | start, (seq << _SHIFT) | stop])
    order = np.argsort(boundary, kind="stable")
    boundary, held = boundary[order], np.cumsum(np.repeat([1, -1], len(seq))[order])
    begin = np.flatnonzero(held[:-1] >= 2)
    twice = np.stack([np.zeros_like(begin), boundary[begin] >> _SHIFT, boundary[begin], boundary[begin + 1]], 1)
    twice[:, 2:] &= (1 << _SHIFT) - 1
    joined = _union(twice)
    values = np.zeros((len(joined), MERGE_WIDTH), dtype=np.int64)
    values[:, 0], values[:, 1:4], values[:, 5] = Kind.OUT, joined[:, 1:], num_heads
    return values


def task_table(name: str, fragments: Ints, tasks: Ints) -> TaskTable:
    """A `TaskTable` from integer arrays [n, 4] and [m, 6]."""
    return TaskTable(name, as_rows(fragments), as_rows(tasks))
