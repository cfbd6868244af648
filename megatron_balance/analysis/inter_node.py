"""What goes from node to node in a forward pass, in closed form from the zones: by message, and by NIC.

A remap changes the first exchange of a ring or a task table (`compile.remap.resourced`): what its holder would send on at once, its owner
sends, with the remap. For a ring a row of negative tokens takes it from the one and a row of positive tokens adds it to the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_balance.analysis.wire import DST, SRC, WIDTH, NicOf, Payload, cut, is_collective, of_transfers
from megatron_balance.compile import layouts, remap
from megatron_balance.compile.pipeline import pattern_of
from megatron_balance.ir.arrays import Bools, Ints, as_array, sums
from megatron_balance.ir.plan import REMAP, MicrobatchPlan, TaskTable, Zone
from megatron_balance.ir.program import Kind
from megatron_balance.patterns import dispatch
from megatron_balance.patterns.zigzag import Zigzag

_REMAP_IN = 0  # the exchange of a remap's inputs

ZONE, HOLDER, OWNER, TOKENS = range(4)

HeadSlices = Sequence[Sequence[tuple[int, int, int, int]]]


@dataclass(frozen=True, slots=True)
class _Block:
    """Messages [n, 7] (`payload`) of some exchanges: whether they are routed, or carried by a collective, which pads them."""

    rows: Ints
    routed: bool = False
    collective: bool = False


class InterNodeTraffic:
    """Messages between nodes of one plan, collected zone by zone; then `remap`, once.

    `attention`: messages of attention's own transfers, those of all-gathers left out: these receive what `figures` says in closed form.
    `remapped`: those of the remap.
    """

    def __init__(self, plan: MicrobatchPlan, nics: NicOf) -> None:
        self.plan, self.nics = plan, nics
        self.attention: list[Ints] = [np.empty((0, WIDTH), dtype=np.int64)]
        self.remapped: list[Ints] = []
        self._blocks: list[_Block] = []
        self._rings: list[tuple[Ints, int]] = []  # all-gathers as collectives: source ranks, bytes of a block
        self._remap_in: list[Ints] = []
        counts = [pattern_of(zone).num_exchanges(zone) for zone in plan.zones]
        self._base = (np.cumsum([int(bool(plan.moves)), *counts])).tolist()
        self._table = layouts.fragments(plan) if plan.moves else np.empty((0, 6), dtype=np.int64)
        self._remote = layouts.remote(plan, self._table) if plan.moves else np.empty((0, 5), dtype=np.int64)
        self._moved = self._moved_rows()

    def ring(self, index: int, zone: Zone, held: Zigzag, sent_on: Ints) -> None:
        """`sent_on` [G]: tokens that each rank of the ring passes on first."""
        ranks, size, base = np.array(zone.ranks), len(zone.ranks), self._base[index]
        after = np.roll(ranks, -1)
        edge = np.flatnonzero(self.nics.node(ranks) != self.nics.node(after))
        rounds = np.arange(1, size)
        source = (edge[:, None] - rounds + 1) % size
        tokens = sent_on[source]
        short = held.parts < size
        if short.any():  # the first chunk of a short sequence has passed the last rank that needs it earlier
            start, stop = held.lo(np.zeros_like(held.lengths))
            arrived = np.zeros((size, size + 1), dtype=np.int64)
            gone = short & (held.parts > 1)
            np.add.at(arrived, (held.first[gone], held.parts[gone]), (stop - start)[gone])
            tokens = tokens - np.cumsum(arrived, axis=1)[source, rounds]
        heads = (0, self.plan.num_kv_heads)
        hops = _messages(base + rounds - 1, ranks[edge][:, None], after[edge][:, None], Kind.KV, heads, tokens)
        target = np.zeros(self.plan.num_ranks, dtype=np.int64)
        target[ranks] = after
        moved = self._moved[self._moved[:, ZONE] == index]
        to = target[moved[:, HOLDER]]
        moved, to = moved[moved[:, OWNER] != to], to[moved[:, OWNER] != to]  # what is owned by the target stays
        less = _messages(base, moved[:, HOLDER], to, Kind.KV, heads, -moved[:, TOKENS])
        self._add(index, [hops, less], [_messages(_REMAP_IN, moved[:, OWNER], to, Kind.KV, heads, moved[:, TOKENS])])

    def all_gather(self, index: int, zone: Zone, shared: Ints, payload: Payload) -> None:
        """`shared` [G]: tokens that each rank sends to all the others."""
        ranks = np.array(zone.ranks)
        routed = self._is_routed(index)
        if not routed and is_collective(zone.ranks, self.plan.num_ranks, self.plan.ranks_per_node):
            heads = np.array([0, self.plan.num_kv_heads])
            largest = np.array([[0, 0, 0, Kind.KV, *heads, shared.max()]])
            after = np.roll(ranks, -1)
            edges = ranks[self.nics.node(ranks) != self.nics.node(after)]
            self._rings.append((edges, (len(ranks) - 1) * int(payload.parcels(largest).padded.sum())))
            return
        rows = _messages(self._base[index], ranks[:, None], ranks, Kind.KV, (0, self.plan.num_kv_heads), shared[:, None])
        self._blocks.append(_Block(self._across(rows), routed))

    def heads(self, index: int, zone: Zone, runs: Ints, slices: HeadSlices) -> None:
        """`runs` [G]: tokens of each rank."""
        ranks, base = np.array(zone.ranks), self._base[index]
        if len(ranks) == 1:
            return
        found = [np.empty((0, WIDTH), dtype=np.int64)]
        for rank, own in zip(zone.ranks, slices, strict=True):
            if own:
                queries, keys = (own[0][0], own[-1][1]), (own[0][2], own[-1][3])
                found.append(_messages(base, ranks, rank, Kind.Q, queries, runs))
                found.append(_messages(base, ranks, rank, Kind.KV, keys, runs))
                found.append(_messages(base + 1, rank, ranks, Kind.OUT, queries, runs))
        self._add(index, found, collective=is_collective(zone.ranks, self.plan.num_ranks, self.plan.ranks_per_node))

    def task_table(self, index: int, zone: TaskTable) -> None:
        there, back = (as_array(rows) for rows in dispatch.transfers(zone, self.plan.num_heads, self.plan.num_kv_heads))
        opened: list[Ints] = []
        if self.plan.moves:
            regions = np.column_stack([self._table[self._remote[:, layouts.FRAGMENT], layouts.SEQ], self._remote[:, 1:]])
            there, sent = remap.resourced(there, regions)
            opened.append(of_transfers(_REMAP_IN, sent))
        self._add(index, [of_transfers(self._base[index], there), of_transfers(self._base[index] + 1, back)], opened)

    def remap(self) -> None:
        """The inputs of what is remote, remapped, and the outputs that come back to the owner."""
        moves = as_array(self.plan.moves)
        remapped = [
            _messages(_REMAP_IN, moves[:, 1], moves[:, 0], kind, (0, heads), moves[:, 2])
            for kind, heads in ((Kind.Q, self.plan.num_heads), (Kind.KV, self.plan.num_kv_heads))
        ]
        owner = _messages(self._base[-1], moves[:, 0], moves[:, 1], Kind.OUT, (0, self.plan.num_heads), moves[:, 2])
        self.remapped.append(self._across(np.concatenate([*remapped, owner])))
        self._blocks.append(_Block(np.concatenate([*self.remapped, *map(self._across, self._remap_in)]), self._is_routed(REMAP)))

    def nic_bytes(self, payload: Payload) -> tuple[Ints, Ints, int]:
        """Bytes that each NIC sends and receives, [nodes, NICs of a node], and how many parcels are routed."""
        sent, received = np.zeros((2, self.nics.num_nodes, self.nics.per_node), dtype=np.int64)
        for edges, num_bytes in self._rings:
            sent += self.nics.sums(edges, np.full(len(edges), num_bytes))
            received += self.nics.sums((edges + 1) % self.plan.num_ranks, np.full(len(edges), num_bytes))
        routed = 0
        for block in self._blocks:
            parcels = payload.parcels(block.rows)
            cut_up = self._cut_up(parcels.tokens, block)
            routed += int(cut_up.sum())
            size = np.where(cut_up, 0, parcels.padded if block.collective else parcels.direct)
            sent += self.nics.sums(parcels.src, size)
            received += self.nics.sums(parcels.dst, size)
            for index, piece in enumerate(cut(parcels.packed[cut_up], self._num_pieces) if cut_up.any() else ()):
                place = index % self.nics.per_node
                sent[:, place] += sums(self.nics.node(parcels.src[cut_up]), piece, self.nics.num_nodes)
                received[:, place] += sums(self.nics.node(parcels.dst[cut_up]), piece, self.nics.num_nodes)
        return sent, received, routed

    @property
    def _num_pieces(self) -> int:
        return self.nics.per_node * (self.plan.routing.pieces if self.plan.routing is not None else 1)

    def _cut_up(self, tokens: Ints, block: _Block) -> Bools:
        routing = self.plan.routing
        if not block.routed or routing is None or self.nics.per_node == 1:
            return np.zeros(len(tokens), dtype=bool)
        return tokens >= routing.min_tokens

    def _add(self, index: int, rows: Sequence[Ints], opened: Sequence[Ints] = (), *, collective: bool = False) -> None:
        """A zone's own messages, and what its first exchange leaves to the remap."""
        crossing = self._across(np.concatenate(rows))
        routed = self._is_routed(index)
        self._blocks.append(_Block(crossing, routed, collective and not routed))
        self._remap_in += opened
        self.attention += [crossing, *(self._across(table) for table in opened)]

    def _is_routed(self, index: int) -> bool:
        return self.plan.routing is not None and index in self.plan.routing.zones

    def _across(self, rows: Ints) -> Ints:
        return rows[(self.nics.node(rows[:, SRC]) != self.nics.node(rows[:, DST])) & (rows[:, -1] != 0)]

    def _moved_rows(self) -> Ints:
        """Rows (zone, holder, owner, tokens) of what is remote and sent on by the first exchange of its ring."""
        given = self._remote
        of = self._table[given[:, layouts.FRAGMENT]]
        tokens = given[:, layouts.END] - given[:, layouts.BEGIN]
        rows = np.column_stack([of[:, layouts.ZONE], given[:, [layouts.HOLDER, layouts.OWNER]], tokens])
        return rows[of[:, layouts.ON] == 1]


def _messages(exchange: Ints | int, src: Ints | int, dst: Ints | int, kind: Kind, heads: tuple[int, int], tokens: Ints) -> Ints:
    """Rows of messages; the columns are broadcast against one another."""
    columns = np.broadcast_arrays(exchange, src, dst, np.int64(kind), *heads, tokens)
    return np.stack([column.ravel() for column in columns], axis=1).astype(np.int64)
