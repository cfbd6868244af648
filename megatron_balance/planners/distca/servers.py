"""State of the scheduling: loads and pieces of servers, keys they have, parts that move, caps."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, inf
from typing import TypeAlias

import numpy as np

from megatron_balance.cost.base import CostModel
from megatron_balance.cost.kernel import TILE_TOKENS
from megatron_balance.errors import InfeasibleError
from megatron_balance.ir.arrays import Floats, Ints
from megatron_balance.ir.columns import Placed
from megatron_balance.planners.distca.trees import Paths


class Servers:
    """Loads and pieces of all servers [R]. The fragments of `edges` are in the order of their ranks.

    `load`: seconds of attention; `reach`: by sequence, where the keys end that are there; `keys`,
    `queries`: tokens that come from others. `most_held`, `most_received`: tokens whose keys a server
    holds at once, and that it receives. `paths`: which first keys the sequences have in common, if
    they are runs of trees; caps count them for each run.
    """

    def __init__(
        self,
        edges: Edges,
        shards: Shards,
        num_ranks: int,
        most_held: float = inf,
        most_received: float = inf,
        paths: Paths | None = None,
    ) -> None:
        self.edges, self.shards, self.most_held, self.most_received = edges, shards, most_held, most_received
        self.paths = paths
        # By server, where the keys of each segment on a path end that are there. By run, the lowest
        # segment that others see, too.
        self._upto: list[dict[int, int]] = [{} for _ in range(num_ranks)]
        self._shared: list[int] = []
        if paths is not None:
            self._shared = [own if len(paths.below[own]) > 1 else paths.parent[own] for own in paths.segment]
        self.counted = (most_held, most_received) != (inf, inf)
        rank = edges.owned[:, Placed.RANK]
        self.owned: list[list[int]] = edges.owned.tolist()
        self.mass = shards.seconds
        self.load: Floats = np.bincount(rank, shards.mass[shards.ends] - shards.mass[shards.begins], num_ranks)
        own: Floats = np.bincount(rank, edges.owned[:, Placed.STOP] - edges.owned[:, Placed.START], num_ranks)
        self.own: list[int] = own.astype(np.int64).tolist()
        self._held: list[dict[int, list[tuple[int, int]]]] = [{} for _ in range(num_ranks)]
        self.reach: list[dict[int, int]] = [{} for _ in range(num_ranks)]
        for server, seq, start, stop in self.owned:
            self._held[server].setdefault(seq, []).append((start, stop))
            reach = self.reach[server]
            if reach.get(seq, 0) < stop:
                reach[seq] = stop
        furthest: dict[tuple[int, int], int] = {}  # of many runs one tells
        for server, run, _, stop in self.owned if paths is not None else ():
            at = server, self._shared[run]
            furthest[at] = max(stop, furthest.get(at, 0))
        for (server, segment), stop in furthest.items():
            self._reach_others(server, segment, stop)
        # By server, the sequences of which it may hold keys beyond `reach`.
        self.beyond: list[set[int]] = [set() for _ in range(num_ranks)]
        self.keys, self.queries = [0] * num_ranks, [0] * num_ranks
        if self.counted:
            self.keys = [sum(reach.values()) - own for reach, own in zip(self.reach, self.own, strict=True)]
        bounds: list[int] = rank.searchsorted(np.arange(num_ranks + 1)).tolist()
        whole = list(zip(range(len(rank)), shards.begins.tolist(), shards.ends.tolist(), strict=True))
        self.pieces: list[list[Piece]] = [whole[begin:end] for begin, end in pairwise(bounds)]

    def _reach_others(self, server: int, segment: int, stop: int) -> None:
        """Runs below a segment and those above it have the keys, too, that they share up to `stop`."""
        assert self.paths is not None
        reach, upto, (_, parent, depth, _, below) = self.reach[server], self._upto[server], self.paths
        while segment >= 0 and upto.get(segment, 0) < (keys := min(stop, depth[segment])):
            upto[segment] = keys
            for other in below[segment]:
                if reach.get(other, 0) < keys:
                    reach[other] = keys
            segment = parent[segment]

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
        """The runs of tokens [start, stop) of a sequence that a server owns; of a run of a tree also
        those of its path.
        """
        own, paths = self._held[server], self.paths
        found = own.get(seq, ())
        if paths is None:
            return found
        above = ((run, paths.depth[segment]) for segment in paths.above(seq) for run in paths.runs[segment])
        parts = ((each, depth) for run, depth in above if run != seq for each in own.get(run, ()))
        return [*found, *((start, min(stop, depth)) for (start, stop), depth in parts)]

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
        owned, key_stop, paths = self.owned, self.shards.key_stop, self.paths
        tree, shared = (range(0), 0) if paths is None else paths.relatives(seq)
        most = 0
        for piece in self.pieces[server]:
            other = owned[piece[0]][1]
            if other == seq:
                most = max(most, key_stop(piece)) if piece != but else most
            elif most < shared and other in tree:
                assert paths is not None
                most = max(most, min(key_stop(piece), paths.num_common(seq, other)))
        return most

    def allows(self, server: int, piece: Piece) -> bool:
        """Whether the caps of a server leave room for a piece that it does not have."""
        if not self.counted:
            return True
        keys = self.missing(server, self.seq(piece), self.shards.key_stop(piece))
        held, received = self.counts(server)
        received += keys + self._foreign(server, piece)
        return held + keys <= self.most_held and received <= self.most_received

    def counts(self, server: int) -> tuple[int, int]:
        """Tokens whose keys a server holds, and that it receives."""
        return self.own[server] + self.keys[server], self.keys[server] + self.queries[server]

    def keys_allowed(self, server: int) -> float:
        """Further keys that the caps leave room for; below 0: it is above them."""
        held, received = self.counts(server)
        return min(self.most_held - held, self.most_received - received)

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
            self.beyond[source].add(seq)
        if key_stop > self.reach[target].get(seq, 0):
            if self.counted:
                self.keys[target] += self.missing(target, seq, key_stop)
            self.reach[target][seq] = key_stop
        if self.paths is not None:
            self._reach_others(target, self._shared[seq], key_stop)
        if self.counted:
            self.queries[source] -= self._foreign(source, moved)
            self.queries[target] += self._foreign(target, moved)
        self.load[source] -= seconds
        self.load[target] += seconds
        return rest

    def num_bytes(self, piece: Piece, parts: Parts, target: int) -> Floats:
        """Bytes that migrate parts of a piece."""
        low, stop, _ = parts
        costs, seq = self.shards.num_bytes(piece, low, stop), self.seq(piece)
        if seq in self.reach[target]:
            costs -= self.shards.sizes.kv * self.at_hand(target, seq, self.shards.key_stops(piece, low, stop))
        return costs

    def at_hand(self, server: int, seq: int, key_stop: Ints | Floats) -> Ints | Floats:
        """Number of keys below each `key_stop` that a server has of a sequence (it has some)."""
        reach = self.reach[server][seq]
        # First keys up to `reach`, then runs that it owns beyond.
        keys = np.minimum(key_stop, reach)
        for start, stop in self.held(server, seq):
            if stop > reach:
                keys += np.maximum(np.minimum(key_stop, stop) - max(reach, start), 0)
        return keys


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


def enforce_caps(servers: Servers) -> None:
    """Give tasks of servers above a cap to servers with room below it, before anything is balanced.

    Raises:
        InfeasibleError: what a server would have to give away, no other one has room for.
    """
    if not servers.counted:
        return
    need = [servers.counts(server) for server in range(len(servers.pieces))]
    for server in sorted(range(len(need)), key=need.__getitem__, reverse=True):
        while servers.keys_allowed(server) < 0:
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
    counts = servers.counts(server)
    which = 0 if counts[0] > servers.most_held else 1
    what, cap = (("max_kv_tokens", servers.most_held), ("max_received_tokens", servers.most_received))[which]
    return (
        f"distca: rank {server} would have {counts[which]} tokens for its attention tasks and {what} is {ceil(cap)}, "
        f"and no other rank has room for what it would have to give away. Set {what} to "
        f"{max(each[which] for each in need)}, with which nobody has to give anything away, or plan fewer tokens at "
        "once"
    )


# The part of an item to migrate: the closed forms of DistCA, Appendix B, derived again.
#
# An item is the attention of queries [start, stop) to all keys before them: (stop^2 - start^2) / 2
# pairs. A share of them goes to another server by moving n queries that see the keys up to y, for n
# size_q + max(0, y - resident) size_kv bytes (the paper counts resident keys, too).
#
# Plain shards are [y - n, y): with c = share (stop^2 - start^2), n = y - sqrt(y^2 - c), and the bytes
# are least at n = sqrt(c r), r = size_kv / (2 size_q + size_kv), that is y = sqrt(c) (1 / sqrt(r) +
# sqrt(r)) / 2, within sqrt(start^2 + c) <= y <= stop. (The paper prints the lower bound without its
# last term, - start.)
#
# Head-tail pairs are a head [start + i, start + j) and the tail [stop - j, stop - i) that mirrors it:
# a share of the pairs is the same share of the queries, and the tail needs all keys up to its end,
# fewest for the innermost part. (The paper takes the head's area alone.)
#
# S(p), the seconds of the first p queries of a sequence, is asked of the cost model at whole tiles;
# its square root, nearly a straight line, is interpolated. A shard [a, b) takes S(b) - S(a).


@dataclass(frozen=True, slots=True)
class TaskSizes:
    """Bytes of a query and its output, and of a key and its value."""

    query: float
    kv: float


# A fragment, and the first and last of its edges (or pairs of blocks) that bound a part of it.
Piece: TypeAlias = tuple[int, int, int]
# Queries that move, and up to where they need keys.
Part: TypeAlias = tuple[Floats, Floats]
# Share that counts as all of an item, so that no rounding makes it more.
_ALL = 1 - 1e-14


# Items by row, with memory for what is worked out about all of them at once. `set` fills a row with an
# item of these `bounds` that takes `seconds`; `only` copies some rows, with spare ones up to `size`.
# `cheapest`: for each row the part that takes `seconds` of it for the fewest bytes, were there no
# blocks; the target has the first `resident` keys. Its result holds until the next call and may be
# written to.
class _PlainItems:
    def __init__(self, size: int, sizes: TaskSizes) -> None:
        self._sizes = sizes
        ratio = sizes.kv / (2 * sizes.query + sizes.kv)
        self._best = (1 / ratio + ratio) / 4 + 1 / 2
        self._values = np.ones((3, size))
        self._before, self._stop, self._rate = self._values
        self._before[:] = 0.0
        self._moved, self._queries, self._key_stop = np.empty((3, size))

    def set(self, row: int, bounds: tuple[float, float], seconds: float) -> None:
        before, stop = bounds[0] * bounds[0], bounds[1] * bounds[1]
        self._before[row], self._stop[row], self._rate[row] = before, stop, (stop - before) * _ALL / seconds

    def only(self, rows: Ints, size: int) -> _PlainItems:
        items = _PlainItems(size, self._sizes)
        items._values[:, : len(rows)] = self._values[:, rows]
        return items

    def cheapest(self, seconds: Floats, resident: Floats | None = None) -> Part:
        area = np.multiply(seconds, self._rate, out=self._moved)
        squares, queries = self._key_stop, self._queries
        np.multiply(area, self._best, out=squares)
        np.maximum(squares, np.add(self._before, area, out=queries), out=squares)
        if resident is not None:
            np.maximum(squares, np.square(resident, out=queries), out=squares)
        np.minimum(squares, self._stop, out=squares)
        np.subtract(squares, area, out=queries)
        np.sqrt(queries, out=queries)
        key_stop = np.sqrt(squares, out=squares)
        return np.subtract(key_stop, queries, out=queries), key_stop


class _PairItems:
    """Head-tail pairs of items whose tails are [inner, outer)."""

    def __init__(self, size: int) -> None:
        self._values = np.ones((2, size))
        self._inner, self._rate = self._values
        self._queries, self._key_stop = np.empty((2, size))

    def set(self, row: int, bounds: tuple[float, float], seconds: float) -> None:
        self._inner[row], self._rate[row] = bounds[0], (bounds[1] - bounds[0]) / seconds

    def only(self, rows: Ints, size: int) -> _PairItems:
        items = _PairItems(size)
        items._values[:, : len(rows)] = self._values[:, rows]
        return items

    def cheapest(self, seconds: Floats, resident: Floats | None = None) -> Part:
        # All queries see as many keys, wherever they are.
        del resident
        queries = np.multiply(seconds, self._rate, out=self._queries)
        key_stop = np.add(self._inner, queries, out=self._key_stop)
        queries *= 2
        return queries, key_stop


Items: TypeAlias = _PlainItems | _PairItems


# A way to cut fragments. Indices are into `mass` (`seconds`, as a list): seconds of attention summed
# up along each fragment, from its begin to its end.
class Plain:
    """Shards [low, high) of edges."""

    def __init__(self, edges: Edges, sizes: TaskSizes) -> None:
        self.edges, self.sizes = edges, sizes
        # Bytes of the queries up to an edge, and of the keys, too.
        self._before: Floats = np.multiply(edges.positions, sizes.query, dtype=np.float64)
        self._upto: Floats = np.multiply(edges.positions, sizes.query + sizes.kv, dtype=np.float64)
        self.mass, self.begins, self.ends = edges.seconds, edges.first, edges.last
        self._positions: list[int] = edges.positions.tolist()
        self.seconds: list[float] = edges.seconds.tolist()

    def items(self, size: int) -> _PlainItems:
        return _PlainItems(size, self.sizes)

    # The two positions that `Items.set` takes for a piece.
    def bounds(self, piece: Piece) -> tuple[int, int]:
        return self._positions[piece[1]], self._positions[piece[2]]

    # Seconds of the lightest part that can be cut off a piece at whole blocks.
    def lightest(self, piece: Piece) -> float:
        mass, low, high = self.seconds, piece[1], piece[2]
        # The last block may be short.
        return min(mass[low + 1] - mass[low], mass[high] - mass[high - 1])

    # The least index at which a part of the piece may stop; from there on it may anywhere.
    def first_stop(self, piece: Piece) -> int:
        return piece[1] + 1

    # Bytes to migrate parts of a piece, all keys counted: from each `low` to `stop`, to the index
    # after it, ...; `key_stops`: ends of the keys that they need.
    def num_bytes(self, piece: Piece, low: Ints, stop: int) -> Floats:
        del piece
        return self._upto[stop : stop + len(low)] - self._before[low]

    def key_stops(self, piece: Piece, low: Ints, stop: int) -> Ints:
        del piece
        return self.edges.positions[stop : stop + len(low)]

    # A lower bound on the bytes of a part that takes `seconds`; `keys`: count all, or none.
    def least_bytes(self, piece: Piece, seconds: float, *, keys: bool) -> float:
        mass, positions, (_, begin, end) = self.seconds, self._positions, piece
        # The last part has fewest queries, the first fewest keys.
        low = bisect_right(mass, mass[end] - seconds, begin + 1, end + 1) - 1
        stop = min(max(bisect_left(mass, mass[begin] + seconds, begin, end + 1), begin + 1), end)
        return (positions[end] - positions[low]) * self.sizes.query + (positions[stop] * self.sizes.kv if keys else 0.0)

    # End of the keys that a whole piece needs; `least_keys`: the smallest one of any part of it.
    def key_stop(self, piece: Piece) -> int:
        return self._positions[piece[2]]

    def least_keys(self, piece: Piece) -> int:
        return self._positions[piece[1] + 1]

    def num_queries(self, piece: Piece) -> int:
        return self._positions[piece[2]] - self._positions[piece[1]]

    # Runs of queries of pieces [n, 3]: row of the piece, start, stop.
    def spans(self, pieces: Ints) -> tuple[Ints, Ints, Ints]:
        positions = self.edges.positions
        return np.arange(len(pieces)), positions[pieces[:, 1]], positions[pieces[:, 2]]


class HeadTail:
    """Pairs [low, high) of mirrored blocks, counted from a fragment's ends."""

    def __init__(self, edges: Edges, sizes: TaskSizes) -> None:
        self.edges, self.sizes = edges, sizes
        blocks = edges.last - edges.first
        pairs = (blocks + 1) // 2
        self.ends = np.cumsum(pairs + 1) - 1
        self.begins = self.ends - pairs
        fragment = np.repeat(np.arange(len(blocks)), pairs + 1)
        pair = np.arange(len(fragment)) - self.begins[fragment]
        first, last = edges.first[fragment], edges.last[fragment]
        head, tail = edges.seconds[first + pair], edges.seconds[np.maximum(last - pair, first)]
        whole = edges.seconds[last] - edges.seconds[first]
        self.mass: Floats = np.where(
            2 * pair >= blocks[fragment], whole, head - edges.seconds[first] + edges.seconds[last] - tail
        )
        self.seconds: list[float] = self.mass.tolist()

    def _edges(self, fragment: int | Ints, index: Ints) -> tuple[Ints, Ints]:
        pair = index - self.begins[fragment]
        head = self.edges.first[fragment] + pair
        return head, np.maximum(self.edges.last[fragment] - pair, head)

    def items(self, size: int) -> _PairItems:
        return _PairItems(size)

    def bounds(self, piece: Piece) -> tuple[float, float]:
        outer = self.key_stop(piece)
        return outer - self.num_queries(piece) / 2, outer

    def lightest(self, piece: Piece) -> float:
        return self.seconds[piece[2]] - self.seconds[piece[2] - 1]

    def first_stop(self, piece: Piece) -> int:
        return piece[2]

    def num_bytes(self, piece: Piece, low: Ints, stop: int) -> Floats:
        positions = self.edges.positions
        (head, tail), inner = self._edges(piece[0], low), self._edges(piece[0], np.array(stop))
        queries = positions[tail] - positions[head] - (positions[inner[1]] - positions[inner[0]])
        return queries * self.sizes.query + positions[tail] * self.sizes.kv

    def key_stops(self, piece: Piece, low: Ints, stop: int) -> Ints:
        del stop
        return self.edges.positions[self._edges(piece[0], low)[1]]

    def least_bytes(self, piece: Piece, seconds: float, *, keys: bool) -> float:
        del seconds
        return self.least_keys(piece) * self.sizes.kv if keys else 0.0

    def key_stop(self, piece: Piece) -> int:
        return int(self.edges.positions[self._edges(piece[0], np.array(piece[1]))[1]])

    def least_keys(self, piece: Piece) -> int:
        return self.key_stop((piece[0], piece[2] - 1, piece[2]))

    def num_queries(self, piece: Piece) -> int:
        (outer_head, inner_head), (outer_tail, inner_tail) = (
            self.edges.positions[each].tolist() for each in self._edges(piece[0], np.array(piece[1:]))
        )
        return outer_tail - outer_head - (inner_tail - inner_head)

    def spans(self, pieces: Ints) -> tuple[Ints, Ints, Ints]:
        fragments, positions = pieces[:, 0], self.edges.positions
        (start, stop), (inner_start, inner_stop) = (
            [positions[each] for each in self._edges(fragments, pieces[:, bound])] for bound in (1, 2)
        )
        two = np.flatnonzero(inner_start < inner_stop)
        head_stop = stop.copy()
        head_stop[two] = inner_start[two]
        which = np.append(np.arange(len(pieces)), two)
        return which, np.append(start, inner_stop[two]), np.append(head_stop, stop[two])


Shards: TypeAlias = Plain | HeadTail


@dataclass(frozen=True, slots=True)
class Seconds:
    """S as knots. `pair_s`: the least time of another (query, key) pair, of the longest runs."""

    knots: Floats
    roots: Floats
    pair_s: float

    @classmethod
    def of(cls, cost: CostModel, longest: int) -> Seconds:
        tiles = -(-longest // TILE_TOKENS) + 1
        steps = np.unique(np.rint(2 ** np.arange(0, np.log2(tiles), 0.5)))
        knots = TILE_TOKENS * np.append(steps[steps < tiles], tiles)
        pairs = knots * (knots + 1) / 2
        times = np.array([cost.attention_s(n, run) for n, run in zip(pairs.tolist(), knots.tolist(), strict=True)])
        times = np.maximum.accumulate(times)
        times, pairs = np.append(0.0, times), np.append(0.0, pairs)
        return cls(np.append(0.0, knots), np.sqrt(times), float((np.diff(times) / np.diff(pairs)).min()))

    def upto(self, positions: Ints) -> Floats:
        return np.square(np.interp(positions, self.knots, self.roots))


@dataclass(frozen=True, slots=True)
class Edges:
    """Where the fragments of `owned` may be cut: at multiples of the block, and at their end. `owned`:
    `Placed` rows of the tokens that each rank holds outside attention.
    """

    owned: Ints
    first: Ints
    last: Ints
    positions: Ints
    seconds: Floats

    @classmethod
    def of(cls, owned: Ints, block: int, seconds: Seconds) -> Edges:
        starts, stops = owned[:, Placed.START], owned[:, Placed.STOP]
        counts = -(-(stops - starts) // block) + 1
        last = np.cumsum(counts) - 1
        first = last - counts + 1
        fragment = np.repeat(np.arange(len(owned)), counts)
        positions = starts[fragment] + block * (np.arange(len(fragment)) - first[fragment])
        upto = positions.copy()
        tile = min(block, TILE_TOKENS)
        upto[last] = starts + -(-(stops - starts) // tile) * tile
        positions[last] = stops
        return cls(owned, first, last, positions, seconds.upto(upto))
