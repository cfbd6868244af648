"""Planning ahead: a background process that plans the coming batches while the current step runs.

The process is spawned, imports neither torch nor Megatron, and is never forked from a process that talks to others. What
goes through the pipe is bytes of JSON. It answers in the order it was asked, so a result does not depend on timing.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import subprocess
import sys
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from threading import Event, Thread
from typing import IO, Any

from megatron_balance.errors import BalanceError
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import MicrobatchPlan, from_json, to_json
from megatron_balance.planning.layers import Layers

log = logging.getLogger(__name__)

_BETWEEN = "\t"
"""Between the plans of an answer; JSON has none."""


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Stages that attend together: all their ranks, and the model chunks of each."""

    cluster: Cluster
    num_chunks: int


@dataclass(frozen=True, slots=True)
class PlanSpec:
    """What the background process needs to make the planner: arguments of `megatron_balance.make_planner`.

    With a `pipeline` it plans whole steps instead of microbatches.
    """

    name: str
    cluster: Cluster
    model: Model
    layers: Layers
    options: Mapping[str, Any]
    plan_costs: str | None = None
    pipeline: Pipeline | None = None

    def to_json(self) -> str:
        body = {
            "name": self.name,
            "cluster": dataclasses.asdict(self.cluster),
            "model": dataclasses.asdict(self.model),
            "layers": dataclasses.asdict(self.layers),
            "options": dict(self.options),
            "plan_costs": self.plan_costs,
            "pipeline": None if self.pipeline is None else dataclasses.asdict(self.pipeline),
        }
        return json.dumps(body)

    @classmethod
    def from_json(cls, text: str | bytes) -> PlanSpec:
        """The spec that `to_json` wrote."""
        body = json.loads(text)
        given = body["pipeline"]
        pipeline = None if given is None else Pipeline(Cluster(**given["cluster"]), given["num_chunks"])
        cluster, model, layers = Cluster(**body["cluster"]), Model(**body["model"]), Layers(**body["layers"])
        return cls(body["name"], cluster, model, layers, body["options"], body["plan_costs"], pipeline)


@dataclass(frozen=True, slots=True)
class Ready:
    """An answer. `plans`: none if the planner refused (planning on the spot will say why); `plan_s`: its own time, `waited_s`: ours."""

    plans: tuple[MicrobatchPlan, ...]
    plan_s: float
    waited_s: float

    @property
    def plan(self) -> MicrobatchPlan | None:
        """Of the one microbatch that was asked for."""
        return self.plans[0] if self.plans else None


class _Slot:
    def __init__(self) -> None:
        self.done = Event()
        self.answer: bytes = b""


class PlanAhead:
    """The background process. Requests are answered in order; `take` waits for one only if it is not there yet."""

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

    def submit(self, key: Hashable, lengths: Sequence[int]) -> None:
        """Ask for the plan of a microbatch of these lengths, to be taken by `key`."""
        self._ask(key, [int(n) for n in lengths])

    def submit_step(self, key: Hashable, lengths: Sequence[Sequence[int]]) -> None:
        """Ask for the plans of a step of these microbatches (`planning.tick_planner`), to be taken by `key`."""
        self._ask(key, [[int(n) for n in microbatch] for microbatch in lengths])

    def _ask(self, key: Hashable, lengths: list[Any]) -> None:
        slot = self._slots[key] = _Slot()
        self._queue.append(slot)
        self._send(json.dumps(lengths))

    def take(self, key: Hashable, timeout_s: float = 60.0) -> Ready | None:
        """The answer to `key`, waited for if need be; None if `key` was never asked or the process died (said in the log)."""
        slot = self._slots.pop(key, None)
        if slot is None:
            return None
        start = time.perf_counter()
        deadline = start + timeout_s
        while not slot.done.wait(0.2):
            if self._process.poll() is not None or time.perf_counter() > deadline:
                log.warning("the planning process gave no answer (exit code %s); planning on the spot", self._process.poll())
                return None
        waited = time.perf_counter() - start
        seconds, _, text = slot.answer.decode().partition(" ")
        return Ready(tuple(map(from_json, text.split(_BETWEEN))) if text else (), float(seconds), waited)

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
    """The process itself: the first line is a PlanSpec, each other line lengths; an answer is 'seconds plans' on one line."""
    plan = _planner(PlanSpec.from_json(requests.readline()))
    for line in requests:
        start = time.perf_counter()
        try:
            text = _BETWEEN.join(map(to_json, plan(json.loads(line))))
        except BalanceError:
            text = ""  # the training process meets the same error itself, with its traceback
        answers.write(f"{time.perf_counter() - start:.6f} {text}\n".encode())
        answers.flush()


def _planner(spec: PlanSpec) -> Callable[[Any], Sequence[MicrobatchPlan]]:
    """Plans of a microbatch, or with a pipeline of a step."""
    if spec.pipeline is not None:
        from megatron_balance.planning.tick_planner import TickPlanner

        return TickPlanner(spec).flat
    from megatron_balance import make_planner

    planner = make_planner(spec.name, spec.cluster, spec.model, spec.layers, spec.plan_costs, **spec.options)
    return lambda lengths: (planner(lengths),)


if __name__ == "__main__":
    answer_requests(sys.stdin.buffer, sys.stdout.buffer)
