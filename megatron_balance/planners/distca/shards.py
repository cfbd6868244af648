"""Which part of an item to migrate: the closed forms of DistCA, Appendix B, derived again.

An item is the attention of queries [start, stop) to all keys before them. It has (stop^2 - start^2) / 2 pairs, as areas go; `share` of
them shall go to another server, by moving n queries that see the keys up to y. Their bytes are n size_q + max(0, y - resident) size_kv,
where the server has the first `resident` keys already (the paper counts all of them).

Plain shards are [y - n, y), so that with c = share (stop^2 - start^2) the area says n (2 y - n) = c, or y = (c / n + n) / 2. The bytes are
convex in n, least at n = sqrt(c size_kv / (2 size_q + size_kv)). The item's ends bound n: y = stop gives stop - sqrt(stop^2 - c), the
least, and y - n = start gives sqrt(start^2 + c) - start, the most. (The paper prints the latter without its last term, and so more
queries than the item has: with share 1 it exceeds stop - start unless start is 0.) Keys that are resident are free, and then more
keys mean fewer queries.

Head-tail pairs are a head [start + i, start + j) and the tail [stop - j, stop - i) that mirrors it; a row of the head and its mirror see as
many keys as any other two, so that a share of the pairs is the same share of the queries. The tail needs all keys up to its end,
wherever the pair is cut (of a whole document: length - i), fewest for the innermost part. (The paper takes the head's area alone.)
"""

from __future__ import annotations

from typing import Protocol, TypeAlias

import numpy as np

from megatron_balance.cost.base import Floats
from megatron_balance.passes.tables import Ints
from megatron_balance.planners.distca.work import Edges

Piece: TypeAlias = tuple[int, int, int]
"""A fragment, and the first and the last of its edges (of its pairs of blocks) that bound a part of it."""

Part: TypeAlias = tuple[Floats, Floats]
"""Queries that move, and up to where they need keys."""


def plain_part(start: Floats, stop: Floats, share: Floats, resident: Floats, size_q: float, size_kv: float) -> Part:
    """The plain shards that hold `share` (more than 0) of the pairs of items for the fewest bytes."""
    before, whole = start * start, stop * stop
    area = share * (whole - before)
    least = stop - np.sqrt(np.maximum(whole - area, 0.0))
    most = np.sqrt(before + area) - start
    queries = np.maximum(np.minimum(np.sqrt(area * (size_kv / (2 * size_q + size_kv))), most), least)
    key_stop = np.minimum((area / queries + queries) / 2, stop)
    free = np.minimum(resident, stop)
    if np.count_nonzero(free > key_stop):
        key_stop = np.maximum(key_stop, free)
        queries = key_stop - np.sqrt(np.maximum(key_stop * key_stop - area, 0.0))
    return queries, key_stop


def pair_part(inner: Floats, outer: Floats, share: Floats) -> Part:
    """The head-tail pairs that hold `share` of those whose tails are [inner, outer), for the fewest bytes; queries of both halves."""
    moved = share * (outer - inner)
    return 2 * moved, inner + moved


class Shards(Protocol):
    """How fragments are cut. Indices are into `mass`, seconds of attention summed up along each fragment, from its begin to its end."""

    mass: Floats
    begins: Ints
    ends: Ints

    def bounds(self, piece: Piece) -> tuple[float, float]:
        """What `part` is told of a piece."""
        ...

    def lightest(self, piece: Piece) -> float:
        """Seconds of the lightest part that can be cut off a piece at whole blocks."""
        ...

    def part(self, bounds: tuple[Floats, Floats], share: Floats, resident: Floats) -> Part:
        """The cheapest part of pieces with these bounds, were there no blocks."""
        ...

    def stops(self, piece: Piece) -> Ints:
        """Indices at which a part of the piece may stop."""
        ...

    def key_stops(self, piece: Piece, low: Ints, high: Ints) -> Ints:
        """Up to where the parts [low, high) need keys."""
        ...

    def queries(self, piece: Piece, low: Ints, high: Ints) -> Ints:
        """How many queries the parts [low, high) have."""
        ...

    def key_stop(self, piece: Piece) -> int:
        """The same of a piece as it is."""
        ...

    def spans(self, piece: Piece) -> list[tuple[int, int]]:
        """Queries of a piece."""
        ...


class Plain:
    """Shards [low, high) of edges. `size_q`, `size_kv`: bytes of a token."""

    def __init__(self, edges: Edges, size_q: float, size_kv: float) -> None:
        self.edges, self.size_q, self.size_kv = edges, size_q, size_kv
        self.mass, self.begins, self.ends = edges.seconds, edges.first, edges.last
        self._positions: list[int] = edges.positions.tolist()
        self._seconds: list[float] = edges.seconds.tolist()

    def bounds(self, piece: Piece) -> tuple[int, int]:
        return self._positions[piece[1]], self._positions[piece[2]]

    def lightest(self, piece: Piece) -> float:
        mass, low, high = self._seconds, piece[1], piece[2]
        return min(mass[low + 1] - mass[low], mass[high] - mass[high - 1])  # the last block may be short

    def part(self, bounds: tuple[Floats, Floats], share: Floats, resident: Floats) -> Part:
        return plain_part(*bounds, share, resident, self.size_q, self.size_kv)

    def stops(self, piece: Piece) -> Ints:
        return np.arange(piece[1] + 1, piece[2] + 1)

    def key_stops(self, piece: Piece, low: Ints, high: Ints) -> Ints:
        del piece, low
        return self.edges.positions[high]

    def queries(self, piece: Piece, low: Ints, high: Ints) -> Ints:
        del piece
        return self.edges.positions[high] - self.edges.positions[low]

    def key_stop(self, piece: Piece) -> int:
        return self._positions[piece[2]]

    def spans(self, piece: Piece) -> list[tuple[int, int]]:
        return [self.bounds(piece)]


class HeadTail:
    """Pairs [low, high) of mirrored blocks, counted from the ends of a fragment; the middle block of an odd number is its own mirror."""

    def __init__(self, edges: Edges) -> None:
        self.edges = edges
        blocks = edges.last - edges.first
        pairs = (blocks + 1) // 2
        self.ends = np.cumsum(pairs + 1) - 1
        self.begins = self.ends - pairs
        fragment = np.repeat(np.arange(len(blocks)), pairs + 1)
        pair = np.arange(len(fragment)) - self.begins[fragment]
        first, last = edges.first[fragment], edges.last[fragment]
        head, tail = edges.seconds[first + pair], edges.seconds[np.maximum(last - pair, first)]
        whole = edges.seconds[last] - edges.seconds[first]
        self.mass: Floats = np.where(2 * pair >= blocks[fragment], whole, head - edges.seconds[first] + edges.seconds[last] - tail)

    def _edges(self, fragment: int, index: Ints) -> tuple[Ints, Ints]:
        """Edges at which the head of the pairs from `index` inwards begins and their tail ends; they meet in the middle."""
        pair = index - self.begins[fragment]
        head = self.edges.first[fragment] + pair
        return head, np.maximum(self.edges.last[fragment] - pair, head)

    def bounds(self, piece: Piece) -> tuple[float, float]:
        spans = self.spans(piece)
        outer = spans[-1][1]
        return outer - sum(stop - start for start, stop in spans) / 2, outer

    def lightest(self, piece: Piece) -> float:
        return float(self.mass[piece[2]] - self.mass[piece[2] - 1])

    def part(self, bounds: tuple[Floats, Floats], share: Floats, resident: Floats) -> Part:
        del resident  # all queries see as many keys, wherever they are
        return pair_part(*bounds, share)

    def stops(self, piece: Piece) -> Ints:
        return np.array([piece[2]])

    def key_stops(self, piece: Piece, low: Ints, high: Ints) -> Ints:
        del high
        return self.edges.positions[self._edges(piece[0], low)[1]]

    def queries(self, piece: Piece, low: Ints, high: Ints) -> Ints:
        inside, outside = (self._tokens(piece[0], index) for index in (high, low))
        return outside - inside

    def key_stop(self, piece: Piece) -> int:
        return self.spans(piece)[-1][1]

    def _tokens(self, fragment: int, index: Ints) -> Ints:
        """Tokens of the pairs from `index` inwards."""
        head, tail = self._edges(fragment, index)
        return self.edges.positions[tail] - self.edges.positions[head]

    def spans(self, piece: Piece) -> list[tuple[int, int]]:
        fragment, low, high = piece
        heads, tails = self._edges(fragment, np.array([low, high]))
        edges = self.edges.positions[np.concatenate([heads, tails])].tolist()
        head_start, head_stop, tail_stop, tail_start = edges
        if head_stop >= tail_start:
            return [(head_start, tail_stop)]
        return [(head_start, head_stop), (tail_start, tail_stop)]
