"""Plan the steps of a run by one spec, in the training process and in the one that plans ahead."""

import dataclasses
import json
import logging
import os
import struct
import subprocess
import sys
import time
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from queue import Full, Queue
from threading import Event, Thread
from typing import IO, Any

from megatron_balance.analysis.step_memory import StepMemory
from megatron_balance.compile.proof.structure import verify_plans
from megatron_balance.errors import BalanceError
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.forest import checked
from megatron_balance.ir.model import Model
from megatron_balance.ir.step import EMPTY, Carry, Layers, StepPlan, Trees, from_body, to_json
from megatron_balance.ir.strategy import Strategy
from megatron_balance.planners.base import JointStages, StepContext
from megatron_balance.planners.pipelines import Pipelines, pipelines_of
from megatron_balance.planning.choice import PlannerChoice, choose_planner, planning_cost
from megatron_balance.planning.proofs import Proofs, Prover, end_with, prove_step


@dataclass(frozen=True, slots=True)
class PlanSpec:
    """All that another process needs to plan the same steps."""

    name: str
    cluster: Cluster
    model: Model
    layers: Layers
    options: Mapping[str, Any]
    plan_costs: str | None = None
    pipeline: JointStages | None = None
    ping_pong: bool = False
    strategy: str | None = None
    """Text of the job's layout, where its replicas are pipelines."""
    changes: bool = False
    """Whether the planner chooses the strategy, and with it the number of microbatches."""
    base: str | None = None
    """With `changes`: text of the job's layout, which owns weights."""
    prove_every: int = 0
    """How often the planning process proves a step (`planning.proofs.Prover`)."""
    prove_as: int | None = None
    """The rank of the pool whose part it proves of plans for many ranks; None: it proves all alone."""
    memory: StepMemory | None = None
    """As `StepContext.memory`."""

    def to_json(self) -> str:
        body = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return json.dumps(body | {"options": dict(self.options)}, default=dataclasses.asdict)

    @classmethod
    def from_json(cls, text: str | bytes) -> "PlanSpec":
        body = json.loads(text)
        for name, of in (("cluster", Cluster), ("model", Model), ("layers", Layers)):
            body[name] = of(**body[name])
        if body["pipeline"] is not None:
            body["pipeline"] = JointStages(Cluster(**body["pipeline"]["cluster"]), body["pipeline"]["num_chunks"])
        if body["memory"] is not None:
            body["memory"] = StepMemory.from_json(body["memory"])
        return cls(**body)

    def choice(self) -> PlannerChoice:
        return choose_planner(self.name, dict(self.options), "planner", self.layers)


class StepPlanner:
    """Plans the steps of a spec; `choice`: the planner, where it is not the registry's own."""

    def __init__(self, spec: PlanSpec, choice: PlannerChoice | None = None) -> None:
        self.choice = choice or spec.choice()
        self._context = StepContext(
            spec.cluster,
            spec.model,
            planning_cost(spec.cluster, spec.model, spec.plan_costs),
            joint=spec.pipeline,
            ping_pong=spec.ping_pong,
            own_microbatches=spec.changes,
            of_ranks=spec.changes,
            strategy=None if spec.strategy is None else Strategy.parse(spec.strategy),
            base=None if spec.base is None else Strategy.parse(spec.base),
            memory=spec.memory,
            refuses_by_price=False,
        )
        self._evaluation = dataclasses.replace(self._context, may_carry=False, forward_only=True)

    def candidates(self) -> list[Pipelines]:
        options, planner = self.choice.options, self.choice.planner
        assert planner.strategies is not None, "asked of planners that choose among strategies"
        context = dataclasses.replace(self._context, options=options)
        layouts = planner.layouts and planner.layouts(options, context.cluster.num_ranks, context.base)
        return [pipelines_of(each, context, layouts) for each in planner.strategies(options)]

    def plan(
        self, lengths: Sequence[Sequence[int]], carry: Carry = EMPTY, *, trees: Trees = (), may_delay: bool = True
    ) -> tuple[StepPlan, Carry]:
        """The plan of a training step, proved to hold together, and what it carries on."""
        context = dataclasses.replace(self._context, may_delay=may_delay, trees=tuple(chain.from_iterable(trees)))
        step, carried = self.choice.plan_step(_frozen(lengths), context, carry)
        verify_plans(step)
        return step, carried

    def plan_evaluation(self, lengths: Sequence[Sequence[int]], trees: Trees = ()) -> StepPlan:
        context = dataclasses.replace(self._evaluation, trees=tuple(chain.from_iterable(trees)))
        step = self.choice.plan_step(_frozen(lengths), context)[0]
        verify_plans(step)
        return step


def _frozen(lengths: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(int(n) for n in microbatch) for microbatch in lengths)


# Planning ahead: a background process that plans the coming steps while the current one runs.
#
# It is spawned, imports neither torch nor Megatron, and answers numbered frames of JSON over two
# pipes in the order it was asked, so a result does not depend on timing. A process that dies or is
# silent for too long is started again, once; then all is planned on the spot.

log = logging.getLogger(__name__)
# Of a frame: its number, and the bytes that follow.
HEADER = struct.Struct("<QQ")
# Requests that wait to be written to a process that does not read; others are not asked at all.
MOST_UNSENT = 8
# How long the first answer of a run is waited for.
PATIENCE_S = 60.0
# Later ones: so many seconds, or so many times the longest planning so far, whichever is more.
LEAST_PATIENCE_S, TIMES_LONGEST = 10.0, 20.0
RESTARTS = 1


@dataclass(frozen=True, slots=True)
class _Ready:
    """A step that was planned with the carry `before`, and what it carries on. `step`: None: the
    planner refused it, or the step before it (then `before` says nothing). `waited_s`: seconds that
    the training process waited for it.
    """

    step: StepPlan | None
    before: Carry
    after: Carry
    plan_s: float
    waited_s: float


@dataclass(slots=True)
class _ComingAnswer:
    done: Event = field(default_factory=Event)
    answer: bytes = b""


class _Process:
    def __init__(self, spec: PlanSpec) -> None:
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        told = map(str, (theirs_in, theirs_out, os.getpid()))
        command = [sys.executable, "-m", "megatron_balance.planning.step_planner", *told]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=(theirs_in, theirs_out))
        os.close(theirs_in)
        os.close(theirs_out)
        self._slots: dict[int, _ComingAnswer] = {}
        # The spec is one more.
        self._unsent: Queue[tuple[int, bytes] | None] = Queue(MOST_UNSENT + 1)
        self._asked = 0
        self._unsent.put((0, spec.to_json().encode()))
        self._reader = Thread(target=self._read, args=(os.fdopen(ours_in, "rb"),), daemon=True)
        self._writer = Thread(target=self._write, args=(os.fdopen(ours_out, "wb"),), daemon=True)
        self._reader.start()
        self._writer.start()

    @property
    def is_alive(self) -> bool:
        return self._reader.is_alive()

    def ask(self, request: str) -> _ComingAnswer | None:
        """Where the answer will be; None: too many requests wait to be written. Never waits."""
        slot = _ComingAnswer()
        self._asked += 1
        self._slots[self._asked] = slot
        try:
            self._unsent.put_nowait((self._asked, request.encode()))
        except Full:
            del self._slots[self._asked]
            return None
        return slot

    def end(self, timeout_s: float = 5.0) -> int:
        """End the process, which may plan on for `timeout_s`; its exit code. Safe to call twice."""
        try:
            self._unsent.put_nowait(None)
        except Full:
            timeout_s = 0.0
        try:
            return self._process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def _write(self, stream: IO[bytes]) -> None:
        # It died; whoever takes an answer says so.
        with suppress(OSError), stream:
            while (frame := self._unsent.get()) is not None:
                _write_frame(stream, *frame)
            # Processes that were forked meanwhile (a DataLoader's) hold the pipe open, too.
            _write_frame(stream, 0, b"")

    def _read(self, stream: IO[bytes]) -> None:
        with stream:
            while (frame := _read_frame(stream)) is not None:
                number, answer = frame
                slot = self._slots.pop(number, None)
                if slot is not None:
                    slot.answer = answer
                    slot.done.set()


class PlanAhead:
    """The background process. Requests are answered in order."""

    def __init__(self, spec: PlanSpec) -> None:
        self._spec = spec
        self._process: _Process | None = _Process(spec)
        self._restarts = 0
        self._slots: dict[Hashable, _ComingAnswer] = {}
        self._chained = True
        self._longest_s: float | None = None
        self._proofs, self._earlier_proofs = Proofs(), Proofs()

    def submit(
        self, key: Hashable, lengths: Sequence[Sequence[int]], carry: Carry | None = None, trees: Trees = ()
    ) -> None:
        """Ask for the plan of a step of these microbatches, to be taken by `key`. Never waits.
        `carry`: what the step before left; None: what the step that was asked for last leaves.
        """
        if self._process is None or (carry is None and not self._chained):
            return
        given = "null" if carry is None else carry.to_json()
        told = f',"trees":{json.dumps(trees)}' if trees else ""
        slot = self._process.ask(f'{{"lengths":{json.dumps(_frozen(lengths))},"carry":{given}{told}}}')
        self._chained = slot is not None
        if slot is not None:
            self._slots[key] = slot

    def forget(self) -> None:
        self._slots.clear()

    def take(self, key: Hashable, timeout_s: float | None = None) -> _Ready | None:
        """The answer to `key`, waited for if need be; None: it was never asked, or the process died
        or was silent (said in the log) for `timeout_s`, by default what earlier answers took and
        much more.
        """
        slot = self._slots.pop(key, None)
        if slot is None or self._process is None:
            return None
        patience = self._patience_s if timeout_s is None else timeout_s
        start = time.perf_counter()
        while not slot.done.wait(0.2):
            if not self._process.is_alive and not slot.done.is_set():
                self._again(f"ended with code {self._process.end()}")
                return None
            if time.perf_counter() - start > patience:
                self._again(f"gave no answer in {patience:.0f} s")
                return None
        waited = time.perf_counter() - start
        body: dict[str, Any] = json.loads(slot.answer)
        before, after = (Carry.from_body(body[name]) for name in ("before", "after"))
        step = None if body["step"] is None else from_body(body["step"])
        self._longest_s = max(self._longest_s or 0.0, body["plan_s"])
        self._proofs = Proofs(*body["proofs"])
        return _Ready(step, before, after, body["plan_s"], waited)

    @property
    def proofs(self) -> Proofs:
        return self._earlier_proofs + self._proofs

    def peek(self, key: Hashable) -> StepPlan | None:
        """The plan of `key` if the answer is there and is one; it stays to be taken. Any thread."""
        slot = self._slots.get(key)
        if slot is None or not slot.done.is_set():
            return None
        body: dict[str, Any] = json.loads(slot.answer)
        return None if body["step"] is None else from_body(body["step"])

    def close(self) -> None:
        if self._process is not None:
            self._process.end()
            self._process = None

    @property
    def _patience_s(self) -> float:
        return PATIENCE_S if self._longest_s is None else max(LEAST_PATIENCE_S, TIMES_LONGEST * self._longest_s)

    def _again(self, why: str) -> None:
        assert self._process is not None
        self._process.end(0.0)
        self._earlier_proofs, self._proofs = self.proofs, Proofs()
        self._slots.clear()
        self._chained = False
        self._restarts += 1
        if self._restarts > RESTARTS:
            self._process = None
            log.warning("the planning process %s, once more; planning on the spot from here on", why)
            return
        log.warning("the planning process %s; planning this step on the spot, and starting another process", why)
        self._longest_s = None  # the new one also takes its time to start
        try:
            self._process = _Process(self._spec)
        except OSError as error:
            self._process = None
            log.warning("no other process can be started (%s); planning on the spot from here on", error.strerror)


def _write_frame(stream: IO[bytes], number: int, body: bytes) -> None:
    stream.write(HEADER.pack(number, len(body)))
    stream.write(body)
    stream.flush()


def _read_frame(stream: IO[bytes]) -> tuple[int, bytes] | None:
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    number, size = HEADER.unpack(header)
    body = stream.read(size)
    return None if len(body) < size else (number, body)


def _answer_requests(requests: IO[bytes], answers: IO[bytes]) -> None:
    """The process itself: the first frame is a PlanSpec, others a step each, an empty one the end."""
    first = _read_frame(requests)
    if first is None:
        return
    spec = PlanSpec.from_json(first[1])
    prover = Prover(spec.prove_every, partial(prove_step, masks=spec.model.masks), rank=spec.prove_as)
    planner = StepPlanner(spec)
    carry: Carry | None = Carry()
    try:
        while (frame := _read_frame(requests)) is not None and frame[1]:
            number, request = frame
            start = time.perf_counter()
            body = json.loads(request)
            before = carry if body["carry"] is None else Carry.from_body(body["carry"])
            step, carry = None, None
            if before is not None:
                # An error is met again by the training process itself, with its traceback.
                with suppress(BalanceError):
                    step, carry = planner.plan(
                        body["lengths"], before, trees=tuple(map(checked, body.get("trees", ())))
                    )
            text = "null" if step is None else to_json(step)
            seconds = time.perf_counter() - start
            pair = ",".join(
                f'"{name}":{(each or Carry()).to_json()}' for name, each in (("before", before), ("after", carry))
            )
            proofs = json.dumps(dataclasses.astuple(prover.outcomes()), allow_nan=False)
            answer = f'{{"plan_s":{seconds:.6f},{pair},"proofs":{proofs},"step":{text}}}'
            _write_frame(answers, number, answer.encode())
            if step is not None:
                prover.offer(step)
    finally:
        prover.close()


if __name__ == "__main__":
    end_with(int(sys.argv[3]), 1)
    _answer_requests(os.fdopen(int(sys.argv[1]), "rb"), os.fdopen(int(sys.argv[2]), "wb"))
