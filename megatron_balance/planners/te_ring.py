"""te_ring: every sequence zigzag over all ranks, keys and values around one ring (Transformer
Engine's context parallelism).

Source: Transformer Engine, `AttnFuncWithCPAndKVP2P`, "THD" layout with load balancing; Ring
Attention (Liu et al., 2023, arXiv 2310.01889). What we implement: 2 chunks a rank and sequence,
chunk i and chunk 2G-1-i; G - 1 rounds of neighbour exchange. What we leave out: nothing that
concerns placement; it plans nothing, which is why it is the baseline of all the papers here. Where
we differ and why: lengths need no padding to multiples of 2G (chunks are near equal); a fragment
goes round only as far as a rank still needs it; the rank order is the node order, so that only one
link a node crosses nodes.

With `context_parallel` the ranks are several groups, as data-parallel replicas are: sequences are
packed by first fit into one sample a group, and each group is a ring of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_balance.cost.base import CostModel
from megatron_balance.ir.batch import Batch
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import MicrobatchPlan, Zone
from megatron_balance.solvers.capacity import check_pool
from megatron_balance.solvers.replicas import samples_of


@dataclass(frozen=True, slots=True)
class TeRingOptions:
    """Options of te_ring."""

    tokens_per_rank: int | None = None
    """Capacity of a rank in tokens; unlimited if not given."""
    context_parallel: int | None = None
    """Ranks of a ring. None: all."""


def plan(batch: Batch, cluster: Cluster, model: Model, cost: CostModel, options: TeRingOptions) -> MicrobatchPlan:
    """A zone for each group of context-parallel ranks, usually one of all: its sequences zigzag over
    them, in one ring.

    Raises:
        InfeasibleError: the batch has more tokens than the ranks hold, or does not pack into one
            sample a group.
        ConfigError: replicas of so many ranks cannot be.
    """
    del cost  # nothing is chosen
    check_pool(batch.lengths, cluster.num_ranks, options.tokens_per_rank)
    size = options.context_parallel or cluster.num_ranks
    samples = samples_of(batch.lengths, size, cluster, options.tokens_per_rank)
    zones = tuple(
        Zone("pool" if len(samples) == 1 else f"replica {at}", "ring", tuple(range(at * size, (at + 1) * size)), seqs)
        for at, seqs in enumerate(samples)
        if seqs
    )
    return MicrobatchPlan(
        "te_ring",
        batch.lengths,
        cluster.num_ranks,
        cluster.node_size,
        model.num_heads,
        model.num_kv_heads,
        zones,
        mask=model.mask,
    )
