"""Plan statistics, in numbers for each rank: tokens, attention pairs, tokens and bytes received.

Computed from the zones, never from ops, so that a ring over 1,024 ranks costs milliseconds; a test
holds every number against the ops of the expanded program.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from megatron_balance.analysis.wire import NicOf, Payload, is_collective, piece_bounds, piece_bytes
from megatron_balance.compile import remap
from megatron_balance.ir.arrays import Ints, as_array, sums
from megatron_balance.ir.columns import Message, Move, Route
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import REMAP, MicrobatchPlan
from megatron_balance.ir.program import Exchange, Kind, Program
from megatron_balance.patterns import by_pattern, pattern_of
from megatron_balance.patterns.base import Context, Load, ZoneMessages
from megatron_balance.patterns.sends import messages_of, table_of


def plan_statistics(plan: MicrobatchPlan, model: Model, ranks_per_nic: int = 1) -> dict[str, Any]:
    """Statistics of one microbatch: one attention call, one layer, forward; lists have one entry a
    rank.

    A key-value token counts once on a rank that receives it, whatever part of its heads; a query token
    likewise. A partial output counts once for each rank that sends one of that token. Bytes count the
    heads that really travel. A token passed on round a ring is received by all that pass it on. Pairs
    are those that the plan's mask shows, in units of all heads.

    A remap counts apart: `remap_tokens_received_per_rank` are tokens whose query, key and value a rank
    is handed to attend with; their outputs go back. In bytes both ways are included. A proxy does not
    count as receiving what it passes on. By NIC ([nodes][NICs of a node], neighbours sharing one)
    counts all that goes over it, proxies included, and collectives as gloo runs them (`traffic`).
    `model`: says the bytes of a value; `ranks_per_nic`: of a plan that is not routed; one that is says
    so itself. Raises InvalidProgramError: an unknown comm pattern.
    """
    shared = plan.routing.ranks_per_nic if plan.routing is not None else ranks_per_nic
    payload = Payload.of(model)
    load, tokens = received_load(plan), tokens_per_rank(plan)
    row_bytes = payload.whole()
    num_bytes = sum(
        (load.token_heads[kind] * row_bytes[kind] for kind in Kind), np.zeros(plan.num_ranks, dtype=np.int64)
    )
    holder, owner, moved = as_array(plan.moves)[:, [Move.SRC, Move.DST, Move.TOKENS]].T
    given, taken = moved_tokens(plan)
    inputs = plan.num_heads * row_bytes[Kind.Q] + plan.num_kv_heads * row_bytes[Kind.KV]
    outputs = plan.num_heads * row_bytes[Kind.OUT]
    between = _InterNodeTraffic(plan, NicOf(plan.num_ranks, plan.ranks_per_node, shared))
    kv_between, bytes_between = between.received(payload)
    sent, received, routed = between.nic_bytes(payload)
    linear_tokens = tokens + taken - given
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
        "remap_tokens_received_per_rank": given.tolist(),
        "bytes_received_per_rank": {
            "total": (num_bytes + given * inputs + taken * outputs).tolist(),
            "inter_node": bytes_between.tolist(),
        },
        "bytes_sent_per_nic": sent.tolist(),
        "bytes_received_per_nic": received.tolist(),
        "routed_transfers": routed,
        "remap": {
            "tokens_moved": int(moved.sum()),
            "tokens_moved_inter_node": int(moved[holder // plan.ranks_per_node != owner // plan.ranks_per_node].sum()),
            "max_bytes_sent": int((taken * inputs + given * outputs).max(initial=0)),
        },
        "imbalance": {"tokens": _imbalance(linear_tokens), "attention": _imbalance(load.pairs)},
    }


def _imbalance(loads: Ints) -> float:
    # Largest load over mean load; 1 where there is no load at all.
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


_REMAP_IN = 0  # the exchange of a remap's inputs


@dataclass(frozen=True, slots=True)
class _ExchangeBlock:
    """Messages of exchanges that are routed or not; `collective` ones are padded."""

    rows: Ints
    routed: bool = False
    collective: bool = False


class _InterNodeTraffic:
    """Messages between nodes of one plan, zone by zone, with its remap."""

    def __init__(self, plan: MicrobatchPlan, nics: NicOf) -> None:
        self.plan, self.nics = plan, nics
        self._nothing = np.empty((0, Message.WIDTH), dtype=np.int64)
        self._attention, self._remap = [self._nothing], self._nothing
        self._blocks: list[_ExchangeBlock] = []
        self._gathers: list[ZoneMessages] = []  # all-gathers that are one collective call each
        context, remote = Context.of(plan), remap.remote_in(plan)
        hops: list[Ints] = []
        spared: dict[int, Ints] = {}
        for pattern, zones in by_pattern(plan.zones) if len(remote) else ():
            first = pattern.first_hops(zones, context, remote)
            hops.append(messages_of(_REMAP_IN, first.rows))
            spared |= {int(index): first.spared()[first.zones == index] for index in np.unique(first.zones)}
        base = 1 if plan.moves else 0
        for index, zone in enumerate(plan.zones):
            pattern = pattern_of(zone)
            if index in spared or pattern.crosses_nodes(zone, context):
                self._add(index, base, pattern.messages(zone, context, across=True), spared.get(index, self._nothing))
            base += pattern.num_exchanges(zone)
        if plan.moves:
            self._add_remap(base, np.concatenate([self._nothing, *hops]))

    def _add(self, index: int, base: int, exchanges: Sequence[ZoneMessages], spared: Ints) -> None:
        # Messages of a zone, whose first exchange is `base`, less those that it is `spared`.
        routed = self._is_routed(index)
        rows = [spared]
        together = False
        for messages in exchanges:
            call = messages.collective != "p2p" and not routed
            call = call and is_collective(messages.group, self.plan.num_ranks, self.plan.ranks_per_node)
            if call and messages.collective == "all_gather":
                self._gathers.append(messages)
            else:
                rows.append(messages.each_pair())
                together = call
        own = self._across(np.concatenate(rows))
        if len(own):
            own[:, Message.EXCHANGE] += base
            self._blocks.append(_ExchangeBlock(own, routed, together))
            self._attention.append(own)

    def _add_remap(self, last: int, hops: Ints) -> None:
        # Inputs and outputs (exchange `last`) of what is remote, and owners' first hops.
        holder, owner, tokens = as_array(self.plan.moves)[:, [Move.SRC, Move.DST, Move.TOKENS]].T
        heads, kv_heads = (0, self.plan.num_heads), (0, self.plan.num_kv_heads)
        moves = [
            table_of(_REMAP_IN, owner, holder, Kind.Q, *heads, tokens),
            table_of(_REMAP_IN, owner, holder, Kind.KV, *kv_heads, tokens),
            table_of(last, holder, owner, Kind.OUT, *heads, tokens),
        ]
        self._remap, hops = self._across(np.concatenate(moves)), self._across(hops)
        self._attention.append(hops)
        self._blocks.append(_ExchangeBlock(np.concatenate([self._remap, hops]), self._is_routed(REMAP)))

    def received(self, payload: Payload) -> tuple[Ints, Ints]:
        # Tokens of keys and values for attention that come from other nodes, and all bytes: int64
        # [num_ranks] each.
        kv_tokens, num_bytes = np.zeros((2, self.plan.num_ranks), dtype=np.int64)
        row_bytes = payload.whole()
        attention = np.concatenate(self._attention)
        keys = attention[attention[:, Message.KIND] == Kind.KV]
        kv_tokens += sums(keys[:, Message.DST], keys[:, Message.TOKENS], self.plan.num_ranks)
        for rows in (attention, self._remap):
            heads = rows[:, Message.HEAD_STOP] - rows[:, Message.HEAD_START]
            each = rows[:, Message.TOKENS] * heads * row_bytes[rows[:, Message.KIND]]
            num_bytes += sums(rows[:, Message.DST], each, self.plan.num_ranks)
        for gather in self._gathers:
            ranks, tokens = gather.rows[:, Message.SRC], gather.rows[:, Message.TOKENS]
            nodes = self.nics.node(ranks)
            from_others = tokens.sum() - sums(nodes, tokens, self.nics.num_nodes)[nodes]
            kv_tokens[ranks] += from_others
            num_bytes[ranks] += from_others * self.plan.num_kv_heads * row_bytes[Kind.KV]
        return kv_tokens, num_bytes

    def nic_bytes(self, payload: Payload) -> tuple[Ints, Ints, int]:
        # Bytes that each NIC sends and receives, [nodes, NICs of a node], and the number of routed
        # parcels.
        sent, received = np.zeros((2, self.nics.num_nodes, self.nics.per_node), dtype=np.int64)
        for gather in self._gathers:
            # As gloo runs it: blocks as wide as the widest go round a ring of the ranks.
            group, largest = np.array(gather.group), gather.rows[[gather.rows[:, Message.TOKENS].argmax()]]
            num_bytes = (len(group) - 1) * int(payload.parcels(largest).padded.sum())
            after = np.roll(group, -1)
            edge = self.nics.node(group) != self.nics.node(after)
            sent += self.nics.sums(group[edge], np.full(edge.sum(), num_bytes))
            received += self.nics.sums(after[edge], np.full(edge.sum(), num_bytes))
        num_routed, routing = 0, self.plan.routing
        for block in self._blocks:
            parcels = payload.parcels(block.rows)
            routed = np.zeros(len(parcels.tokens), dtype=bool)
            if block.routed and routing is not None and self.nics.per_node > 1:
                routed = parcels.tokens >= routing.min_tokens
            num_routed += int(routed.sum())
            size = np.where(routed, 0, parcels.padded if block.collective else parcels.direct)
            sent += self.nics.sums(parcels.src, size)
            received += self.nics.sums(parcels.dst, size)
            num_pieces = self.nics.per_node * (1 if routing is None else routing.pieces)
            for index, piece in enumerate(piece_bytes(parcels.packed[routed], num_pieces) if routed.any() else ()):
                place = index % self.nics.per_node
                sent[:, place] += sums(self.nics.node(parcels.src[routed]), piece, self.nics.num_nodes)
                received[:, place] += sums(self.nics.node(parcels.dst[routed]), piece, self.nics.num_nodes)
        return sent, received, num_routed

    def _is_routed(self, index: int) -> bool:
        return self.plan.routing is not None and index in self.plan.routing.zones

    def _across(self, rows: Ints) -> Ints:
        src, dst = self.nics.node(rows[:, Message.SRC]), self.nics.node(rows[:, Message.DST])
        across = (src != dst) & (rows[:, Message.TOKENS] != 0)
        return rows if across.all() else rows[across]


@dataclass(frozen=True, slots=True)
class Traffic:
    """Payload bytes of one attention call, one layer.

    By rank, int64 [num_ranks]: bytes that it sends and receives inside its node and to or from
    other nodes, those that it passes on for others included. By NIC, int64 [nodes, NICs of a node]:
    bytes that it sends and receives.
    """

    intra_node_sent: Ints
    intra_node_received: Ints
    inter_node_sent: Ints
    inter_node_received: Ints
    nic_sent: Ints
    nic_received: Ints


def traffic(program: Program, payload: Payload, *, ranks_per_node: int, ranks_per_nic: int = 1) -> Traffic:
    """Traffic of the forward and, where the program has one, of the backward."""
    nics = NicOf(program.num_ranks, ranks_per_node, ranks_per_nic)
    hops = [np.empty((0, 3), dtype=np.int64)]
    hops += [_hops(op, payload, nics) for op in (*program.forward, *program.backward) if isinstance(op, Exchange)]
    src, dst, num_bytes = np.concatenate(hops).T
    across = nics.node(src) != nics.node(dst)

    def by_rank(rank: Ints, inter_node: bool) -> Ints:
        return sums(rank[across == inter_node], num_bytes[across == inter_node], program.num_ranks)

    return Traffic(
        intra_node_sent=by_rank(src, False),
        intra_node_received=by_rank(dst, False),
        inter_node_sent=by_rank(src, True),
        inter_node_received=by_rank(dst, True),
        nic_sent=nics.sums(src[across], num_bytes[across]),
        nic_received=nics.sums(dst[across], num_bytes[across]),
    )


def _hops(op: Exchange, payload: Payload, nics: NicOf) -> Ints:
    # Rows (src, dst, bytes) of the transfers that one exchange is carried by.
    parcels = payload.parcels(messages_of(op.id, as_array(op.transfers)))
    if op.collective != "p2p" and is_collective(op.group, nics.num_ranks, nics.ranks_per_node):
        if op.collective == "all_gather":  # as gloo runs it: round a ring
            members, block_bytes = np.array(op.group), int(parcels.padded.max(initial=0))
            sizes = np.full(len(members), (len(members) - 1) * block_bytes)
            return np.column_stack([members, np.roll(members, -1), sizes])
        return np.column_stack([parcels.src, parcels.dst, parcels.padded])
    pairs = list(zip(parcels.src.tolist(), parcels.dst.tolist(), strict=True))
    num_pieces = Counter(row[Route.PAIR] for row in op.routes)
    packed = dict(zip(pairs, parcels.packed.tolist(), strict=True))
    direct = zip(pairs, parcels.direct.tolist(), strict=True)
    hops = [(*pair, num_bytes) for pair, num_bytes in direct if pair not in num_pieces]
    for src, dst, piece, send_proxy, receive_proxy in op.routes:
        start, stop = piece_bounds(packed[src, dst], num_pieces[src, dst])[piece]
        hops += [(a, b, stop - start) for a, b in pairwise((src, send_proxy, receive_proxy, dst)) if a != b]
    return np.array(hops, dtype=np.int64).reshape(-1, 3)


def linear_tokens(plan: MicrobatchPlan, attended: Ints | None = None) -> Ints:
    """Tokens of each rank outside attention [num_ranks]; `attended`: those in it, where known."""
    given, taken = moved_tokens(plan)
    return (tokens_per_rank(plan) if attended is None else attended) + taken - given


def moved_tokens(plan: MicrobatchPlan) -> tuple[Ints, Ints]:
    """Tokens that each rank attends for others by the remap, and others for it [num_ranks]."""
    holder, owner, tokens = as_array(plan.moves)[:, [Move.SRC, Move.DST, Move.TOKENS]].T
    return sums(holder, tokens, plan.num_ranks), sums(owner, tokens, plan.num_ranks)
