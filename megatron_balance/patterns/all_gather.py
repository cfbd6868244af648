"""All-gather: every rank receives all keys and values, then attends once (LLaMA 3's context
parallelism).

Placement is zigzag (`patterns.zigzag`). Sequences that one rank holds do not travel.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_balance.ir.arrays import Ints
from megatron_balance.ir.columns import Fragment, Transfer
from megatron_balance.ir.plan import Zone
from megatron_balance.ir.program import Kind, Op
from megatron_balance.patterns.base import (
    Context,
    GroupTraffic,
    Launches,
    Load,
    Startable,
    ZoneMessages,
    ZoneProgram,
    ZoneRounds,
    exchange,
    prefix_pairs,
)
from megatron_balance.patterns.ring import RingPattern
from megatron_balance.patterns.rows import attend, messages_from, transfers_of
from megatron_balance.patterns.zigzag import Zigzag, ZigzagPattern, fragments, of_zone, shared_tokens


class AllGather(ZigzagPattern):
    """One collective brings all keys and values; queries and outputs stay."""

    routing = "never"
    merges_remap = False
    traffic = GroupTraffic

    def num_exchanges(self, zone: Zone) -> int:
        """One, where there are other ranks."""
        return 1 if len(zone.ranks) > 1 else 0

    def project(self, zone: Zone, context: Context, rank: int) -> ZoneProgram:
        """One Exchange of all the sequences that more than one rank holds, then one Attend of each
        fragment over its prefix.
        """
        placed = of_zone(zone, context.lengths)
        held = [fragments(placed, index) for index in range(len(zone.ranks))]
        return gathered(zone, context, rank, held, placed.seqs[placed.parts > 1])

    # Plan statistics and traffic between nodes

    def receive(self, load: Load, ranks: Ints, placed: Zigzag, context: Context) -> None:
        """Add all that others hold of what several ranks hold."""
        shared = shared_tokens(placed)
        load.receive(Kind.KV, ranks, shared.sum() - shared, context.num_kv_heads)

    def messages(self, zone: Zone, context: Context, *, across: bool = False) -> list[ZoneMessages]:
        """One block a rank, to all the others."""
        del across
        if len(zone.ranks) == 1:
            return []
        shared = shared_tokens(of_zone(zone, context.lengths))
        rows = messages_from(0, np.array(zone.ranks), -1, Kind.KV, (0, context.num_kv_heads), shared)
        return [ZoneMessages(rows, "all_gather", tuple(sorted(zone.ranks)))]

    def largest_exchange(self, zone: Zone, context: Context) -> Ints:
        """All that others hold of what several ranks hold."""
        shared = shared_tokens(of_zone(zone, context.lengths))
        return (shared.sum() - shared) * context.num_kv_heads

    # Starting early

    def startable(self, zone: Zone) -> Startable:
        """The gather, and its replay."""
        del zone
        return Startable(forward=(0,), replays=(0,))

    # Simulation

    def rounds(self, zone: Zone, context: Context) -> ZoneRounds:
        """One gather and one launch; a zone on one rank is a ring of one."""
        size = len(zone.ranks)
        if size == 1:
            return RingPattern().rounds(zone, context)
        placed = of_zone(zone, context.lengths)
        held = [fragments(placed, i) for i in range(size)]
        return gather_rounds(zone, context, held, shared_tokens(placed))


def gathered(zone: Zone, context: Context, rank: int, held: Sequence[Ints], shared: Ints) -> ZoneProgram:
    """The ops of `rank`: one Exchange of what several ranks hold, one Attend.

    `held`: rows (seq, start, stop) of each group index; `shared`: ids of the sequences that several
    ranks hold.
    """
    ops: list[Op] = []
    index = zone.ranks.index(rank)
    if len(shared):
        is_shared = np.zeros(len(context.lengths), dtype=bool)
        is_shared[shared] = True
        blocks = [rows[is_shared[rows[:, Fragment.SEQ]]] for rows in held]
        heads = (0, context.num_kv_heads)
        tables = [transfers_of(Kind.KV, blocks[index], heads, rank, other) for other in zone.ranks if other != rank]
        tables += [
            transfers_of(Kind.KV, blocks[i], heads, other, rank) for i, other in enumerate(zone.ranks) if i != index
        ]
        rows = np.concatenate([np.empty((0, Transfer.WIDTH), dtype=np.int64), *tables])
        ops.append(exchange(context, 0, rows, "all_gather", tuple(sorted(zone.ranks))))
    if len(held[index]):
        ops.append(attend(rank, prefix_pairs(held[index], context)))
    return ZoneProgram(ops)


def gather_rounds(zone: Zone, context: Context, held: Sequence[Ints], shared_tokens: Ints) -> ZoneRounds:
    """One gather and one launch of each rank.

    `held`: as in `gathered`; `shared_tokens` [G]: of them, the tokens that travel.
    """
    size = len(zone.ranks)
    launch = np.repeat(np.arange(size), [len(rows) for rows in held])
    pairs = prefix_pairs(np.concatenate(held), context)
    token_heads = (shared_tokens * context.num_kv_heads).astype(np.float64)
    blocks = np.repeat(token_heads[:, None], size, axis=1)
    launches = Launches(pairs, launch, np.zeros(size), np.arange(size)[:, None])
    return ZoneRounds(np.array(zone.ranks), launches, GroupTraffic({Kind.KV: blocks}, {}, gathers=True))
