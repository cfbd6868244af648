"""CPU time of this package's own functions, calls into torch not counted."""

from __future__ import annotations

import cProfile
import pstats
import time
from collections.abc import Callable
from typing import Any


def ours(call: Callable[[], Any]) -> tuple[float, Any]:
    """Microseconds of CPU time in functions of this package, without what the profiler itself adds
    to them; and the call's result.
    """
    # CPU time: other processes on the machine do not count
    profile = cProfile.Profile(time.thread_time)
    result = profile.runcall(call)
    stats: Any = pstats.Stats(profile)
    own = sum(own for (path, _, _), (_, _, own, _, _) in stats.stats.items() if "megatron_balance/" in path)
    calls = sum(
        counts[0]
        for (_, _, _, _, callers) in stats.stats.values()
        for (path, _, _), counts in callers.items()
        if "megatron_balance/" in path
    )
    return 1e6 * (own - calls * _PROFILED_CALL_S), result


def _profiled_call_s() -> float:
    """Seconds that one call costs its caller under the profiler above and not otherwise."""

    def loop() -> None:
        for _ in range(20000):
            abs(1)

    profile = cProfile.Profile(time.thread_time)
    profile.runcall(loop)
    stats: Any = pstats.Stats(profile)
    profiled = next(own for (_, _, name), (_, _, own, _, _) in stats.stats.items() if name == "loop")
    start = time.thread_time()
    loop()
    return (profiled - (time.thread_time() - start)) / 20000


_PROFILED_CALL_S = _profiled_call_s()
