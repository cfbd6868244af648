"""CUDA streams whose messages gloo carries through the host's memory.

So several ranks can share one GPU, which NCCL refuses.

Everything but the wire is the product's: the same streams, priorities, events and order of calls as
with NCCL (`runtime.cuda`, `runtime.transport`). Each stream has a thread, since a call of
gloo blocks where a call of NCCL is only issued. Messages match by their order alone, as NCCL's do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_balance.runtime.cuda import CudaStream, CudaStreams, StreamMessage, has_high_priority
from megatron_balance.runtime.groups import Groups, stream_groups

PATIENCE_S = 30.0


@dataclass(slots=True)
class StagedEvent:
    """An event of a stream: all that it was given so far is done.

    `event` is recorded once `issued` is set.
    """

    event: Any = field(default_factory=lambda: torch.cuda.Event())  # noqa: PLW0108  looked up when made: the suite plays CUDA on a CPU
    issued: Event = field(default_factory=Event)


class StagedStream(CudaStream):
    """A stream whose calls a thread makes, in order.

    An error there is raised by whoever waits for an event behind it.
    """

    def __init__(
        self, streams: CudaStreams, group: dist.ProcessGroup | None, errors: list[Exception], *, high: bool
    ) -> None:
        """A stream of `streams`; `errors`: of all streams of the rank."""
        super().__init__(group, streams.ranks, streams.events, high=high)
        self._errors = errors
        self._calls: SimpleQueue[Callable[[], object]] = SimpleQueue()
        Thread(target=self._work, daemon=True).start()

    def wait(self, event: Any) -> None:
        self._calls.put(lambda: super(StagedStream, self).wait(issued(event, self._errors)))

    def batch(self, transfers: Sequence[StreamMessage]) -> None:
        self._calls.put(lambda: self._carry(transfers))

    def call(self, issue: Callable[[], Sequence[dist.Work]]) -> None:
        self._calls.put(lambda: super(StagedStream, self).call(issue))

    def record(self) -> Any:
        event = StagedEvent()

        def issue() -> None:
            event.event.record(self._stream)
            event.issued.set()

        self._calls.put(issue)
        return event

    def _carry(self, transfers: Sequence[StreamMessage]) -> None:
        """Every message through a copy in the host's memory."""
        arriving: list[tuple[Tensor, Tensor]] = []
        works: list[dist.Work | None] = []
        with torch.cuda.stream(self._stream):
            for transfer in transfers:
                peer = self._ranks[transfer.peer]
                if transfer.sends:
                    works.append(dist.isend(transfer.tensor.cpu().contiguous(), peer, self._group))
                else:
                    arriving.append((transfer.tensor, torch.empty(transfer.tensor.shape, dtype=transfer.tensor.dtype)))
                    works.append(dist.irecv(arriving[-1][1], peer, self._group))
            for work in works:
                assert work is not None, "this rank is not in its own pool"
                work.wait()
            for target, copy in arriving:
                target.copy_(copy)

    def _work(self) -> None:
        while True:
            call = self._calls.get()
            try:
                call()
            except Exception as error:
                self._errors.append(error)


class StagedStreams(CudaStreams):
    def __init__(self, groups: dict[str, dist.ProcessGroup], ranks: Sequence[int]) -> None:
        """`groups`: gloo's, one a stream."""
        super().__init__(groups, ranks)
        self._staged: dict[str, StagedStream] = {}
        self._errors: list[Exception] = []

    def of(self, name: str) -> StagedStream:
        if name not in self._staged:
            high = has_high_priority(name)
            self._staged[name] = StagedStream(self, self._groups.get(name), self._errors, high=high)
        return self._staged[name]

    def wait(self, event: Any) -> None:
        super().wait(issued(event, self._errors))


def issued(event: Any, errors: Sequence[Exception]) -> Any:
    """The device's event behind an event, once it is recorded.

    Raises TimeoutError: it never was; or whatever went wrong in a stream.
    """
    if not isinstance(event, StagedEvent):
        return event
    if not event.issued.wait(PATIENCE_S):
        raise errors[0] if errors else TimeoutError("streams wait for one another")
    if errors:
        raise errors[0]
    return event.event


def with_staged_streams(groups: Groups, ranks_per_node: int) -> Groups:
    """The pool with staged streams; collective over all ranks of the world."""
    made: dict[str, dist.ProcessGroup] = {}
    for name, members in stream_groups(groups.size, ranks_per_node):
        group = dist.new_group([groups.ranks[member] for member in members], backend="gloo")
        if groups.rank in members:
            assert isinstance(group, dist.ProcessGroup)
            made[name] = group
    return replace(groups, streams=StagedStreams(made, groups.ranks), connected=set())
