"""Planners: one file per system, none imports another. A planner is a pure function from a batch to a plan.

To add one: write `plan` and its options in a module of its own, and add it to `PLANNERS` (docs/planners.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_balance.cost.base import CostModel
from megatron_balance.ir.batch import Batch
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import BatchPlan, MicrobatchPlan
from megatron_balance.ir.rows import Rows
from megatron_balance.planners import distca, flexsp, hybrid_dp, llama_all_gather, megatron_dynamic, packing, te_ring, ulysses, zeppelin
from megatron_balance.planning.layers import Layers
from megatron_balance.solvers.placed import Members

NO_LAYERS = Layers()


@dataclass(frozen=True, slots=True)
class Planner:
    """`plan(batch, cluster, model, cost, options)`, and the frozen dataclass that `options` is an instance of.

    Options are plain fields with defaults, always with `tokens_per_rank: int | None = None`, the capacity of a rank. `layers`: the
    remapping and routing that the system comes with; options `remapped` and `routed`, where a planner has them, follow what a run uses.
    """

    plan: Callable[[Batch, Cluster, Model, CostModel, Any], MicrobatchPlan]
    options: type[Any]
    layers: Layers = NO_LAYERS
    plan_batch: Callable[[Batch, Cluster, Model, CostModel, Any], tuple[BatchPlan, Members]] | None = None
    """A system that makes microbatches of its own, from a batch that may be larger than the pool: their plans and their sequences."""
    plan_owned: Callable[[tuple[int, ...], Rows, Cluster, Model, CostModel, Any], MicrobatchPlan] | None = None
    """A system that attends for tokens wherever they are, so also for those of several pipeline stages at once: from lengths, and rows
    (rank, seq, start, stop) of where they are owned, to a plan with these owners, whatever ranks have none."""
    num_holders: Callable[[Cluster, Any], int] | None = None
    """A system that may leave ranks without tokens: how many hold some. None: all."""


PLANNERS: dict[str, Planner] = {
    "te_ring": Planner(te_ring.plan, te_ring.TeRingOptions),
    "llama_all_gather": Planner(llama_all_gather.plan, llama_all_gather.LlamaAllGatherOptions),
    "ulysses": Planner(ulysses.plan, ulysses.UlyssesOptions),
    "packing": Planner(packing.plan, packing.PackingOptions),
    "hybrid_dp": Planner(hybrid_dp.plan, hybrid_dp.HybridDpOptions, plan_batch=hybrid_dp.plan_batch),
    "flexsp": Planner(flexsp.plan, flexsp.FlexSpOptions, plan_batch=flexsp.plan_batch),
    "megatron_dynamic": Planner(megatron_dynamic.plan, megatron_dynamic.MegatronDynamicOptions, plan_batch=megatron_dynamic.plan_batch),
    "distca": Planner(distca.plan, distca.DistcaOptions, plan_owned=distca.plan_owned, num_holders=distca.num_holders),
    "zeppelin": Planner(zeppelin.plan, zeppelin.ZeppelinOptions, Layers(routing="pays", remap=True, remap_when="pays")),
}
