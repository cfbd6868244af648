"""The clock that traces of several ranks share."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_balance.analysis.trace_format import COMPUTE, TrackSpan
from megatron_balance.runtime import recorder


@pytest.mark.parametrize("streamed", [False, True], ids=["host", "streams"])
def test_a_process_that_is_held_up_while_it_reads_clocks_is_not_late_in_the_trace(streamed: bool, monkeypatch) -> None:
    clock = SimpleNamespace(now=100.0)
    readings = count()

    def read(ahead_s: float = 0.0) -> float:
        clock.now += 0.5 if next(readings) in (1, 2, 5) else 1e-6
        return clock.now + ahead_s

    monkeypatch.setattr(recorder, "time", SimpleNamespace(perf_counter=read, time=lambda: read(7000.0)))
    device_s = 50.0  # a clock of its own
    streams: Any = SimpleNamespace(
        now=lambda: (read(device_s),), timed=lambda _: None, seconds=lambda begin, end: end[0] - begin[0]
    )
    made = recorder.Recorder(0, streams if streamed else None)
    made.add(TrackSpan(0, COMPUTE, "", 0.0, 0.0), made.mark(), made.mark())
    (span,) = made.spans()
    assert made.began_unix_s + span.stop_s == pytest.approx(clock.now + 7000.0, abs=1e-5)
