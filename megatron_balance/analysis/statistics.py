"""What a plan does to each rank, in numbers: tokens, attention pairs, tokens and bytes received.

Computed from the zones in closed form, never from ops, so that a ring over 1,024 ranks costs milliseconds; a test holds every
number against the ops of the expanded program.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, assert_never

import numpy as np

from megatron_balance.analysis.inter_node import InterNodeTraffic
from megatron_balance.analysis.wire import DST, HEAD_START, HEAD_STOP, KIND, TOKENS, NicOf, Payload
from megatron_balance.compile import layouts
from megatron_balance.errors import InvalidProgramError
from megatron_balance.ir.arrays import Ints, as_array, sums
from megatron_balance.ir.mask import CAUSAL
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import MicrobatchPlan, TaskTable, Zone
from megatron_balance.ir.program import Kind
from megatron_balance.patterns import dispatch, head_exchange, zigzag

_BLOCK = 1 << 20
"""Cells of (rank, sequence) worked on at once, which bounds memory."""

_LISTED = 1 << 12
"""Zones of so many cells at most are listed together, fragment by fragment: a plan may have a zone for each rank."""


def figures(plan: MicrobatchPlan, model: Model, ranks_per_nic: int = 1) -> dict[str, Any]:
    """The figures of one microbatch: one attention call, one layer, forward; lists have one entry a rank.

    A key-value token counts once on a rank that receives it, whatever part of its heads; a query token the same. A partial
    output counts once for each rank that sends one of that token. Bytes count the heads that really travel. A token passed
    on round a ring is received by all that pass it on. Pairs are causal, in units of all heads.

    A remap counts apart: `remap_tokens_received_per_rank` are tokens whose query, key and value a rank is handed to attend with; their
    outputs go back. In bytes both ways are included. Nobody receives what a proxy compile on. By NIC ([nodes][NICs of a node], neighbours
    sharing one) counts what goes over it, proxies included, and collectives as gloo runs them (`traffic`).

    Args:
        plan: of one microbatch.
        model: what a value has of bytes.
        ranks_per_nic: of a plan that is not routed; one that is says so itself.

    Raises:
        InvalidProgramError: an unknown comm pattern.
    """
    shared = plan.routing.ranks_per_nic if plan.routing is not None else ranks_per_nic
    tally = _Tally(plan, model, NicOf(plan.num_ranks, plan.ranks_per_node, shared))
    for index, zone in enumerate(plan.zones):
        tally.add(index, zone)
    attention_tokens = tally.tokens.copy()
    remap = tally.remap()
    tally.count_inter_node_traffic()
    sent, received, routed = tally.inter_node_traffic.nic_bytes(tally.payload)
    return {
        "num_sequences": len(plan.lengths),
        "num_tokens": plan.num_tokens,
        "num_microbatches": 1,
        "tokens_per_rank": tally.tokens.tolist(),
        "attention_tokens_per_rank": attention_tokens.tolist(),
        "attention_pairs_per_rank": tally.pairs.tolist(),
        "kv_tokens_received_per_rank": tally.kv.tolist(),
        "kv_tokens_received_inter_node_per_rank": tally.kv_inter_node.tolist(),
        "query_tokens_received_per_rank": tally.queries.tolist(),
        "partial_tokens_received_per_rank": tally.partials.tolist(),
        "remap_tokens_received_per_rank": tally.remapped.tolist(),
        "bytes_received_per_rank": {"total": tally.bytes.tolist(), "inter_node": tally.bytes_inter_node.tolist()},
        "bytes_sent_per_nic": sent.tolist(),
        "bytes_received_per_nic": received.tolist(),
        "routed_transfers": routed,
        "remap": remap,
        "imbalance": {"tokens": imbalance(tally.tokens), "attention": imbalance(tally.pairs)},
    }


def imbalance(loads: Ints) -> float:
    """Largest load over mean load; 1 where there is no load at all."""
    total = int(loads.sum())
    return int(loads.max()) * len(loads) / total if total else 1.0


def tokens_per_rank(plan: MicrobatchPlan) -> Ints:
    """Tokens that the zones place on each rank, its attention layout: int64 [num_ranks]."""
    lengths = np.array(plan.lengths, dtype=np.int64)
    large = [zone for zone in plan.zones if isinstance(zone, Zone) and len(zone.ranks) * len(zone.seqs) > _LISTED]
    table = layouts.fragments(replace(plan, zones=tuple(zone for zone in plan.zones if zone not in large)) if large else plan)
    tokens = sums(table[:, layouts.RANK], table[:, layouts.STOP] - table[:, layouts.START], plan.num_ranks)
    for zone in large:
        seqs, ranks = np.array(zone.seqs, dtype=np.int64), np.array(zone.ranks)
        if zone.pattern == "head_exchange":
            tokens[ranks] += np.diff(int(lengths[seqs].sum()) * np.arange(len(ranks) + 1) // len(ranks))
            continue
        tokens[ranks] += zigzag.tokens(lengths[seqs], len(ranks))
    return tokens


class _Tally:
    """Sums over zones. All arrays are int64 [num_ranks]."""

    def __init__(self, plan: MicrobatchPlan, model: Model, nics: NicOf) -> None:
        self.plan = plan
        self.lengths = np.array(plan.lengths, dtype=np.int64)
        self.nodes = np.arange(plan.num_ranks) // plan.ranks_per_node
        self.payload = Payload.of(model)
        self.row_bytes = np.array(self.payload.row_bytes)
        self.row_bytes[Kind.OUT] += self.payload.lse_bytes
        self.inter_node_traffic = InterNodeTraffic(plan, nics)
        self.tokens = tokens_per_rank(plan)
        self.pairs, self.kv, self.kv_inter_node, self.queries, self.partials, self.remapped = np.zeros((6, plan.num_ranks), dtype=np.int64)
        self.bytes, self.bytes_inter_node = np.zeros((2, plan.num_ranks), dtype=np.int64)

    def add(self, index: int, zone: Zone | TaskTable) -> None:
        match zone:
            case TaskTable():
                self.task_table(index, zone)
            case Zone(pattern="ring" | "all_gather"):
                self.zigzag(index, zone)
            case Zone(pattern="head_exchange"):
                self.heads(index, zone)
            case Zone():
                raise InvalidProgramError(f"zone {zone.name}: unknown comm pattern {zone.pattern!r}")
            case _:
                assert_never(zone)

    def received(self, kind: Kind, ranks: Ints, num_tokens: Ints, heads: Ints | int) -> None:
        """Tokens of one kind that reach distinct `ranks`, with so many of their heads."""
        {Kind.KV: self.kv, Kind.Q: self.queries, Kind.OUT: self.partials}[kind][ranks] += num_tokens
        self.bytes[ranks] += num_tokens * heads * self.row_bytes[kind]

    def remap(self) -> dict[str, int]:
        """Add what the remap moves; tokens are then those of the linear layout."""
        if not self.plan.moves:
            return {"tokens_moved": 0, "tokens_moved_inter_node": 0, "max_bytes_sent": 0}
        holder, owner, tokens = as_array(self.plan.moves).T
        self.inter_node_traffic.remap()
        num_ranks, heads = self.plan.num_ranks, self.plan.num_heads
        taken, given = sums(owner, tokens, num_ranks), sums(holder, tokens, num_ranks)
        inputs = heads * self.row_bytes[Kind.Q] + self.plan.num_kv_heads * self.row_bytes[Kind.KV]
        outputs = heads * self.row_bytes[Kind.OUT]
        self.tokens += taken - given
        self.remapped += given
        self.bytes += given * inputs + taken * outputs
        return {
            "tokens_moved": int(tokens.sum()),
            "tokens_moved_inter_node": int(tokens[self.nodes[holder] != self.nodes[owner]].sum()),
            "max_bytes_sent": int((taken * inputs + given * outputs).max()),
        }

    def count_inter_node_traffic(self) -> None:
        """Add what comes from other nodes, but for all-gathers, whose share is known."""
        attention = np.concatenate(self.inter_node_traffic.attention)
        keys = attention[attention[:, KIND] == Kind.KV]
        self.kv_inter_node += sums(keys[:, DST], keys[:, TOKENS], self.plan.num_ranks)
        for rows in (attention, *self.inter_node_traffic.remapped):
            heads = rows[:, HEAD_STOP] - rows[:, HEAD_START]
            num_bytes = rows[:, TOKENS] * heads * self.row_bytes[rows[:, KIND]]
            self.bytes_inter_node += sums(rows[:, DST], num_bytes, self.plan.num_ranks)

    def zigzag(self, index: int, zone: Zone) -> None:
        seqs, size = np.array(zone.seqs, dtype=np.int64), len(zone.ranks)
        if size == 1:
            lengths = self.lengths[seqs]
            self.pairs[zone.ranks[0]] += _causal(lengths).sum()
            return
        cut = zigzag.zigzag(self.lengths, seqs, size)
        first = np.zeros_like(cut.lengths)
        (lo_start, lo_stop), (hi_start, hi_stop) = cut.lo(first), cut.hi(first)
        lo_first, hi_first = lo_stop - lo_start, hi_stop - hi_start
        shared = cut.parts > 1
        pairs, arrived, own_shared, kept = np.zeros((4, size), dtype=np.int64)
        step = max(1, _BLOCK // max(1, len(seqs)))
        for begin in range(0, size, step):
            block = np.arange(begin, min(size, begin + step))
            position = cut.position(block[:, None])
            holds = position < cut.parts
            (a, b), (c, d) = cut.lo(position), cut.hi(position)
            own = np.where(holds, b - a + d - c, 0)
            pairs[block] = np.where(holds, _causal(b) - _causal(a) + _causal(d) - _causal(c), 0).sum(axis=1)
            own_shared[block] = own[:, shared].sum(axis=1)
            kept[block] = np.where(shared & (position == 0), hi_first, 0).sum(axis=1)
            # Round a ring: all that others hold, but for the chunks of position 0 that nobody behind them needs.
            missed = np.where(position > 0, hi_first + np.where(holds, 0, lo_first), 0)
            arrived[block] = (cut.lengths - own - missed).sum(axis=1)
        ranks = np.array(zone.ranks)
        self.pairs[ranks] += pairs
        if zone.pattern == "ring":
            self.received(Kind.KV, ranks, arrived, self.plan.num_kv_heads)
            self.inter_node_traffic.ring(index, zone, cut, own_shared - kept)
            return
        total = cut.lengths[shared].sum()
        self.received(Kind.KV, ranks, total - own_shared, self.plan.num_kv_heads)
        self.inter_node_traffic.all_gather(index, zone, own_shared, self.payload)
        from_others = total - _on_node(own_shared, self.nodes[ranks])
        self.kv_inter_node[ranks] += from_others
        self.bytes_inter_node[ranks] += from_others * self.plan.num_kv_heads * self.row_bytes[Kind.KV]

    def heads(self, index: int, zone: Zone) -> None:
        seqs, size = np.array(zone.seqs, dtype=np.int64), len(zone.ranks)
        ranks = np.array(zone.ranks)
        total = int(self.lengths[seqs].sum())
        runs = np.diff(total * np.arange(size + 1) // size)
        slices = head_exchange.head_slices(self.plan.num_heads, self.plan.num_kv_heads, size)
        queries = np.array([s[-1][1] - s[0][0] if s else 0 for s in slices])
        keys = np.array([s[-1][3] - s[0][2] if s else 0 for s in slices])
        # Each rank computes all pairs of its share of the heads; cumulative rounding keeps the sum exact.
        pairs, stops = int(_causal(self.lengths[seqs]).sum()), np.cumsum(queries)
        self.pairs[ranks] += [
            pairs * b // self.plan.num_heads - pairs * a // self.plan.num_heads
            for a, b in zip((stops - queries).tolist(), stops.tolist(), strict=True)
        ]
        active = (queries > 0).astype(np.int64)
        self.received(Kind.Q, ranks, (total - runs) * active, queries)
        self.received(Kind.KV, ranks, (total - runs) * active, keys)
        # Every rank with heads sends its partial of each of a rank's tokens; all of them together are all heads.
        self.partials[ranks] += runs * (active.sum() - active)
        self.bytes[ranks] += runs * (self.plan.num_heads - queries) * self.row_bytes[Kind.OUT]
        self.inter_node_traffic.heads(index, zone, runs, slices)

    def task_table(self, index: int, zone: TaskTable) -> None:
        tasks = as_array(zone.tasks)
        q0, q1, k0, k1 = tasks[:, 2:].T
        # Keys at or before each query: a trapezium once the queries start, cut off where the keys end.
        behind = _causal(np.maximum(q1 - k0, 0)) - _causal(np.maximum(q0 - k0, 0))
        beyond = _causal(np.maximum(q1 - k1, 0)) - _causal(np.maximum(q0 - k1, 0))
        np.add.at(self.pairs, tasks[:, 0], behind - beyond)
        self.inter_node_traffic.task_table(index, zone)
        for rows in dispatch.transfers(zone, self.plan.num_heads, self.plan.num_kv_heads):
            table = as_array(rows)
            for kind in (Kind.Q, Kind.KV, Kind.OUT):
                chosen = table[table[:, 0] == kind]
                arrived = sums(chosen[:, 7], chosen[:, 3] - chosen[:, 2], self.plan.num_ranks)
                heads = self.plan.num_kv_heads if kind == Kind.KV else self.plan.num_heads
                self.received(kind, np.arange(self.plan.num_ranks), arrived, heads)


def _causal(lengths: Ints) -> Ints:
    """Pairs of the first `lengths` queries of a sequence."""
    return CAUSAL.num_pairs(lengths)


def _on_node(values: Ints, nodes: Ints) -> Ints:
    """For each rank the sum of `values` over the ranks of its node."""
    return np.bincount(nodes, weights=values).astype(np.int64)[nodes]
