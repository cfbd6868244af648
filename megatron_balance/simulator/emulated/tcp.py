"""Bytes on TCP connections through token buckets, as Linux carries them and `tc` shapes them
(docs/emulated-cluster.md).

A link or a NIC is a queue in which segments leave in the order in which they came, whoever sent
them; a segment passes two of them, the sender's and the receiver's. What a connection may have on
its way is what its socket holds: a message goes into the socket until that is full, and room comes
back with the acknowledgements, which wait in the queues of the way back behind whatever goes that
way. So a message no longer than the socket's room is in the sender's queue at once, before all that
is given to other connections later.

A queue that is in the sender's own namespace holds but a few segments of each socket at a time (TCP
small queues), and its sockets take turns; a NIC that ranks share is behind a bridge, where the
kernel has lost count of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from megatron_balance.analysis.machine import Machine

SOCKET_BYTES = 1 << 18
"""Bytes that a socket holds at most (net.ipv4.tcp_wmem)."""

_WRITABLE = 3
"""A socket that was full is written to again when one part in so many is free
(sk_stream_is_writeable).
"""

SMALL_QUEUE = 2
"""Segments that a socket has in a queue of its own namespace (net/ipv4/tcp_output.c,
tcp_small_queue_check).
"""

SEGMENT_BYTES = 26844, 17896
"""Bytes given to an interface at once, inside a node and between nodes: whole packets of 8,948
bytes (gso_max_size).
"""

BURST_BYTES = 40960, 20480
"""Bytes that an idle token bucket lets through at once, inside a node and between nodes
(tools/emulated_cluster/wiring.py).
"""

WORD_BYTES = 64

MOST_SEGMENTS = 512
"""Segments of the longest message at most: of a longer one, sockets, segments and bursts are scaled
up alike.
"""

_LEFT = 4


class _Listener(Protocol):
    """Receives what becomes of messages."""

    def left(self, message: int) -> None:
        """Take note: the socket has all of the message."""
        ...

    def came(self, message: int) -> None:
        """Take note: the receiver has all of the message."""
        ...


@dataclass(slots=True)
class _Queue:
    """One direction of a link or NIC. `full_s`: when its bucket is full again; `last_s`: when the
    segment that came last has left.
    """

    bytes_per_s: float
    burst: int
    full_s: float = 0.0
    last_s: float = 0.0

    def leaves_s(self, now: float, num_bytes: int) -> float:
        """Seconds at which a segment that comes now has left."""
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


class Network:
    """All connections of a machine.

    `at(seconds, number)`: asks for a call of `event(number)` then. `longest`: bytes of the longest
    message.
    """

    def __init__(
        self,
        machine: Machine,
        now: Callable[[], float],
        at: Callable[[float, int], None],
        listener: _Listener,
        longest: int,
    ) -> None:
        self._machine, self._now, self._at, self._listener = machine, now, at, listener
        self._scale = scale = max(1, -(-longest // (MOST_SEGMENTS * min(SEGMENT_BYTES))))
        rates, num_links = machine.capacity().tolist(), 2 * machine.num_ranks
        self._queues = [_Queue(rate, scale * BURST_BYTES[at >= num_links]) for at, rate in enumerate(rates)]
        self._connections: dict[tuple[int, int], _Connection] = {}
        self._coming: dict[int, _TcpSegment] = {}
        self._count = 0

    def give(self, src: int, dst: int, message: int, num_bytes: int) -> None:
        """Write a message to the connection of two ranks, after all that it was given before."""
        connection = self._connections.get((src, dst)) or self._connect(src, dst)
        connection.waiting.append(_Given(message, num_bytes))
        self._fill(connection)

    def event(self, number: int) -> None:
        """Move a segment on that has left a queue."""
        place, connection, part = self._coming.pop(number)
        if place == 0:
            connection.queued -= 1
            self._pass(1, connection, part)
            self._send(connection)
        elif place == 1:
            self._pass(2, connection, part)
            if part.whole:
                self._listener.came(part.message)
        elif place == 2:
            self._pass(3, connection, part)
        elif place == _LEFT:
            self._listener.left(part.message)
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
        """Put what waits into the socket, as far as it has free bytes."""
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
                self._happens(_LEFT, connection, given, self._now())
        connection.full = bool(connection.waiting)
        self._send(connection)

    def _send(self, connection: _Connection) -> None:
        """Hand segments to the first queue."""
        while connection.unsent and not (connection.small and connection.queued >= SMALL_QUEUE):
            first = connection.unsent[0]
            taken = min(first.num_bytes, connection.segment)
            first.num_bytes -= taken
            if not first.num_bytes:
                connection.unsent.popleft()
            connection.queued += 1
            self._pass(0, connection, _Given(first.message, taken, first.whole and not first.num_bytes))

    def _pass(self, place: int, connection: _Connection, part: _Given) -> None:
        """Through a queue; an acknowledgement takes no time of its own."""
        queue = (*connection.there, *connection.back)[place]
        self._happens(
            place, connection, part, queue.leaves_s(self._now(), part.num_bytes if place < len(connection.there) else 0)
        )

    def _happens(self, place: int, connection: _Connection, part: _Given, at_s: float) -> None:
        self._count += 1
        self._coming[self._count] = _TcpSegment(place, connection, part)
        self._at(at_s, self._count)
