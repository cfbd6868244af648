"""Simulated against measured: the paced kernel, the costs' arithmetic, cases, the folder of a run,
and what is said of close planners.
"""

from __future__ import annotations

import json
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_balance.cost.table import LinkTable, load_table, save_table
from megatron_balance.ir.plan import to_json
from tests.support.cost_table import made
from tools.bench.simulated import __main__ as command
from tools.bench.simulated import piece, report
from tools.bench.simulated.calibrate import OfPhase, Pace, at_pace, mean_of, of_phase, without_burst
from tools.bench.simulated.cases import MODEL, Grid, Key, cases_of, flops_per_s
from tools.bench.simulated.paced import PacedKernel
from tools.bench.simulated.report import Line, Pair

GRID = Grid((25.0,), ("keep",), ("arxiv",), 1, 2048, 0, ("te_ring", "hybrid_dp", "packing", "ulysses"))


class Spinning:
    """A kernel that computes for 10 ms."""

    name = "spinning"

    def forward(self, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        until = time.thread_time() + 0.01
        while time.thread_time() < until:
            pass
        return torch.zeros(1), torch.zeros(1)


def line(planner: str, measured: float, simulated: float, spread: float = 0.0) -> Line:
    low, high = measured * (1 - spread / 2), measured * (1 + spread / 2)
    return Line(4, 25.0, "keep", "arxiv", 0, planner, (), measured, low, high, simulated, 0.0, 0.0, 0.0, 3)


def test_a_paced_launch_takes_its_time_of_the_processor_over_the_share() -> None:
    kernel = PacedKernel(Spinning(), 0.25)  # pyright: ignore[reportArgumentType]  all that is called of a kernel
    begin = time.perf_counter()
    kernel.forward((), torch.zeros(1), torch.zeros(1), torch.zeros(1), 1.0)
    assert time.perf_counter() - begin >= 0.04
    assert kernel.computed_s >= 0.01
    assert kernel.spent_s >= 0.04


def test_tables_are_averaged_and_slowed_to_the_pace_of_the_ranks() -> None:
    one = made()
    other = replace(one, attention=replace(one.attention, launch_s=3 * one.attention.launch_s))
    assert mean_of([one, other]).attention.launch_s == pytest.approx(2 * one.attention.launch_s)
    assert mean_of([one, one]) == one
    paced = at_pace(one, Pace(OfPhase(8.0, 0.001), OfPhase(10.0, 0.002), 1.1, 1.2, (0.003, 0.004)))
    assert paced.attention.full_s[0][0] == pytest.approx(8 * one.attention.full_s[0][0])
    assert paced.attention.causal_backward_s[1][1] == pytest.approx(10 * one.attention.causal_backward_s[1][1])
    assert paced.attention.launch_s == pytest.approx(8 * one.attention.launch_s + 0.004)
    assert paced.attention.backward_launch_s == pytest.approx(10 * one.attention.backward_launch_s + 0.006)
    assert paced.merge == one.merge
    assert paced.beside is not None
    assert (paced.beside.intra_node, paced.beside.inter_node) == (1.1, 1.2)


def test_the_pace_of_a_short_and_a_long_launch_is_a_factor_and_something_for_each_launch() -> None:
    assert of_phase((0.001, 0.010), (0.013, 0.085)) == pytest.approx((8.0, 0.005))
    assert of_phase((0.001, 0.010), (0.007, 0.079)) == pytest.approx((8.0, 0.0))


def test_the_burst_of_a_token_bucket_is_no_part_of_a_links_rate() -> None:
    rate, burst, latency_s = 1e6, 20_000, 1e-4
    sizes = (1000, 500_000, 1_000_000)
    seen = (latency_s, *(latency_s + (size - burst) / rate for size in sizes[1:]))
    found = without_burst(LinkTable("inter_node", "gloo", sizes, seen))
    assert found.sizes == (1000, 1_000_000)
    assert found.seconds == pytest.approx((latency_s + 0.001, latency_s + 1.0))


def test_planners_with_the_same_plan_are_one_case_and_every_plan_covers_the_batch() -> None:
    cases = cases_of(GRID, 4, 1e10)
    assert sorted(name for case in cases for name in (case.planner, *case.others)) == sorted(GRID.planners)
    assert all(sum(case.plan.lengths) == 2048 and case.plan.num_ranks == 8 for case in cases)
    assert len({to_json(replace(case.plan, planner="")) for case in cases}) == len(cases)


def test_planners_are_told_the_rate_of_the_kernel_at_its_share() -> None:
    table = made()
    q, k = table.attention.q_tokens[-1], table.attention.k_tokens[-1]
    assert flops_per_s(table, 0.5) == pytest.approx(
        0.5 * MODEL.attention_flops_per_pair * q * k / table.attention.full_s[-1][-1]
    )


def written(folder: Path) -> Path:
    """A run's folder, with times that are made up."""
    save_table(made(), folder / "costs.json")
    entries = [
        {
            "costs": "costs.json",
            **{field.name: getattr(case, field.name) for field in fields(Key)},
            "repeats": [[1.0, 2.0], [1.1, 2.1], [1.2, 2.2]],
            "late_share": 0.01,
            "plan": json.loads(to_json(case.plan)),
        }
        for case in cases_of(GRID, 4, 1e10)
    ]
    (folder / piece.CASES).write_text(json.dumps(entries))
    return folder


def test_a_folder_is_simulated_with_its_own_costs_and_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = piece.all_rows([written(tmp_path)])
    assert rows[0].table == load_table(tmp_path / "costs.json")
    found = report.line_of(rows[0])
    assert (found.measured_s, found.shortest_s, found.longest_s) == pytest.approx((3.2, 3.0, 3.4))
    assert found.spread == pytest.approx(0.4 / 3.2)
    assert found.simulated_s > 0
    (tmp_path / command.NOTE).write_text("Measured at night.\n")
    assert command.main(["compare", str(tmp_path), "--json", "--write", str(tmp_path / "found")]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["summary"]["cases"] == len(rows)
    assert json.loads((tmp_path / "found.json").read_text()) == printed
    assert (tmp_path / "found.md").read_text().count("| te_ring |") == 1
    assert "\n\nMeasured at night.\n\n" in (tmp_path / "found.md").read_text()


def test_slower_kernels_are_simulated_slower(tmp_path: Path) -> None:
    row = piece.all_rows([written(tmp_path)])[0]
    slow = replace(row, table=at_pace(row.table, Pace(OfPhase(1000.0, 0.0), OfPhase(1000.0, 0.0), 1.0, 1.0)))
    assert report.line_of(slow).simulated_s > 2 * report.line_of(row).simulated_s


def test_close_planners_are_in_order_where_their_repetitions_do_not_overlap() -> None:
    first, second, third, far = (
        line("a", 1.0, 1.3),
        line("b", 1.1, 1.2),
        line("c", 1.11, 1.0, spread=0.1),
        line("d", 2.0, 2.0),
    )
    lines = [third, first, far, second]
    pairs = {(pair.faster.planner, pair.slower.planner): pair for pair in report.close_pairs(lines)}
    assert set(pairs) == {("a", "b"), ("a", "c"), ("b", "c")}
    assert pairs["a", "b"].decided
    assert not pairs["a", "b"].right
    assert not pairs["b", "c"].decided
    found = report.summary(lines)
    assert (found.cases, found.close, found.pairs, found.decided, found.wrong) == (4, 3, 3, 2, 2)
    assert (found.clear, found.clear_wrong) == (2, 2)
    assert found.median_error == pytest.approx((abs(1.2 / 1.1 - 1) + abs(1.0 / 1.11 - 1)) / 2)
    assert found.worst_error == pytest.approx(0.3)
    assert sum("Wrong order" in sentence for sentence in report.in_words(lines)) == 2
    assert Pair(first, second).apart == pytest.approx(0.1)


def test_a_right_order_that_is_a_tie_in_the_simulation_is_said_to_be_one() -> None:
    sentences = report.in_words([line("a", 1.0, 1.0), line("b", 1.1, 1.001)])
    assert sum(sentence.startswith("No more than a tie in the simulation (0.1% apart)") for sentence in sentences) == 1


def test_planners_on_other_links_or_batches_are_not_compared() -> None:
    lines = [line("a", 1.0, 1.0), replace(line("b", 1.0, 1.0), mbit=50.0), replace(line("c", 1.0, 1.0), batch=1)]
    assert not report.close_pairs(lines)


@pytest.mark.parametrize(
    "wrong", [["--planners", "te_rin"], ["--datasets", "x"], ["--tokens", "1000"], ["--share", "0.5"]]
)
def test_wrong_options_are_one_line(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["measure", *wrong]) == command.USAGE_ERROR
    assert capsys.readouterr().err.startswith("error: ")
