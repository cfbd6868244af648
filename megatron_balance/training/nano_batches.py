"""The sequences of ping-pong nano-batches (DistCA, section 4.1).

A microbatch runs as two nano-batches whose attention calls take turns, or whole, as one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from megatron_balance.compile.ping_pong import NUM_NANO_BATCHES
from megatron_balance.ir.arrays import Ints
from megatron_balance.solvers.nano_batches import nano_batches
from megatron_balance.training.lengths import PoolLengths
from megatron_balance.training.sequences import Sequences

NanoBatches: TypeAlias = tuple[tuple[int, ...], ...]
"""Of one microbatch: the sequences of each nano-batch, ascending. One nano-batch: it runs whole."""


def nano_batches_of(lengths: Sequence[int], *, ping_pong: bool) -> NanoBatches:
    """The nano-batches of a microbatch; a microbatch of one sequence runs whole."""
    if ping_pong and len(lengths) >= NUM_NANO_BATCHES:
        return nano_batches(lengths)
    return (tuple(range(len(lengths))),)


def aligned_nano_batches(microbatches: Sequence[Sequence[int]], *, ping_pong: bool) -> tuple[NanoBatches, ...]:
    """The nano-batches of microbatches that meet in one attention call: equally many for each.

    A second nano-batch may be empty.
    """
    if ping_pong and any(len(lengths) >= NUM_NANO_BATCHES for lengths in microbatches):
        return tuple(nano_batches(lengths) for lengths in microbatches)
    return tuple(nano_batches_of(lengths, ping_pong=False) for lengths in microbatches)


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
