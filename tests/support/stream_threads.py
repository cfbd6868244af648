"""CUDA streams played by threads over gloo, so that what NCCL will carry can be run here: each
stream does what it is given in order, each has a process group of its own whose messages match by
order alone, and only events join them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from queue import SimpleQueue
from threading import Event, Thread

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_balance.runtime.cuda import Transfer
from megatron_balance.runtime.groups import Groups, stream_names

_PATIENCE_S = 20.0


class StreamThread:
    """A stream. What goes wrong in it is raised by whoever waits for an event behind it."""

    def __init__(self, group: dist.ProcessGroup | None, ranks: Sequence[int], errors: list[Exception]) -> None:
        self.group, self.ranks, self.errors = group, ranks, errors
        self.queue: SimpleQueue[Callable[[], object]] = SimpleQueue()
        Thread(target=self._work, daemon=True).start()

    def wait(self, event: Event) -> None:
        self.queue.put(lambda: _await(event, self.errors))

    def batch(self, transfers: Sequence[Transfer]) -> None:
        def issue() -> Sequence[dist.Work]:
            ops = [
                dist.P2POp(dist.isend if t.sends else dist.irecv, t.tensor, self.ranks[t.peer], self.group)
                for t in transfers
            ]
            return dist.batch_isend_irecv(ops)

        self.call(issue)

    def call(self, issue: Callable[[], Sequence[dist.Work]]) -> None:
        self.queue.put(lambda: [work.wait() for work in issue()])

    def empty(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def uses(self, x: Tensor) -> None:
        del x

    def record(self) -> Event:
        event = Event()
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
    """All streams of one rank. The compute stream is the thread that asks: whatever it was given is
    done.
    """

    def __init__(self, groups: dict[str, dist.ProcessGroup], ranks: Sequence[int]) -> None:
        self.groups, self.ranks = groups, ranks
        self.errors: list[Exception] = []
        self.streams: dict[str, StreamThread] = {}

    def of(self, name: str) -> StreamThread:
        if name not in self.streams:
            self.streams[name] = StreamThread(self.groups.get(name), self.ranks, self.errors)
        return self.streams[name]

    def now(self) -> Event:
        event = Event()
        event.set()
        return event

    def wait(self, event: Event) -> None:
        _await(event, self.errors)


def _await(event: Event, errors: list[Exception]) -> None:
    if not event.wait(_PATIENCE_S):
        raise TimeoutError("streams wait for one another")
    if errors:
        raise errors[0]


def with_streams(groups: Groups, ranks_per_node: int) -> Groups:
    """The pool with threads for streams; collective over all ranks of the world."""
    made: dict[str, dist.ProcessGroup] = {}
    for name in stream_names(groups.size, ranks_per_node):
        group = dist.new_group(list(groups.ranks))
        assert isinstance(group, dist.ProcessGroup)
        made[name] = group
    return replace(groups, streams=StreamThreads(made, groups.ranks))
