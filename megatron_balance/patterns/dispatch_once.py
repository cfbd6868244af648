"""Dispatch, once per node: rows that several ranks of a node need cross to one of them, and it
passes them on inside.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from megatron_balance.ir.arrays import Ints, as_array, as_rows, sums
from megatron_balance.ir.columns import Rows, Transfer
from megatron_balance.ir.mask import CAUSAL, Mask
from megatron_balance.ir.plan import TaskTable
from megatron_balance.ir.program import Kind
from megatron_balance.patterns.base import Context, Startable
from megatron_balance.patterns.dispatch import Dispatch, sends_of, transfers
from megatron_balance.patterns.sends import Sends

_IN, _ON, _BACK = range(3)


# A comm pattern of task tables (`patterns.dispatch`) with one exchange more: in, on, back. The rank
# that passes rows on needs them too, so no rank holds what it does not use. In the backward the way
# is turned: gradients of the rows are sent to that rank inside the node, added to its own there,
# and cross once.
#
# A replayed backward brings the rows the same way, the first exchange before anything else, since
# the second one needs what it brings.
class DispatchOnce(Dispatch):
    """Every rank sends what the tasks of others need, once to each node; it is passed on inside."""

    merges_remap = False

    def num_exchanges(self, zone: TaskTable) -> int:
        # In, on and back, whether or not anything moves (unused ids cost nothing).
        return 3 if zone.fragments else 0

    def sends(self, zone: TaskTable, context: Context, rank: int | None = None, *, across: bool = False) -> Sends:
        # Those of the dispatch, the way in cut in two.
        del across
        there, on = map(
            as_array, once(zone, (context.num_heads, context.num_kv_heads), context.ranks_per_node, context.mask)
        )
        if rank is None:
            back = as_array(transfers(zone, context.num_heads, context.num_kv_heads, context.mask)[1])
        else:
            there, on = (rows[(rows[:, Transfer.ENDS] == rank).any(axis=1)] for rows in (there, on))
            number, rows = super().sends(zone, context, rank).transfers()
            back = rows[number == 1]
        # A replayed backward begins where the forward ended: there it brings what crosses, and
        # nothing where the forward did.
        again = sends_of(there[:0], there[:0], there)
        return replace(sends_of(there, on, back), again=again, silent=(_IN,))

    def startable(self, zone: TaskTable) -> Startable:
        # The way in, its replay in the place of the way back, and the gradients of the outputs.
        del zone
        return Startable(forward=(_IN,), gradients=(_BACK,), replays=(_BACK,))


@lru_cache(maxsize=64)
def once(zone: TaskTable, heads: tuple[int, int], ranks_per_node: int, mask: Mask = CAUSAL) -> tuple[Rows, Rows]:
    """All transfers in, each row once to a node, and all inside nodes that pass them on."""
    # `heads`: of queries and of keys.
    rows = as_array(transfers(zone, *heads, mask)[0])
    src_node, dst_node = (rows[:, Transfer.ENDS] // ranks_per_node).T
    crossing = src_node != dst_node
    to_one, to_several = _by_node(rows[crossing], dst_node[crossing])
    weights = (to_one[:, Transfer.STOP] - to_one[:, Transfer.START]) * np.where(
        to_one[:, Transfer.KIND] == Kind.Q, heads[0], 2 * heads[1]
    )
    load = sums(to_one[:, Transfer.DST], weights, int(rows[:, Transfer.DST].max(initial=-1)) + 1).tolist()
    alone: list[tuple[int, ...]] = []
    shared: list[tuple[int, tuple[int, int, int], tuple[int, int], tuple[int, ...]]] = []
    for (kind, seq, src), spans in to_several:
        weight = heads[0] if kind == Kind.Q else 2 * heads[1]
        for start, stop, ranks in _pieces(spans):
            if len(ranks) == 1:
                alone.append((kind, seq, start, stop, 0, heads[kind != Kind.Q], src, ranks[0]))
                load[ranks[0]] += weight * (stop - start)
            else:
                shared.append((weight * (stop - start), (kind, seq, src), (start, stop), ranks))
    on: list[tuple[int, ...]] = []
    for size, (kind, seq, src), span, ranks in sorted(shared, reverse=True):
        first = min(ranks, key=lambda rank: (load[rank], rank))
        load[first] += size
        region = (kind, seq, *span, 0, heads[kind != Kind.Q])
        alone.append((*region, src, first))
        on += [(*region, first, other) for other in ranks if other != first]
    there = np.concatenate([rows[~crossing], _sorted(np.concatenate([to_one, _table(alone)]))])
    return as_rows(there), as_rows(_table(on))


def _by_node(rows: Ints, node: Ints) -> tuple[Ints, list[tuple[tuple[int, int, int], list[tuple[int, int, int]]]]]:
    # Rows that a node needs one of from a rank and sequence, and of all others (kind, seq, src)
    # with their spans (start, stop, dst); `node`: of each row's receiver.
    keys = np.column_stack([rows[:, [Transfer.KIND, Transfer.SEQ, Transfer.SRC]], node])
    order = np.lexsort(keys.T[::-1])
    rows, keys = rows[order], keys[order]
    first = np.flatnonzero(np.append(True, (keys[1:] != keys[:-1]).any(axis=1))[: len(rows)])
    count = np.diff(np.append(first, len(rows)))
    several: list[tuple[tuple[int, int, int], list[tuple[int, int, int]]]] = []
    spans = rows[:, [Transfer.START, Transfer.STOP, Transfer.DST]]
    for at, size in zip(first[count > 1].tolist(), count[count > 1].tolist(), strict=True):
        kind, seq, src, _ = keys[at].tolist()
        several.append(((kind, seq, src), [(a, b, dst) for a, b, dst in spans[at : at + size].tolist()]))
    return rows[first[count == 1]], several


def _table(rows: Sequence[tuple[int, ...]]) -> Ints:
    return _sorted(np.array(rows, dtype=np.int64).reshape(-1, Transfer.WIDTH))


def _sorted(rows: Ints) -> Ints:
    return rows[np.lexsort(rows.T[::-1])]


def _pieces(spans: Sequence[tuple[int, int, int]]) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    # Spans (start, stop, rank) cut where any begins or ends: each piece with all its ranks; of
    # neighbours with the same ranks one.
    edges = sorted({edge for start, stop, _ in spans for edge in (start, stop)})
    begin, holders = 0, ()
    for a, b in zip(edges, edges[1:], strict=False):
        ranks = tuple(sorted(rank for start, stop, rank in spans if start <= a and b <= stop))
        if ranks != holders:
            if holders:
                yield begin, a, holders
            begin, holders = a, ranks
    if holders:
        yield begin, edges[-1], holders
