"""Shed light work from a server so that a block fits it, where no server has the headroom for that
block.

Headroom: seconds of attention that a server may still take before it reaches the limit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf

import numpy as np

from megatron_balance.planners.distca.parts import at_least, at_most, num_bytes
from megatron_balance.planners.distca.servers import Servers
from megatron_balance.planners.distca.shards import Piece, TaskSizes

_GIVERS, _MOST_GIVERS = 2, 32
"""Servers with most headroom that are tried as givers; and how many if none of the first ones can.
"""

_ROUNDING = 1e-9
"""Relative differences of headroom below this are none."""


def shed_light_work(servers: Servers, limit: float, block: float, source: int, sizes: TaskSizes) -> bool:
    """Move light work off a server so that a block of `block` seconds, which is on `source`, fits
    it.

    Another server with headroom takes the light work, or the source itself, in exchange for the
    block. Where no server can shed enough at once, one sheds as much as another can take.

    Returns:
        Whether any work moved.
    """
    load = servers.load
    by_headroom = _lightest(servers, _MOST_GIVERS)
    headroom_of = {source: block - float(load[source]) + limit}  # of the source, once it has given the block away
    best: tuple[float, Piece, int, int, int, int] | None = None
    for looked_at, (giver, taker) in enumerate(_givers_and_takers(by_headroom)):
        if best is not None and looked_at >= _GIVERS:
            break
        headroom_of[taker] = limit - float(load[taker])
        need = block - (limit - float(load[giver]))
        takers = [(to, headroom_of[to]) for to in (taker, source) if to != giver and need <= headroom_of[to]]
        if not takers and looked_at:
            break  # the next ones have less headroom, and the same takers
        if not 0 < need < block:
            continue
        for bound, piece in _cheapest_first(servers, giver, need, takers) if takers else ():
            if best is not None and bound >= best[0]:
                break
            for costs, low, high, to in _light_parts(servers, piece, need, takers, sizes):
                if best is None or costs < best[0]:
                    best = (costs, piece, low, high, giver, to)
    if best is None:
        return _shed_most(servers, limit, by_headroom)
    servers.move(*best[1:])
    return True


def _givers_and_takers(by_headroom: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Servers that may shed work, each with the server of most headroom among the others."""
    for giver in by_headroom[: len(by_headroom) if len(by_headroom) > 1 else 0]:
        yield giver, by_headroom[giver == by_headroom[0]]


def _lightest(servers: Servers, count: int) -> list[int]:
    """The servers with the least load, in this order."""
    load = servers.load
    if count < len(load):
        some = np.sort(np.argpartition(load, count)[:count])
        return some[np.argsort(load[some], kind="stable")].tolist()
    return np.argsort(load, kind="stable").tolist()


def _cheapest_first(
    servers: Servers, giver: int, need: float, takers: Sequence[tuple[int, float]]
) -> list[tuple[float, Piece]]:
    """The giver's pieces of at least `need` seconds, each with a lower bound on the bytes of such a
    part, cheapest first.
    """
    pieces: list[tuple[float, Piece]] = []
    for piece in servers.pieces[giver]:
        if servers.seconds(piece) >= need:
            unknown = not any(servers.seq(piece) in servers.reach[taker] for taker, _ in takers)
            pieces.append((servers.shards.least_bytes(piece, need, keys=unknown), piece))
    return sorted(pieces)


def _light_parts(
    servers: Servers, piece: Piece, need: float, takers: Sequence[tuple[int, float]], sizes: TaskSizes
) -> Iterator[tuple[float, int, int, int]]:
    """For each of the takers the cheapest part of a piece that takes at least `need` and at most
    the taker's headroom.
    """
    parts = low, stop, moved = at_least(servers.shards, piece, need)
    least = float(moved[moved.argmin()])
    for taker, headroom in takers:
        if least <= headroom:
            costs = num_bytes(servers, piece, parts, taker, sizes)
            costs[moved > headroom] = inf
            best = int(costs.argmin())
            bounds = int(low[best]), stop + best
            if servers.allows(taker, (piece[0], *bounds)):
                yield float(costs[best]), *bounds, taker


def _shed_most(servers: Servers, limit: float, by_headroom: Sequence[int]) -> bool:
    """Move as much as another server can take, where that leaves more headroom than any server has.

    Returns False if it does nowhere.
    """
    best: tuple[float, Piece, int, int, int, int] | None = None
    least_load = float(servers.load[by_headroom[0]])
    for looked_at, (giver, taker) in enumerate(_givers_and_takers(by_headroom)):
        if best is not None and looked_at >= _GIVERS:
            break
        headroom = (limit - float(servers.load[taker])) * (1 + _ROUNDING)
        for piece in servers.pieces[giver]:
            seconds, low, high = servers.seconds(piece), piece[1], piece[2]
            if seconds > headroom:
                if servers.shards.lightest(piece) > headroom:
                    continue
                starts, stop, moved = at_most(servers.shards, piece, headroom)
                most = int(moved.argmax())
                seconds, low, high = float(moved[most]), int(starts[most]), stop + most
            more = float(servers.load[giver]) - seconds < least_load - _ROUNDING * headroom
            if more and (best is None or seconds > best[0]) and servers.allows(taker, (piece[0], low, high)):
                best = (seconds, piece, low, high, giver, taker)
    if best is None:
        return False
    servers.move(*best[1:])
    return True
