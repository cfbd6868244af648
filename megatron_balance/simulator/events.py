"""The clocks of the event engine: every rank's compute stream, and every transfer with its share of the links.

A rank's compute stream takes its steps in order. What a step waits for, and when a transfer begins, is the transport's
(`simulator.streams`, `simulator.sockets`). Transfers under way share links and NICs max-min fairly, and slow their ranks' kernels by
the SMs that they hold.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from megatron_balance.cost.base import Floats
from megatron_balance.passes.order import Finish, Run, Start
from megatron_balance.simulator.machine import Machine, fair_rates
from megatron_balance.simulator.phase import Flow, Phase

_SAME_TIME = 1e-12
"""Events this close, relative to their time, happen at once."""


class Occupied(NamedTuple):
    """What a stream of a rank did when. `name`: "run", "pack", "place", or the leg of an exchange; `exchange`: -1 for a launch."""

    rank: int
    stream: str
    name: str
    exchange: int
    start_s: float
    stop_s: float


@dataclass(slots=True)
class Outcome:
    """When each rank is done, and what was busy for how long: by rank `compute_s`; by resource `bytes_moved` (`Machine.resources`)."""

    end_s: Floats
    compute_s: Floats
    bytes_moved: Floats
    occupied: list[Occupied] = field(default_factory=list[Occupied])


@dataclass(slots=True)
class _Computing:
    """The compute stream of a rank: at which step it is and, where it is at work, how many seconds of it are left at full speed.

    `held`: transfers under way inside the node, and between nodes.
    """

    at: int = 0
    working: bool = False
    left_s: float = 0.0
    speed: float = 1.0
    start_s: float = 0.0
    since_s: float = 0.0
    busy_s: float = 0.0
    version: int = 0
    held: list[int] = field(default_factory=lambda: [0, 0])


_What: TypeAlias = Literal["enter", "step", "flow", "other"]
_Event: TypeAlias = tuple[float, int, _What, int, int]
"""Seconds, number (events of one time keep their order), what, of which rank, flow or anything else, version."""


class Events:
    """One phase on clocks. A transport says what happens where this class raises NotImplementedError."""

    def __init__(self, phase: Phase, flows: Sequence[Flow], machine: Machine, enter_s: Floats, *, trace: bool) -> None:
        self.phase, self.flows, self.machine, self.trace = phase, flows, machine, trace
        self.contention, self.call_s = machine.cost.contention, machine.cost.call_s
        self.now, self.count = 0.0, 0
        self.queue: list[_Event] = []
        self.ranks = [_Computing() for _ in range(machine.num_ranks)]
        self.end_s: list[float] = enter_s.tolist()
        self.occupied: list[Occupied] = []
        a, b = (np.array(ends, dtype=np.int64) for ends in ([flow.a for flow in flows], [flow.b for flow in flows]))
        self.uses = machine.resources(a, b)
        self.crossing = [int(crosses) for crosses in machine.crosses(a, b).tolist()]
        self.alpha_s: list[float] = machine.alpha_s(a, b).tolist()
        self.capacity = machine.capacity()
        self.bytes_moved = np.zeros(len(self.capacity))
        self.left = [float(flow.num_bytes) for flow in flows]
        self.rate, self.since, self.version = [0.0] * len(flows), [0.0] * len(flows), [0] * len(flows)
        self.running: defaultdict[int, set[int]] = defaultdict(set)  # flows, by resource
        self.changed: set[int] = set()  # resources of which the flows have changed
        for rank, start in enumerate(self.end_s):
            self.push(start, "enter", rank)

    # What a transport says

    def entered(self, rank: int) -> None:
        """A rank has come to the phase."""
        raise NotImplementedError

    def started(self, rank: int, exchange: int) -> None:
        """A rank's compute stream has come to the start of an exchange."""
        raise NotImplementedError

    def waits(self, rank: int, exchange: int) -> bool:
        """Whether a rank's compute stream cannot pass the end of an exchange yet."""
        raise NotImplementedError

    def carried(self, flow: int) -> None:
        """The last byte of a transfer has come."""
        raise NotImplementedError

    def other(self, which: int) -> None:
        """An event of the transport's own."""
        raise NotImplementedError

    # Time

    def run(self) -> Outcome:
        """Everything until nothing is left to happen."""
        while self.queue:
            self.now = self.queue[0][0]
            while self.queue and self.queue[0][0] <= self.now * (1 + _SAME_TIME):
                self._take(*heapq.heappop(self.queue)[2:])
            self._share()
        stuck = [rank for rank, computing in enumerate(self.ranks) if computing.at < len(self.phase.steps[rank])]
        assert not stuck, f"ranks {stuck} wait for what nobody sends"
        busy = np.array([computing.busy_s for computing in self.ranks])
        return Outcome(np.array(self.end_s), busy, self.bytes_moved, self.occupied)

    def push(self, at: float, what: _What, who: int, version: int = 0) -> None:
        """Let something happen at a time."""
        self.count += 1
        heapq.heappush(self.queue, (at, self.count, what, who, version))

    def ended(self, rank: int) -> None:
        """Something of a rank has ended now."""
        self.end_s[rank] = max(self.end_s[rank], self.now)

    def _take(self, what: _What, who: int, version: int) -> None:
        match what:
            case "enter":
                self.entered(who)
                self.advance(who)
            case "step":
                if self.ranks[who].version == version:
                    self._step_done(who)
            case "flow":
                if self.version[who] == version:
                    self._flow_event(who)
            case "other":
                self.other(who)

    # The compute stream

    def advance(self, rank: int) -> None:
        """Begin the next step, if there is one and what it waits for is there; steps that take no time are passed."""
        computing, steps = self.ranks[rank], self.phase.steps[rank]
        while computing.at < len(steps) and not computing.working:
            step = steps[computing.at]
            if isinstance(step, Finish) and self.waits(rank, self.phase.exchanges[rank][computing.at]):
                return
            computing.left_s = self.phase.seconds[rank][computing.at]
            if computing.left_s > 0:
                computing.working = True
                computing.start_s = computing.since_s = self.now
                self._pace(rank)
            else:
                self._passed(rank)
        if computing.at == len(steps):
            self.ended(rank)

    def retry(self, rank: int) -> None:
        """Something that a rank's compute stream may wait for has come."""
        computing = self.ranks[rank]
        if not computing.working and computing.at:
            self.advance(rank)

    def _pace(self, rank: int) -> None:
        """Set the speed of the step at work by the SMs that transfers hold now."""
        computing = self.ranks[rank]
        if not computing.working:
            return
        computing.left_s -= (self.now - computing.since_s) * computing.speed
        intra, inter = computing.held
        computing.speed = 1 / self.contention.slowdown(intra=intra > 0, inter=inter > 0)
        computing.since_s = self.now
        computing.version += 1
        self.push(self.now + max(0.0, computing.left_s) / computing.speed, "step", rank, computing.version)

    def _step_done(self, rank: int) -> None:
        computing = self.ranks[rank]
        computing.working = False
        computing.version += 1
        computing.busy_s += self.now - computing.start_s
        if self.trace:
            step = self.phase.steps[rank][computing.at]
            name = "run" if isinstance(step, Run) else "pack" if isinstance(step, Start) else "place"
            exchange = self.phase.exchanges[rank][computing.at]
            self.occupied.append(Occupied(rank, "compute", name, exchange, computing.start_s, self.now))
        self._passed(rank)
        self.advance(rank)

    def _passed(self, rank: int) -> None:
        computing = self.ranks[rank]
        step, exchange = self.phase.steps[rank][computing.at], self.phase.exchanges[rank][computing.at]
        computing.at += 1
        if isinstance(step, Start):
            self.started(rank, exchange)

    # Transfers

    def _flow_event(self, flow: int) -> None:
        """The first byte of a transfer goes, or the last one has come."""
        starts = not self.rate[flow] and self.left[flow] > 0
        ends = self.uses[flow].tolist()
        for resource in ends:
            (self.running[resource].add if starts else self.running[resource].remove)(flow)
        self.changed.update(ends)
        self.version[flow] += 1
        self._hold(flow, 1 if starts else -1)
        if starts:
            self.since[flow] = self.now
            return
        for resource in ends:
            self.bytes_moved[resource] += self.flows[flow].num_bytes
        self.left[flow] = 0.0
        self.carried(flow)

    def _hold(self, flow: int, change: int) -> None:
        if not self.contention.num_sms:
            return
        for rank in (self.flows[flow].a, self.flows[flow].b):
            self.ranks[rank].held[self.crossing[flow]] += change
            self._pace(rank)

    def _share(self) -> None:
        """Share links and NICs anew among the flows that the changes since the last time reach."""
        while self.changed:
            flows = self._reached(self.changed.pop())
            if flows:
                uses = self.uses[flows]
                resources, place = np.unique(uses, return_inverse=True)
                self.changed.difference_update(resources.tolist())
                alone = len(flows) == 1
                rates = (
                    [float(self.capacity[uses].min())]
                    if alone
                    else fair_rates(place.reshape(uses.shape), self.capacity[resources]).tolist()
                )
                for flow, rate in zip(flows, rates, strict=True):
                    self._set_rate(flow, rate)

    def _set_rate(self, flow: int, rate: float) -> None:
        if rate == self.rate[flow]:
            return
        self.left[flow] -= (self.now - self.since[flow]) * self.rate[flow]
        self.since[flow], self.rate[flow] = self.now, rate
        self.version[flow] += 1
        self.push(self.now + max(0.0, self.left[flow]) / rate, "flow", flow, self.version[flow])

    def _reached(self, resource: int) -> list[int]:
        """Running flows that share a resource with those of `resource`, or with one that does, and so on."""
        found: set[int] = set()
        seen, waiting = {resource}, [resource]
        while waiting:
            for flow in self.running[waiting.pop()] - found:
                found.add(flow)
                for other in self.uses[flow].tolist():
                    if other not in seen:
                        seen.add(other)
                        waiting.append(other)
        return sorted(found)
