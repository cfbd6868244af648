"""Communication patterns: how the ranks of a zone meet queries, keys and outputs. One file each.

A new pattern is a subclass of `base.CommPattern` in a file of its own and a line in `PATTERNS`.
"""

from collections.abc import Iterable
from typing import Any

from megatron_balance.errors import InvalidProgramError
from megatron_balance.patterns.all_gather import ALL_GATHER, GATHER_DOCUMENTS, GATHER_SEQUENCE
from megatron_balance.patterns.base import AnyZone, CommPattern, ZoneAt
from megatron_balance.patterns.dispatch import Dispatch
from megatron_balance.patterns.head_exchange import ChunkExchange, HeadExchange
from megatron_balance.patterns.head_ring import HeadRing
from megatron_balance.patterns.once_per_node import CHUNK_EXCHANGE_ONCE, DISPATCH_ONCE, HEAD_EXCHANGE_ONCE
from megatron_balance.patterns.waves import WAVES

PATTERNS: dict[str, CommPattern[Any]] = {
    "ring": HeadRing(grouped=False),
    "all_gather": ALL_GATHER,
    "gather_documents": GATHER_DOCUMENTS,
    "gather_sequence": GATHER_SEQUENCE,
    "head_exchange": HeadExchange(),
    "chunk_exchange": ChunkExchange(),
    "head_exchange_once": HEAD_EXCHANGE_ONCE,
    "chunk_exchange_once": CHUNK_EXCHANGE_ONCE,
    "head_ring": HeadRing(grouped=True),
    "dispatch": Dispatch(),
    "dispatch_once": DISPATCH_ONCE,
    "waves": WAVES,
}

# Comm patterns that send rows to each rank that needs them, and those that are the same but send
# them once to a node.
ONCE_PER_NODE = {
    "dispatch": "dispatch_once",
    "head_exchange": "head_exchange_once",
    "chunk_exchange": "chunk_exchange_once",
}


def pattern_of(zone: AnyZone) -> CommPattern[Any]:
    """The comm pattern of a zone; InvalidProgramError where there is none of the name."""
    if zone.pattern not in PATTERNS:
        raise InvalidProgramError(
            f"zone {zone.name}: unknown comm pattern {zone.pattern!r}; known: {', '.join(PATTERNS)}"
        )
    return PATTERNS[zone.pattern]


def by_pattern(zones: Iterable[AnyZone]) -> list[tuple[CommPattern[Any], list[ZoneAt[Any]]]]:
    """The zones of a plan by pattern, each with its index. InvalidProgramError: no such pattern."""
    # For questions that a pattern answers for all of its zones at once.
    groups: dict[str, list[ZoneAt[Any]]] = {}
    for index, zone in enumerate(zones):
        pattern_of(zone)
        groups.setdefault(zone.pattern, []).append((index, zone))
    return [(PATTERNS[name], members) for name, members in groups.items()]
