"""knapformer: a knapsack of sequences to groups of ranks, even chunks and exchanged heads in a
group.

Paper: KnapFormer: An Online Load Balancer for Efficient Diffusion Transformers Training, sections
3.1 to 3.4. What we implement: topologies `gGnN+...` (3.2, `topology`); work of a sequence by the
gamma-corrected model (3.1, `cost.fits`); the greedy first pass (3.3, `knapsack`); Ulysses inside a
group (3.4, comm pattern `chunk_exchange`); `topology: auto`, which the paper leaves as future work.

What we leave out: replicas that keep their sequences. Where we differ and why: where no group has
room the least occupied one takes a sequence (open in the paper); groups may be empty. The model's
own FLOPs stand for 24 d^2 and 4 d, and a causal model has half the pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from megatron_balance.cost.base import CostModel, Ints
from megatron_balance.cost.fits import gamma_of, sequence_work
from megatron_balance.errors import ConfigError
from megatron_balance.ir.batch import Batch
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import MicrobatchPlan, Zone
from megatron_balance.planners.knapformer.knapsack import assign
from megatron_balance.planners.knapformer.topology import Topology, TopologySearch, check_heads, parse
from megatron_balance.solvers.groups import INTER_NODE, INTRA_NODE, LOCAL, check_pool, plan_of

AUTO, NODE = "auto", "node"
HEADS = ("equal", "uneven", "ring")
# In issue order.
ZONES = (INTER_NODE, INTRA_NODE, LOCAL)


@dataclass(frozen=True, slots=True)
class KnapFormerOptions:
    tokens_per_rank: int | None = None
    """Capacity of a rank in tokens; unlimited if not given."""
    slack: float = 2.0
    """In a training job without `tokens_per_rank`: room of a rank over the mean tokens per rank, at
    least 1."""
    topology: str = AUTO
    """Groups of ranks, `gGnN` terms joined by `+`; `auto`: those of the least predicted time for
    each batch; `node`: each node a group."""
    heads: Literal["equal", "uneven", "ring"] = "equal"
    """Groups whose ranks the heads do not divide among equally: an error, heads as equal as can be,
    or keys and values go round them. `auto` takes none of these."""
    gamma: float | None = None
    """Correction of attention's FLOPs in a sequence's work; None: the cost model's. The paper has
    0.49 and 0.385 for FLUX on H100."""
    tries: int = 200
    """`auto`: topologies that are tried at most."""


def plan(batch: Batch, cluster: Cluster, model: Model, cost: CostModel, options: KnapFormerOptions) -> MicrobatchPlan:
    _check(options)
    lengths = batch.lengths
    check_pool(lengths, cluster.num_ranks, options.tokens_per_rank)
    gamma = gamma_of(cost, model) if options.gamma is None else options.gamma
    # Of integers, which is twice as fast.
    tokens = np.fromiter(lengths, dtype=np.int64, count=len(lengths))
    work = sequence_work(tokens.astype(np.float64), model, gamma)
    if options.topology == AUTO:
        found = TopologySearch(lengths, work, cluster, model, cost, options.tokens_per_rank).best(options.tries)
        return _planned(lengths, found.topology, found.group_of, (cluster, model), "uneven")
    topology = _topology_of(options, cluster)
    if options.heads == "equal":
        check_heads(topology.sizes, model.num_heads)
    group_of = assign(work, lengths, topology.sizes, options.tokens_per_rank)
    return _planned(lengths, topology, group_of, (cluster, model), options.heads)


def idle(options: KnapFormerOptions, cluster: Cluster) -> str | None:
    """Why there is no knapsack to fill: a topology of one group."""
    if options.topology == AUTO or len(_topology_of(options, cluster).sizes) > 1:
        return None
    return (
        f"planner knapformer: topology {options.topology} is one group of all {cluster.num_ranks} ranks, so a step "
        "runs as ulysses places it; name smaller groups, or 'topology: auto'"
    )


def _topology_of(options: KnapFormerOptions, cluster: Cluster) -> Topology:
    given = Topology((cluster.node_size,)) if options.topology == NODE else parse(options.topology)
    return given.repeated(cluster.num_ranks)


def _planned(
    lengths: Sequence[int], topology: Topology, group_of: Ints, on: tuple[Cluster, Model], heads: str
) -> MicrobatchPlan:
    cluster, model = on
    sizes = np.array(topology.sizes)
    counts = np.bincount(group_of, minlength=len(sizes))
    # Small types are sorted by radix.
    small = group_of.astype(np.min_scalar_type(len(sizes)))
    seqs: list[int] = small.argsort(kind="stable").tolist()
    # Of the ranks of a group.
    stop = sizes.cumsum()
    node = (stop - sizes) // cluster.node_size
    # Index into `ZONES`: local, inside a node, across nodes.
    level = np.where(sizes == 1, 2, np.where(node == (stop - 1) // cluster.node_size, 1, 0))
    # Issue order: by level, the widest first, then by rank; empty groups have no zone.
    order = np.lexsort((stop, -sizes, level))
    order = order[counts[order] > 0]
    # Runs of each group in `seqs`, which is sorted by group.
    first = counts.cumsum() - counts
    columns: list[list[int]] = [column[order].tolist() for column in (level, stop - sizes, stop, first, first + counts)]
    levels, starts, ends, firsts, lasts = columns
    zones = tuple(
        Zone(
            ZONES[at],
            "ring" if heads == "ring" and model.num_heads % (end - start) else "chunk_exchange",
            tuple(range(start, end)),
            tuple(seqs[begin:done]),
        )
        for at, start, end, begin, done in zip(levels, starts, ends, firsts, lasts, strict=True)
    )
    return plan_of("knapformer", lengths, on, zones)


def _check(options: KnapFormerOptions) -> None:
    if options.heads not in HEADS:
        raise ConfigError(f"knapformer: heads {options.heads!r} is not known; choose one of {', '.join(HEADS)}")
    if options.gamma is not None and options.gamma < 0:
        raise ConfigError(f"knapformer: gamma {options.gamma}: must be at least 0")
    if options.slack < 1:
        raise ConfigError(f"knapformer: slack {options.slack}: room below the mean holds no batch; use at least 1")
    if options.tries < 1:
        raise ConfigError(f"knapformer: tries {options.tries}: must be at least 1")
