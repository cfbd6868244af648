"""A rank's part in routed exchanges, looked up: the pieces it sends and receives, and those it passes on for others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from megatron_balance.core.program import TRANSFER_WIDTH, Exchange, Kind, Op
from megatron_balance.core.rows import Rows
from megatron_balance.errors import InvalidProgramError
from megatron_balance.passes.interleave import HALVES
from megatron_balance.passes.order import LEGS, Lane, Leg, Role, hops, is_moved, relay_role, stream_name
from megatron_balance.passes.tables import concat, run_bounds
from megatron_balance.runtime.lowered import Duty, Hop, Piece, Way
from megatron_balance.runtime.parcels import Carried

_RANK = (1 << 20) - 1


def tag_base(exchange_id: int, *, forward: bool, half: int = 0) -> int:
    """Tags of the messages of an exchange begin here; its direct ones have this one. `half`: of two programs that run interleaved."""
    return ((exchange_id * 2 + forward) * HALVES + half) * 16


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
def _part(routes: Rows, rank: int, ranks_per_node: int, moved: frozenset[tuple[int, int]]) -> tuple[Routed, tuple[Way, ...]]:
    """What this rank is to the pieces of an exchange: its own, and those it passes on. `moved`: pairs whose lane is not "copied".

    Everything is by source, target and piece: the order in which both ends of every hop have them.
    """
    table = sorted(routes)
    counts: dict[tuple[int, ...], int] = {}
    for row in table:
        counts[row[:2]] = counts.get(row[:2], 0) + 1
    sends: dict[int, list[Piece]] = {}
    receives: dict[int, list[Piece]] = {}
    ways: list[Way] = []
    for src, dst, index, send_proxy, receive_proxy in table:
        count = counts[src, dst]
        arrives, leaves = _ends((src, send_proxy, receive_proxy, dst), rank, ranks_per_node, "moved" if (src, dst) in moved else "copied")
        if arrives is None and leaves is not None:
            sends.setdefault(dst, []).append(Piece(index, count, leaves))
        elif leaves is None and arrives is not None:
            receives.setdefault(src, []).append(Piece(index, count, arrives))
        elif arrives is not None and leaves is not None:
            ways.append(Way(relay_role(arrives.leg), src, dst, index, count, arrives, leaves))
    own = Routed(*({peer: tuple(found) for peer, found in side.items()} for side in (sends, receives)))
    return own, tuple(ways)


def _ends(route: tuple[int, int, int, int], rank: int, ranks_per_node: int, of: Lane) -> tuple[Hop | None, Hop | None]:
    """The hops by which a piece comes to this rank and leaves it."""
    path = hops(route)
    stations = [a for _, a, _ in path] + [route[-1]]
    if len(set(stations)) < len(stations):
        raise InvalidProgramError(f"a piece from rank {route[0]} to rank {route[-1]} passes a rank twice: {stations}")
    if rank not in stations:
        return None, None

    def hop(at: int, peer: int) -> Hop:
        leg, a, b = path[at]
        crosses = a // ranks_per_node != b // ranks_per_node
        return Hop(peer, leg, _hop_tag(leg, first=at == 0, last=at == len(path) - 1), stream_name(leg, crosses, of), crosses)

    at = stations.index(rank)
    return hop(at - 1, stations[at - 1]) if at else None, hop(at, stations[at + 1]) if at < len(path) else None


def lower_routes(
    ops: Sequence[Op], queues: Sequence[int], rank: int, ranks_per_node: int, *, forward: bool, half: int = 0
) -> tuple[dict[int, Routed], tuple[tuple[Duty, ...], ...]]:
    """By index of the op, this rank's part in each routed exchange; and all duties of the phase, in groups that wait for nothing in
    one another: of one role, lane and queue. `queues`: of each op.
    """
    found: dict[int, Routed] = {}
    groups: dict[tuple[Role, bool, int], list[Duty]] = {}
    routed = {i: op for i, op in enumerate(ops) if isinstance(op, Exchange) and op.routes}
    if not routed:
        return found, ()
    carried, moved = _tables(routed, rank)
    for i, op in routed.items():
        pairs = moved.get(i, frozenset())
        found[i], ways = _part(op.routes, rank, ranks_per_node, pairs)
        tag = tag_base(op.id, forward=forward, half=half)
        for way in ways:
            messages = carried.get((i, way.src, way.dst))
            if messages is not None:
                duty = Duty(i, op.id, tag, messages, way)
                groups.setdefault((way.role, (way.src, way.dst) in pairs, queues[i]), []).append(duty)
    return found, tuple(tuple(group) for group in groups.values())


def _tables(
    routed: dict[int, Exchange], rank: int
) -> tuple[dict[tuple[int, int, int], tuple[Carried, ...]], dict[int, frozenset[tuple[int, int]]]]:
    """By op, source and target, the messages of other ranks, in the order in which both ends have them (by kind, then heads); and by op
    the pairs that move anything that is not copied.
    """
    tables = [op.transfers for op in routed.values()]
    rows = concat(tables, TRANSFER_WIDTH)
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
            carried.setdefault((op, src, dst), []).append((Kind(kind), count, h1 - h0))
    return {pair: tuple(messages) for pair, messages in carried.items()}, {op: frozenset(pairs) for op, pairs in moved.items()}
