"""Ticks of a pipeline: every pass once, when its inputs are there, in one phase at a time, and no
more of them than 1F1B has."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_balance.errors import ConfigError
from megatron_balance.ir.columns import Rows
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.ir.step import Cell, StepPlan, Tick
from megatron_balance.planning.ticks import neighbour, passes_on, plan_ticks, ticks
from megatron_balance.simulator import pipeline
from tests.support import by_hand


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[int, int, int]:
    """Stages, microbatches, chunks."""
    stages, chunks = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    return stages, draw(st.integers(1, 4)) * stages if chunks > 1 else draw(st.integers(1, 12)), chunks


def when(order: tuple[Tick, ...]) -> dict[tuple[bool, int, int, int], int]:
    """(backward, stage, chunk, microbatch) -> the tick it is run in; every pass once."""
    found: dict[tuple[bool, int, int, int], int] = {}
    for at, tick in enumerate(order):
        for stage, cell in enumerate(tick.cells):
            if cell is not None:
                key = (tick.backward, stage, cell.chunk, cell.microbatch)
                assert key not in found, "run twice"
                found[key] = at
    return found


@settings(max_examples=60, deadline=None)
@given(pipelines())
def test_every_pass_is_run_once_and_after_its_inputs(shape: tuple[int, int, int]) -> None:
    stages, microbatches, chunks = shape
    at = when(ticks(*shape))
    assert len(at) == 2 * stages * microbatches * chunks
    last = (stages - 1, chunks - 1)
    for (backward, stage, chunk, microbatch), tick in at.items():
        if backward:
            assert at[False, stage, chunk, microbatch] < tick
        if (stage, chunk) != (last if backward else (0, 0)):
            place = chunk * stages + stage + (1 if backward else -1)
            assert at[backward, place % stages, place // stages, microbatch] < tick


@settings(max_examples=60, deadline=None)
@given(pipelines())
def test_there_are_no_more_ticks_than_one_forward_one_backward_has(shape: tuple[int, int, int]) -> None:
    stages, microbatches, chunks = shape
    order = ticks(*shape)
    alike = pipeline.run(stages, microbatches, chunks, 1, lambda _stage, _pass, begin: begin + 1, lambda _: np.zeros(1))
    assert len(order) == 2 * (microbatches * chunks + stages - 1) <= alike.total_s
    assert all(any(cell is not None for cell in tick.cells) for tick in order), "a tick of nothing"


@settings(max_examples=60, deadline=None)
@given(pipelines())
def test_a_stage_holds_what_the_decision_says(shape: tuple[int, int, int]) -> None:
    stages, microbatches, chunks = shape
    order = ticks(*shape)
    for stage in range(stages):
        held = np.cumsum([0 if tick.cells[stage] is None else 1 - 2 * tick.backward for tick in order])
        expected = 2 * (stages - 1 - stage) + 1 if chunks == 1 else chunks * stages + stages - 1 - 2 * stage
        assert held.max() == min(expected, microbatches * chunks)
        assert held[-1] == 0


@settings(max_examples=60, deadline=None)
@given(pipelines())
def test_a_result_goes_to_the_cell_that_needs_it(shape: tuple[int, int, int]) -> None:
    stages, microbatches, chunks = shape
    order = ticks(*shape)
    at = when(order)
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


def test_interleaved_stages_need_whole_groups_of_microbatches() -> None:
    with pytest.raises(ConfigError, match="3 microbatches are not a multiple of 2 pipeline stages"):
        ticks(2, 3, 2)
    assert len(ticks(2, 3)) == 8


def nano_batches(*lengths: int) -> MicrobatchPlan:
    """Each sequence in two nano-batches on two ranks."""
    fragments = [(rank, seq, rank * n // 2, (rank + 1) * n // 2) for rank in (0, 1) for seq, n in enumerate(lengths)]
    return by_hand.plan(lengths, 2, by_hand.task_table(fragments), heads=(1, 1))


def test_the_microbatches_of_a_tick_lie_side_by_side() -> None:
    asked: list[tuple[tuple[int, ...], list[tuple[int, ...]]]] = []

    def plan(lengths: tuple[int, ...], owned: Rows) -> MicrobatchPlan:
        asked.append((lengths, list(owned)))
        return by_hand.plan(lengths, 4, by_hand.task_table(owned), ranks_per_node=2, heads=(1, 1))

    plans = [nano_batches(4, 6), nano_batches(8)]
    made = plan_ticks(ticks(2, 2), plans, plan)
    assert [tick.plan.lengths for tick in made] == [(4, 6), (8, 4, 6), (4, 6), (8,), (4, 6, 8), (8,)]
    assert asked[1] == ((8, 4, 6), [(0, 0, 0, 4), (1, 0, 4, 8), (2, 1, 0, 2), (2, 2, 0, 3), (3, 1, 2, 4), (3, 2, 3, 6)])
    assert made[4].tick.first_sequence(1, [2, 1]) == 2
    assert made[5].tick.microbatches == (1, None)
    assert len({StepPlan((), (), (tuple(made[:n]),)).fingerprint() for n in range(7)}) == 7


def test_ticks_of_the_same_microbatches_are_planned_once() -> None:
    asked: list[tuple[int, ...]] = []

    def plan(lengths: tuple[int, ...], owned: Rows) -> MicrobatchPlan:
        asked.append(lengths)
        return by_hand.plan(lengths, 4, by_hand.task_table(owned), ranks_per_node=2, heads=(1, 1))

    order = ticks(2, 2, 3)
    made = plan_ticks(order, [nano_batches(4), nano_batches(8)], plan)
    assert len(asked) == len({tick.microbatches for tick in order}) == 6 < len(made) == 14
