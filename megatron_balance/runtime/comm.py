"""One exchange as one batched communication call: point-to-point, all-to-all or all-gather.

A collective carries bytes: messages of several kinds and types to one peer are packed one after the other, each aligned, so
that queries and keys of different head counts, or outputs and their fp32 LSE, go in a single call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_balance.runtime.groups import Groups

_ALIGN = 16  # bytes; every element type starts at a multiple of its size


@dataclass(slots=True)
class Pending:
    """A call under way. `keep` holds the tensors that the backend still reads."""

    works: list[dist.Work]
    keep: list[Tensor]
    unpack: list[tuple[Tensor, Tensor]]

    def wait(self) -> None:
        """Block the stream (or, on gloo, the thread) until everything arrived. Call once."""
        for work in self.works:
            work.wait()
        for target, raw in self.unpack:
            target.copy_(raw.view(target.dtype).view(target.shape))
        self.works, self.keep, self.unpack = [], [], []


Parcel = tuple[int, Tensor]
"""(pool rank of the peer, contiguous tensor)."""


def start(sends: Sequence[Parcel], receives: Sequence[Parcel], pattern: str, group: tuple[int, ...], groups: Groups) -> Pending:
    """Begin the exchange. The tensors of `receives` are filled when `wait` returns."""
    collective = groups.of(group) if pattern != "p2p" else None
    if collective is None:
        return _point_to_point(sends, receives, groups)
    if pattern == "all_gather":
        return _all_gather(sends, receives, group, groups, collective)
    return _all_to_all(sends, receives, group, collective)


def _point_to_point(sends: Sequence[Parcel], receives: Sequence[Parcel], groups: Groups) -> Pending:
    ops = [dist.P2POp(dist.isend, x, groups.ranks[peer], groups.pool) for peer, x in sends if x.numel()]
    ops += [dist.P2POp(dist.irecv, x, groups.ranks[peer], groups.pool) for peer, x in receives if x.numel()]
    return Pending(dist.batch_isend_irecv(ops) if ops else [], [x for _, x in sends], [])


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN) * _ALIGN


def _size(parcels: Sequence[Parcel], peer: int) -> int:
    return sum(_padded(x.numel() * x.element_size()) for p, x in parcels if p == peer)


def _pack(parcels: Sequence[Parcel], raw: Tensor, begin: int) -> None:
    at = begin
    for _, x in parcels:
        num_bytes = x.numel() * x.element_size()
        raw[at : at + num_bytes].copy_(x.reshape(-1).view(torch.uint8))
        at += _padded(num_bytes)


def _slots(parcels: Sequence[Parcel], raw: Tensor, begin: int) -> list[tuple[Tensor, Tensor]]:
    slots, at = [], begin
    for _, x in parcels:
        num_bytes = x.numel() * x.element_size()
        slots.append((x, raw[at : at + num_bytes]))
        at += _padded(num_bytes)
    return slots


def _device(parcels: Sequence[Parcel], fallback: Sequence[Parcel]) -> torch.device:
    return next((x.device for _, x in (*parcels, *fallback)), torch.device("cpu"))


def _all_to_all(sends: Sequence[Parcel], receives: Sequence[Parcel], group: tuple[int, ...], process_group: dist.ProcessGroup) -> Pending:
    device = _device(sends, receives)
    out_sizes, in_sizes = [_size(receives, peer) for peer in group], [_size(sends, peer) for peer in group]
    packed = torch.empty(sum(in_sizes), dtype=torch.uint8, device=device)
    raw = torch.empty(sum(out_sizes), dtype=torch.uint8, device=device)
    unpack: list[tuple[Tensor, Tensor]] = []
    send_at = receive_at = 0
    for peer, num_in, num_out in zip(group, in_sizes, out_sizes, strict=True):
        _pack([p for p in sends if p[0] == peer], packed, send_at)
        unpack += _slots([p for p in receives if p[0] == peer], raw, receive_at)
        send_at, receive_at = send_at + num_in, receive_at + num_out
    work = dist.all_to_all_single(raw, packed, out_sizes, in_sizes, group=process_group, async_op=True)
    return Pending([work] if work is not None else [], [packed, raw], unpack)


def _all_gather(
    sends: Sequence[Parcel], receives: Sequence[Parcel], group: tuple[int, ...], groups: Groups, process_group: dist.ProcessGroup
) -> Pending:
    device = _device(sends, receives)
    others = [peer for peer in group if peer != groups.rank]
    mine = [p for p in sends if p[0] == others[0]]
    width = max([_size(sends, others[0]), *(_size(receives, peer) for peer in others)])
    packed = torch.empty(width, dtype=torch.uint8, device=device)
    raw = torch.empty(width * len(group), dtype=torch.uint8, device=device)
    _pack(mine, packed, 0)
    work = dist.all_gather_into_tensor(raw, packed, group=process_group, async_op=True)
    unpack: list[tuple[Tensor, Tensor]] = []
    for index, peer in enumerate(group):
        if peer != groups.rank:
            unpack += _slots([p for p in receives if p[0] == peer], raw, index * width)
    return Pending([work] if work is not None else [], [packed, raw], unpack)
