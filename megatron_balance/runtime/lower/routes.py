"""A rank's part in routed exchanges: its own pieces, and those that it relays for others.

Looked up once per microbatch, all routed exchanges of a phase at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from megatron_balance.analysis.wire import Carried
from megatron_balance.compile.order import LEGS, Leg, Role, TrafficClass, hops, is_moved, relay_role, stream_name
from megatron_balance.compile.ping_pong import NUM_NANO_BATCHES
from megatron_balance.errors import InvalidProgramError
from megatron_balance.ir.arrays import Ints, as_array, concat, run_bounds
from megatron_balance.ir.columns import Route, Rows, Transfer
from megatron_balance.ir.program import Exchange, Kind, Op
from megatron_balance.runtime.lower.steps import Hop, Piece, ProxyRoute, RelayTask

_RANK_BITS = 20  # more than a rank or the index of an op takes
_RANK = (1 << _RANK_BITS) - 1
_STATIONS = [Route.SRC, Route.SEND_PROXY, Route.RECEIVE_PROXY, Route.DST]
"""Columns of the ranks that a piece passes, in order."""
_PIECE = [Route.SRC, Route.DST, Route.PIECE]
_KINDS = tuple(Kind)
_TRAFFIC_CLASSES: tuple[TrafficClass, TrafficClass] = ("copied", "moved")


def tag_base(exchange_id: int, *, forward: bool, nano_batch: int = 0) -> int:
    """First tag of the messages of an exchange, which its direct ones have.

    `nano_batch`: of two programs that run interleaved.
    """
    return ((exchange_id * 2 + forward) * NUM_NANO_BATCHES + nano_batch) * 16


def _hop_tag(leg: Leg, *, first: bool, last: bool) -> int:
    """Offset of a hop's tag from the exchange's first.

    Messages between the same two ranks have different tags where they need not be received in the
    order of sending. `first`, `last`: the hop leaves the source, or reaches the target; sources,
    targets and proxies are different threads.
    """
    return (1 + LEGS.index(leg)) * 4 + first * 2 + last


@dataclass(frozen=True, slots=True)
class Routed:
    """This rank's own pieces of one exchange, by the peer at the other end."""

    sends: dict[int, tuple[Piece, ...]]
    receives: dict[int, tuple[Piece, ...]]


@lru_cache(maxsize=256)
def routes_of(
    routes: Rows, rank: int, ranks_per_node: int, moved: frozenset[tuple[int, int]]
) -> tuple[Routed, tuple[ProxyRoute, ...]]:
    """The pieces of an exchange that this rank sends or receives, and those that it relays.

    Everything is by source, target and piece: the order in which both ends of every hop have them.
    `moved`: (source, target) pairs whose traffic class is not "copied".
    """
    table = as_array(routes)
    table = table[np.lexsort(table.T[::-1])]
    _check(table)
    pairs = table[:, Route.PAIR]
    sizes = np.diff(run_bounds((pairs[1:] != pairs[:-1]).any(axis=1), len(table)))
    counts = np.repeat(sizes, sizes)
    concerned = (table[:, _STATIONS] == rank).any(axis=1)
    table, counts = table[concerned], counts[concerned]
    made: dict[tuple[int, ...], Hop] = {}  # many pieces take the same

    def hop(end: Sequence[int], is_moved: bool) -> Hop | None:
        key = (*end, is_moved)
        leg, peer, first, last = end
        if leg < 0:
            return None
        if key not in made:
            crosses, traffic_class = peer // ranks_per_node != rank // ranks_per_node, _TRAFFIC_CLASSES[is_moved]
            tag = _hop_tag(LEGS[leg], first=bool(first), last=bool(last))
            made[key] = Hop(peer, LEGS[leg], tag, stream_name(LEGS[leg], crosses, traffic_class), crosses)
        return made[key]

    sends: dict[int, list[Piece]] = {}
    receives: dict[int, list[Piece]] = {}
    proxy_routes: list[ProxyRoute] = []
    ends = (side.tolist() for side in _ends(table, rank))
    for (src, dst, index), count, come, go in zip(table[:, _PIECE].tolist(), counts.tolist(), *ends, strict=True):
        arrives, leaves = hop(come, (src, dst) in moved), hop(go, (src, dst) in moved)
        if arrives is None and leaves is not None:
            sends.setdefault(dst, []).append(Piece(index, count, leaves))
        elif leaves is None and arrives is not None:
            receives.setdefault(src, []).append(Piece(index, count, arrives))
        elif arrives is not None and leaves is not None:
            proxy_routes.append(ProxyRoute(relay_role(arrives.leg), src, dst, index, count, arrives, leaves))
    own = Routed(*({peer: tuple(pieces) for peer, pieces in side.items()} for side in (sends, receives)))
    return own, tuple(proxy_routes)


def _check(table: Ints) -> None:
    """Refuse a piece that comes back to a rank that it has left.

    Raises:
        InvalidProgramError: there is one.
    """
    src, dst, _, send_proxy, receive_proxy = table.T
    left, far = src != send_proxy, receive_proxy != dst
    twice = (
        ((src == receive_proxy) & left)
        | ((send_proxy == dst) & far)
        | ((src == dst) & (left | far | (send_proxy != receive_proxy)))
    )
    for source, target, _, *proxies in table[twice].tolist():
        stations = [a for _, a, _ in hops((source, *proxies, target))] + [target]
        raise InvalidProgramError(f"a piece from rank {source} to rank {target} passes a rank twice: {stations}")


def _ends(table: Ints, rank: int) -> tuple[Ints, Ints]:
    """The hops by which pieces come to this rank, and those by which they leave it.

    Rows (leg, peer, first, last), [n, 4] each. `leg`: a place in `LEGS`, -1: there is none;
    `first`, `last`: whether it is the first of the piece, the last.
    """
    stations = table.T[_STATIONS]
    goes = stations[1:] != stations[:-1]
    leads = np.logical_and.accumulate(~np.insert(goes[:-1], 0, False, axis=0))  # no leg before it
    ends = np.logical_and.accumulate(~np.insert(goes[:0:-1], 0, False, axis=0))[::-1]
    hops_at: list[Ints] = []
    for here, there in ((stations[1:], stations[:-1]), (stations[:-1], stations[1:])):
        takes = goes & (here == rank)
        leg, piece = takes.argmax(axis=0), np.arange(len(table))
        leg_or_none = np.where(takes.any(axis=0), leg, -1)
        hops_at.append(np.stack([leg_or_none, there[leg, piece], leads[leg, piece], ends[leg, piece]], axis=1))
    return hops_at[0], hops_at[1]


def lower_routes(
    ops: Sequence[Op], queues: Sequence[int], rank: int, ranks_per_node: int, *, forward: bool, nano_batch: int = 0
) -> tuple[dict[int, Routed], tuple[tuple[RelayTask, ...], ...]]:
    """This rank's own pieces by index of the op, and all relay tasks of the phase.

    Relay tasks are in groups that wait for nothing in one another: of one role, traffic class and
    queue. `queues`: of each op.
    """
    own: dict[int, Routed] = {}
    groups: dict[tuple[Role, bool, int], list[RelayTask]] = {}
    routed = {i: op for i, op in enumerate(ops) if isinstance(op, Exchange) and op.routes}
    if not routed:
        return own, ()
    carried, moved = _of_others(routed, rank)
    for i, op in routed.items():
        pairs = moved.get(i, frozenset())
        own[i], proxy_routes = routes_of(op.routes, rank, ranks_per_node, pairs)
        tag = tag_base(op.id, forward=forward, nano_batch=nano_batch)
        for route in proxy_routes:
            messages = carried.get((i, route.src, route.dst))
            if messages is not None:
                relay_task = RelayTask(i, op.id, tag, messages, route)
                groups.setdefault((route.role, (route.src, route.dst) in pairs, queues[i]), []).append(relay_task)
    return own, tuple(tuple(group) for group in groups.values())


def _of_others(
    routed: dict[int, Exchange], rank: int
) -> tuple[dict[tuple[int, int, int], tuple[Carried, ...]], dict[int, frozenset[tuple[int, int]]]]:
    """Messages of other ranks by op, source and target; and moved (source, target) pairs by op.

    Messages are in the order in which both ends have them: by kind, then heads. A pair is moved
    that transfers anything whose traffic class is not "copied".
    """
    tables = [op.transfers for op in routed.values()]
    rows = concat(tables, Transfer.WIDTH)
    op_of = np.repeat(np.array(list(routed), dtype=np.int64), [len(t) for t in tables])
    moved: dict[int, set[tuple[int, int]]] = {}
    src, dst = rows[:, Transfer.SRC], rows[:, Transfer.DST]
    pairs = ((op_of << 2 * _RANK_BITS) | (src << _RANK_BITS) | dst)[is_moved(rows[:, Transfer.KIND])]
    for pair in np.unique(pairs).tolist():
        moved.setdefault(pair >> 2 * _RANK_BITS, set()).add((pair >> _RANK_BITS & _RANK, pair & _RANK))
    others = (src != rank) & (dst != rank)
    rows, op_of = rows[others], op_of[others]
    carried: dict[tuple[int, int, int], list[Carried]] = {}
    if len(rows):
        keys = np.column_stack([op_of, rows[:, Transfer.ENDS], rows[:, Transfer.KIND], rows[:, Transfer.HEADS]])
        order = np.lexsort(keys.T[::-1])
        rows, keys = rows[order], keys[order]
        begin = run_bounds((keys[1:] != keys[:-1]).any(axis=1), len(rows))[:-1]
        tokens = np.add.reduceat(rows[:, Transfer.STOP] - rows[:, Transfer.START], begin)
        for (op, src, dst, kind, h0, h1), count in zip(keys[begin].tolist(), tokens.tolist(), strict=True):
            carried.setdefault((op, src, dst), []).append((_KINDS[kind], count, h1 - h0))
    return {pair: tuple(messages) for pair, messages in carried.items()}, {
        op: frozenset(pairs) for op, pairs in moved.items()
    }
