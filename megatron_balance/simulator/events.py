"""The clocks of the event engine: every rank's compute stream.

A rank's compute stream takes its steps in order. What a step waits for, and how bytes travel, is
the transport's (`simulator.streams`, `simulator.emulated.sockets`). Transfers under way slow their
ranks' kernels by the SMs that they hold.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np

from megatron_balance.analysis.clocks import Occupied, Outcome
from megatron_balance.analysis.machine import Machine
from megatron_balance.analysis.trace_format import ATTENTION, COMPUTE, PACK, PLACE, WAIT
from megatron_balance.compile.order import Finish, RunLaunches, Start
from megatron_balance.cost.base import Floats
from megatron_balance.simulator.phase import Flow, SimulatedPhase

_SAME_TIME = 1e-12
"""Events this close, relative to their time, happen at once."""


@dataclass(slots=True)
class _Computing:
    """The compute stream of a rank.

    `at`: its step; `left_s`: seconds of that step that are left at full speed, while it is
    `working`. `held`: transfers under way inside the node, and between nodes. `waits_s`: since when it
    waits for an exchange; None: it does not.
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
    waits_s: float | None = None


_What: TypeAlias = Literal["enter", "issue", "step", "flow", "other"]
_Event: TypeAlias = tuple[float, int, _What, int, int]
"""Seconds, number (events of one time keep their order), kind, the rank, flow or other thing it is
of, version.
"""


class Events:
    """One phase on clocks. A transport is a subclass that implements what raises
    NotImplementedError here.
    """

    def __init__(
        self, phase: SimulatedPhase, flows: Sequence[Flow], machine: Machine, enter_s: Floats, *, trace: bool
    ) -> None:
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
        self.issued_s: list[list[float] | None] = [None] * machine.num_ranks
        """By rank and step, when its host has issued it; None: before the device gets there."""
        for rank, start in enumerate(self.end_s):
            self.push(start, "enter", rank)

    # Implemented by a transport

    def entered(self, rank: int) -> None:
        """Begin the phase on a rank."""
        raise NotImplementedError

    def started(self, rank: int, exchange: int) -> None:
        """Issue an exchange: a rank's compute stream has come to its start."""
        raise NotImplementedError

    def waits(self, rank: int, exchange: int) -> bool:
        """Whether a rank's compute stream cannot pass the end of an exchange yet."""
        raise NotImplementedError

    def flow_event(self, flow: int, version: int) -> None:
        """Handle an event of a transfer."""
        raise NotImplementedError

    def other(self, which: int) -> None:
        """Handle an event of the transport's own."""
        raise NotImplementedError

    def settle(self) -> None:
        """Act once all events of one time have been handled."""

    # Time

    def run(self) -> Outcome:
        """Handle events until none is left."""
        while self.queue:
            self.now = self.queue[0][0]
            while self.queue and self.queue[0][0] <= self.now * (1 + _SAME_TIME):
                self._take(*heapq.heappop(self.queue)[2:])
            self.settle()
        stuck = [rank for rank, computing in enumerate(self.ranks) if computing.at < len(self.phase.steps[rank])]
        assert not stuck, f"ranks {stuck} wait for what nobody sends"
        busy = np.array([computing.busy_s for computing in self.ranks])
        return Outcome(np.array(self.end_s), busy, self.bytes_moved, self.occupied)

    def push(self, at: float, what: _What, who: int, version: int = 0) -> None:
        """Queue an event."""
        self.count += 1
        heapq.heappush(self.queue, (at, self.count, what, who, version))

    def ended(self, rank: int) -> None:
        """Note that something of a rank ends now."""
        self.end_s[rank] = max(self.end_s[rank], self.now)

    def sm_wait_s(self, rank: int, *, prioritised: bool) -> float:
        """Seconds until a communication kernel that is launched now gets SMs from the attention
        kernel at work on a rank.
        """
        computing = self.ranks[rank]
        if not (self.contention.waits and computing.working):
            return 0.0
        left_s = max(0.0, computing.left_s / computing.speed - (self.now - computing.since_s))
        block_s = self.phase.blocks_s[rank][computing.at] / computing.speed
        return self.contention.wait_s(left_s, block_s, prioritised=prioritised) if block_s else 0.0

    def hold(self, flow: int, change: int) -> None:
        """Begin (1) or end (-1) a transfer's hold on SMs of its ranks."""
        if not self.contention.num_sms:
            return
        for rank in (self.flows[flow].a, self.flows[flow].b):
            self.ranks[rank].held[self.crossing[flow]] += change
            self._pace(rank)

    def has_moved(self, flow: int) -> None:
        """Count the bytes of a transfer that is done."""
        for resource in self.uses[flow].tolist():
            self.bytes_moved[resource] += self.flows[flow].num_bytes

    def _take(self, what: _What, who: int, version: int) -> None:
        match what:
            case "enter":
                self.entered(who)
                self.advance(who)
            case "issue":
                if not self.ranks[who].working:
                    self.advance(who)
            case "step":
                if self.ranks[who].version == version:
                    self._step_done(who)
            case "flow":
                self.flow_event(who, version)
            case "other":
                self.other(who)

    # The compute stream

    def advance(self, rank: int) -> None:
        """Begin the next step, if there is one and what it waits for is there; steps that take no
        time are passed.
        """
        computing, steps = self.ranks[rank], self.phase.steps[rank]
        while computing.at < len(steps) and not computing.working:
            step, issued_s = steps[computing.at], self.issued_s[rank]
            if issued_s is not None and issued_s[computing.at] > self.now * (1 + _SAME_TIME):
                self.push(issued_s[computing.at], "issue", rank)
                return
            if isinstance(step, Finish) and self.waits(rank, self.phase.exchanges[rank][computing.at]):
                computing.waits_s = self.now if computing.waits_s is None else computing.waits_s
                return
            if computing.waits_s is not None:
                self._note(rank, WAIT, computing.waits_s)
                computing.waits_s = None
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
        """Go on with a rank's compute stream: something that it may wait for has come."""
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
        step = self.phase.steps[rank][computing.at]
        self._note(rank, ATTENTION if isinstance(step, RunLaunches) else PACK if isinstance(step, Start) else PLACE)
        self._passed(rank)
        self.advance(rank)

    def _note(self, rank: int, name: str, start_s: float | None = None) -> None:
        """Add what the compute stream did until now to the trace, if there is one."""
        if self.trace:
            computing = self.ranks[rank]
            exchange, zone = self.phase.exchanges[rank][computing.at], self.phase.zone(rank, computing.at)
            begun_s = computing.start_s if start_s is None else start_s
            self.occupied.append(Occupied(rank, COMPUTE, name, exchange, begun_s, self.now, zone))

    def _passed(self, rank: int) -> None:
        computing = self.ranks[rank]
        step, exchange = self.phase.steps[rank][computing.at], self.phase.exchanges[rank][computing.at]
        computing.at += 1
        if isinstance(step, Start):
            self.started(rank, exchange)
