"""Weights from their owners to a role, and gradients back: a link (`link/`) on tensors.

One exchange each way, or one a slot of layers, in which every rank takes part. Both ends of a message
pack and unpack its rectangles in the link's order, so a message is values alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from megatron_balance.analysis.link import (
    StrategyLink,
    Twins,
    WeightPiece,
    elements,
    link,
    num_slots,
    places,
    slots_of_pieces,
    through_nodes,
)
from megatron_balance.analysis.shards import Base, ParameterTable, Shard, held
from megatron_balance.ir.arrays import Ints, sums
from megatron_balance.ir.strategy import Strategy

Flat = Mapping[int, torch.Tensor]
"""By number of a parameter, what a rank has of it: a contiguous tensor, read as a flat one."""


@dataclass(frozen=True, slots=True)
class LinkWay:
    """One direction of a link on one rank: what it packs, what it unpacks, and elements by peer."""

    packed: Ints
    """Places [n, Place.WIDTH], in the order of the receiving ranks."""
    unpacked: Ints
    """Places [m, Place.WIDTH], in the order of the sending ranks."""
    turns: Ints
    """The order [m] in which they are unpacked: by slot as slots are pushed, then by sending rank. So
    sums have the same bits whether slots move one by one or at once."""
    sent: tuple[int, ...]
    received: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Slot:
    """Transfers of one slot of layers (`analysis.link.slots`), or of all. `inside`: among ranks of a
    node, behind `across` in a pull and before it in a push; None: there are none on any rank.
    """

    across: LinkWay
    inside: LinkWay | None


@dataclass(frozen=True, slots=True)
class Apart:
    """How an exchange is cut. `slots`: layer by layer, to run beside compute; else all at once.
    `ranks_per_node`: what its ranks have alike crosses a node's NICs once; None: they do not care.
    """

    slots: bool = False
    ranks_per_node: int | None = None


@dataclass(frozen=True, slots=True)
class WeightExchange:
    """A rank's part in the change to one strategy. Made once per strategy, without a message."""

    pulls: tuple[Slot, ...]
    pushes: tuple[Slot, ...]
    """In the order of slots; they are pushed backwards."""
    group: dist.ProcessGroup
    device: torch.device

    @classmethod
    def of(
        cls,
        layout: tuple[Base, Ints, ParameterTable],
        strategy: Strategy,
        group: dist.ProcessGroup,
        device: torch.device,
        apart: Apart = Apart(),
    ) -> WeightExchange:
        """The exchange of this rank of `group`, which has all ranks of the base.

        `layout`: the base, its shards, and the parameters; `device`: of the messages. Errors as for
        `link`.
        """
        base, owned, parameters = layout
        rank = group.rank()
        parts: list[StrategyLink] = [link(base, owned, strategy, parameters, rank)]
        if apart.ranks_per_node is not None:
            twins = Twins.of(strategy, base.num_ranks, apart.ranks_per_node)
            parts = list(through_nodes(parts[0], parameters, twins, rank))
        own, mine = owned[owned[:, Shard.RANK] == rank], held(strategy, parameters, rank=rank)
        count = num_slots(strategy, parameters.num_layers) + 2 if apart.slots else 1
        made: list[tuple[Slot, ...]] = []
        for name, role, sending, receiving in (
            ("pull", WeightPiece.DST, own, mine),
            ("push", WeightPiece.SRC, mine, own),
        ):
            tables = [getattr(part, name) for part in parts]
            slots = [slots_of_pieces(table, role, strategy, parameters) for table in tables]
            ends = [
                _RankShards(rank, base.num_ranks, sending, receiving),
                _RankShards(rank, base.num_ranks, mine, mine),
            ]
            cut: list[Slot] = []
            for slot in range(count):
                chosen = [of == slot if apart.slots else slice(None) for of in slots]
                ways = [
                    each.way(table[which], of[which])
                    for each, table, of, which in zip(ends, tables, slots, chosen, strict=False)
                ]
                cut.append(Slot(ways[0], ways[1] if ways[1:] else None))
            made.append(tuple(cut))
        return cls(*made, group=group, device=device)

    def pull(self, owned: Flat, weights: Flat, dtype: torch.dtype) -> None:
        """Bring the owners' weights to this rank's role. Collective over the group.

        Args:
            owned: fp32 values that this rank owns.
            weights: those of its role; all their elements are overwritten.
            dtype: of the weights; the owner casts.
        """
        for slot in range(len(self.pulls)):
            self.pull_slot(slot, owned, weights, dtype)

    def push(self, gradients: Flat, owned: Flat) -> None:
        """Add the gradients of all roles to the owners'. Collective over the group.

        Contributions are added by rank, so two runs have the same bits.

        Args:
            gradients: fp32 gradients of this rank's role; sums of its node's are made in their place.
            owned: fp32 gradients of what this rank owns; added to.
        """
        for slot in reversed(range(len(self.pushes))):
            self.push_slot(slot, gradients, owned)

    def pull_slot(self, slot: int, owned: Flat, weights: Flat, dtype: torch.dtype) -> None:
        """The part of `pull` that a slot has. Collective over the group, slots from 0 on."""
        part = self.pulls[slot]
        for there, message in self._exchanged(part.across, owned, weights, dtype):
            there.copy_(message)
        if part.inside is not None:
            for there, message in self._exchanged(part.inside, weights, weights, dtype):
                there.copy_(message)

    def push_slot(self, slot: int, gradients: Flat, owned: Flat) -> None:
        """The part of `push` that a slot has. Collective over the group, slots from the last on."""
        part = self.pushes[slot]
        if part.inside is not None:
            for there, message in self._exchanged(part.inside, gradients, gradients, torch.float32):
                there.add_(message)
        for there, message in self._exchanged(part.across, gradients, owned, torch.float32):
            there.add_(message)

    def traffic(self, weight_bytes: int, ranks_per_node: int) -> list[list[list[int]]]:
        """Bytes of a pull and of a push of this rank, as a row of `WeightTraffic`.

        `weight_bytes`: of a weight; gradients are fp32.
        """
        me, ranks = self.group.rank(), np.arange(self.group.size())
        near = ranks // ranks_per_node == me // ranks_per_node
        found: list[list[list[int]]] = []
        for slots, width in ((self.pulls, weight_bytes), (self.pushes, torch.float32.itemsize)):
            ways = [way for slot in slots for way in (slot.across, slot.inside) if way is not None]
            sent, received = (
                width * np.sum([getattr(way, name) for way in ways], axis=0) for name in ("sent", "received")
            )
            found.append([[int(sent[at].sum()), int(received[at].sum())] for at in (near & (ranks != me), ~near)])
        return found

    def _exchanged(
        self, way: LinkWay, source: Flat, target: Flat, dtype: torch.dtype
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Where each arrived rectangle belongs, and its values."""
        out = torch.empty(sum(way.sent), dtype=dtype, device=self.device)
        into = torch.empty(sum(way.received), dtype=dtype, device=self.device)
        for there, message in _matched(way.packed, source, out):
            message.copy_(there)
        width = dtype.itemsize  # as bytes: gloo does not exchange all types
        dist.all_to_all_single(
            into.view(torch.uint8),
            out.view(torch.uint8),
            [width * count for count in way.received],
            [width * count for count in way.sent],
            group=self.group,
        )
        pairs = _matched(way.unpacked, target, into)
        return [pairs[turn] for turn in way.turns.tolist()]


@dataclass(frozen=True, slots=True)
class _RankShards:
    """A rank, and the shards that it sends from and receives into."""

    rank: int
    num_ranks: int
    sending: Ints
    receiving: Ints

    def way(self, pieces: Ints, slots: Ints) -> LinkWay:
        """The way of these transfers, which move in these slots."""
        out, into = (pieces[pieces[:, end] == self.rank] for end in (WeightPiece.SRC, WeightPiece.DST))
        return LinkWay(
            packed=places(out, self.sending),
            unpacked=places(into, self.receiving),
            turns=np.argsort(-slots[pieces[:, WeightPiece.DST] == self.rank], kind="stable"),
            sent=tuple(sums(out[:, WeightPiece.DST], elements(out), self.num_ranks).tolist()),
            received=tuple(sums(into[:, WeightPiece.SRC], elements(into), self.num_ranks).tolist()),
        )


def _matched(table: Ints, flat: Flat, message: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of views [rows, columns]: a place in memory, and its part of the message."""
    at = 0
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    for number, start, rows, columns, stride in table.tolist():
        tensor = flat[number]
        there = tensor.as_strided((rows, columns), (stride, 1), tensor.storage_offset() + start)
        pairs.append((there, message[at : at + rows * columns].view(rows, columns)))
        at += rows * columns
    return pairs
