"""What a step's record says where all pipeline stages attend together: figures of its ticks in place of its microbatches'."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np

from megatron_balance.analysis.statistics import figures
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.cost.measured import MeasuredCost
from megatron_balance.ir.model import Model
from megatron_balance.ir.tick import TickPlan

BACKWARD = 2
"""A layer's backward pass takes twice its forward pass."""


def tick_figures(
    nano_batches: Sequence[Sequence[TickPlan]], model: Model, cost: AnalyticCost | MeasuredCost, num_chunks: int
) -> dict[str, Any]:
    """Figures of the ticks. What is received counts, as for microbatches, one layer of every forward pass of a stage.

    Args:
        nano-batches: the ticks of the step, by nano-batch.
        model: the whole model.
        cost: its cluster's NICs are those of the ranks.
        num_chunks: of each stage.
    """
    each = list(chain.from_iterable(_by_tick(ticks, model, cost.cluster.ranks_per_nic) for ticks in nano_batches))
    ticks = list(chain.from_iterable(nano_batches))
    forward = [found for one, found in zip(ticks, each, strict=True) if not one.tick.backward]
    pairs = np.array([f["attention_pairs_per_rank"] for f in each], dtype=np.float64)
    tokens = np.array([f["tokens_per_rank"] for f in each], dtype=np.float64)
    seconds = [max(map(cost.attention_s, ps)) + max(map(cost.linear_s, ts)) for ps, ts in zip(pairs.tolist(), tokens.tolist(), strict=True)]
    layers = model.num_layers / (len(ticks[0].tick.cells) * num_chunks)
    passes = [BACKWARD if one.tick.backward else 1 for one in ticks]
    return {
        "planner": ticks[0].plan.planner,
        "num_ticks": len(nano_batches[0]),
        "kv_tokens_received": sum(float(np.mean(f["kv_tokens_received_per_rank"])) for f in forward) / num_chunks,
        "kv_tokens_received_inter_node": sum(float(np.mean(f["kv_tokens_received_inter_node_per_rank"])) for f in forward) / num_chunks,
        "routed_transfers": sum(f["routed_transfers"] for f in forward),
        "bytes_sent_per_nic": (np.sum([f["bytes_sent_per_nic"] for f in forward], axis=0) / num_chunks).tolist(),
        "bytes_received_per_nic": (np.sum([f["bytes_received_per_nic"] for f in forward], axis=0) / num_chunks).tolist(),
        # All ranks meet twice in every layer of a tick, before attention and behind it.
        "predicted_ms": 1e3 * layers * sum(n * s for n, s in zip(passes, seconds, strict=True)),
        "attention": pairs,
    }


def _by_tick(ticks: Sequence[TickPlan], model: Model, ranks_per_nic: int) -> list[dict[str, Any]]:
    """Figures of each tick's plan; those of the same microbatches share one."""
    by_plan = {one.tick.microbatches: figures(one.plan, model, ranks_per_nic) for one in ticks}
    return [by_plan[one.tick.microbatches] for one in ticks]
