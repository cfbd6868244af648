"""distca: core attention as tasks of their own, on servers that need not hold the tokens (core
attention disaggregation).

Paper: Efficient Long-context Language Model Training by Core Attention Disaggregation (DistCA),
section 4.2 and Appendix B.

What we implement: the linear layout of section 6.1, sequences one after the other, as many tokens
on every rank; tasks of query shards at multiples of the kernel block (the last of a fragment as it
ends) with all keys before them; the communication-aware greedy scheduling with its score, seconds
of attention migrated for each byte, and the closed forms of Appendix B, derived again, for plain
shards and for head-tail pairs (`shards`); its stop rule (`least_score`); seconds from the cost
model instead of FLOPs (`work`); caps on what a server holds and receives, for its own queries, too
(`caps`). Every rank is an attention server; `servers: pool` leaves some without tokens. `schedule`
is the scheduler alone, for a layout that is given.

What we leave out: the order of execution (ping-pong, ticks of a pipeline), which is not a planner's
business: it plans each nano-batch, and each tick (`plan_owned`).

Where we differ and why:
* Rows that several ranks of a node need cross its NICs once, and transfers between nodes go over all
  NICs where that pays: the planner's own layers (docs/layers.md), which the paper does not have.
* Keys and values that a server has already, by owner or by an earlier task, are free (the paper
  counts them all and says so, section 8), and so are those that a source no longer needs. A query
  counts with its output, which travels back.
* Only the upper side of the tolerance counts. The slowest server sets the time; filling up the
  lightest ones moves keys for nothing.
* Before anything heavy moves, light servers give all they have to others (`empty_light_servers`):
  keys of a long sequence then go to fewer servers.
* The limit is in seconds with padded tiles, and a little below the tolerance, so that neither
  seconds nor pairs pass it where blocks do not fit at once. Servers of short sequences spend more
  time a pair; where padding is much, seconds alone are evened out (`schedule`).
* Blocks are coarse where contexts are long (128 queries at 64k of context are 6 % of a rank's
  work), so a shard's place is chosen for a tight fit as well as for few bytes, within half of the
  tolerance; where no block fits anywhere, a server sheds light work to make headroom (`shedding`);
  and where that does not help, the limit gives way by small steps. Tolerance 0 is as even as that
  comes.
* Head-tail pairs mirror each other within what a rank holds of a sequence, so that the linear
  layout is the same for both kinds of shards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_balance.cost.base import CostModel
from megatron_balance.errors import ConfigError
from megatron_balance.ir.arrays import as_array, as_rows
from megatron_balance.ir.batch import Batch
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.columns import Rows
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import MicrobatchPlan, TaskTable
from megatron_balance.planners.distca.linear import linear_owned, spread
from megatron_balance.planners.distca.schedule import Scheduling, schedule
from megatron_balance.solvers.capacity import check_pool

__all__ = ["DistcaOptions", "Scheduling", "linear_owned", "num_holders", "plan", "plan_owned", "schedule", "scheduling"]


@dataclass(frozen=True, slots=True)
class DistcaOptions:
    """Options of distca."""

    tokens_per_rank: int | None = None
    """Capacity of a rank in tokens; unlimited if not given."""
    tolerance: float = 0.02
    """Attention of the busiest server above the mean, relatively, at most (the paper's epsilon,
    0.05 to 0.15 in its experiments). On H200 nodes a layer is fastest at 0 to 0.02
    (`megatron-balance reproduce distca fig12`).
    """
    block: int = 128
    """Queries of the attention kernel's tile; shards are multiples of it."""
    shards: Literal["plain", "head_tail"] = "plain"
    """The part that is cut off an item: a run of queries, or its innermost part as a head-tail
    pair.
    """
    servers: Literal["in_place", "pool"] = "in_place"
    """`in_place`: every rank holds tokens and serves attention; `pool`: some ranks only serve."""
    pool_ranks: int | None = None
    """Servers `pool`: how many ranks hold no tokens, spread over the nodes; not given: one a node.
    """
    empty_light_servers: bool = True
    """Whether light servers are emptied into others first, where that saves bytes."""
    least_score: float = 0.0
    """Seconds of attention that a migration must take off a server for each second that its bytes
    take on a NIC; 0: the tolerance alone decides.
    """
    max_kv_tokens: int | None = None
    """Limit on the tokens whose keys and values a server may hold for a plan, its own included;
    with ping-pong each nano-batch has a plan of its own.
    """
    max_received_tokens: int | None = None
    """Limit on the tokens that a server may receive in a plan's forward pass, those that come as
    queries and those that come as keys and values.
    """


def plan(batch: Batch, cluster: Cluster, model: Model, cost: CostModel, options: DistcaOptions) -> MicrobatchPlan:
    """One task table: the linear layout, and tasks that take no server longer than the tolerance
    allows.

    Raises:
        InfeasibleError: the batch has more tokens than the ranks hold, or a rank's own tasks pass a
            cap that no other rank can help with.
        ConfigError: an option out of range.
    """
    holders = _holders(cluster, options)
    check_pool(batch.lengths, len(holders), options.tokens_per_rank)
    owned = linear_owned(batch.lengths, holders)
    return plan_owned(batch.lengths, as_rows(owned), cluster, model, cost, options)


def plan_owned(
    lengths: tuple[int, ...], owned: Rows, cluster: Cluster, model: Model, cost: CostModel, options: DistcaOptions
) -> MicrobatchPlan:
    """`plan` for a given linear layout: rows (rank, seq, start, stop); ranks without tokens serve,
    too.

    The layout being given, `tokens_per_rank`, `servers` and `pool_ranks` play no part.

    Raises:
        InfeasibleError: a rank's own tasks pass a cap that no other rank can help with.
        ConfigError: an option out of range.
    """
    tasks = schedule(as_array(owned), lengths, cluster.num_ranks, cost, scheduling(options))
    zones = (TaskTable("attention", owned, as_rows(tasks)),) if owned else ()
    return MicrobatchPlan(
        "distca", lengths, cluster.num_ranks, cluster.node_size, model.num_heads, model.num_kv_heads, zones
    )


def num_holders(cluster: Cluster, options: DistcaOptions) -> int:
    """Ranks that hold tokens; with `servers: pool` fewer than the cluster has.

    Raises:
        ConfigError: an option out of range.
    """
    return len(_holders(cluster, options))


def scheduling(options: DistcaOptions) -> Scheduling:
    """The scheduler's part of the options.

    Raises:
        ConfigError: an option out of range.
    """
    return Scheduling(
        tolerance=options.tolerance,
        block=options.block,
        shards=options.shards,
        empty_light_servers=options.empty_light_servers,
        least_score=options.least_score,
        max_kv_tokens=options.max_kv_tokens,
        max_received_tokens=options.max_received_tokens,
    )


def _holders(cluster: Cluster, options: DistcaOptions) -> list[int]:
    """Ranks that hold tokens."""
    if options.servers == "in_place":
        if options.pool_ranks is not None:
            raise ConfigError(
                f"distca: pool_ranks {options.pool_ranks} with servers in_place; set servers: pool, or leave it out"
            )
        return list(range(cluster.num_ranks))
    pool_ranks = min(cluster.num_nodes, cluster.num_ranks - 1) if options.pool_ranks is None else options.pool_ranks
    if not 1 <= pool_ranks < cluster.num_ranks:
        raise ConfigError(
            f"distca: pool_ranks {pool_ranks} of {cluster.num_ranks} ranks; at least 1 only serves and at least 1 "
            "holds tokens. "
            f"Set pool_ranks to 1 .. {cluster.num_ranks - 1}, or servers: in_place"
        )
    pool = set(spread(pool_ranks, cluster.num_ranks))
    return [rank for rank in range(cluster.num_ranks) if rank not in pool]
