"""Pools: the ranks over which a plan may move tokens, one pool per data-parallel x context-parallel group of Megatron.

Ranks of a pool hold the same parameters; every tensor-, expert- and pipeline-parallel coordinate has its own pool. The pools of all
pipeline stages at one tensor-parallel coordinate form a joint pool, stage by stage: they compute the same microbatches, so what is read
and planned is shared over it.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Mapping, Sequence
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
    stage: int = 0
    num_stages: int = 1
    pipeline: Groups | None = None
    """Of the joint pool, if there are several stages."""
    pipeline_node: int = 0
    """Its ranks on a node; 0: they are spread unevenly or not node by node."""

    @property
    def joint(self) -> Groups:
        """The pools of all stages; its rank `stage * size + rank` is this one."""
        return self.groups if self.pipeline is None else self.pipeline

    @property
    def has_tokens(self) -> bool:
        """Whether this stage embeds tokens or computes the loss."""
        return self.stage in (0, self.num_stages - 1)

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
    stage: int
    pipeline: tuple[int, ...]
    replica: int
    context: int
    host: str


def make_pool(ranks_per_node: int | None, sms: Mapping[str, int] | None = None, *, joint: bool = False) -> Pool:
    """This rank's pool, and the process groups of all pools; collective over the world, once, after Megatron's own groups.

    Args:
        ranks_per_node: ranks of the job on a node, numbered node by node; None: nodes are told apart by host name.
        sms: as for `make_groups`.
        joint: attention runs over the joint pools, which then have the groups and streams that it takes; else over each stage's pool.

    Raises:
        ConfigError: nodes of a pool that hold different numbers of its ranks, or whose ranks are not numbered node by node.
    """
    replicated = cast("dist.ProcessGroup", mpu.get_data_parallel_group(with_context_parallel=True))
    members = tuple(dist.get_process_group_ranks(replicated))
    stages = tuple(dist.get_process_group_ranks(cast("dist.ProcessGroup", mpu.get_pipeline_model_parallel_group())))
    stage = mpu.get_pipeline_model_parallel_rank()
    mine = _Place(members, stage, stages, mpu.get_data_parallel_rank(), mpu.get_context_parallel_rank(), socket.gethostname())
    places: list[_Place] = [mine] * dist.get_world_size()
    dist.all_gather_object(places, mine)
    nodes: list[int | str] = [p.host for p in places] if ranks_per_node is None else [rank // ranks_per_node for rank in range(len(places))]
    pools = sorted({place.pool for place in places})
    per_node = {pool: node_size([nodes[rank] for rank in pool], pool) for pool in pools}
    if len(set(per_node.values())) > 1:
        raise ConfigError(f"pools hold different numbers of ranks per node: {sorted(set(per_node.values()))}; set cluster.ranks_per_node")
    size = per_node[members]
    replicas = tuple(places[rank].replica for rank in members)
    first = {places[rank].replica: at for at, rank in enumerate(members) if places[rank].context == 0}
    readers = tuple(first[replica] for replica in sorted(first))
    if len(stages) == 1:
        return Pool(make_groups(pools, size, sms=sms), size, replicas, readers)
    joints = sorted({tuple(rank for stage in zip(*(places[r].pipeline for r in pool), strict=True) for rank in stage) for pool in pools})
    node = _common_node_size(joints, nodes)
    if joint:
        groups, pipeline = _plain_groups(pools), make_groups(joints, node, sms=sms)
    else:
        groups, pipeline = make_groups(pools, size, sms=sms), _plain_groups(joints)
    return Pool(groups, size, replicas, readers, stage, len(stages), pipeline, node)


def _plain_groups(pools: Sequence[tuple[int, ...]]) -> Groups:
    """A group for each pool, for what is shared over it, and nothing that attention takes."""
    me = dist.get_rank()
    made = {pool: cast("dist.ProcessGroup", dist.new_group(list(pool))) for pool in pools}
    mine = next(pool for pool in pools if me in pool)
    return Groups(mine.index(me), len(mine), mine, made[mine] if len(mine) > 1 else None)


def _common_node_size(pools: Sequence[tuple[int, ...]], nodes: Sequence[int | str]) -> int:
    """Ranks of a pool on a node; 0 if that differs, or their ranks are not numbered node by node."""
    try:
        sizes = {node_size([nodes[rank] for rank in pool], pool) for pool in pools}
    except ConfigError:
        return 0
    return sizes.pop() if len(sizes) == 1 else 0


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
