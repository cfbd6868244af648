"""Sequences from the microbatches in which they were read to those in which they are trained.

A plan may put a sequence into another microbatch, hold it back for a later step, or run a
microbatch as two nano-batches whose attention calls take turns (ping-pong; DistCA, section 4.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from megatron_balance.ir.arrays import Ints
from megatron_balance.ir.intervals import ranges
from megatron_balance.ir.step import Members, Waiting, dealt
from megatron_balance.training.lengths import PoolLengths
from megatron_balance.training.sequences import Sequences


@dataclass(frozen=True, slots=True, eq=False)
class Recalled:
    """Sequences of earlier steps that a step trains.

    `waiting`: their numbers and lengths. `owners`: the pool rank that read each again. `rows`: by
    number, the rows [n, C] of those that this rank read.
    """

    waiting: Waiting = ()
    owners: tuple[int, ...] = ()
    rows: tuple[tuple[int, Tensor], ...] = ()


NOTHING = Recalled()


def by_nano_batch(
    mine: Sequence[Sequences], shared: PoolLengths, members: Members, rank: int, recalled: Recalled = NOTHING
) -> tuple[list[Sequences], PoolLengths]:
    """Sequences read here and in the pool, with each nano-batch as a microbatch of its own.

    Args:
        mine: by microbatch as read, or empty on ranks whose microbatches do not count.
        shared: of the pool, by microbatch as read.
        members: by microbatch and nano-batch, numbers of sequences; below 0 those of `recalled`.
        rank: this one of the pool.
        recalled: sequences of earlier steps.
    """
    chosen = list(chain.from_iterable(members))
    if all(len(each) == 1 for each in members) and tuple(chosen) == dealt(shared.lengths):
        return list(mine), shared
    # The sequences of the step as one table: those just read by their number, then those of earlier
    # steps.
    num_read = sum(map(len, shared.lengths))
    place = {number: num_read + at for at, (number, _) in enumerate(recalled.waiting)}
    lengths = np.array([*chain.from_iterable(shared.lengths), *(n for _, n in recalled.waiting)], dtype=np.int64)
    owners = np.concatenate([np.empty(0, dtype=np.int64), *shared.owners, np.array(recalled.owners, dtype=np.int64)])
    again = dict(recalled.rows)
    reads = bool(mine) or bool(again)
    width = next((each.shape[1] for each in (*(each.rows for each in mine), *again.values())), 1)
    rows = torch.cat(
        [
            torch.empty(0, width, dtype=torch.int64),
            *(each.rows for each in mine),
            *(again[number] for number, _ in recalled.waiting if number in again),
        ]
    )
    here = owners == rank if reads else np.zeros(len(owners), dtype=np.bool_)
    own = np.where(here, lengths, 0)
    first = np.cumsum(own) - own
    assert len(rows) == own.sum(), f"{len(rows)} rows were read here, sequences of this rank have {own.sum()} tokens"
    read: list[Sequences] = []
    apart_lengths: list[tuple[int, ...]] = []
    apart_owners: list[Ints] = []
    for seqs in chosen:
        at = np.array([seq if seq >= 0 else place[seq] for seq in seqs], dtype=np.int64)
        apart_lengths.append(tuple(lengths[at].tolist()))
        apart_owners.append(owners[at])
        if reads:
            taken = at[here[at]]
            tokens = ranges(first[taken], first[taken] + lengths[taken])[1]
            read.append(Sequences(rows[torch.from_numpy(tokens)], tuple(lengths[taken].tolist())))
    return read, PoolLengths(tuple(apart_lengths), tuple(apart_owners))
