"""Plan statistics, in numbers for each rank: tokens, attention pairs, tokens and bytes received.

Computed from the zones, never from ops, so that a ring over 1,024 ranks costs milliseconds; a test
holds every number against the ops of the expanded program.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from megatron_balance.analysis.inter_node import InterNodeTraffic
from megatron_balance.analysis.wire import NicOf, Payload
from megatron_balance.ir.arrays import Ints, as_array, sums
from megatron_balance.ir.columns import Move
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.ir.program import Kind
from megatron_balance.patterns import by_pattern
from megatron_balance.patterns.base import Context, Load


def plan_statistics(plan: MicrobatchPlan, model: Model, ranks_per_nic: int = 1) -> dict[str, Any]:
    """Statistics of one microbatch: one attention call, one layer, forward; lists have one entry a
    rank.

    A key-value token counts once on a rank that receives it, whatever part of its heads; a query
    token likewise. A partial output counts once for each rank that sends one of that token. Bytes
    count the heads that really travel. A token passed on round a ring is received by all that pass
    it on. Pairs are those that the plan's mask shows, in units of all heads.

    A remap counts apart: `remap_tokens_received_per_rank` are tokens whose query, key and value a
    rank is handed to attend with; their outputs go back. In bytes both ways are included. A proxy
    does not count as receiving what it passes on. By NIC ([nodes][NICs of a node], neighbours
    sharing one) counts all that goes over it, proxies included, and collectives as gloo runs them
    (`analysis.traffic`).

    Args:
        plan: of one microbatch.
        model: says the bytes of a value.
        ranks_per_nic: of a plan that is not routed; one that is says so itself.

    Raises:
        InvalidProgramError: an unknown comm pattern.
    """
    shared = plan.routing.ranks_per_nic if plan.routing is not None else ranks_per_nic
    payload = Payload.of(model)
    load, tokens = received_load(plan), tokens_per_rank(plan)
    row_bytes = payload.whole()
    num_bytes = sum(
        (load.token_heads[kind] * row_bytes[kind] for kind in Kind), np.zeros(plan.num_ranks, dtype=np.int64)
    )
    remap = _Remap(plan, row_bytes)
    between = InterNodeTraffic(plan, NicOf(plan.num_ranks, plan.ranks_per_node, shared))
    kv_between, bytes_between = between.received(payload)
    sent, received, routed = between.nic_bytes(payload)
    linear_tokens = tokens + remap.taken - remap.given
    return {
        "num_sequences": len(plan.lengths),
        "num_tokens": plan.num_tokens,
        "num_microbatches": 1,
        "tokens_per_rank": linear_tokens.tolist(),
        "attention_tokens_per_rank": tokens.tolist(),
        "attention_pairs_per_rank": load.pairs.tolist(),
        "kv_tokens_received_per_rank": load.tokens[Kind.KV].tolist(),
        "kv_tokens_received_inter_node_per_rank": kv_between.tolist(),
        "query_tokens_received_per_rank": load.tokens[Kind.Q].tolist(),
        "partial_tokens_received_per_rank": load.tokens[Kind.OUT].tolist(),
        "remap_tokens_received_per_rank": remap.given.tolist(),
        "bytes_received_per_rank": {
            "total": (num_bytes + remap.bytes_received).tolist(),
            "inter_node": bytes_between.tolist(),
        },
        "bytes_sent_per_nic": sent.tolist(),
        "bytes_received_per_nic": received.tolist(),
        "routed_transfers": routed,
        "remap": remap.totals,
        "imbalance": {"tokens": imbalance(linear_tokens), "attention": imbalance(load.pairs)},
    }


def imbalance(loads: Ints) -> float:
    """Largest load over mean load; 1 where there is no load at all."""
    total = int(loads.sum())
    return int(loads.max()) * len(loads) / total if total else 1.0


def tokens_per_rank(plan: MicrobatchPlan) -> Ints:
    """Tokens that the zones place on each rank, its attention layout: int64 [num_ranks]."""
    context = Context.of(plan)
    tokens = np.zeros(plan.num_ranks, dtype=np.int64)
    for pattern, zones in by_pattern(plan.zones):
        tokens += pattern.tokens([zone for _, zone in zones], context)
    return tokens


def received_load(plan: MicrobatchPlan) -> Load:
    """Attention pairs, and tokens and heads that reach ranks, over all zones; the remap apart."""
    context, total = Context.of(plan), Load(plan.num_ranks)
    for pattern, zones in by_pattern(plan.zones):
        total.add(pattern.load([zone for _, zone in zones], context))
    return total


class _Remap:
    """Statistics of the remap. Arrays are int64 [num_ranks].

    `given`: tokens that a rank attends to for others; `taken`: tokens of its own that others attend
    to.
    """

    def __init__(self, plan: MicrobatchPlan, row_bytes: Ints) -> None:
        holder, owner, tokens = as_array(plan.moves)[:, [Move.SRC, Move.DST, Move.TOKENS]].T
        inputs = plan.num_heads * row_bytes[Kind.Q] + plan.num_kv_heads * row_bytes[Kind.KV]
        outputs = plan.num_heads * row_bytes[Kind.OUT]
        self.taken, self.given = sums(owner, tokens, plan.num_ranks), sums(holder, tokens, plan.num_ranks)
        self.bytes_received = self.given * inputs + self.taken * outputs
        between = holder // plan.ranks_per_node != owner // plan.ranks_per_node
        self.totals = {
            "tokens_moved": int(tokens.sum()),
            "tokens_moved_inter_node": int(tokens[between].sum()),
            "max_bytes_sent": int((self.taken * inputs + self.given * outputs).max(initial=0)),
        }
