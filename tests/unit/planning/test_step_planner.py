"""Whole steps by one spec: on the spot and ahead, with stages that attend together, with a carry."""

import contextlib
import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_balance import Cluster, MicrobatchPlan, Model
from megatron_balance.compile.pipeline import expand, layout
from megatron_balance.compile.proof.meaning import verify
from megatron_balance.errors import ConfigError, InvalidProgramError
from megatron_balance.ir.columns import Rows
from megatron_balance.ir.forest import Segment, document
from megatron_balance.ir.step import EMPTY, Cell, Layers, StepPlan, to_json
from megatron_balance.planners.base import JointStages
from megatron_balance.planning import choice, step_planner
from megatron_balance.planning.step_planner import PlanAhead, PlanSpec, StepPlanner
from megatron_balance.planning.ticks import neighbour, passes_on, plan_ticks, ticks
from megatron_balance.simulator import pipeline
from tests.support import by_hand

STEP = ((300, 140, 72), (512,), (64,) * 8, (200, 200, 112))


SMALL = step_planner.PlanSpec("te_ring", Cluster(2, 2), Model(4, 2, 16), Layers(), {})
FITS = ((100, 90),)


SMALL = PlanSpec("te_ring", Cluster(2, 2), Model(4, 2, 16), Layers(), {})
FITS = ((100, 90),)


def spec(planner: str = "distca", num_chunks: int = 1, *, ping_pong: bool = False, **options: object) -> PlanSpec:
    """Two stages of two ranks."""
    stages = JointStages(Cluster(4, 2), num_chunks)
    return dataclasses.replace(SMALL, name=planner, options=options, pipeline=stages, ping_pong=ping_pong)


@contextlib.contextmanager
def planning_ahead(asked: PlanSpec) -> Iterator[PlanAhead]:
    ahead = PlanAhead(asked)
    try:
        yield ahead
    finally:
        ahead.close()


def test_trees_planned_ahead_wait_and_come_back_in_the_process_too() -> None:
    # The later steps are asked for with what the process itself carries.
    asked = dataclasses.replace(SMALL, name="wlb_llm", options={"thresholds": (90,), "tokens_per_rank": 200})
    branched = (Segment(60, -1), Segment(20, 0), Segment(20, 0))
    steps = [(((100,), (50,)), ((branched,), (document(50),))), (((20,), (30,)), ()), (((100,), (10,)), ())]
    planner, carry = StepPlanner(asked), EMPTY
    with planning_ahead(asked) as ahead:
        for at, (lengths, trees) in enumerate(steps):
            ahead.submit(at, lengths, EMPTY if not at else None, trees)
        waited: list[int] = []
        for at, (lengths, trees) in enumerate(steps):
            before = carry
            step, carry = planner.plan(lengths, before, trees=trees)
            ready = ahead.take(at)
            assert ready is not None
            assert (ready.step, ready.before, ready.after) == (step, before, carry)
            waited.append(len(carry.trees))
    assert waited == [1, 1, 0]


@pytest.mark.parametrize(("num_chunks", "ping_pong"), [(1, False), (2, False), (1, True)])
def test_a_step_planned_ahead_is_the_one_planned_on_the_spot(num_chunks: int, ping_pong: bool) -> None:
    asked = spec(num_chunks=num_chunks, ping_pong=ping_pong, block=16)
    assert PlanSpec.from_json(asked.to_json()) == asked
    with planning_ahead(asked) as ahead:
        ahead.submit(7, STEP)
        deadline = time.monotonic() + 60
        while (seen := ahead.peek(7)) is None and time.monotonic() < deadline:
            time.sleep(0.01)
        ready = ahead.take(7)
        assert ahead.peek(7) is None, "it was taken"
    assert ready is not None
    assert (ready.step, ready.after) == StepPlanner(asked).plan(STEP)
    assert seen == ready.step


def test_no_plan_leaves_the_planner_that_does_not_hold_together(monkeypatch: pytest.MonkeyPatch) -> None:
    # A sequence that a planner lost, in a step that trains and in one that evaluates.
    planner = StepPlanner(SMALL)
    whole, carried = planner.choice.plan_step(FITS, planner._context, EMPTY)
    lossy = dataclasses.replace(whole, plans=(dataclasses.replace(whole.plans[0], zones=()),))
    monkeypatch.setattr(choice.PlannerChoice, "plan_step", lambda *_: (lossy, carried))
    for plan in (planner.plan, planner.plan_evaluation):
        with pytest.raises(InvalidProgramError, match="plan of te_ring: sequence 0 is in 0 zones"):
            plan(FITS)


def test_every_rank_keeps_its_rows_from_its_forward_to_its_backward() -> None:
    step, _ = StepPlanner(spec(block=16)).plan(STEP)
    for one in step.ticks[0]:
        verify(expand(one.plan, "replay"))
        for rank in range(4):
            microbatch, stage = one.tick.microbatches[rank // 2], rank // 2
            own = layout(one.plan, rank)
            if microbatch is None:
                assert not len(own), "an idle stage has no rows"
                continue
            first = one.tick.first_sequence(stage, [len(m) for m in STEP])
            assert (own - [first, 0, 0]).tolist() == layout(step.plans[microbatch], rank % 2).tolist()
    (evaluated,) = StepPlanner(spec()).plan_evaluation(STEP).ticks
    assert [one.tick.backward for one in evaluated] == [False] * 5
    said = "planner zeppelin cannot plan several pipeline stages together; these can: distca"
    with pytest.raises(ConfigError, match=said):
        StepPlanner(spec("zeppelin")).plan(STEP)


def test_steps_behind_one_that_cannot_be_planned_wait_for_a_carry_of_their_own() -> None:
    # Each with a carry or, None, with that of the step before.
    small = dataclasses.replace(SMALL, options={"tokens_per_rank": 100})
    requests = ((FITS, None), (((201,),), None), (FITS, None), (FITS, json.loads(EMPTY.to_json())))
    asked, out = io.BytesIO(), io.BytesIO()
    step_planner._write_frame(asked, 0, small.to_json().encode())
    for number, (lengths, carry) in enumerate(requests, 1):
        step_planner._write_frame(asked, number, json.dumps({"lengths": lengths, "carry": carry}).encode())
    asked.seek(0)
    step_planner._answer_requests(asked, out)
    out.seek(0)
    frames: Any = list(iter(lambda: step_planner._read_frame(out), None))
    assert [number for number, _ in frames] == [1, 2, 3, 4]
    first, refused, behind, again = (json.loads(body)["step"] for _, body in frames)
    assert first == again == json.loads(to_json(StepPlanner(small).plan(FITS)[0]))
    assert refused is behind is None


def stop(ahead: PlanAhead, by: signal.Signals) -> None:
    """Send the planning process a signal."""
    assert ahead._process is not None
    os.kill(ahead._process._process.pid, by)


@pytest.mark.parametrize(
    ("by", "said"), [(signal.SIGKILL, "ended with code -9"), (signal.SIGSTOP, "gave no answer in 1 s")]
)
def test_a_process_that_is_gone_is_started_once_more_and_then_never(
    by: signal.Signals, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    with planning_ahead(SMALL) as ahead:
        ahead._longest_s = 0.1  # as after quick answers
        for key in (1, 2):
            stop(ahead, by)
            ahead.submit(key, FITS, EMPTY)
            assert ahead.take(key, timeout_s=1.0) is None
            if key == 1:
                assert ahead._patience_s == step_planner.PATIENCE_S, "a process that starts once more takes as long"
                ahead.submit("unchained", FITS)
                assert ahead.take("unchained") is None, "it follows a step that nobody planned"
                ahead.submit("again", FITS, EMPTY)
                ready: Any = ahead.take("again")
                assert ready.step == StepPlanner(SMALL).plan(FITS)[0]
        ahead.submit(3, FITS, EMPTY)
        assert ahead.take(3) is None
    first, last = (record.getMessage() for record in caplog.records)
    assert said in first
    assert first.endswith("planning this step on the spot, and starting another process")
    assert said in last
    assert last.endswith("planning on the spot from here on")


def test_a_process_ends_when_told_though_others_hold_its_pipes_open(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []  # as the workers of a DataLoader that were forked meanwhile do

    def pipe() -> tuple[int, int]:
        made = os_pipe()
        if len(held) < 4:  # then comes the one on which subprocess hears that the program began
            held.extend(map(os.dup, made))
        return made

    os_pipe = os.pipe
    monkeypatch.setattr(os, "pipe", pipe)
    process = step_planner._Process(spec())
    monkeypatch.undo()
    try:
        assert process.end(60.0) == 0
    finally:
        for each in held:
            os.close(each)


def test_large_steps_are_asked_for_without_waiting_for_a_process_that_does_not_read() -> None:
    # Each is larger than a pipe holds; more of them than may wait are not asked for.
    with planning_ahead(SMALL) as ahead:
        stop(ahead, signal.SIGSTOP)
        begin = time.monotonic()
        for key in range(step_planner.MOST_UNSENT + 9):
            ahead.submit(key, ((7,) * 100_000,), EMPTY)
        assert time.monotonic() - begin < 20, "it waited"
        assert ahead.take(step_planner.MOST_UNSENT + 8) is None


def test_what_others_write_to_standard_output_is_no_answer(capfd: pytest.CaptureFixture[str]) -> None:
    # A library that prints where a plan is made.
    code = (
        "import sys; from megatron_balance.planning import step_planner; "
        "real = step_planner.StepPlanner.plan; "
        "step_planner.StepPlanner.plan = lambda *args, **how: print('a line', flush=True) or real(*args, **how); "
        "step_planner._answer_requests(open(int(sys.argv[1]), 'rb'), open(int(sys.argv[2]), 'wb'))"
    )
    asked, answered = os.pipe(), os.pipe()
    ends = (asked[0], answered[1])
    process = subprocess.Popen([sys.executable, "-c", code, *map(str, ends)], pass_fds=ends)
    for end in ends:
        os.close(end)
    with open(asked[1], "wb") as requests, open(answered[0], "rb") as answers_:
        step_planner._write_frame(requests, 0, SMALL.to_json().encode())
        step_planner._write_frame(requests, 5, json.dumps({"lengths": FITS, "carry": None}).encode())
        frame = step_planner._read_frame(answers_)
    assert process.wait(30) == 0
    assert frame is not None
    assert frame[0] == 5
    assert json.loads(frame[1])["step"] is not None
    assert capfd.readouterr().out == "a line\n"


# Ticks of a pipeline: every pass once, when its inputs are there, in one phase at a time, and no
# more of them than 1F1B has.


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[int, int, int]:
    """Stages, microbatches, chunks."""
    stages, chunks = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    return stages, draw(st.integers(1, 4)) * stages if chunks > 1 else draw(st.integers(1, 12)), chunks


@settings(max_examples=60, deadline=None)
@given(pipelines())
def test_every_pass_is_run_once_and_after_its_inputs(shape: tuple[int, int, int]) -> None:
    stages, microbatches, chunks = shape
    order = ticks(*shape)
    at: dict[tuple[bool, int, int, int], int] = {}
    for number, tick in enumerate(order):
        for stage, cell in enumerate(tick.cells):
            if cell is not None:
                key = (tick.backward, stage, cell.chunk, cell.microbatch)
                assert key not in at, "run twice"
                at[key] = number
    assert len(at) == 2 * stages * microbatches * chunks
    last = (stages - 1, chunks - 1)
    for (backward, stage, chunk, microbatch), number in at.items():
        if backward:
            assert at[False, stage, chunk, microbatch] < number
        if (stage, chunk) != (last if backward else (0, 0)):
            place = chunk * stages + stage + (1 if backward else -1)
            assert at[backward, place % stages, place // stages, microbatch] < number
    # A result goes to the cell that needs it.
    sent: set[tuple[bool, int, Cell]] = set()
    for number, tick in enumerate(order):
        for stage in range(stages):
            source = neighbour(tick, stage)
            assert (source + (-1 if tick.backward else 1)) % stages == stage
            cell = passes_on(tick, source, chunks)
            if cell is not None:
                assert at[tick.backward, stage, cell.chunk, cell.microbatch] > number
                sent.add((tick.backward, stage, cell))
    assert len(sent) == 2 * microbatches * (stages * chunks - 1), "all but the first of each phase have an input"


@settings(max_examples=60, deadline=None)
@given(pipelines())
def test_there_are_no_more_ticks_and_microbatches_held_than_one_forward_one_backward_has(
    shape: tuple[int, int, int],
) -> None:
    stages, microbatches, chunks = shape
    order = ticks(*shape)
    alike = pipeline.run(stages, microbatches, chunks, 1, lambda _stage, _pass, begin: begin + 1, lambda _: np.zeros(1))
    assert len(order) == 2 * (microbatches * chunks + stages - 1) <= alike.total_s
    assert all(any(cell is not None for cell in tick.cells) for tick in order), "a tick of nothing"
    for stage in range(stages):
        held = np.cumsum([0 if tick.cells[stage] is None else 1 - 2 * tick.backward for tick in order])
        expected = 2 * (stages - 1 - stage) + 1 if chunks == 1 else chunks * stages + stages - 1 - 2 * stage
        assert held.max() == min(expected, microbatches * chunks)
        assert held[-1] == 0


def test_the_order_of_two_stages() -> None:
    a, b = Cell(0), Cell(1)
    assert [(tick.backward, tick.cells) for tick in ticks(2, 2)] == [
        (False, (a, None)),
        (False, (b, a)),
        (True, (None, a)),
        (False, (None, b)),
        (True, (a, b)),
        (True, (b, None)),
    ]
    assert [tick.cells for tick in ticks(2, 2, forward_only=True)] == [(a, None), (b, a), (None, b)]
    with pytest.raises(ConfigError, match="3 microbatches are not a multiple of 2 pipeline stages"):
        ticks(2, 3, 2)
    assert len(ticks(2, 3)) == 8


def nano_batches(*lengths: int) -> MicrobatchPlan:
    """Each sequence in two nano-batches on two ranks."""
    fragments = [(rank, seq, rank * n // 2, (rank + 1) * n // 2) for rank in (0, 1) for seq, n in enumerate(lengths)]
    return by_hand.plan(lengths, 2, by_hand.task_table(fragments), heads=(1, 1))


def test_the_microbatches_of_a_tick_lie_side_by_side_and_the_same_ones_are_planned_once() -> None:
    asked: list[tuple[tuple[int, ...], list[tuple[int, ...]]]] = []

    def plan(lengths: tuple[int, ...], owned: Rows) -> MicrobatchPlan:
        asked.append((lengths, list(owned)))
        return by_hand.plan(lengths, 4, by_hand.task_table(owned), ranks_per_node=2, heads=(1, 1))

    made = plan_ticks(ticks(2, 2), [nano_batches(4, 6), nano_batches(8)], plan)
    assert [tick.plan.lengths for tick in made] == [(4, 6), (8, 4, 6), (4, 6), (8,), (4, 6, 8), (8,)]
    assert asked[1] == ((8, 4, 6), [(0, 0, 0, 4), (1, 0, 4, 8), (2, 1, 0, 2), (2, 2, 0, 3), (3, 1, 2, 4), (3, 2, 3, 6)])
    assert made[4].tick.first_sequence(1, [2, 1]) == 2
    assert made[5].tick.microbatches == (1, None)
    assert len({StepPlan((), (), (tuple(made[:n]),)).fingerprint() for n in range(7)}) == 7
    asked.clear()
    order = ticks(2, 2, 3)
    made = plan_ticks(order, [nano_batches(4), nano_batches(8)], plan)
    assert len(asked) == len({tick.microbatches for tick in order}) == 6 < len(made) == 14
