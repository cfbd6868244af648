"""Times of a rank's steps, recorded on request.

To compare with `compile.order.streams`, and to see which exchanges hide behind computation.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

from megatron_balance.compile.order import Leg, Role

Mark: TypeAlias = Any
"""Seconds by `time.perf_counter`, or an event of a device's stream (`runtime.recorder`)."""


class Traced(NamedTuple):
    """One thing done: `op` and `leg` as in `compile.order.Issue`.

    An exchange also has a leg "finish".

    Times by `time.perf_counter`, in seconds. Of the leg of an exchange: issuing it; of a relayed
    one: from the first wait for it until it is sent on. Of "finish": waiting for what the exchange
    brings.

    For a recorder an exchange also has a leg "pack", on stream "compute"; on a device times are
    events, and those of a leg enclose what it takes on its stream.
    """

    stream: str
    op: int
    leg: Leg | str
    role: Role
    start_s: Mark
    stop_s: Mark


Trace: TypeAlias = list[Traced]
"""Of one phase, or of several, one after the other."""


def exchange_s(trace: Trace) -> tuple[float, float]:
    """(under way, waited) of the rank's own exchanges, in seconds.

    Under way: from being issued until they were put to use; waited: the rank, for them.
    """
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
    """Share of the rank's own exchange time in which it did not wait; 1 if nothing was exchanged.

    `traces`: of calls that were under way at once, one each.
    """
    under_way, waited = (sum(seconds) for seconds in zip(*(exchange_s(trace) for trace in traces), strict=True))
    return 1.0 - waited / under_way if under_way else 1.0
