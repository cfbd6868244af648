"""The table of what the ranks of a zone send one another: every comm pattern says it once, and
transfers, messages, received tokens and traffic of rounds are selections of it.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from megatron_balance.ir.arrays import Ints, overlaps, ranges
from megatron_balance.ir.columns import Fragment, Message, Rows, Transfer
from megatron_balance.ir.program import Collective, Exchange, Kind

# About so many rows are made at once, which keeps them in the cache.
_ROWS = 1 << 14


class Send:
    """Columns of a table of sends: those of `ir.columns.Message`, with a block in place of tokens.

    `EXCHANGE`: counted from the zone's first. `DST`: -1 in an all-gather: all others of its group.
    `HOP`: of a block that goes round, which of its hops this is, from 1 on; else 0.
    """

    WIDTH = 8
    EXCHANGE, SRC, DST, KIND, HEAD_START, HEAD_STOP, BLOCK, HOP = range(8)
    MESSAGE = slice(0, 6)
    """All columns that a message has, too."""


class Blocks(NamedTuple):
    """Rows (seq, start, stop) of blocks: those of block b are `rows[begin[b] : begin[b + 1]]`.

    `reach` [len(rows)]: the last hop that a row makes; None: all rows of a block go together.
    """

    rows: Ints
    begin: Ints
    reach: Ints | None = None

    @classmethod
    def of(cls, blocks: Sequence[Ints]) -> "Blocks":
        rows = np.concatenate([np.empty((0, 3), dtype=np.int64), *blocks])
        return cls(rows, np.cumsum([0, *map(len, blocks)]))


class Call(NamedTuple):
    """How an exchange is made: as in `ir.program.Exchange`."""

    collective: Collective = "p2p"
    group: tuple[int, ...] = ()
    moves: bool = False


# A row sends one block, which is some rows of tokens that travel together. So rows are few where
# fragments are many, and a message needs no fragment at all.
@dataclass(frozen=True, slots=True)
class Sends:
    """Sends of all ranks, or of those that one rank sends or receives, by exchange.

    `rows`: `Send` rows. `tokens` makes [blocks], or [blocks, hops] where blocks go round: tokens of
    each block, or of what of it makes a hop. `blocks`: makes their rows. `calls`: of exchanges that
    are collectives, also of those in which a rank of the group sends and receives nothing itself.

    `again`: what a replayed backward sends in place of it, by the forward's exchanges; None: the
    same. `silent`: exchanges in which it then sends nothing unless `again` says so.
    """

    rows: Ints
    tokens: Callable[[], Ints]
    blocks: Callable[[], Blocks]
    calls: Mapping[int, Call] = field(default_factory=dict[int, Call])
    again: "Sends | None" = None
    silent: Collection[int] = ()

    def messages(self) -> Ints:
        """Rows of `ir.columns.Message`."""
        rows = np.empty((len(self.rows), Message.WIDTH), dtype=np.int64)
        rows[:, Message.KEY] = self.rows[:, Send.MESSAGE]
        block, tokens = self.rows[:, Send.BLOCK], self.tokens()
        rows[:, Message.TOKENS] = tokens[block] if tokens.ndim == 1 else tokens[block, self.rows[:, Send.HOP]]
        return rows

    def transfers(self) -> tuple[Ints, Ints]:
        """(exchange of each, rows of `ir.columns.Transfer`), by exchange."""
        return self._transfers(self.rows, self.blocks())

    def _transfers(self, sends: Ints, blocks: Blocks) -> tuple[Ints, Ints]:
        block = sends[:, Send.BLOCK]
        send, at = ranges(blocks.begin[block], blocks.begin[block + 1])
        if blocks.reach is not None:
            goes = np.flatnonzero(blocks.reach.take(at) >= sends[:, Send.HOP].take(send))
            send, at = send[goes], at[goes]
        each = np.empty((len(sends), Transfer.WIDTH), dtype=np.int64)
        each[:, Transfer.KIND] = sends[:, Send.KIND]
        each[:, Transfer.HEADS] = sends[:, [Send.HEAD_START, Send.HEAD_STOP]]
        each[:, Transfer.ENDS] = sends[:, [Send.SRC, Send.DST]]
        table = each.take(send, axis=0)
        table[:, Transfer.SPAN] = blocks.rows.take(at, axis=0)
        return sends[:, Send.EXCHANGE].take(send), table

    def exchanges(self, base: int) -> dict[int, Exchange]:
        """The exchanges by id, counted from the zone's first, which is `base`, ascending."""
        blocks = self.blocks()
        tables: defaultdict[int, list[bytes]] = defaultdict(list)
        for turn, _ in in_turns(np.diff(blocks.begin)[self.rows[:, Send.BLOCK]]):
            number, table = self._transfers(self.rows[turn], blocks)
            first = int(number[0]) if len(number) else 0
            for at, data in enumerate(split_rows(table, np.bincount(number - first)), first):
                if data:
                    tables[at].append(data)
        made: dict[int, Exchange] = {}
        for at in sorted(tables.keys() | self.calls.keys()):
            collective, group, moves = self.calls.get(at, Call())
            made[at] = Exchange(base + at, Rows(Transfer.WIDTH, b"".join(tables[at])), collective, group, moves=moves)
        return made

    def replays(self, base: int, forward: Mapping[int, Exchange]) -> list[tuple[int, Exchange]]:
        """Exchanges that a replayed backward makes in place of `forward`, by id."""
        if self.again is None:
            return []
        made = self.again.exchanges(base)
        made |= {
            at: Exchange(base + at, Rows(Transfer.WIDTH)) for at in self.silent if at in forward and at not in made
        }
        return [(base + at, made[at]) for at in sorted(made)]


def table_of(*columns: Ints | int) -> Ints:
    """Columns broadcast against one another, as rows: of `Send` or of `ir.columns.Message`."""
    return np.stack([column.ravel() for column in np.broadcast_arrays(*columns)], axis=1).astype(np.int64)


def intersections(wanted: Ints, held: Ints) -> tuple[Ints, Ints, Ints]:
    """(row of `wanted`, row of `held`, tokens of both) of every pair that shares tokens, by row of
    `wanted`, then of `held`.

    Rows of both, and tokens, are (seq, start, stop).
    """
    row, other = overlaps(wanted, held)
    order = np.lexsort((other, row))
    row, other = row[order], other[order]
    both = wanted[row]
    both[:, Fragment.START] = np.maximum(both[:, Fragment.START], held[other, Fragment.START])
    both[:, Fragment.STOP] = np.minimum(both[:, Fragment.STOP], held[other, Fragment.STOP])
    return row, other, both


def messages_of(step: int, transfers: Ints) -> Ints:
    kinds, ends, heads = transfers[:, Transfer.KIND], transfers[:, Transfer.ENDS].T, transfers[:, Transfer.HEADS].T
    return table_of(step, *ends, kinds, *heads, transfers[:, Transfer.STOP] - transfers[:, Transfer.START])


def transfers_of(kind: Kind, fragments: Ints, heads: tuple[int, int], src: Ints | int, dst: Ints | int) -> Ints:
    """Transfer rows of `fragments`, rows (seq, start, stop, ...)."""
    rows = np.empty((len(fragments), Transfer.WIDTH), dtype=np.int64)
    rows[:, Transfer.KIND] = kind
    rows[:, Transfer.SPAN] = fragments[:, : Fragment.WIDTH]
    rows[:, Transfer.HEADS] = heads
    rows[:, Transfer.SRC], rows[:, Transfer.DST] = src, dst
    return rows


def in_turns(counts: Ints) -> Iterator[tuple[slice, slice]]:
    """Runs of a table that is made in parts of `counts` rows: which parts, and their rows, together
    not much more than the cache holds.
    """
    ends = np.append(0, counts.cumsum())
    step = max(1, _ROWS * len(counts) // max(1, int(ends[-1])))
    for first in range(0, len(counts), step):
        last = min(first + step, len(counts))
        yield slice(first, last), slice(int(ends[first]), int(ends[last]))


def split_rows(table: Ints, counts: Ints) -> list[bytes]:
    """Consecutive runs of `counts` rows of `table`, each as one little-endian block of bytes."""
    ends = counts.cumsum().tolist()
    table = np.ascontiguousarray(table, dtype="<i8")
    return [table[a:b].tobytes() for a, b in zip([0, *ends], ends, strict=False)]
