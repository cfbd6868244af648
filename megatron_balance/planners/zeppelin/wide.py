"""Rule `groups`: the costed rule over groups of ranks instead of ranks (no such rule in the paper).

A group exchanges heads, so that it attends like one wide rank; between groups the keys of each slice
of the heads go round a ring (`patterns.head_ring`). A ring over R ranks in groups of eight has R / 8
rounds instead of R, every rank sends over its own NIC, and a rank receives the keys of its own heads
only.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_balance.cost.parallel import wide_ranks
from megatron_balance.errors import ConfigError
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import Zone
from megatron_balance.solvers.placed import INTER_NODE, INTRA_NODE, Placement, zones


def group_size(cluster: Cluster, model: Model, wanted: int | None) -> int:
    """Ranks of a group: `wanted`, or the most of a node that divide the heads and share NICs evenly.

    Raises:
        ConfigError: `wanted` does not divide a node, or shares NICs unevenly.
    """
    if wanted is not None:
        wide_ranks(cluster, wanted)
        return wanted
    sizes = (size for size in range(cluster.node_size, 0, -1) if model.num_heads % size == 0)
    return next(size for size in sizes if tiles(cluster, size))


def tiles(cluster: Cluster, size: int) -> bool:
    """Whether groups of `size` ranks divide a node and share NICs evenly."""
    try:
        wide_ranks(cluster, size)
    except ConfigError:
        return False
    return True


def group_zones(placement: Placement, cluster: Cluster, size: int) -> tuple[Zone, ...]:
    """Zones of a placement over groups of `size` ranks; `cluster`: that of the groups."""

    def ranks(groups: Sequence[int]) -> tuple[int, ...]:
        return tuple(rank for group in groups for rank in range(group * size, (group + 1) * size))

    def name(zone: Zone) -> str:
        return INTER_NODE if zone.name == INTER_NODE else INTRA_NODE

    return tuple(
        Zone(name(zone), "head_ring", ranks(zone.ranks), zone.seqs, size) for zone in zones(placement, cluster)
    )
