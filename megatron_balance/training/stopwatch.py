"""Seconds of parts of a step, by the device's own clock where it has one: nothing waits for it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Stopwatch:
    """Measures named parts of a step; `seconds` reads them when the step is over."""

    def __init__(self, device: torch.device) -> None:
        """Measure on `device`."""
        self._on_device = device.type == "cuda"
        self._marks: dict[str, list[tuple[Any, Any]]] = {}

    @contextmanager
    def measured(self, name: str) -> Iterator[None]:
        """Measure the block under `name`; blocks of one name are added up."""
        begin = self._mark()
        yield
        self._marks.setdefault(name, []).append((begin, self._mark()))

    def seconds(self) -> dict[str, float]:
        """Seconds by name with `_s` behind it. Waits for the device, and forgets."""
        found = {f"{name}_s": sum(self._between(*each) for each in marks) for name, marks in self._marks.items()}
        self._marks.clear()
        return found

    def _mark(self) -> Any:
        if not self._on_device:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, begin: Any, end: Any) -> float:
        if not self._on_device:
            return end - begin
        end.synchronize()
        return begin.elapsed_time(end) / 1e3
