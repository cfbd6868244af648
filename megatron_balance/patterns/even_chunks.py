"""Even chunks: zigzag placement in which every rank has the same number of tokens, within one, and
nothing is padded (WLB-LLM, section 5.1).

Each of G ranks holds chunks i and 2G - 1 - i of what is cut: of every sequence ("per-document
sharding"), or of all sequences of a zone one after the other ("per-sequence sharding", Llama 3's
context parallelism). A length that 2G does not divide leaves tokens over. They are dealt to the
ranks round robin, and the dealing goes on from sequence to sequence, so that ranks are even over
the microbatch and not only within each sequence.

Where the paper is left: a token that is left over makes a chunk of its rank one token longer, the
high chunk in one turn and the low one in the next. The paper cuts them all off a sequence's end, a
fragment of one query each: up to two kernel tiles more for every rank and sequence, each with all
of the sequence's keys before it.
"""

from __future__ import annotations

import numpy as np

from megatron_balance.ir.arrays import Ints

INDEX, PLACE, START, STOP = range(4)
"""Columns of a table of chunks: group index, place of the sequence in its zone, tokens."""


def chunk_edges(lengths: Ints, dealt: Ints, size: int) -> Ints:
    """Where the 2G chunks of each length begin and end: int64 [S, 2G + 1].

    `dealt` [S]: tokens left over that were dealt before. The n-th one goes to group index n mod G:
    to its high chunk in even turns (n // G), to its low chunk in odd ones. So a round of 2G of them
    goes to chunks 2G - 1, ..., G, 0, ..., G - 1.
    """
    width = 2 * size
    whole, over = np.divmod(lengths, width)
    first = (dealt % width)[:, None]
    last = first + over[:, None]
    chunk = np.arange(width + 1)
    # Those in chunks below `chunk`: of the turn of low chunks the first ones, of high chunks the last.
    begin, end = np.where(chunk <= size, size, width - chunk), np.where(chunk <= size, size + chunk, width)
    below = sum(np.maximum(np.minimum(last, end + turn) - np.maximum(first, begin + turn), 0) for turn in (0, width))
    return whole[:, None] * chunk + below


def of_documents(lengths: Ints, size: int) -> Ints:
    """Chunks of each of `lengths` on its own: rows (group index, place, start, stop), by rank, then
    by place, then by start.
    """
    over = lengths % (2 * size)
    edges = chunk_edges(lengths, np.cumsum(over) - over, size)
    index, place = np.arange(size), np.arange(len(lengths))
    rows = np.empty((size, len(lengths), 2, 4), dtype=np.int64)
    rows[..., INDEX], rows[..., PLACE] = index[:, None, None], place[:, None]
    rows[:, :, 0, START], rows[:, :, 0, STOP] = edges[:, index].T, edges[:, index + 1].T
    rows[:, :, 1, START], rows[:, :, 1, STOP] = edges[:, 2 * size - 1 - index].T, edges[:, 2 * size - index].T
    # The two chunks of the last rank touch: one fragment.
    rows[-1, :, 0, STOP] = rows[-1, :, 1, STOP]
    rows[-1, :, 1, START] = rows[-1, :, 1, STOP]
    table = rows.reshape(-1, 4)
    return table[table[:, START] < table[:, STOP]]


def of_sequence(lengths: Ints, size: int) -> Ints:
    """Chunks of `lengths` one after the other; as `of_documents`."""
    ends = np.cumsum(lengths)
    total = ends[-1:] if len(ends) else np.zeros(1, dtype=np.int64)
    edges = chunk_edges(total, np.zeros_like(total), size)[0]
    bounds = np.delete(edges, size)  # the two chunks of the last rank touch: one fragment
    cuts = np.unique(np.concatenate([bounds, ends]))
    begin, end = cuts[:-1], cuts[1:]
    place = np.searchsorted(ends, begin, side="right")
    chunk = np.searchsorted(bounds, begin, side="right") - 1
    before = (ends - lengths)[place]
    rows = np.column_stack([np.minimum(chunk, 2 * size - 2 - chunk), place, begin - before, end - before])
    return rows[np.argsort(rows[:, INDEX], kind="stable")]
