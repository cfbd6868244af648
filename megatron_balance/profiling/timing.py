"""Seconds of a warm call, on the device's own clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch


def time_s(call: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Seconds of a call, after one to warm it up."""
    call()
    if device.type == "cuda":
        return median(events_s(call) for _ in range(repeats))
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    return min(clock_s(call, clock) for _ in range(repeats))


def clock_s(call: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    begin = clock()
    call()
    return clock() - begin


def events_s(call: Callable[[], object]) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3
