"""Exchanges on CUDA streams, as `runtime.transport.streams` issues them.

Each leg of an exchange is one call on its stream: it begins when the stream's call before has
ended, when the compute stream has come to its start (unless the rank only passes it on), and,
routed, when the leg before it has ended on this rank. A transfer runs when both ends have begun:
call, alpha, then its bytes; a call ends with the last of its transfers.

Where transfers wait for SMs, a call that is launched while its rank attends begins when a thread
block has ended if it goes between nodes, since these streams have a higher priority
(`runtime.groups`), else when the kernel's last blocks run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron_balance.analysis.clocks import Occupied
from megatron_balance.analysis.launches import Taken
from megatron_balance.analysis.machine import Machine, fair_rates
from megatron_balance.compile.order import LEGS, Start
from megatron_balance.cost.base import Floats
from megatron_balance.simulator.events import Events
from megatron_balance.simulator.phase import Flow, GroupExchange, Place, SimulatedPhase


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
    then: list[_ExchangeLeg] = field(default_factory=list)  # pyright: ignore[reportUnknownVariableType]  a list of this class
    together: int = -1


@dataclass(slots=True)
class _JointCall:
    """A collective: the calls of its ranks, and for how many of them it waits."""

    taken: Taken
    calls: list[_ExchangeLeg]
    waits: int


class _SharedLinks(Events):
    """A phase whose transfers share links and NICs max-min fairly.

    A transport pushes an event "flow" when a transfer's first byte may go; `carried` is called when
    its last one has come.
    """

    def __init__(
        self, phase: SimulatedPhase, flows: Sequence[Flow], machine: Machine, enter_s: Floats, *, trace: bool
    ) -> None:
        super().__init__(phase, flows, machine, enter_s, trace=trace)
        self.left = [float(flow.num_bytes) for flow in flows]
        self.rate, self.since, self.version = [0.0] * len(flows), [0.0] * len(flows), [0] * len(flows)
        self.running: defaultdict[int, set[int]] = defaultdict(set)  # flows, by resource
        self.changed: set[int] = set()  # resources of which the flows have changed

    def carried(self, flow: int) -> None:
        """Act on the arrival of a transfer's last byte."""
        raise NotImplementedError

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
        self.carried(flow)

    def settle(self) -> None:
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
        """Running flows that share a resource with those of `resource`, directly or through others."""
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


class StreamsPhase(_SharedLinks):
    """A phase on clocks, its exchanges on streams."""

    def __init__(self, phase: SimulatedPhase, machine: Machine, enter_s: Floats, *, trace: bool) -> None:
        super().__init__(phase, phase.flows, machine, enter_s, trace=trace)
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
                call = self._call(place)
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

    def _call(self, place: Place) -> _ExchangeLeg:
        if place not in self.calls:
            self.calls[place] = _ExchangeLeg(place)
        return self.calls[place]

    def _add_together(self, each: GroupExchange) -> None:
        calls: list[_ExchangeLeg] = []
        for rank in each.ranks:
            call = self._call((rank, each.exchange, "direct", each.stream))
            call.left, call.brings, call.owned, call.together = 1, True, True, len(self.together)
            calls.append(call)
        self.together.append(_JointCall(each.taken(self.machine), calls, len(calls)))

    def _line_up(self, rank: int, started: Sequence[int]) -> None:
        """Line up a rank's calls, stream by stream and leg by leg, and behind the compute stream."""
        last: dict[str, _ExchangeLeg] = {}
        for exchange in started:
            before: dict[str, _ExchangeLeg] = {}
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

    def carried(self, flow: int) -> None:
        """End a transfer in the calls at both its ends."""
        for place in self.flows[flow].places:
            self._end_of_part(self.calls[place])

    def other(self, which: int) -> None:
        """End a collective; numbers below 0: begin a call that waited for SMs."""
        if which < 0:
            self._begin(self.waiting[-1 - which])
            return
        self.bytes_moved += self.together[which].taken.load
        for call in self.together[which].calls:
            self._end_of_part(call)

    def _release(self, call: _ExchangeLeg) -> None:
        """Take away one thing that a call waits for, and begin it after the last."""
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
        """End one transfer of a call, or its collective."""
        call.left -= 1
        if call.left:
            return
        rank, exchange, leg, stream = call.place
        if self.trace:
            self.occupied.append(Occupied(rank, stream, leg, exchange, call.begun_s, self.now))
        self.ended(rank)
        for other in call.then:
            self._release(other)
        if call.brings:
            self.arriving[rank, exchange] -= 1
            self.retry(rank)


def _leg_order(call: _ExchangeLeg) -> tuple[int, str]:
    _, _, leg, stream = call.place
    return ("direct", *LEGS).index(leg), stream
