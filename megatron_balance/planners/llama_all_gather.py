"""llama_all_gather: every sequence zigzag over all ranks, all ranks gather all keys and values
(Llama 3's context parallelism).

Paper: The Llama 3 Herd of Models (arXiv 2407.21783), section 3.3.2, "Context parallelism for long
sequences". What we implement: 2 chunks a rank and sequence, chunk i and chunk 2G-1-i; one
all-gather of keys and values, then one launch. What we leave out: nothing that concerns placement.
Where we differ and why: lengths need no padding to multiples of 2G; a sequence that only one rank
holds is not gathered.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_balance.cost.base import CostModel
from megatron_balance.ir.batch import Batch
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import MicrobatchPlan, Zone
from megatron_balance.solvers.capacity import check_pool


@dataclass(frozen=True, slots=True)
class LlamaAllGatherOptions:
    """Options of llama_all_gather."""

    tokens_per_rank: int | None = None
    """Capacity of a rank in tokens; unlimited if not given."""


def plan(
    batch: Batch, cluster: Cluster, model: Model, cost: CostModel, options: LlamaAllGatherOptions
) -> MicrobatchPlan:
    """One zone: all sequences over all ranks, zigzag, keys and values gathered by all.

    Raises:
        InfeasibleError: the batch has more tokens than the ranks hold.
    """
    del cost  # nothing is chosen
    check_pool(batch.lengths, cluster.num_ranks, options.tokens_per_rank)
    ranks, seqs = tuple(range(cluster.num_ranks)), tuple(range(len(batch.lengths)))
    zones = (Zone("pool", "all_gather", ranks, seqs),) if seqs else ()
    return MicrobatchPlan(
        "llama_all_gather",
        batch.lengths,
        cluster.num_ranks,
        cluster.node_size,
        model.num_heads,
        model.num_kv_heads,
        zones,
        mask=model.mask,
    )
