"""What both rules share: a placement gives each sequence its ranks; sequences with the same ranks share one zone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from megatron_balance.core.cluster import Cluster
from megatron_balance.core.plan import Zone

Placement: TypeAlias = Sequence[tuple[int, ...]]
"""By sequence id, the ranks that share it: ascending, so that a ring crosses each node's border once."""

INTER_NODE, INTRA_NODE, LOCAL = "inter_node", "intra_node", "local"


def members(placement: Placement, fewest: int = 1) -> dict[tuple[int, ...], list[int]]:
    """The sequences, ascending, that share a set of `fewest` ranks or more."""
    # By identity first: hashing a thousand ranks for each of a thousand sequences would take longer than all the rest.
    alike: dict[int, list[int]] = {}
    for seq, ranks in enumerate(placement):
        if len(ranks) >= fewest:
            alike.setdefault(id(ranks), []).append(seq)
    groups: dict[tuple[int, ...], list[int]] = {}
    for seqs in alike.values():
        groups.setdefault(placement[seqs[0]], []).extend(seqs)
    return {ranks: sorted(seqs) for ranks, seqs in groups.items()}


def zones(placement: Placement, cluster: Cluster) -> tuple[Zone, ...]:
    """Zones in issue order: inter-node, intra-node, local; the widest first, then by ranks."""
    groups = members(placement)
    size = cluster.node_size

    def spread(ranks: tuple[int, ...]) -> int:
        return 2 if len(ranks) == 1 else int(ranks[0] // size == ranks[-1] // size)

    ordered = sorted(groups, key=lambda ranks: (spread(ranks), -len(ranks), ranks))
    names = (INTER_NODE, INTRA_NODE, LOCAL)
    return tuple(Zone(names[spread(ranks)], "ring", ranks, tuple(groups[ranks])) for ranks in ordered)


def share(length: int, num_ranks: int) -> int:
    """Tokens of a sequence that a rank holds at most: two of 2p near-equal chunks on p ranks (`schedules.zigzag`: p <= length / 2)."""
    parts = max(1, min(num_ranks, length // 2))
    return length if parts == 1 else min(length, 2 * -(-length // (2 * parts)))
