"""Our rules `hybrid` against the scheduler of the installed megatron-core, group by group."""

from __future__ import annotations

import dataclasses
import logging
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from megatron_balance import Batch, Cluster, Model, make_planner
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.ir.step import Layers
from megatron_balance.megatron import planning as own
from megatron_balance.planners import megatron
from megatron_balance.planners.megatron import MegatronDynamicOptions, plan_with
from megatron_balance.planning.choice import planning_cost
from megatron_balance.planning.step_planner import PlanSpec

pytest.importorskip("torch")
pytest.importorskip("megatron.core")


pytestmark = pytest.mark.megatron


def batches(count: int) -> list[tuple[list[int], int, int]]:
    """Lengths with a long tail, tokens of a rank, ranks; every sequence fits the ranks together."""
    rng = random.Random(3)
    made = []
    for _ in range(count):
        num_ranks, tokens = 2 ** rng.randrange(6), rng.choice([64, 1000, 4096])
        lengths = [
            max(1, min(num_ranks * tokens, int(rng.lognormvariate(5, 1.5) * tokens / 150)))
            for _ in range(rng.randint(1, 60))
        ]
        made.append((lengths, tokens, num_ranks))
    return made


def test_hybrid_makes_the_groups_that_megatron_makes() -> None:
    scheduler = own.own_scheduler()
    assert scheduler is not None
    for lengths, tokens, num_ranks in batches(300):
        assert megatron.RULES["hybrid"](lengths, tokens, num_ranks) == scheduler(lengths, tokens, num_ranks)


def test_a_plan_made_by_megatron_itself_is_the_plan_of_our_rules() -> None:
    scheduler = own.own_scheduler()
    assert scheduler is not None
    cluster, model, lengths = Cluster(8, 4), Model(8, 2, 16), (300, 140, 40, 20, 7, 1, 90, 90, 65)
    ours = make_planner("megatron_dynamic", cluster, model, rules="hybrid")(lengths)
    assert plan_with(scheduler, Batch(lengths), cluster, model, MegatronDynamicOptions()) == ours


def test_a_scheduler_that_fails_is_left_alone_and_said_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> list[object]:
        raise AssertionError("no group")

    monkeypatch.setattr(own, "_schedule", broken)
    with caplog.at_level(logging.WARNING):
        assert own.own_scheduler() is None
    assert (
        "has no scheduler of context-parallel groups that works (AssertionError: no group); use our rules"
        in caplog.text
    )


SPEC = PlanSpec(
    "megatron_dynamic",
    Cluster(8, 4),
    Model(8, 2, 16),
    Layers(),
    {"tokens_per_rank": 200, "rules": "hybrid", "slack": 1.5},
)
LENGTHS = (300, 140, 40, 20, 7, 1, 90, 90, 65)


def planner(spec: PlanSpec) -> Callable[[Batch], MicrobatchPlan]:
    """The planner by Megatron's own scheduler, layers included."""
    choice = own.by_own_scheduler(spec.choice())
    assert choice is not None
    cost = planning_cost(spec.cluster, spec.model, None)
    return lambda batch: choice.plan(batch, spec.cluster, spec.model, cost)


def test_training_plans_by_megatrons_own_code(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[tuple[int, ...]] = []
    schedule = own._schedule

    def noted(lengths: Sequence[int], tokens: int, num_ranks: int) -> list[Any]:
        asked.append(tuple(lengths))
        return schedule(lengths, tokens, num_ranks)

    monkeypatch.setattr(own, "_schedule", noted)
    with caplog.at_level(logging.INFO):
        plan = planner(SPEC)
    assert "context-parallel groups by BalancedCPScheduler of megatron-core" in caplog.text
    asked.clear()
    made = plan(Batch(LENGTHS))
    assert LENGTHS in asked
    assert made == make_planner("megatron_dynamic", SPEC.cluster, SPEC.model, SPEC.layers, **SPEC.options)(LENGTHS)


def test_a_batch_that_megatrons_code_fails_on_is_planned_by_our_rules(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    schedule = own._schedule

    def moody(lengths: Sequence[int], tokens: int, num_ranks: int) -> list[Any]:
        if tuple(lengths) == LENGTHS:
            raise IndexError("list index out of range")
        return schedule(lengths, tokens, num_ranks)

    monkeypatch.setattr(own, "_schedule", moody)
    plan = planner(SPEC)
    with caplog.at_level(logging.WARNING):
        assert plan(Batch(LENGTHS)) == plan(Batch(LENGTHS))
    assert plan(Batch(LENGTHS)) == make_planner(
        "megatron_dynamic", SPEC.cluster, SPEC.model, SPEC.layers, **SPEC.options
    )(LENGTHS)
    assert (
        caplog.text.count("Megatron's scheduler fails for 9 sequences on 8 ranks of 200 tokens (IndexError: list index")
        == 1
    )


def test_other_planners_and_rules_are_not_megatrons() -> None:
    assert (
        own.by_own_scheduler(dataclasses.replace(SPEC, options={**SPEC.options, "rules": "dynamic"}).choice()) is None
    )
    assert own.by_own_scheduler(dataclasses.replace(SPEC, name="te_ring", options={}).choice()) is None
