"""Rows that comm patterns make: pairs of tokens, transfers and messages."""

from __future__ import annotations

import numpy as np

from megatron_balance.ir.arrays import Ints
from megatron_balance.ir.columns import Fragment, Message, Transfer
from megatron_balance.ir.intervals import overlaps
from megatron_balance.ir.program import Kind


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


def causal_pairs(num_queries: Ints) -> Ints:
    """Pairs of the first `num_queries` queries of a sequence with the keys that they see."""
    return num_queries * (num_queries + 1) // 2


def messages_of(step: int, transfers: Ints) -> Ints:
    """Messages of transfer rows (`ir.program.Exchange`) of one exchange."""
    rows = np.empty((len(transfers), Message.WIDTH), dtype=np.int64)
    rows[:, Message.EXCHANGE], rows[:, Message.KIND] = step, transfers[:, Transfer.KIND]
    rows[:, Message.ENDS] = transfers[:, Transfer.ENDS]
    rows[:, Message.HEAD_START], rows[:, Message.HEAD_STOP] = transfers[:, Transfer.HEADS].T
    rows[:, Message.TOKENS] = transfers[:, Transfer.STOP] - transfers[:, Transfer.START]
    return rows


def messages_from(
    step: Ints | int, src: Ints | int, dst: Ints | int, kind: Kind, heads: tuple[int, int], tokens: Ints
) -> Ints:
    """Rows of messages; the columns are broadcast against one another."""
    columns = np.broadcast_arrays(step, src, dst, np.int64(kind), *heads, tokens)
    return np.stack([column.ravel() for column in columns], axis=1).astype(np.int64)


def transfers_of(kind: Kind, fragments: Ints, heads: tuple[int, int], src: Ints | int, dst: Ints | int) -> Ints:
    """Transfer rows of `fragments`, rows (seq, start, stop, ...)."""
    rows = np.empty((len(fragments), Transfer.WIDTH), dtype=np.int64)
    rows[:, Transfer.KIND] = kind
    rows[:, Transfer.SPAN] = fragments[:, : Fragment.WIDTH]
    rows[:, Transfer.HEADS] = heads
    rows[:, Transfer.SRC], rows[:, Transfer.DST] = src, dst
    return rows


def split_rows(table: Ints, counts: Ints) -> list[bytes]:
    """Consecutive runs of `counts` rows of `table`, each as one little-endian block of bytes."""
    ends = counts.cumsum().tolist()
    table = np.ascontiguousarray(table, dtype="<i8")
    return [table[a:b].tobytes() for a, b in zip([0, *ends], ends, strict=False)]
