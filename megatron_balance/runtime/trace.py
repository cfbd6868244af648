"""What a rank did when: recorded on request, to compare with `compile.order.streams` and to see what hides behind computation."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from megatron_balance.compile.order import Leg, Role


class Traced(NamedTuple):
    """One thing done: `op` and `leg` as in `compile.order.Issue`, where an exchange also has a leg "finish".

    Times by `time.perf_counter`, in seconds. Of the leg of an exchange: issuing it; of one passed on: from the first wait for it until
    it is sent on. Of "finish": waiting for what the exchange brings.
    """

    stream: str
    op: int
    leg: Leg | str
    role: Role
    start_s: float
    stop_s: float


Trace: TypeAlias = list[Traced]
"""Of one phase, or of several, one after the other."""


def exchange_s(trace: Trace) -> tuple[float, float]:
    """Seconds that the rank's own exchanges were under way, from being issued until they were put to use; and that it waited for them."""
    issued: dict[int, float] = {}
    under_way = waited = 0.0
    for event in sorted(trace, key=lambda e: e.start_s):
        if event.role != "own" or event.leg == "run":
            continue
        if event.leg == "finish":
            under_way += event.stop_s - issued.pop(event.op, event.start_s)
            waited += event.stop_s - event.start_s
        else:
            issued.setdefault(event.op, event.start_s)
    return under_way, waited


def hidden_share(*traces: Trace) -> float:
    """Of the time that the rank's own exchanges were under way, the share in which it did not wait for them (1: nothing exchanged).

    `traces`: of calls that were under way at once, one each.
    """
    under_way, waited = (sum(seconds) for seconds in zip(*(exchange_s(trace) for trace in traces), strict=True))
    return 1.0 - waited / under_way if under_way else 1.0
