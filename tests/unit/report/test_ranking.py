"""Words about planners that a job can run or cannot, and what they save; rows by hand."""

from __future__ import annotations

from typing import Any

from megatron_balance.lab.bench import best_of, hold_against, in_the_mean, saving
from megatron_balance.lab.report.study import answer

TRIED: dict[str, Any] = {"tries": [], "fits": True, "planner": "zeppelin", "step_s": 1.0}


def row(planner: str, step_s: float, **more: Any) -> dict[str, Any]:
    """A row whose steps all take as long, unless `tokens_per_s` says otherwise."""
    usual = {"fits": True, "hides": True, "tokens_per_s": 1e3 / step_s, "mfu": 0.4, "peak_bytes": 2e11, "plan_ms": 1.0}
    found = {"planner": planner, "step_s": step_s, "context_parallel": None, **usual, **more}
    return found | {"gpu_hours": 1e6 / found["tokens_per_s"]}


def answered(base: dict[str, Any], other: dict[str, Any]) -> list[str]:
    rows = [base, other]
    hold_against(rows, base)
    return answer(rows, ("megatron", "zeppelin"), {"sentence": "."}, TRIED, 1.41e11)


def test_where_nothing_runs_nothing_is_best_and_the_answer_begins_with_it() -> None:
    rows = [row("megatron", 2.0, fits=False), row("zeppelin", 1.0, hides=False)]
    assert best_of(rows) is None
    said = answered(*rows)
    assert said[0].startswith("No planner that was compared fits in memory and plans within a step; the nearest, zep")
    assert "longer than the step" in said[1]


def test_a_baseline_that_no_job_can_run_is_said_to_be_one() -> None:
    base, other = row("megatron", 2.0, fits=False, context_parallel=8), row("zeppelin", 1.0)
    assert answered(base, other)[0] == (
        "zeppelin is 2.00 times as fast as megatron (CP 8): 1.00 s instead of 2.00 s a step (simulated). megatron does "
        "not fit in memory: no job takes its time."
    )
    assert saving(other, base, None).endswith("; megatron does not fit in memory, so no job spends them")


def test_median_steps_that_say_otherwise_than_all_of_them_are_said_to() -> None:
    base, other = row("megatron", 2.0), row("zeppelin", 1.0, tokens_per_s=505.0)
    said = answered(base, other)[0]
    assert other["mean_speedup"] == 1.01
    assert said.endswith(" These are median steps; over all steps 1.01x, over the median one 2.00x.")
    assert saving(other, base, None).endswith("; speedup over all steps 1.01x, over the median one 2.00x")
    alike = row("zeppelin", 1.0)
    assert "median" not in answered(row("megatron", 2.0), alike)[0]
    assert in_the_mean(alike) == ""
