"""Times for what ranks recorded: one hardware queue, priorities, multiprocessors, channels, links.

- *Queue.* With CUDA_DEVICE_MAX_CONNECTIONS=1 everything goes to the device through one queue, in
  issue order. At its head a launch waits for the launch before it on its stream, and a wait for its
  event; whatever is behind waits with it.
- *Priority.* A launch of high priority gets multiprocessors as blocks of the running kernel end. One
  of normal priority comes behind all blocks of that kernel, so when it ends.
- *Multiprocessors.* A batch holds one for each channel from its launch to the end of its last
  message, also while it waits for a peer; kernels beside it have the rest.
- *Channels.* A message moves at most at the rate of its channels, and shares NVLink and NIC of both
  ranks with what moves beside it.

Rates are a data sheet's or as measured by others, so what counts is one timeline over another.
Nothing here has been compared with a GPU yet (docs/cluster.md, the first node).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from megatron_balance.runtime.cuda import HIGH_PRIORITY
from tools.gpu_model.trace import COMPUTE, Op, Trace, Work

KERNELS: dict[str, tuple[float, ...]] = {"forward": (1.0,), "backward": (0.04, 0.92, 0.04)}
"""Kernels of one attention launch as shares of its time.

FlashAttention-2 and 3 run three for a backward: the product of output and its gradient, the main
one, and the conversion of the queries' gradient (`flash_bwd_launch_template.h`)."""


@dataclass(frozen=True)
class Machine:
    """Rates of a GPU and its links.

    Attributes:
        ranks_per_node: GPUs of a node.
        queues: one for the device, or one for each stream.
        high: beginnings of the names of streams with high priority.
        sms: multiprocessors.
        pairs_per_s: (query, key) pairs times heads of head dim 128 in an attention forward
            (989 TFLOP/s dense bf16 of an H100 at 0.6, four FLOPs an element of the head).
        backward: time of a backward over a forward.
        memory_bytes_per_s: 3.35 TB/s at 0.8.
        nvlink_bytes_per_s: a direction.
        nic_bytes_per_s: of a rank, a direction.
        channels: of a peer, inside a node and between nodes.
        channel_bytes_per_s: inside a node and between nodes.
        launch_s: between two issues of the host.
        persistent: attention's blocks stay until it ends, so nothing gets in beside it.
    """

    ranks_per_node: int
    queues: Literal["one", "one a stream"] = "one"
    high: tuple[str, ...] = HIGH_PRIORITY
    sms: int = 132
    pairs_per_s: float = 989e12 * 0.6 / (4 * 128)
    backward: float = 2.5
    memory_bytes_per_s: float = 3.35e12 * 0.8
    nvlink_bytes_per_s: float = 400e9
    nic_bytes_per_s: float = 48e9
    channels: tuple[int, int] = (8, 2)
    channel_bytes_per_s: tuple[float, float] = (25e9, 24e9)
    launch_s: float = 4e-6
    persistent: bool = False

    def crosses(self, a: int, b: int) -> bool:
        """Whether two ranks are on different nodes."""
        return a // self.ranks_per_node != b // self.ranks_per_node


class HangError(RuntimeError):
    """No rank can go on. Says what each of them waits for."""


@dataclass(slots=True)
class _Entry:
    """One thing in a queue. `event`: recorded or waited for; `kernel`: of a launch."""

    op: Op
    issued_s: float
    share: float = 1.0
    begun_s: float = -1.0
    resident: bool = False
    left: float = 0.0  # seconds alone, or nothing for messages
    messages: list[_Carried] = field(default_factory=list)
    done: bool = False

    @property
    def stream(self) -> str:
        return self.op.stream


@dataclass(slots=True)
class _Carried:
    """One message: the batches at both ends, as they are issued."""

    src: int
    dst: int
    left: float
    crosses: bool
    ends: list[_Entry] = field(default_factory=list)

    @property
    def moves(self) -> bool:
        return len(self.ends) == 2 and all(end.resident for end in self.ends)


@dataclass(frozen=True, slots=True)
class Span:
    """A launch on a rank, from its launch on the device to its end."""

    rank: int
    stream: str
    label: str
    kind: str
    begin_s: float
    end_s: float


@dataclass
class Timeline:
    """All launches of all ranks, and the end of the last one."""

    spans: list[Span]
    end_s: float

    def held_sm_s(self, machine: Machine) -> float:
        """Multiprocessor seconds that batches and collectives held, of the rank that held most."""
        held: dict[int, float] = defaultdict(float)
        for span in self.spans:
            if span.kind == "batch":
                held[span.rank] += (span.end_s - span.begin_s) * machine.channels[0]
        return max(held.values(), default=0.0)


def play(traces: Sequence[Trace], machine: Machine) -> Timeline:
    """Run all ranks' traces against one another. `traces`: of every rank, in order.

    Raises:
        HangError: the ranks wait for one another.
    """
    return _Play(traces, machine).run()


class _Play:
    def __init__(self, traces: Sequence[Trace], machine: Machine) -> None:
        self.machine = machine
        self.now = 0.0
        self.spans: list[Span] = []
        self.wires: dict[tuple[str, int, int], tuple[deque[_Carried], deque[_Carried]]] = {}
        self.calls: dict[tuple[str, tuple[int, ...]], dict[int, list[_Entry]]] = {}
        self.ranks = [_Rank(trace, machine) for trace in traces]

    def run(self) -> Timeline:
        while True:
            moved = True
            while moved:
                moved = any(self.advance(rank) for rank in self.ranks)
            running = [entry for rank in self.ranks for entry in rank.running]
            rates = self.rates()
            step = self.next_s(rates)
            if step is None:
                if any(rank.queued for rank in self.ranks) or running:
                    raise HangError("; ".join(rank.stuck() for rank in self.ranks if rank.queued or rank.running))
                return Timeline(self.spans, self.now)
            self.pass_time(step, rates)

    def advance(self, rank: _Rank) -> bool:
        """Take what can be taken from a rank's queues, and let kernels in; whether there was any."""
        moved = False
        for queue in rank.queues:
            while queue and queue[0].issued_s <= self.now and rank.ready(queue[0]):
                self.begin(rank, queue.popleft())
                moved = True
        for entry in rank.running:
            if not entry.resident and rank.has_room(entry):
                entry.resident = True
                moved = True
        return moved

    def begin(self, rank: _Rank, entry: _Entry) -> None:
        op = entry.op
        if op.what == "wait":
            return
        if op.what == "record":
            rank.record(op)
            return
        entry.begun_s = self.now
        assert op.work is not None
        entry.left = self.alone_s(op.work) * entry.share
        for message in op.work.messages:
            self.join(rank.number, entry, message.sends, message.peer, message.num_bytes)
        if op.work.kind == "collective":
            self.calls.setdefault((op.stream, op.work.group), {}).setdefault(rank.number, []).append(entry)
        rank.running.append(entry)
        rank.last[op.stream] = entry

    def join(self, rank: int, entry: _Entry, sends: bool, peer: int, num_bytes: int) -> None:
        """Match a message with that of its peer: the n-th of a stream from one rank to another."""
        src, dst = (rank, peer) if sends else (peer, rank)
        mine, theirs = self.wires.setdefault((entry.stream, src, dst), (deque(), deque()))[:: 1 if sends else -1]
        if theirs:
            carried = theirs.popleft()
            assert carried.left == num_bytes, f"rank {rank} and rank {peer} disagree about a message's size"
        else:
            carried = _Carried(src, dst, float(num_bytes), self.machine.crosses(src, dst))
            mine.append(carried)
        carried.ends.append(entry)
        entry.messages.append(carried)

    def alone_s(self, work: Work) -> float:
        machine = self.machine
        match work.kind:
            case "forward":
                return work.pairs / machine.pairs_per_s
            case "backward":
                return work.pairs / machine.pairs_per_s * machine.backward
            case "batch":
                return 0.0
            case "collective":
                crosses = any(machine.crosses(work.group[0], rank) for rank in work.group)
                return work.num_bytes / 2 / (machine.nic_bytes_per_s if crosses else machine.nvlink_bytes_per_s)
            case _:
                return work.num_bytes / machine.memory_bytes_per_s

    def rates(self) -> dict[int, float]:
        """Bytes a second of every message that moves, by identity: a fair share of what it uses."""
        messages = {id(m): m for rank in self.ranks for e in rank.running for m in e.messages if m.moves and m.left > 0}
        users: dict[tuple[str, int, bool], int] = defaultdict(int)
        for m in messages.values():
            users["out", m.src, m.crosses] += 1
            users["in", m.dst, m.crosses] += 1
        rates: dict[int, float] = {}
        for key, m in messages.items():
            link = self.machine.nic_bytes_per_s if m.crosses else self.machine.nvlink_bytes_per_s
            shared = link / max(users["out", m.src, m.crosses], users["in", m.dst, m.crosses])
            channels = self.machine.channels[m.crosses] * self.machine.channel_bytes_per_s[m.crosses]
            rates[key] = min(shared, channels)
        return rates

    def next_s(self, rates: dict[int, float]) -> float | None:
        """Seconds to whatever changes next."""
        times: list[float] = []
        for rank in self.ranks:
            times += [q[0].issued_s - self.now for q in rank.queues if q and q[0].issued_s > self.now]
            for entry in rank.running:
                if entry.resident and entry.left > 0 and self.all_there(entry):
                    times.append(entry.left / rank.speed(entry))
                if entry.resident and entry.left <= 0 and all(m.left <= 0 for m in entry.messages):
                    times.append(0.0)
                times += [m.left / rates[id(m)] for m in entry.messages if id(m) in rates]
        return min(times) if times else None

    def all_there(self, entry: _Entry) -> bool:
        """Whether every rank of a collective is in it."""
        work = entry.op.work
        if work is None or work.kind != "collective":
            return True
        calls = self.calls[entry.stream, work.group]
        number = next(at for entries in calls.values() for at, one in enumerate(entries) if one is entry)
        return all(len(calls.get(r, ())) > number and calls[r][number].resident for r in work.group)

    def pass_time(self, seconds: float, rates: dict[int, float]) -> None:
        for m in {id(m): m for rank in self.ranks for e in rank.running for m in e.messages}.values():
            if id(m) in rates:
                m.left = 0.0 if m.left <= rates[id(m)] * seconds * (1 + 1e-9) else m.left - rates[id(m)] * seconds
        for rank in self.ranks:
            progress = [(e, rank.speed(e) * seconds) for e in rank.running if e.resident and self.all_there(e)]
            for entry, done in progress:
                entry.left = 0.0 if entry.left <= done * (1 + 1e-9) + 1e-15 else entry.left - done
        self.now += seconds
        for rank in self.ranks:
            for entry in [e for e in rank.running if self.is_over(e)]:
                entry.done = True
                rank.running.remove(entry)
                assert entry.op.work is not None
                self.spans.append(
                    Span(rank.number, entry.stream, entry.op.label, entry.op.work.kind, entry.begun_s, self.now)
                )

    def is_over(self, entry: _Entry) -> bool:
        return (
            entry.resident
            and entry.left <= 0
            and self.all_there(entry)
            and all(m.left <= 0 and len(m.ends) == 2 for m in entry.messages)
        )


class _Rank:
    """One rank: what its device has in queues, and what runs."""

    def __init__(self, trace: Trace, machine: Machine) -> None:
        self.number, self.machine = trace.rank, machine
        self.running: list[_Entry] = []
        self.last: dict[str, _Entry] = {}
        self.events: dict[int, _Entry | None] = {}  # behind which an event is there
        entries = list(_entries(trace, machine))
        if machine.queues == "one":
            self.queues = [deque(entries)]
        else:
            streams = dict.fromkeys(entry.stream for entry in entries)
            self.queues = [deque(e for e in entries if e.stream == stream) for stream in streams]

    @property
    def queued(self) -> bool:
        return any(self.queues)

    def ready(self, entry: _Entry) -> bool:
        """Whether the head of a queue can go."""
        op = entry.op
        if op.what == "wait":
            behind = self.events.get(op.event, entry)
            return behind is None or (behind is not entry and behind.done)
        before = self.last.get(op.stream)
        return op.what == "record" or before is None or before.done

    def record(self, op: Op) -> None:
        """Note an event: it is there when its stream has done what it was given."""
        self.events[op.event] = self.last.get(op.stream)

    def has_room(self, entry: _Entry) -> bool:
        """Whether a kernel gets multiprocessors now."""
        if entry.stream == COMPUTE:
            return True
        busy = [e for e in self.running if e.stream == COMPUTE and e.resident and e.begun_s < entry.begun_s]
        if any(e.op.work is not None and e.op.work.kind in KERNELS for e in busy) and self.machine.persistent:
            return False
        return not busy or entry.stream.startswith(self.machine.high)

    def speed(self, entry: _Entry) -> float:
        """Share of its speed alone that a kernel has beside the batches that hold multiprocessors."""
        if entry.stream != COMPUTE:
            return 1.0
        held = sum(self.sms_of(e) for e in self.running if e.resident and e.stream != COMPUTE)
        return max(1, self.machine.sms - held) / self.machine.sms

    def sms_of(self, entry: _Entry) -> int:
        """Multiprocessors of a batch: one a channel, of the peer with most."""
        peers = [self.machine.channels[self.machine.crosses(m.src, m.dst)] for m in entry.messages]
        return max(peers, default=self.machine.channels[0])

    def stuck(self) -> str:
        heads = [f"{q[0].op.label} on {q[0].stream!r}" for q in self.queues if q]
        return f"rank {self.number}: at the head {heads}, under way {[e.op.label for e in self.running]}"


def _entries(trace: Trace, machine: Machine) -> Iterator[_Entry]:
    """Entries of the device's queue, with the host's time."""
    issued = 0.0
    for op in trace.ops:
        if op.what == "free":
            continue
        kind = op.work.kind if op.work is not None else ""
        for share in KERNELS.get(kind, (1.0,)):
            issued += machine.launch_s
            yield _Entry(op, issued, share)
