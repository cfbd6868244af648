"""Room for a block where all servers have too little of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf

import numpy as np

from megatron_balance.planners.distca.parts import at_least, at_most, num_bytes
from megatron_balance.planners.distca.servers import Servers
from megatron_balance.planners.distca.shards import Piece, Sizes

_GIVERS, _MOST_GIVERS = 2, 32
"""How many of the servers with most room are looked at as those that shed light work; and how many if none of the first ones can."""

_ROUNDING = 1e-9
"""Of the room: no difference."""


def make_room(servers: Servers, limit: float, block: float, source: int, sizes: Sizes) -> bool:
    """Let a server shed light work so that it has room for a block of that many seconds, which is the source's.

    Another one with room takes it, or the source itself, in exchange for the block. Where nobody can shed enough at once, one sheds as
    much as another one takes.

    Returns:
        False if that does not help.
    """
    load = servers.load
    by_room = _lightest(servers, _MOST_GIVERS)
    room_for = {source: block - float(load[source]) + limit}  # of the source, once it has given the block away
    best: tuple[float, Piece, int, int, int, int] | None = None
    for looked_at, (giver, taker) in enumerate(_pairs(by_room)):
        if best is not None and looked_at >= _GIVERS:
            break
        room_for[taker] = limit - float(load[taker])
        need = block - (limit - float(load[giver]))
        takers = [(to, room_for[to]) for to in (taker, source) if to != giver and need <= room_for[to]]
        if not takers and looked_at:
            break  # the next ones have less room, and the same takers
        if not 0 < need < block:
            continue
        for bound, piece in _cheapest_first(servers, giver, need, takers) if takers else ():
            if best is not None and bound >= best[0]:
                break
            for costs, low, high, to in _light_parts(servers, piece, need, takers, sizes):
                if best is None or costs < best[0]:
                    best = (costs, piece, low, high, giver, to)
    if best is None:
        return _shed(servers, limit, by_room)
    servers.move(*best[1:])
    return True


def _pairs(by_room: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Who may shed work, and the one with most room among the others."""
    for giver in by_room[: len(by_room) if len(by_room) > 1 else 0]:
        yield giver, by_room[giver == by_room[0]]


def _lightest(servers: Servers, count: int) -> list[int]:
    """The servers with the least load, in this order."""
    load = servers.load
    if count < len(load):
        some = np.sort(np.argpartition(load, count)[:count])
        return some[np.argsort(load[some], kind="stable")].tolist()
    return np.argsort(load, kind="stable").tolist()


def _cheapest_first(servers: Servers, giver: int, need: float, takers: Sequence[tuple[int, float]]) -> list[tuple[float, Piece]]:
    """The giver's pieces of at least so many seconds, by a bound on what such a part of them costs any taker."""
    found: list[tuple[float, Piece]] = []
    for piece in servers.pieces[giver]:
        if servers.seconds(piece) >= need:
            unknown = not any(servers.seq(piece) in servers.reach[taker] for taker, _ in takers)
            found.append((servers.shards.least_bytes(piece, need, keys=unknown), piece))
    return sorted(found)


def _light_parts(
    servers: Servers, piece: Piece, need: float, takers: Sequence[tuple[int, float]], sizes: Sizes
) -> Iterator[tuple[float, int, int, int]]:
    """For each of the takers the cheapest part of a piece that takes at least `need` and at most the taker's room."""
    parts = low, stop, moved = at_least(servers.shards, piece, need)
    least = float(moved[moved.argmin()])
    for taker, room in takers:
        if least <= room:
            costs = num_bytes(servers, piece, parts, taker, sizes)
            costs[moved > room] = inf
            best = int(costs.argmin())
            bounds = int(low[best]), stop + best
            if servers.allows(taker, (piece[0], *bounds)):
                yield float(costs[best]), *bounds, taker


def _shed(servers: Servers, limit: float, by_room: Sequence[int]) -> bool:
    """Move as much as another one takes, where that makes more room than anybody has. Returns False if it does nowhere."""
    best: tuple[float, Piece, int, int, int, int] | None = None
    least_load = float(servers.load[by_room[0]])
    for looked_at, (giver, taker) in enumerate(_pairs(by_room)):
        if best is not None and looked_at >= _GIVERS:
            break
        room = (limit - float(servers.load[taker])) * (1 + _ROUNDING)
        for piece in servers.pieces[giver]:
            seconds, low, high = servers.seconds(piece), piece[1], piece[2]
            if seconds > room:
                if servers.shards.lightest(piece) > room:
                    continue
                starts, stop, moved = at_most(servers.shards, piece, room)
                most = int(moved.argmax())
                seconds, low, high = float(moved[most]), int(starts[most]), stop + most
            more = float(servers.load[giver]) - seconds < least_load - _ROUNDING * room
            if more and (best is None or seconds > best[0]) and servers.allows(taker, (piece[0], low, high)):
                best = (seconds, piece, low, high, giver, taker)
    if best is None:
        return False
    servers.move(*best[1:])
    return True
