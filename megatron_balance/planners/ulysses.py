"""ulysses: tokens contiguous over all ranks, heads exchanged around attention (DeepSpeed-Ulysses).

Paper: DeepSpeed Ulysses (Jacobs et al., 2023, arXiv 2309.14509), section 3. What we implement: the
tokens of the batch cut into G near-equal runs; all-to-all of q, k, v to head spans, and of the
outputs back. What we leave out: ZeRO-3, which is the training framework's business. Where we differ
and why: heads need not divide by the number of ranks (spans are near equal, and with fewer heads
than ranks some ranks attend nothing: that is unbalanced and the figures say so); fewer key-value
heads than ranks (GQA) are sent to all that need them.
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
class UlyssesOptions:
    """Options of ulysses."""

    tokens_per_rank: int | None = None
    """Capacity of a rank in tokens; unlimited if not given."""


def plan(batch: Batch, cluster: Cluster, model: Model, cost: CostModel, options: UlyssesOptions) -> MicrobatchPlan:
    """One zone: all sequences over all ranks, contiguous, heads exchanged.

    Raises:
        InfeasibleError: the batch has more tokens than the ranks hold.
    """
    del cost  # nothing is chosen
    check_pool(batch.lengths, cluster.num_ranks, options.tokens_per_rank)
    ranks, seqs = tuple(range(cluster.num_ranks)), tuple(range(len(batch.lengths)))
    zones = (Zone("pool", "head_exchange", ranks, seqs),) if seqs else ()
    return MicrobatchPlan(
        "ulysses",
        batch.lengths,
        cluster.num_ranks,
        cluster.node_size,
        model.num_heads,
        model.num_kv_heads,
        zones,
        mask=model.mask,
    )
