"""Collectives of a group in closed form: alpha-beta costs of ring, tree and pairwise algorithms.

The formulas are those of Thakur, Rabenseifner and Gropp ("Optimization of Collective Communication
Operations in MPICH", 2005, section 3); p ranks. Ranks of the group are taken node by node, the same
number on each. A step of a ring or tree over several nodes is as slow as its slowest link: NCCL
runs rings over all NICs that the group's ranks have on a node, so the rate between nodes is the sum
of theirs, and each direction is a link of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2
from typing import Literal

from megatron_balance.cost.base import Link
from megatron_balance.errors import ConfigError
from megatron_balance.ir.cluster import Cluster

Algorithm = Literal["ring", "tree"]


@dataclass(frozen=True, slots=True)
class CollectiveGroup:
    """`num_ranks` ranks, `ranks_per_node` on each node; `intra`: a rank's link, `inter`: all NICs
    of the group's ranks on a node.
    """

    num_ranks: int
    ranks_per_node: int
    intra: Link
    inter: Link

    def __post_init__(self) -> None:
        if self.num_ranks % self.ranks_per_node:
            raise ConfigError(f"a group of {self.num_ranks} ranks cannot have {self.ranks_per_node} on each node")

    @property
    def num_nodes(self) -> int:
        return self.num_ranks // self.ranks_per_node

    @property
    def slowest(self) -> Link:
        """Alpha and rate of the slowest step of a ring over all ranks."""
        if self.num_nodes == 1:
            return self.intra
        if self.ranks_per_node == 1:
            return self.inter
        return Link(max(self.intra.alpha_s, self.inter.alpha_s), min(self.intra.bytes_per_s, self.inter.bytes_per_s))


def group_of(cluster: Cluster, num_ranks: int, ranks_per_node: int, *, busy_nics: bool = False) -> CollectiveGroup:
    """A group of `num_ranks` ranks of `cluster`.

    `busy_nics`: the node's other ranks do the same at once, so NICs are shared by all.

    Raises:
        ConfigError: more ranks on a node than it has.
    """
    if not 1 <= ranks_per_node <= cluster.node_size:
        raise ConfigError(f"{ranks_per_node} ranks on a node: {cluster.name} has {cluster.node_size}")
    exact = ranks_per_node / cluster.ranks_per_nic
    # One rank may have a NIC to itself even where two share it, unless the other one is at it too.
    nics = exact if busy_nics else max(1.0, exact)
    return CollectiveGroup(
        num_ranks,
        ranks_per_node,
        Link(cluster.intra_alpha_s, cluster.intra_bytes_per_s),
        Link(cluster.inter_alpha_s, nics * cluster.nic_bytes_per_s),
    )


def all_gather_s(num_bytes: float, group: CollectiveGroup, algorithm: Algorithm = "ring") -> float:
    """Seconds until every rank has the `num_bytes` of each other rank. tree: recursive doubling,
    log2 p steps.
    """
    ranks, step = group.num_ranks, group.slowest
    if ranks == 1:
        return 0.0
    return _steps(ranks, algorithm) * step.alpha_s + (ranks - 1) * num_bytes / step.bytes_per_s


def reduce_scatter_s(num_bytes: float, group: CollectiveGroup, algorithm: Algorithm = "ring") -> float:
    """Seconds until every rank has its own `num_bytes` of the sum: the all-gather backwards.

    The additions hide behind the bytes.
    """
    return all_gather_s(num_bytes, group, algorithm)


def all_reduce_s(num_bytes: float, group: CollectiveGroup, algorithm: Algorithm = "ring") -> float:
    """Seconds until every rank has the sum of `num_bytes`: reduce-scatter, then all-gather of a
    p-th (tree: Rabenseifner's).
    """
    return 2 * all_gather_s(num_bytes / group.num_ranks, group, algorithm)


def all_to_all_s(num_bytes: float, group: CollectiveGroup) -> float:
    """Seconds until every rank has sent an even share of its `num_bytes` to each rank, itself
    included.

    Pairwise: p - 1 messages a rank. What stays in the node and what leaves it move at once, on
    links of their own; a node's ranks share its NICs.
    """
    ranks, here = group.num_ranks, group.ranks_per_node
    if ranks == 1:
        return 0.0
    each = num_bytes / ranks
    inside = (here - 1) * (group.intra.alpha_s + each / group.intra.bytes_per_s)
    away = (ranks - here) * (group.inter.alpha_s + each * here / group.inter.bytes_per_s)
    return max(inside, away)


def _steps(ranks: int, algorithm: Algorithm) -> int:
    return ranks - 1 if algorithm == "ring" else ceil(log2(ranks))
