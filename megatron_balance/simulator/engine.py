"""The event engine: one phase of one attention call on clocks, every rank with its streams, every transfer with its share of the links.

The rules are the executor's. A rank's compute stream takes its steps in order. On CUDA (transport "streams", `runtime.streams`) each leg
of an exchange is one call on its stream: it begins when the stream's call before has ended, when the compute stream has come to its
start (unless the rank only passes on), and, routed, when the leg before it has ended on this rank. On gloo (transport "sockets",
`runtime.gloo`) each transfer is a call of its own: it begins when the compute stream has come to its start, and a piece is passed on
when it has come; what goes from one rank to another goes over one connection, in turn.

A transfer runs when both ends have begun; a call ends with the last of its transfers. Running transfers share links and NICs max-min
fairly, and slow the rank's kernels down by the SMs that they hold.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from megatron_balance.cost.base import Floats
from megatron_balance.passes.order import LEGS, Finish, Run, Start
from megatron_balance.simulator.collective import Taken
from megatron_balance.simulator.machine import Machine, fair_rates
from megatron_balance.simulator.phase import Collective, Phase, Place

Transport: TypeAlias = Literal["streams", "sockets"]
TRANSPORTS: tuple[Transport, ...] = ("streams", "sockets")

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


def play(phase: Phase, machine: Machine, enter_s: Floats, transport: Transport = "streams", *, trace: bool = False) -> Outcome:
    """Run a phase; `enter_s` [num_ranks]: when each rank enters it. `trace`: note what every stream does."""
    return _Engine(phase, machine, enter_s, transport, trace=trace).run()


@dataclass(slots=True)
class _Call:
    """A leg of an exchange on a rank.

    `waits`: for how many things, before it begins; `left`: how many of its transfers have not ended. `owned`: the rank sends or receives
    for itself; `brings`: something for this rank comes in. `then`: calls that wait for its end. `together`: which collective it is part of.
    """

    place: Place
    waits: int = 0
    left: int = 0
    begun_s: float = -1.0
    owned: bool = False
    brings: bool = False
    flows: list[int] = field(default_factory=list[int])
    then: list[_Call] = field(default_factory=list)  # pyright: ignore[reportUnknownVariableType]  a list of this class
    together: int = -1


@dataclass(slots=True)
class _Together:
    """A collective: the calls of its ranks, and for how many of them it waits."""

    taken: Taken
    calls: list[_Call]
    waits: int


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


_What: TypeAlias = Literal["enter", "step", "flow", "together"]
_Event: TypeAlias = tuple[float, int, _What, int, int]
"""Seconds, number (events of one time keep their order), what, of which rank, flow or collective, version."""


class _Engine:
    def __init__(self, phase: Phase, machine: Machine, enter_s: Floats, transport: Transport, *, trace: bool) -> None:
        self.phase, self.machine, self.transport, self.trace = phase, machine, transport, trace
        self.contention, self.call_s = machine.cost.contention, machine.cost.call_s
        self.now, self.count = 0.0, 0
        self.queue: list[_Event] = []
        self.ranks = [_Computing() for _ in range(machine.num_ranks)]
        self.end_s: list[float] = enter_s.tolist()
        self.occupied: list[Occupied] = []
        self.calls: dict[Place, _Call] = {}
        self.of_exchange: defaultdict[tuple[int, int], list[_Call]] = defaultdict(list)  # by (rank, exchange)
        self.arriving: defaultdict[tuple[int, int], int] = defaultdict(int)  # calls that still bring something
        self.passing_on: defaultdict[int, list[_Call]] = defaultdict(list)
        self.together: list[_Together] = []
        self._prepare_flows()
        self._prepare_calls()
        for rank, start in enumerate(self.end_s):
            self._push(start, "enter", rank)

    def _prepare_flows(self) -> None:
        flows = self.phase.flows
        a, b = (np.array([flow.a for flow in flows], dtype=np.int64), np.array([flow.b for flow in flows], dtype=np.int64))
        self.uses = self.machine.resources(a, b)
        self.crossing = [int(crosses) for crosses in self.machine.crosses(a, b).tolist()]
        self.alpha = self.machine.alpha_s(a, b).tolist()
        self.capacity = self.machine.capacity()
        self.bytes_moved = np.zeros(len(self.capacity))
        self.left = [float(flow.num_bytes) for flow in flows]
        self.rate, self.since = [0.0] * len(flows), [0.0] * len(flows)
        self.version, self.absent = [0] * len(flows), [2] * len(flows)  # ends that have not begun
        self.lines: defaultdict[tuple[int, int], deque[int]] = defaultdict(deque)  # flows between two ranks, on sockets
        self.running: defaultdict[int, set[int]] = defaultdict(set)  # flows, by resource
        self.changed: set[int] = set()  # resources of which the flows have changed

    def _prepare_calls(self) -> None:
        for index, flow in enumerate(self.phase.flows):
            for rank, place in zip((flow.a, flow.b), self._places(index), strict=True):
                call = self._call(place)
                call.flows.append(index)
                call.left += 1
                call.brings |= rank == flow.b == flow.dst
                call.owned |= rank in (flow.src, flow.dst)
        for each in self.phase.collectives:
            self._add_together(each)
        for call in self.calls.values():
            self.of_exchange[call.place[:2]].append(call)
            self.arriving[call.place[:2]] += call.brings
        if self.transport == "sockets":
            self._chain()
            return
        for rank, (steps, exchanges) in enumerate(zip(self.phase.steps, self.phase.exchanges, strict=True)):
            self._line_up(rank, [at for step, at in zip(steps, exchanges, strict=True) if isinstance(step, Start)])

    def _places(self, flow: int) -> tuple[Place, Place]:
        """The calls at both ends of a transfer."""
        places = self.phase.flows[flow].places
        if self.transport == "streams":
            return places
        (a, exchange, leg, stream), (b, *_) = places
        return (a, exchange, leg, f"{stream} {flow}"), (b, exchange, leg, f"{stream} {flow}")

    def _chain(self) -> None:
        """Let every call wait for the compute stream, or for the piece that it passes on."""
        for call in self.calls.values():
            call.waits = 1
            if not call.owned:
                self.passing_on[call.place[0]].append(call)
        came: dict[tuple[int, int, int, int], _Call] = {}
        for index, flow in enumerate(self.phase.flows):  # the hops of a piece follow one another
            leaving, arriving = (self.calls[place] for place in self._places(index))
            way = flow.exchange, flow.src, flow.dst, flow.piece
            if flow.a != flow.src:
                came[way].then.append(leaving)
                leaving.waits += 1
            came[way] = arriving

    def _call(self, place: Place) -> _Call:
        if place not in self.calls:
            self.calls[place] = _Call(place)
        return self.calls[place]

    def _add_together(self, each: Collective) -> None:
        calls: list[_Call] = []
        for rank in each.ranks:
            call = self._call((rank, each.exchange, "direct", each.stream))
            call.left, call.brings, call.owned, call.together = 1, True, True, len(self.together)
            calls.append(call)
        self.together.append(_Together(each.taken, calls, len(calls)))

    def _line_up(self, rank: int, started: Sequence[int]) -> None:
        """Let the calls of a rank wait for one another, stream by stream and leg by leg; and for the compute stream."""
        last: dict[str, _Call] = {}
        for exchange in started:
            before: dict[str, _Call] = {}
            for call in sorted(self.of_exchange[rank, exchange], key=_leg_order):
                _, _, leg, stream = call.place
                of = stream.partition(" ")[2]
                for earlier in (last.get(stream), before.get(of) if leg != "direct" else None):
                    if earlier is not None:
                        earlier.then.append(call)
                        call.waits += 1
                call.waits += 1
                if not call.owned:
                    self.passing_on[rank].append(call)
                last[stream] = call
                if leg != "direct":
                    before[of] = call

    # Time

    def run(self) -> Outcome:
        while self.queue:
            self.now = self.queue[0][0]
            while self.queue and self.queue[0][0] <= self.now * (1 + _SAME_TIME):
                self._take(*heapq.heappop(self.queue)[2:])
            self._share()
        stuck = [rank for rank, computing in enumerate(self.ranks) if computing.at < len(self.phase.steps[rank])]
        assert not stuck, f"ranks {stuck} wait for what nobody sends"
        busy = np.array([computing.busy_s for computing in self.ranks])
        return Outcome(np.array(self.end_s), busy, self.bytes_moved, self.occupied)

    def _push(self, at: float, what: _What, who: int, version: int = 0) -> None:
        self.count += 1
        heapq.heappush(self.queue, (at, self.count, what, who, version))

    def _take(self, what: _What, who: int, version: int) -> None:
        match what:
            case "enter":
                for call in self.passing_on[who]:
                    self._release(call)
                self._advance(who)
            case "step":
                if self.ranks[who].version == version:
                    self._step_done(who)
            case "flow":
                if self.version[who] == version:
                    self._flow_event(who)
            case "together":
                self.bytes_moved += self.together[who].taken.load
                for call in self.together[who].calls:
                    self._end_of_part(call)

    # The compute stream

    def _advance(self, rank: int) -> None:
        """Begin the next step, if there is one and what it waits for is there; steps that take no time are passed."""
        computing, steps = self.ranks[rank], self.phase.steps[rank]
        while computing.at < len(steps) and not computing.working:
            step = steps[computing.at]
            if isinstance(step, Finish) and self.arriving[rank, self.phase.exchanges[rank][computing.at]]:
                return
            computing.left_s = self.phase.seconds[rank][computing.at]
            if computing.left_s > 0:
                computing.working = True
                computing.start_s = computing.since_s = self.now
                self._pace(rank)
            else:
                self._passed(rank)
        if computing.at == len(steps):
            self._ended(rank)

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
        self._push(self.now + max(0.0, computing.left_s) / computing.speed, "step", rank, computing.version)

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
        self._advance(rank)

    def _passed(self, rank: int) -> None:
        computing = self.ranks[rank]
        step, exchange = self.phase.steps[rank][computing.at], self.phase.exchanges[rank][computing.at]
        computing.at += 1
        if isinstance(step, Start):
            for call in self.of_exchange[rank, exchange]:
                if call.owned:
                    self._release(call)

    # Calls

    def _release(self, call: _Call) -> None:
        """One thing less that the call waits for."""
        call.waits -= 1
        if call.waits:
            return
        call.begun_s = self.now
        if call.together >= 0:
            group = self.together[call.together]
            group.waits -= 1
            if not group.waits:
                self._push(self.now + self.call_s + group.taken.seconds, "together", call.together)
        for flow in call.flows:
            self.absent[flow] -= 1
            if not self.absent[flow]:
                self._go(flow)

    def _go(self, flow: int) -> None:
        """Begin a transfer; on sockets when the connection is free."""
        if self.transport == "sockets":
            line = self.lines[self.phase.flows[flow].a, self.phase.flows[flow].b]
            line.append(flow)
            if line[0] != flow:
                return
        self._push(self.now + self.call_s + self.alpha[flow], "flow", flow)

    def _next(self, flow: int) -> None:
        """Begin what waited for the connection of a transfer that has ended."""
        line = self.lines[self.phase.flows[flow].a, self.phase.flows[flow].b]
        line.popleft()
        if line:
            self._push(self.now + self.call_s + self.alpha[line[0]], "flow", line[0])

    def _end_of_part(self, call: _Call) -> None:
        """One transfer of the call has ended, or its collective has."""
        call.left -= 1
        if call.left:
            return
        rank, exchange, leg, stream = call.place
        if self.trace:
            self.occupied.append(Occupied(rank, stream, leg, exchange, call.begun_s, self.now))
        self._ended(rank)
        for other in call.then:
            self._release(other)
        if call.brings:
            self.arriving[rank, exchange] -= 1
            computing = self.ranks[rank]
            if not computing.working and computing.at:
                self._advance(rank)

    def _ended(self, rank: int) -> None:
        self.end_s[rank] = max(self.end_s[rank], self.now)

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
            self.bytes_moved[resource] += self.phase.flows[flow].num_bytes
        self.left[flow] = 0.0
        if self.transport == "sockets":
            self._next(flow)
        for place in self._places(flow):
            self._end_of_part(self.calls[place])

    def _hold(self, flow: int, change: int) -> None:
        if not self.contention.num_sms:
            return
        for rank in (self.phase.flows[flow].a, self.phase.flows[flow].b):
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
        self._push(self.now + max(0.0, self.left[flow]) / rate, "flow", flow, self.version[flow])

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


def _leg_order(call: _Call) -> tuple[int, str]:
    _, _, leg, stream = call.place
    return ("direct", *LEGS).index(leg), stream
