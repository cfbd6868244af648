"""The emulated ablation's arithmetic: batches, the point, the order of steps, and the table made of
records.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tools.bench.emulated import __main__ as command
from tools.bench.emulated import report
from tools.bench.emulated.ablation import ABLATION, BASELINE, WARM_UP, Ablation
from tools.bench.emulated.device import share_of_core
from tools.bench.emulated.point import (
    DATASETS,
    SHAPE,
    SHAPES,
    TOKENS,
    TRANSFER_TO_ROUND,
    Kernels,
    Point,
    draw_batches,
    scaled,
)

KERNELS = Kernels(0.05, 0.125, 20e9, 0.2)


def experiment(**changes: Any) -> Ablation:
    keys: dict[str, Any] = {
        "out": "out",
        "nics": (4, 2),
        "batches": (2, 1),
        "repeats": 2,
        "seed": 0,
        "layers": 1,
        "backward": "replay",
        "chosen": (0, 1, 4),
        "nic_mbit": None,
        "calibration_s": 1.0,
        "core_share": 0.2,
        "shape": "2x4",
    }
    return Ablation(**{**keys, **changes})


def test_scaled_batches_hold_exactly_the_context_and_keep_proportions() -> None:
    assert scaled([4 * 100, 4 * 28, 6, 1, 1]) == (100, 28, 1, 1)
    for name in DATASETS:
        for batch in draw_batches(name, 3, seed=5):
            assert sum(batch) == TOKENS
            assert min(batch) >= 1
    assert draw_batches("arxiv", 2, 7) == draw_batches("arxiv", 2, 7)
    assert draw_batches("arxiv", 2, 7) != draw_batches("prolong64k", 2, 7)


def test_the_point_has_the_papers_ratio_and_tells_planners_the_same_rates() -> None:
    point = Point.of(KERNELS)
    assert point.transfer_to_round == pytest.approx(TRANSFER_TO_ROUND, rel=1e-6)
    cluster = point.cluster(2)
    assert SHAPE.hop_bytes / cluster["nic_bytes_per_s"] == pytest.approx(
        TRANSFER_TO_ROUND * KERNELS.forward_s, rel=1e-6
    )
    assert cluster["intra_bytes_per_s"] == pytest.approx(8 * cluster["nic_bytes_per_s"], rel=1e-6)
    assert cluster["ranks_per_nic"] == 2
    assert point.topology(2).ranks_per_nic == 2
    assert Point(KERNELS, 2 * point.nic_bits_per_s).transfer_to_round == pytest.approx(TRANSFER_TO_ROUND / 2, rel=1e-6)


def test_every_batch_is_trained_under_every_variant_each_repeat_in_an_order_that_rotates() -> None:
    run = experiment()
    trainings = run.trainings()
    steps = trainings[0].steps
    warm_up, measured = steps[:3], steps[3:]
    assert [step.repeat for step in warm_up] == [WARM_UP] * 3
    assert [step.variant for step in warm_up] == [0, 1, 4]
    turns = [measured[at : at + 3] for at in range(0, len(measured), 3)]
    assert len(turns) == 2 * 2 * len(DATASETS)
    assert all(len({(s.dataset, s.batch, s.repeat, s.lengths) for s in turn}) == 1 for turn in turns)
    assert [tuple(s.variant for s in turn) for turn in turns[:4]] == [(0, 1, 4), (1, 4, 0), (4, 0, 1), (0, 1, 4)]
    assert len(trainings[1].steps) == 3 + 3 * 2 * len(DATASETS)
    assert Ablation.parse(run.text()) == run


def record(variant: int, batch: int, repeat: int, seconds: float, **changes: Any) -> report.Record:
    rank = {
        "forward_calls": [(10.0, 10.0 + seconds / 6), (20.0, 20.0 + seconds / 6)],
        "backward_calls": [(30.0, 30.0 + 2 * seconds / 3)],
        "step_s": seconds + 1.5,
        "all_reduce_s": 0.5,
        "hidden_share": 0.25,
        "cpu_s": 0.4,
        "model_s": 4.0,
        "waited_s": 2.0,
        "used": [(1.0, 100.0), (2.5, 103.2)],
    }
    # it waits for the other to come
    prefetchable = [(start - 1.0, stop - 0.01) for start, stop in rank["backward_calls"]]
    idle = {**rank, "backward_calls": prefetchable, "hidden_share": 0.75}
    body: report.Record = {
        "nics": 4,
        "dataset": "arxiv",
        "batch": batch,
        "repeat": repeat,
        "variant_id": variant,
        "variant": ABLATION[variant].name,
        "share": 0.2,
        "cores": 2,
        "loss": 5.0,
        "grad_norm": 0.25,
        "ranks": [rank, idle],
        "nic_sent": [1_000_000, 0],
        "nic_received": [0, 3_000_000],
        "plan_nic_sent": [1_000_000 * report.GOODPUT, 0],
        "plan_nic_received": [0, 2_900_000 * report.GOODPUT],
    }
    return {**body, **changes}


def test_ratios_compare_the_same_batches_and_leave_the_warm_up_out() -> None:
    records = [record(0, 0, WARM_UP, 100.0), record(4, 0, WARM_UP, 1.0)]
    records += [
        record(0, 0, 0, 6.0),
        record(4, 0, 0, 2.0),
        record(0, 0, 1, 6.0),
        record(4, 0, 1, 2.2),
        record(0, 0, 2, 6.0),
        record(4, 0, 2, 1.0),
    ]
    records += [record(0, 1, 0, 6.0), record(4, 1, 0, 4.0)]
    by_name = {(line["dataset"], line["variant"]): line for line in report.lines(records)}
    base, whole = by_name["arxiv", BASELINE], by_name["arxiv", ABLATION[4].name]
    assert (base["attention_ratio"], base["step_ratio"]) == (1.0, 1.0)
    assert whole["attention_s"] == pytest.approx(3.0)  # medians 2 and 4
    assert whole["attention_ratio"] == pytest.approx(2.0)
    assert (whole["low"], whole["high"]) == pytest.approx((1.5, 3.0))
    assert whole["spread"] == pytest.approx(0.6)
    assert whole["step_ratio"] == pytest.approx((7.0 + 7.0) / (3.0 + 5.0))
    assert whole["hidden_share"] == pytest.approx(0.5)
    assert by_name["mean", ABLATION[4].name]["attention_ratio"] == pytest.approx(2.0)


def test_a_step_is_disturbed_where_a_rank_is_slow_or_others_take_cores() -> None:
    calm = record(0, 0, 0, 6.0)
    assert report.speed(calm) == pytest.approx(1.0)
    assert report.others_share(calm) == pytest.approx(0.2 / 8)
    assert not report.disturbed(calm)
    (first, second) = calm["ranks"]
    slow = {**calm, "ranks": [first, {**second, "waited_s": 1.8}]}
    assert report.speed(slow) == pytest.approx(0.4 / 2.2 / 0.2)
    busy = {**calm, "ranks": [first, {**second, "used": [(1.0, 100.0), (2.5, 103.5)]}]}
    assert report.others_share(busy) == pytest.approx(0.5 / 8)
    assert report.disturbed(slow)
    assert report.disturbed(busy)
    assert not report.disturbed({**slow, "share": None})
    (line, *_) = report.lines([calm, {**slow, "repeat": 1}, {**busy, "repeat": 2}, {**busy, "repeat": WARM_UP}])
    assert line["disturbed"] == 2
    assert line["nic_over_mean"] == pytest.approx(2.0)
    sent = [2_000_000, 1_000_000]
    assert report.nic_over_mean({**calm, "nic_sent": sent, "nic_received": [900_000, 0]}) == pytest.approx(4 / 3)


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_have_a_head_for_each_rank_and_say_so_to_planners(name: str) -> None:
    shape = SHAPES[name]
    assert shape.heads == (shape.num_ranks if "heads" not in name else 2)
    assert shape.tokens_per_rank * shape.num_ranks == TOKENS
    point = Point.of(KERNELS, shape)
    assert point.transfer_to_round == pytest.approx(TRANSFER_TO_ROUND, rel=1e-6)
    cluster, topology = point.cluster(4), point.topology(4)
    assert (cluster["num_ranks"], topology.world_size) == (shape.num_ranks, shape.num_ranks)
    assert cluster["ranks_per_nic"] == topology.ranks_per_nic == shape.ranks_per_node // 4
    assert f"{shape.heads} heads x {shape.head_dim}" in point.text()


def test_every_variant_names_a_planner_with_options_that_it_has() -> None:
    assert [variant.choice().name for variant in ABLATION] == [variant.planner for variant in ABLATION]
    assert len({variant.name for variant in ABLATION}) == len(ABLATION)


def test_a_loss_that_depends_on_the_variant_is_named() -> None:
    good = [record(0, 0, 0, 6.0), record(4, 0, 0, 2.0, loss=5.0 * (1 + 1e-6))]
    assert report.check(good) == []
    (line,) = report.check([*good, record(1, 0, 0, 2.0, grad_norm=0.26)])
    assert line.startswith("4 NICs, arxiv batch 0: grad_norm")


def test_counted_bytes_are_held_against_the_plans() -> None:
    assert report.counted_against_plan([record(0, 0, 0, 6.0)]) == pytest.approx(100_000 / 2_900_000)


def test_all_ranks_together_leave_room_for_transfers() -> None:
    assert 8 * share_of_core(1.0, 8) <= 0.8 * 1024
    assert share_of_core(0.01, 8) == 0.01


def test_where_namespaces_are_not_permitted_it_says_so_and_runs_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(command, "check", lambda: "needs root or user namespaces")
    assert command.main(["--out", str(tmp_path / "out")]) == 77
    assert capsys.readouterr().out == "SKIP: no emulated cluster on this machine: needs root or user namespaces\n"
    assert not (tmp_path / "out").exists()
