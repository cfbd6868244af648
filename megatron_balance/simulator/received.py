"""Keys and values that a rank holds of others' at once when a backward brings them again (policy `replay`)."""

from __future__ import annotations

import numpy as np

from megatron_balance.cost.base import Ints
from megatron_balance.ir.arrays import as_array
from megatron_balance.ir.plan import MicrobatchPlan, TaskTable
from megatron_balance.ir.program import Kind
from megatron_balance.patterns import dispatch, head_exchange, zigzag

_BLOCK = 1 << 20


def most_in_a_round(plan: MicrobatchPlan) -> Ints:
    """For each rank the most key-value tokens that one exchange of attention brings it; a ring's largest block [num_ranks]."""
    lengths = np.array(plan.lengths, dtype=np.int64)
    most = np.zeros(plan.num_ranks, dtype=np.int64)
    for zone in plan.zones:
        if isinstance(zone, TaskTable):
            there, _ = dispatch.transfers(zone, plan.num_heads, plan.num_kv_heads)
            rows = as_array(there)
            rows = rows[rows[:, 0] == Kind.KV]
            brought = np.bincount(rows[:, 7], weights=rows[:, 3] - rows[:, 2], minlength=plan.num_ranks).astype(np.int64)
            most = np.maximum(most, brought)
        elif len(zone.ranks) > 1:
            ranks, seqs = np.array(zone.ranks), np.array(zone.seqs, dtype=np.int64)
            most[ranks] = np.maximum(most[ranks], _of_zone(zone.pattern, lengths, seqs, plan.num_heads, plan.num_kv_heads, len(ranks)))
    for holder, _, tokens in plan.moves:
        most[holder] += tokens  # the remap's are held throughout
    return most


def _of_zone(pattern: str, lengths: Ints, seqs: Ints, num_heads: int, num_kv_heads: int, size: int) -> int | Ints:
    if pattern == "head_exchange":
        slices = head_exchange.head_slices(num_heads, num_kv_heads, size)
        heads = np.array([own[-1][3] - own[0][2] if own else 0 for own in slices])
        return int(lengths[seqs].sum()) * heads // num_kv_heads
    cut = zigzag.zigzag(lengths, seqs, size)
    shared = cut.parts > 1
    if pattern == "all_gather":
        return int(cut.lengths[shared].sum())
    block = 0
    step = max(1, _BLOCK // max(1, len(seqs)))
    for begin in range(0, size, step):
        position = cut.position(np.arange(begin, min(size, begin + step))[:, None])
        (a, b), (c, d) = cut.lo(position), cut.hi(position)
        block = max(block, int(np.where((position < cut.parts) & shared, b - a + d - c, 0).sum(axis=1).max(initial=0)))
    return block
