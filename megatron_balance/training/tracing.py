"""Traces of chosen training steps: on every rank a file in `analysis.trace_format`, as simulated
steps have it. `megatron-balance trace` joins the files of a step.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection
from pathlib import Path

import torch.distributed as dist

from megatron_balance.analysis.trace_format import (
    ATTENTION,
    COMPUTE,
    GRADIENT_SYNC,
    OPTIMIZER,
    PLAN,
    STEP,
    Trace,
    TrackSpan,
    file_name,
    rank_name,
)
from megatron_balance.runtime.cuda import Streams
from megatron_balance.runtime.recorder import Mark, Recorder

log = logging.getLogger(__name__)

FOLDER = "traces"


class StepTracer:
    """Traces of this rank. All ranks trace the same steps."""

    def __init__(self, folder: str | Path | None = None, steps: Collection[int] = (), rank: int = 0) -> None:
        """Write to `folder`. `rank`: in the world. Nothing is traced without steps."""
        self._folder, self._steps, self._rank = None if folder is None else Path(folder), frozenset(steps), rank
        self._node: Callable[[], int] = lambda: 0
        self._streams: Callable[[], Streams | None] = lambda: None
        self._step = self._at = 0
        self._begun: Mark = None
        self._planned: tuple[str, Mark] = ("", None)
        self._ran: Mark = None
        self.recorder: Recorder | None = None
        """Of the step that is under way, if it is traced."""

    def place(self, node: Callable[[], int], streams: Callable[[], Streams | None]) -> None:
        """Say how to find this rank's node, and the streams of its device (None: it has a CPU
        only): asked when a step is traced.
        """
        self._node, self._streams = node, streams

    def begin(self, step: int) -> None:
        """Begin a step. Collective over the world if it is traced: all clocks begin together."""
        # Begun twice: the step ran again, and is traced from its second beginning.
        if self.recorder is not None and step != self._step:
            self.finish()
        self.recorder = None
        if step not in self._steps:
            return
        self._step = step
        self._at, streams = self._node(), self._streams()
        if dist.is_initialized():
            dist.barrier()
        self.recorder = Recorder(self._rank, streams)
        self._begun, self._ran = self.recorder.mark(), None

    def planned(self, planner: str) -> None:
        if self.recorder is not None:
            self._planned = planner, self.recorder.mark()

    def ran(self) -> None:
        if self.recorder is not None:
            self._ran = self.recorder.mark()

    def finish(self) -> float | None:
        """Write the trace of the step that is over, if there is one; none of one that failed. What
        cannot be written ends no training. Returns the seconds of this rank's attention by the
        device's clock, where it has one.
        """
        recorder, self.recorder = self.recorder, None
        # None of a step that failed: it never said that it ran.
        if recorder is None or self._folder is None or self._ran is None:
            return None
        path = self._folder / FOLDER / file_name(self._step, self._rank)
        trace = self._trace(recorder)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(trace.document(), allow_nan=False), encoding="utf-8")
        except OSError as error:
            log.warning("trace of step %d: %s cannot be written (%s)", self._step, path, error.strerror)
        if recorder.streams is None:
            return None
        return sum((span.stop_s - span.start_s for span in trace.spans if span.what == ATTENTION), 0.0)

    def _trace(self, recorder: Recorder) -> Trace:
        end = recorder.mark()
        self._add(recorder, PLAN, self._begun, self._planned[1])
        self._add(recorder, OPTIMIZER, self._ran, end)
        spans = recorder.spans()
        spans += _passes(spans)
        spans += _synchronising(spans)
        facts = {
            "kind": "measured",
            "clock": "host" if recorder.streams is None else "device",
            "planner": self._planned[0],
            "step": self._step,
            "rank": self._rank,
            "node": self._at,
            "began_unix_s": recorder.began_unix_s,
            "world_size": dist.get_world_size() if dist.is_initialized() else 1,
        }
        return Trace(spans, {self._rank: rank_name(self._rank, self._at)}, facts)

    def _add(self, recorder: Recorder, what: str, start: Mark, stop: Mark) -> None:
        recorder.add(TrackSpan(self._rank, STEP, what, 0.0, 0.0), start, stop)


def _passes(spans: list[TrackSpan]) -> list[TrackSpan]:
    """Every microbatch's forward and backward, from its first attention call to its last."""
    found: dict[tuple[str, int], TrackSpan] = {}
    for span in spans:
        if span.track != COMPUTE:
            continue
        key = (span.phase, span.microbatch)
        before = found.get(key, span)
        start_s, stop_s = min(before.start_s, span.start_s), max(before.stop_s, span.stop_s)
        what = f"{span.phase} {span.microbatch}"
        found[key] = TrackSpan(span.rank, STEP, what, start_s, stop_s, span.phase, span.microbatch)
    return list(found.values())


def _synchronising(spans: list[TrackSpan]) -> list[TrackSpan]:
    optimizer = next(span for span in spans if span.what == OPTIMIZER)
    last_s = max((span.stop_s for span in spans if span.track == COMPUTE), default=optimizer.start_s)
    return [TrackSpan(optimizer.rank, STEP, GRADIENT_SYNC, min(last_s, optimizer.start_s), optimizer.start_s)]
