"""Dispatch: any tiling of the (query, key) triangle. Queries and keys go to the rank of each task, outputs come home.

The general movement (DistCA, section 4): one Exchange in, one Attend a rank, one Exchange back, one Merge where a fragment's
partials meet. Tables are built in Python per task; planners with very many tasks are what will make this NumPy.
"""

from __future__ import annotations

from collections import defaultdict
from functools import lru_cache

import numpy as np

from megatron_balance.core.plan import Tiling
from megatron_balance.core.program import MERGE_WIDTH, PAIR_WIDTH, TRANSFER_WIDTH, Kind, Op
from megatron_balance.core.rows import Rows
from megatron_balance.passes.tables import Ints, as_array, as_rows
from megatron_balance.schedules.context import Context, Share, attend, exchange, merge

Interval = tuple[int, int]


def num_exchanges(zone: Tiling) -> int:
    """In and back, whether or not anything moves (unused ids cost nothing)."""
    return 2 if zone.fragments else 0


def place(zone: Tiling, lengths: Ints, rank: int) -> Ints:
    """Rows (seq, start, stop) of `rank`, as the planner listed them."""
    del lengths
    table = as_array(zone.fragments)
    return table[table[:, 0] == rank][:, 1:]


def project(zone: Tiling, context: Context, rank: int) -> Share:
    """The ops of `rank`."""
    there, back = (as_array(rows) for rows in transfers(zone, context.num_heads, context.num_kv_heads))
    ops: list[Op] = []
    mine = there[(there[:, 6] == rank) | (there[:, 7] == rank)]
    if len(mine):
        ops.append(exchange(context, 0, mine))
    tasks = _visible(zone)
    tasks = tasks[tasks[:, 0] == rank]
    if len(tasks):
        pairs = np.zeros((len(tasks), PAIR_WIDTH), dtype=np.int64)
        pairs[:, :3] = tasks[:, 1:4]
        pairs[:, 4] = context.num_heads
        pairs[:, 5:7] = tasks[:, 4:6]
        pairs[:, 8] = context.num_kv_heads
        ops.append(attend(rank, pairs))
    mine = back[(back[:, 6] == rank) | (back[:, 7] == rank)]
    if len(mine):
        ops.append(exchange(context, 1, mine))
    values = _merges(zone, back, rank, context.num_heads)
    if len(values):
        ops.append(merge(rank, values))
    return Share(ops)


def _visible(zone: Tiling) -> Ints:
    """The tasks without queries that see none of their keys and keys that none of their queries sees: those stay at home."""
    tasks = as_array(zone.tasks).copy()
    tasks[:, 2] = np.maximum(tasks[:, 2], tasks[:, 4])
    tasks[:, 5] = np.minimum(tasks[:, 5], tasks[:, 3])
    return tasks


def union(intervals: list[Interval]) -> list[Interval]:
    """Disjoint intervals, in order, that cover the same tokens; touching ones are joined."""
    joined: list[Interval] = []
    for start, stop in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        else:
            joined.append((start, stop))
    return joined


@lru_cache(maxsize=64)
def transfers(zone: Tiling, num_heads: int, num_kv_heads: int) -> tuple[Rows, Rows]:
    """All transfers in and all transfers back, for every rank."""
    owners: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for rank, seq, start, stop in zone.fragments:
        owners[seq].append((start, stop, rank))
    queries: dict[tuple[int, int], list[Interval]] = defaultdict(list)
    keys: dict[tuple[int, int], list[Interval]] = defaultdict(list)
    for rank, seq, q0, q1, k0, k1 in _visible(zone).tolist():
        queries[rank, seq].append((q0, q1))
        keys[rank, seq].append((k0, k1))
    there: list[tuple[int, ...]] = []
    back: list[tuple[int, ...]] = []
    for kind, needs, heads in ((Kind.Q, queries, num_heads), (Kind.KV, keys, num_kv_heads)):
        for (rank, seq), intervals in sorted(needs.items()):
            for a, b in union(intervals):
                for start, stop, owner in owners[seq]:
                    lo, hi = max(a, start), min(b, stop)
                    if lo < hi and owner != rank:
                        there.append((kind, seq, lo, hi, 0, heads, owner, rank))
                        if kind == Kind.Q:
                            back.append((Kind.OUT, seq, lo, hi, 0, heads, rank, owner))
    return Rows.of(TRANSFER_WIDTH, there), Rows.of(TRANSFER_WIDTH, back)


def _merges(zone: Tiling, back: Ints, rank: int, num_heads: int) -> Ints:
    """Regions of which `rank` holds two partials or more once all outputs are home."""
    parts: dict[int, list[Interval]] = defaultdict(list)
    local: dict[int, list[Interval]] = defaultdict(list)
    for task_rank, seq, q0, q1, _, _ in _visible(zone).tolist():
        if task_rank == rank:
            local[seq].append((q0, q1))
    home = {seq: [(a, b) for r, s, a, b in zone.fragments if r == rank and s == seq] for seq in zone.seqs}
    for seq, intervals in local.items():  # one partial however many pairs the launch had; only what stays here
        for a, b in union(intervals):
            parts[seq] += [(max(a, c), min(b, d)) for c, d in home[seq] if max(a, c) < min(b, d)]
    for row in back[back[:, 7] == rank]:
        parts[int(row[1])].append((int(row[2]), int(row[3])))
    rows = [(Kind.OUT, seq, a, b, 0, num_heads) for seq, intervals in sorted(parts.items()) for a, b in _at_least_twice(intervals)]
    return np.array(rows, dtype=np.int64).reshape(-1, MERGE_WIDTH)


def _at_least_twice(intervals: list[Interval]) -> list[Interval]:
    """Where two or more of `intervals` lie over one another."""
    edges = sorted({e for i in intervals for e in i})
    covered = [(a, b) for a, b in zip(edges, edges[1:], strict=False) if sum(s <= a and b <= e for s, e in intervals) >= 2]
    return union(covered)


def tiling(name: str, fragments: Ints, tasks: Ints) -> Tiling:
    """A `Tiling` from integer arrays [n, 4] and [m, 6]."""
    return Tiling(name, as_rows(fragments), as_rows(tasks))
