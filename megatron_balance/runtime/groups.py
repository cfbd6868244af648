"""Process groups: made collectively, once, and passed to whoever communicates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist

from megatron_balance.errors import ConfigError


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """One rank's view of its pool.

    `rank`, `size`: in the pool, as plans count. `ranks`: global rank of each. `by_ranks`: process groups by pool ranks; the
    executor runs a collective among exactly such a set, and point-to-point transfers otherwise.
    """

    rank: int
    size: int
    ranks: tuple[int, ...]
    pool: dist.ProcessGroup | None
    by_ranks: dict[tuple[int, ...], dist.ProcessGroup] = field(default_factory=dict)

    def of(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        """The group of exactly these pool ranks, or None."""
        return self.by_ranks.get(ranks)


def single() -> Groups:
    """A pool of one rank: nothing to communicate, no process group needed."""
    return Groups(0, 1, (0,), None)


def make_groups(
    pools: Sequence[Sequence[int]], ranks_per_node: int = 0, *, timeout: timedelta | None = None, backend: str | None = None
) -> Groups:
    """Groups of the pool that this process belongs to. Every process calls it with the same `pools` (global ranks).

    Beside the pool, each of its nodes of `ranks_per_node` gets a group where there are several (0: none), so that zones
    on whole nodes can use collectives. All groups are created by all processes in one order, as NCCL and gloo require.

    Raises ConfigError: this process is in no pool or in two.
    """
    me = dist.get_rank()
    mine = [tuple(pool) for pool in pools if me in pool]
    if len(mine) != 1:
        raise ConfigError(f"rank {me} is in {len(mine)} pools, expected exactly one of {[list(p) for p in pools]}")
    found: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for pool in pools:
        for members in _wanted(len(pool), ranks_per_node):
            group = dist.new_group([pool[i] for i in members], timeout=timeout, backend=backend)
            if isinstance(group, dist.ProcessGroup) and tuple(pool) == mine[0] and pool.index(me) in members:
                found[members] = group
    pool = mine[0]
    return Groups(pool.index(me), len(pool), pool, found.get(tuple(range(len(pool)))), found)


def _wanted(size: int, ranks_per_node: int) -> list[tuple[int, ...]]:
    whole = [tuple(range(size))] if size > 1 else []
    if 1 < ranks_per_node < size and size % ranks_per_node == 0:
        return whole + [tuple(range(a, a + ranks_per_node)) for a in range(0, size, ranks_per_node)]
    return whole
