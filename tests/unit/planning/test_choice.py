"""The protocol every planner meets: a planner of steps, with a carry, above other planners; traits
are fields of its entry."""

from __future__ import annotations

import ast
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

import megatron_balance
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.errors import ConfigError, InfeasibleError
from megatron_balance.ir.batch import Batch
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.model import Model
from megatron_balance.ir.step import EMPTY, Carry, Layers, Lengths, StepPlan
from megatron_balance.planners import PLANNERS
from megatron_balance.planners.base import Planner, StepContext
from megatron_balance.planning.choice import StepMode, choose_planner, step_mode

CLUSTER, MODEL = Cluster(4, 2), Model(8, 2, 16)
CONTEXT = StepContext(CLUSTER, MODEL, AnalyticCost(CLUSTER, MODEL))
STEP: Lengths = ((4000, 300, 20), (900, 900))


@dataclass(frozen=True, slots=True)
class ShortOrLongOptions:
    """Options of the composite planner."""

    tokens_per_rank: int | None = None
    long: int = 1000


def short_or_long(lengths: Lengths, context: StepContext, carry: Carry, /) -> tuple[StepPlan, Carry]:
    """Ask one planner for steps with a long sequence and another for the rest; carry the number of
    steps."""
    seen = 0 if carry.is_empty else carry.value()["steps"]
    name = "te_ring" if max(map(max, lengths)) > context.options.long else "packing"
    step, _ = context.planner(name, {"tokens_per_rank": context.options.tokens_per_rank}, context.layers)(
        lengths, context, EMPTY
    )
    return step, Carry.of("short_or_long", {"steps": seen + 1}) if context.may_carry else EMPTY


@pytest.fixture
def composite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        PLANNERS, "short_or_long", Planner(None, ShortOrLongOptions, plan_step=short_or_long, ping_pong=True)
    )


@pytest.mark.usefixtures("composite")
def test_a_planner_may_ask_other_planners_through_the_registry() -> None:
    chosen = choose_planner("short_or_long", {"long": 3999})
    long, carry = chosen.plan_step(STEP, CONTEXT)
    short, carry = chosen.plan_step(STEP[1:], CONTEXT, carry)
    assert long == choose_planner("te_ring", {}).plan_step(STEP, CONTEXT)[0]
    assert short == choose_planner("packing", {}).plan_step(STEP[1:], CONTEXT)[0]
    assert carry == Carry.of("short_or_long", {"steps": 2})
    assert chosen.plan(Batch(STEP[0]), CLUSTER, MODEL, CONTEXT.cost) == long.plans[0], (
        "a microbatch is a step of one, with no carry"
    )


@pytest.mark.usefixtures("composite")
def test_layers_and_traits_of_a_planner_of_steps_are_those_of_its_entry() -> None:
    chosen = choose_planner("short_or_long", {}, layers=Layers(remap=True))
    step, _ = chosen.plan_step(((4001, 30, 30),), CONTEXT)
    assert step == choose_planner("te_ring", {}, layers=Layers(remap=True)).plan_step(((4001, 30, 30),), CONTEXT)[0]
    assert step_mode(chosen, 2) == StepMode(ping_pong=True, pipeline="stages")


@pytest.mark.usefixtures("composite")
def test_what_another_planner_held_back_is_trained_by_whoever_can() -> None:
    held = Carry.of("delays", {"since": 3}, ((-5, 700), (-2, 40)))
    for name in PLANNERS:
        chosen = choose_planner(name, {})
        if chosen.planner.plan_step is not None and not chosen.planner.takes_waiting:
            with pytest.raises(
                ConfigError, match=f"planner {name} cannot train the 2 sequences that planner delays held back; go on"
            ):
                chosen.plan_step(STEP, CONTEXT, held)
            continue
        step, after = chosen.plan_step(STEP, CONTEXT, held)
        assert after == EMPTY, name
        trained = sorted(seq for microbatch in step.members for seqs in microbatch for seq in seqs)
        assert trained == [-5, -2, 0, 1, 2, 3, 4], name
    step, _ = choose_planner("short_or_long", {}).plan_step(STEP, CONTEXT, Carry.of("delays", {"since": 3}))
    assert step.is_dealt(), "a memory in which nothing waits is let go"


def test_what_finds_no_room_waits_on() -> None:
    held = Carry.of("delays", None, ((-5, 700), (-2, 40)))
    chosen = choose_planner("te_ring", {"tokens_per_rank": 1100})  # 4,400 tokens a microbatch, of which one has 4,320
    step, after = chosen.plan_step(((4000, 320), (3700, 20)), CONTEXT, held)
    assert [seqs for (seqs,) in step.members] == [(0, 1, -2), (2, 3)] or step.members[1] == ((2, 3, -2),)
    assert after == Carry(waiting=((-9, 700),))
    step, after = chosen.plan_step(((), ()), CONTEXT, after)
    assert (step.members[0], after) == (((-9,),), EMPTY)
    with pytest.raises(InfeasibleError, match="1 sequences that were held back do not fit 1 microbatches"):
        chosen.plan_step(((4000,),), replace(CONTEXT, may_carry=False), Carry(waiting=((-9, 700),)))
    with pytest.raises(InfeasibleError, match="a sequence of 4401 tokens was held back, and a microbatch has at most"):
        chosen.plan_step(((4000,),), CONTEXT, Carry(waiting=((-9, 4401),)))


@pytest.mark.parametrize("name", PLANNERS)
def test_planners_carry_nothing_unless_they_are_asked_to(name: str) -> None:
    step, carry = choose_planner(name, {}).plan_step(STEP, CONTEXT)
    assert carry == EMPTY
    assert sum(plan.num_tokens for plan in step.plans) == sum(map(sum, STEP))
    pooled = [n for microbatch in STEP for n in microbatch]
    for microbatch, plans in zip(step.members, step.microbatches, strict=True):
        for seqs, plan in zip(microbatch, plans, strict=True):
            assert plan.lengths == tuple(pooled[seq] for seq in seqs)


def test_the_number_of_microbatches_stays_where_it_is_not_the_planners() -> None:
    for name, planner in PLANNERS.items():
        step, _ = choose_planner(name, {}).plan_step(STEP, replace(CONTEXT, own_microbatches=False))
        assert len(step.members) == len(STEP)
        assert planner.plan_step is not None or step.members == (((0, 1, 2),), ((3, 4),))


def test_no_file_outside_planners_and_papers_decides_by_a_planners_name() -> None:
    """A comparison with a planner's name, or a table keyed by it, is a trait that is missing in its
    entry; the word auto is also a value of several keys."""
    planners = PLANNERS.keys() - {"auto"}
    package = Path(megatron_balance.__file__).parent
    found: list[str] = []
    for path in sorted(package.rglob("*.py")):
        if path.relative_to(package).parts[0] == "planners" or path.is_relative_to(package / "lab" / "papers"):
            continue
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if any(f'"{name}"' in text for name in planners) else ():
            compared = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
            compared += [key for key in node.keys if key is not None] if isinstance(node, ast.Dict) else []
            names = [each.value for each in compared if isinstance(each, ast.Constant) and each.value in planners]
            found += [f"{path.relative_to(package)}:{node.lineno}: {name}" for name in names]  # pyright: ignore[reportAttributeAccessIssue]
    assert not found


# Plans that agree between processes


FINGERPRINTS = """
from megatron_balance import Cluster, Model, make_planner
from megatron_balance.planners import PLANNERS
lengths = [[900, 31, 31, 7, 420, 2, 64, 64], [1] * 40]
for name in PLANNERS:
    for cluster in (Cluster(8, 4), Cluster(6, 2)):
        for options in ({}, {"tokens_per_rank": 320}) + (({"rule": "paper"},) if name == "zeppelin" else ()):
            plan = make_planner(name, cluster, Model(8, 2, 16), **options)
            print(name, *(plan(batch).fingerprint() for batch in lengths))
"""


def printed_by(code: str, hash_seed: str = "0") -> str:
    process = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONHASHSEED": hash_seed, "PYTHONPATH": ":".join(sys.path)},
    )
    return process.stdout


def test_processes_with_different_hash_seeds_make_the_same_plans() -> None:
    first, second = printed_by(FINGERPRINTS, "0"), printed_by(FINGERPRINTS, "12345")
    assert len(first.splitlines()) == 4 * len(PLANNERS) + 2
    assert first == second


def test_every_planner_has_options_with_a_capacity_that_defaults_to_none() -> None:
    assert all(planner.options().tokens_per_rank is None for planner in PLANNERS.values())
