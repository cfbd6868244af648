"""The plans that host time is counted on: 64 ranks of 8k tokens, LLaMA 7B, as on H100 nodes with
FlashAttention-3.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_balance import Cluster, MicrobatchPlan, make_planner
from megatron_balance.config import load_cluster, load_model
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.cost.kernel import backward_factor
from megatron_balance.ir.layers import Layers
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import Zone
from megatron_balance.workloads.lengths import draw

NUM_RANKS, TOKENS = 64, 8192
DATASET = "arxiv"
SLACK = 1.25
"""Tokens that a rank may hold, over its even share."""

KERNEL = "flash_attn_3"
"""The attention kernel that host time is held against: the fastest, so the strictest."""

PLANS: Mapping[str, tuple[str, Layers, Mapping[str, Any]]] = {
    "te_ring": ("te_ring", Layers(), {}),
    "hybrid_dp": ("hybrid_dp", Layers(), {}),
    "ulysses": ("ulysses", Layers(), {}),
    "head exchange in a node": ("flexsp", Layers(), {}),
    # Rings, which are what is routed.
    "zeppelin, routed": ("zeppelin", Layers(routing="pays", remap=True), {"rule": "groups", "group_size": 1}),
    "zeppelin, waves": ("zeppelin", Layers(routing="pays", remap=True), {"rule": "waves"}),
    "zeppelin, groups": ("zeppelin", Layers(routing="pays", remap=True), {"rule": "groups"}),
    "distca": ("distca", Layers(), {}),
}
"""Planner, layers and options by name."""

NODE = 8
"""Ranks of the head exchanges of "head exchange in a node"."""


def machine(num_ranks: int = NUM_RANKS) -> tuple[Cluster, Model]:
    """H100 nodes, priced at the rate of `KERNEL`, and LLaMA 7B."""
    return load_cluster("h100").build(num_ranks=num_ranks).with_kernel(KERNEL), load_model("llama-7b")


def plan(name: str, num_ranks: int = NUM_RANKS, seed: int = 0) -> MicrobatchPlan:
    """The plan called `name` of one drawn batch."""
    cluster, model = machine(num_ranks)
    planner, layers, more = PLANS[name]
    lengths = draw(DATASET, num_ranks * TOKENS, 1, seed)[0]
    options: dict[str, Any] = {} if planner in ("te_ring", "ulysses") else {"tokens_per_rank": int(SLACK * TOKENS)}
    options |= more
    return make_planner(planner, cluster, model, layers, **options)(lengths)


def kernel_s(plan: MicrobatchPlan) -> float:
    """Predicted seconds of the attention kernel on a rank, forward and backward of a layer: the
    plan's (query, key) pairs spread evenly, at the rate of the cluster's kernel.
    """
    cluster, model = machine(plan.num_ranks)
    pairs = sum(n * (n + 1) / 2 for n in plan.lengths)
    return AnalyticCost(cluster, model).attention_s(pairs / plan.num_ranks) * (1 + backward_factor())


def rank_of(name: str, plan: MicrobatchPlan) -> int:
    """The rank that is counted: one between two others in every ring, or the first of a head exchange
    over a node.
    """
    if name != "head exchange in a node":
        return 5
    return next(zone.ranks[0] for zone in plan.zones if isinstance(zone, Zone) and len(zone.ranks) == NODE)
