"""Zones to ops: where a plan's fragments lie, and what each rank does in one attention call.

Each movement is one module with `place(zone, lengths, rank)`, `num_exchanges(zone)` and `project(zone, context, rank)`.
Nothing here builds more than one rank's share, except `expand`, which is for proofs and pictures.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from megatron_balance.core.plan import MicrobatchPlan, Tiling, Zone
from megatron_balance.core.program import HOME_WIDTH, Exchange, Op, Program, RankProgram
from megatron_balance.errors import InvalidProgramError
from megatron_balance.passes.join import join
from megatron_balance.passes.tables import Ints, as_rows
from megatron_balance.passes.transpose import Policy, transpose
from megatron_balance.schedules import all_gather, dispatch, head_exchange, ring
from megatron_balance.schedules.context import Context, Share


class Schedule(Protocol):
    """A movement: see `schedules.ring` for the shape of one."""

    def num_exchanges(self, zone: Zone | Tiling, /) -> int: ...
    def place(self, zone: Zone | Tiling, lengths: Ints, rank: int, /) -> Ints: ...
    def project(self, zone: Zone | Tiling, context: Context, rank: int, /) -> Share: ...


SCHEDULES: dict[str, Schedule] = {
    "ring": ring,  # pyright: ignore[reportAssignmentType]
    "all_gather": all_gather,  # pyright: ignore[reportAssignmentType]
    "head_exchange": head_exchange,  # pyright: ignore[reportAssignmentType]
    "dispatch": dispatch,  # pyright: ignore[reportAssignmentType]
}


def schedule_of(zone: Zone | Tiling) -> Schedule:
    """The schedule of a zone.

    Raises InvalidProgramError: no such movement.
    """
    if zone.movement not in SCHEDULES:
        raise InvalidProgramError(f"zone {zone.name}: unknown movement {zone.movement!r}; known: {', '.join(SCHEDULES)}")
    return SCHEDULES[zone.movement]


def holds(zone: Zone | Tiling, rank: int) -> bool:
    """Whether `rank` takes part in the zone."""
    return isinstance(zone, Tiling) or rank in zone.ranks


def layout(plan: MicrobatchPlan, rank: int) -> Ints:
    """Rows (seq, start, stop) int64 [n, 3]: the fragments of `rank` in the order of its tokens."""
    lengths = np.array(plan.lengths, dtype=np.int64)
    parts = [schedule_of(z).place(z, lengths, rank) for z in plan.zones if holds(z, rank)]
    return np.concatenate([np.empty((0, HOME_WIDTH), dtype=np.int64), *parts])


def project(plan: MicrobatchPlan, rank: int) -> RankProgram:
    """The forward ops of one rank, without building anyone else's.

    Raises InvalidProgramError: an unknown movement.
    """
    lengths = np.array(plan.lengths, dtype=np.int64)
    base = 0
    homes = [np.empty((0, HOME_WIDTH), dtype=np.int64)]
    ops: list[Op] = []
    replays: list[tuple[int, Exchange]] = []
    queues: list[tuple[str, int]] = []
    for zone in plan.zones:
        schedule = schedule_of(zone)
        if holds(zone, rank):
            homes.append(schedule.place(zone, lengths, rank))
            share = schedule.project(zone, Context(lengths, plan.num_heads, plan.num_kv_heads, base), rank)
            ops += share.ops
            replays += share.replays
            queues.append((zone.name, len(share.ops)))
        base += schedule.num_exchanges(zone)
    return RankProgram(rank, as_rows(np.concatenate(homes)), tuple(ops), base, replays=tuple(replays), queues=tuple(queues))


def expand(plan: MicrobatchPlan, policy: Policy | None = None) -> Program:
    """The whole program, from every rank's projection; with a policy, the backward too.

    Raises InvalidProgramError: the projections do not fit together.
    """
    ranks = [project(plan, rank) for rank in range(plan.num_ranks)]
    if policy is not None:
        ranks = [transpose(rank, policy) for rank in ranks]
    return join(ranks, plan.lengths, plan.num_heads, plan.num_kv_heads, policy)
