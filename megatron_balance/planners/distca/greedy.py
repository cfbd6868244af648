"""Communication-aware greedy scheduling (DistCA, section 4.2): surplus servers give shards to those with room."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import TypeAlias

import numpy as np

from megatron_balance.cost.base import Floats
from megatron_balance.passes.tables import Ints
from megatron_balance.planners.distca.servers import Servers
from megatron_balance.planners.distca.shards import Piece

_ROUNDING = 1e-9
"""Of the mean load: no difference."""

_RAISE = 0.005
"""Of the limit: how much it gives where no cut at whole blocks fits under it."""

_SPARE = 0.25
"""Of the tolerance: how much of a server's room a cut may leave unused, or a source be relieved of in vain, for the sake of bytes."""


@dataclass(frozen=True, slots=True)
class Rule:
    """`size_q`: bytes of a query and its output, `size_kv` of a key and its value. `least_score`: seconds a byte that are worth it."""

    limit: float
    tolerance: float
    size_q: float
    size_kv: float
    least_score: float


class Drain:
    """Migration from the servers above the limit. Arrays have a row for each of their pieces.

    `seconds` of the piece, `block`: of the lightest block that can be cut from it; infinite once its server is not above the limit.
    """

    def __init__(self, servers: Servers, rule: Rule) -> None:
        self.servers, self.rule, self.limit = servers, rule, rule.limit
        self.mean = float(servers.load.mean())
        over = np.flatnonzero(servers.load > self.limit).tolist()
        size = 4 * sum(len(servers.pieces[server]) for server in over) + 64
        self.rows: list[Piece] = []
        self.source, self.seqs = np.zeros((2, size), dtype=np.int64)
        self.low, self.high, self.seconds = np.zeros((3, size))
        self.block = np.full(size, inf)
        for server in over:
            for piece in servers.pieces[server]:
                self._add(server, piece)

    def _add(self, server: int, piece: Piece) -> None:
        row = len(self.rows)
        if row == len(self.source):
            for name in ("source", "seqs", "low", "high", "seconds"):
                column = getattr(self, name)
                setattr(self, name, np.append(column, np.zeros_like(column)))
            self.block = np.append(self.block, np.full_like(self.block, inf))
        self.rows.append(piece)
        self._set(row, server, piece)

    def _set(self, row: int, server: int, piece: Piece) -> None:
        self.rows[row] = piece
        self.source[row], self.seqs[row] = server, self.servers.seq(piece)
        self.low[row], self.high[row] = self.servers.shards.bounds(piece)
        self.seconds[row], self.block[row] = self.servers.seconds(piece), self.servers.shards.lightest(piece)

    def run(self) -> None:
        """Migrate until no server is above the limit.

        Where whole blocks do not fit under it room is made, for an eighth of the servers or so, and again if that was of any use; then the
        limit gives way.
        """
        load = self.servers.load
        closed = np.zeros(len(load))  # infinite: has room, but for nothing that is worth it
        rooms_made, most_rooms, useless = 0, len(load) // 8 + 8, True
        while load[load.argmax()] > self.limit + _ROUNDING * self.mean:
            target = int((load + closed).argmin())
            room = 0.0 if closed[target] else self.limit - float(load[target])
            if room >= max(float(self.block[self.block.argmin()]), _ROUNDING * self.mean):
                filled = self._fill(target, room)
                closed[target] = 0.0 if filled else inf
                useless = useless and not (filled and rooms_made)
                continue
            if self.rule.least_score > 0 and np.count_nonzero(closed):
                return
            if rooms_made < most_rooms and self._make_room():
                rooms_made += 1
            else:
                closed[:] = False
                self.limit *= 1 + _RAISE
                self.block[: len(self.rows)][load[self.source[: len(self.rows)]] <= self.limit] = inf
                rooms_made, useless = (rooms_made if useless else 0), True

    def _fill(self, target: int, room: float) -> bool:
        """Migrate the best part of the best item to a server with room. Returns False if none is worth it."""
        chosen = (self.block <= room).nonzero()[0]
        surplus = self.servers.load[self.source[chosen]] - self.limit
        seconds = self.seconds[chosen]
        wanted = np.minimum(np.minimum(seconds, surplus), room)
        scores = wanted / self._least_bytes(chosen, target, wanted / seconds)
        for _ in range(len(chosen)):
            best = int(scores.argmax())
            if scores[best] <= self.rule.least_score:
                return False
            row = int(chosen[best])
            found = self._cut(self.rows[row], target, float(surplus[best]), room + _ROUNDING / 2 * self.mean)
            if self.servers.allows(target, (self.rows[row][0], *found)):
                self._migrate(row, found, target)
                return True
            scores[best] = 0.0
        return False

    def _least_bytes(self, chosen: Ints, target: int, share: Floats) -> Floats:
        """What it costs at least to migrate a share of each chosen item to a server."""
        seqs = self.seqs[chosen]
        resident = self.servers.reach[target][seqs]
        queries, key_stop = self.servers.shards.part((self.low[chosen], self.high[chosen]), share, resident)
        keys = np.maximum(key_stop - resident, 0.0)
        for seq, start, stop in self.servers.shared.get(target, ()):
            same = seqs == seq
            if np.count_nonzero(same):
                keys[same] -= np.maximum(np.minimum(key_stop[same], stop) - np.maximum(resident[same], start), 0.0)
        return queries * self.rule.size_q + keys * self.rule.size_kv

    def _cut(self, piece: Piece, target: int, surplus: float, room: float) -> tuple[int, int]:
        """Bounds of the part of a piece at whole blocks that fills the room, or takes the surplus, most tightly for few bytes."""
        seconds = self.servers.seconds(piece)
        if min(surplus, room) >= seconds * (1 - _ROUNDING):
            return piece[1], piece[2]
        low, high, moved = smallest_parts(self.servers, piece, surplus, room) if surplus <= room else _NO_PARTS
        wasted = moved - surplus
        if not len(low):
            low, high, moved = largest_parts(self.servers, piece, room)
            wasted = room - moved
        good = wasted <= max(_SPARE * self.rule.tolerance * self.mean, float(wasted[wasted.argmin()]))
        low, high = low[good], high[good]
        best = int(self._bytes(piece, low, high, target).argmin()) if len(low) > 1 else 0
        return int(low[best]), int(high[best])

    def _bytes(self, piece: Piece, low: Ints, high: Ints, target: int) -> Floats:
        """What the parts [low, high) of a piece cost to migrate."""
        shards, servers, seq = self.servers.shards, self.servers, self.servers.seq(piece)
        resident, key_stop = servers.reach[target, seq], shards.key_stops(piece, low, high)
        keys = np.maximum(key_stop - resident, 0.0)
        for start, stop in servers.held.get((target, seq), ()):
            keys -= np.maximum(np.minimum(key_stop, stop) - max(resident, start), 0.0)
        return shards.queries(piece, low, high) * self.rule.size_q + keys * self.rule.size_kv

    def _migrate(self, row: int, found: tuple[int, int], target: int) -> None:
        server = int(self.source[row])
        rest = self.servers.move(self.rows[row], *found, server, target)
        self.block[row] = inf
        if self.servers.load[server] <= self.limit + _ROUNDING * self.mean:
            self.block[: len(self.rows)][self.source[: len(self.rows)] == server] = inf
        elif rest:
            self._set(row, server, rest[0])
            for piece in rest[1:]:
                self._add(server, piece)

    def _make_room(self) -> bool:
        """Where all have too little room for a block of what is above the limit: a server sheds light work to have it.

        Another one with room takes it, or the source itself, in exchange for the block. Returns False if that does not help.
        """
        load, row = self.servers.load, int(self.block.argmin())
        heavy, block = int(self.source[row]), float(self.block[row])
        by_room: list[int] = np.argsort(load, kind="stable")[:_MOST_GIVERS].tolist()
        best: tuple[float, Piece, int, int, int, int] | None = None
        for looked_at, giver in enumerate(by_room):
            if best is not None and looked_at >= _GIVERS:
                break
            need = block - (self.limit - float(load[giver]))
            if not 0 < need < block:
                continue
            taker = by_room[giver == by_room[0]]
            takers = ((taker, self.limit - float(load[taker])), (heavy, block - float(load[heavy]) + self.limit))
            takers = tuple((to, room) for to, room in takers if to != giver and need <= room)
            for piece in self.servers.pieces[giver] if takers else ():
                if self.servers.seconds(piece) >= need:
                    for num_bytes, low, high, to in self._light_parts(piece, need, takers):
                        if best is None or num_bytes < best[0]:
                            best = (num_bytes, piece, low, high, giver, to)
        if best is None:
            return self._shed(by_room)
        self.servers.move(*best[1:])
        return True

    def _shed(self, by_room: Sequence[int]) -> bool:
        """Where nobody can shed enough at once: as much as another one takes. Returns False if nobody takes any."""
        load = self.servers.load
        best: tuple[float, Piece, int, int, int, int] | None = None
        for giver in by_room[:_GIVERS]:
            taker = by_room[giver == by_room[0]]
            room = self.limit - float(load[taker])
            for piece in self.servers.pieces[giver]:
                if giver != taker and self.servers.shards.lightest(piece) <= room:
                    low, high, moved = largest_parts(self.servers, piece, room + _ROUNDING / 2 * self.mean)
                    most = int(moved.argmax())
                    bounds = int(low[most]), int(high[most])
                    if (best is None or moved[most] > best[0]) and self.servers.allows(taker, (piece[0], *bounds)):
                        best = (float(moved[most]), piece, *bounds, giver, taker)
        if best is None:
            return False
        self.servers.move(*best[1:])
        return True

    def _light_parts(self, piece: Piece, need: float, takers: Sequence[tuple[int, float]]) -> Iterator[tuple[float, int, int, int]]:
        """For each of the takers the cheapest part of a piece that takes at least `need` and at most the taker's room."""
        for taker, room in takers:
            low, high, _ = smallest_parts(self.servers, piece, need, room)
            if len(low):
                num_bytes = self._bytes(piece, low, high, taker)
                best = int(num_bytes.argmin())
                bounds = int(low[best]), int(high[best])
                if self.servers.allows(taker, (piece[0], *bounds)):
                    yield float(num_bytes[best]), *bounds, taker


_GIVERS, _MOST_GIVERS = 2, 32
"""How many of the servers with most room are looked at as those that shed light work; and how many if none of the first ones can."""

_NO_PARTS = (np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64), np.empty(0))


Parts: TypeAlias = tuple[Ints, Ints, Floats]
"""Bounds of parts of a piece, and their seconds."""


def smallest_parts(servers: Servers, piece: Piece, least: float, most: float) -> Parts:
    """For each place where a part of a piece may stop, the smallest of `least` seconds or more, if it has `most` at most."""
    inside = servers.shards.mass[piece[1] : piece[2] + 1]
    high = servers.shards.stops(piece)
    ends = inside[high - piece[1]]
    low = inside.searchsorted(ends - least, side="right") - 1
    moved = ends - inside[low]  # of the last element where there is none: nothing or less
    keep = ((low >= 0) & (moved <= most)).nonzero()[0]
    return low[keep] + piece[1], high[keep], moved[keep]


def largest_parts(servers: Servers, piece: Piece, most: float) -> Parts:
    """The same with the largest of `most` seconds or less."""
    inside = servers.shards.mass[piece[1] : piece[2] + 1]
    high = servers.shards.stops(piece)
    ends = inside[high - piece[1]]
    low = inside.searchsorted(ends - most, side="left")
    moved = ends - inside[low]
    keep = (moved > 0).nonzero()[0]
    return low[keep] + piece[1], high[keep], moved[keep]
