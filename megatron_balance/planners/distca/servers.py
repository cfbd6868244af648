"""State of the scheduling: loads and pieces of servers, keys they have, parts that move, caps."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, inf
from typing import TypeAlias

import numpy as np

from megatron_balance.cost.base import Floats
from megatron_balance.errors import InfeasibleError
from megatron_balance.ir.arrays import Ints
from megatron_balance.planners.distca.shards import RANK, START, STOP, Edges, Piece, Shards, TaskSizes


@dataclass(frozen=True, slots=True)
class Caps:
    """Most tokens whose keys a server holds at once, and that it receives."""

    held: float = inf
    received: float = inf


_NO_CAPS = Caps()


class Servers:
    """Loads and pieces of all servers [R]. The fragments of `edges` are in the order of their ranks.

    `load`: seconds of attention; `reach`: by sequence, where the keys end that are there; `keys`,
    `queries`: tokens that come from others.
    """

    def __init__(self, edges: Edges, shards: Shards, num_ranks: int, caps: Caps) -> None:
        self.edges, self.shards, self.caps = edges, shards, caps
        self.counted = caps != _NO_CAPS
        rank = edges.owned[:, RANK]
        self.owned: list[list[int]] = edges.owned.tolist()
        self.mass = shards.seconds
        self.load: Floats = np.bincount(rank, shards.mass[shards.ends] - shards.mass[shards.begins], num_ranks)
        own: Floats = np.bincount(rank, edges.owned[:, STOP] - edges.owned[:, START], num_ranks)
        self.own: list[int] = own.astype(np.int64).tolist()
        self._held: list[dict[int, list[tuple[int, int]]]] = [{} for _ in range(num_ranks)]
        self.reach: list[dict[int, int]] = [{} for _ in range(num_ranks)]
        for server, seq, start, stop in self.owned:
            self._held[server].setdefault(seq, []).append((start, stop))
            reach = self.reach[server]
            if reach.get(seq, 0) < stop:
                reach[seq] = stop
        self.keys, self.queries = [0] * num_ranks, [0] * num_ranks
        if self.counted:
            self.keys = [sum(reach.values()) - own for reach, own in zip(self.reach, self.own, strict=True)]
        bounds: list[int] = rank.searchsorted(np.arange(num_ranks + 1)).tolist()
        whole = list(zip(range(len(rank)), shards.begins.tolist(), shards.ends.tolist(), strict=True))
        self.pieces: list[list[Piece]] = [whole[begin:end] for begin, end in pairwise(bounds)]

    def heaviest_block(self) -> float:
        blocks = np.diff(self.shards.mass)
        # From one fragment to the next.
        blocks[self.shards.ends[:-1]] = 0.0
        return float(blocks.max(initial=0.0))

    def seconds(self, piece: Piece) -> float:
        return self.mass[piece[2]] - self.mass[piece[1]]

    def seq(self, piece: Piece) -> int:
        return self.owned[piece[0]][1]

    def held(self, server: int, seq: int) -> Sequence[tuple[int, int]]:
        """The runs of tokens [start, stop) of a sequence that a server owns."""
        return self._held[server].get(seq, ())

    def missing(self, server: int, seq: int, key_stop: int) -> int:
        return self._not_held(server, seq, self.reach[server].get(seq, 0), key_stop)

    def freed(self, server: int, piece: Piece) -> int:
        """Keys that a server no longer needs to receive once the piece, whole, is elsewhere."""
        owner, seq, start, _ = self.owned[piece[0]]
        if owner == server and start == 0:
            # It holds them.
            return 0
        return self._not_held(server, seq, self._needed(server, seq, piece), self.reach[server][seq])

    def _not_held(self, server: int, seq: int, start: int, stop: int) -> int:
        if stop <= start:
            return 0
        count = stop - start
        for held_start, held_stop in self.held(server, seq):
            if held_start < stop and start < held_stop:
                count -= min(held_stop, stop) - max(held_start, start)
        return count

    def _needed(self, server: int, seq: int, but: Piece | None = None) -> int:
        owned, key_stop = self.owned, self.shards.key_stop
        most = 0
        for piece in self.pieces[server]:
            if owned[piece[0]][1] == seq and piece != but:
                most = max(most, key_stop(piece))
        return most

    def allows(self, server: int, piece: Piece) -> bool:
        """Whether the caps of a server leave room for a piece that it does not have."""
        if not self.counted:
            return True
        keys = self.missing(server, self.seq(piece), self.shards.key_stop(piece))
        held, received = self.own[server] + self.keys[server] + keys, self.keys[server] + self.queries[server] + keys
        return held <= self.caps.held and received + self._foreign(server, piece) <= self.caps.received

    def over_caps(self, server: int) -> bool:
        held, received = self.own[server] + self.keys[server], self.keys[server] + self.queries[server]
        return held > self.caps.held or received > self.caps.received

    def keys_allowed(self, server: int) -> float:
        held, received = self.own[server] + self.keys[server], self.keys[server] + self.queries[server]
        return min(self.caps.held - held, self.caps.received - received)

    def received_keys(self, server: int, seq: int) -> int:
        return self._not_held(server, seq, 0, self.reach[server].get(seq, 0))

    def _foreign(self, server: int, piece: Piece) -> int:
        return 0 if self.owned[piece[0]][0] == server else self.shards.num_queries(piece)

    def move(self, piece: Piece, low: int, high: int, source: int, target: int) -> list[Piece]:
        """Migrate [low, high) of a piece. Returns what is left of it at its source."""
        fragment, first, last = piece
        moved = (fragment, low, high)
        rest = [(fragment, first, low)] if first < low else []
        if high < last:
            rest.append((fragment, high, last))
        seq, seconds, key_stop = self.owned[fragment][1], self.mass[high] - self.mass[low], self.shards.key_stop(moved)
        pieces = self.pieces[source]
        pieces.remove(piece)
        pieces += rest
        self.pieces[target].append(moved)
        if key_stop == self.reach[source][seq]:
            left = self._needed(source, seq)
            if self.counted:
                self.keys[source] -= self._not_held(source, seq, left, key_stop)
            self.reach[source][seq] = left
        if key_stop > self.reach[target].get(seq, 0):
            if self.counted:
                self.keys[target] += self.missing(target, seq, key_stop)
            self.reach[target][seq] = key_stop
        if self.counted:
            self.queries[source] -= self._foreign(source, moved)
            self.queries[target] += self._foreign(target, moved)
        self.load[source] -= seconds
        self.load[target] += seconds
        return rest


# Parts of a piece: where each begins, where the first one stops (the next a block later), their
# seconds.
Parts: TypeAlias = tuple[Ints, int, Floats]


def at_least(shards: Shards, piece: Piece, least: float) -> Parts:
    """For each place where a part may stop, the smallest of `least` seconds (above 0)."""
    mass, begin, after = shards.mass, piece[1], piece[2] + 1
    enough = bisect_left(
        shards.seconds, shards.seconds[begin] + least, begin, after
    )  # behind the piece, if rounding says so
    stop = min(max(shards.first_stop(piece), enough), piece[2])
    ends = mass[stop:after]
    low = mass[begin + 1 : after].searchsorted(ends - least, side="right")
    low += begin
    # Where `least` is lost in the rounding of the sums.
    np.minimum(low, np.arange(stop - 1, after - 1), out=low)
    return low, stop, ends - mass[low]


def at_most(shards: Shards, piece: Piece, most: float) -> Parts:
    """For each place where a part may stop, the largest of `most` seconds, or none."""
    mass, after = shards.mass, piece[2] + 1
    stop = shards.first_stop(piece)
    ends = mass[stop:after]
    low = mass[piece[1] : after].searchsorted(ends - most)
    low += piece[1]
    return low, stop, ends - mass[low]


def num_bytes(servers: Servers, piece: Piece, parts: Parts, target: int, sizes: TaskSizes) -> Floats:
    low, stop, _ = parts
    costs, seq = servers.shards.num_bytes(piece, low, stop), servers.seq(piece)
    if seq in servers.reach[target]:
        costs -= sizes.kv * at_hand(servers, target, seq, servers.shards.key_stops(piece, low, stop))
    return costs


def at_hand(servers: Servers, server: int, seq: int, key_stop: Ints | Floats) -> Ints | Floats:
    """Number of keys below each `key_stop` that a server has of a sequence (it has some)."""
    reach = servers.reach[server][seq]
    # First keys up to `reach`, then runs that it owns beyond.
    keys = np.minimum(key_stop, reach)
    for start, stop in servers.held(server, seq):
        if stop > reach:
            keys += np.maximum(np.minimum(key_stop, stop) - max(reach, start), 0)
    return keys


def enforce_caps(servers: Servers) -> None:
    """Give tasks of servers above a cap to servers with room below it, before anything is balanced.

    Raises:
        InfeasibleError: what a server would have to give away, no other one has room for.
    """
    if not servers.counted:
        return
    need = [
        (own + keys, keys + queries)
        for own, keys, queries in zip(servers.own, servers.keys, servers.queries, strict=True)
    ]
    for server in sorted(range(len(need)), key=lambda rank: need[rank], reverse=True):
        while servers.over_caps(server):
            if not any(_give_away(servers, server, seq) for seq in _by_keys(servers, server)):
                raise InfeasibleError(_sentence(servers, server, need))


def _by_keys(servers: Servers, server: int) -> list[int]:
    missing = {
        seq: servers.received_keys(server, seq) for seq in {servers.seq(piece) for piece in servers.pieces[server]}
    }
    return sorted((seq for seq in missing if missing[seq]), key=lambda seq: (-missing[seq], seq))


def _give_away(servers: Servers, giver: int, seq: int) -> bool:
    moves: list[tuple[Piece, int]] = []
    for piece in [piece for piece in servers.pieces[giver] if servers.seq(piece) == seq]:
        rest: Piece | None = piece
        while rest is not None:
            chosen = _taker(servers, rest, giver)
            if chosen is None:
                for moved, taker in reversed(moves):
                    servers.move(moved, moved[1], moved[2], taker, giver)
                return False
            taker, low = chosen
            servers.move(rest, low, rest[2], giver, taker)
            moves.append(((rest[0], low, rest[2]), taker))
            rest = (rest[0], rest[1], low) if rest[1] < low else None
    return bool(moves)


def _taker(servers: Servers, piece: Piece, giver: int) -> tuple[int, int] | None:
    """The server that takes most of a piece's end within its caps, and where its part begins."""
    key_stop, seq = servers.shards.key_stop(piece), servers.seq(piece)
    best: tuple[int, int, float, int] | None = None
    for server in range(len(servers.pieces)):
        if server != giver and servers.allows(server, (piece[0], piece[2] - 1, piece[2])):
            low = _lowest(servers, piece, server)
            candidate = (low, servers.missing(server, seq, key_stop), float(servers.load[server]), server)
            best = candidate if best is None else min(best, candidate)
    return None if best is None else (best[3], best[0])


def _lowest(servers: Servers, piece: Piece, server: int) -> int:
    allowed, refused = piece[2] - 1, piece[1] - 1
    while allowed - refused > 1:
        middle = (allowed + refused) // 2
        if servers.allows(server, (piece[0], middle, piece[2])):
            allowed = middle
        else:
            refused = middle
    return allowed


def _sentence(servers: Servers, server: int, need: list[tuple[int, int]]) -> str:
    caps = servers.caps
    held, received = servers.own[server] + servers.keys[server], servers.keys[server] + servers.queries[server]
    what, needed, cap, which = (
        ("max_kv_tokens", held, caps.held, 0)
        if held > caps.held
        else ("max_received_tokens", received, caps.received, 1)
    )
    return (
        f"distca: rank {server} would have {needed} tokens for its attention tasks and {what} is {ceil(cap)}, and no "
        "other rank has room "
        f"for what it would have to give away. Set {what} to {max(each[which] for each in need)}, with which nobody "
        "has to give anything "
        "away, or plan fewer tokens at once"
    )
