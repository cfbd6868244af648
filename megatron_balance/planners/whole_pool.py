"""The planners that choose nothing: every sequence over all ranks. They are what the papers compare
with, and differ in the comm pattern alone (`PATTERNS`).

te_ring: every sequence zigzag over all ranks, keys and values around one ring. Source: Transformer
Engine's context parallelism, `AttnFuncWithCPAndKVP2P`, "THD" layout with load balancing; Ring
Attention (Liu et al., 2023, arXiv 2310.01889). A fragment goes round only as far as a rank still
needs it; the rank order is the node order, so that only one link a node crosses nodes.

llama_all_gather: placed in the same way; one all-gather of keys and values, then one launch. Source:
The Llama 3 Herd of Models (arXiv 2407.21783), section 3.3.2, "Context parallelism for long
sequences". A sequence that only one rank holds is not gathered.

ulysses: the tokens of the batch cut into G near-equal runs; all-to-all of q, k, v to head spans, and
of the outputs back. Paper: DeepSpeed Ulysses (Jacobs et al., 2023, arXiv 2309.14509), section 3. We
leave out ZeRO-3, which is the training framework's business. Heads need not divide by the number of
ranks (spans are near equal, and with fewer heads than ranks some ranks attend nothing: that is
unbalanced and the figures say so); fewer key-value heads than ranks (GQA) are sent to all that need
them.

Where we differ in all of them: lengths need no padding to multiples of 2G, since chunks are near
equal. With `context_parallel` the ranks are several groups, as data-parallel replicas are: sequences
are packed by first fit into one sample a group, and each group attends for itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from megatron_balance.cost.base import CostModel
from megatron_balance.ir.batch import Batch
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import MicrobatchPlan, Zone
from megatron_balance.solvers.capacity import check_pool
from megatron_balance.solvers.replicas import samples_of

PATTERNS = {"te_ring": "ring", "llama_all_gather": "all_gather", "ulysses": "head_exchange"}
"""The comm pattern of each planner."""


@dataclass(frozen=True, slots=True)
class WholePoolOptions:
    """Options of te_ring, llama_all_gather and ulysses."""

    tokens_per_rank: int | None = None
    """Capacity of a rank in tokens; unlimited if not given."""
    context_parallel: int | None = None
    """Ranks of a group. None: all."""


def _plan(
    name: str, batch: Batch, cluster: Cluster, model: Model, cost: CostModel, options: WholePoolOptions
) -> MicrobatchPlan:
    """A zone for each group of context-parallel ranks, usually one of all.

    Raises:
        InfeasibleError: the batch has more tokens than the ranks hold, or does not pack into one
            sample a group.
        ConfigError: replicas of so many ranks cannot be.
    """
    del cost  # nothing is chosen
    check_pool(batch.lengths, cluster.num_ranks, options.tokens_per_rank)
    size = options.context_parallel or cluster.num_ranks
    samples = samples_of(batch.lengths, size, cluster, options.tokens_per_rank)
    names = ["pool"] if len(samples) == 1 else [f"replica {at}" for at in range(len(samples))]
    zones = tuple(
        Zone(names[at], PATTERNS[name], tuple(range(at * size, (at + 1) * size)), seqs)
        for at, seqs in enumerate(samples)
        if seqs
    )
    heads = model.num_heads, model.num_kv_heads
    return MicrobatchPlan(name, batch.lengths, cluster.num_ranks, cluster.node_size, *heads, zones, mask=model.mask)


te_ring, llama_all_gather, ulysses = (partial(_plan, name) for name in PATTERNS)
