"""The microbatch benchmark's arithmetic: ways, flags, clocks of replicas, the table of records."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tools.bench.emulated import __main__ as command
from tools.bench.emulated import microbatches as report
from tools.bench.emulated.experiments import CONTEXT, WARM_UP, Dealt, Microbatches
from tools.bench.emulated.microbatches import small_step
from tools.bench.emulated.point import NUM_RANKS, Kernels, Point

ONE = Microbatches(
    out="out",
    repeats=2,
    seed=0,
    layers=2,
    backward="keep",
    nic_mbit=None,
    calibration_s=1.0,
    core_share=0.1,
    stages=(2,),
    dataset="wlb-skew",
    batches=1,
    microbatches=4,
    room=2.0,
    replicas=1,
    microbatch_s=0.0,
)
REPLICAS = replace(ONE, replicas=4, microbatch_s=0.5)
POINT = Point(Kernels(0.4, 1.0, 3e9, 0.1), 10**8)
EVEN: Dealt = (((400, 400), (400,)), ((400, 400),), ((400, 400),), ((400, 400),))
UNEVEN: Dealt = (((800,), (400,)), ((100,) * 4, (400,)), ((400,), (400,)), ((400, 400),))


def record(way: int, repeat: int, dealt: Dealt, seconds: float) -> dict[str, Any]:
    """Ranks of two stages; a token takes a millisecond, and each microbatch adds 0.25 s."""
    rank = {"step_s": seconds + 0.5, "all_reduce_s": 0.5, "between_s": 1.0}
    of_ranks = [dealt[number % 4] for number in range(NUM_RANKS)]
    ranks = [{**rank, "model_s": 1 + 1e-3 * sum(map(sum, own)) + 0.25 * len(own)} for own in of_ranks]
    names: dict[str, Any] = {
        "stages": 2,
        "batch": 0,
        "variant_id": way,
        "variant": REPLICAS.variants[way].name,
        "dealt": dealt,
    }
    return {**names, "repeat": repeat, "ranks": ranks}


def test_one_pool_and_replicas_are_compared_in_their_own_ways() -> None:
    assert ONE.variants[0].name == "equal length"
    assert [way.name for way in REPLICAS.variants] == ["megatron", "hydraulis"]
    assert (ONE.flags(2)["context-parallel-size"], REPLICAS.flags(2)["context-parallel-size"]) == (4, 1)
    assert [way.choice().name for way in REPLICAS.variants] == ["megatron", "hydraulis"]
    assert REPLICAS.variants[1].choice().options.microbatch_s == 0.5
    (batch,) = REPLICAS.drawn_small()
    assert sum(batch) == 4 * CONTEXT
    assert Microbatches.parse(REPLICAS.text()) == REPLICAS


def test_the_step_of_replicas_ends_with_the_slowest() -> None:
    machine = REPLICAS.machine(POINT, 2)
    assert machine.num_ranks == 1
    alone = [small_step((own,), POINT, machine, 2).total_s for own in UNEVEN]
    clocks = small_step(UNEVEN, POINT, machine, 2)
    assert clocks.total_s == max(alone)
    assert len(clocks.busy_s) == 8
    assert small_step((*UNEVEN[:3], ()), POINT, machine, 2).total_s == max(alone), "a replica without sequences"


def test_ratios_are_of_the_same_batch_and_warm_ups_are_left_out() -> None:
    records = [record(0, WARM_UP, UNEVEN, 99.0), record(1, WARM_UP, EVEN, 99.0)]
    for repeat in range(2):
        records += [record(0, repeat, UNEVEN, 12.0), record(1, repeat, EVEN, 8.0 + 2 * repeat)]
    base, ours, *simulated = report.small_lines(records, REPLICAS, POINT)
    assert (base.pipeline, base.variant, base.step_s, base.ratio) == ("PP 2 x DP 4, measured", "megatron", 12.0, 1.0)
    assert (ours.variant, ours.step_s, ours.fewest, ours.most) == ("hydraulis", 9.0, 1, 2)
    assert ours.ratio == pytest.approx(12 / 9)
    assert [line.pipeline for line in simulated] == ["PP 2 x DP 4, simulated"] * 2
    assert base.uneven > 1
    assert report.rows([base])[0][0] == "PP 2 x DP 4, measured"
    assert report.large_lines(REPLICAS, 1) == []


def test_what_a_microbatch_adds_is_fitted() -> None:
    records = [record(0, 0, UNEVEN, 12.0), record(1, 0, EVEN, 12.0), record(0, WARM_UP, EVEN, 99.0)]
    assert report.fitted_microbatch_s(records) == pytest.approx(0.25)


def test_replicas_that_do_not_divide_the_ranks_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["microbatches", "--stages", "2", "--replicas", "3"])
    assert "--stages times --replicas: expected divisors of the 8 ranks" in capsys.readouterr().err
