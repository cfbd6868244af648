"""What a plan does to each rank, in numbers: tokens, attention pairs, tokens and bytes received.

Computed from the zones in closed form, never from ops, so that a ring over 1,024 ranks costs milliseconds; a test holds every
number against the ops of the expanded program.
"""

from __future__ import annotations

from typing import Any, assert_never

import numpy as np

from megatron_balance.core.model import Model
from megatron_balance.core.plan import MicrobatchPlan, Tiling, Zone
from megatron_balance.core.program import Kind
from megatron_balance.errors import InvalidProgramError
from megatron_balance.passes.tables import Ints, as_array
from megatron_balance.schedules import dispatch, head_exchange, zigzag

_BLOCK = 1 << 20
"""Cells of (rank, sequence) worked on at once, which bounds memory."""

_LSE_BYTES = 4


def figures(plan: MicrobatchPlan, model: Model) -> dict[str, Any]:
    """The figures of one microbatch: one attention call, one layer, forward; lists have one entry a rank.

    A key-value token counts once on a rank that receives it, whatever part of its heads; a query token the same. A partial
    output counts once for each rank that sends one of that token. Bytes count the heads that really travel. A token passed
    on round a ring is received by all that pass it on. Pairs are causal, in units of all heads.

    Raises:
        InvalidProgramError: an unknown movement.
    """
    tally = _Tally(plan, model)
    for zone in plan.zones:
        tally.add(zone)
    return {
        "num_sequences": len(plan.lengths),
        "num_tokens": plan.num_tokens,
        "num_microbatches": 1,
        "tokens_per_rank": tally.tokens.tolist(),
        "attention_pairs_per_rank": tally.pairs.tolist(),
        "kv_tokens_received_per_rank": tally.kv.tolist(),
        "kv_tokens_received_inter_node_per_rank": tally.kv_inter_node.tolist(),
        "query_tokens_received_per_rank": tally.queries.tolist(),
        "partial_tokens_received_per_rank": tally.partials.tolist(),
        "bytes_received_per_rank": {"total": tally.bytes.tolist(), "inter_node": tally.bytes_inter_node.tolist()},
        "imbalance": {"tokens": imbalance(tally.tokens), "attention": imbalance(tally.pairs)},
    }


def imbalance(loads: Ints) -> float:
    """Largest load over mean load; 1 where there is no load at all."""
    total = int(loads.sum())
    return int(loads.max()) * len(loads) / total if total else 1.0


class _Tally:
    """Sums over zones. All arrays are int64 [num_ranks]."""

    def __init__(self, plan: MicrobatchPlan, model: Model) -> None:
        self.plan = plan
        self.lengths = np.array(plan.lengths, dtype=np.int64)
        self.nodes = np.arange(plan.num_ranks) // plan.ranks_per_node
        self.element_bytes = model.head_dim * model.bytes_per_element
        self.tokens, self.pairs, self.kv, self.kv_inter_node, self.queries, self.partials, self.bytes, self.bytes_inter_node = np.zeros(
            (8, plan.num_ranks), dtype=np.int64
        )

    def add(self, zone: Zone | Tiling) -> None:
        match zone:
            case Tiling():
                self.tiling(zone)
            case Zone(movement="ring" | "all_gather"):
                self.zigzag(zone)
            case Zone(movement="head_exchange"):
                self.heads(zone)
            case Zone():
                raise InvalidProgramError(f"zone {zone.name}: unknown movement {zone.movement!r}")
            case _:
                assert_never(zone)

    def received(self, kind: Kind, ranks: Ints, num_tokens: Ints, inter_node: Ints, heads: Ints | int) -> None:
        """Tokens of one kind that reach distinct `ranks`, how many of them from other nodes, and with how many of their heads."""
        each = {Kind.KV: 2 * self.element_bytes, Kind.Q: self.element_bytes, Kind.OUT: self.element_bytes + _LSE_BYTES}[kind]
        {Kind.KV: self.kv, Kind.Q: self.queries, Kind.OUT: self.partials}[kind][ranks] += num_tokens
        if kind == Kind.KV:
            self.kv_inter_node[ranks] += inter_node
        self.bytes[ranks] += num_tokens * heads * each
        self.bytes_inter_node[ranks] += inter_node * heads * each

    def zigzag(self, zone: Zone) -> None:
        seqs, size = np.array(zone.seqs, dtype=np.int64), len(zone.ranks)
        if size == 1:
            lengths = self.lengths[seqs]
            self.tokens[zone.ranks[0]] += lengths.sum()
            self.pairs[zone.ranks[0]] += _causal(lengths).sum()
            return
        cut = zigzag.zigzag(self.lengths, seqs, size)
        first = np.zeros_like(cut.lengths)
        (lo_start, lo_stop), (hi_start, hi_stop) = cut.lo(first), cut.hi(first)
        lo_first, hi_first = lo_stop - lo_start, hi_stop - hi_start
        shared = cut.parts > 1
        tokens, pairs, arrived, own_shared = np.zeros((4, size), dtype=np.int64)
        step = max(1, _BLOCK // max(1, len(seqs)))
        for begin in range(0, size, step):
            block = np.arange(begin, min(size, begin + step))
            position = cut.position(block[:, None])
            holds = position < cut.parts
            (a, b), (c, d) = cut.lo(position), cut.hi(position)
            own = np.where(holds, b - a + d - c, 0)
            tokens[block] = own.sum(axis=1)
            pairs[block] = np.where(holds, _causal(b) - _causal(a) + _causal(d) - _causal(c), 0).sum(axis=1)
            own_shared[block] = own[:, shared].sum(axis=1)
            # Round a ring: all that others hold, but for the chunks of position 0 that nobody behind them needs.
            missed = np.where(position > 0, hi_first + np.where(holds, 0, lo_first), 0)
            arrived[block] = (cut.lengths - own - missed).sum(axis=1)
        ranks = np.array(zone.ranks)
        self.tokens[ranks] += tokens
        self.pairs[ranks] += pairs
        nodes = self.nodes[ranks]
        if zone.movement == "ring":
            self.received(Kind.KV, ranks, arrived, np.where(nodes != np.roll(nodes, 1), arrived, 0), self.plan.num_kv_heads)
        else:
            total = cut.lengths[shared].sum()
            self.received(Kind.KV, ranks, total - own_shared, total - _on_node(own_shared, nodes), self.plan.num_kv_heads)

    def heads(self, zone: Zone) -> None:
        seqs, size = np.array(zone.seqs, dtype=np.int64), len(zone.ranks)
        ranks = np.array(zone.ranks)
        total = int(self.lengths[seqs].sum())
        runs = np.diff(total * np.arange(size + 1) // size)
        self.tokens[ranks] += runs
        slices = head_exchange.head_slices(self.plan.num_heads, self.plan.num_kv_heads, size)
        queries = np.array([s[-1][1] - s[0][0] if s else 0 for s in slices])
        keys = np.array([s[-1][3] - s[0][2] if s else 0 for s in slices])
        # Each rank computes all pairs of its share of the heads; cumulative rounding keeps the sum exact.
        pairs, stops = int(_causal(self.lengths[seqs]).sum()), np.cumsum(queries)
        self.pairs[ranks] += [
            pairs * b // self.plan.num_heads - pairs * a // self.plan.num_heads
            for a, b in zip((stops - queries).tolist(), stops.tolist(), strict=True)
        ]
        nodes = self.nodes[ranks]
        active = (queries > 0).astype(np.int64)
        self.received(Kind.Q, ranks, (total - runs) * active, (total - _on_node(runs, nodes)) * active, queries)
        self.received(Kind.KV, ranks, (total - runs) * active, (total - _on_node(runs, nodes)) * active, keys)
        # Every rank with heads sends its partial of each of a rank's tokens; all of them together are all heads.
        self.partials[ranks] += runs * (active.sum() - active)
        partial_bytes = self.element_bytes + _LSE_BYTES
        self.bytes[ranks] += runs * (self.plan.num_heads - queries) * partial_bytes
        self.bytes_inter_node[ranks] += runs * (self.plan.num_heads - _on_node(queries, nodes)) * partial_bytes

    def tiling(self, zone: Tiling) -> None:
        held = as_array(zone.fragments)
        np.add.at(self.tokens, held[:, 0], held[:, 3] - held[:, 2])
        tasks = as_array(zone.tasks)
        q0, q1, k0, k1 = tasks[:, 2:].T
        # Keys at or before each query: a trapezium once the queries start, cut off where the keys end.
        behind = _causal(np.maximum(q1 - k0, 0)) - _causal(np.maximum(q0 - k0, 0))
        beyond = _causal(np.maximum(q1 - k1, 0)) - _causal(np.maximum(q0 - k1, 0))
        np.add.at(self.pairs, tasks[:, 0], behind - beyond)
        for rows in dispatch.transfers(zone, self.plan.num_heads, self.plan.num_kv_heads):
            table = as_array(rows)
            for kind in (Kind.Q, Kind.KV, Kind.OUT):
                chosen = table[table[:, 0] == kind]
                num_tokens, src, dst = chosen[:, 3] - chosen[:, 2], chosen[:, 6], chosen[:, 7]
                arrived, inter_node = np.zeros((2, self.plan.num_ranks), dtype=np.int64)
                np.add.at(arrived, dst, num_tokens)
                np.add.at(inter_node, dst, np.where(self.nodes[src] != self.nodes[dst], num_tokens, 0))
                heads = self.plan.num_kv_heads if kind == Kind.KV else self.plan.num_heads
                self.received(kind, np.arange(self.plan.num_ranks), arrived, inter_node, heads)


def _causal(lengths: Ints) -> Ints:
    """Pairs of the first `lengths` queries of a sequence."""
    return lengths * (lengths + 1) // 2


def _on_node(values: Ints, nodes: Ints) -> Ints:
    """For each rank the sum of `values` over the ranks of its node."""
    return np.bincount(nodes, weights=values).astype(np.int64)[nodes]
