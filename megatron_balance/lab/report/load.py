"""The load of each rank under a plan: tokens, attention, and keys and values that it receives."""

from __future__ import annotations

from megatron_balance.analysis.statistics import plan_statistics
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.lab.report.cases import Figures


def of_plan(plan: MicrobatchPlan, model: Model, ranks_per_nic: int) -> Figures:
    """Exact loads by rank, one layer, forward."""
    loads = plan_statistics(plan, model, ranks_per_nic)
    return {
        "kind": "exact",
        "planner": plan.planner,
        "tokens_per_rank": loads["tokens_per_rank"],
        "attention_pairs_per_rank": loads["attention_pairs_per_rank"],
        "kv_tokens_received_per_rank": loads["kv_tokens_received_per_rank"],
        "kv_tokens_received_inter_node_per_rank": loads["kv_tokens_received_inter_node_per_rank"],
        "bytes_received_per_rank": loads["bytes_received_per_rank"],
        "bytes_sent_per_nic": loads["bytes_sent_per_nic"],
        "imbalance": loads["imbalance"],
    }
