"""The clock that traces of several ranks share."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace

import pytest

from megatron_balance.runtime import recorder


def test_a_process_that_is_held_up_while_it_reads_clocks_is_not_late_in_the_trace(monkeypatch) -> None:
    clock = SimpleNamespace(now=100.0)
    readings = count()

    def read(ahead_s: float) -> float:
        clock.now += 0.5 if next(readings) in (1, 2, 5) else 1e-6
        return clock.now + ahead_s

    monkeypatch.setattr(recorder, "time", SimpleNamespace(perf_counter=lambda: read(0.0), time=lambda: read(7000.0)))
    made = recorder.Recorder(rank=0)
    assert made.mark() is not None
    assert made.began_unix_s == pytest.approx(7100.0, abs=1e-5), "when its spans begin to count"
