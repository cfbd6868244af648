"""Trace of what one rank gave to its device, in issue order: launches, events, waits, memory let go.

`tools.gpu_model.stand_ins` records it, `races` checks what is ordered by what.
"""

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

COMPUTE = "compute"
"""The stream that the model's own kernels run on."""

Extent: TypeAlias = tuple[int, int]
"""Bytes [start, stop) of the device's memory."""
What: TypeAlias = Literal["launch", "record", "wait", "free"]


Kind: TypeAlias = Literal["", "forward", "backward", "rows", "batch", "collective"]
"""Of a launch: attention, a batch of messages, a collective, or anything else (`rows`)."""


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
        kind: of a launch.
    """

    stream: str
    what: What
    label: str
    reads: tuple[Extent, ...] = ()
    writes: tuple[Extent, ...] = ()
    event: int = -1
    spared: frozenset[str] = frozenset()
    kind: Kind = ""


@dataclass(slots=True)
class Trace:
    """One rank's ops in issue order. `rank`: in its pool."""

    rank: int
    ops: list[Op] = field(default_factory=list)
    num_events: int = 0

    def launch(
        self, stream: str, label: str, reads: tuple[Extent, ...], writes: tuple[Extent, ...], kind: Kind = "rows"
    ) -> None:
        self.ops.append(Op(stream, "launch", label, reads, writes, kind=kind))

    def record(self, stream: str) -> int:
        self.num_events += 1
        self.ops.append(Op(stream, "record", f"event {self.num_events}", event=self.num_events))
        return self.num_events

    def wait(self, stream: str, event: int) -> None:
        self.ops.append(Op(stream, "wait", f"wait for event {event}", event=event))

    def free(self, stream: str, extent: Extent, spared: frozenset[str]) -> None:
        self.ops.append(Op(stream, "free", "memory let go", writes=(extent,), spared=spared))
