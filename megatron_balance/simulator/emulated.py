"""The transport of the emulated cluster: gloo's rules over TCP through token buckets.

It describes what tools/emulated_cluster builds from network namespaces and `tc`, and is held
against measurements there (docs/simulator.md, "How near it is"). `simulate --transport sockets`
runs it.
"""

from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from megatron_balance.analysis.machine import Machine
from megatron_balance.analysis.trace_format import TrackSpan
from megatron_balance.compile.order import Start
from megatron_balance.ir.arrays import Floats
from megatron_balance.simulator.events import Events
from megatron_balance.simulator.phase import Flow, GroupExchange, SimulatedPhase

# Exchanges on gloo's sockets, as `runtime.transport.Gloo` issues them and gloo carries them (its
# transport/tcp/pair.cc, allgather.cc, alltoallv.cc).
#
# Every message is a call of its own. The receiver says that it is ready, and only then the sender's
# bytes go. Two ranks have one connection: what one of them sends to the other, bytes and words of
# readiness alike, goes in the order in which it was given, so that a word
# said late waits behind the bytes of another message. A rank therefore says so two exchanges ahead;
# and what it passes on for others it expects from the beginning, and sends on when it has come. A
# sender has done its part when its socket has the message.
#
# A collective is what gloo makes of it: an all-gather sends half blocks around the ring of ranks, two
# under way at a time; an all-to-all gives every message to its connection at once, each send before
# the receive that is its counterpart. Where a rank's word is there when the other one comes to its
# send, the bytes go at once, and the other one's own word behind them: the two take turns, unless
# they begin at the same moment.

# Exchanges whose receives are posted before they are due (`runtime.transport.Gloo.ahead`).
AHEAD = 2

# Parts of a block of an all-gather, and how many of them are under way at once.
_HALVES = 2


@dataclass(slots=True)
class _RingSender:
    """A rank in an all-gather: its messages in order, how many were posted, left and came."""

    sends: list[int]
    receives: list[int]
    posted: int = 0
    left: int = 0
    came: int = 0


class Sockets(Events):
    """A phase on clocks, its exchanges on sockets."""

    def __init__(self, phase: SimulatedPhase, machine: Machine, enter_s: Floats, *, trace: bool) -> None:
        flows = list(phase.flows)
        groups: list[tuple[GroupExchange, range]] = []
        for each in phase.collectives:
            flows += _messages(each)
            groups.append((each, range(groups[-1][1].stop if groups else len(phase.flows), len(flows))))
        super().__init__(phase, flows, machine, enter_s, trace=trace)
        longest = max((flow.num_bytes for flow in flows), default=0)
        self.network = _Network(machine, self, longest)
        self.given = [False] * len(flows)  # to its connection
        self.awaited = [False] * len(flows)  # its receiver's word has come
        self.begun_s = [0.0] * len(flows)
        self.upcoming: list[deque[int]] = [
            deque(at for step, at in zip(steps, exchanges, strict=True) if isinstance(step, Start))
            for steps, exchanges in zip(phase.steps, phase.exchanges, strict=True)
        ]
        # by rank and exchange
        self.sends: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        self.receives: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        # by rank, what comes to be passed on
        self.relayed: defaultdict[int, list[int]] = defaultdict(list)
        self.onward: dict[int, int] = {}  # the next hop of a piece
        # by rank and exchange, what has not come
        self.arriving: defaultdict[tuple[int, int], int] = defaultdict(int)
        # by rank, what has not left of each exchange that has begun
        self.leaving: defaultdict[int, dict[int, int]] = defaultdict(dict)
        self.rings: dict[tuple[int, int], _RingSender] = {}
        # sends and receives (-1: none), in order
        self.together: defaultdict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
        self._prepare(len(phase.flows))
        for each, messages in groups:
            self._add(each, messages)

    def _prepare(self, count: int) -> None:
        came: dict[tuple[int, int, int, int], int] = {}
        for index, flow in enumerate(self.flows[:count]):  # the hops of a piece follow one another
            piece = flow.exchange, flow.src, flow.dst, flow.piece
            if flow.a == flow.src:
                self.sends[flow.a, flow.exchange].append(index)
            else:
                self.onward[came[piece]] = index
            came[piece] = index
            if flow.b == flow.dst:
                self.receives[flow.b, flow.exchange].append(index)
                self.arriving[flow.b, flow.exchange] += 1
            else:
                self.relayed[flow.b].append(index)

    def _add(self, each: GroupExchange, messages: range) -> None:
        # Note what each rank of a collective sends and receives, in gloo's order.
        sent: defaultdict[int, list[int]] = defaultdict(list)
        brought: defaultdict[int, list[int]] = defaultdict(list)
        for index in messages:
            sent[self.flows[index].a].append(index)
            brought[self.flows[index].b].append(index)
        for place, rank in enumerate(each.ranks):
            self.arriving[rank, each.exchange] = len(sent[rank]) + len(brought[rank])
            if each.collective == "all_gather":
                self.rings[rank, each.exchange] = _RingSender(sent[rank], brought[rank])
                continue
            to = {self.flows[index].b: index for index in sent[rank]}
            of = {self.flows[index].a: index for index in brought[rank]}
            size = len(each.ranks)
            for step in range(1, size):
                after, before = each.ranks[(place + step) % size], each.ranks[(place - step) % size]
                self.together[rank, each.exchange].append((to.get(after, -1), of.get(before, -1)))

    # Asked by the clocks

    def entered(self, rank: int) -> None:
        """Post receives for what is passed on, and for the first exchanges."""
        for flow in self.relayed[rank]:
            self._receive(flow)
        for _ in range(AHEAD):
            self._expect(rank)

    def started(self, rank: int, exchange: int) -> None:
        """Post receives for one more exchange, and give this one's messages to connections."""
        self._expect(rank)
        if (rank, exchange) in self.rings:
            self._turn(self.rings[rank, exchange])
        for send, receive in self.together.get((rank, exchange), ()):
            if send >= 0:
                self._send(send)
            if receive >= 0:
                self._receive(receive)
        sends = self.sends[rank, exchange]
        self.leaving[rank][exchange] = len(sends)
        for flow in sends:
            self._send(flow)

    def waits(self, rank: int, exchange: int) -> bool:
        """Whether something of the exchange has not come, or sent before has not left."""
        leaving = (left and at < exchange for at, left in self.leaving[rank].items())
        return self.arriving[rank, exchange] > 0 or any(leaving)

    def other(self, which: int) -> None:
        """Handle an event of the network."""
        self.network.event(which)

    def left(self, message: int) -> None:
        """Go on with a sender, whose socket has all of a message."""
        flow, is_word = divmod(message, 2)
        if is_word:
            return
        of = self.flows[flow]
        if ring := self.rings.get((of.a, of.exchange)):
            ring.left += 1
            self._turned(of.a, of.exchange)
        elif (of.a, of.exchange) in self.together:
            self.arriving[of.a, of.exchange] -= 1
        elif of.a == of.src:
            self.leaving[of.a][of.exchange] -= 1
        self.ended(of.a)
        self.retry(of.a)

    def came(self, message: int) -> None:
        """Note a receiver's word; of a message, let its rank know after a moment."""
        flow, is_word = divmod(message, 2)
        if not is_word:
            self.push(self.now + self.call_s + self.alpha_s[flow], "flow", flow)
            return
        self.awaited[flow] = True
        if self.given[flow]:
            self._go(flow)

    def flow_event(self, flow: int, version: int) -> None:
        """Go on with what waited for a message."""
        del version
        of = self.flows[flow]
        self.hold(flow, -1)
        self.has_moved(flow)
        if self.trace:
            self.occupied += [
                TrackSpan(rank, of.stream, of.leg, self.begun_s[flow], self.now, exchange=of.exchange)
                for rank in (of.a, of.b)
            ]
        if flow in self.onward:
            self._send(self.onward[flow])
        if ring := self.rings.get((of.b, of.exchange)):
            ring.came += 1
            self._turned(of.b, of.exchange)
        elif of.b == of.dst:
            self.arriving[of.b, of.exchange] -= 1
        self.ended(of.b)
        self.retry(of.b)

    # Connections

    def _expect(self, rank: int) -> None:
        if self.upcoming[rank]:
            for flow in self.receives[rank, self.upcoming[rank].popleft()]:
                self._receive(flow)

    def _receive(self, flow: int) -> None:
        of = self.flows[flow]
        self.network.give(of.b, of.a, 2 * flow + 1, WORD_BYTES)

    def _send(self, flow: int) -> None:
        self.given[flow] = True
        if self.awaited[flow]:
            self._go(flow)

    def _go(self, flow: int) -> None:
        of = self.flows[flow]
        self.begun_s[flow] = self.now
        self.hold(flow, 1)
        self.network.give(of.a, of.b, 2 * flow, of.num_bytes)

    # All-gathers

    def _turn(self, ring: _RingSender) -> None:
        # Post what may be under way.
        while ring.posted < min(len(ring.sends), _HALVES + min(ring.left, ring.came)):
            self._send(ring.sends[ring.posted])
            self._receive(ring.receives[ring.posted])
            ring.posted += 1

    def _turned(self, rank: int, exchange: int) -> None:
        # Count a half block that has left a rank, or has come to it.
        self.arriving[rank, exchange] -= 1
        self._turn(self.rings[rank, exchange])


def _messages(each: GroupExchange) -> list[Flow]:
    # The messages of a collective; `piece`: when, of those between the same ranks.
    size = len(each.ranks)
    if each.collective == "all_gather":
        block = int(each.num_bytes.max(initial=0))
        halves = [half for half in (block // _HALVES, block - block // _HALVES) if half]
        return [
            _message(each, rank, each.ranks[(place + 1) % size], half, turn * len(halves) + part)
            for turn in range(size - 1)
            for part, half in enumerate(halves)
            for place, rank in enumerate(each.ranks)
        ]
    table = each.num_bytes.astype(int).tolist()
    return [
        _message(each, src, dst, table[i][j], 0)
        for i, src in enumerate(each.ranks)
        for j, dst in enumerate(each.ranks)
        if i != j and table[i][j]
    ]


def _message(each: GroupExchange, src: int, dst: int, num_bytes: int, at: int) -> Flow:
    return Flow(each.exchange, "direct", each.stream, src, dst, src, dst, num_bytes, at)


# Bytes on TCP connections through token buckets, as Linux carries them and `tc` shapes them
# (docs/emulated-cluster.md).
#
# A link or a NIC is a queue in which segments leave in the order in which they came, whoever sent
# them; a segment passes two of them, the sender's and the receiver's. What a connection may have on
# its way is what its socket holds: a message goes into the socket until that is full, and room comes
# back with the acknowledgements, which wait in the queues of the way back behind whatever goes that
# way. So a message no longer than the socket's room is in the sender's queue at once, before all that
# is given to other connections later.
#
# A queue that is in the sender's own namespace holds but a few segments of each socket at a time (TCP
# small queues), and its sockets take turns; a NIC that ranks share is behind a bridge, where the
# kernel has lost count of them.

# Bytes that a socket holds at most (net.ipv4.tcp_wmem).
SOCKET_BYTES = 1 << 18

# A socket that was full is written to again when one part in so many is free
# (sk_stream_is_writeable).
_WRITABLE = 3

# Segments that a socket has in a queue of its own namespace (net/ipv4/tcp_output.c,
# tcp_small_queue_check).
SMALL_QUEUE = 2

# Bytes given to an interface at once, inside a node and between nodes: whole packets of 8,948 bytes
# (gso_max_size).
SEGMENT_BYTES = 26844, 17896

# Bytes that an idle token bucket lets through at once, inside a node and between nodes
# (tools/emulated_cluster/wiring.py).
BURST_BYTES = 40960, 20480

WORD_BYTES = 64

# Segments of the longest message at most: of a longer one, sockets, segments and bursts are scaled
# up alike.
MOST_SEGMENTS = 512

_LEFT = 4


@dataclass(slots=True)
class _Queue:
    """One direction of a link or NIC. `full_s`: its bucket is full; `last_s`: its last one left."""

    bytes_per_s: float
    burst: int
    full_s: float = 0.0
    last_s: float = 0.0

    def leaves_s(self, now: float, num_bytes: int) -> float:
        # Seconds at which a segment that comes now has left.
        self.full_s = max(now, self.full_s) + num_bytes / self.bytes_per_s
        self.last_s = max(now, self.last_s, self.full_s - self.burst / self.bytes_per_s)
        return self.last_s


@dataclass(slots=True)
class _Given:
    """A message, or the part of it that the socket has and has not sent. `whole`: with its end."""

    message: int
    num_bytes: int
    whole: bool = True


@dataclass(slots=True)
class _Connection:
    """One direction of a connection, with its two queues and those of the acknowledgements.

    `waiting`: given, not in the socket; `unsent`: in the socket; `queued`: segments in the first
    queue. `free_bytes`: of the socket.
    """

    there: tuple[_Queue, _Queue]
    back: tuple[_Queue, _Queue]
    segment: int
    small: bool
    free_bytes: int
    full: bool = False
    waiting: deque[_Given] = field(default_factory=deque[_Given])
    unsent: deque[_Given] = field(default_factory=deque[_Given])
    queued: int = 0


class _TcpSegment(NamedTuple):
    """A segment, or its acknowledgement, at its next event. `place` 0, 1: it leaves that queue; 2,
    3: those of the way back; `_LEFT`: the socket has all of a message.
    """

    place: int
    of: _Connection
    part: _Given


class _Network:
    """All connections of a machine. `longest`: bytes of the longest message."""

    def __init__(self, machine: Machine, sockets: Sockets, longest: int) -> None:
        self._machine, self._sockets = machine, sockets
        self._scale = scale = max(1, -(-longest // (MOST_SEGMENTS * min(SEGMENT_BYTES))))
        rates, num_links = machine.capacity().tolist(), 2 * machine.num_ranks
        self._queues = [_Queue(rate, scale * BURST_BYTES[at >= num_links]) for at, rate in enumerate(rates)]
        self._connections: dict[tuple[int, int], _Connection] = {}
        self._coming: dict[int, _TcpSegment] = {}
        self._count = 0

    def give(self, src: int, dst: int, message: int, num_bytes: int) -> None:
        # Write a message to the connection of two ranks, after all that it was given before.
        connection = self._connections.get((src, dst)) or self._connect(src, dst)
        connection.waiting.append(_Given(message, num_bytes))
        self._fill(connection)

    def event(self, number: int) -> None:
        # Move a segment on that has left a queue.
        place, connection, part = self._coming.pop(number)
        if place == 0:
            connection.queued -= 1
            self._pass(1, connection, part)
            self._send(connection)
        elif place == 1:
            self._pass(2, connection, part)
            if part.whole:
                self._sockets.came(part.message)
        elif place == 2:
            self._pass(3, connection, part)
        elif place == _LEFT:
            self._sockets.left(part.message)
        else:
            connection.free_bytes += part.num_bytes
            self._fill(connection)

    def _connect(self, src: int, dst: int) -> _Connection:
        machine, ends = self._machine, (np.array([src, dst]), np.array([dst, src]))
        taken: list[list[int]] = machine.resources(*ends).tolist()
        there, back = [(self._queues[first], self._queues[second]) for first, second in taken]
        crosses = bool(machine.crosses(*ends)[0])
        shared = crosses and machine.cluster.ranks_per_nic > 1
        connection = self._connections[src, dst] = _Connection(
            there, back, self._scale * SEGMENT_BYTES[crosses], small=not shared, free_bytes=self._scale * SOCKET_BYTES
        )
        return connection

    def _fill(self, connection: _Connection) -> None:
        # Put what waits into the socket, as far as it has free bytes.
        if connection.full and connection.free_bytes * _WRITABLE < self._scale * SOCKET_BYTES:
            return
        while connection.waiting and connection.free_bytes:
            given = connection.waiting[0]
            taken = min(given.num_bytes, connection.free_bytes)
            connection.free_bytes -= taken
            given.num_bytes -= taken
            connection.unsent.append(_Given(given.message, taken, not given.num_bytes))
            if not given.num_bytes:
                connection.waiting.popleft()
                self._happens(_LEFT, connection, given, self._sockets.now)
        connection.full = bool(connection.waiting)
        self._send(connection)

    def _send(self, connection: _Connection) -> None:
        # Hand segments to the first queue.
        while connection.unsent and not (connection.small and connection.queued >= SMALL_QUEUE):
            first = connection.unsent[0]
            taken = min(first.num_bytes, connection.segment)
            first.num_bytes -= taken
            if not first.num_bytes:
                connection.unsent.popleft()
            connection.queued += 1
            self._pass(0, connection, _Given(first.message, taken, first.whole and not first.num_bytes))

    def _pass(self, place: int, connection: _Connection, part: _Given) -> None:
        # Through a queue; an acknowledgement takes no time of its own.
        queue = (*connection.there, *connection.back)[place]
        num_bytes = part.num_bytes if place < len(connection.there) else 0
        self._happens(place, connection, part, queue.leaves_s(self._sockets.now, num_bytes))

    def _happens(self, place: int, connection: _Connection, part: _Given, at_s: float) -> None:
        self._count += 1
        self._coming[self._count] = _TcpSegment(place, connection, part)
        self._sockets.push(at_s, "other", self._count)
