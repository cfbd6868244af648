"""Head exchange: trade a slice of the tokens for a slice of the heads (DeepSpeed Ulysses).

The tokens of the zone, one sequence after the other, are cut into G near-equal runs, one a rank. Query heads are cut into G
near-equal spans; a rank gets the key-value heads that its span needs, so with fewer of those than ranks (GQA) a key-value
head goes to several ranks and its gradients are summed at the owner. With fewer query heads than ranks some ranks attend nothing.
"""

from __future__ import annotations

import numpy as np

from megatron_balance.ir.arrays import Ints
from megatron_balance.ir.columns import Pair, Transfer
from megatron_balance.ir.plan import Zone
from megatron_balance.ir.program import Kind, Op
from megatron_balance.patterns.base import Context, Share, attend, exchange


def num_exchanges(zone: Zone) -> int:
    return 2 if len(zone.ranks) > 1 else 0


def place(zone: Zone, lengths: Ints, rank: int) -> Ints:
    """Rows (seq, start, stop) of `rank`: its run of the concatenated tokens."""
    return _run(np.array(zone.seqs, dtype=np.int64), lengths, len(zone.ranks), zone.ranks.index(rank))


def head_slices(num_heads: int, num_kv_heads: int, size: int) -> list[list[tuple[int, int, int, int]]]:
    """For each of `size` ranks the (head_start, head_stop, kv_start, kv_stop) it attends.

    Each slice maps its query heads evenly onto its key-value heads (one key-value head, or whole groups), as kernels need.
    """
    ratio = num_heads // num_kv_heads
    slices: list[list[tuple[int, int, int, int]]] = []
    for i in range(size):
        a, b = num_heads * i // size, num_heads * (i + 1) // size
        own: list[tuple[int, int, int, int]] = []
        while a < b:
            whole = b // ratio * ratio
            if a % ratio == 0 and whole > a:
                stop = whole
            else:
                stop = min(b, (a // ratio + 1) * ratio)
            own.append((a, stop, a // ratio, -(-stop // ratio)))
            a = stop
        slices.append(own)
    return slices


def project(zone: Zone, context: Context, rank: int) -> Share:
    """Exchange q and kv, Attend whole sequences with the rank's heads, Exchange the outputs back."""
    size, index = len(zone.ranks), zone.ranks.index(rank)
    seqs = np.array(zone.seqs, dtype=np.int64)
    slices = head_slices(context.num_heads, context.num_kv_heads, size)
    runs = [_run(seqs, context.lengths, size, i) for i in range(size)]
    there: list[Ints] = []
    back: list[Ints] = []
    for i, other in enumerate(zone.ranks):
        if i == index:
            continue
        for src, dst, who in ((index, i, (rank, other)), (i, index, (other, rank))):
            if slices[dst]:
                heads = (slices[dst][0][0], slices[dst][-1][1])
                kv_heads = (slices[dst][0][2], slices[dst][-1][3])
                there.append(_transfers(Kind.Q, runs[src], heads, who))
                there.append(_transfers(Kind.KV, runs[src], kv_heads, who))
            if slices[src]:
                back.append(_transfers(Kind.OUT, runs[dst], (slices[src][0][0], slices[src][-1][1]), who))
    ops: list[Op] = []
    # Every rank takes part in the collectives, or none does: nothing moves if the one holder has all the heads.
    moves = any(len(runs[i]) and slices[j] for i in range(size) for j in range(size) if i != j)
    nothing = np.empty((0, Transfer.WIDTH), dtype=np.int64)
    if moves:
        ops.append(exchange(context, 0, np.concatenate([nothing, *there]), "all_to_all", zone.ranks))
    if slices[index] and len(seqs):
        pairs = np.zeros((len(slices[index]), len(seqs), Pair.WIDTH), dtype=np.int64)
        pairs[:, :, 0] = seqs
        pairs[:, :, 2] = pairs[:, :, 6] = context.lengths[seqs]
        for row, (start, stop, kv_start, kv_stop) in zip(pairs, slices[index], strict=True):
            row[:, 3:5] = start, stop
            row[:, 7:9] = kv_start, kv_stop
        ops.append(attend(rank, pairs.reshape(-1, Pair.WIDTH)))
    if moves:
        ops.append(exchange(context, 1, np.concatenate([nothing, *back]), "all_to_all", zone.ranks))
    # The way back carries no inputs, so a replay has nothing to bring again; a rank without tokens could not tell.
    silent = [(context.base + 1, exchange(context, 1, nothing))] if moves else []
    return Share(ops, silent)


def _run(seqs: Ints, lengths: Ints, size: int, index: int) -> Ints:
    """Rows (seq, start, stop): tokens [T i / G, T (i + 1) / G) of the concatenated sequences."""
    ends = np.cumsum(lengths[seqs])
    total = int(ends[-1]) if len(ends) else 0
    first, last = total * index // size, total * (index + 1) // size
    begins = ends - lengths[seqs]
    start = np.maximum(first - begins, 0)
    stop = np.minimum(last - begins, lengths[seqs])
    return np.stack([seqs, start, stop], 1)[start < stop]


def _transfers(kind: Kind, regions: Ints, heads: tuple[int, int], who: tuple[int, int]) -> Ints:
    rows = np.empty((len(regions), Transfer.WIDTH), dtype=np.int64)
    rows[:, 0] = kind
    rows[:, 1:4] = regions
    rows[:, 4:6] = heads
    rows[:, 6:8] = who
    return rows
