"""Planners: one file per system, none imports another. A planner is a pure function from a batch to a plan.

To add one: write `plan` and its options in a module of its own, and add it to `PLANNERS` (docs/planners.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_balance.core.batch import Batch
from megatron_balance.core.cluster import Cluster
from megatron_balance.core.model import Model
from megatron_balance.core.plan import MicrobatchPlan
from megatron_balance.cost.base import CostModel
from megatron_balance.planners import llama_all_gather, te_ring, ulysses, zeppelin


@dataclass(frozen=True, slots=True)
class Planner:
    """`plan(batch, cluster, model, cost, options)`, and the frozen dataclass that `options` is an instance of.

    Options are plain fields with defaults, always with `tokens_per_rank: int | None = None`, the capacity of a rank.
    """

    plan: Callable[[Batch, Cluster, Model, CostModel, Any], MicrobatchPlan]
    options: type[Any]


PLANNERS: dict[str, Planner] = {
    "te_ring": Planner(te_ring.plan, te_ring.TeRingOptions),
    "llama_all_gather": Planner(llama_all_gather.plan, llama_all_gather.LlamaAllGatherOptions),
    "ulysses": Planner(ulysses.plan, ulysses.UlyssesOptions),
    "zeppelin": Planner(zeppelin.plan, zeppelin.ZeppelinOptions),
}
