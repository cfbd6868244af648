"""Choice of the part of an item to migrate: the closed forms of DistCA, Appendix B, derived again.

An item is the attention of queries [start, stop) to all keys before them. It has (stop^2 - start^2)
/ 2 pairs, as areas go; `share` of them shall go to another server, by moving n queries that see the
keys up to y. Their bytes are n size_q + max(0, y - resident) size_kv, where the server has the
first `resident` keys already (the paper counts all of them).

Plain shards are [y - n, y), so that with c = share (stop^2 - start^2) the area says n (2 y - n) =
c, or y = (c / n + n) / 2 and n = y - sqrt(y^2 - c). The bytes are convex in n, least at n = sqrt(c
r) with r = size_kv / (2 size_q + size_kv), which is y = sqrt(c) (1 / sqrt(r) + sqrt(r)) / 2. The
item's ends bound it: y is stop at most, and y - n = start gives sqrt(start^2 + c), the least. (The
paper bounds n instead, and prints the latter without its last term, - start, and so more queries
than the item has: with share 1 it exceeds stop - start unless start is 0.) Keys that are resident
are free, and then more keys mean fewer queries: y is at least as many.

Head-tail pairs are a head [start + i, start + j) and the tail [stop - j, stop - i) that mirrors it;
a row of the head and its mirror see as many keys as any other two, so that a share of the pairs is
the same share of the queries. The tail needs all keys up to its end, wherever the pair is cut (of a
whole document: length - i), fewest for the innermost part. (The paper takes the head's area alone.)
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np

from megatron_balance.cost.base import Floats
from megatron_balance.ir.arrays import Ints
from megatron_balance.planners.distca.work import Edges


@dataclass(frozen=True, slots=True)
class TaskSizes:
    """Bytes of a query and its output, and of a key and its value."""

    query: float
    kv: float


Piece: TypeAlias = tuple[int, int, int]
"""A fragment, and the first and the last of its edges (of its pairs of blocks) that bound a part of
it.
"""

Part: TypeAlias = tuple[Floats, Floats]
"""Queries that move, and up to where they need keys."""


class Items(Protocol):
    """Items by row, with memory for what is worked out about all of them at once."""

    def set(self, row: int, bounds: tuple[float, float], seconds: float) -> None:
        """Fill a row with an item of these `Shards.bounds` that takes `seconds`."""
        ...

    def only(self, rows: Ints, size: int) -> Items:
        """A copy of some rows, in this order, with spare rows up to `size`."""
        ...

    def cheapest(self, seconds: Floats, resident: Floats | None = None) -> Part:
        """For each row the part that takes `seconds` of it (more than 0) for the fewest bytes, were
        there no blocks.

        `resident`: number of first keys that the target has already; none if not given. The result
        holds until the next call and may be written to.
        """
        ...


_ALL = 1 - 1e-14
"""Share that counts as all of an item, so that no rounding makes it more."""


class PlainItems:
    """Plain shards of items [start, stop), of which the squares are kept."""

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

    def only(self, rows: Ints, size: int) -> PlainItems:
        items = PlainItems(size, self._sizes)
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


class PairItems:
    """Head-tail pairs of items whose tails are [inner, outer)."""

    def __init__(self, size: int) -> None:
        self._values = np.ones((2, size))
        self._inner, self._rate = self._values
        self._queries, self._key_stop = np.empty((2, size))

    def set(self, row: int, bounds: tuple[float, float], seconds: float) -> None:
        self._inner[row], self._rate[row] = bounds[0], (bounds[1] - bounds[0]) / seconds

    def only(self, rows: Ints, size: int) -> PairItems:
        items = PairItems(size)
        items._values[:, : len(rows)] = self._values[:, rows]
        return items

    def cheapest(self, seconds: Floats, resident: Floats | None = None) -> Part:
        del resident  # all queries see as many keys, wherever they are
        queries = np.multiply(seconds, self._rate, out=self._queries)
        key_stop = np.add(self._inner, queries, out=self._key_stop)
        queries *= 2
        return queries, key_stop


class Shards(Protocol):
    """The way in which fragments are cut.

    Indices are into `mass`, seconds of attention summed up along each fragment, from its begin to
    its end.
    """

    mass: Floats
    seconds: list[float]
    """`mass` as a list, for look-ups of one value."""
    begins: Ints
    ends: Ints

    def items(self, size: int) -> Items:
        """Make room for `size` items."""
        ...

    def bounds(self, piece: Piece) -> tuple[float, float]:
        """The two positions that `Items.set` takes for a piece."""
        ...

    def lightest(self, piece: Piece) -> float:
        """Seconds of the lightest part that can be cut off a piece at whole blocks."""
        ...

    def first_stop(self, piece: Piece) -> int:
        """The least index at which a part of the piece may stop; from there on it may stop
        anywhere.
        """
        ...

    def num_bytes(self, piece: Piece, low: Ints, stop: int) -> Floats:
        """Bytes to migrate parts of a piece, all their keys counted: from each `low` to `stop`, to
        the index after it, ...
        """
        ...

    def key_stops(self, piece: Piece, low: Ints, stop: int) -> Ints:
        """End of the keys that these parts need."""
        ...

    def least_bytes(self, piece: Piece, seconds: float, *, keys: bool) -> float:
        """A lower bound on the bytes of a part of a piece that takes `seconds` (at most the
        piece's). `keys`: count all, or none.
        """
        ...

    def key_stop(self, piece: Piece) -> int:
        """End of the keys that a whole piece needs."""
        ...

    def least_keys(self, piece: Piece) -> int:
        """The smallest `key_stop` of any part of a piece."""
        ...

    def num_queries(self, piece: Piece) -> int:
        """Number of queries of a piece."""
        ...

    def spans(self, pieces: Ints) -> tuple[Ints, Ints, Ints]:
        """Runs of queries of pieces [n, 3]: row of the piece, start, stop."""
        ...


class Plain:
    """Shards [low, high) of edges."""

    def __init__(self, edges: Edges, sizes: TaskSizes) -> None:
        self.edges, self.sizes = edges, sizes
        self._before: Floats = np.multiply(
            edges.positions, sizes.query, dtype=np.float64
        )  # bytes of the queries up to an edge
        self._upto: Floats = np.multiply(
            edges.positions, sizes.query + sizes.kv, dtype=np.float64
        )  # and of the keys, too
        self.mass, self.begins, self.ends = edges.seconds, edges.first, edges.last
        self._positions: list[int] = edges.positions.tolist()
        self.seconds: list[float] = edges.seconds.tolist()

    def items(self, size: int) -> PlainItems:
        return PlainItems(size, self.sizes)

    def bounds(self, piece: Piece) -> tuple[int, int]:
        return self._positions[piece[1]], self._positions[piece[2]]

    def lightest(self, piece: Piece) -> float:
        mass, low, high = self.seconds, piece[1], piece[2]
        return min(mass[low + 1] - mass[low], mass[high] - mass[high - 1])  # the last block may be short

    def first_stop(self, piece: Piece) -> int:
        return piece[1] + 1

    def num_bytes(self, piece: Piece, low: Ints, stop: int) -> Floats:
        del piece
        return self._upto[stop : stop + len(low)] - self._before[low]

    def key_stops(self, piece: Piece, low: Ints, stop: int) -> Ints:
        del piece
        return self.edges.positions[stop : stop + len(low)]

    def least_bytes(self, piece: Piece, seconds: float, *, keys: bool) -> float:
        mass, positions, (_, begin, end) = self.seconds, self._positions, piece
        low = (
            bisect_right(mass, mass[end] - seconds, begin + 1, end + 1) - 1
        )  # the last part has fewest queries, the first fewest keys
        stop = min(max(bisect_left(mass, mass[begin] + seconds, begin, end + 1), begin + 1), end)
        return (positions[end] - positions[low]) * self.sizes.query + (positions[stop] * self.sizes.kv if keys else 0.0)

    def key_stop(self, piece: Piece) -> int:
        return self._positions[piece[2]]

    def least_keys(self, piece: Piece) -> int:
        return self._positions[piece[1] + 1]

    def num_queries(self, piece: Piece) -> int:
        return self._positions[piece[2]] - self._positions[piece[1]]

    def spans(self, pieces: Ints) -> tuple[Ints, Ints, Ints]:
        positions = self.edges.positions
        return np.arange(len(pieces)), positions[pieces[:, 1]], positions[pieces[:, 2]]


class HeadTail:
    """Pairs [low, high) of mirrored blocks, counted from the ends of a fragment; the middle block
    of an odd number is its own mirror.
    """

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
        """Edges at which the head of the pairs from `index` inwards begins and their tail ends;
        they meet in the middle.
        """
        pair = index - self.begins[fragment]
        head = self.edges.first[fragment] + pair
        return head, np.maximum(self.edges.last[fragment] - pair, head)

    def items(self, size: int) -> PairItems:
        return PairItems(size)

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
