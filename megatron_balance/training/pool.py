"""Pools: the ranks over which a plan may move tokens. They hold the same parameters.

Every pipeline stage has its own. The pools of all stages at one tensor-parallel coordinate form a
joint pool, stage by stage: what is read and planned is shared over it. Under a planner whose replicas
are pipelines (docs/adr/0023) a pool reads and plans together, and attends replica by replica.
"""

import dataclasses
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, TypeAlias, cast

import torch
import torch.distributed as dist

from megatron_balance.errors import ConfigError
from megatron_balance.ir.strategy import Strategy
from megatron_balance.runtime.groups import Groups, make_groups

Attends: TypeAlias = Literal["pool", "joint", "replica"]


@dataclass(frozen=True, slots=True)
class Pool:
    """This rank's pool. Pool ranks are 0 to `size` - 1, node by node."""

    groups: Groups
    ranks_per_node: int
    replicas: tuple[int, ...]  # by pool rank: the number of its replica, whose ranks read the same microbatches
    readers: tuple[int, ...]  # by replica: the pool rank whose microbatches count
    stage: int = 0
    num_stages: int = 1
    joint_groups: Groups | None = None  # None: there is one stage
    joint_ranks_per_node: int = 0  # ranks of the joint pool on a node; 0: they are spread unevenly or not node by node
    # This rank's replica, where every replica attends for itself; None: the whole pool does
    # together.
    replica_groups: Groups | None = None

    @property
    def attention(self) -> Groups:
        return self.groups if self.replica_groups is None else self.replica_groups

    @property
    def pipeline(self) -> int:
        """The pipeline of a step's plan that this rank runs."""
        return 0 if self.replica_groups is None else self.replica

    def ranks_of(self, pipeline: int) -> tuple[int, ...]:
        """Pool ranks of a pipeline's stage, as its plans number them."""
        if self.replica_groups is None:
            return tuple(range(self.size))
        return tuple(rank for rank, replica in enumerate(self.replicas) if replica == pipeline)

    def holders_of(self, pipeline: int) -> tuple[tuple[int, ...], ...]:
        """Pool ranks that are handed a pipeline's tokens, a row for each copy."""
        return (self.ranks_of(pipeline),)

    def exchanges(self, tensor_parallel: "TensorParallel") -> bool:
        return self.has_tokens and tensor_parallel.is_source

    @property
    def joint(self) -> Groups:
        """The pools of all stages; rank `stage * size + rank` of it is this one."""
        return self.groups if self.joint_groups is None else self.joint_groups

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

    @property
    def replica(self) -> int:
        return self.replicas[self.rank]

    @property
    def reads(self) -> bool:
        return self.rank in self.readers


@dataclass(frozen=True, slots=True)
class StrategyRanks:
    """All ranks of a job as tokens find them under a strategy; answers as `Pool` does."""

    # The rank of TP rank 0 takes tokens, and hands them on.
    groups: Groups
    strategy: Strategy
    # Ranks whose sequences count.
    readers: tuple[int, ...]

    @property
    def rank(self) -> int:
        return self.groups.rank

    @property
    def size(self) -> int:
        return self.groups.size

    @property
    def reads(self) -> bool:
        return self.rank in self.readers

    @property
    def pipeline(self) -> int:
        """The pipeline of this rank; -1: it is left over."""
        seat = self.strategy.seat(self.rank)
        return -1 if seat is None else seat.pipeline

    @property
    def has_tokens(self) -> bool:
        seat = self.strategy.seat(self.rank)
        return seat is not None and seat.stage in (0, seat.scheme.pipeline - 1)

    def ranks_of(self, pipeline: int) -> tuple[int, ...]:
        """A pipeline's context-parallel ranks, at this rank's place in it, if it has one."""
        seat = self.strategy.seat(self.rank)
        if seat is None or seat.pipeline != pipeline:
            return self._row(pipeline, 0, 0)
        return self._row(pipeline, seat.stage, seat.tensor)

    def holders_of(self, pipeline: int) -> tuple[tuple[int, ...], ...]:
        stages = self.strategy.pipelines[pipeline].pipeline
        return tuple(self._row(pipeline, stage, 0) for stage in dict.fromkeys((0, stages - 1)))

    def exchanges(self, tensor_parallel: "TensorParallel") -> bool:  # noqa: ARG002  the exchange is one of all ranks
        return True

    def _row(self, pipeline: int, stage: int, tensor: int) -> tuple[int, ...]:
        scheme, ranks = self.strategy.pipelines[pipeline], self.strategy.ranks_of(pipeline)
        # Ranks of a scheme lie [stage, context, tensor].
        first = stage * scheme.context
        return tuple(ranks[(first + at) * scheme.tensor + tensor] for at in range(scheme.context))


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """Ranks that compute the same tokens; rank 0, `source` in the world, reads and hands on."""

    group: dist.ProcessGroup | None = None  # None: this rank alone
    source: int = 0

    @property
    def is_source(self) -> bool:
        return self.group is None or self.group.rank() == 0

    @property
    def size(self) -> int:
        return 1 if self.group is None else self.group.size()


@dataclass(frozen=True, slots=True)
class Membership:
    """One rank's place in the job, told to all others once."""

    # Global ranks.
    pool: tuple[int, ...]
    replica: int
    reads: bool = True
    stage: int = 0
    # Global ranks of all pipeline stages at its coordinate (empty or one: no pipeline).
    stages: tuple[int, ...] = ()
    host: str = ""


def make_pool(
    mine: Membership,
    ranks_per_node: int | None = None,
    sms: Mapping[str, int] | None = None,
    *,
    attends: Attends = "pool",
    safe: bool = False,
    timeout: timedelta | None = None,
) -> Pool:
    """Make the process groups of all pools, and return this rank's pool. Collective over the world,
    once.

    `ranks_per_node`: of the job, numbered node by node; None: nodes are told apart by host name.
    `attends`: the ranks that have the groups and streams that attention takes: each stage's pool,
    the joint pools, or each replica's ranks of a pool. Others as for `make_groups`. ConfigError:
    nodes of a pool that hold different numbers of its ranks, or whose ranks are not numbered node
    by node.
    """
    mine = dataclasses.replace(mine, host=socket.gethostname())
    everyone: list[Membership] = [mine] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    nodes: list[int | str] = (
        [each.host for each in everyone]
        if ranks_per_node is None
        else [rank // ranks_per_node for rank in range(len(everyone))]
    )
    pools = sorted({each.pool for each in everyone})
    per_node = {pool: node_size([nodes[rank] for rank in pool], pool) for pool in pools}
    if len(set(per_node.values())) > 1:
        raise ConfigError(
            f"pools hold different numbers of ranks per node: {sorted(set(per_node.values()))}; set "
            "cluster.ranks_per_node"
        )
    size = per_node[mine.pool]
    replicas = tuple(everyone[rank].replica for rank in mine.pool)
    first = {everyone[rank].replica: at for at, rank in enumerate(mine.pool) if everyone[rank].reads}
    # Each replica's reader is the pool rank whose samples count, in the order of replicas.
    readers = tuple(first[replica] for replica in sorted(first))
    replica_groups = None
    if attends == "replica":
        parts = [tuple(r for r in pool if everyone[r].replica == each) for pool in pools for each in sorted(first)]
        sizes = {node_size([nodes[rank] for rank in part], part) for part in parts}
        assert len(sizes) == 1, f"replicas of one size lie on nodes of one size, got {sizes}"
        replica_groups = make_groups(parts, sizes.pop(), timeout=timeout, sms=sms, safe=safe)

    def make(pools: Sequence[tuple[int, ...]]) -> Groups:
        return (
            _plain_groups(pools, timeout)
            if attends == "replica"
            else make_groups(pools, size, timeout=timeout, sms=sms, safe=safe)
        )

    if len(mine.stages) <= 1:
        groups = make(pools)
        return Pool(groups, size, replicas, readers, replica_groups=replica_groups)
    joints = sorted(
        {
            # A rank's stages lie behind one another; all pool ranks' first stages come first, then
            # their second ones: stage by stage.
            tuple(rank for stage in zip(*(everyone[r].stages for r in pool), strict=True) for rank in stage)
            for pool in pools
        }
    )
    joint_size = _common_node_size(joints, nodes)
    if attends == "joint":
        groups = _plain_groups(pools, timeout)
        joint_groups = make_groups(joints, joint_size, timeout=timeout, sms=sms, safe=safe)
    else:
        groups = make(pools)
        joint_groups = _plain_groups(joints, timeout)
    return Pool(groups, size, replicas, readers, mine.stage, len(mine.stages), joint_groups, joint_size, replica_groups)


def least_and_most(
    numbers: Sequence[int], groups: Sequence[dist.ProcessGroup], device: torch.device | str
) -> list[tuple[int, int]]:
    """Of each number its least and its most over the ranks of all `groups`. Collective over each."""
    if not groups:
        return [(number, number) for number in numbers]
    # The least of n and of -n in one reduction: the latter is the most, negated.
    ends = torch.tensor([(number, -number) for number in numbers], dtype=torch.int64, device=device)
    for group in groups:
        dist.all_reduce(ends, op=dist.ReduceOp.MIN, group=group)
    return [(least, -negated) for least, negated in ends.tolist()]


def _plain_groups(pools: Sequence[tuple[int, ...]], timeout: timedelta | None) -> Groups:
    """A group for each pool, for what is shared over it, and nothing that attention takes."""
    me = dist.get_rank()
    # All ranks make all groups in one order, as torch demands.
    made = {pool: cast("dist.ProcessGroup", dist.new_group(list(pool), timeout=timeout)) for pool in pools}
    mine = next(pool for pool in pools if me in pool)
    return Groups(mine.index(me), len(mine), mine, made[mine] if len(mine) > 1 else None)


def _common_node_size(pools: Sequence[tuple[int, ...]], nodes: Sequence[int | str]) -> int:
    try:
        sizes = {node_size([nodes[rank] for rank in pool], pool) for pool in pools}
    except ConfigError:
        return 0
    return sizes.pop() if len(sizes) == 1 else 0


def node_size(nodes: Sequence[int | str], ranks: Sequence[int]) -> int:
    """Ranks per node, of ranks that lie on `nodes`; ConfigError: unevenly, or not node by node."""
    counts = Counter(nodes)
    # Node by node: as many changes from one rank to the next as there are nodes, less one.
    changes = sum(a != b for a, b in zip(nodes, nodes[1:], strict=False))
    if len(set(counts.values())) > 1 or changes + 1 != len(counts):
        shown = ", ".join(f"{node}: {count}" for node, count in counts.items())
        raise ConfigError(
            f"ranks {list(ranks)} lie on nodes unevenly or not node by node ({shown}); start the same number of ranks "
            "on every node, "
            "or set cluster.ranks_per_node in the configuration"
        )
    return next(iter(counts.values()))
