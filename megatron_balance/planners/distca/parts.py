"""Parts of a piece at whole blocks: how much they take, what they cost."""

from __future__ import annotations

from bisect import bisect_left
from typing import TypeAlias

import numpy as np

from megatron_balance.cost.base import Floats
from megatron_balance.ir.arrays import Ints
from megatron_balance.planners.distca.servers import Servers
from megatron_balance.planners.distca.shards import Piece, Shards, TaskSizes

Parts: TypeAlias = tuple[Ints, int, Floats]
"""Parts of a piece: where each begins, where the first one stops (the next one a block later), the
seconds of each.
"""


def at_least(shards: Shards, piece: Piece, least: float) -> Parts:
    """For each place where a part may stop, the smallest of `least` seconds (more than 0, no more
    than the piece has) or more.
    """
    mass, begin, after = shards.mass, piece[1], piece[2] + 1
    enough = bisect_left(
        shards.seconds, shards.seconds[begin] + least, begin, after
    )  # behind the piece, if rounding says so
    stop = min(max(shards.first_stop(piece), enough), piece[2])
    ends = mass[stop:after]
    low = mass[begin + 1 : after].searchsorted(ends - least, side="right")
    low += begin
    np.minimum(low, np.arange(stop - 1, after - 1), out=low)  # where `least` is lost in the rounding of the sums
    return low, stop, ends - mass[low]


def at_most(shards: Shards, piece: Piece, most: float) -> Parts:
    """For each place where a part may stop, the largest of `most` seconds or less; 0 seconds where
    there is none.
    """
    mass, after = shards.mass, piece[2] + 1
    stop = shards.first_stop(piece)
    ends = mass[stop:after]
    low = mass[piece[1] : after].searchsorted(ends - most)
    low += piece[1]
    return low, stop, ends - mass[low]


def num_bytes(servers: Servers, piece: Piece, parts: Parts, target: int, sizes: TaskSizes) -> Floats:
    """Bytes that a server receives for each of the parts of a piece."""
    low, stop, _ = parts
    costs, seq = servers.shards.num_bytes(piece, low, stop), servers.seq(piece)
    if seq in servers.reach[target]:
        costs -= sizes.kv * at_hand(servers, target, seq, servers.shards.key_stops(piece, low, stop))
    return costs


def at_hand(servers: Servers, server: int, seq: int, key_stop: Ints | Floats) -> Ints | Floats:
    """Number of keys below each `key_stop` that a server has of a sequence (it has some)."""
    reach = servers.reach[server][seq]
    keys = np.minimum(key_stop, reach)
    for start, stop in servers.held(server, seq):
        if stop > reach:
            keys += np.maximum(np.minimum(key_stop, stop) - max(reach, start), 0)
    return keys
