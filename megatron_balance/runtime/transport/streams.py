"""Exchanges on CUDA: communication streams beside the compute stream, joined by events.

The host waits for nothing: what ranks must connect they connect when they bind a plan (`connect`).
Each stream of `compile.order.stream_name` has a communicator of its own
(`runtime.groups.stream_groups`), so that what it carries is only in order with itself. NCCL matches
messages by their order between two ranks; ranks issue exchanges in one order
(`compile.order`), their legs and streams as `compile.proof.runs` has them, and messages
within a batch by source, target and piece. Collectives have streams too, but go by the
communicators of their ranks.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

from torch import Tensor

from megatron_balance.compile.order import LEGS, Leg
from megatron_balance.ir.program import MOVED
from megatron_balance.runtime.cuda import StreamMessage, Streams
from megatron_balance.runtime.groups import Behind, Groups, StreamPair
from megatron_balance.runtime.lower.memory import Block, CallForm, is_collective, piece_bytes
from megatron_balance.runtime.lower.steps import ExchangeStep, GradLaunch, Hop, IssueStep, Launch, Phase, RelayTask
from megatron_balance.runtime.pool import Fence
from megatron_balance.runtime.recorder import PhaseTraffic, Trace, Traced
from megatron_balance.runtime.transport.comm import (
    CollectiveCall,
    Parcel,
    direct_and_routed,
    far_bytes,
    pack_collective,
    pieces,
)

LATER_LEGS: tuple[Leg, ...] = ("across", "combine")
"""Legs that wait for an earlier one, here or on another rank."""


@dataclass(slots=True)
class _UnderWay:
    """An exchange that was started."""

    # By stream, that behind which all that comes to this rank is there.
    fences: dict[str, Fence] = field(default_factory=dict)
    # Streams that have waited for what the compute stream did before it.
    joined: set[str] = field(default_factory=set)
    # It is in a collective's own order.
    packed: CollectiveCall | None = None


_Place = tuple[Leg, str]
"""(leg, stream) of a batch."""


class _Batches:
    """The batches of one exchange."""

    def __init__(self, op: int) -> None:
        self.op = op
        self.transfers: dict[_Place, list[StreamMessage]] = {}
        self.after: dict[_Place, set[_Place]] = {}
        self.ended: dict[_Place, Fence] = {}

    def add(self, place: _Place, transfer: StreamMessage) -> None:
        self.transfers.setdefault(place, []).append(transfer)

    def places(self) -> list[_Place]:
        """In the order in which every rank issues them."""
        return sorted(self.transfers, key=lambda place: (("direct", *LEGS).index(place[0]), place[1]))


class Streamed:
    """One run of a phase on NCCL; calls as `Gloo` has them. Relayed pieces are issued with the
    exchange, in the batches of its legs.
    """

    ahead = 0

    def __init__(self, phase: Phase, form: CallForm, groups: Groups, trace: Trace | None, *, timed: bool) -> None:
        assert groups.streams is not None, "no streams were made for this pool"
        self.groups, self.form, self.trace, self.timed = groups, form, trace, timed
        self.streams: Streams = groups.streams
        self.traffic = PhaseTraffic()
        launch = next((step for step in phase.steps if isinstance(step, Launch | GradLaunch)), None)
        # Later legs come behind the launch that they travel beside. A backward launch is three
        # kernels, each of which waits at the head of a single hardware queue for the one before, so a
        # leg behind it reaches the device when the main kernel has ended: early enough for the next
        # round of a ring, late for what other ranks need for their first launch. So legs of exchanges
        # before this rank's first backward launch come at once.
        self.later_legs = Behind.LAUNCH if isinstance(launch, Launch) else Behind.NOTHING
        self.expected: dict[int, tuple[Sequence[Parcel] | Block, Mapping[int, Tensor]]] = {}
        self.under_way: dict[int, _UnderWay] = {}
        self.relay_tasks: dict[int, list[RelayTask]] = {}
        for relay_task in chain.from_iterable(phase.relay_tasks):
            self.relay_tasks.setdefault(relay_task.op, []).append(relay_task)

    def expect(
        self, exchange: ExchangeStep, receives: Sequence[Parcel] | Block, arriving: Mapping[int, Tensor]
    ) -> None:
        self.expected[exchange.id] = receives, arriving

    def start(self, exchange: ExchangeStep, sends: Sequence[Parcel] | Block) -> None:
        receives, arriving = self.expected.pop(exchange.id)
        if exchange.far:
            self.traffic.inter_node_bytes_sent += far_bytes(sends, exchange.far, exchange.routed_sends)
            self.traffic.inter_node_bytes_received += far_bytes(receives, exchange.far)
        if isinstance(sends, Block) or isinstance(receives, Block) or is_collective(exchange, self.groups):
            self.start_collective(exchange, pack_collective(sends, receives, exchange, self.groups))
            return
        batches = _Batches(exchange.op)
        self.add_own(exchange, sends, receives, arriving, batches)
        relay_tasks = self.relay_tasks.get(exchange.op, ())
        self.add_relay_tasks(relay_tasks, batches)
        brings_back = all(m.kind in MOVED for m in exchange.receives)
        # Values that only come back to this rank are received behind the last launch.
        late = not sends and not relay_tasks and brings_back
        under_way = self.under_way[exchange.id] = _UnderWay()
        ready = None if late else self.streams.now()
        for place in batches.places():
            transfers = sorted(batches.transfers[place], key=lambda t: t[:3])
            before = self.groups.buffers.fences([t.tensor for t in transfers if not t.sends])
            issue = partial(self.issue, batches, place, transfers, (under_way, ready, before))
            behind = Behind.LAUNCHES if late else self.later_legs if place[0] in LATER_LEGS else Behind.NOTHING
            if self.groups.safe:
                behind = Behind.NOTHING
            self.groups.issues.put(under_way, issue, behind)

    def issue(
        self,
        batches: _Batches,
        place: _Place,
        transfers: Sequence[StreamMessage],
        started: tuple[_UnderWay, Any, Sequence[Fence]],
    ) -> None:
        """Issue one batch.

        `started`: its exchange; the event behind which the compute stream has written what it sends,
        and let go of the memory that it fills (None: that is now); and other streams' uses of that
        memory.
        """
        under_way, ready, before = started
        name, own = place[1], any(self.groups.rank in (t.src, t.dst) for t in transfers)
        stream = self.streams.of(name)
        if own and name not in under_way.joined:  # what is only relayed does not wait for this rank's own work
            stream.wait(self.streams.now() if ready is None else ready)
            under_way.joined.add(name)
        for fence in (*before, *(batches.ended[bringing] for bringing in sorted(batches.after.get(place, ())))):
            if fence.stream != name:
                stream.wait(fence.event)
        for transfer in transfers:
            stream.uses(transfer.tensor)
        begun = stream.record() if self.timed else None
        stream.batch(transfers)
        fence = batches.ended[place] = self.fence(name)
        self.note(name, batches.op, place[0], begun, fence)
        self.groups.buffers.used([t.tensor for t in transfers], fence)
        if any(not t.sends and t.dst == self.groups.rank for t in transfers):
            under_way.fences[name] = fence

    def fence(self, name: str) -> Fence:
        return self.groups.buffers.fence(name, self.streams.of(name).record(), self.streams.wait)

    def start_collective(self, exchange: ExchangeStep, packed: CollectiveCall) -> None:
        """Put one call on the communicator of its ranks: the compute stream has packed the bytes
        and will unpack them.
        """
        under_way = self.under_way[exchange.id] = _UnderWay(packed=packed)
        ready, before = self.streams.now(), self.groups.buffers.fences(packed.memory)

        def issue() -> None:
            stream = self.streams.of(exchange.stream)
            stream.wait(ready)
            for fence in before:
                if fence.stream != exchange.stream:
                    stream.wait(fence.event)
            for x in packed.memory:
                stream.uses(x)
            begun = stream.record() if self.timed else None
            stream.call(packed.issue)
            fence = under_way.fences[exchange.stream] = self.fence(exchange.stream)
            self.note(exchange.stream, exchange.op, "direct", begun, fence)
            self.groups.buffers.used(packed.memory, fence)

        self.groups.issues.put(under_way, issue)

    def add_own(
        self,
        exchange: ExchangeStep,
        sends: Sequence[Parcel],
        receives: Sequence[Parcel],
        arriving: Mapping[int, Tensor],
        batches: _Batches,
    ) -> None:
        rank, streams = self.groups.rank, {m.peer: m.stream for m in (*exchange.sends, *exchange.receives)}
        direct, routed = direct_and_routed(sends, exchange)
        for index, (peer, x) in enumerate(direct):
            batches.add(("direct", streams[peer]), StreamMessage(rank, peer, index, True, peer, x))
        for index, (peer, x) in enumerate((p, x) for p, x in receives if x.numel()):
            batches.add(("direct", streams[peer]), StreamMessage(peer, rank, index, False, peer, x))
        for peer, raw in routed.items():
            for piece, hop, x in pieces(raw, exchange.routed_sends[peer]):
                batches.add((hop.leg, hop.stream), StreamMessage(rank, peer, piece.index, True, hop.peer, x))
                self.traffic.inter_node_bytes_sent += x.nbytes * hop.crosses
        for peer, raw in arriving.items():
            for piece, hop, x in pieces(raw, exchange.routed_receives[peer]):
                batches.add((hop.leg, hop.stream), StreamMessage(peer, rank, piece.index, False, hop.peer, x))
                self.traffic.inter_node_bytes_received += x.nbytes * hop.crosses

    def add_relay_tasks(self, relay_tasks: Sequence[RelayTask], batches: _Batches) -> None:
        """Add relayed pieces: received in one leg, sent in a later one."""
        for relay_task in relay_tasks:
            route = relay_task.route
            num_bytes = piece_bytes(relay_task.carried, self.form, route.index, route.count)
            if not num_bytes:
                continue
            x = self.streams.of(route.arrives.stream).empty(num_bytes)
            for hop, sends in ((route.arrives, False), (route.leaves, True)):
                batches.add((hop.leg, hop.stream), StreamMessage(route.src, route.dst, route.index, sends, hop.peer, x))
                self.record(relay_task, hop)
            leaving = (route.leaves.leg, route.leaves.stream)
            batches.after.setdefault(leaving, set()).add((route.arrives.leg, route.arrives.stream))
            self.traffic.relayed_bytes += x.nbytes
            self.traffic.inter_node_bytes_received += x.nbytes * route.arrives.crosses
            self.traffic.inter_node_bytes_sent += x.nbytes * route.leaves.crosses

    def note(self, stream: str, op: int, leg: Leg, begun: Any, fence: Fence) -> None:
        if begun is not None and self.trace is not None:
            self.trace.append(Traced(stream, op, leg, "own", begun, fence.event))

    def record(self, relay_task: RelayTask, hop: Hop) -> None:
        if self.trace is not None and not self.timed:
            now = time.perf_counter()
            self.trace.append(Traced(hop.stream, relay_task.op, hop.leg, relay_task.route.role, now, now))

    def launched(self) -> None:
        self.later_legs = Behind.LAUNCH
        self.groups.issues.launched()

    def attended(self) -> None:
        self.groups.issues.attended()

    def arrived(self, exchange: ExchangeStep) -> None:
        under_way = self.under_way.pop(exchange.id)
        self.groups.issues.through(under_way)
        for fence in under_way.fences.values():
            self.groups.buffers.passed.wait(fence)
        if under_way.packed is not None:
            under_way.packed.unpack()

    def end(self) -> None:
        """Do nothing: what was sent is kept by the streams until they have read it."""

    def fail(self) -> None:
        """Issue nothing more and abort: peers that wait for this rank end with an error, and this
        process can end.
        """
        self.groups.issues.forget()
        self.groups.abort()


def connect(phases: Iterable[Phase], groups: Groups) -> int:
    """Connect ranks that the phases need and no earlier call connected; the number of new links
    (NCCL).

    NCCL connects two ranks of a communicator at their first send or receive, each direction for
    itself, and the host stands in the group call until the other end is in its own (NCCL 2.29.7,
    `ncclTransportP2pSetup`; NVIDIA/nccl#783). A warm-up all-reduce connects rings, not pairs. So
    each new pair is connected when a plan is bound, by one byte: one group call for each
    communicator, in one order on all ranks, before anything of the step is issued. All ranks of the
    pool bind the same plans, for the same phases, in one order, from the thread that issues their
    steps.
    """
    if groups.streams is None:
        return 0
    new = {link for phase in phases for link in _links(phase, groups)} - groups.connected
    by_stream: defaultdict[str, list[StreamPair]] = defaultdict(list)
    for link in sorted(new):
        by_stream[link.stream].append(link)
    for name, together in by_stream.items():  # sorted, so in one order everywhere
        stream = groups.streams.of(name)
        stream.batch(
            [
                StreamMessage(src, dst, 0, src == groups.rank, dst if src == groups.rank else src, stream.empty(1))
                for _, src, dst in together
            ]
        )
    groups.connected.update(new)
    return len(new)


def _links(phase: Phase, groups: Groups) -> Iterator[StreamPair]:
    """Links of this rank point to point in a phase, with repeats."""
    rank = groups.rank
    for step in phase.steps:
        if isinstance(step, IssueStep) and not is_collective(step.exchange, groups):
            yield from _own(step.exchange, rank)
    for relay_task in chain.from_iterable(phase.relay_tasks):
        arrives, leaves = relay_task.route.arrives, relay_task.route.leaves
        yield StreamPair(arrives.stream, arrives.peer, rank)
        yield StreamPair(leaves.stream, rank, leaves.peer)


def _own(exchange: ExchangeStep, rank: int) -> Iterator[StreamPair]:
    for message in exchange.sends:
        if message.peer not in exchange.routed_sends:
            yield StreamPair(message.stream, rank, message.peer)
    for message in exchange.receives:
        if message.peer not in exchange.routed_receives:
            yield StreamPair(message.stream, message.peer, rank)
    for piece in chain.from_iterable(exchange.routed_sends.values()):
        yield StreamPair(piece.hop.stream, rank, piece.hop.peer)
    for piece in chain.from_iterable(exchange.routed_receives.values()):
        yield StreamPair(piece.hop.stream, piece.hop.peer, rank)
