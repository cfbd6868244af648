"""Dispatch: any task table of the (query, key) triangle. Queries and keys go to the rank of each task, outputs come back to the owner.

The general comm pattern (DistCA, section 4): one Exchange in, one Attend a rank, one Exchange back, one Merge where a fragment's
partials meet.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from megatron_balance.ir.arrays import Ints, as_array, as_rows
from megatron_balance.ir.columns import Pair, Transfer, Value
from megatron_balance.ir.intervals import held_twice, overlaps, union
from megatron_balance.ir.plan import TaskTable
from megatron_balance.ir.program import Kind, Op
from megatron_balance.ir.rows import Rows
from megatron_balance.patterns.base import Context, Share, attend, exchange, merge

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
        pairs = np.zeros((len(tasks), Pair.WIDTH), dtype=np.int64)
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
        needs = union(tasks[:, [_RANK, _SEQ, column, column + 1]])
        need, owner, start, stop = _met(needs[:, 1:], owned[:, 1:])
        rows = np.column_stack([need, owned[owner, 1], start, stop, need, need, owned[owner, 0], needs[need, 0]])
        rows[:, 0], rows[:, 4], rows[:, 5] = kind, 0, heads
        there.append(rows[rows[:, 6] != rows[:, 7]])
    back = there[0][:, [0, 1, 2, 3, 4, 5, 7, 6]]
    back[:, 0] = Kind.OUT
    return as_rows(np.concatenate(there)), as_rows(back)


def _met(wanted: Ints, held: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """(row of wanted, row of held, start, stop) of all tokens that a row of both has, by row of `wanted`, then of `held`; rows of both
    are (seq, start, stop).
    """
    row, found = overlaps(wanted, held)
    order = np.lexsort((found, row))
    row, found = row[order], found[order]
    return row, found, np.maximum(wanted[row, 1], held[found, 1]), np.minimum(wanted[row, 2], held[found, 2])


def _merges(tasks: Ints, owned: Ints, brought: Ints, num_heads: int) -> Ints:
    """Regions of which a rank holds two partials or more once all outputs are owner.

    `tasks`: of the rank; `owned`: rows (seq, start, stop) of its fragments; `brought`: transfers of outputs to it.
    """
    computed = union(tasks[:, [_RANK, _SEQ, _QUERIES, _QUERIES + 1]])  # one partial however many pairs the launch had
    _, at, start, stop = _met(computed[:, 1:], owned)  # only what stays here
    kept = np.column_stack([owned[at, 0], start, stop])
    joined = held_twice(np.concatenate([kept, brought[:, Transfer.SPAN]]))
    values = np.zeros((len(joined), Value.WIDTH), dtype=np.int64)
    values[:, 0], values[:, 1:4], values[:, 5] = Kind.OUT, joined, num_heads
    return values


def task_table(name: str, fragments: Ints, tasks: Ints) -> TaskTable:
    """A `TaskTable` from integer arrays [n, 4] and [m, 6]."""
    return TaskTable(name, as_rows(fragments), as_rows(tasks))
