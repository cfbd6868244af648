"""Dispatch: any task table of the (query, key) triangle.

Queries and keys go to the rank of each task, outputs come back to the owner. The general comm
pattern (DistCA, section 4): one Exchange in, one Attend a rank, one Exchange back, one Merge where
a fragment's partials meet.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import TypeVar

import numpy as np

from megatron_balance.ir import arrays
from megatron_balance.ir.arrays import Bools, Ints, as_array, as_rows
from megatron_balance.ir.columns import Held, Pair, Placed, Rows, Task, Transfer, Value
from megatron_balance.ir.mask import CAUSAL, Mask
from megatron_balance.ir.plan import SharedZone, TaskTable
from megatron_balance.ir.program import Kind
from megatron_balance.patterns import base
from megatron_balance.patterns.sends import Blocks, Sends, intersections, table_of, transfers_of

Z = TypeVar("Z", TaskTable, SharedZone)


class ListedPattern(base.CommPattern[Z]):
    """A comm pattern of zones that list their fragments."""

    def place(self, zone: Z, lengths: Ints, rank: int) -> Ints:
        del lengths
        placed = as_array(zone.fragments)
        return placed[placed[:, Placed.RANK] == rank][:, Placed.FRAGMENT]

    def place_all(self, zones: Sequence[base.ZoneAt[Z]], lengths: Ints, wanted: Bools) -> Ints:
        del lengths
        tables: list[Ints] = [np.empty((0, Held.WIDTH), dtype=np.int64)]
        for index, zone in zones:
            placed = as_array(zone.fragments)
            placed = placed[wanted[placed[:, Placed.RANK]]]
            tables.append(base.held_rows(index, placed[:, Placed.RANK], placed[:, Placed.FRAGMENT]))
        return np.concatenate(tables)


class Dispatch(ListedPattern[TaskTable]):
    """Every rank sends what others' tasks need, attends its own tasks, and sends the outputs back."""

    routing = "by_load"
    starts_beside = True

    def ranks(self, zone: TaskTable, num_ranks: int) -> Sequence[int]:
        del zone
        return range(num_ranks)

    def num_exchanges(self, zone: TaskTable) -> int:
        # In and back, whether or not anything moves (unused ids cost nothing).
        return 2 if zone.fragments else 0

    def sends(self, zone: TaskTable, context: base.Context, rank: int | None = None, *, across: bool = False) -> Sends:
        # Queries and keys in, outputs back.
        del across
        if rank is None:
            there, back = map(as_array, transfers(zone, *context.heads, context.mask))
        else:
            there, back = _transfers_with(zone, context.heads, context.mask, rank)
        return _sends_of(there, back)

    def work(self, zone: TaskTable, context: base.Context, rank: int) -> Iterable[base.ZoneWork]:
        # The rank's tasks, then the merges of its own queries, of which outputs came back.
        tasks, last = _visible(zone, context.mask, rank), self.num_exchanges(zone)
        pairs = base.pairs_of(tasks[:, Task.QUERY], tasks[:, Task.KEYS], [context.all_heads])
        yield base.ZoneWork(last - 1, as_rows(pairs))
        _, back = _transfers_with(zone, context.heads, context.mask, rank)
        brought = back[back[:, Transfer.DST] == rank]
        merges = _merges(tasks, self.place(zone, context.lengths, rank), brought, context.num_heads)
        yield base.ZoneWork(last, Rows(Pair.WIDTH), as_rows(merges))

    # Plan statistics and traffic between nodes

    def attended(self, zones: Sequence[TaskTable], context: base.Context) -> Ints:
        attended = np.zeros(context.num_ranks, dtype=np.int64)
        for zone in zones:
            tasks = as_array(zone.tasks)
            pairs = arrays.num_pairs(tasks[:, Task.SEQ], arrays.Rectangles(*tasks[:, Task.SPANS].T), context.mask)
            attended += arrays.sums(tasks[:, Task.RANK], pairs, context.num_ranks)
        return attended

    # Starting early, coupling

    def startable(self, zone: TaskTable) -> base.Startable:
        # The inputs and their replay, and the gradients of the outputs that came back.
        del zone
        return base.Startable(forward=(0,), gradients=(1,), replays=(0,))

    def num_tasks(self, zone: TaskTable, rank: int) -> int:
        return int((as_array(zone.tasks)[:, Task.RANK] == rank).sum())

    def coupled(self, zone: TaskTable, context: base.Context) -> Iterable[tuple[int, int]]:
        there, _ = transfers(zone, *context.heads, context.mask)
        return ((src, dst) for src, dst in np.unique(as_array(there)[:, Transfer.ENDS], axis=0).tolist())

    # Simulation

    def rounds(self, zone: TaskTable, context: base.Context) -> base.ZoneRounds:
        # Inputs, one launch of every rank, outputs.
        tasks = _visible(zone, context.mask)
        pairs = base.pairs_of(tasks[:, Task.QUERY], tasks[:, Task.KEYS], [context.all_heads])
        return self.one_round(zone, context, pairs, tasks[:, Task.RANK])


def _sends_of(*exchanges: Ints) -> Sends:
    # Sends of the transfers of each exchange, a block each.
    rows, counts = np.concatenate(exchanges), [len(each) for each in exchanges]
    block = np.arange(len(rows))
    kind, head_start, head_stop = (rows[:, at] for at in (Transfer.KIND, Transfer.HEAD_START, Transfer.HEAD_STOP))
    ends = rows[:, Transfer.SRC], rows[:, Transfer.DST]
    table = table_of(np.repeat(np.arange(len(counts)), counts), *ends, kind, head_start, head_stop, block, 0)
    spans = Blocks(rows[:, Transfer.SPAN], np.arange(len(rows) + 1))
    return Sends(table, lambda: rows[:, Transfer.STOP] - rows[:, Transfer.START], lambda: spans)


def _visible(zone: TaskTable, mask: Mask, rank: int | None = None) -> Ints:
    # The tasks (of a rank), cut into cells, without queries that see none of their keys and keys that
    # none of their queries sees. Those stay at the owner.
    table = as_array(zone.tasks)
    tasks = table if rank is None else table[table[:, Task.RANK] == rank]
    return arrays.split_rows(tasks, Task.SEQ, range(*Task.SPANS.indices(Task.WIDTH)), mask)


@lru_cache(maxsize=64)
def transfers(zone: TaskTable, num_heads: int, num_kv_heads: int, mask: Mask = CAUSAL) -> tuple[Rows, Rows]:
    """All transfers in and all transfers back, for every rank."""
    owned = as_array(zone.fragments)
    there = [_sent(needs, owned, kind, heads) for needs, kind, heads in _needs(zone, mask, (num_heads, num_kv_heads))]
    return as_rows(np.concatenate(there)), as_rows(_sent_back(there[0]))


@lru_cache(maxsize=4)
def _transfers_with(zone: TaskTable, of_heads: tuple[int, int], mask: Mask, rank: int) -> tuple[Ints, Ints]:
    # Those of `transfers` of which `rank` is an end, without working out all others: of a window on
    # many ranks these are millions.
    owned = as_array(zone.fragments)
    held = owned[owned[:, Placed.RANK] == rank]
    there: list[Ints] = []
    for needs, kind, heads in _needs(zone, mask, of_heads):
        own = needs[:, Placed.RANK] == rank
        there.append(np.concatenate([_sent(needs[own], owned, kind, heads), _sent(needs[~own], held, kind, heads)]))
    return np.concatenate(there), _sent_back(there[0])


def _needs(zone: TaskTable, mask: Mask, heads: tuple[int, int]) -> Iterator[tuple[Ints, Kind, int]]:
    # Queries and keys that tasks read: rows of `Placed` by the rank that reads them, kind, heads.
    tasks = _visible(zone, mask)
    for kind, start_column, count in zip((Kind.Q, Kind.KV), (Task.Q_START, Task.K_START), heads, strict=True):
        yield arrays.union(tasks[:, [Task.RANK, Task.SEQ, start_column, start_column + 1]]), kind, count


def _sent(needs: Ints, owned: Ints, kind: Kind, heads: int) -> Ints:
    need, source, both = intersections(needs[:, Placed.FRAGMENT], owned[:, Placed.FRAGMENT])
    rows = transfers_of(kind, both, (0, heads), owned[source, Placed.RANK], needs[need, Placed.RANK])
    return rows[rows[:, Transfer.SRC] != rows[:, Transfer.DST]]


def _sent_back(queries: Ints) -> Ints:
    back = queries.copy()
    back[:, Transfer.KIND] = Kind.OUT
    back[:, Transfer.SRC], back[:, Transfer.DST] = queries[:, Transfer.DST], queries[:, Transfer.SRC]
    return back


def _merges(tasks: Ints, owned: Ints, brought: Ints, num_heads: int) -> Ints:
    # Regions of which a rank holds two partials or more once all outputs are at the owner.
    # `tasks`: of the rank; `owned`: rows (seq, start, stop) of its fragments; `brought`: transfers
    # of outputs to it.
    # One partial however many pairs the launch had; only what stays here is not among the
    # transfers.
    computed = arrays.union(tasks[:, [Task.RANK, Task.SEQ, Task.Q_START, Task.Q_STOP]])
    _, _, kept = intersections(computed[:, Placed.FRAGMENT], owned)
    twice = arrays.held_twice(np.concatenate([kept, brought[:, Transfer.SPAN]]))
    values = np.zeros((len(twice), Value.WIDTH), dtype=np.int64)
    values[:, Value.KIND], values[:, Value.SPAN], values[:, Value.HEAD_STOP] = Kind.OUT, twice, num_heads
    return values
