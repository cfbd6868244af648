"""CUDA streams as exchanges need them, behind two protocols that a CPU can stand in for. A stream's
calls wait in the stream, never in the host; `runtime.transport` decides which waits for which.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

# Streams whose launches go before those that wait for multiprocessors: transfers between nodes, and
# the legs inside a node that bring pieces to them and take pieces from them.
HIGH_PRIORITY = ("inter_node", "dispatch", "combine")


def has_high_priority(stream: str) -> bool:
    return stream.startswith(HIGH_PRIORITY)


class StreamMessage(NamedTuple):
    """One message of a batch, with pool rank `peer`. Both ends sort by (src, dst, index)."""

    src: int
    dst: int
    index: int
    sends: bool
    peer: int
    tensor: Tensor


class Stream(Protocol):
    """Runs what it is given in order, beside the host and the other streams."""

    def wait(self, event: Any) -> None:
        """Make what is issued later wait for `event`."""

    def batch(self, transfers: Sequence[StreamMessage]) -> None:
        """Issue sends and receives as one call, which ends when all have ended."""

    def call(self, issue: Callable[[], Sequence[dist.Work]]) -> None:
        """Issue communication calls, and wait for them in the stream."""

    def empty(self, num_bytes: int) -> Tensor:
        """Memory that belongs to the stream, uint8."""
        ...

    def uses(self, x: Tensor) -> None:
        """Keep memory, maybe of another stream, until this one has read or written it."""

    def record(self) -> Any:
        """Event at which all that was issued so far is done."""
        ...


class Streams(Protocol):
    def of(self, name: str) -> Stream:
        """A communication stream, named as in `compile.order.stream_name`."""
        ...

    def now(self) -> Any:
        """Event at which all that was issued to the compute stream so far is done."""
        ...

    def wait(self, event: Any) -> None:
        """Make the compute stream wait for `event`."""

    def timed(self, on: bool) -> None:
        """Whether events from now on can be asked for their times."""

    def seconds(self, begin: Any, end: Any) -> float:
        """Seconds from one timed event to another; the host waits until both have been."""
        ...


class CudaStreams:
    """Streams of the current device. `groups`: communicators of those that carry transfers."""

    def __init__(self, groups: Mapping[str, dist.ProcessGroup], ranks: Sequence[int]) -> None:
        self._groups, self.ranks = groups, ranks
        self._streams: dict[str, _CudaStream] = {}
        self.events = _EventMaker()

    @property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        return tuple(self._groups.values())

    def of(self, name: str) -> "_CudaStream":
        if name not in self._streams:
            group, high = self._groups.get(name), has_high_priority(name)
            self._streams[name] = _CudaStream(group, self.ranks, self.events, high=high)
        return self._streams[name]

    def now(self) -> torch.cuda.Event:
        event = self.events.new()
        event.record()
        return event

    def wait(self, event: torch.cuda.Event) -> None:
        torch.cuda.current_stream().wait_event(event)

    def timed(self, on: bool) -> None:
        self.events.timed = on

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        begin.synchronize()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3


@dataclass(slots=True)
class _EventMaker:
    timed: bool = False

    def new(self) -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=self.timed)


class _CudaStream:
    """A stream and its communicator. `ranks`: global rank of each pool rank."""

    def __init__(
        self, group: dist.ProcessGroup | None, ranks: Sequence[int], events: _EventMaker, *, high: bool
    ) -> None:
        self._group, self._ranks, self._events = group, ranks, events
        self._stream = torch.cuda.Stream(priority=-1 if high else 0)

    def wait(self, event: torch.cuda.Event) -> None:
        self._stream.wait_event(event)

    def batch(self, transfers: Sequence[StreamMessage]) -> None:
        assert self._group is not None, "a stream for collectives was given a transfer"
        ops = [
            dist.P2POp(dist.isend if t.sends else dist.irecv, t.tensor, self._ranks[t.peer], self._group)
            for t in transfers
        ]
        self.call(lambda: dist.batch_isend_irecv(ops))

    def call(self, issue: Callable[[], Sequence[dist.Work]]) -> None:
        with torch.cuda.stream(self._stream):
            for work in issue():
                work.wait()  # the stream waits, not the host

    def empty(self, num_bytes: int) -> Tensor:
        with torch.cuda.stream(self._stream):
            return torch.empty(num_bytes, dtype=torch.uint8, device="cuda")

    def uses(self, x: Tensor) -> None:
        x.record_stream(self._stream)

    def record(self) -> torch.cuda.Event:
        event = self._events.new()
        event.record(self._stream)
        return event
