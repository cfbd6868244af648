"""Pools: the ranks over which a plan may move tokens, one pool per data-parallel x context-parallel group of Megatron.

Ranks of a pool hold the same parameters; every tensor-, expert- and pipeline-parallel coordinate has its own pool.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch.distributed as dist
from megatron.core import mpu

from megatron_balance.errors import ConfigError
from megatron_balance.runtime.groups import Groups, make_groups


@dataclass(frozen=True, slots=True)
class Pool:
    """This rank's pool. Pool ranks are 0 to `size` - 1, node by node."""

    groups: Groups
    ranks_per_node: int
    replicas: tuple[int, ...]
    """By pool rank: its data-parallel replica."""
    readers: tuple[int, ...]
    """By replica: the pool rank whose microbatches count; the replica's other context-parallel ranks read the same ones."""

    @property
    def rank(self) -> int:
        return self.groups.rank

    @property
    def size(self) -> int:
        return self.groups.size

    @property
    def num_replicas(self) -> int:
        return len(self.readers)


@dataclass(frozen=True, slots=True)
class _Place:
    """What every rank tells all others, once."""

    pool: tuple[int, ...]
    replica: int
    context: int
    host: str


def make_pool(ranks_per_node: int | None) -> Pool:
    """This rank's pool, and the process groups of all pools; collective over the world, once, after Megatron's own groups.

    Args:
        ranks_per_node: ranks of the job on a node, numbered node by node; None: nodes are told apart by host name.

    Raises:
        ConfigError: nodes of a pool that hold different numbers of its ranks, or whose ranks are not numbered node by node.
    """
    replicated = cast("dist.ProcessGroup", mpu.get_data_parallel_group(with_context_parallel=True))
    members = tuple(dist.get_process_group_ranks(replicated))
    mine = _Place(members, mpu.get_data_parallel_rank(), mpu.get_context_parallel_rank(), socket.gethostname())
    places: list[_Place] = [mine] * dist.get_world_size()
    dist.all_gather_object(places, mine)
    nodes: list[int | str] = [p.host for p in places] if ranks_per_node is None else [rank // ranks_per_node for rank in range(len(places))]
    pools = sorted({place.pool for place in places})
    per_node = {pool: node_size([nodes[rank] for rank in pool], pool) for pool in pools}
    if len(set(per_node.values())) > 1:
        raise ConfigError(f"pools hold different numbers of ranks per node: {sorted(set(per_node.values()))}; set cluster.ranks_per_node")
    size = per_node[members]
    groups = make_groups(pools, size)
    replicas = tuple(places[rank].replica for rank in members)
    first = {places[rank].replica: at for at, rank in enumerate(members) if places[rank].context == 0}
    return Pool(groups, size, replicas, tuple(first[replica] for replica in sorted(first)))


def node_size(nodes: Sequence[int | str], ranks: Sequence[int]) -> int:
    """Ranks per node of a pool whose ranks lie on `nodes`.

    Raises:
        ConfigError: nodes with different numbers of ranks, or ranks not numbered node by node.
    """
    counts = Counter(nodes)
    changes = sum(a != b for a, b in zip(nodes, nodes[1:], strict=False))
    if len(set(counts.values())) > 1 or changes + 1 != len(counts):
        shown = ", ".join(f"{node}: {count}" for node, count in counts.items())
        raise ConfigError(
            f"ranks {list(ranks)} lie on nodes unevenly or not node by node ({shown}); start the same number of ranks on every node, "
            "or set cluster.ranks_per_node in the configuration"
        )
    return next(iter(counts.values()))
