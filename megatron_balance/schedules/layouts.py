"""All ranks' layouts at once, for what needs them all: the exchange of a step's tokens, and the figures of a remap."""

from __future__ import annotations

import numpy as np

from megatron_balance.core.plan import MicrobatchPlan, Tiling, Zone
from megatron_balance.passes.atoms import ranges
from megatron_balance.passes.tables import Ints, as_array
from megatron_balance.schedules import zigzag
from megatron_balance.schedules.payload import sums

RANK, SEQ, START, STOP, ZONE, ON = range(6)
"""Columns of `fragments`. ON: whether a ring's first exchange passes the fragment on."""

FRAGMENT, BEGIN, END, HOME, HOLDER = range(5)
"""Columns of `away`: a row of `fragments`, and which of its tokens are at home on another rank."""

_BLOCK = 1 << 20
"""Cells of (rank, sequence) worked on at once, which bounds memory."""


def fragments(plan: MicrobatchPlan) -> Ints:
    """Rows (rank, seq, start, stop, zone, on) of all attention layouts, rank by rank in the order of its tokens."""
    lengths = np.array(plan.lengths, dtype=np.int64)
    parts = [np.empty((0, 6), dtype=np.int64)]
    for index, zone in enumerate(plan.zones):
        found = _of_zone(zone, lengths)
        parts.append(np.column_stack([found[:, :4], np.full(len(found), index), found[:, 4]]))
    table = np.concatenate(parts)
    return table[np.argsort(table[:, RANK], kind="stable")]


def away(plan: MicrobatchPlan, table: Ints) -> Ints:
    """What ranks attend to that is at home elsewhere: rows (fragment, start, stop, home, holder), by holder, then home.

    `table`: the plan's `fragments`.
    """
    moves = as_array(plan.moves)
    src, dst, tokens = moves[:, 0], moves[:, 1], moves[:, 2]
    sizes = table[:, STOP] - table[:, START]
    ends = np.cumsum(sizes)  # a token's place among all tokens, rank by rank
    begins = ends - sizes
    before = np.cumsum(tokens) - tokens
    begin = _kept_until(plan, table)[src] + before - before[np.searchsorted(src, src)]
    end = begin + tokens
    move, found = ranges(np.searchsorted(ends, begin, side="right"), np.searchsorted(begins, end, side="left"))
    low, high = np.maximum(begins[found], begin[move]), np.minimum(ends[found], end[move])
    start = table[found, START] + low - begins[found]
    return np.column_stack([found, start, start + high - low, dst[move], src[move]])


def layouts(plan: MicrobatchPlan) -> Ints:
    """`schedules.layout` of all ranks: rows (rank, seq, start, stop), rank by rank in the order of its tokens outside attention."""
    table = fragments(plan)
    rows = table[:, [RANK, SEQ, START, STOP]]
    if plan.moves:
        given = away(plan, table)
        sizes = table[:, STOP] - table[:, START]
        kept = np.clip(_kept_until(plan, table)[table[:, RANK]] - (np.cumsum(sizes) - sizes), 0, sizes)
        rows[:, 3] = rows[:, 2] + kept
        received = np.column_stack([given[:, HOME], table[given[:, FRAGMENT], SEQ], given[:, [BEGIN, END]]])
        rows = np.concatenate([rows[kept > 0], received])
        rows = rows[np.argsort(rows[:, 0], kind="stable")]
    return rows


def _kept_until(plan: MicrobatchPlan, table: Ints) -> Ints:
    """For each rank, the place among all tokens where those begin that it gives away: [num_ranks]."""
    moves = as_array(plan.moves)
    held = sums(table[:, RANK], table[:, STOP] - table[:, START], plan.num_ranks)
    return np.cumsum(held) - sums(moves[:, 0], moves[:, 2], plan.num_ranks)


def _of_zone(zone: Zone | Tiling, lengths: Ints) -> Ints:
    """Rows (rank, seq, start, stop, on) of one zone; of each rank in the order of its tokens."""
    if isinstance(zone, Tiling):
        held = as_array(zone.fragments)
        return np.column_stack([held, np.zeros(len(held), dtype=np.int64)])
    seqs, ranks = np.array(zone.seqs, dtype=np.int64), np.array(zone.ranks)
    if zone.movement == "head_exchange":
        return _runs(seqs, lengths, ranks)
    cut = zigzag.zigzag(lengths, seqs, len(ranks))
    step = max(1, _BLOCK // max(1, len(seqs)))
    rows = np.concatenate([_chunks(cut, ranks, np.arange(a, min(len(ranks), a + step))) for a in range(0, len(ranks), step)])
    if zone.movement != "ring":
        rows[:, -1] = 0
    return rows


def _chunks(cut: zigzag.Zigzag, ranks: Ints, index: Ints) -> Ints:
    """Rows of the group indices `index` of a zigzag zone."""
    position = cut.position(index[:, None])
    (a, b), (c, d) = cut.lo(position), cut.hi(position)
    start, stop = np.stack([a, c], 2), np.stack([b, d], 2)
    rank, seq, chunk = np.nonzero((start < stop) & (position < cut.parts)[:, :, None])
    # No other rank needs a sequence with one holder, or the last chunk of any.
    on = (cut.parts[seq] > 1) & ((position[rank, seq] > 0) | (chunk == 0))
    return np.column_stack([ranks[index[rank]], cut.seqs[seq], start[rank, seq, chunk], stop[rank, seq, chunk], on])


def _runs(seqs: Ints, lengths: Ints, ranks: Ints) -> Ints:
    """Rows of a head exchange: near-equal runs of the sequences one after the other."""
    ends = np.cumsum(lengths[seqs])
    total = int(ends[-1]) if len(ends) else 0
    cuts = total * np.arange(len(ranks) + 1) // len(ranks)
    edges = np.unique(np.concatenate([cuts, ends]))
    begin, end = edges[:-1], edges[1:]
    seq = np.searchsorted(ends, begin, side="right")
    first = (ends - lengths[seqs])[seq]
    owner = ranks[np.searchsorted(cuts, begin, side="right") - 1]
    return np.column_stack([owner, seqs[seq], begin - first, end - first, np.zeros(len(begin), dtype=np.int64)])
