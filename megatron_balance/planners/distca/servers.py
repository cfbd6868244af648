"""State of the scheduling: the load of each server, its pieces, and the keys and values that it
has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf

import numpy as np

from megatron_balance.cost.base import Floats
from megatron_balance.planners.distca.shards import Piece, Shards
from megatron_balance.planners.distca.work import RANK, START, STOP, Edges


@dataclass(frozen=True, slots=True)
class Caps:
    """Limits on the tokens whose keys and values a server may hold at once, and on those (queries;
    keys and values) that it may receive.
    """

    held: float = inf
    received: float = inf


_NO_CAPS = Caps()


class Servers:
    """Loads and pieces of all servers. The fragments of `edges` are in the order of their ranks.

    `load` [R]: seconds, and those that it keeps free (`schedule`). `pieces`: of each server.
    `reach`: of each server, by sequence, how many of its first keys it has at hand as its tasks
    need them, beside those that it holds (`held`). `keys`, `queries` [R]: tokens that it receives,
    kept up where there are caps.
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
        """Seconds of the heaviest part that cannot be cut."""
        blocks = np.diff(self.shards.mass)
        blocks[self.shards.ends[:-1]] = 0.0  # from one fragment to the next
        return float(blocks.max(initial=0.0))

    def seconds(self, piece: Piece) -> float:
        """Time of a piece."""
        return self.mass[piece[2]] - self.mass[piece[1]]

    def seq(self, piece: Piece) -> int:
        """The sequence of a piece."""
        return self.owned[piece[0]][1]

    def held(self, server: int, seq: int) -> Sequence[tuple[int, int]]:
        """The runs of tokens [start, stop) of a sequence that a server owns."""
        return self._held[server].get(seq, ())

    def missing(self, server: int, seq: int, key_stop: int) -> int:
        """Keys below `key_stop` that the server does not have."""
        return self._not_held(server, seq, self.reach[server].get(seq, 0), key_stop)

    def freed(self, server: int, piece: Piece) -> int:
        """Keys that a server no longer needs to receive once the piece, whole, is elsewhere."""
        owner, seq, start, _ = self.owned[piece[0]]
        if owner == server and start == 0:
            return 0  # it holds them
        return self._not_held(server, seq, self._needed(server, seq, piece), self.reach[server][seq])

    def _not_held(self, server: int, seq: int, start: int, stop: int) -> int:
        """Number of keys in [start, stop) that the server does not own."""
        if stop <= start:
            return 0
        count = stop - start
        for held_start, held_stop in self.held(server, seq):
            if held_start < stop and start < held_stop:
                count -= min(held_stop, stop) - max(held_start, start)
        return count

    def _needed(self, server: int, seq: int, but: Piece | None = None) -> int:
        """End of the keys of a sequence that the pieces of a server need."""
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
        """Whether a server has or receives more than the caps allow."""
        held, received = self.own[server] + self.keys[server], self.keys[server] + self.queries[server]
        return held > self.caps.held or received > self.caps.received

    def keys_allowed(self, server: int) -> float:
        """Number of further keys that the caps allow a server to receive."""
        held, received = self.own[server] + self.keys[server], self.keys[server] + self.queries[server]
        return min(self.caps.held - held, self.caps.received - received)

    def received_keys(self, server: int, seq: int) -> int:
        """Keys of a sequence that the server receives."""
        return self._not_held(server, seq, 0, self.reach[server].get(seq, 0))

    def _foreign(self, server: int, piece: Piece) -> int:
        """Queries of a piece that the server has to receive."""
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
