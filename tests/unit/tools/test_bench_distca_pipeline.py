"""The pipeline benchmark's arithmetic: what steps hold, which idle ticks are which, and the tables
made of records.
"""

from __future__ import annotations

from typing import Any

import pytest

from megatron_balance.planning.ticks import ticks
from tools.bench.emulated import report
from tools.bench.emulated.experiments import APART, REPLICAS, SAMPLE, TOGETHER, WARM_UP, Joint, cut
from tools.bench.emulated.point import Kernels

WAYS = (APART, TOGETHER)

EXPERIMENT = Joint(
    out="out",
    batches=2,
    microbatches=3,
    repeats=2,
    seed=0,
    layers=2,
    backward="keep",
    nic_mbit=None,
    calibration_s=1.0,
    core_share=0.06,
)


def test_a_step_is_cut_back_into_the_samples_it_was_drawn_as() -> None:
    for of_set in EXPERIMENT.drawn().values():
        assert len(of_set) == 2
        for lengths in of_set:
            samples = cut(lengths, SAMPLE)
            assert list(map(sum, samples)) == [SAMPLE] * 3 * REPLICAS
            assert [n for sample in samples for n in sample] == list(lengths)
    assert Joint.parse(EXPERIMENT.text()) == EXPERIMENT
    assert cut((3, 1, 4, 2, 2), 4) == [(3, 1), (4,), (2, 2)]


def test_a_slower_kernel_asks_for_slower_nics() -> None:
    quick, slow = (EXPERIMENT.point(Kernels(s, 2.5 * s, 1e9 / s, 0.06)).nic_bits_per_s for s in (0.05, 0.1))
    assert slow == pytest.approx(quick / 2, rel=0.05)


def test_an_idle_stage_is_warming_up_before_its_passes_and_draining_after_them() -> None:
    order = ticks(2, 3)
    idle = [(n, stage) for n, tick in enumerate(order) for stage, cell in enumerate(tick.cells) if cell is None]
    found = {(stage, order[n].backward, report.warms_up(order, n, stage)) for n, stage in idle}
    assert found == {(1, False, True), (0, False, False), (0, True, True), (1, True, False)}
    assert len(idle) == 4


def record(variant: str, repeat: int, step_s: float) -> report.Record:
    """Two ranks, one on each stage."""
    rank: dict[str, Any] = {
        "step_s": step_s + 0.5,
        "all_reduce_s": 0.5,
        "model_s": step_s,
        "kernel_s": 2.0,
        "waited_s": 1.0,
    }
    idle = [[[True, True, 6 + repeat, 0.2], [False, False, 5, 0.2]], [[False, True, 9, 0.1], [True, False, 4, 0.1]]]
    ranks = [{**rank, "idle": each if variant == TOGETHER else []} for each in idle]
    names = {
        "nics": 4,
        "dataset": "arxiv",
        "batch": 0,
        "variant_id": WAYS.index(variant),
        "variant": variant,
        "nic_sent": [10**6],
        "nic_received": [2 * 10**6],
    }
    return {**names, "repeat": repeat, "ranks": ranks}


def test_tables_compare_steps_turn_by_turn_and_count_what_idle_stages_attended_to() -> None:
    records = [
        record(variant, repeat, step_s + repeat)
        for variant, step_s in ((APART, 8.0), (TOGETHER, 5.0))
        for repeat in (0, 1)
    ]
    records += [record(TOGETHER, WARM_UP, 100.0)]
    apart, together = report.lines(records, report.COLUMNS["pipeline"])[:2]
    assert (apart["step_s"], apart["ratio"], apart["low"], apart["high"]) == (8.5, 1, 1, 1)
    assert (together["step_s"], together["ratio"]) == (5.5, pytest.approx(8.5 / 5.5))
    assert (together["low"], together["high"]) == (9 / 6, 8 / 5)
    assert together["spread"] == pytest.approx(1 / 5.5)
    first, last = report.idle_rows(records)
    assert first == ["0", "0", "-", "6.5", "5.0", "-", "11.5", "11", "0.40", "20 %"]
    assert last[2:8] == ["9.0", "-", "-", "4.0", "13.0", "13"]
