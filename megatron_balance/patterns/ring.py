"""Ring: keys and values go round the group, one hop a round, while queries stay (Ring Attention; Zeppelin, section 3.2).

Round t of G: group index i attends to the block that started at index i - t. A fragment goes round only as far as some
rank still needs it. A replayed backward turns the other way, so that the block needed last in the forward pass, which the
backward needs first, comes from its own rank, and its gradient walks the forward path back.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy

import numpy as np

from megatron_balance.ir.arrays import Ints
from megatron_balance.ir.columns import Pair, Transfer, Value
from megatron_balance.ir.plan import Zone
from megatron_balance.ir.program import Attend, Exchange, Kind, Merge, Op
from megatron_balance.ir.rows import Rows
from megatron_balance.patterns import zigzag
from megatron_balance.patterns.base import Context, Share, cut_by

_ROWS = 1 << 14
"""About so many rows are made at once, which keeps them in the cache."""


def num_exchanges(zone: Zone) -> int:
    """Rounds that move something: G - 1."""
    return len(zone.ranks) - 1


def place(zone: Zone, lengths: Ints, rank: int) -> Ints:
    """Rows (seq, start, stop) of `rank` in this zone."""
    return zigzag.fragments(zigzag.zigzag(lengths, np.array(zone.seqs, dtype=np.int64), len(zone.ranks)), zone.ranks.index(rank))


def project(zone: Zone, context: Context, rank: int) -> Share:
    """Ops of `rank`: G rounds of Exchange, Attend and Merge (the first round only attends)."""
    size, index = len(zone.ranks), zone.ranks.index(rank)
    cut = zigzag.zigzag(context.lengths, np.array(zone.seqs, dtype=np.int64), size)
    rounds = np.arange(size)
    blocks = _Blocks(cut, (index - rounds) % size, context.num_kv_heads)
    pairs, merges = _attention(cut, index, blocks, context) if context.attends else ([b""] * size,) * 2
    ops: list[Op] = []
    replays: list[tuple[int, Exchange]] = []
    if pairs[0]:
        ops.append(Attend(rank, Rows(Pair.WIDTH, pairs[0])))
    if size > 1:
        before, after = zone.ranks[index - 1], zone.ranks[(index + 1) % size]
        forward = blocks.transfers(rounds, blocks.reach_forward(), rank, before, after)
        mirror = blocks.turned(-rounds % size) if context.replays else None
        backward = mirror.transfers(rounds, mirror.reach_backward(), rank, after, before) if mirror is not None else []
        for t in range(1, size):
            exchange_id = context.base + t - 1
            if forward[t]:
                ops.append(Exchange(exchange_id, Rows(Transfer.WIDTH, forward[t])))
            if context.replays and (backward[size - t] or forward[t]):
                replays.append((exchange_id, Exchange(exchange_id, Rows(Transfer.WIDTH, backward[size - t]))))
            if pairs[t]:
                ops += [Attend(rank, Rows(Pair.WIDTH, pairs[t])), Merge(rank, Rows(Value.WIDTH, merges[t]))]
    return Share(ops, replays)


class _Blocks:
    """The blocks of keys that pass one rank: in round t the one that started at `source[t]`. Arrays are [rounds, S, 2]."""

    def __init__(self, cut: zigzag.Zigzag, source: Ints, num_kv_heads: int) -> None:
        self.cut = cut
        self.num_kv_heads = num_kv_heads
        self.position = cut.position(source[:, None])
        lo, hi = cut.lo(self.position), cut.hi(self.position)
        self.start = np.stack([lo[0], hi[0]], 2)
        self.stop = np.stack([lo[1], hi[1]], 2)
        self.there = (self.start < self.stop) & (self.position < cut.parts)[:, :, None]

    def turned(self, rounds: Ints) -> _Blocks:
        """The same blocks, in round t the one that compile in `rounds[t]` here."""
        other = copy(self)
        other.position, other.start, other.stop, other.there = (
            array[rounds] for array in (self.position, self.start, self.stop, self.there)
        )
        return other

    def reach_forward(self) -> Ints:
        """Hops after which a fragment has passed the last rank that needs it, turning forward.

        The low chunk at position j is needed by all other positions, the high one by those below j; turning forward, the
        last position before j again is j - 1. Position 0 has none behind it: its low chunk ends at the last position and
        its high chunk stays.
        """
        first = self.position == 0
        lo = np.where(first, self.cut.parts - 1, self.cut.size - 1)
        return np.stack([lo, np.where(first, 0, self.cut.size - 1)], 2)

    def reach_backward(self) -> Ints:
        """The same, turning the other way: high chunks end at position 0; low ones go on to position j + 1 if there is one."""
        last = self.position >= self.cut.parts - 1
        return np.stack([np.where(last, self.position, self.cut.size - 1), self.position], 2)

    def transfers(self, rounds: Ints, reach: Ints, rank: int, source: int, target: int) -> list[bytes]:
        """For each round, rows that `rank` sends to `target` (what it held a round ago) and receives from `source`."""
        arrives = self.there & (reach >= rounds[:, None, None])
        moves = np.zeros((len(rounds), 2, *arrives.shape[1:]), dtype=bool)  # [rounds, sends or receives, S, 2]
        moves[1:, 1] = arrives[1:]
        moves[1:, 0] = self.there[:-1] & (reach[:-1] >= rounds[1:, None, None])
        counts = moves.sum(axis=(2, 3))
        # Every fragment as a row; those that move are copied from there, which is faster than making them column by column.
        fragments = np.empty((*self.start.shape, Transfer.WIDTH), dtype=np.int64)
        fragments[..., 0], fragments[..., 4], fragments[..., 5] = Kind.KV, 0, self.num_kv_heads
        fragments[..., 1] = self.cut.seqs[:, None]
        fragments[..., 2], fragments[..., 3] = self.start, self.stop
        fragments = fragments.reshape(-1, Transfer.WIDTH)
        # In a round there are two moves to a fragment, the first of which is of the round before.
        of_round = counts.sum(axis=1)
        at = np.flatnonzero(moves) - np.repeat((rounds + 1) * self.start[0].size, of_round)
        ends = np.tile(np.array([(rank, target), (source, rank)]), (len(rounds), 1))
        found: list[bytes] = []
        for block, chosen in _in_turns(of_round):
            rows = fragments.take(at[chosen], axis=0)
            both = slice(2 * block.start, 2 * block.stop)
            rows[:, 6:] = np.repeat(ends[both], counts.ravel()[both], axis=0)
            found += cut_by(rows, of_round[block])
        return found


def _in_turns(counts: Ints) -> Iterator[tuple[slice, slice]]:
    """Rounds and their rows interleaved of not much more than `_ROWS` rows; `counts`: rows of each round."""
    ends = np.append(0, counts.cumsum())
    step = max(1, _ROWS * len(counts) // max(1, int(ends[-1])))
    for first in range(0, len(counts), step):
        last = min(first + step, len(counts))
        yield slice(first, last), slice(int(ends[first]), int(ends[last]))


def _attention(cut: zigzag.Zigzag, index: int, blocks: _Blocks, context: Context) -> tuple[list[bytes], list[bytes]]:
    """Per round: the pairs that group index `index` attends, and the query regions to merge."""
    mine = cut.position(np.array(index))
    own = mine < cut.parts
    (lo0, lo1), (hi0, hi1) = cut.lo(mine), cut.hi(mine)
    theirs = blocks.position
    there = own & (theirs < cut.parts)
    # (query chunk, key chunk) that are visible, by whose chunk comes first; chunk 0 is the low one.
    same, earlier, later = there & (theirs == mine), there & (theirs < mine), there & (theirs > mine)
    visible = np.stack([same | earlier, same | earlier | later, same | later], 2)  # (lo, lo), (hi, lo), (hi, hi)
    query_hi, key_hi = np.array([0, 1, 1]), np.array([0, 0, 1])
    q_start, q_stop = np.stack([lo0, hi0], 1)[:, query_hi], np.stack([lo1, hi1], 1)[:, query_hi]
    k_start, k_stop = blocks.start[:, :, key_hi], blocks.stop[:, :, key_hi]
    visible &= (q_start < q_stop) & (k_start < k_stop)
    queries = np.empty((*q_start.shape, 5), dtype=np.int64)  # as rows have them, to be copied
    queries[..., 0], queries[..., 1], queries[..., 2], queries[..., 3], queries[..., 4] = (
        cut.seqs[:, None],
        q_start,
        q_stop,
        0,
        context.num_heads,
    )
    queries, k_start, k_stop = queries.reshape(-1, 5), k_start.ravel(), k_stop.ravel()
    # One merge row per query region and round: skip the second pair of the same query chunk.
    once = visible.copy()
    once[:, :, 2] &= ~visible[:, :, 1]
    at, of_round, merged = np.flatnonzero(visible), visible.sum(axis=(1, 2)), once.sum(axis=(1, 2))
    first = once.ravel()[at]
    pairs: list[bytes] = []
    merges: list[bytes] = []
    for block, chosen in _in_turns(of_round):
        here = at[chosen]
        rows = np.empty((len(here), Pair.WIDTH), dtype=np.int64)
        rows[:, :5] = queries.take(here % len(queries), axis=0)
        rows[:, 5], rows[:, 6], rows[:, 7], rows[:, 8] = k_start[here], k_stop[here], 0, context.num_kv_heads
        pairs += cut_by(rows, of_round[block])
        values = np.empty((int(merged[block].sum()), Value.WIDTH), dtype=np.int64)
        values[:, 0], values[:, 1:] = Kind.OUT, rows[first[chosen], :5]
        merges += cut_by(values, merged[block])
    return pairs, merges
