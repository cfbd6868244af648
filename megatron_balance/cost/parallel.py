"""Parallelism around a plan: ranks that are tensor-parallel groups, collectives in closed form, and
what the dimensions beside context parallelism cost.

Collectives by the formulas of Thakur, Rabenseifner and Gropp ("Optimization of Collective
Communication Operations in MPICH", 2005, section 3); p ranks, node by node, the same number on
each. A step of a ring or tree over several nodes is as slow as its slowest link: NCCL runs rings
over all NICs that the group's ranks have on a node, so the rate between nodes is the sum of theirs.
"""

from dataclasses import dataclass, replace
from math import gcd

from megatron_balance.cost.base import Link
from megatron_balance.errors import ConfigError
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.model import Model

# Gradients are reduced in fp32 (Megatron-core's default with bf16 weights).
GRADIENT_BYTES = 4

# The bf16 weights that the distributed optimizer gathers.
WEIGHT_BYTES = 2


def wide_ranks(cluster: Cluster, tensor_parallel: int) -> Cluster:
    """The cluster whose ranks are tensor-parallel groups of neighbours: `tensor_parallel` times the
    rates and memory each.

    Heads, channels and the keys that travel are split evenly over a group's GPUs and links. A group of
    two that share a NIC has it to itself; of two with one each it has both. Raises ConfigError: the
    group does not divide a node.
    """
    if tensor_parallel < 1 or cluster.node_size % tensor_parallel:
        raise ConfigError(
            f"tensor parallelism {tensor_parallel} does not divide {cluster.name}'s nodes of {cluster.node_size} ranks"
        )
    shared = cluster.ranks_per_nic
    if shared % tensor_parallel and tensor_parallel % shared:
        raise ConfigError(
            f"tensor parallelism {tensor_parallel} and {shared} ranks per NIC ({cluster.name}): one must divide the "
            "other"
        )
    return replace(
        cluster,
        num_ranks=cluster.num_ranks // tensor_parallel,
        ranks_per_node=cluster.ranks_per_node // tensor_parallel,
        intra_bytes_per_s=cluster.intra_bytes_per_s * tensor_parallel,
        nic_bytes_per_s=cluster.nic_bytes_per_s * max(1, tensor_parallel // shared),
        ranks_per_nic=max(1, shared // tensor_parallel),
        flops_per_s=cluster.flops_per_s * tensor_parallel,
        memory_bytes=cluster.memory_bytes * tensor_parallel,
        memory_bytes_per_s=cluster.memory_bytes_per_s * tensor_parallel,
        num_sms=cluster.num_sms * tensor_parallel,
    )


def one_of_each(cluster: Cluster, tensor_parallel: int) -> Cluster:
    """The cluster of one rank of each tensor-parallel group of neighbours, which share their NICs."""
    peers = min(tensor_parallel, cluster.ranks_per_nic)
    return replace(
        cluster,
        num_ranks=cluster.num_ranks // tensor_parallel,
        ranks_per_node=max(1, cluster.ranks_per_node // tensor_parallel),
        ranks_per_nic=max(1, cluster.ranks_per_nic // tensor_parallel),
        nic_bytes_per_s=cluster.nic_bytes_per_s / peers,
    )


def joined_nodes(cluster: Cluster, tensor_parallel: int) -> Cluster:
    """The cluster, nodes taken together as one where a tensor-parallel group is larger than one.

    Such a group's rings cross nodes over the NICs of all its GPUs, each a ring of its own.
    """
    if tensor_parallel <= cluster.node_size:
        return cluster
    across = cluster.nic_bytes_per_s / cluster.ranks_per_nic * cluster.node_size
    return replace(
        cluster,
        num_ranks=max(1, cluster.num_ranks // tensor_parallel) * tensor_parallel,
        ranks_per_node=tensor_parallel,
        intra_bytes_per_s=min(cluster.intra_bytes_per_s, across),
        intra_alpha_s=cluster.inter_alpha_s,
    )


def gradient_sync_s(num_parameters: float, group: "CollectiveGroup") -> float:
    """Seconds of a step's data-parallel synchronisation, nothing hidden: the distributed optimizer's
    reduce-scatter in fp32 and all-gather in bf16.
    """
    each = num_parameters / group.num_ranks
    return all_gather_s(each * GRADIENT_BYTES, group) + all_gather_s(each * WEIGHT_BYTES, group)


def experts_s(model: Model, num_tokens: float, cluster: Cluster, ranks: int) -> float:
    """Seconds of a layer's two all-to-alls between the `ranks` neighbours that share its experts, one
    way through the layer, where all others do the same at once.
    """
    if ranks == 1 or not model.num_experts or not num_tokens:
        return 0.0
    here = gcd(ranks, cluster.node_size)
    num_bytes = num_tokens * model.experts_per_token * model.hidden_size * model.bytes_per_element
    return model.layer_shares[2] * 2 * all_to_all_s(num_bytes, group_of(cluster, ranks, here, busy_nics=True))


def stage_transfer_s(model: Model, num_tokens: float, link: Link) -> float:
    """Seconds to hand the hidden states of tokens to the next pipeline stage."""
    return link.time_s(num_tokens * model.hidden_size * model.bytes_per_element)


@dataclass(frozen=True, slots=True)
class CollectiveGroup:
    """`ranks_per_node` on each node; `intra`: a rank's link, `inter`: all its NICs on a node, of whose
    rate an all-to-all reaches `efficiency`.
    """

    num_ranks: int
    ranks_per_node: int
    intra: Link
    inter: Link
    efficiency: float = 1.0

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
    """A group of `num_ranks` ranks of `cluster`. `busy_nics`: the node's other ranks do the same at
    once. Raises ConfigError: more ranks on a node than it has.
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
        cluster.all_to_all_efficiency,
    )


def all_gather_s(num_bytes: float, group: CollectiveGroup) -> float:
    """Seconds until every rank has the `num_bytes` of each other rank, by ring. A reduce-scatter to
    `num_bytes` a rank is the same backwards, and its additions hide.
    """
    ranks, step = group.num_ranks, group.slowest
    if ranks == 1:
        return 0.0
    return (ranks - 1) * step.alpha_s + (ranks - 1) * num_bytes / step.bytes_per_s


def all_to_all_s(num_bytes: float, group: CollectiveGroup) -> float:
    """Seconds until every rank has sent an even share of its `num_bytes` to each rank, itself
    included.

    Pairwise: p - 1 messages a rank. What stays in the node and what leaves it move at once.
    """
    ranks, here = group.num_ranks, group.ranks_per_node
    if ranks == 1:
        return 0.0
    each = num_bytes / ranks
    inside = (here - 1) * (group.intra.alpha_s + each / group.intra.bytes_per_s)
    away = (ranks - here) * (group.inter.alpha_s + each * here / (group.efficiency * group.inter.bytes_per_s))
    return max(inside, away)
