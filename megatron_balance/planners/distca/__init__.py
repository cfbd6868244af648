"""distca: core attention as tasks of their own, on servers that need not hold the tokens.

Paper: Efficient Long-context Language Model Training by Core Attention Disaggregation (DistCA),
sections 4.2 and 6.1, Appendix B. What we implement: the linear layout, sequences one after the
other; tasks of query shards at multiples of the kernel block with all keys before them; the greedy
scheduling by seconds of attention migrated for each byte, with closed forms (`shards`).

What we leave out: the order of execution (ping-pong, ticks), which plans each nano-batch and each
tick by `plan_owned`.

Where we differ and why:

* Keys that a server has already, by owner or by an earlier task, are free, and so are those that a
  source no longer needs (the paper counts all and says so, section 8). A query counts with its
  output.
* Only the upper side of the tolerance counts: filling up the lightest servers moves keys for
  nothing.
* Before anything heavy moves, light servers give all they have to others (`empty_light_servers`).
* The limit is in seconds with padded tiles, and a little below the tolerance, so that neither
  seconds nor pairs pass it; where padding is much, seconds alone are evened out.
* Blocks are coarse where contexts are long, so a shard is chosen for a tight fit as well as for few
  bytes; where no block fits anywhere, a server sheds light work, or else the limit gives way.
* Head-tail pairs mirror each other within what a rank holds of a sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import inf
from typing import Literal

import numpy as np

from megatron_balance.cost.base import CostModel
from megatron_balance.cost.kernel import law_of
from megatron_balance.errors import ConfigError
from megatron_balance.ir.arrays import Floats, Ints, as_array, as_rows, laid
from megatron_balance.ir.batch import Batch
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.columns import Placed, Rows
from megatron_balance.ir.forest import Forest, over
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import MicrobatchPlan, TaskTable
from megatron_balance.planners.base import Count, NotNegative, Whole
from megatron_balance.planners.distca.greedy import Drain, Rule, empty_light_servers
from megatron_balance.planners.distca.servers import Edges, HeadTail, Plain, Seconds, Servers, TaskSizes, enforce_caps
from megatron_balance.planners.distca.trees import Paths, joined, schedule_trees
from megatron_balance.solvers.groups import check_pool, plan_of


@dataclass(frozen=True, slots=True)
class DistcaOptions:
    tokens_per_rank: Count | None = None
    """Capacity of a rank in tokens; unlimited if not given."""
    tolerance: NotNegative | None = None
    """Attention of the busiest server above the mean, relatively, at most: the paper's epsilon. Not
    given: 0.02, and 0.1 where a backward pays for every piece of queries (FlashAttention-3)."""
    block: Count = 128
    """Queries of the attention kernel's tile; shards are multiples of it."""
    shards: Literal["plain", "head_tail"] = "plain"
    """The part that is cut off: a run of queries, or the innermost part as a head-tail pair."""
    servers: Literal["in_place", "pool"] = "in_place"
    """`in_place`: every rank holds tokens and serves attention; `pool`: some ranks only serve."""
    pool_ranks: int | None = None
    """Servers `pool`: how many ranks hold no tokens, spread over the nodes; not given: one a node.
    """
    empty_light_servers: bool = True
    """Whether light servers are emptied into others first, where that saves bytes."""
    least_score: NotNegative = 0.0
    """Seconds of attention that a migration must save for each second of its bytes on a NIC; 0:
    any."""
    max_kv_tokens: Count | None = None
    """Most tokens whose keys and values a server holds for a plan (of a nano-batch), its own
    included."""
    max_received_tokens: Whole | None = None
    """Most tokens that a server receives in a plan's forward pass, as queries or as keys and
    values."""


def plan(batch: Batch, cluster: Cluster, model: Model, cost: CostModel, options: DistcaOptions) -> MicrobatchPlan:
    """One task table: the linear layout, and tasks within the tolerance. Windows are not planned for:
    tasks are as they would be without them, and without trees.
    """
    holders = _holders(cluster, options)
    check_pool(batch.lengths, len(holders), options.tokens_per_rank)
    owned = linear_owned(batch.lengths, holders)
    mask = over(model.mask, batch.trees)
    if not isinstance(mask, Forest) or mask.window:
        return plan_owned(batch.lengths, as_rows(owned), cluster, model, cost, options)

    def of_runs(rows: Ints, lengths: Sequence[int], paths: Paths) -> Ints:
        return schedule(rows, lengths, cluster, cost, options, paths)

    tasks = schedule_trees(owned, mask, of_runs)
    return replace(_table(batch.lengths, as_rows(owned), tasks, cluster, model), mask=mask)


def plan_owned(
    lengths: tuple[int, ...], owned: Rows, cluster: Cluster, model: Model, cost: CostModel, options: DistcaOptions
) -> MicrobatchPlan:
    """`plan` for a given linear layout: rows (rank, seq, start, stop); ranks without tokens serve,
    too. The layout being given, `tokens_per_rank`, `servers` and `pool_ranks` play no part.
    """
    tasks = schedule(as_array(owned), lengths, cluster, cost, options)
    return _table(lengths, owned, tasks, cluster, model)


def _table(lengths: tuple[int, ...], owned: Rows, tasks: Ints, cluster: Cluster, model: Model) -> MicrobatchPlan:
    zones = (TaskTable("attention", owned, as_rows(tasks)),) if owned else ()
    return plan_of("distca", lengths, (cluster, model), zones)


def num_holders(cluster: Cluster, options: DistcaOptions) -> int:
    return len(_holders(cluster, options))


def _holders(cluster: Cluster, options: DistcaOptions) -> list[int]:
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
            f"holds tokens. Set pool_ranks to 1 .. {cluster.num_ranks - 1}, or servers: in_place"
        )
    # Evenly over all ranks and so over the nodes; rank 0 only if all are chosen.
    pool = {cluster.num_ranks * (i + 1) // pool_ranks - 1 for i in range(pool_ranks)}
    return [rank for rank in range(cluster.num_ranks) if rank not in pool]


def linear_owned(lengths: Sequence[int], ranks: Sequence[int]) -> Ints:
    """Rows (rank, seq, start, stop) [n, 4] by rank, as many tokens on each (section 6.1)."""
    tokens = np.array(lengths, dtype=np.int64)
    rows = laid(tokens, int(tokens.sum()) * np.arange(len(ranks) + 1) // len(ranks))
    rows[:, Placed.RANK] = np.array(ranks, dtype=np.int64)[rows[:, Placed.RANK]]
    return rows


def _tolerance(cluster: Cluster, options: DistcaOptions) -> float:
    if options.tolerance is not None:
        return options.tolerance
    # On H200 nodes a layer is fastest at 0 to 0.02; with pieces of queries that are paid for
    # (`cost.kernel.KeyBlocks`), on H100 nodes at about 0.1.
    law = law_of(cluster.attention_kernel).key_blocks
    return 0.1 if law is not None and law.block_tiles > 1 else 0.02


# Share of the tolerance with which the limit starts; first steps by which it gives way are in the
# rest.
_AIM = 0.95
# Shares of the tolerance: the least that the limit leaves above the mean, and the mean padding up
# to which pairs have a limit of their own.
_LEAST, _MOST_PADDING = 0.25, 2.0


def schedule(
    owned: Ints,
    lengths: Sequence[int],
    cluster: Cluster,
    cost: CostModel,
    options: DistcaOptions,
    paths: Paths | None = None,
) -> Ints:
    """Attention tasks of the given tokens; none makes a rank take longer than the tolerance allows.

    `owned`: `Placed` rows [n, 4] of any layout, whose every query is attended; all ranks are servers.
    `paths`: of `Servers`.
    Returns `Task` rows [m, 6] by rank, sequence and query.

    Raises:
        InfeasibleError: a rank's own tokens pass a cap, and no other rank can take these over.
    """
    owned = owned[owned[:, Placed.STOP] > owned[:, Placed.START]]
    if not len(owned):
        return np.empty((0, 6), dtype=np.int64)
    owned = owned[np.argsort(owned[:, Placed.RANK], kind="stable")]
    seconds = Seconds.of(cost, max(lengths))
    edges = Edges.of(owned, min(options.block, max(lengths)), seconds)
    sizes = TaskSizes(2.0 * cost.query_bytes(1), float(cost.kv_bytes(1)))
    shards = Plain(edges, sizes) if options.shards == "plain" else HeadTail(edges, sizes)
    most_received = inf if options.max_received_tokens is None else options.max_received_tokens
    servers = Servers(edges, shards, cluster.num_ranks, options.max_kv_tokens or inf, most_received, paths)
    enforce_caps(servers)
    least_score = options.least_score * cost.inter_node_s(1, 0)
    tolerance = _tolerance(cluster, options)
    limit, limit_of_pairs = _limits(servers, owned, seconds, tolerance)
    rule = Rule(limit, tolerance, least_score)
    if options.empty_light_servers:
        empty_light_servers(servers, rule)
    # What the second limit forbids counts as load from here on (`_padding`).
    if limit_of_pairs < limit:
        servers.load += np.maximum(limit - limit_of_pairs - _padding(servers, seconds, limit_of_pairs), 0.0)
    Drain(servers, rule).run()
    return _tasks(servers)


def _limits(servers: Servers, owned: Ints, seconds: Seconds, tolerance: float) -> tuple[float, float]:
    """The load that no server may exceed, and what of that in pairs: both within the tolerance."""
    start, stop = owned[:, Placed.START].astype(np.float64), owned[:, Placed.STOP].astype(np.float64)
    mean = float(servers.load.mean())
    mean_pairs_s = float(_pairs(start, stop).sum()) * seconds.pair_s / len(servers.load)
    by_pairs = max((1 + _AIM * tolerance) * mean_pairs_s, servers.heaviest_block())
    limit = max(by_pairs, (1 + _LEAST * tolerance) * mean)
    return limit, by_pairs if mean <= (1 + _MOST_PADDING * tolerance) * mean_pairs_s else limit


def _padding(servers: Servers, seconds: Seconds, most: float) -> Floats:
    """Seconds of each server beyond those of its pairs; 0 where it has to give work away."""
    rank, _, start, stop = _spans(servers)
    of_pairs = np.bincount(rank, _pairs(start, stop) * seconds.pair_s, len(servers.load))
    return np.where(servers.load > most, 0.0, servers.load - of_pairs)


def _pairs(start: Ints | Floats, stop: Ints | Floats) -> Floats:
    return (stop * (stop + 1.0) - start * (start + 1.0)) / 2


def _spans(servers: Servers) -> tuple[Ints, Ints, Ints, Ints]:
    held = [len(pieces) for pieces in servers.pieces]
    flat = chain.from_iterable(chain.from_iterable(servers.pieces))
    pieces = np.fromiter(flat, np.int64, 3 * sum(held)).reshape(-1, 3)
    which, start, stop = servers.shards.spans(pieces)
    return np.repeat(np.arange(len(held)), held)[which], servers.edges.owned[pieces[which, 0], Placed.SEQ], start, stop


def _tasks(servers: Servers) -> Ints:
    rank, seq, start, stop = _spans(servers)
    return joined(np.stack((rank, seq, start, stop, np.zeros_like(stop), stop), axis=1))
