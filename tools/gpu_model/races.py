"""Happens-before over a recorded rank: which accesses of the same bytes nothing orders.

Two launches are ordered if one stream has them one after the other, or if a stream waits for an
event recorded behind the first before it comes to the second. Accesses of which one is a write must
be ordered, and so must every use of memory that the host let go, since the allocator hands it out
again at once.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tools.gpu_model.trace import Op, Trace

Clocks = npt.NDArray[np.int64]
"""[ops, streams]: how far each stream must have come when the op has run: 1 + index of its last op."""
Pairs = npt.NDArray[np.int64]
"""[n, 2]: (earlier op, later op) that touch the same bytes, one of them writing."""


@dataclass(frozen=True, slots=True)
class Race:
    """Two ops that touch the same bytes and that nothing orders."""

    earlier: Op
    later: Op
    rank: int

    def __str__(self) -> str:
        return (
            f"rank {self.rank}: {self.earlier.label} on {self.earlier.stream!r} and {self.later.label} on "
            f"{self.later.stream!r} touch the same memory, and nothing orders them"
        )


@dataclass(slots=True)
class Recorded:
    """A trace with what its checks need, worked out once."""

    trace: Trace
    streams: list[str] = field(init=False)
    stream_of: npt.NDArray[np.int64] = field(init=False)
    pairs: Pairs = field(init=False)

    def __post_init__(self) -> None:
        self.streams = list(dict.fromkeys(op.stream for op in self.trace.ops))
        numbers = {name: number for number, name in enumerate(self.streams)}
        self.stream_of = np.array([numbers[op.stream] for op in self.trace.ops], dtype=np.int64)
        self.pairs = _conflicts(self.trace.ops)

    @property
    def waits(self) -> list[int]:
        return [index for index, op in enumerate(self.trace.ops) if op.what == "wait"]

    @property
    def launches(self) -> list[int]:
        return [index for index, op in enumerate(self.trace.ops) if op.what == "launch"]

    @property
    def waited_for(self) -> list[int]:
        return sorted({self.trace.ops[index].event for index in self.waits})

    def clocks(self, *, without: int = -1, no_event: int = -1) -> Clocks:
        """Clocks of all ops. `without`: a wait to leave out; `no_event`: an event that nobody waits
        for.
        """
        ops = self.trace.ops
        clocks = np.zeros((len(ops), len(self.streams)), dtype=np.int64)
        now = [np.zeros(len(self.streams), dtype=np.int64) for _ in self.streams]
        events: dict[int, npt.NDArray[np.int64]] = {}
        stream_of = self.stream_of.tolist()
        for index, op in enumerate(ops):
            stream = stream_of[index]
            clock = clocks[index]
            clock[:] = now[stream]
            if op.what == "wait" and index != without and op.event != no_event and op.event in events:
                np.maximum(clock, events[op.event], out=clock)
            clock[stream] = index + 1
            if op.what == "record":
                events[op.event] = clock
            now[stream] = clock
        return clocks

    def is_found_unchained(self, launch: int) -> bool:
        """Whether a launch races that does not wait for what its stream had before it."""
        return bool((self.pairs[:, 1] == launch).any())

    def races(self, clocks: Clocks | None = None) -> list[Race]:
        """Pairs that nothing orders; `clocks`: others than those of the trace as it is."""
        found = self._unordered(self.clocks() if clocks is None else clocks)
        ops, rank = self.trace.ops, self.trace.rank
        return [Race(ops[a], ops[b], rank) for a, b in self.pairs[found].tolist()]

    def is_safe(self, clocks: Clocks) -> bool:
        return not self._unordered(clocks).any()

    def _unordered(self, clocks: Clocks) -> npt.NDArray[np.bool_]:
        earlier, later = self.pairs.T
        return clocks[later, self.stream_of[earlier]] <= earlier


class _Segment:
    """Bytes [start, stop): the op that wrote them last, and those that read them since, by stream."""

    __slots__ = ("reads", "start", "stop", "write")

    def __init__(self, start: int, stop: int, write: int, reads: dict[str, int]) -> None:
        self.start, self.stop, self.write, self.reads = start, stop, write, reads


class _Memory:
    """Last accesses of every byte, as segments that do not touch one another."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.segments: list[_Segment] = []

    def over(self, start: int, stop: int) -> tuple[int, int]:
        """Cut segments at both ends; the places of those between."""
        for at in (start, stop):
            place = bisect_right(self.starts, at) - 1
            if place >= 0 and self.segments[place].start < at < self.segments[place].stop:
                old = self.segments[place]
                self.starts.insert(place + 1, at)
                self.segments.insert(place + 1, _Segment(at, old.stop, old.write, dict(old.reads)))
                old.stop = at
        return bisect_left(self.starts, start), bisect_left(self.starts, stop)

    def replace(self, begin: int, end: int, segments: list[_Segment]) -> None:
        self.starts[begin:end] = [segment.start for segment in segments]
        self.segments[begin:end] = segments

    def write(self, start: int, stop: int, op: int) -> Iterator[int]:
        begin, end = self.over(start, stop)
        for segment in self.segments[begin:end]:
            yield from segment.reads.values()
            if segment.write >= 0:
                yield segment.write
        self.replace(begin, end, [_Segment(start, stop, op, {})])

    def read(self, start: int, stop: int, op: int, stream: str) -> Iterator[int]:
        begin, end = self.over(start, stop)
        segments: list[_Segment] = []
        at = start
        for segment in self.segments[begin:end]:
            if at < segment.start:
                segments.append(_Segment(at, segment.start, -1, {stream: op}))
            if segment.write >= 0:
                yield segment.write
            segment.reads[stream] = op
            segments.append(segment)
            at = segment.stop
        if at < stop:
            segments.append(_Segment(at, stop, -1, {stream: op}))
        self.replace(begin, end, segments)

    def forget(self, start: int, stop: int) -> list[_Segment]:
        begin, end = self.over(start, stop)
        gone = self.segments[begin:end]
        self.replace(begin, end, [])
        return gone


def _conflicts(ops: Sequence[Op]) -> Pairs:
    """Every access with the last ones of the same bytes; pairs of these in order order all others."""
    memory, pairs = _Memory(), set[tuple[int, int]]()
    for index, op in enumerate(ops):
        if op.what == "free":
            for extent in op.writes:
                for segment in memory.forget(*extent):
                    held = [*segment.reads.values(), *([segment.write] if segment.write >= 0 else [])]
                    pairs.update((at, index) for at in held if ops[at].stream not in op.spared)
            continue
        for extent in op.reads:
            pairs.update((at, index) for at in memory.read(*extent, index, op.stream))
        for extent in op.writes:
            pairs.update((at, index) for at in memory.write(*extent, index))
    pairs = {(a, b) for a, b in pairs if a != b}
    return np.array(sorted(pairs), dtype=np.int64).reshape(-1, 2)
