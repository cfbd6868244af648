"""What each rank has to do under a plan: tokens, attention, and keys and values that it receives."""

from __future__ import annotations

from megatron_balance.analysis.statistics import figures
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.report.cases import Figures


def of_plan(plan: MicrobatchPlan, model: Model, ranks_per_nic: int) -> Figures:
    """By rank, one layer, forward; exact."""
    found = figures(plan, model, ranks_per_nic)
    return {
        "kind": "exact",
        "planner": plan.planner,
        "tokens_per_rank": found["tokens_per_rank"],
        "attention_pairs_per_rank": found["attention_pairs_per_rank"],
        "kv_tokens_received_per_rank": found["kv_tokens_received_per_rank"],
        "kv_tokens_received_inter_node_per_rank": found["kv_tokens_received_inter_node_per_rank"],
        "bytes_received_per_rank": found["bytes_received_per_rank"],
        "bytes_sent_per_nic": found["bytes_sent_per_nic"],
        "imbalance": found["imbalance"],
    }
