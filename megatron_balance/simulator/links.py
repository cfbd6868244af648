"""Transfers that share links and NICs as fabrics of GPUs do: max-min fairly at every moment,
whatever their number and size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from megatron_balance.cost.base import Floats
from megatron_balance.simulator.events import Events
from megatron_balance.simulator.machine import Machine, fair_rates
from megatron_balance.simulator.phase import Flow, SimulatedPhase


class Links(Events):
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
        """Running flows that share a resource with those of `resource`, or with one that does, and
        so on.
        """
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
