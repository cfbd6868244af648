"""Steps of pipelines side by side on clocks."""

from __future__ import annotations

import json
from typing import Any

import pytest

from megatron_balance.analysis.change import Layouts, base_sync_s, change, held_bytes
from megatron_balance.cli import main
from megatron_balance.errors import ConfigError
from megatron_balance.ir.step import StepPlan
from megatron_balance.ir.strategy import Strategy
from megatron_balance.planners.base import StepContext
from megatron_balance.planning.choice import choose_planner
from megatron_balance.simulator.setup import Setup
from megatron_balance.simulator.step import simulate_step
from megatron_balance.simulator.ticks import simulate_planned
from tests.unit.simulator.test_simulated_training import MODEL, machine

LENGTHS = ((6000, 3000, 900), (4000, 2000, 100))


def planned(strategy: str, num_ranks: int) -> StepPlan:
    gpus = machine(num_ranks)
    choice = choose_planner("hydraulis", {"strategies": [strategy], "tokens_per_rank": 4096})
    return choice.plan_step(LENGTHS, StepContext(gpus.cluster, MODEL, gpus.cost))[0]


def test_one_pipeline_of_all_ranks_takes_what_its_step_takes() -> None:
    step = planned("tp1-pp2-cp4", 8)
    found = simulate_planned(step, machine(8), machine(8), Setup())
    stage = simulate_step(step.plans, machine(4), Setup(pipeline=2))
    assert found.step_s == pytest.approx(stage.step_s)
    assert found.num_tokens == sum(map(sum, LENGTHS))
    assert len(found.peak_bytes) == 8


def test_a_step_ends_with_its_slowest_pipeline_and_ranks_left_over_hold_nothing() -> None:
    step = planned("tp1-pp1-cp2+tp1-pp1-cp4", 8)
    found = simulate_planned(step, machine(8), machine(8), Setup())
    meeting = found.phases_s["gradient_sync"] + found.phases_s["optimizer"]
    alone = [
        simulate_step(step.of_pipeline(pipeline).plans, machine(ranks), Setup()) for pipeline, ranks in ((0, 2), (1, 4))
    ]
    own = [each.step_s - each.phases_s["gradient_sync"] - each.phases_s["optimizer"] for each in alone]
    assert found.step_s - meeting == pytest.approx(max(own))
    assert found.phases_s["gradient_sync"] > 0
    assert found.peak_bytes[6:].tolist() == [0, 0]
    assert (found.peak_bytes[:6] > 0).all()


def test_degrees_beside_those_of_a_strategy_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=r"says the degrees of its pipelines.*leave out --pipeline"):
        simulate_planned(planned("2*tp1-pp1-cp4", 8), machine(8), machine(16), Setup(pipeline=2))
    config = '{"planner": {"name": "hydraulis", "strategies": ["2*tp1-pp1-cp4"]}}'
    run = _simulate(config, "--tensor-parallel", "2")
    assert run == 2
    assert "--tensor-parallel 2: a strategy says the degrees" in capsys.readouterr().err


def test_simulate_runs_whole_steps_of_a_strategy(capsys: pytest.CaptureFixture[str]) -> None:
    config = '{"planner": {"name": "hydraulis", "strategies": ["2*tp2-pp1-cp1+tp1-pp2-cp2", "2*tp1-pp1-cp4"]}}'
    assert _simulate(config, "--json") == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["step_s"]["median"] > 0
    assert len(found["peak_bytes_per_rank"]) == 8


def test_candidates_of_auto_and_the_baseline_of_full_microbatches_are_simulated(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A tensor-parallel group larger than a node among them."""
    assert _simulate('{"planner": {"name": "hydraulis", "strategies": "auto"}}', "--json") == 0
    auto = json.loads(capsys.readouterr().out)["step_s"]["median"]
    assert _simulate('{"planner": {"name": "megatron", "strategy": "tp8-pp1-cp1"}}', "--json") == 0
    full = json.loads(capsys.readouterr().out)["step_s"]["median"]
    assert auto > 0
    assert full > 0


def _simulate(config: str, *more: str) -> int:
    return _run("simulate", config, *more)


def _run(verb: str, config: str, *more: str) -> int:
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "hydraulis.yaml"
        path.write_text(config)
        words = (
            "--ranks 8 --ranks-per-node 4 --model llama-3b --cluster h200 --lengths 9000,700,300,4000 --microbatches 1"
        )
        return main([verb, *words.split(), "--config", str(path), *more])


def test_weights_that_came_from_another_layout_are_pulled_and_gradients_pushed() -> None:
    """A base layout of TP 2; what the step adds, and the memory of the largest role."""
    gpus = machine(8)
    mixed, whole = Strategy.parse("2*tp1-pp1-cp2+2*tp2-pp1-cp1"), Strategy.parse("tp1-pp1-cp8")
    base = Strategy.parse("4*tp2-pp1-cp1")
    step = planned(str(mixed), 8)
    alone = simulate_planned(step, gpus, gpus, Setup())
    found, off = (
        simulate_planned(step, gpus, gpus, Setup(layouts=Layouts(base, (mixed, whole), overlap)))
        for overlap in (True, False)
    )
    moved = change(base, mixed, gpus.model, gpus.cluster)
    assert (off.phases_s["pull"], off.phases_s["push"]) == moved.whole_s
    assert off.phases_s["gradient_sync"] == 0
    assert off.step_s == pytest.approx(alone.step_s - alone.phases_s["gradient_sync"] + sum(moved.whole_s))
    assert found.change == off.change == moved.traffic.described(gpus.cluster)
    assert 0 < found.phases_s["pull"] + found.phases_s["push"] < sum(moved.whole_s)
    # Ranks of TP 2 hold the memory of TP 1.
    half = held_bytes(base, gpus.model, 8)[0]
    assert found.peak_bytes[:4] == pytest.approx(alone.peak_bytes[:4])
    assert found.peak_bytes[4:] == pytest.approx(alone.peak_bytes[4:] + half)
    itself = simulate_planned(planned(str(base), 8), gpus, gpus, Setup(layouts=Layouts(base, (mixed, base))))
    assert itself.change == {}
    assert itself.phases_s["gradient_sync"] == pytest.approx(sum(base_sync_s(base, gpus.model, gpus.cluster)))


def test_simulate_says_what_steps_pulled_and_pushed(capsys: pytest.CaptureFixture[str]) -> None:
    given = '"strategies": ["2*tp2-pp1-cp1+tp1-pp2-cp2"], "base": "4*tp2-pp1-cp1"'
    config = f'{{"planner": {{"name": "hydraulis", {given}}}}}'
    assert _simulate(config, "--json") == 0
    changes = json.loads(capsys.readouterr().out)["changes"]
    assert changes["steps"] == 1
    assert changes["push_bytes"] == 2 * changes["pull_bytes"] > 0
    assert _simulate(config) == 0
    assert "1 step of another strategy than the base layout: pull" in capsys.readouterr().out
    options = ("-o", "strategies=[2*tp2-pp1-cp1+tp1-pp2-cp2]", "-o", "base=4*tp2-pp1-cp1")
    assert _run("compare", "{}", "--planner", "hydraulis", *options, "--json") == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["changes"] == changes
