"""All-gather: every rank of the group receives all keys and values, then attends once (LLaMA 3's context parallelism)."""

from __future__ import annotations

import numpy as np

from megatron_balance.ir.arrays import Ints
from megatron_balance.ir.columns import Pair, Transfer
from megatron_balance.ir.plan import Zone
from megatron_balance.ir.program import Kind, Op
from megatron_balance.patterns import zigzag
from megatron_balance.patterns.base import Context, Share, attend, exchange


def num_exchanges(zone: Zone) -> int:
    return 1 if len(zone.ranks) > 1 else 0


def place(zone: Zone, lengths: Ints, rank: int) -> Ints:
    """Rows (seq, start, stop) of `rank` in this zone."""
    return zigzag.fragments(zigzag.zigzag(lengths, np.array(zone.seqs, dtype=np.int64), len(zone.ranks)), zone.ranks.index(rank))


def project(zone: Zone, context: Context, rank: int) -> Share:
    """One Exchange of all the sequences that more than one rank holds, then one Attend of each fragment over its prefix."""
    size, index = len(zone.ranks), zone.ranks.index(rank)
    cut = zigzag.zigzag(context.lengths, np.array(zone.seqs, dtype=np.int64), size)
    ops: list[Op] = []
    shared = cut.seqs[cut.parts > 1]
    if size > 1 and len(shared):
        is_shared = np.zeros(len(context.lengths), dtype=bool)
        is_shared[shared] = True
        held: list[Ints] = []
        for i in range(size):
            rows = zigzag.fragments(cut, i)
            held.append(rows[is_shared[rows[:, 0]]])
        tables = [_transfers(held[index], rank, other, context) for other in zone.ranks if other != rank]
        tables += [_transfers(held[i], other, rank, context) for i, other in enumerate(zone.ranks) if i != index]
        ops.append(exchange(context, 0, np.concatenate(tables), "all_gather", zone.ranks))
    own = zigzag.fragments(cut, index)
    if len(own):
        pairs = np.zeros((len(own), Pair.WIDTH), dtype=np.int64)
        pairs[:, :3] = own
        pairs[:, 4] = context.num_heads
        pairs[:, 6] = own[:, 2]
        pairs[:, 8] = context.num_kv_heads
        ops.append(attend(rank, pairs))
    return Share(ops)


def _transfers(regions: Ints, src: int, dst: int, context: Context) -> Ints:
    rows = np.empty((len(regions), Transfer.WIDTH), dtype=np.int64)
    rows[:, 0] = Kind.KV
    rows[:, 1:4] = regions
    rows[:, 4:] = 0, context.num_kv_heads, src, dst
    return rows
