"""Traffic from node to node in a forward pass, from the zones: by message, and by NIC.

The owner of what a rank attends to makes first hops in its place (`patterns.base.FirstHops`), with
the remap: such a hop is a message of negative tokens in its zone's first exchange, and one of
positive tokens in the remap's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_balance.analysis.wire import NicOf, Payload, is_collective, piece_bytes
from megatron_balance.compile import layouts
from megatron_balance.ir.arrays import Bools, Ints, as_array, sums
from megatron_balance.ir.columns import Message, Move
from megatron_balance.ir.plan import REMAP, MicrobatchPlan
from megatron_balance.ir.program import Kind
from megatron_balance.patterns import by_pattern, pattern_of
from megatron_balance.patterns.base import Context, ZoneMessages, spared_messages
from megatron_balance.patterns.sends import messages_from, messages_of

_REMAP_IN = 0  # the exchange of a remap's inputs


@dataclass(frozen=True, slots=True)
class _ExchangeBlock:
    """Messages of some exchanges: whether they are routed, or carried by a collective, which pads
    them.
    """

    rows: Ints
    routed: bool = False
    collective: bool = False


class InterNodeTraffic:
    """Messages between nodes of one plan, zone by zone, with its remap."""

    def __init__(self, plan: MicrobatchPlan, nics: NicOf) -> None:
        self.plan, self.nics = plan, nics
        self._nothing = np.empty((0, Message.WIDTH), dtype=np.int64)
        self._attention, self._remap = [self._nothing], self._nothing
        self._blocks: list[_ExchangeBlock] = []
        self._gathers: list[ZoneMessages] = []  # all-gathers that are one collective call each
        context, remote = Context.of(plan), layouts.remote_in(plan)
        hops: list[Ints] = []
        spared: dict[int, Ints] = {}
        for pattern, zones in by_pattern(plan.zones) if len(remote) else ():
            first = pattern.first_hops(zones, context, remote)
            hops.append(messages_of(_REMAP_IN, first.rows))
            spared |= {int(index): spared_messages(first)[first.zones == index] for index in np.unique(first.zones)}
        base = 1 if plan.moves else 0
        for index, zone in enumerate(plan.zones):
            pattern = pattern_of(zone)
            self._add(index, base, pattern.messages(zone, context, across=True), spared.get(index, self._nothing))
            base += pattern.num_exchanges(zone)
        if plan.moves:
            self._add_remap(base, np.concatenate([self._nothing, *hops]))

    def _add(self, index: int, base: int, exchanges: Sequence[ZoneMessages], spared: Ints) -> None:
        """Messages of a zone, whose first exchange is `base`, less those that it is `spared`."""
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
        """Inputs and outputs (exchange `last`) of what is remote, and the first hops that owners
        make.
        """
        holder, owner, tokens = as_array(self.plan.moves)[:, [Move.SRC, Move.DST, Move.TOKENS]].T
        heads, kv_heads = (0, self.plan.num_heads), (0, self.plan.num_kv_heads)
        moves = [
            messages_from(_REMAP_IN, owner, holder, Kind.Q, heads, tokens),
            messages_from(_REMAP_IN, owner, holder, Kind.KV, kv_heads, tokens),
            messages_from(last, holder, owner, Kind.OUT, heads, tokens),
        ]
        self._remap, hops = self._across(np.concatenate(moves)), self._across(hops)
        self._attention.append(hops)
        self._blocks.append(_ExchangeBlock(np.concatenate([self._remap, hops]), self._is_routed(REMAP)))

    def received(self, payload: Payload) -> tuple[Ints, Ints]:
        """Tokens of keys and values for attention that come from other nodes, and all bytes: int64
        [num_ranks] each.
        """
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
        """Bytes that each NIC sends and receives, [nodes, NICs of a node], and the number of routed
        parcels.
        """
        sent, received = np.zeros((2, self.nics.num_nodes, self.nics.per_node), dtype=np.int64)
        for gather in self._gathers:
            # As gloo runs it: blocks as wide as the widest go round a ring of the ranks.
            group, largest = np.array(gather.group), gather.rows[[gather.rows[:, Message.TOKENS].argmax()]]
            num_bytes = (len(group) - 1) * int(payload.parcels(largest).padded.sum())
            after = np.roll(group, -1)
            edge = self.nics.node(group) != self.nics.node(after)
            sent += self.nics.sums(group[edge], np.full(edge.sum(), num_bytes))
            received += self.nics.sums(after[edge], np.full(edge.sum(), num_bytes))
        num_routed = 0
        for block in self._blocks:
            parcels = payload.parcels(block.rows)
            routed = self._goes_by_proxies(parcels.tokens, block)
            num_routed += int(routed.sum())
            size = np.where(routed, 0, parcels.padded if block.collective else parcels.direct)
            sent += self.nics.sums(parcels.src, size)
            received += self.nics.sums(parcels.dst, size)
            pieces = piece_bytes(parcels.packed[routed], self._num_pieces) if routed.any() else ()
            for index, piece in enumerate(pieces):
                place = index % self.nics.per_node
                sent[:, place] += sums(self.nics.node(parcels.src[routed]), piece, self.nics.num_nodes)
                received[:, place] += sums(self.nics.node(parcels.dst[routed]), piece, self.nics.num_nodes)
        return sent, received, num_routed

    @property
    def _num_pieces(self) -> int:
        return self.nics.per_node * (self.plan.routing.pieces if self.plan.routing is not None else 1)

    def _goes_by_proxies(self, tokens: Ints, block: _ExchangeBlock) -> Bools:
        routing = self.plan.routing
        if not block.routed or routing is None or self.nics.per_node == 1:
            return np.zeros(len(tokens), dtype=bool)
        return tokens >= routing.min_tokens

    def _is_routed(self, index: int) -> bool:
        return self.plan.routing is not None and index in self.plan.routing.zones

    def _across(self, rows: Ints) -> Ints:
        src, dst = self.nics.node(rows[:, Message.SRC]), self.nics.node(rows[:, Message.DST])
        across = (src != dst) & (rows[:, Message.TOKENS] != 0)
        return rows if across.all() else rows[across]
