"""The program of a plan's recurrent layers, from its linear layout alone.

The ranks of a sequence share its heads: each composes the summaries of all pieces for its heads and
hands the states back. So there are two rounds however many ranks there are, and what a rank sends
grows with the pieces that it holds (an all-gather of summaries grows with all pieces). The rows of
the convolution's halo come in a round before, since summaries are made of its outputs.
"""

from collections.abc import Iterator, Sequence
from typing import assert_never

import numpy as np

from megatron_balance.compile.remap import layouts
from megatron_balance.ir.arrays import (
    Bools,
    Ints,
    as_array,
    as_rows,
    key,
    numbered,
    overlaps,
    ranges,
    run_bounds,
    union,
)
from megatron_balance.ir.columns import Fragment, Neighbours, Placed, Rows, Transfer
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.ir.program import Exchange
from megatron_balance.ir.recurrent import Compose, RecurrentKind, RecurrentOp, RecurrentProgram


def compile_recurrent(plan: MicrobatchPlan, num_heads: int, halo: int) -> RecurrentProgram:
    """The program, forward and backward, of recurrent layers with `num_heads` heads of states on
    every rank (0: a convolution alone) and convolutions that read `halo` rows before a token.
    """
    placed = layouts(plan)
    owned = [as_rows(placed[placed[:, Placed.RANK] == rank][:, Placed.FRAGMENT]) for rank in range(plan.num_ranks)]
    return program_of(plan.lengths, owned, num_heads, halo)


def program_of(lengths: Sequence[int], owned: Sequence[Rows], num_heads: int, halo: int) -> RecurrentProgram:
    """As `compile_recurrent`, for a linear layout: `Fragment` rows by rank."""
    held = pieces(owned)
    forward = tuple(_forward(held, num_heads, halo))
    backward = tuple(_transposed(forward, held, np.array(lengths, dtype=np.int64)))
    return RecurrentProgram(tuple(lengths), num_heads, halo, tuple(owned), forward, backward)


def pieces(owned: Sequence[Rows]) -> Ints:
    """The pieces of all ranks, `Placed` rows by sequence, then by start."""
    rows, ranks = numbered(list(enumerate(owned)), Fragment.WIDTH)
    runs = union(np.column_stack([ranks, rows]))
    return runs[np.lexsort((runs[:, Placed.START], runs[:, Placed.SEQ]))]


def halos(held: Ints, halo: int) -> Ints:
    """Rows before a rank's `pieces` that their convolution reads and another rank owns: `Transfer`
    rows, each token once to a rank, from as many owners as they have.
    """
    inside = held[held[:, Placed.START] > 0]
    start = inside[:, Placed.START]
    before = np.column_stack([inside[:, : Placed.START], np.maximum(start - halo, 0), start])
    wanted = union(before)  # pieces of few tokens lie in one another's halos
    want, have = overlaps(wanted[:, Placed.FRAGMENT], held[:, Placed.FRAGMENT])
    seq, (src, dst) = held[have, Placed.SEQ], (held[have, Placed.RANK], wanted[want, Placed.RANK])
    start = np.maximum(held[have, Placed.START], wanted[want, Placed.START])
    stop = np.minimum(held[have, Placed.STOP], wanted[want, Placed.STOP])
    rows = np.column_stack([np.full(len(seq), RecurrentKind.ROWS), seq, start, stop, 0 * seq, 0 * seq + 1, src, dst])
    return rows[src != dst]


def carries_map(rows: Ints) -> Bools:
    """Whether each of the `Transfer` rows brings M beside U: not a state, which the first summary of a
    sequence is, and none in the backward.
    """
    return (rows[:, Transfer.KIND] == RecurrentKind.SUMMARY) & (rows[:, Transfer.START] > 0)


def composers(held: Ints, num_heads: int) -> Ints:
    """Heads of each cut sequence, shared among its ranks: rows (rank, seq, head_start, head_stop)."""
    ends = run_bounds(held[1:, Placed.SEQ] != held[:-1, Placed.SEQ], len(held))
    cut = np.repeat(np.diff(ends) > 1, np.diff(ends))
    seq, rank = np.unique(held[cut][:, [Placed.SEQ, Placed.RANK]], axis=0).T
    ends = run_bounds(seq[1:] != seq[:-1], len(seq))
    count = np.repeat(np.diff(ends), np.diff(ends))
    # Turned by sequence: the few heads of many short sequences do not meet on the same ranks.
    place = (np.arange(len(seq)) - np.repeat(ends[:-1], np.diff(ends)) - seq) % count
    table = np.column_stack([rank, seq, num_heads * place // count, num_heads * (place + 1) // count])
    return table[table[:, 2] < table[:, 3]]


def _forward(held: Ints, num_heads: int, halo: int) -> Iterator[RecurrentOp]:
    rows = halos(held, halo)
    if len(rows):
        yield Exchange(0, as_rows(rows))
    table = composers(held, num_heads)
    first = np.searchsorted(held[:, Placed.SEQ], table[:, 1], side="left")
    end = np.searchsorted(held[:, Placed.SEQ], table[:, 1], side="right")
    composer, at = ranges(first, end)  # every piece of a sequence, for each of its composers
    by, (rank, seq, start, stop), heads = table[composer, 0], held[at].T, table[composer, 2:]
    begins, ends, remote = at == first[composer], at + 1 == end[composer], rank != by
    begin = held[first[composer], Placed.START]
    kind = np.full(len(at), RecurrentKind.SUMMARY)
    summaries = np.column_stack([kind, seq, start, stop, heads, rank, by])[~ends & remote]
    joins = np.column_stack([kind, seq, begin, start, stop, heads])[~begins & ~ends]
    states = np.column_stack([kind, seq, begin, start, heads, by, rank])[~begins & remote]
    if len(summaries):
        yield Exchange(1, as_rows(summaries))
    composing = by[~begins & ~ends]
    for each in np.unique(composing).tolist():
        yield Compose(each, as_rows(joins[composing == each]))
    if len(states):
        yield Exchange(2, as_rows(states))


# Of the state at a token boundary: what was sent to make it was the SUMMARY that ends there, what is
# sent back is the SUMMARY_GRAD that begins there. A composer answers for all tokens behind it; a rank
# that was handed the state for its own piece answers for that piece.
def _transposed(forward: Sequence[RecurrentOp], held: Ints, lengths: Ints) -> Iterator[RecurrentOp]:
    begins = key(held[:, Placed.SEQ], held[:, Placed.START])
    composed = False
    for op in reversed(forward):
        match op:
            case Compose(rank, table):
                composed = True
                rows = as_array(table)[::-1].copy()
                rows[:, Neighbours.KIND] = RecurrentKind.SUMMARY_GRAD
                rows[:, Neighbours.START] = rows[:, Neighbours.MIDDLE]
                rows[:, Neighbours.MIDDLE] = rows[:, Neighbours.STOP]
                rows[:, Neighbours.STOP] = lengths[rows[:, Neighbours.SEQ]]
                yield Compose(rank, as_rows(rows))
            case Exchange(number, transfers):
                rows = as_array(transfers).copy()
                rows[:, Transfer.ENDS] = rows[:, [Transfer.DST, Transfer.SRC]]
                states = rows[:, Transfer.KIND] == RecurrentKind.SUMMARY
                rows[:, Transfer.KIND] = np.where(states, RecurrentKind.SUMMARY_GRAD, RecurrentKind.ROWS_GRAD)
                seq: Ints = rows[states, Transfer.SEQ]
                at: Ints = rows[states, Transfer.STOP]
                behind = held[np.searchsorted(begins, key(seq, at)), Placed.STOP]
                rows[states, Transfer.START] = at
                rows[states, Transfer.STOP] = lengths[seq] if composed else behind
                yield Exchange(5 - number, as_rows(rows))
            case _:
                assert_never(op)
