"""Parallelism around a plan: ranks that are tensor-parallel groups, and what the dimensions beside
context parallelism cost.
"""

from __future__ import annotations

from dataclasses import replace
from math import gcd

from megatron_balance.cost.base import Link
from megatron_balance.cost.collectives import CollectiveGroup, all_gather_s, all_to_all_s, group_of, reduce_scatter_s
from megatron_balance.errors import ConfigError
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.model import Model

GRADIENT_BYTES = 4
"""Gradients are reduced in fp32 (Megatron-core's default with bf16 weights)."""

WEIGHT_BYTES = 2
"""The bf16 weights that the distributed optimizer gathers."""


def wide_ranks(cluster: Cluster, tensor_parallel: int) -> Cluster:
    """The cluster whose ranks are tensor-parallel groups of neighbours: `tensor_parallel` times the
    rates and memory each.

    Heads, channels and the keys that travel are split evenly over a group's GPUs and links, so a
    group acts as one wide rank. NICs: a group of two that share one has it to itself; of two with
    one each it has both.

    Raises:
        ConfigError: the group does not divide a node.
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
    """The cluster of one rank of each tensor-parallel group of neighbours; their NICs are shared with
    the others of the group.
    """
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


def gradient_sync_s(num_parameters: float, group: CollectiveGroup, *, sharded: bool = True) -> float:
    """Seconds of the data-parallel synchronisation of a step, nothing hidden: gradients summed,
    weights gathered.

    `sharded`: the distributed optimizer's reduce-scatter in fp32 and all-gather in bf16; else one
    all-reduce in fp32, by ring.
    """
    each = num_parameters / group.num_ranks
    gathered = WEIGHT_BYTES if sharded else GRADIENT_BYTES
    return reduce_scatter_s(each * GRADIENT_BYTES, group) + all_gather_s(each * gathered, group)


def expert_exchange_s(model: Model, num_tokens: float, group: CollectiveGroup) -> float:
    """Seconds of a layer's two all-to-alls between the ranks that share its experts, forward:
    tokens to experts and back.
    """
    if not model.num_experts:
        return 0.0
    return 2 * all_to_all_s(num_tokens * model.experts_per_token * model.hidden_size * model.bytes_per_element, group)


def experts_s(model: Model, num_tokens: float, cluster: Cluster, ranks: int) -> float:
    """Seconds of a layer's exchange of tokens between experts, one way through the layer, where so
    many neighbouring ranks share them out and all others do the same at once.
    """
    if ranks == 1 or not model.num_experts or not num_tokens:
        return 0.0
    here = gcd(ranks, cluster.node_size)
    return expert_exchange_s(model, num_tokens, group_of(cluster, ranks, here, busy_nics=True))


def stage_transfer_s(model: Model, num_tokens: float, link: Link) -> float:
    """Seconds to hand the hidden states of tokens to the next pipeline stage."""
    return link.time_s(num_tokens * model.hidden_size * model.bytes_per_element)
