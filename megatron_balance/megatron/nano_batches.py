"""A microbatch as two nano-batches of whole sequences (DistCA, section 4.1): what each rank reads, and how it lies in one tensor.

A rank's rows are those of the first half, then those of the second. Under sequence parallelism Megatron cuts the rows of a microbatch
evenly over the tensor-parallel ranks, and each of these must hold its share of both nano-batches: the rows lie share by share, in each share
the first half's before the second's.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from megatron_balance.ir.arrays import Ints
from megatron_balance.ir.intervals import ranges
from megatron_balance.megatron.data import Sequences
from megatron_balance.megatron.forward_step import PlannedMicrobatch
from megatron_balance.megatron.packed import BalancedSeqParams
from megatron_balance.megatron.tokens import PoolLengths
from megatron_balance.planning.place import NanoBatches


def cut(mine: Sequence[Sequences], shared: PoolLengths, parts: Sequence[NanoBatches], rank: int) -> tuple[list[Sequences], PoolLengths]:
    """What was read here and in the pool, with a microbatch for each part. `mine` [M], or nothing on ranks that read none."""
    if all(len(each) == 1 for each in parts):
        return list(mine), shared
    lengths: list[tuple[int, ...]] = []
    owners: list[Ints] = []
    read: list[Sequences] = []
    for m, each in enumerate(parts):
        for chosen in each:
            lengths.append(tuple(shared.lengths[m][i] for i in chosen))
            owners.append(shared.owners[m][list(chosen)])
            if mine:
                read.append(_chosen(mine[m], np.isin(np.flatnonzero(shared.owners[m] == rank), chosen)))
    return read, PoolLengths(tuple(lengths), tuple(owners))


def _chosen(sequences: Sequences, wanted: np.ndarray) -> Sequences:
    """Those sequences that are `wanted` [sequences]."""
    lengths = np.array(sequences.lengths, dtype=np.int64)
    ends = np.cumsum(lengths)
    rows = torch.from_numpy(ranges((ends - lengths)[wanted], ends[wanted])[1])
    return Sequences(
        sequences.tokens[rows], sequences.labels[rows], sequences.loss_mask[rows], tuple(int(n) for n in lengths[wanted].tolist())
    )


def together(parts: Sequence[PlannedMicrobatch], shares: int) -> PlannedMicrobatch:
    """One microbatch of all parts. `shares`: tensor-parallel ranks over which Megatron cuts its rows, 1 if it does not."""
    if len(parts) == 1:
        return parts[0]

    def joined(name: str) -> torch.Tensor:
        shared = [getattr(part, name).view(shares, -1) for part in parts]
        return torch.cat(shared, dim=1).view(1, -1)

    params = tuple(part.params for part in parts)
    positions = torch.cat([part.position_ids for part in params if part.position_ids is not None])
    return PlannedMicrobatch(
        tokens=joined("tokens"),
        labels=joined("labels"),
        loss_mask=joined("loss_mask"),
        position_ids=joined("position_ids"),
        padding_mask=joined("padding_mask"),
        params=BalancedSeqParams(qkv_format="sbhd", position_ids=positions, nano_batches=params),
    )
