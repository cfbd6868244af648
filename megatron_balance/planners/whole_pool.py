"""The planners that choose nothing: every sequence over all ranks. They differ in the comm pattern
alone.

te_ring: zigzag, keys and values around one ring. Source: Transformer Engine's context parallelism,
`AttnFuncWithCPAndKVP2P` ("THD", load balancing); Ring Attention (Liu et al., arXiv 2310.01889). A
fragment goes round only as far as a rank still needs it.

llama_all_gather: placed in the same way; one all-gather, then one launch. Source: The Llama 3 Herd
of Models (arXiv 2407.21783), section 3.3.2.

ulysses: near-equal runs of tokens; all-to-all of q, k, v to head spans, and of the outputs back.
Paper: DeepSpeed Ulysses (Jacobs et al., arXiv 2309.14509), section 3. Heads need not divide by the
ranks.

Where we differ in all: lengths need no padding. With `context_parallel` the ranks are several
groups, as data-parallel replicas are: sequences are packed by first fit into one sample a group.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from megatron_balance.cost.base import CostModel
from megatron_balance.ir.batch import Batch
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import MicrobatchPlan, Zone
from megatron_balance.solvers.groups import check_pool, plan_of, samples_of

# The comm pattern of each planner.
PATTERNS = {"te_ring": "ring", "llama_all_gather": "all_gather", "ulysses": "head_exchange"}


@dataclass(frozen=True, slots=True)
class WholePoolOptions:
    tokens_per_rank: int | None = None
    """Capacity of a rank in tokens; unlimited if not given."""
    context_parallel: int | None = None
    """Ranks of a group. None: all."""


def _plan(
    name: str, batch: Batch, cluster: Cluster, model: Model, cost: CostModel, options: WholePoolOptions
) -> MicrobatchPlan:
    # Nothing is chosen.
    del cost
    check_pool(batch.lengths, cluster.num_ranks, options.tokens_per_rank)
    size = options.context_parallel or cluster.num_ranks
    samples = samples_of(batch.lengths, size, cluster, options.tokens_per_rank)
    names = ["pool"] if len(samples) == 1 else [f"replica {at}" for at in range(len(samples))]
    zones = tuple(
        Zone(names[at], PATTERNS[name], tuple(range(at * size, (at + 1) * size)), seqs)
        for at, seqs in enumerate(samples)
        if seqs
    )
    return plan_of(name, batch.lengths, (cluster, model), zones)


te_ring, llama_all_gather, ulysses = (partial(_plan, name) for name in PATTERNS)
