"""The clocks of the event engine: every rank's compute stream.

A rank's compute stream takes its steps in order. What a step waits for, and how bytes travel, is
the transport's (`StreamsPhase`, `simulator.emulated`). Transfers under way slow their
ranks' kernels by the SMs that they hold.
"""

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np

from megatron_balance.analysis.clocks import Outcome
from megatron_balance.analysis.machine import Machine, fair_rates
from megatron_balance.analysis.tables import Taken
from megatron_balance.analysis.trace_format import ATTENTION, COMPUTE, PACK, PLACE, WAIT, TrackSpan
from megatron_balance.compile.order import LEGS, Finish, RunLaunches, Start
from megatron_balance.ir.arrays import Floats
from megatron_balance.simulator.phase import Flow, GroupExchange, Place, SimulatedPhase

# Events this close, relative to their time, happen at once.
_SAME_TIME = 1e-12


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
# Seconds, number (events of one time keep their order), kind, the rank, flow or other thing it is
# of, version.
_Event: TypeAlias = tuple[float, int, _What, int, int]


class Events:
    """One phase on clocks. Transports are subclasses, with what raises NotImplementedError here."""

    def __init__(
        self, phase: SimulatedPhase, flows: Sequence[Flow], machine: Machine, enter_s: Floats, *, trace: bool
    ) -> None:
        self.phase, self.flows, self.machine, self.trace = phase, flows, machine, trace
        self.contention, self.call_s = machine.cost.contention, machine.cost.call_s
        self.now, self.count = 0.0, 0
        self.queue: list[_Event] = []
        self.ranks = [_Computing() for _ in range(machine.num_ranks)]
        self.end_s: list[float] = enter_s.tolist()
        self.occupied: list[TrackSpan] = []
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
        """Seconds until a communication kernel gets SMs from the attention kernel at work."""
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
        """Begin the next step if what it waits for is there; pass steps that take no time."""
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
        # Set the speed of the step at work by the SMs that transfers hold now.
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
        # Add what the compute stream did until now to the trace, if there is one.
        if self.trace:
            computing = self.ranks[rank]
            exchange, zone = self.phase.exchanges[rank][computing.at], self.phase.zone(rank, computing.at)
            begun_s = computing.start_s if start_s is None else start_s
            self.occupied.append(TrackSpan(rank, COMPUTE, name, begun_s, self.now, exchange=exchange, zone=zone))

    def _passed(self, rank: int) -> None:
        computing = self.ranks[rank]
        step, exchange = self.phase.steps[rank][computing.at], self.phase.exchanges[rank][computing.at]
        computing.at += 1
        if isinstance(step, Start):
            self.started(rank, exchange)


# Exchanges on CUDA streams, as `runtime.transport` issues them.
#
# Each leg of an exchange is one call on its stream: it begins when the stream's call before has
# ended, when the compute stream has come to its start (unless the rank only passes it on), and,
# routed, when the leg before it has ended on this rank. A transfer runs when both ends have begun:
# call, alpha, then its bytes; a call ends with the last of its transfers.
#
# Where transfers wait for SMs, a call that is launched while its rank attends begins when a thread
# block has ended if it goes between nodes, since these streams have a higher priority
# (`runtime.groups`), else when the kernel's last blocks run.


@dataclass(slots=True)
class _ExchangeLeg:
    """A leg of an exchange on a rank.

    `waits`: for how many things, before it begins; `left`: how many of its transfers have not
    ended. `owned`: the rank sends or receives for itself; `brings`: something for this rank comes
    in. `then`: calls that wait for its end. `together`: which collective it is part of.
    """

    place: Place
    waits: int = 0
    left: int = 0
    begun_s: float = -1.0
    owned: bool = False
    brings: bool = False
    flows: list[int] = field(default_factory=list[int])
    then: "list[_ExchangeLeg]" = field(default_factory=list)  # pyright: ignore[reportUnknownVariableType]  a list of this class
    together: int = -1


_LEG_ORDER = {leg: number for number, leg in enumerate(("direct", *LEGS))}


@dataclass(slots=True)
class _JointCall:
    """A collective: the calls of its ranks, and for how many of them it waits."""

    taken: Taken
    calls: list[_ExchangeLeg]
    waits: int


class StreamsPhase(Events):
    """A phase on clocks, its exchanges on streams; transfers share links and NICs max-min fairly."""

    def __init__(self, phase: SimulatedPhase, machine: Machine, enter_s: Floats, *, trace: bool) -> None:
        flows = phase.flows
        super().__init__(phase, flows, machine, enter_s, trace=trace)
        self.left = [float(flow.num_bytes) for flow in flows]
        self.rate, self.since, self.version = [0.0] * len(flows), [0.0] * len(flows), [0] * len(flows)
        self.running: defaultdict[int, set[int]] = defaultdict(set)  # flows, by resource
        self.changed: set[int] = set()  # resources of which the flows have changed
        self.absent = [2] * len(phase.flows)  # ends that have not begun
        self.calls: dict[Place, _ExchangeLeg] = {}
        # by (rank, exchange)
        self.of_exchange: defaultdict[tuple[int, int], list[_ExchangeLeg]] = defaultdict(list)
        # calls that still bring something
        self.arriving: defaultdict[tuple[int, int], int] = defaultdict(int)
        self.passing_on: defaultdict[int, list[_ExchangeLeg]] = defaultdict(list)
        self.together: list[_JointCall] = []
        self.waiting: list[_ExchangeLeg] = []  # calls that were launched and wait for SMs
        for index, flow in enumerate(phase.flows):
            for rank, place in zip((flow.a, flow.b), flow.places, strict=True):
                call = self.calls.setdefault(place, _ExchangeLeg(place))
                call.flows.append(index)
                call.left += 1
                call.brings |= rank == flow.b == flow.dst
                call.owned |= rank in (flow.src, flow.dst)
        for each in phase.collectives:
            self._add_together(each)
        for call in self.calls.values():
            self.of_exchange[call.place[:2]].append(call)
            self.arriving[call.place[:2]] += call.brings
        for rank, (steps, exchanges) in enumerate(zip(phase.steps, phase.exchanges, strict=True)):
            self._line_up(rank, [at for step, at in zip(steps, exchanges, strict=True) if isinstance(step, Start)])

    def _add_together(self, each: GroupExchange) -> None:
        calls: list[_ExchangeLeg] = []
        for rank in each.ranks:
            place: Place = (rank, each.exchange, "direct", each.stream)
            call = self.calls.setdefault(place, _ExchangeLeg(place))
            call.left, call.brings, call.owned, call.together = 1, True, True, len(self.together)
            calls.append(call)
        self.together.append(_JointCall(each.taken(self.machine), calls, len(calls)))

    def _line_up(self, rank: int, started: Sequence[int]) -> None:
        # Line up a rank's calls, stream by stream and leg by leg, and behind the compute stream.
        last: dict[str, _ExchangeLeg] = {}
        for exchange in started:
            before: dict[str, _ExchangeLeg] = {}
            for call in sorted(
                self.of_exchange[rank, exchange], key=lambda call: (_LEG_ORDER[call.place[2]], call.place[3])
            ):
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

    def entered(self, rank: int) -> None:
        """Release what the rank passes on for others: it does not wait for the rank's own work."""
        for call in self.passing_on[rank]:
            self._release(call)

    def started(self, rank: int, exchange: int) -> None:
        """Release the calls of an exchange from the compute stream."""
        for call in self.of_exchange[rank, exchange]:
            if call.owned:
                self._release(call)

    def waits(self, rank: int, exchange: int) -> bool:
        """Whether something that the exchange brings has not come."""
        return self.arriving[rank, exchange] > 0

    def flow_event(self, flow: int, version: int) -> None:
        """Start a transfer, or end it."""
        if self.version[flow] != version:
            return
        starts = not self.rate[flow] and self.left[flow] > 0
        ends = self.uses[flow].tolist()
        for resource in ends:
            (self.running[resource].add if starts else self.running[resource].remove)(flow)
        self.changed.update(ends)
        self.version[flow] += 1
        self.hold(flow, 1 if starts else -1)
        if starts:
            self.since[flow] = self.now
            return
        self.has_moved(flow)
        self.left[flow] = 0.0
        for place in self.flows[flow].places:
            self._end_of_part(self.calls[place])

    def settle(self) -> None:
        """Share links and NICs anew among the flows that the changes since the last time reach."""
        while self.changed:
            flows = self._reached(self.changed.pop())
            if flows:
                uses = self.uses[flows]
                resources, place = np.unique(uses, return_inverse=True)
                self.changed.difference_update(resources.tolist())
                if len(flows) == 1:
                    rates = [float(self.capacity[uses].min())]
                else:
                    rates = fair_rates(place.reshape(uses.shape), self.capacity[resources]).tolist()
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
        # Running flows that share a resource with those of `resource`, directly or through others.
        reached: set[int] = set()
        seen, waiting = {resource}, [resource]
        while waiting:
            for flow in self.running[waiting.pop()] - reached:
                reached.add(flow)
                for other in self.uses[flow].tolist():
                    if other not in seen:
                        seen.add(other)
                        waiting.append(other)
        return sorted(reached)

    def other(self, which: int) -> None:
        """End a collective; numbers below 0: begin a call that waited for SMs."""
        if which < 0:
            self._begin(self.waiting[-1 - which])
            return
        self.bytes_moved += self.together[which].taken.load
        for call in self.together[which].calls:
            self._end_of_part(call)

    def _release(self, call: _ExchangeLeg) -> None:
        # Take away one thing that a call waits for, and begin it after the last.
        call.waits -= 1
        if call.waits:
            return
        rank, _, _, stream = call.place
        wait_s = self.sm_wait_s(rank, prioritised=stream.startswith("inter_node"))
        if not wait_s:
            self._begin(call)
            return
        self.waiting.append(call)
        self.push(self.now + wait_s, "other", -len(self.waiting))

    def _begin(self, call: _ExchangeLeg) -> None:
        call.begun_s = self.now
        if call.together >= 0:
            group = self.together[call.together]
            group.waits -= 1
            if not group.waits:
                self.push(self.now + self.call_s + group.taken.seconds, "other", call.together)
        for flow in call.flows:
            self.absent[flow] -= 1
            if not self.absent[flow]:
                self.push(self.now + self.call_s + self.alpha_s[flow], "flow", flow)

    def _end_of_part(self, call: _ExchangeLeg) -> None:
        # End one transfer of a call, or its collective.
        call.left -= 1
        if call.left:
            return
        rank, exchange, leg, stream = call.place
        if self.trace:
            self.occupied.append(TrackSpan(rank, stream, leg, call.begun_s, self.now, exchange=exchange))
        self.ended(rank)
        for other in call.then:
            self._release(other)
        if call.brings:
            self.arriving[rank, exchange] -= 1
            self.retry(rank)
