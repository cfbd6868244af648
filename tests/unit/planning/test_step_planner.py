"""Whole steps by one spec: on the spot and ahead in a process of its own, with stages that attend
together, and with a carry."""

from __future__ import annotations

import io
import json
import time

import pytest

from megatron_balance.compile.pipeline import expand, layout
from megatron_balance.compile.verify import verify
from megatron_balance.errors import ConfigError
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.layers import Layers
from megatron_balance.ir.model import Model
from megatron_balance.ir.step import EMPTY, Carry, to_json
from megatron_balance.planning.ahead import PlanAhead, answer_requests
from megatron_balance.planning.step_planner import Pipeline, PlanSpec, StepPlanner

STEP = ((300, 140, 72), (512,), (64,) * 8, (200, 200, 112))


def spec(planner: str = "distca", num_chunks: int = 1, *, ping_pong: bool = False, **options: object) -> PlanSpec:
    """Two stages of two ranks."""
    return PlanSpec(
        planner, Cluster(2, 2), Model(4, 2, 16), Layers(), options, None, Pipeline(Cluster(4, 2), num_chunks), ping_pong
    )


@pytest.mark.parametrize(("num_chunks", "ping_pong"), [(1, False), (2, False), (1, True)])
def test_a_step_planned_ahead_is_the_one_planned_on_the_spot(num_chunks: int, ping_pong: bool) -> None:
    asked = spec(num_chunks=num_chunks, ping_pong=ping_pong, block=16)
    assert PlanSpec.from_json(asked.to_json()) == asked
    ahead = PlanAhead(asked)
    try:
        ahead.submit(7, STEP)
        deadline = time.monotonic() + 60
        while (seen := ahead.peek(7)) is None and time.monotonic() < deadline:
            time.sleep(0.01)
        ready = ahead.take(7)
        assert ahead.peek(7) is None, "it was taken"
    finally:
        ahead.close()
    assert ready is not None
    assert (ready.step, ready.after) == StepPlanner(asked).plan(STEP)
    assert seen == ready.step


def test_every_rank_keeps_its_rows_from_its_forward_to_its_backward() -> None:
    step, _ = StepPlanner(spec(block=16)).plan(STEP)
    (ticks,) = step.ticks
    for one in ticks:
        verify(expand(one.plan, "replay"))
        for rank in range(4):
            microbatch, stage = one.tick.microbatches[rank // 2], rank // 2
            own = layout(one.plan, rank)
            if microbatch is None:
                assert not len(own), "an idle stage has no rows"
                continue
            first = one.tick.first_sequence(stage, [len(m) for m in STEP])
            assert (own - [first, 0, 0]).tolist() == layout(step.plans[microbatch], rank % 2).tolist()


def test_an_evaluation_step_has_no_backward() -> None:
    (ticks,) = StepPlanner(spec()).plan_evaluation(STEP).ticks
    assert [one.tick.backward for one in ticks] == [False] * 5


def test_a_planner_that_plans_stage_by_stage_says_so() -> None:
    with pytest.raises(
        ConfigError, match="planner zeppelin cannot plan several pipeline stages together; these can: distca"
    ):
        StepPlanner(spec("zeppelin")).plan(STEP)


def answers(spec_: PlanSpec, *requests: tuple[tuple[tuple[int, ...], ...], Carry | None]) -> list[dict[str, object]]:
    """The answers of the planning process to steps, each with a carry or, None, with that of the
    step before."""
    lines = [
        {"lengths": lengths, "carry": None if carry is None else json.loads(carry.to_json())}
        for lengths, carry in requests
    ]
    out = io.BytesIO()
    text = "\n".join([spec_.to_json(), *map(json.dumps, lines)])
    answer_requests(io.BytesIO(text.encode()), out)
    return [json.loads(line) for line in out.getvalue().splitlines()]


def test_steps_behind_one_that_cannot_be_planned_wait_for_a_carry_of_their_own() -> None:
    small = PlanSpec("te_ring", Cluster(2, 2), Model(4, 2, 16), Layers(), {"tokens_per_rank": 100})
    fits, large = ((100, 90),), ((201,),)
    first, refused, behind, again = answers(small, (fits, None), (large, None), (fits, None), (fits, EMPTY))
    assert first["step"] == again["step"] == json.loads(to_json(StepPlanner(small).plan(fits)[0]))
    assert refused["step"] is None
    assert behind["step"] is None
