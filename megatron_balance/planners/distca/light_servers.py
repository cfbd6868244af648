"""Empty light servers before anything heavy moves, so that fewer servers need the keys of long
sequences (option `empty_light_servers`).

Whatever a server takes of a long sequence's end, it needs nearly all of its keys. A server that is
half full of short work takes half as much for the same keys as an empty one. Where moving a light
server's items to another one costs fewer bytes than the keys that are saved, and the two of them
fill one server, it gives them away whole (paper: no such step; its greedy rule looks at one
migration at a time).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort

import numpy as np

from megatron_balance.cost.base import Floats
from megatron_balance.planners.distca.greedy import Rule
from megatron_balance.planners.distca.servers import Servers

_FULL = 0.9
"""Least load of giver and taker together, as a share of the limit.

Keys are saved only where the taker is full afterwards, so that it takes hardly anything else.
"""


def empty_light_servers(servers: Servers, rule: Rule) -> None:
    """Move all tasks of light servers to the fullest ones that can take them, lightest first, where
    it pays.
    """
    load, mean = servers.load, float(servers.load.mean())
    surplus = np.maximum(load - rule.limit, 0.0)
    if not surplus.any():
        return
    keys = _keys_of_surplus(servers, surplus)
    order: list[int] = np.argsort(load, kind="stable").tolist()
    light = [(float(load[server]), -server) for server in order if 0 < load[server] < mean]
    takers = sorted(light)
    for _, name in light:
        giver_load = float(load[-name])  # which has grown if it took from another one
        takers.pop(bisect_left(takers, (giver_load, name)))
        at = bisect_right(takers, (rule.limit - giver_load, 1)) - 1
        full = at >= 0 and takers[at][0] + giver_load >= _FULL * rule.limit
        if full and _pays(servers, -name, -takers[at][1], keys * rule.sizes.kv * giver_load / mean, rule):
            taker = -takers.pop(at)[1]
            for piece in list(servers.pieces[-name]):
                servers.move(piece, piece[1], piece[2], -name, taker)
            insort(takers, (float(load[taker]), -taker))
        else:
            insort(takers, (giver_load, name))


def _keys_of_surplus(servers: Servers, surplus: Floats) -> float:
    """Keys that a server needs that takes from those with a surplus, on average."""
    over = np.flatnonzero(surplus).tolist()
    reach = [max(servers.shards.key_stop(piece) for piece in servers.pieces[server]) for server in over]
    return float(np.dot(reach, surplus[over]) / surplus.sum())


def _pays(servers: Servers, giver: int, taker: int, saved_bytes: float, rule: Rule) -> bool:
    """Whether moving all tasks of a server saves more bytes than it costs, within the caps and
    `least_score`.
    """
    num_bytes = 0.0
    most_bytes = min(saved_bytes, float(servers.load[giver]) / rule.least_score) if rule.least_score else saved_bytes
    for piece in servers.pieces[giver]:
        keys = servers.missing(taker, servers.seq(piece), servers.shards.key_stop(piece)) - servers.freed(giver, piece)
        num_bytes += servers.shards.num_queries(piece) * rule.sizes.query + keys * rule.sizes.kv
        if num_bytes >= most_bytes or not servers.allows(taker, piece):
            return False
    return True
