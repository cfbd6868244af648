"""The ping-pong benchmark's arithmetic: batches, the order of steps, the rate of the NICs, and the
table made of records.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tools.bench.emulated import experiments, report
from tools.bench.emulated.experiments import CONTEXTS, TURNS, WARM_UP, PingPong
from tools.bench.emulated.point import TOKENS, Kernels, Point

KERNELS = Kernels(0.05, 0.125, 20e9, 0.2)
EXPERIMENT = PingPong(
    out="out",
    batches=1,
    repeats=2,
    seed=0,
    layers=2,
    backward="keep",
    nic_mbit=None,
    calibration_s=1.0,
    core_share=0.06,
)


def test_batches_hold_several_contexts_and_no_document_longer_than_one() -> None:
    for drawn in replace(EXPERIMENT, batches=2, seed=3).drawn().values():
        assert len(drawn) == 2
        for lengths in drawn:
            assert sum(lengths) == TOKENS
            assert max(lengths) <= TOKENS // CONTEXTS


def test_every_batch_is_trained_under_every_variant_in_an_order_that_rotates() -> None:
    (training,) = EXPERIMENT.trainings()
    steps = training.steps
    ids = list(range(len(TURNS)))
    assert [step.variant for step in steps[: len(ids)]] == ids
    assert {step.repeat for step in steps[: len(ids)]} == {WARM_UP}
    turns = [steps[at : at + len(ids)] for at in range(len(ids), len(steps), len(ids))]
    assert len(turns) == 2 * 3
    assert all(len({(s.dataset, s.batch, s.repeat) for s in turn}) == 1 for turn in turns)
    assert all(sorted(s.variant for s in turn) == ids for turn in turns)
    assert turns[0][0].variant != turns[1][0].variant
    assert PingPong.parse(EXPERIMENT.text()) == EXPERIMENT


def test_the_bandwidth_needed_follows_the_computation() -> None:
    drawn, model = EXPERIMENT.drawn()["arxiv"], experiments.grouped_model(2)

    def needed_at(kernels: Kernels) -> float:
        return experiments.needed_bytes_per_s(drawn, experiments.machine_at(Point.of(kernels), model))

    needed = needed_at(KERNELS)
    slower = replace(
        KERNELS, forward_s=2 * KERNELS.forward_s, backward_s=2 * KERNELS.backward_s, linear_flops_per_s=10e9
    )
    assert needed_at(slower) == pytest.approx(needed / 2, rel=0.05)
    assert needed > 0
    every = [lengths for of_set in EXPERIMENT.drawn().values() for lengths in of_set]
    assert EXPERIMENT.point(KERNELS) == experiments.beside_computation(KERNELS, every, 2)
    assert replace(EXPERIMENT, nic_mbit=50.0).point(KERNELS).nic_bits_per_s == 50_000_000


def record(variant: int, repeat: int, step_s: float, waited_s: float) -> report.Record:
    rank: dict[str, Any] = {"step_s": step_s, "all_reduce_s": 0.5, "model_s": step_s - 0.5, "kernel_s": 1.0}
    ranks = [
        {
            **rank,
            "waited_s": waited_s - 0.1,
            "under_way_s": 4.0,
            "exchanges": [(0, "forward", 0, 0, (1,), 1.0, 2.5, 3.0 + waited_s)],
        },
        {
            **rank,
            "waited_s": waited_s + 0.1,
            "under_way_s": 4.0,
            "exchanges": [(0, "forward", 0, 0, (), 3.0, 3.0, 3.0)],
        },
    ]
    names = {
        "nics": 4,
        "dataset": "arxiv",
        "batch": 0,
        "variant_id": variant,
        "variant": TURNS[variant].name,
        "nic_sent": [10**6],
        "nic_received": [2 * 10**6],
    }
    return {**names, "repeat": repeat, "ranks": ranks}


def test_lines_compare_medians_with_te_ring_and_with_nano_batches_one_by_one() -> None:
    seconds = (8.5, 6.5, 6.5, 5.5, 4.5)
    waits = (1.0, 1.0, 1.0, 2.0, 0.5)
    records = [record(v, r, seconds[v] + r, waits[v]) for v in range(len(TURNS)) for r in (0, 1, 2)]
    records.append(record(4, WARM_UP, 100.0, 50.0))
    columns = report.COLUMNS["distca"]
    found = report.lines(records, columns)
    assert [line["variant"] for line in found] == 2 * [variant.name for variant in TURNS]
    line = found[4]
    assert (line["dataset"], line["step_s"], line["model_s"]) == ("arxiv", pytest.approx(5.0), pytest.approx(5.0))
    assert line["ratio"] == pytest.approx(9.0 / 5.0)
    assert line["single_ratio"] == pytest.approx(6.0 / 5.0)
    assert line["hidden_share"] == pytest.approx(1 - 0.5 / 4)
    # of rank 0 alone: rank 1 sent at 3 s, and before that nothing was on its way
    assert line["exposed_s"] == pytest.approx(0.5 / 2)
    assert line["of_single"] == pytest.approx(0.75)
    assert line["spread"] == pytest.approx(2 / 5)
    assert line["nic_mb"] == 2.0
    assert report.markdown(report.headings(columns), report.rows(found, columns)).count("| 75 % | 40 % |") == 2
