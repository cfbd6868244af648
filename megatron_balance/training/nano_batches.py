"""The sequences of ping-pong nano-batches (DistCA, section 4.1).

A microbatch runs as two nano-batches whose attention calls take turns, or whole, as one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_balance.ir.arrays import Ints
from megatron_balance.planning.place import NanoBatches
from megatron_balance.training.lengths import PoolLengths
from megatron_balance.training.sequences import Sequences


def by_nano_batch(
    mine: Sequence[Sequences], shared: PoolLengths, chosen: Sequence[NanoBatches], rank: int
) -> tuple[list[Sequences], PoolLengths]:
    """Sequences read here and in the pool, with each nano-batch as a microbatch of its own.

    `mine`: by microbatch, or empty on ranks whose microbatches do not count. `chosen`: by
    microbatch.
    """
    if all(len(each) == 1 for each in chosen):
        return list(mine), shared
    lengths: list[tuple[int, ...]] = []
    owners: list[Ints] = []
    read: list[Sequences] = []
    for m, each in enumerate(chosen):
        for seqs in each:
            lengths.append(tuple(shared.lengths[m][seq] for seq in seqs))
            owners.append(shared.owners[m][list(seqs)])
            if mine:
                read.append(mine[m].select(np.isin(np.flatnonzero(shared.owners[m] == rank), seqs)))
    return read, PoolLengths(tuple(lengths), tuple(owners))
