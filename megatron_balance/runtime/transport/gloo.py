"""Exchanges on gloo: asynchronous sends and receives, and threads that relay.

Every point-to-point message has a tag, so that transfers of several exchanges under way between the
same two ranks, and those that a proxy relays beside its own, are never taken for one another.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from megatron_balance.runtime.counters import PhaseTraffic
from megatron_balance.runtime.groups import Groups
from megatron_balance.runtime.host_times import SEVERAL, HostTimes
from megatron_balance.runtime.lower.parcels import CallForm
from megatron_balance.runtime.lower.steps import ExchangeStep, Phase
from megatron_balance.runtime.lower.views import Block
from megatron_balance.runtime.trace import Trace
from megatron_balance.runtime.transport.base import Parcel
from megatron_balance.runtime.transport.comm import (
    CollectiveCall,
    break_off,
    direct_and_routed,
    far_bytes,
    is_collective,
    pack_collective,
    pieces,
    receive,
    send,
)
from megatron_balance.runtime.transport.relay import Relay


@dataclass(slots=True)
class _GlooCalls:
    """An exchange's calls.

    `receiving`: with the pool rank that each comes from, or `SEVERAL`; `keep` holds the tensors that
    are still read; `packed`: those that a collective brings, in its own order.
    """

    receiving: list[tuple[int, dist.Work]]
    sending: list[dist.Work] = field(default_factory=list)
    keep: list[Tensor] = field(default_factory=list)
    packed: CollectiveCall | None = None

    def arrived(self, timeout: timedelta, times: HostTimes) -> None:
        """Block the thread until everything is here, and unpacked; no longer than `timeout` for each.

        Call once: gloo waits for ever for a message that has come before.
        """
        begin = time.perf_counter()
        for source, work in self.receiving:
            work.wait(timeout)
            end = time.perf_counter()
            times.waited_for(source, end - begin)
            begin = end
        self.receiving = []
        if self.packed is not None:
            self.packed.unpack()
            self.packed = None

    def left(self, timeout: timedelta) -> None:
        """Block the thread until everything is sent, so that its memory may change. Call once."""
        for work in self.sending:
            work.wait(timeout)
        self.sending, self.keep = [], []


class Gloo:
    """See `runtime.transport.base.Transport`.

    gloo sends a message once its receiver has said that it is ready, and says so on the connection
    on which other messages travel. Where two ranks send each other pieces at once, as proxies of a
    ring do, the word for the next round would wait behind a whole piece of this one. So receives
    are posted two exchanges ahead.
    """

    ahead = 2

    def __init__(self, phase: Phase, form: CallForm, groups: Groups, trace: Trace | None) -> None:
        self.groups = groups
        self.traffic = PhaseTraffic()
        self.expected: dict[int, Sequence[Parcel] | Block] = {}  # receives of collectives not yet issued
        self.under_way: dict[int, _GlooCalls] = {}
        self.leaving: dict[int, _GlooCalls] = {}  # exchanges whose sends may still be under way
        self.relay = Relay(phase.relay_tasks, form, groups, trace) if phase.relay_tasks else None

    def expect(
        self, exchange: ExchangeStep, receives: Sequence[Parcel] | Block, arriving: Mapping[int, Tensor]
    ) -> None:
        if exchange.far:
            self.traffic.inter_node_bytes_received += far_bytes(receives, exchange.far)
        if isinstance(receives, Block) or is_collective(exchange, self.groups):
            self.expected[exchange.id] = receives
            return
        receiving = [(peer, receive(x, peer, exchange.tag, self.groups)) for peer, x in receives if x.numel()]
        for peer, raw in arriving.items():
            for _, hop, x in pieces(raw, exchange.routed_receives[peer]):
                receiving.append((hop.peer, receive(x, hop.peer, exchange.tag + hop.tag, self.groups)))
                self.traffic.inter_node_bytes_received += x.nbytes * hop.crosses
        self.under_way[exchange.id] = _GlooCalls(receiving)

    def start(self, exchange: ExchangeStep, sends: Sequence[Parcel] | Block) -> None:
        if exchange.far:
            self.traffic.inter_node_bytes_sent += far_bytes(sends, exchange.far, exchange.routed_sends)
        if exchange.id in self.expected:
            packed = pack_collective(sends, self.expected.pop(exchange.id), exchange, self.groups)
            receiving = [(SEVERAL, work) for work in packed.issue()]
            self.under_way[exchange.id] = _GlooCalls(receiving, keep=packed.memory, packed=packed)
            return
        assert not isinstance(sends, Block), "a block without a collective"
        under_way = self.leaving[exchange.id] = self.under_way[exchange.id]
        under_way.keep = [x for _, x in sends]
        direct, routed = direct_and_routed(sends, exchange)
        under_way.sending = [send(x, peer, exchange.tag, self.groups) for peer, x in direct]
        for peer, raw in routed.items():
            for _, hop, x in pieces(raw, exchange.routed_sends[peer]):
                under_way.sending.append(send(x, hop.peer, exchange.tag + hop.tag, self.groups))
                under_way.keep.append(x)
                self.traffic.inter_node_bytes_sent += x.nbytes * hop.crosses

    def launched(self) -> None:
        """Do nothing: a launch on a CPU is over when it returns."""

    def attended(self) -> None:
        """Do nothing: everything is under way."""

    def arrived(self, exchange: ExchangeStep) -> None:
        self.under_way.pop(exchange.id).arrived(self.groups.timeout, self.groups.host_times)
        self.let_go([at for at in self.leaving if at < exchange.id])

    def let_go(self, exchanges: Sequence[int]) -> None:
        """Wait for the sends of exchanges.

        Where the rank has ended a later one, the peers have begun these: no deadlock.
        """
        for at in exchanges:
            self.leaving.pop(at).left(self.groups.timeout)

    def end(self) -> None:
        self.let_go(list(self.leaving))
        if self.relay is not None:
            self.relay.finish(self.traffic)

    def fail(self) -> None:
        if self.relay is not None:
            self.relay.raise_error()
        break_off(self.groups.pool)
        if self.relay is not None:
            self.relay.abandon()
