"""knapformer: a knapsack of sequences to groups of ranks, even chunks and exchanged heads inside a
group.

Paper: KnapFormer: An Online Load Balancer for Efficient Diffusion Transformers Training, sections 3.1
to 3.4. What we implement:

- topologies `gGnN+...` (section 3.2, `topology`), a unit that is smaller than the pool repeated;
- work of a sequence by the gamma-corrected model (section 3.1, `cost.gamma`);
- the greedy first pass (section 3.3, `knapsack`), and contiguous even chunks in a group;
- Ulysses attention inside a group (section 3.4, comm pattern `chunk_exchange`);
- `topology: auto`: the topology of the least predicted time, groups of several sizes included, within
  memory, nodes and heads (`auto`), which the paper leaves as future work.

What we leave out: replicas that keep their sequences. Here the sequences of the pool go to all groups
of all replicas, which is at least as even; who wants the paper's makes a pool of each replica.

Where we differ and why: where no group has room the least occupied one takes a sequence (the paper
leaves that open). Groups may be empty. The model's own FLOPs stand for 24 d^2 and 4 d, which is the
same for the paper's blocks, and a causal model has half the pairs. Gamma is that of the cost model
unless given.
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
from megatron_balance.planners.knapformer.auto import TopologySearch
from megatron_balance.planners.knapformer.knapsack import assign
from megatron_balance.planners.knapformer.topology import Topology, check_heads, parse
from megatron_balance.solvers.capacity import check_pool
from megatron_balance.solvers.placed import INTER_NODE, INTRA_NODE, LOCAL

AUTO, NODE = "auto", "node"
HEADS = ("equal", "uneven", "ring")
ZONES = (INTER_NODE, INTRA_NODE, LOCAL)
"""In issue order."""


@dataclass(frozen=True, slots=True)
class KnapFormerOptions:
    """Options of knapformer."""

    tokens_per_rank: int | None = None
    """Capacity of a rank in tokens; unlimited if not given."""
    slack: float = 2.0
    """Room of a rank in a training job that does not say `tokens_per_rank`, over the mean tokens per
    rank, at least 1. Planning alone knows no limit.
    """
    topology: str = AUTO
    """Groups of ranks, `gGnN` terms joined by `+`; `auto` searches for those of the least predicted
    time for each batch; `node` makes each node a group.
    """
    heads: Literal["equal", "uneven", "ring"] = "equal"
    """Groups whose ranks the heads do not divide among equally: an error; heads as equal as can be;
    or keys and values go round them. `auto` takes none of these.
    """
    gamma: float | None = None
    """Correction of attention's FLOPs in the work of a sequence; not given: that of the cost model.
    The paper has 0.49 and 0.385 for FLUX on H100.
    """
    tries: int = 200
    """`auto`: topologies that are tried at most."""


def plan(batch: Batch, cluster: Cluster, model: Model, cost: CostModel, options: KnapFormerOptions) -> MicrobatchPlan:
    """A zone for each group that has sequences.

    Raises:
        ConfigError: a topology that is none, or does not divide the ranks or the heads; an option
            out of range.
        InfeasibleError: a group, or all ranks, cannot hold what they would have to.
    """
    _check(options)
    lengths = batch.lengths
    check_pool(lengths, cluster.num_ranks, options.tokens_per_rank)
    gamma = gamma_of(cost, model) if options.gamma is None else options.gamma
    tokens = np.fromiter(lengths, dtype=np.int64, count=len(lengths))  # of integers, which is twice as fast
    work = sequence_work(tokens.astype(np.float64), model, gamma)
    if options.topology == AUTO:
        found = TopologySearch(lengths, work, cluster, model, cost, options.tokens_per_rank).best(options.tries)
        return _planned(lengths, found.topology, found.group_of, (cluster, model), "uneven")
    topology = topology_of(options, cluster)
    if options.heads == "equal":
        check_heads(topology.sizes, model.num_heads)
    group_of = assign(work, lengths, topology.sizes, options.tokens_per_rank)
    return _planned(lengths, topology, group_of, (cluster, model), options.heads)


def idle(options: KnapFormerOptions, cluster: Cluster) -> str | None:
    """Why there is no knapsack to fill: a topology of one group."""
    if options.topology == AUTO or len(topology_of(options, cluster).sizes) > 1:
        return None
    return (
        f"planner knapformer: topology {options.topology} is one group of all {cluster.num_ranks} ranks, so a step "
        "runs as ulysses places it; name smaller groups, or 'topology: auto'"
    )


def topology_of(options: KnapFormerOptions, cluster: Cluster) -> Topology:
    """The topology of the whole pool; not for `auto`.

    Raises:
        ConfigError: a topology that is none, or does not divide the ranks.
    """
    given = Topology((cluster.node_size,)) if options.topology == NODE else parse(options.topology)
    return given.repeated(cluster.num_ranks)


def _planned(
    lengths: Sequence[int], topology: Topology, group_of: Ints, on: tuple[Cluster, Model], heads: str
) -> MicrobatchPlan:
    cluster, model = on
    sizes = np.array(topology.sizes)
    counts = np.bincount(group_of, minlength=len(sizes))
    small = group_of.astype(np.min_scalar_type(len(sizes)))  # small types are sorted by radix
    seqs: list[int] = small.argsort(kind="stable").tolist()
    stop = sizes.cumsum()  # of the ranks of a group
    node = (stop - sizes) // cluster.node_size
    level = np.where(sizes == 1, 2, np.where(node == (stop - 1) // cluster.node_size, 1, 0))
    order = np.lexsort((stop, -sizes, level))
    order = order[counts[order] > 0]
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
    return MicrobatchPlan(
        "knapformer",
        tuple(lengths),
        cluster.num_ranks,
        cluster.node_size,
        model.num_heads,
        model.num_kv_heads,
        zones,
        mask=model.mask,
    )


def _check(options: KnapFormerOptions) -> None:
    if options.heads not in HEADS:
        raise ConfigError(f"knapformer: heads {options.heads!r} is not known; choose one of {', '.join(HEADS)}")
    if options.gamma is not None and options.gamma < 0:
        raise ConfigError(f"knapformer: gamma {options.gamma}: must be at least 0")
    if options.slack < 1:
        raise ConfigError(f"knapformer: slack {options.slack}: room below the mean holds no batch; use at least 1")
    if options.tries < 1:
        raise ConfigError(f"knapformer: tries {options.tries}: must be at least 1")
