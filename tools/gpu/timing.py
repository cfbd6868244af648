"""Seconds of the GPU's own work for a call, without what the host takes to launch it."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch

_AHEAD_CYCLES = 4_000_000
"""About two milliseconds of work that goes first, so that all calls of a sample are queued."""


def gpu_s(call: Callable[[], object], calls: int = 10, samples: int = 7) -> float:
    """Median over samples of the mean of some calls, after one that warms up (and compiles)."""
    call()
    samples_s: list[float] = []
    for _ in range(samples):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(_AHEAD_CYCLES)
        begin.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        samples_s.append(begin.elapsed_time(end) / 1e3 / calls)
    return median(samples_s)


def copy_bytes_per_s(num_bytes: int) -> float:
    """Bytes read and written a second by a plain copy of so many bytes."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * num_bytes / gpu_s(lambda: target.copy_(source))
