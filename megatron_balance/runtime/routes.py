"""A rank's part in routed exchanges, looked up: the pieces it sends and receives, and those it compile on for others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from megatron_balance.compile.order import LEGS, Leg, Role, TrafficClass, hops, is_moved, relay_role, stream_name
from megatron_balance.compile.ping_pong import NUM_NANO_BATCHES
from megatron_balance.errors import InvalidProgramError
from megatron_balance.ir.arrays import Ints, as_array, concat, run_bounds
from megatron_balance.ir.columns import Transfer
from megatron_balance.ir.program import Exchange, Kind, Op
from megatron_balance.ir.rows import Rows
from megatron_balance.runtime.lowered import Hop, Piece, ProxyRoute, RelayTask
from megatron_balance.runtime.parcels import Carried

_RANK = (1 << 20) - 1
_KINDS = tuple(Kind)
_TRAFFIC_CLASSES: tuple[TrafficClass, TrafficClass] = ("copied", "moved")


def tag_base(exchange_id: int, *, forward: bool, nano_batch: int = 0) -> int:
    """Tags of the messages of an exchange begin here; its direct ones have this one. `nano_batch`: of two programs that run interleaved."""
    return ((exchange_id * 2 + forward) * NUM_NANO_BATCHES + nano_batch) * 16


def _hop_tag(leg: Leg, *, first: bool, last: bool) -> int:
    """What a hop adds to the exchange's tag: messages between the same two ranks that are not received in the order of sending differ.

    `first`, `last`: it leaves the source, or reaches the target; owners and proxies are different threads.
    """
    return (1 + LEGS.index(leg)) * 4 + first * 2 + last


@dataclass(frozen=True, slots=True)
class Routed:
    """Of one exchange: this rank's own pieces, by the peer at the other end."""

    sends: dict[int, tuple[Piece, ...]]
    receives: dict[int, tuple[Piece, ...]]


@lru_cache(maxsize=256)
def part(routes: Rows, rank: int, ranks_per_node: int, moved: frozenset[tuple[int, int]]) -> tuple[Routed, tuple[ProxyRoute, ...]]:
    """What this rank is to the pieces of an exchange: its own, and those it compile on. `moved`: pairs whose lane is not "copied".

    Everything is by source, target and piece: the order in which both ends of every hop have them.
    """
    table = as_array(routes)
    table = table[np.lexsort(table.T[::-1])]
    _check(table)
    sizes = np.diff(run_bounds((table[1:, :2] != table[:-1, :2]).any(axis=1), len(table)))
    counts = np.repeat(sizes, sizes)
    concerned = (table[:, [0, 1, 3, 4]] == rank).any(axis=1)
    table, counts = table[concerned], counts[concerned]
    made: dict[tuple[int, ...], Hop] = {}  # many pieces take the same

    def hop(end: Sequence[int], is_moved: bool) -> Hop | None:
        key = (*end, is_moved)
        leg, peer, first, last = end
        if leg < 0:
            return None
        if key not in made:
            crosses, of = peer // ranks_per_node != rank // ranks_per_node, _TRAFFIC_CLASSES[is_moved]
            tag = _hop_tag(LEGS[leg], first=bool(first), last=bool(last))
            made[key] = Hop(peer, LEGS[leg], tag, stream_name(LEGS[leg], crosses, of), crosses)
        return made[key]

    sends: dict[int, list[Piece]] = {}
    receives: dict[int, list[Piece]] = {}
    ways: list[ProxyRoute] = []
    ends = (side.tolist() for side in _ends(table, rank))
    for (src, dst, index), count, come, go in zip(table[:, :3].tolist(), counts.tolist(), *ends, strict=True):
        arrives, leaves = hop(come, (src, dst) in moved), hop(go, (src, dst) in moved)
        if arrives is None and leaves is not None:
            sends.setdefault(dst, []).append(Piece(index, count, leaves))
        elif leaves is None and arrives is not None:
            receives.setdefault(src, []).append(Piece(index, count, arrives))
        elif arrives is not None and leaves is not None:
            ways.append(ProxyRoute(relay_role(arrives.leg), src, dst, index, count, arrives, leaves))
    own = Routed(*({peer: tuple(found) for peer, found in side.items()} for side in (sends, receives)))
    return own, tuple(ways)


def _check(table: Ints) -> None:
    """No piece comes back to a rank that it has left. Raises InvalidProgramError."""
    src, dst, _, send_proxy, receive_proxy = table.T
    left, far = src != send_proxy, receive_proxy != dst
    twice = ((src == receive_proxy) & left) | ((send_proxy == dst) & far) | ((src == dst) & (left | far | (send_proxy != receive_proxy)))
    for source, target, _, *proxies in table[twice].tolist():
        stations = [a for _, a, _ in hops((source, *proxies, target))] + [target]
        raise InvalidProgramError(f"a piece from rank {source} to rank {target} compile a rank twice: {stations}")


def _ends(table: Ints, rank: int) -> tuple[Ints, Ints]:
    """The hops by which pieces come to this rank, and by which they leave it: rows (leg, peer, first, last) [n, 4] each.

    `leg`: a place in `LEGS`, -1: there is none; `first`, `last`: whether it is the first of the piece, the last.
    """
    stations = table.T[[0, 3, 4, 1]]
    goes = stations[1:] != stations[:-1]
    leads = np.logical_and.accumulate(~np.insert(goes[:-1], 0, False, axis=0))  # nothing goes on a leg before
    ends = np.logical_and.accumulate(~np.insert(goes[:0:-1], 0, False, axis=0))[::-1]
    found: list[Ints] = []
    for here, there in ((stations[1:], stations[:-1]), (stations[:-1], stations[1:])):
        takes = goes & (here == rank)
        leg, piece = takes.argmax(axis=0), np.arange(len(table))
        rows = np.stack([leg, there[leg, piece], leads[leg, piece], ends[leg, piece]], axis=1)
        rows[~takes.any(axis=0), 0] = -1
        found.append(rows)
    return found[0], found[1]


def lower_routes(
    ops: Sequence[Op], queues: Sequence[int], rank: int, ranks_per_node: int, *, forward: bool, nano_batch: int = 0
) -> tuple[dict[int, Routed], tuple[tuple[RelayTask, ...], ...]]:
    """By index of the op, this rank's part in each routed exchange; and all duties of the phase, in groups that wait for nothing in
    one another: of one role, lane and queue. `queues`: of each op.
    """
    found: dict[int, Routed] = {}
    groups: dict[tuple[Role, bool, int], list[RelayTask]] = {}
    routed = {i: op for i, op in enumerate(ops) if isinstance(op, Exchange) and op.routes}
    if not routed:
        return found, ()
    carried, moved = _tables(routed, rank)
    for i, op in routed.items():
        pairs = moved.get(i, frozenset())
        found[i], ways = part(op.routes, rank, ranks_per_node, pairs)
        tag = tag_base(op.id, forward=forward, nano_batch=nano_batch)
        for way in ways:
            messages = carried.get((i, way.src, way.dst))
            if messages is not None:
                relay_task = RelayTask(i, op.id, tag, messages, way)
                groups.setdefault((way.role, (way.src, way.dst) in pairs, queues[i]), []).append(relay_task)
    return found, tuple(tuple(group) for group in groups.values())


def _tables(
    routed: dict[int, Exchange], rank: int
) -> tuple[dict[tuple[int, int, int], tuple[Carried, ...]], dict[int, frozenset[tuple[int, int]]]]:
    """By op, source and target, the messages of other ranks, in the order in which both ends have them (by kind, then heads); and by op
    the pairs that move anything that is not copied.
    """
    tables = [op.transfers for op in routed.values()]
    rows = concat(tables, Transfer.WIDTH)
    op_of = np.repeat(np.array(list(routed), dtype=np.int64), [len(t) for t in tables])
    moved: dict[int, set[tuple[int, int]]] = {}
    pairs = ((op_of << 40) | (rows[:, 6] << 20) | rows[:, 7])[is_moved(rows[:, 0])]
    for pair in np.unique(pairs).tolist():
        moved.setdefault(pair >> 40, set()).add((pair >> 20 & _RANK, pair & _RANK))
    others = (rows[:, 6] != rank) & (rows[:, 7] != rank)
    rows, op_of = rows[others], op_of[others]
    carried: dict[tuple[int, int, int], list[Carried]] = {}
    if len(rows):
        keys = np.column_stack([op_of, rows[:, [6, 7, 0, 4, 5]]])
        order = np.lexsort(keys.T[::-1])
        rows, keys = rows[order], keys[order]
        begin = run_bounds((keys[1:] != keys[:-1]).any(axis=1), len(rows))[:-1]
        tokens = np.add.reduceat(rows[:, 3] - rows[:, 2], begin)
        for (op, src, dst, kind, h0, h1), count in zip(keys[begin].tolist(), tokens.tolist(), strict=True):
            carried.setdefault((op, src, dst), []).append((_KINDS[kind], count, h1 - h0))
    return {pair: tuple(messages) for pair, messages in carried.items()}, {op: frozenset(pairs) for op, pairs in moved.items()}
