"""Trace of what one rank gave to its device, in issue order: launches, events, waits, memory let go.

`tools.gpu_model.stand_ins` records it, `races` checks what is ordered by what, `timeline` gives it
times.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

COMPUTE = "compute"
"""The stream that the model's own kernels run on."""

Extent: TypeAlias = tuple[int, int]
"""Bytes [start, stop) of the device's memory."""
What: TypeAlias = Literal["launch", "record", "wait", "free"]


class Message(NamedTuple):
    """One send or receive of a batch: `num_bytes` between this rank and `peer`."""

    sends: bool
    peer: int
    num_bytes: int


class Work(NamedTuple):
    """The work of a launch, for the timeline.

    Attributes:
        kind: attention forward or backward, a collective or a batch of messages, or anything else
            (`rows`: copying, adding, merging).
        num_bytes: read and written.
        pairs: attention: (query, key) pairs times heads.
        messages: of a batch.
        group: ranks of a collective.
    """

    kind: Literal["forward", "backward", "linear", "rows", "batch", "collective"]
    num_bytes: int = 0
    pairs: int = 0
    messages: tuple[Message, ...] = ()
    group: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Op:
    """One thing that the host gave to a stream.

    Attributes:
        stream: its name.
        what: a launch (also a batch of messages), an event recorded or waited for; or memory that
            the host let go, in the order of the stream that it was allocated on.
        label: for people.
        reads: extents that a launch reads.
        writes: extents that it writes, or that are let go.
        event: number of the event.
        spared: of memory let go, the streams whose use the allocator waits for by itself
            (`Tensor.record_stream`).
        work: of a launch.
    """

    stream: str
    what: What
    label: str
    reads: tuple[Extent, ...] = ()
    writes: tuple[Extent, ...] = ()
    event: int = -1
    spared: frozenset[str] = frozenset()
    work: Work | None = None


@dataclass(slots=True)
class Trace:
    """One rank's ops in issue order. `rank`: in its pool."""

    rank: int
    ops: list[Op] = field(default_factory=list)
    num_events: int = 0

    def launch(
        self, stream: str, label: str, reads: tuple[Extent, ...], writes: tuple[Extent, ...], work: Work
    ) -> None:
        """Note a launch."""
        self.ops.append(Op(stream, "launch", label, reads, writes, work=work))

    def record(self, stream: str) -> int:
        """Note an event; its number."""
        self.num_events += 1
        self.ops.append(Op(stream, "record", f"event {self.num_events}", event=self.num_events))
        return self.num_events

    def wait(self, stream: str, event: int) -> None:
        """Note that a stream waits for an event."""
        self.ops.append(Op(stream, "wait", f"wait for event {event}", event=event))

    def free(self, stream: str, extent: Extent, spared: frozenset[str]) -> None:
        """Note that memory was let go."""
        self.ops.append(Op(stream, "free", "memory let go", writes=(extent,), spared=spared))
