"""Whole steps planned for pipeline stages that attend together: on the spot, and ahead in a process of its own."""

from __future__ import annotations

import pytest

from megatron_balance.compile.pipeline import expand, layout
from megatron_balance.compile.verify import verify
from megatron_balance.errors import ConfigError
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.model import Model
from megatron_balance.planning.ahead import Pipeline, PlanAhead, PlanSpec
from megatron_balance.planning.layers import Layers
from megatron_balance.planning.tick_planner import TickPlanner

STEP = ((300, 140, 72), (512,), (64,) * 8, (200, 200, 112))


def spec(planner: str = "distca", num_chunks: int = 1, **options: object) -> PlanSpec:
    """Two stages of two ranks."""
    return PlanSpec(planner, Cluster(2, 2), Model(4, 2, 16), Layers(), options, None, Pipeline(Cluster(4, 2), num_chunks))


@pytest.mark.parametrize("num_chunks", [1, 2])
def test_a_step_planned_ahead_is_the_one_planned_on_the_spot(num_chunks: int) -> None:
    asked = spec(num_chunks=num_chunks, block=16)
    assert PlanSpec.from_json(asked.to_json()) == asked
    here = TickPlanner(asked)
    ahead = PlanAhead(asked)
    try:
        ahead.submit_step(7, STEP)
        ready = ahead.take(7)
    finally:
        ahead.close()
    assert ready is not None
    assert here.from_flat(ready.plans, len(STEP)) == here.plan(STEP)


def test_every_rank_keeps_its_rows_from_its_forward_to_its_backward() -> None:
    owned, planned = TickPlanner(spec(block=16)).plan(STEP)
    for one in planned:
        verify(expand(one.plan, "replay"))
        for rank in range(4):
            microbatch, stage = one.tick.microbatches[rank // 2], rank // 2
            own = layout(one.plan, rank)
            if microbatch is None:
                assert not len(own), "an idle stage has no rows"
                continue
            first = one.tick.first_sequence(stage, [len(m) for m in STEP])
            assert (own - [first, 0, 0]).tolist() == layout(owned[microbatch], rank % 2).tolist()


def test_an_evaluation_step_has_no_backward() -> None:
    _, planned = TickPlanner(spec()).plan(STEP, forward_only=True)
    assert [one.tick.backward for one in planned] == [False] * 5


def test_a_planner_that_plans_stage_by_stage_says_so() -> None:
    with pytest.raises(ConfigError, match="planner zeppelin cannot plan several pipeline stages together; these can: distca"):
        TickPlanner(spec("zeppelin")).plan(STEP)
