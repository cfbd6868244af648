"""What every schedule is handed beside its zone, and how it hands back one rank's share."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from megatron_balance.ir.arrays import Ints, as_rows
from megatron_balance.ir.program import Attend, Collective, Exchange, Merge, Op


@dataclass(frozen=True, slots=True)
class Context:
    """Facts of the microbatch. `lengths`: int64 [num_seqs]; `base`: the zone's first exchange id. `attends`: whether anything but
    exchanges is asked for; `replays`: whether the exchanges of a replayed backward are, where they are others.
    """

    lengths: Ints
    num_heads: int
    num_kv_heads: int
    base: int = 0
    attends: bool = True
    replays: bool = True


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's part of one zone: its forward ops and, for a replayed backward, exchanges by forward id."""

    ops: list[Op]
    replays: list[tuple[int, Exchange]] = field(default_factory=list[tuple[int, Exchange]])


def cut_by(table: Ints, counts: Ints) -> list[bytes]:
    """So many rows of `table` after one another as one little-endian block of bytes each."""
    ends = counts.cumsum().tolist()
    table = np.ascontiguousarray(table, dtype="<i8")
    return [table[a:b].tobytes() for a, b in zip([0, *ends], ends, strict=False)]


def exchange(context: Context, step: int, rows: Ints, collective: Collective = "p2p", group: tuple[int, ...] = ()) -> Exchange:
    """The exchange number `step` of the zone."""
    return Exchange(context.base + step, as_rows(rows), collective, group)


def attend(rank: int, pairs: Ints) -> Attend:
    return Attend(rank, as_rows(pairs))


def merge(rank: int, values: Ints) -> Merge:
    return Merge(rank, as_rows(values))
