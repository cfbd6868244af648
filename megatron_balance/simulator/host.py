"""The hosts' clocks: a device begins nothing before its host has issued it.

A host issues the steps of a phase one after the other and waits for no result. In the layers of a
step it is ahead of its device as long as it issues a layer in less time than the layer takes: then it
holds nothing up. Where it takes longer, it begins to issue a layer when the device begins it, and the
device waits for it. So a phase is run without hosts first, and again with those that are behind.

Counted is what attention's own code issues; the modules outside attention are not.
"""

from __future__ import annotations

from collections import Counter
from itertools import accumulate

import numpy as np

from megatron_balance.compile.order import Finish, RunLaunches, Start, Step
from megatron_balance.cost.base import LAUNCHES_OF_RUN, Floats, Host
from megatron_balance.simulator.phase import SimulatedPhase


def issue_s(phase: SimulatedPhase, host: Host) -> list[list[float]]:
    """Seconds from when a host begins the phase until each step is issued, by rank and step.

    A start issues a group call for each of its legs on the rank, and packs before if there is
    anything to pack; an end unpacks.
    """
    places = {place for flow in phase.flows for place in flow.places}
    calls = Counter((rank, exchange) for rank, exchange, _, _ in places)
    messages = Counter((rank, flow.exchange) for flow in phase.flows for rank in (flow.a, flow.b))
    for group in phase.collectives:
        calls.update((rank, group.exchange) for rank in group.ranks)

    def step_s(rank: int, step: Step, exchange: int, seconds: float) -> float:
        match step:
            case RunLaunches():
                return host.issue_s(0, LAUNCHES_OF_RUN)
            case Start():
                return host.issue_s(calls[rank, exchange], seconds > 0, messages[rank, exchange])
            case Finish():
                return host.issue_s(0, seconds > 0)

    return [
        list(accumulate(step_s(rank, *each) for each in zip(*columns, strict=True)))
        for rank, columns in enumerate(zip(phase.steps, phase.exchanges, phase.seconds, strict=True))
    ]


def behind(total_s: Floats, end_s: Floats) -> Floats:
    """Mark hosts that take longer for a layer than it takes without them: 1, the others 0.

    `total_s`: to issue it, by rank; `end_s`: when ranks are done with it. Ranks go through layers in
    step, at the pace of the slowest.
    """
    return (total_s > end_s.max(initial=0.0)).astype(np.float64)
