"""The movements by name, and which zones are whose."""

from __future__ import annotations

from typing import Protocol

from megatron_balance.core.plan import Tiling, Zone
from megatron_balance.errors import InvalidProgramError
from megatron_balance.passes.tables import Ints
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
