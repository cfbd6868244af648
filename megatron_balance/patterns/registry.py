"""The comm patterns by name, and which zones are whose."""

from __future__ import annotations

from typing import Protocol

from megatron_balance.errors import InvalidProgramError
from megatron_balance.ir.arrays import Ints
from megatron_balance.ir.plan import TaskTable, Zone
from megatron_balance.patterns import all_gather, dispatch, head_exchange, ring
from megatron_balance.patterns.base import Context, Share


class CommPattern(Protocol):
    """A comm pattern: see `patterns.ring` for the shape of one."""

    def num_exchanges(self, zone: Zone | TaskTable, /) -> int: ...
    def place(self, zone: Zone | TaskTable, lengths: Ints, rank: int, /) -> Ints: ...
    def project(self, zone: Zone | TaskTable, context: Context, rank: int, /) -> Share: ...


PATTERNS: dict[str, CommPattern] = {
    "ring": ring,  # pyright: ignore[reportAssignmentType]
    "all_gather": all_gather,  # pyright: ignore[reportAssignmentType]
    "head_exchange": head_exchange,  # pyright: ignore[reportAssignmentType]
    "dispatch": dispatch,  # pyright: ignore[reportAssignmentType]
}


def pattern_of(zone: Zone | TaskTable) -> CommPattern:
    """The schedule of a zone.

    Raises InvalidProgramError: no such comm pattern.
    """
    if zone.pattern not in PATTERNS:
        raise InvalidProgramError(f"zone {zone.name}: unknown comm pattern {zone.pattern!r}; known: {', '.join(PATTERNS)}")
    return PATTERNS[zone.pattern]


def holds(zone: Zone | TaskTable, rank: int) -> bool:
    """Whether `rank` takes part in the zone."""
    return isinstance(zone, TaskTable) or rank in zone.ranks
