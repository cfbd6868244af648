"""Planning ahead: a background process that plans the coming steps while the current one runs.

The process is spawned, imports neither torch nor Megatron, and is never forked from a process that
talks to others. What goes through the pipe is lines of JSON. It answers in the order it was asked,
so a result does not depend on timing, and each step is planned with what the one before carried.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
from collections.abc import Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from threading import Event, Thread
from typing import IO, Any

from megatron_balance.errors import BalanceError
from megatron_balance.ir.step import Carry, StepPlan, from_body, to_json
from megatron_balance.planning.step_planner import PlanSpec, StepPlanner

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ready:
    """An answer: a step that was planned with the carry `before`, and what it carries on, `after`.

    `step`: None if the planner refused (planning on the spot will say why). `plan_s`: seconds of
    planning; `waited_s`: seconds that the training process waited for it.
    """

    step: StepPlan | None
    before: Carry
    after: Carry
    plan_s: float
    waited_s: float


class _Slot:
    def __init__(self) -> None:
        self.done = Event()
        self.answer: bytes = b""


class PlanAhead:
    """The background process. Requests are answered in order; `take` waits for one only if it is
    not there yet.
    """

    def __init__(self, spec: PlanSpec) -> None:
        """Start the process (about a tenth of a second of its own, none of the caller's)."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "megatron_balance.planning.ahead"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            close_fds=True,
        )
        self._slots: dict[Hashable, _Slot] = {}
        self._queue: list[_Slot] = []
        self._send(spec.to_json())
        assert self._process.stdout is not None
        self._reader = Thread(target=_read, args=(self._process.stdout, self._queue), daemon=True)
        self._reader.start()

    def submit(self, key: Hashable, lengths: Sequence[Sequence[int]], carry: Carry | None = None) -> None:
        """Ask for the plan of a step of these microbatches, to be taken by `key`.

        `carry`: what the step before left; None: what the step that was asked for last leaves.
        """
        slot = self._slots[key] = _Slot()
        self._queue.append(slot)
        given = "null" if carry is None else carry.to_json()
        self._send(
            f'{{"lengths":{json.dumps([[int(n) for n in microbatch] for microbatch in lengths])},"carry":{given}}}'
        )

    def forget(self) -> None:
        """Drop all answers that were not taken."""
        self._slots.clear()

    def take(self, key: Hashable, timeout_s: float = 60.0) -> Ready | None:
        """The answer to `key`, waited for if need be; None if `key` was never asked or the process
        died (said in the log).
        """
        slot = self._slots.pop(key, None)
        if slot is None:
            return None
        start = time.perf_counter()
        deadline = start + timeout_s
        while not slot.done.wait(0.2):
            if self._process.poll() is not None or time.perf_counter() > deadline:
                log.warning(
                    "the planning process gave no answer (exit code %s); planning on the spot", self._process.poll()
                )
                return None
        waited = time.perf_counter() - start
        body: dict[str, Any] = json.loads(slot.answer)
        before, after = (Carry.from_body(body[name]) for name in ("before", "after"))
        step = None if body["step"] is None else from_body(body["step"])
        return Ready(step, before, after, body["plan_s"], waited)

    def peek(self, key: Hashable) -> StepPlan | None:
        """The plan of `key` if the answer is there and is one; it stays to be taken. Any thread."""
        slot = self._slots.get(key)
        if slot is None or not slot.done.is_set():
            return None
        body: dict[str, Any] = json.loads(slot.answer)
        return None if body["step"] is None else from_body(body["step"])

    def close(self) -> None:
        """End the process; safe to call twice."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            with suppress(BrokenPipeError):
                self._process.stdin.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError):
            pass  # it died; `take` says so


def _read(stream: IO[bytes], queue: list[_Slot]) -> None:
    for line in stream:
        slot = queue.pop(0)
        slot.answer = line.rstrip(b"\n")
        slot.done.set()


def answer_requests(requests: IO[bytes], answers: IO[bytes]) -> None:
    """The process itself: the first line is a PlanSpec, each other line a step; every answer is one
    line.

    After a step that could not be planned, what it would have carried is unknown: steps that follow
    it are not planned either, until one comes with a carry of its own.
    """
    planner = StepPlanner(PlanSpec.from_json(requests.readline()))
    carry: Carry | None = Carry()
    for line in requests:
        start = time.perf_counter()
        body = json.loads(line)
        before = carry if body["carry"] is None else Carry.from_body(body["carry"])
        text, carry = "null", None
        if before is not None:
            # An error is met again by the training process itself, with its traceback.
            with suppress(BalanceError):
                step, carry = planner.plan(body["lengths"], before)
                text = to_json(step)
        seconds = time.perf_counter() - start
        pair = ",".join(
            f'"{name}":{(each or Carry()).to_json()}' for name, each in (("before", before), ("after", carry))
        )
        answers.write(f'{{"plan_s":{seconds:.6f},{pair},"step":{text}}}\n'.encode())
        answers.flush()


if __name__ == "__main__":
    answer_requests(sys.stdin.buffer, sys.stdout.buffer)
