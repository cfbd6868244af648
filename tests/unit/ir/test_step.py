"""The plan of a step: JSON and text, a fingerprint of every decision; a carry is plain data."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.errors import ConfigError
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.model import Model
from megatron_balance.ir.step import EMPTY, Carry, StepPlan, from_json, text, to_json
from megatron_balance.planners.base import JointStages, StepContext
from megatron_balance.planning.choice import choose_planner

STAGE, ALL, MODEL = Cluster(2, 2), Cluster(4, 2), Model(4, 2, 16)
STEP = ((300, 140, 72), (512,))


def planned(*, joint: bool = False, ping_pong: bool = False) -> StepPlan:
    stages = JointStages(ALL) if joint else None
    context = StepContext(STAGE, MODEL, AnalyticCost(STAGE, MODEL), joint=stages, ping_pong=ping_pong)
    return choose_planner("distca", {"block": 16}).plan_step(STEP, context)[0]


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("ping_pong", [False, True])
def test_a_step_is_read_back_from_its_json(joint: bool, ping_pong: bool) -> None:
    step = planned(joint=joint, ping_pong=ping_pong)
    assert from_json(to_json(step)) == step
    assert from_json(to_json(step)).fingerprint() == step.fingerprint()


def test_members_and_ticks_are_decisions() -> None:
    whole = planned()
    other = replace(whole, members=((((0, 1, 3)),), ((2,),)))
    assert whole.is_dealt()
    assert not other.is_dealt()
    assert (
        len(
            {
                whole.fingerprint(),
                other.fingerprint(),
                planned(joint=True).fingerprint(),
                planned(ping_pong=True).fingerprint(),
            }
        )
        == 4
    )


def test_the_text_has_a_line_for_each_nano_batch_and_each_tick() -> None:
    step = planned(joint=True, ping_pong=True)
    lines = text(step).splitlines()
    assert lines[0] == f"step {step.fingerprint()}, 2 microbatches"
    assert [line.split()[:2] for line in lines[1:5]] == [["microbatch", each] for each in ("0.0", "0.1", "1.0", "1.1")]
    assert lines[1].endswith("300 tokens: s0")
    assert lines[4].endswith("0 tokens"), "one sequence makes no second half, but its stages attend with the others"
    assert lines[5].startswith("tick 0.0 forward")
    assert lines[5].endswith(": m0.c0 -")
    assert len(lines) == 5 + sum(map(len, step.ticks))


def test_a_plan_for_other_sequences_than_its_members_is_refused() -> None:
    with pytest.raises(ValueError, match="expected one plan for each nano-batch"):
        replace(planned(), members=(((0, 1),), ((2, 3),)))


@pytest.mark.parametrize(
    "damaged", ["", "[]", '{"format": "megatron-balance step 0"}', '{"format": "megatron-balance step 1"}']
)
def test_what_is_no_step_is_refused(damaged: str) -> None:
    with pytest.raises(ConfigError, match="plan of a step"):
        from_json(damaged)


def test_a_carry_is_plain_data_and_equal_however_its_keys_are_ordered() -> None:
    carry = Carry.of("delays", {"held": [5, 3], "since": 7})
    assert Carry.from_json(carry.to_json()) == carry == Carry.of("delays", {"since": 7, "held": (5, 3)})
    assert carry.value() == {"held": [5, 3], "since": 7}
    assert Carry.from_json(EMPTY.to_json()) == EMPTY
    assert EMPTY.is_empty
    with pytest.raises(TypeError):
        Carry.of("delays", {1, 2})
    with pytest.raises(ConfigError, match="not a planner's carry"):
        Carry.from_json("held back: 3")
