"""CUDA streams played by threads over gloo, so that what NCCL will carry can be run here."""

# Each stream does what it is given in order and has a process group of its own, whose messages
# match by order alone; only events join them.
#
# As with NCCL, the first send or receive of a pair on a communicator holds the rank's own thread in
# the group call until the other end is in its own (`tests.support.rendezvous`). All ranks meet at a
# server in the first one's process. Where every rank stands in a group call or waits for an event
# and nothing changes any more, the server says so to all.

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_balance.runtime.cuda import StreamMessage
from megatron_balance.runtime.groups import Groups, stream_groups
from tests.support.rendezvous import GroupCall, Meeting

_PATIENCE_S = 20.0
# How long nothing may change while all ranks stand or wait. Data under way takes milliseconds.
_QUIET_S = 5.0


# Ranks stand in group calls for ever.
class HangError(RuntimeError): ...


class Rendezvous:
    # A rank's line to the server where all ranks meet.
    def __init__(self, rank: int, address: tuple[str, int]) -> None:
        self.rank = rank
        self._line = socket.create_connection(address)
        self._answers = self._line.makefile("r")
        self._say("is", rank)

    def meet(self, stream: str, pairs: Sequence[tuple[int, int]]) -> None:
        # Stand in a group call until it lets this rank go.
        #
        # Raises HangError: it never would.
        self._say("enters", [stream, pairs])
        answer = json.loads(self._answers.readline())
        if answer:
            raise HangError(f"rank {self.rank} stands in a group call on {stream!r}, pairs {pairs}; {answer}")

    @contextmanager
    def waiting(self) -> Iterator[None]:
        # While this rank waits for an event.
        self._say("waits", True)
        try:
            yield
        finally:
            self._say("waits", False)

    def close(self) -> None:
        self._line.close()

    def _say(self, what: str, value: Any) -> None:
        self._line.sendall((json.dumps([what, value]) + "\n").encode())


def _serve(server: socket.socket, num_ranks: int) -> None:
    # Let ranks meet until all of them have gone.
    said: SimpleQueue[tuple[int, str, Any]] = SimpleQueue()
    lines = [server.accept()[0] for _ in range(num_ranks)]
    server.close()

    def listen(line: socket.socket) -> None:
        rank, messages = -1, line.makefile("r")
        for message in messages:
            what, value = json.loads(message)
            rank = value if what == "is" else rank
            said.put((rank, what, line if what == "is" else value))
        said.put((rank, "goes", None))

    for line in lines:
        Thread(target=listen, args=(line,), daemon=True).start()
    meeting, here, waits = Meeting(), dict[int, socket.socket](), set[int]()
    gone = 0
    while gone < num_ranks:
        held = waits | set(meeting.waiting)
        stuck = meeting.waiting and held >= here.keys() and len(here) + gone == num_ranks
        try:
            rank, what, value = said.get(timeout=_QUIET_S if stuck else None)
        except Empty:
            standing = sorted(meeting.waiting)
            for rank in standing:
                here[rank].sendall(b'"ranks %s stand in group calls and no other comes"\n' % str(standing).encode())
            meeting.waiting.clear()
            continue
        match what:
            case "is":
                here[rank] = value
            case "enters":
                stream, pairs = value
                call = GroupCall(stream, frozenset((src, dst) for src, dst in pairs))
                for left in meeting.enter(rank, call):
                    here[left].sendall(b'""\n')
            case "waits":
                (waits.add if value else waits.discard)(rank)
            case _:
                gone += 1
                here.pop(rank, None)


class TimedEvent(Event):
    # An event that knows when it was set.
    set_s = 0.0

    def set(self) -> None:
        self.set_s = time.perf_counter()
        super().set()


class StreamThread:
    # A stream. What goes wrong in it is raised by whoever waits for an event behind it.
    def __init__(self, name: str, group: dist.ProcessGroup | None, streams: StreamThreads) -> None:
        self.name, self.group, self.ranks, self.errors = name, group, streams.ranks, streams.errors
        self.rendezvous, self.connected = streams.rendezvous, set[tuple[int, int]]()
        self.queue: SimpleQueue[Callable[[], object]] = SimpleQueue()
        Thread(target=self._work, daemon=True).start()

    def wait(self, event: Event) -> None:
        self.queue.put(lambda: _await(event, self.errors))

    def batch(self, transfers: Sequence[StreamMessage]) -> None:
        rank = self.rendezvous.rank
        new = {(rank, t.peer) if t.sends else (t.peer, rank) for t in transfers} - self.connected
        if new:
            self.rendezvous.meet(self.name, sorted(new))
            self.connected |= new

        def issue() -> Sequence[dist.Work]:
            calls = [(dist.isend if t.sends else dist.irecv, t.tensor, self.ranks[t.peer]) for t in transfers]
            return dist.batch_isend_irecv([dist.P2POp(*call, self.group) for call in calls])

        self.call(issue)

    def call(self, issue: Callable[[], Sequence[dist.Work]]) -> None:
        self.queue.put(lambda: [work.wait() for work in issue()])

    def empty(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def uses(self, x: Tensor) -> None:
        del x

    def record(self) -> TimedEvent:
        event = TimedEvent()
        self.queue.put(event.set)
        return event

    def _work(self) -> None:
        while True:
            call = self.queue.get()
            try:
                call()
            except Exception as error:
                self.errors.append(error)


class StreamThreads:
    # All streams of one rank. The compute stream is the thread that asks: whatever it was given is
    # done.
    def __init__(self, groups: dict[str, dist.ProcessGroup], ranks: Sequence[int], rendezvous: Rendezvous) -> None:
        self.groups, self.ranks, self.rendezvous = groups, ranks, rendezvous
        self.errors: list[Exception] = []
        self.streams: dict[str, StreamThread] = {}
        self.is_timed = False

    def of(self, name: str) -> StreamThread:
        if name not in self.streams:
            self.streams[name] = StreamThread(name, self.groups.get(name), self)
        return self.streams[name]

    def now(self) -> TimedEvent:
        event = TimedEvent()
        event.set()
        return event

    def timed(self, on: bool) -> None:
        self.is_timed = on

    def seconds(self, begin: TimedEvent, end: TimedEvent) -> float:
        assert self.is_timed, "events were not asked for their times"
        for event in (begin, end):
            _await(event, self.errors)
        return end.set_s - begin.set_s

    def wait(self, event: Event) -> None:
        if not event.is_set():
            with self.rendezvous.waiting():
                _await(event, self.errors)


def _await(event: Event, errors: list[Exception]) -> None:
    if not event.wait(_PATIENCE_S):
        raise TimeoutError("streams wait for one another")
    if errors:
        raise errors[0]


def with_streams(groups: Groups, ranks_per_node: int, *, safe: bool = False) -> Groups:
    # The pool with threads for streams; collective over all ranks of the world.
    made: dict[str, dist.ProcessGroup] = {}
    for name, members in stream_groups(groups.size, ranks_per_node):
        group = dist.new_group([groups.ranks[member] for member in members])
        if groups.rank in members:
            assert isinstance(group, dist.ProcessGroup)
            made[name] = group
    address: list[Any] = [None]
    if groups.rank == 0:
        server = socket.create_server(("127.0.0.1", 0))
        address = [server.getsockname()]
        Thread(target=_serve, args=(server, groups.size), daemon=True).start()
    if groups.pool is not None:
        dist.broadcast_object_list(address, groups.ranks[0], groups.pool)
    rendezvous = Rendezvous(groups.rank, tuple(address[0]))
    return replace(groups, streams=StreamThreads(made, groups.ranks, rendezvous), safe=safe, connected=set())
