"""The ping-pong benchmark's arithmetic: batches, the order of steps, the rate of the NICs, and the
table made of records.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tools.bench.distca import point as distca
from tools.bench.distca import report
from tools.bench.distca.job import VARIANTS, Turns
from tools.bench.emulated.point import TOKENS, Kernels, Point
from tools.bench.emulated.steps import WARM_UP

KERNELS = Kernels(0.05, 0.125, 20e9, 0.2)
EXPERIMENT = Turns(
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
    for drawn in distca.batches(2, 3).values():
        assert len(drawn) == 2
        for lengths in drawn:
            assert sum(lengths) == TOKENS
            assert max(lengths) <= TOKENS // distca.CONTEXTS


def test_every_batch_is_trained_under_every_variant_in_an_order_that_rotates() -> None:
    steps = EXPERIMENT.steps()
    ids = list(range(len(VARIANTS)))
    assert [step.variant for step in steps[: len(ids)]] == ids
    assert {step.repeat for step in steps[: len(ids)]} == {WARM_UP}
    turns = [steps[at : at + len(ids)] for at in range(len(ids), len(steps), len(ids))]
    assert len(turns) == 2 * 3
    assert all(len({(s.dataset, s.batch, s.repeat) for s in turn}) == 1 for turn in turns)
    assert all(sorted(s.variant for s in turn) == ids for turn in turns)
    assert turns[0][0].variant != turns[1][0].variant
    assert Turns.parse(EXPERIMENT.text()) == EXPERIMENT


def test_the_bandwidth_needed_follows_the_computation() -> None:
    drawn = distca.batches(1, 0)["arxiv"]
    point = Point.of(KERNELS)
    needed = distca.needed_bytes_per_s(drawn, distca.machine(point, 2))
    slower = replace(
        KERNELS, forward_s=2 * KERNELS.forward_s, backward_s=2 * KERNELS.backward_s, linear_flops_per_s=10e9
    )
    assert distca.needed_bytes_per_s(drawn, distca.machine(Point.of(slower), 2)) == pytest.approx(needed / 2, rel=0.05)
    assert needed > 0
    assert EXPERIMENT.point(KERNELS) == distca.point(
        KERNELS, [n for each in distca.batches(1, 0).values() for n in each], 2
    )


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
        "dataset": "arxiv",
        "batch": 0,
        "variant": VARIANTS[variant].name,
        "nic_sent": [10**6],
        "nic_received": [2 * 10**6],
    }
    return {**names, "repeat": repeat, "ranks": ranks}


def test_lines_compare_medians_with_te_ring_and_with_nano_batches_one_by_one() -> None:
    seconds = (8.5, 6.5, 6.5, 5.5, 4.5)
    waits = (1.0, 1.0, 1.0, 2.0, 0.5)
    records = [record(v, r, seconds[v] + r, waits[v]) for v in range(len(VARIANTS)) for r in (0, 1, 2)]
    records.append(record(4, WARM_UP, 100.0, 50.0))
    found = report.lines(records)
    assert [line.variant for line in found] == 2 * [variant.name for variant in VARIANTS]
    line = found[4]
    assert (line.dataset, line.step_s, line.model_s) == ("arxiv", pytest.approx(5.0), pytest.approx(5.0))
    assert line.ratio == pytest.approx(9.0 / 5.0)
    assert line.single_ratio == pytest.approx(6.0 / 5.0)
    assert line.hidden_share == pytest.approx(1 - 0.5 / 4)
    # of rank 0 alone: rank 1 sent at 3 s, and before that nothing was on its way
    assert line.exposed_s == pytest.approx(0.5 / 2)
    assert line.of_single == pytest.approx(0.75)
    assert line.spread == pytest.approx(2 / 5)
    assert line.nic_mb == 2.0
    assert report.markdown(found).count("| 75 % | 40 % |") == 2
