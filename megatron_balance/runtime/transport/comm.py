"""Communication calls of exchanges: tagged sends and receives on gloo, and collectives.

A collective carries bytes: messages of several kinds and types to one peer are packed one after the
other, each aligned, so that queries and keys of different head counts, or outputs and their fp32
LSE, go in a single call. Those of an all-to-all are written into one block, peer by peer, and read
where they arrive (`is_block`): nothing is copied for the call.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_balance.analysis.wire import padded, piece_bounds
from megatron_balance.runtime.groups import Groups
from megatron_balance.runtime.lower.memory import Block, as_bytes, pack
from megatron_balance.runtime.lower.steps import ExchangeStep, Hop, Piece

Parcel = tuple[int, Tensor]
"""(pool rank of the peer, contiguous tensor)."""


_POISON_TAG = 2**31 - 1


@dataclass(slots=True)
class CollectiveCall:
    """A collective call, packed and not yet issued.

    `memory`: tensors that it reads and writes; `received`: tensors and the bytes that belong there,
    where they are not read in place.
    """

    call: Callable[[], dist.Work | None]
    memory: list[Tensor]
    received: list[tuple[Tensor, Tensor]]

    def issue(self) -> list[dist.Work]:
        work = self.call()
        return [work] if work is not None else []

    def unpack(self) -> None:
        for target, raw in self.received:
            target.copy_(raw.view(target.dtype).view(target.shape))


def send(x: Tensor, peer: int, tag: int, groups: Groups) -> dist.Work:
    """Begin to send a contiguous tensor to pool rank `peer`."""
    work = dist.isend(x, groups.ranks[peer], groups.pool, tag)
    assert work is not None, "this rank is not in its own pool"
    return work


def receive(x: Tensor, peer: int, tag: int, groups: Groups) -> dist.Work:
    """Begin to receive into a contiguous tensor."""
    work = dist.irecv(x, groups.ranks[peer], groups.pool, tag)
    assert work is not None, "this rank is not in its own pool"
    return work


def break_off(group: dist.ProcessGroup | None) -> bool:
    """Make all transfers of this rank in a group, and those that peers wait for, fail (gloo).

    A receive that times out closes the connections to all peers. It is the only way to wake another
    thread of this rank. False: the group also has another backend than gloo.
    """
    if group is None:
        return True
    backends = {group._get_backend(device).name() for device in group._device_types}
    for peer in dist.get_process_group_ranks(group) if "gloo" in backends else ():
        if peer != dist.get_rank():
            with suppress(RuntimeError):
                work = dist.irecv(torch.empty(1), peer, group, _POISON_TAG)
                assert work is not None, "this rank is in the group"
                work.wait(timedelta(milliseconds=1))
    return backends == {"gloo"}


def direct_and_routed(sends: Sequence[Parcel], exchange: ExchangeStep) -> tuple[list[Parcel], dict[int, Tensor]]:
    """Parcels that go directly; and by peer, the bytes of all that goes in pieces."""
    direct: list[Parcel] = []
    routed: dict[int, list[Tensor]] = {}
    for peer, x in sends:
        if peer in exchange.routed_sends:
            routed.setdefault(peer, []).append(x)
        elif x.numel():
            direct.append((peer, x))
    return direct, {peer: pack(tensors) for peer, tensors in routed.items()}


def pieces(raw: Tensor, routed: Sequence[Piece]) -> Iterator[tuple[Piece, Hop, Tensor]]:
    """The pieces of a parcel that are not empty, with their hop and bytes."""
    bounds = piece_bounds(raw.numel(), routed[0].count)
    for piece in routed:
        begin, end = bounds[piece.index]
        if begin < end:
            yield piece, piece.hop, raw[begin:end]


def pack_collective(
    sends: Sequence[Parcel] | Block, receives: Sequence[Parcel] | Block, exchange: ExchangeStep, groups: Groups
) -> CollectiveCall:
    group = groups.of(exchange.group)
    assert group is not None, "ranks without a process group"
    if isinstance(sends, Block) and isinstance(receives, Block):
        return _all_to_all(sends, receives, group)
    assert not isinstance(sends, Block), "a block goes out, parcels come back"
    assert not isinstance(receives, Block), "parcels go out, a block comes back"
    if exchange.collective == "all_gather":
        return _all_gather(sends, receives, exchange.group, groups)
    return _reduce_scatter(sends, receives, exchange.group, groups)


def far_bytes(parcels: Sequence[Parcel] | Block, far: frozenset[int], routed: Collection[int] = ()) -> int:
    """Bytes to or from peers on other nodes that are not `routed`."""
    own = parcels.arranged.peers if isinstance(parcels, Block) else ((peer, x.nbytes) for peer, x in parcels)
    return sum(num_bytes for peer, num_bytes in own if peer in far and peer not in routed)


def _size(parcels: Sequence[Parcel], peer: int) -> int:
    return sum(padded(x.nbytes) for p, x in parcels if p == peer)


def _slots(parcels: Sequence[Parcel], raw: Tensor, begin: int) -> list[tuple[Tensor, Tensor]]:
    """Tensors and the bytes of `raw` that belong to each, one after the other."""
    slots: list[tuple[Tensor, Tensor]] = []
    for _, x in parcels:
        slots.append((x, raw[begin : begin + x.nbytes]))
        begin += padded(x.nbytes)
    return slots


def _pack_into(parcels: Sequence[Parcel], raw: Tensor, begin: int) -> None:
    for x, place in _slots(parcels, raw, begin):
        place.copy_(as_bytes(x))


def _device(parcels: Sequence[Parcel], fallback: Sequence[Parcel]) -> torch.device:
    return next((x.device for _, x in (*parcels, *fallback)), torch.device("cpu"))


def _all_to_all(sends: Block, receives: Block, process_group: dist.ProcessGroup) -> CollectiveCall:
    packed, raw = sends.memory, receives.memory
    sizes = list(receives.arranged.sizes), list(sends.arranged.sizes)
    call = partial(dist.all_to_all_single, raw, packed, *sizes, group=process_group, async_op=True)
    return CollectiveCall(call, [packed, raw], [])


def _all_gather(
    sends: Sequence[Parcel], receives: Sequence[Parcel], group: tuple[int, ...], groups: Groups
) -> CollectiveCall:
    device = _device(sends, receives)
    others = [peer for peer in group if peer != groups.rank]
    mine = [p for p in sends if p[0] == others[0]]
    width = max([_size(sends, others[0]), *(_size(receives, peer) for peer in others)])
    packed = groups.buffers.empty((width,), torch.uint8, device)
    raw = groups.buffers.empty((width * len(group),), torch.uint8, device, received=True)
    _pack_into(mine, packed, 0)
    received: list[tuple[Tensor, Tensor]] = []
    for index, peer in enumerate(group):
        if peer != groups.rank:
            received += _slots([p for p in receives if p[0] == peer], raw, index * width)
    call = partial(dist.all_gather_into_tensor, raw, packed, group=groups.of(group), async_op=True)
    return CollectiveCall(call, [packed, raw], received)


def _reduce_scatter(
    sends: Sequence[Parcel], receives: Sequence[Parcel], group: tuple[int, ...], groups: Groups
) -> CollectiveCall:
    """A block for each rank, all as wide as the widest; this rank's own gradients stay here.
    `receives`: from one peer.
    """
    device = _device(sends, receives)
    dtype = next(x.dtype for _, x in (*sends, *receives))  # gradients: all of the wide type
    width = max([sum(padded(x.nbytes) for _, x in receives), *(_size(sends, peer) for peer in group)])
    packed = groups.buffers.empty((width * len(group),), torch.uint8, device).zero_()
    raw = groups.buffers.empty((width,), torch.uint8, device, received=True)
    for index, peer in enumerate(group):
        _pack_into([p for p in sends if p[0] == peer], packed, index * width)
    call = partial(
        dist.reduce_scatter_tensor, raw.view(dtype), packed.view(dtype), group=groups.of(group), async_op=True
    )
    return CollectiveCall(call, [packed, raw], _slots(receives, raw, 0))
