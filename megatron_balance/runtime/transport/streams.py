"""Exchanges on CUDA: communication streams beside the compute stream, joined by events.

The host waits for nothing: what ranks must connect they connect when they bind a plan
(`runtime.transport.connect`). Each stream of `compile.order.streams` has a communicator of its own
(`runtime.groups.stream_groups`), so that what it carries is only in order with itself: transfers
between nodes (high priority) beside those inside the node, and moved beside copied traffic. NCCL
matches messages by their order between two ranks; ranks issue exchanges in one order
(`compile.issue_order`), their legs and streams as `compile.batches` has them, and messages within a
batch by source, target and piece. The legs of a routed exchange are one batch each, on streams of
their own, since a leg waits for the one before. Collectives have streams too, but go by the
communicators of their ranks.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from megatron_balance.analysis.wire import piece_bounds
from megatron_balance.compile.order import LEGS, Leg
from megatron_balance.runtime.counters import Traffic
from megatron_balance.runtime.cuda import Streams, Transfer
from megatron_balance.runtime.groups import Groups
from megatron_balance.runtime.lower.parcels import Form, parcel_bytes
from megatron_balance.runtime.lower.steps import ExchangeStep, Hop, Phase, RelayTask
from megatron_balance.runtime.trace import Trace, Traced
from megatron_balance.runtime.transport.base import Parcel
from megatron_balance.runtime.transport.comm import (
    CollectiveCall,
    direct_and_routed,
    is_collective,
    pack_collective,
    pieces,
)


@dataclass(slots=True)
class _UnderWay:
    """An exchange that was issued.

    `events`: after which all that comes to this rank is there; `packed`: it is in a collective's
    own order.
    """

    events: list[Any]
    packed: CollectiveCall | None = None


class Streamed:
    """See `runtime.transport.base.Transport`.

    Relayed pieces are issued with the exchange, in the batches of its legs.
    """

    ahead = 0

    def __init__(self, phase: Phase, form: Form, groups: Groups, trace: Trace | None) -> None:
        assert groups.streams is not None, "no streams were made for this pool"
        self.groups, self.form, self.trace = groups, form, trace
        self.streams: Streams = groups.streams
        self.traffic = Traffic()
        self.expected: dict[int, tuple[Sequence[Parcel], Mapping[int, Tensor]]] = {}
        self.under_way: dict[int, _UnderWay] = {}
        self.relay_tasks: dict[int, list[RelayTask]] = {}
        for group in phase.relay_tasks:
            for relay_task in group:
                self.relay_tasks.setdefault(relay_task.op, []).append(relay_task)

    def expect(self, exchange: ExchangeStep, receives: Sequence[Parcel], arriving: Mapping[int, Tensor]) -> None:
        self.expected[exchange.id] = receives, arriving

    def start(self, exchange: ExchangeStep, sends: Sequence[Parcel]) -> None:
        receives, arriving = self.expected.pop(exchange.id)
        if exchange.far:
            self.traffic.inter_node_bytes_sent += sum(
                x.nbytes for p, x in sends if p in exchange.far and p not in exchange.routed_sends
            )
            self.traffic.inter_node_bytes_received += sum(x.nbytes for peer, x in receives if peer in exchange.far)
        if is_collective(exchange, self.groups):
            self.under_way[exchange.id] = self.start_collective(
                exchange, pack_collective(sends, receives, exchange, self.groups)
            )
            return
        batches: dict[tuple[Leg, str], list[Transfer]] = {}
        self.add_own(exchange, sends, receives, arriving, batches)
        self.add_relay_tasks(self.relay_tasks.get(exchange.op, ()), batches)
        ready = self.streams.now()
        events: list[Any] = []
        before: dict[str, Any] = {}  # last leg by traffic class: the next one sends what it brought
        for leg, name in sorted(batches, key=lambda place: (("direct", *LEGS).index(place[0]), place[1])):
            stream, traffic_class = self.streams.of(name), name.partition(" ")[2]
            transfers = sorted(batches[leg, name], key=lambda t: t[:3])
            if any(self.groups.rank in (t.src, t.dst) for t in transfers):
                stream.wait(ready)  # what is only relayed does not wait for this rank's own work
            if leg != "direct" and traffic_class in before:
                stream.wait(before[traffic_class])
            for transfer in transfers:
                stream.uses(transfer.tensor)
            stream.batch(transfers)
            event = stream.record()
            self.groups.buffers.used([t.tensor for t in transfers], partial(self.streams.wait, event))
            if leg != "direct":
                before[traffic_class] = event
            if any(not t.sends and t.dst == self.groups.rank for t in transfers):
                events.append(event)
        self.under_way[exchange.id] = _UnderWay(events)

    def start_collective(self, exchange: ExchangeStep, packed: CollectiveCall) -> _UnderWay:
        """Issue one call on the communicator of its ranks.

        The compute stream has packed the bytes and will unpack them.
        """
        stream = self.streams.of(exchange.stream)
        stream.wait(self.streams.now())
        for x in packed.memory:
            stream.uses(x)
        stream.call(packed.issue)
        event = stream.record()
        self.groups.buffers.used(packed.memory, partial(self.streams.wait, event))
        return _UnderWay([event], packed)

    def add_own(
        self,
        exchange: ExchangeStep,
        sends: Sequence[Parcel],
        receives: Sequence[Parcel],
        arriving: Mapping[int, Tensor],
        batches: dict[tuple[Leg, str], list[Transfer]],
    ) -> None:
        """Add this rank's own messages and pieces, by leg and stream."""
        rank, streams = self.groups.rank, {m.peer: m.stream for m in (*exchange.sends, *exchange.receives)}
        direct, routed = direct_and_routed(sends, exchange)
        for index, (peer, x) in enumerate(direct):
            batches.setdefault(("direct", streams[peer]), []).append(Transfer(rank, peer, index, True, peer, x))
        for index, (peer, x) in enumerate((p, x) for p, x in receives if x.numel()):
            batches.setdefault(("direct", streams[peer]), []).append(Transfer(peer, rank, index, False, peer, x))
        for peer, raw in routed.items():
            for piece, hop, x in pieces(raw, exchange.routed_sends[peer]):
                batches.setdefault((hop.leg, hop.stream), []).append(
                    Transfer(rank, peer, piece.index, True, hop.peer, x)
                )
                self.traffic.inter_node_bytes_sent += x.nbytes * hop.crosses
        for peer, raw in arriving.items():
            for piece, hop, x in pieces(raw, exchange.routed_receives[peer]):
                batches.setdefault((hop.leg, hop.stream), []).append(
                    Transfer(peer, rank, piece.index, False, hop.peer, x)
                )
                self.traffic.inter_node_bytes_received += x.nbytes * hop.crosses

    def add_relay_tasks(self, relay_tasks: Sequence[RelayTask], batches: dict[tuple[Leg, str], list[Transfer]]) -> None:
        """Add relayed pieces: received in one leg, sent in a later one."""
        for relay_task in relay_tasks:
            route = relay_task.route
            begin, end = piece_bounds(parcel_bytes(relay_task.carried, self.form), route.count)[route.index]
            if begin == end:
                continue
            x = self.streams.of(route.arrives.stream).empty(end - begin)
            for hop, sends in ((route.arrives, False), (route.leaves, True)):
                batches.setdefault((hop.leg, hop.stream), []).append(
                    Transfer(route.src, route.dst, route.index, sends, hop.peer, x)
                )
                self.record(relay_task, hop)
            self.traffic.relayed_bytes += x.nbytes
            self.traffic.inter_node_bytes_received += x.nbytes * route.arrives.crosses
            self.traffic.inter_node_bytes_sent += x.nbytes * route.leaves.crosses

    def record(self, relay_task: RelayTask, hop: Hop) -> None:
        if self.trace is not None:
            now = time.perf_counter()
            self.trace.append(Traced(hop.stream, relay_task.op, hop.leg, relay_task.route.role, now, now))

    def arrived(self, exchange: ExchangeStep) -> None:
        under_way = self.under_way.pop(exchange.id)
        for event in under_way.events:
            self.streams.wait(event)
        if under_way.packed is not None:
            under_way.packed.unpack()

    def end(self) -> None:
        """Do nothing: what was sent is kept by the streams until they have read it."""

    def fail(self) -> None:
        """Abort: peers that wait for this rank end with an error, and this process can end."""
        self.groups.abort()
