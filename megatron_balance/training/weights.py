"""Weights from their owners to a role, and gradients back: a link (`link/`) on tensors.

One exchange each way, in which every rank takes part. Both ends of a message pack and unpack its
rectangles in the link's order, so a message is values alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from megatron_balance.analysis.link import Base, Link, Parameters, Piece, Shard, elements, held, link, places
from megatron_balance.ir.arrays import Ints, sums
from megatron_balance.ir.strategy import Strategy

Flat = Mapping[int, torch.Tensor]
"""By number of a parameter, what a rank has of it: a contiguous tensor, read as a flat one."""


@dataclass(frozen=True, slots=True)
class Way:
    """One direction of a link on one rank: what it packs, what it unpacks, and elements by peer."""

    packed: Ints
    """Places [n, Place.WIDTH], in the order of the receiving ranks."""
    unpacked: Ints
    """Places [m, Place.WIDTH], in the order of the sending ranks."""
    sent: tuple[int, ...]
    received: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Exchange:
    """A rank's part in the change to one strategy. Made once per strategy, without a message."""

    pull_way: Way
    push_way: Way
    group: dist.ProcessGroup
    device: torch.device

    @classmethod
    def of(
        cls,
        base: Base,
        owned: Ints,
        strategy: Strategy,
        parameters: Parameters,
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> Exchange:
        """The exchange of this rank of `group`, which has all ranks of the base.

        `device`: of the messages. Other arguments and errors as for `link`.
        """
        rank = group.rank()
        table: Link = link(base, owned, strategy, parameters, rank)
        own = owned[owned[:, Shard.RANK] == rank]
        mine = held(strategy, parameters, rank=rank)
        return cls(
            pull_way=_way(table.pull, rank, base.num_ranks, own, mine),
            push_way=_way(table.push, rank, base.num_ranks, mine, own),
            group=group,
            device=device,
        )

    def pull(self, owned: Flat, weights: Flat, dtype: torch.dtype) -> None:
        """Bring the owners' weights to this rank's role. Collective over the group.

        Args:
            owned: fp32 values that this rank owns.
            weights: those of its role; all their elements are overwritten.
            dtype: of the weights; the owner casts.
        """
        for there, message in self._exchanged(self.pull_way, owned, weights, dtype):
            there.copy_(message)

    def push(self, gradients: Flat, owned: Flat) -> None:
        """Add the gradients of all roles to the owners'. Collective over the group.

        Contributions are added by rank, so two runs have the same bits.

        Args:
            gradients: fp32 gradients of this rank's role.
            owned: fp32 gradients of what this rank owns; added to.
        """
        for there, message in self._exchanged(self.push_way, gradients, owned, torch.float32):
            there.add_(message)

    def traffic(self, weight_bytes: int, ranks_per_node: int) -> list[list[list[int]]]:
        """Bytes of a pull and of a push of this rank, as a row of `Traffic`.

        `weight_bytes`: of a weight; gradients are fp32.
        """
        me = self.group.rank()
        near = np.arange(self.group.size()) // ranks_per_node == me // ranks_per_node
        other = np.arange(self.group.size()) != me
        return [
            [
                [width * int(np.array(counts)[which].sum()) for counts in (way.sent, way.received)]
                for which in (near & other, ~near)
            ]
            for way, width in ((self.pull_way, weight_bytes), (self.push_way, torch.float32.itemsize))
        ]

    def _exchanged(
        self, way: Way, source: Flat, target: Flat, dtype: torch.dtype
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
        return _matched(way.unpacked, target, into)


def _way(pieces: Ints, rank: int, num_ranks: int, sending: Ints, receiving: Ints) -> Way:
    out, into = (pieces[pieces[:, end] == rank] for end in (Piece.SRC, Piece.DST))
    return Way(
        packed=places(out, sending),
        unpacked=places(into, receiving),
        sent=tuple(sums(out[:, Piece.DST], elements(out), num_ranks).tolist()),
        received=tuple(sums(into[:, Piece.SRC], elements(into), num_ranks).tolist()),
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
