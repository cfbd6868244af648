"""Tables of integers: `Rows`, and names of their columns: `rows[:, Transfer.SRC]`, not `rows[:, 6]`.

One class per table. Names in capitals are columns, or slices and tuples of neighbouring columns;
`WIDTH` is the number of columns. All tables are int64.
"""

import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

# A plan for 1,024 ranks has a million regions; a frozen dataclass for each would take seconds. `Rows`
# is one `bytes` object of row-major int64, hashable and comparable, that NumPy reads without a copy
# (`numpy.frombuffer(rows.data, "<i8")`) and the standard library through `memoryview.cast`.

assert sys.byteorder == "little", "plans are exchanged as little-endian int64"


@dataclass(frozen=True, slots=True)
class Rows:
    """`len(self)` rows of `width` int64 each."""

    width: int
    data: bytes = b""

    @classmethod
    def of(cls, width: int, rows: Iterable[Sequence[int]]) -> "Rows":
        """Rows from Python sequences, each of length `width`."""
        flat = array("q")
        for row in rows:
            if len(row) != width:
                raise ValueError(f"row {tuple(row)} has {len(row)} columns, expected {width}")
            flat.extend(row)
        return cls(width, flat.tobytes())

    def __len__(self) -> int:
        return len(self.data) // (8 * self.width)

    def __bool__(self) -> bool:
        return bool(self.data)

    def __repr__(self) -> str:
        shown = [row for row, _ in zip(self, range(8), strict=False)]
        more = f", ... {len(self) - 8} more" if len(self) > 8 else ""
        return f"Rows({self.width}, [{', '.join(map(str, shown))}{more}])"

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        flat = memoryview(self.data).cast("q")
        for i in range(0, len(flat), self.width):
            yield tuple(flat[i : i + self.width])


class Transfer:
    """One transfer of an Exchange: a region of one kind from one rank to another."""

    WIDTH = 8
    KIND, SEQ, START, STOP, HEAD_START, HEAD_STOP, SRC, DST = range(8)
    # seq, start, stop, head_start, head_stop: a `Region`.
    REGION = slice(1, 6)
    # seq, start, stop: a `Fragment`.
    SPAN = slice(1, 4)
    # kind and region: a `Value`.
    VALUE = slice(0, 6)
    HEADS = slice(4, 6)
    # src, dst.
    ENDS = slice(6, 8)


class Pair:
    """One rectangle of an Attend or AttendGrad: queries and the keys that they may see."""

    WIDTH = 9
    SEQ, Q_START, Q_STOP, Q_HEAD_START, Q_HEAD_STOP, K_START, K_STOP, KV_HEAD_START, KV_HEAD_STOP = range(9)
    # The query `Region`.
    QUERY = slice(0, 5)
    QUERY_SPAN = slice(0, 3)
    # The key `Region`.
    KEY = (0, 5, 6, 7, 8)
    # The key region without its sequence.
    KEY_COLUMNS = slice(5, 9)
    Q_SPAN = slice(1, 3)
    K_SPAN = slice(5, 7)
    Q_HEADS = slice(3, 5)
    KV_HEADS = slice(7, 9)
    # Queries and keys: the columns of `ir.arrays.Rectangles`.
    SPANS = (1, 2, 5, 6)


class Value:
    """One region of one kind, as a Merge lists it."""

    WIDTH = 6
    KIND, SEQ, START, STOP, HEAD_START, HEAD_STOP = range(6)
    REGION = slice(1, 6)
    SPAN = slice(1, 4)


class Region:
    """Tokens of a sequence times heads."""

    WIDTH = 5
    SEQ, START, STOP, HEAD_START, HEAD_STOP = range(5)
    SPAN = slice(0, 3)
    HEADS = slice(3, 5)


class Fragment:
    """Tokens of a sequence, all heads: what one rank holds, in order."""

    WIDTH = 3
    SEQ, START, STOP = range(3)


class Placed:
    """A fragment and the rank that holds it."""

    WIDTH = 4
    RANK, SEQ, START, STOP = range(4)
    FRAGMENT = slice(1, 4)


class Task:
    """One task of a task table: queries of a sequence, the keys before them, the rank that attends."""

    WIDTH = 6
    RANK, SEQ, Q_START, Q_STOP, K_START, K_STOP = range(6)
    QUERY = slice(1, 4)
    KEYS = slice(4, 6)
    # Queries and keys: the columns of `ir.arrays.Rectangles`.
    SPANS = slice(2, 6)


class Move:
    """One entry of the remap: tokens that `SRC` attends to and `DST` owns outside attention."""

    WIDTH = 3
    SRC, DST, TOKENS = range(3)


class Route:
    """One piece of a routed transfer and its two proxies."""

    WIDTH = 5
    SRC, DST, PIECE, SEND_PROXY, RECEIVE_PROXY = range(5)
    PAIR = slice(0, 2)
    # The ranks that a piece passes, in order.
    STATIONS = (0, 3, 4, 1)


class Message:
    """Tokens that one exchange moves of one kind and head span from rank to rank (`analysis.wire`)."""

    WIDTH = 7
    EXCHANGE, SRC, DST, KIND, HEAD_START, HEAD_STOP, TOKENS = range(7)
    # src, dst.
    ENDS = slice(1, 3)
    # exchange, src, dst: all that is packed together.
    PARCEL = slice(0, 3)
    # All but the tokens.
    KEY = slice(0, 6)


class Held:
    """A fragment that a rank attends to (`compile.remap.fragments`).

    `ZONE`: the index of its zone. `SENT_ON`: 1 where the first exchange of its zone sends it on, 2
    where it does unless the mask is causal.
    """

    WIDTH = 6
    RANK, SEQ, START, STOP, ZONE, SENT_ON = range(6)
    FRAGMENT = slice(1, 4)
    PLACED = slice(0, 4)


class RemoteHeld:
    """A part of a `Held` fragment (row `FRAGMENT`) that another rank owns outside attention."""

    WIDTH = 8
    SEQ, START, STOP, OWNER, HOLDER, ZONE, SENT_ON, FRAGMENT = range(8)
    SPAN = slice(0, 3)


class Neighbours:
    """Two runs of a sequence that follow one another, of which a Compose makes one: [start, middle)
    and [middle, stop), with their kind and heads (`ir.recurrent`).
    """

    WIDTH = 7
    KIND, SEQ, START, MIDDLE, STOP, HEAD_START, HEAD_STOP = range(7)
    HEADS = slice(5, 7)
