"""Who attends what, in the making: loads, pieces, and which keys and values each server has."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from math import inf

import numpy as np

from megatron_balance.cost.base import Floats
from megatron_balance.planners.distca.shards import Piece, Shards
from megatron_balance.planners.distca.work import RANK, SEQ, START, STOP, Edges


@dataclass(frozen=True, slots=True)
class Caps:
    """Most tokens whose keys and values a server may hold at once, and most tokens (queries; keys and values) that it may receive."""

    held: float = inf
    received: float = inf


_NO_CAPS = Caps()


class Servers:
    """State of the scheduling.

    `load` [R]: seconds. `pieces`: of each server. `reach` [R, sequences]: a server has the first so many keys of a sequence at hand,
    as its tasks need; `held`: what it holds of them by home. `keys`, `queries` [R]: tokens that it receives.
    """

    def __init__(self, edges: Edges, shards: Shards, num_ranks: int, num_seqs: int, caps: Caps) -> None:
        self.shards, self.caps = shards, caps
        rank, seq, stop = edges.homes[:, RANK], edges.homes[:, SEQ], edges.homes[:, STOP]
        self.homes: list[list[int]] = edges.homes.tolist()
        self.mass: list[float] = shards.mass.tolist()
        self.load: Floats = np.bincount(rank, shards.mass[shards.ends] - shards.mass[shards.begins], num_ranks)
        self.reach: Floats = np.zeros((num_ranks, num_seqs))
        np.maximum.at(self.reach, (rank, seq), stop)
        own: Floats = np.bincount(rank, stop - edges.homes[:, START], num_ranks)
        self.own: list[int] = own.astype(np.int64).tolist()
        self.keys: list[int] = (self.reach.sum(axis=1) - own).astype(np.int64).tolist()
        self.queries = [0] * num_ranks
        self.pieces: list[list[Piece]] = [[] for _ in range(num_ranks)]
        self.held: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
        self.shared: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
        """Of each rank, what it holds (seq, start, stop) of sequences that are cut."""
        cut: list[bool] = (np.bincount(seq, minlength=num_seqs) > 1)[seq].tolist()
        whole = zip(range(len(self.homes)), shards.begins.tolist(), shards.ends.tolist(), strict=True)
        for (server, of, begin, end), piece, is_cut in zip(self.homes, whole, cut, strict=True):
            self.pieces[server].append(piece)
            self.held[server, of].append((begin, end))
            if is_cut:
                self.shared[server].append((of, begin, end))

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
        return self.homes[piece[0]][1]

    def num_queries(self, piece: Piece) -> int:
        """Queries of a piece."""
        return sum(stop - start for start, stop in self.shards.spans(piece))

    def missing(self, server: int, seq: int, key_stop: int) -> int:
        """Keys below `key_stop` that the server does not have."""
        at_hand = int(self.reach[server, seq])
        if key_stop <= at_hand:
            return 0
        held = sum(max(0, min(stop, key_stop) - max(start, at_hand)) for start, stop in self.held.get((server, seq), ()))
        return key_stop - at_hand - held

    def freed(self, server: int, piece: Piece) -> int:
        """Keys that a server no longer needs to receive once the piece, whole, is elsewhere."""
        home, seq, start, _ = self.homes[piece[0]]
        if home == server and start == 0:
            return 0  # it holds them
        left = max((self.shards.key_stop(other) for other in self.pieces[server] if other != piece and self.seq(other) == seq), default=0)
        top = int(self.reach[server, seq])
        held = sum(max(0, min(stop, top) - max(start, left)) for start, stop in self.held.get((server, seq), ()))
        return max(0, top - left - held)

    def allows(self, server: int, piece: Piece) -> bool:
        """Whether the caps of a server leave room for a piece."""
        if self.caps == _NO_CAPS:
            return True
        keys = self.missing(server, self.seq(piece), self.shards.key_stop(piece))
        held, received = self.own[server] + self.keys[server] + keys, self.keys[server] + self.queries[server] + keys
        return held <= self.caps.held and received + self._foreign(server, piece, self.num_queries(piece)) <= self.caps.received

    def _foreign(self, server: int, piece: Piece, num_queries: int) -> int:
        return 0 if self.homes[piece[0]][0] == server else num_queries

    def move(self, piece: Piece, low: int, high: int, source: int, target: int) -> list[Piece]:
        """Migrate [low, high) of a piece. Returns what is left of it at its source."""
        fragment, first, last = piece
        moved = (fragment, low, high)
        rest = [part for part in ((fragment, first, low), (fragment, high, last)) if part[1] < part[2]]
        seq, seconds, key_stop, num_queries = self.seq(piece), self.seconds(moved), self.shards.key_stop(moved), self.num_queries(moved)
        pieces = self.pieces[source]
        pieces.remove(piece)
        pieces += rest
        self.pieces[target].append(moved)
        if key_stop == self.reach[source, seq]:
            left = max((self.shards.key_stop(other) for other in pieces if self.seq(other) == seq), default=0)
            self.keys[source] -= self._received(source, seq, key_stop) - self._received(source, seq, left)
            self.reach[source, seq] = left
        if key_stop > self.reach[target, seq]:
            self.keys[target] += self.missing(target, seq, key_stop)
            self.reach[target, seq] = key_stop
        self.queries[source] -= self._foreign(source, moved, num_queries)
        self.queries[target] += self._foreign(target, moved, num_queries)
        self.load[source] -= seconds
        self.load[target] += seconds
        return rest

    def _received(self, server: int, seq: int, reach: int) -> int:
        """Of the first `reach` keys those that the server does not hold by home."""
        return reach - sum(max(0, min(stop, reach) - start) for start, stop in self.held.get((server, seq), ()))
