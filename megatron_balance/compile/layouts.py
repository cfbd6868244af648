"""All ranks' layouts at once, for what needs them all: the exchange of a step's tokens, and the figures of a remap."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import attrgetter

import numpy as np

from megatron_balance.ir.arrays import Bools, Ints, as_array, sums
from megatron_balance.ir.intervals import ranges
from megatron_balance.ir.plan import MicrobatchPlan, TaskTable, Zone
from megatron_balance.patterns import zigzag

RANK, SEQ, START, STOP, ZONE, ON = range(6)
"""Columns of `fragments`. ON: whether a ring's first exchange passes the fragment on."""

FRAGMENT, BEGIN, END, OWNER, HOLDER = range(5)
"""Columns of `remote`: a row of `fragments`, and which of its tokens are owned by another rank."""

_BLOCK = 1 << 20
"""Cells of (rank, sequence) worked on at once, which bounds memory."""


def fragments(plan: MicrobatchPlan, ranks: Ints | None = None) -> Ints:
    """Rows (rank, seq, start, stop, zone, on) of attention layouts, rank by rank in the order of its tokens. `ranks`: whose; None: all."""
    lengths = np.array(plan.lengths, dtype=np.int64)
    wanted = np.ones(plan.num_ranks, dtype=bool)
    if ranks is not None:
        wanted[:] = False
        wanted[ranks] = True
    parts = [np.empty((0, 6), dtype=np.int64)]
    cut: list[tuple[int, Zone]] = []
    for index, zone in enumerate(plan.zones):
        if isinstance(zone, Zone) and zone.pattern != "head_exchange":
            cut.append((index, zone))
            continue
        found = as_array(zone.fragments) if isinstance(zone, TaskTable) else _runs(zone, lengths)
        found = found[wanted[found[:, RANK]]]
        parts.append(np.column_stack([found, np.tile([index, 0], (len(found), 1))]))
    if cut:
        parts.append(_chunks(cut, lengths, wanted))
    table = np.concatenate(parts)
    return table[np.lexsort((table[:, ZONE], table[:, RANK]))]


def remote(plan: MicrobatchPlan, table: Ints) -> Ints:
    """What ranks attend to that is owned by another rank: rows (fragment, start, stop, owner, holder), by holder, then owner.

    `table`: the plan's `fragments`, of all ranks or of some, whose tokens alone are looked at.
    """
    moves, ends = _moves(plan, table), np.cumsum(table[:, STOP] - table[:, START])
    src, dst, tokens = moves[:, 0], moves[:, 1], moves[:, 2]
    begins = ends - (table[:, STOP] - table[:, START])  # a token's place among all tokens, rank by rank
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
        given = remote(plan, table)
        sizes = table[:, STOP] - table[:, START]
        kept = np.clip(_kept_until(plan, table)[table[:, RANK]] - (np.cumsum(sizes) - sizes), 0, sizes)
        rows[:, 3] = rows[:, 2] + kept
        received = np.column_stack([given[:, OWNER], table[given[:, FRAGMENT], SEQ], given[:, [BEGIN, END]]])
        rows = np.concatenate([rows[kept > 0], received])
        rows = rows[np.argsort(rows[:, 0], kind="stable")]
    return rows


def _moves(plan: MicrobatchPlan, table: Ints) -> Ints:
    """The moves of what the ranks in `table` hold."""
    moves = as_array(plan.moves)
    listed = np.zeros(plan.num_ranks, dtype=bool)
    listed[table[:, RANK]] = True
    return moves[listed[moves[:, 0]]]


def _kept_until(plan: MicrobatchPlan, table: Ints) -> Ints:
    """For each rank, the place among all tokens where those begin that it gives away: [num_ranks]."""
    moves = _moves(plan, table)
    held = sums(table[:, RANK], table[:, STOP] - table[:, START], plan.num_ranks)
    return np.cumsum(held) - sums(moves[:, 0], moves[:, 2], plan.num_ranks)


def _chunks(zones: Sequence[tuple[int, Zone]], lengths: Ints, wanted: Bools) -> Ints:
    """Rows of zigzag zones, given with their indices, on the ranks that are `wanted` [num_ranks]: zone by zone, each as listed."""
    sizes, counts = (np.array([len(of(zone)) for _, zone in zones]) for of in (attrgetter("ranks"), attrgetter("seqs")))
    members = np.fromiter(chain.from_iterable(zone.ranks for _, zone in zones), np.int64, int(sizes.sum()))
    seqs = np.fromiter(chain.from_iterable(zone.seqs for _, zone in zones), np.int64, int(counts.sum()))
    stops = np.cumsum(counts)
    parts, first = zigzag.cut(lengths[seqs], np.repeat(sizes, counts), np.repeat(stops - counts, counts))
    owner = np.repeat(np.arange(len(zones)), sizes)
    place = np.arange(len(members)) - (np.cumsum(sizes) - sizes)[owner]  # in its zone
    chosen = np.flatnonzero(wanted[members])
    members, owner, place = members[chosen], owner[chosen], place[chosen]
    facts = np.array([[index for index, _ in zones], [zone.pattern == "ring" for _, zone in zones]]).T[owner]
    found = [np.empty((0, 6), dtype=np.int64)]
    blocks = [*np.flatnonzero(np.diff(np.cumsum(counts[owner]) // _BLOCK)).tolist(), len(members)]
    for a, b in zip([0, *blocks], blocks, strict=False):
        member, seq = ranges((stops - counts)[owner[a:b]], stops[owner[a:b]])
        member += a
        position = (place[member] - first[seq]) % sizes[owner[member]]
        length, held_by = lengths[seqs[seq]], parts[seq]
        rows = np.empty((len(member), 2, 6), dtype=np.int64)
        rows[:, :, RANK], rows[:, :, SEQ], rows[:, :, ZONE] = members[member, None], seqs[seq, None], facts[member, :1]
        rows[:, 0, START], rows[:, 0, STOP] = zigzag.chunk(length, held_by, position)
        rows[:, 1, START], rows[:, 1, STOP] = zigzag.chunk(length, held_by, 2 * held_by - 1 - position)
        # No other rank needs a sequence with one holder, or the last chunk of any.
        rows[:, 0, ON] = facts[member, 1] * (held_by > 1)
        rows[:, 1, ON] = rows[:, 0, ON] * (position > 0)
        found.append(rows[(position < held_by)[:, None] & (rows[:, :, START] < rows[:, :, STOP])])
    return np.concatenate(found)


def _runs(zone: Zone, lengths: Ints) -> Ints:
    """Rows (rank, seq, start, stop) of a head exchange: near-equal runs of the sequences one after the other."""
    seqs, ranks = np.array(zone.seqs, dtype=np.int64), np.array(zone.ranks)
    ends = np.cumsum(lengths[seqs])
    total = int(ends[-1]) if len(ends) else 0
    cuts = total * np.arange(len(ranks) + 1) // len(ranks)
    edges = np.unique(np.concatenate([cuts, ends]))
    begin, end = edges[:-1], edges[1:]
    seq = np.searchsorted(ends, begin, side="right")
    first = (ends - lengths[seqs])[seq]
    owner = ranks[np.searchsorted(cuts, begin, side="right") - 1]
    return np.column_stack([owner, seqs[seq], begin - first, end - first])
