from __future__ import annotations

import json
from dataclasses import replace

import pytest

from megatron_balance.errors import ConfigError
from megatron_balance.ir.columns import Rows
from megatron_balance.ir.plan import MicrobatchPlan, TaskTable, Zone, from_json, to_json
from megatron_balance.ir.step import StepPlan

PLAN = MicrobatchPlan(
    "by_hand",
    lengths=(9, 4),
    num_ranks=2,
    ranks_per_node=2,
    num_heads=4,
    num_kv_heads=2,
    zones=(
        Zone("intra-node", "ring", (0, 1), (0,)),
        TaskTable("tiles", fragments=Rows.of(4, [(1, 1, 0, 4)]), tasks=Rows.of(6, [(0, 1, 0, 4, 0, 4)])),
    ),
)


def test_the_fingerprint_is_the_same_on_every_host() -> None:
    # Written down once: a change here means that ranks of different versions would disagree.
    assert PLAN.fingerprint() == "58947843542b29dd"


@pytest.mark.parametrize(
    "other",
    [
        replace(PLAN, lengths=(9, 5)),
        replace(PLAN, zones=PLAN.zones[::-1]),
        replace(PLAN, zones=(replace(PLAN.zones[0], ranks=(1, 0)), PLAN.zones[1])),
        replace(PLAN, num_kv_heads=4),
    ],
)
def test_the_fingerprint_differs_when_a_decision_differs(other: MicrobatchPlan) -> None:
    assert other.fingerprint() != PLAN.fingerprint()
    assert StepPlan.whole((other,)).fingerprint() != StepPlan.whole((PLAN,)).fingerprint()


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("no json", r"not a plan: "),
        ("[1, 2]", r"not a plan of this version: .*, got None"),
        ('{"format": "something else"}', r"expected format 'megatron-balance plan 3', got 'something else'"),
        (json.dumps({"format": "megatron-balance plan 3"}), r"damaged plan: KeyError: 'planner'"),
        (
            to_json(PLAN).replace('"lengths":[9,4]', '"lengths":[9,4.5]'),
            r"damaged plan: .*expected a list of whole numbers",
        ),
        (to_json(PLAN).replace("[1,1,0,4]", "[1,1,0]"), r"damaged plan: .*3 columns, expected 4"),
    ],
)
def test_a_file_that_is_no_plan_is_refused_with_the_reason(source: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        from_json(source)
