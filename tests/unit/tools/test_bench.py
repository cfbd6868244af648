"""The benchmarks' arithmetic: emulated ablation, simulated against measured, host time."""

import json
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_balance.cost.table import LinkTable, load_table, save_table
from megatron_balance.ir.plan import to_json
from megatron_balance.runtime.recorder import Traced
from tests.support.cost_table import made
from tools.bench import host
from tools.bench.emulated import __main__ as command
from tools.bench.emulated import report
from tools.bench.emulated.ablation import ABLATION, BASELINE, WARM_UP, Ablation
from tools.bench.emulated.device import share_of_core
from tools.bench.emulated.point import DATASETS, SHAPES, TOKENS, TRANSFER_TO_ROUND, Kernels, Point, draw_batches, scaled
from tools.bench.simulated import __main__ as simulated_command
from tools.bench.simulated import piece
from tools.bench.simulated import report as simulated_report
from tools.bench.simulated.calibrate import OfPhase, Pace, at_pace, mean_of, of_phase, without_burst
from tools.bench.simulated.cases import MODEL, Grid, Key, cases_of, flops_per_s
from tools.bench.simulated.paced import PacedKernel
from tools.bench.simulated.report import Line, Pair

pytest.importorskip("torch")
pytest.importorskip("triton")

KERNELS = Kernels(0.05, 0.125, 20e9, 0.2)


def test_the_hidden_share_of_exchanges_is_what_was_not_waited_for() -> None:
    trace = [
        Traced("inter_node", 0, "direct", "own", 0.0, 0.1),
        Traced("compute", 1, "run", "own", 0.1, 3.0),
        # Passed on for others: no concern of this rank's launches.
        Traced("inter_node", 0, "across", "send_proxy", 0.5, 9.0),
        Traced("", 0, "finish", "own", 3.0, 4.0),
    ]
    assert report.waited(trace) == pytest.approx((1.0, 0.75))
    assert report.waited(trace[1:2]) == (0.0, 1.0)


def test_scaled_batches_hold_exactly_the_context_and_keep_proportions() -> None:
    assert scaled([4 * 100, 4 * 28, 6, 1, 1]) == (100, 28, 1, 1)
    for name in DATASETS:
        for batch in draw_batches(name, 3, seed=5):
            assert sum(batch) == TOKENS
            assert min(batch) >= 1
    assert draw_batches("arxiv", 2, 7) == draw_batches("arxiv", 2, 7)
    assert draw_batches("arxiv", 2, 7) != draw_batches("prolong64k", 2, 7)


def test_every_batch_is_trained_under_every_variant_each_repeat_in_an_order_that_rotates() -> None:
    keys: dict[str, Any] = {"out": "out", "repeats": 2, "seed": 0, "layers": 1, "backward": "replay", "nic_mbit": None}
    keys |= {"calibration_s": 1.0, "core_share": 0.2, "shape": "2x4", "nics": (4, 2), "batches": (2, 1)}
    run = Ablation(**keys, chosen=(0, 1, 4))
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
    rank: dict[str, Any] = {"step_s": seconds + 1.5, "all_reduce_s": 0.5, "hidden_share": 0.25, "cpu_s": 0.4}
    rank |= {"model_s": 4.0, "waited_s": 2.0, "used": [(1.0, 100.0), (2.5, 103.2)]}
    rank["forward_calls"] = [(10.0, 10.0 + seconds / 6), (20.0, 20.0 + seconds / 6)]
    rank["backward_calls"] = [(30.0, 30.0 + 2 * seconds / 3)]
    # it waits for the other to come
    prefetchable = [(start - 1.0, stop - 0.01) for start, stop in rank["backward_calls"]]
    idle = {**rank, "backward_calls": prefetchable, "hidden_share": 0.75}
    body: report.Record = {"nics": 4, "dataset": "arxiv", "share": 0.2, "cores": 2, "loss": 5.0, "grad_norm": 0.25}
    body |= {"batch": batch, "repeat": repeat, "variant_id": variant, "variant": ABLATION[variant].name}
    body |= {"nic_sent": [1000000, 0], "nic_received": [0, 3000000], "ranks": [rank, idle]}
    body["plan_nic_sent"] = [1_000_000 * report.GOODPUT, 0]
    body["plan_nic_received"] = [0, 2_900_000 * report.GOODPUT]
    return {**body, **changes}


def test_ratios_compare_the_same_batches_and_leave_the_warm_up_out() -> None:
    records = [record(0, 0, WARM_UP, 100.0), record(4, 0, WARM_UP, 1.0)]
    records += [record(0, batch, repeat, 6.0) for batch, repeat in ((0, 0), (0, 1), (0, 2), (1, 0))]
    records += [record(4, 0, repeat, seconds) for repeat, seconds in enumerate((2.0, 2.2, 1.0))]
    records += [record(4, 1, 0, 4.0)]
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
def test_a_point_has_the_papers_ratio_and_heads_for_its_ranks_and_tells_planners_the_same(name: str) -> None:
    shape = SHAPES[name]
    assert shape.heads == (shape.num_ranks if "heads" not in name else 2)
    assert shape.tokens_per_rank * shape.num_ranks == TOKENS
    point = Point.of(KERNELS, shape)
    assert point.transfer_to_round == pytest.approx(TRANSFER_TO_ROUND, rel=1e-6)
    slower = Point(KERNELS, 2 * point.nic_bits_per_s, shape)
    assert slower.transfer_to_round == pytest.approx(TRANSFER_TO_ROUND / 2, rel=1e-6)
    assert f"{shape.heads} heads x {shape.head_dim}" in point.text()
    for nics in (2, 4):
        cluster, topology = point.cluster(nics), point.topology(nics)
        assert (cluster["num_ranks"], topology.world_size) == (shape.num_ranks, shape.num_ranks)
        assert cluster["ranks_per_nic"] == topology.ranks_per_nic == shape.ranks_per_node // nics
        round_s = shape.hop_bytes / cluster["nic_bytes_per_s"]
        assert round_s == pytest.approx(TRANSFER_TO_ROUND * KERNELS.forward_s, rel=1e-6)
        assert cluster["intra_bytes_per_s"] == pytest.approx(8 * cluster["nic_bytes_per_s"], rel=1e-6)


def test_every_variant_names_a_planner_and_a_loss_that_depends_on_the_variant_is_named() -> None:
    assert [variant.choice().name for variant in ABLATION] == [variant.planner for variant in ABLATION]
    assert len({variant.name for variant in ABLATION}) == len(ABLATION)
    good = [record(0, 0, 0, 6.0), record(4, 0, 0, 2.0, loss=5.0 * (1 + 1e-6))]
    assert report.check(good) == []
    (line,) = report.check([*good, record(1, 0, 0, 2.0, grad_norm=0.26)])
    assert line.startswith("4 NICs, arxiv batch 0: grad_norm")
    assert report.counted_against_plan(good[:1]) == pytest.approx(100_000 / 2_900_000), "counted bytes"


def test_all_ranks_together_leave_room_for_transfers() -> None:
    assert 8 * share_of_core(1.0, 8) <= 0.8 * 1024
    assert share_of_core(0.01, 8) == 0.01


def test_where_namespaces_are_not_permitted_it_says_so_and_runs_nothing(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(command, "check", lambda: "needs root or user namespaces")
    assert command.main(["--out", str(tmp_path / "out")]) == 77
    assert capsys.readouterr().out == "SKIP: no emulated cluster on this machine: needs root or user namespaces\n"
    assert not (tmp_path / "out").exists()


# Simulated against measured: the paced kernel, the costs' arithmetic, cases, the folder of a run,
# and what is said of close planners.

GRID = Grid((25.0,), ("keep",), ("arxiv",), 1, 2048, 0, ("te_ring", "hybrid_dp", "packing", "ulysses"))


class Spinning:
    # A kernel that computes for 10 ms.
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
    # Of a short and a long launch: a factor, and something for each launch.
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
    # Planners are told the rate of the kernel at its share.
    table = made()
    flops = MODEL.attention_flops_per_pair * table.attention.q_tokens[-1] * table.attention.k_tokens[-1]
    assert flops_per_s(table, 0.5) == pytest.approx(0.5 * flops / table.attention.full_s[-1][-1])


def written(folder: Path) -> Path:
    # A run's folder, with times that are made up.
    save_table(made(), folder / "costs.json")
    same = {"costs": "costs.json", "repeats": [[1.0, 2.0], [1.1, 2.1], [1.2, 2.2]], "late_share": 0.01}
    keys = [field.name for field in fields(Key)]
    entries = [
        {**same, **{key: getattr(case, key) for key in keys}, "plan": json.loads(to_json(case.plan))}
        for case in cases_of(GRID, 4, 1e10)
    ]
    (folder / piece.CASES).write_text(json.dumps(entries))
    return folder


def test_a_folder_is_simulated_with_its_costs_and_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = piece.all_rows([written(tmp_path)])
    assert rows[0].table == load_table(tmp_path / "costs.json")
    found = simulated_report.line_of(rows[0])
    assert (found.measured_s, found.shortest_s, found.longest_s) == pytest.approx((3.2, 3.0, 3.4))
    assert found.spread == pytest.approx(0.4 / 3.2)
    slow = replace(rows[0], table=at_pace(rows[0].table, Pace(OfPhase(1000.0, 0.0), OfPhase(1000.0, 0.0), 1.0, 1.0)))
    assert simulated_report.line_of(slow).simulated_s > 2 * found.simulated_s > 0
    (tmp_path / simulated_command.NOTE).write_text("Measured at night.\n")
    assert simulated_command.main(["compare", str(tmp_path), "--json", "--write", str(tmp_path / "found")]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["summary"]["cases"] == len(rows)
    assert json.loads((tmp_path / "found.json").read_text()) == printed
    assert (tmp_path / "found.md").read_text().count("| te_ring |") == 1
    assert "\n\nMeasured at night.\n\n" in (tmp_path / "found.md").read_text()
    # What was written is read again.
    assert simulated_command.main(["compare", str(tmp_path / "found.json"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == printed


def test_the_noise_of_a_median_is_that_of_cases_and_of_repetitions() -> None:
    same = [line(name, 1.0, 1.02) for name in "abc"]
    assert simulated_report.noise(same) == pytest.approx((0.02, 0.02))
    low, high = simulated_report.noise([*same, line("d", 1.0, 1.1), line("e", 1.0, 1.1)])
    assert (low, high) == pytest.approx((0.02, 0.1))
    # Of three repetitions within 4 %, evenly spread, 95 % of medians are within 0.8 of that.
    low, high = simulated_report.noise([line("a", 1.0, 1.1, spread=0.04)])
    assert low == pytest.approx(1.1 / 1.016 - 1, abs=1e-3)
    assert high == pytest.approx(1.1 / 0.984 - 1, abs=1e-3)


def test_close_planners_are_in_order_where_their_repetitions_do_not_overlap() -> None:
    first, second = line("a", 1.0, 1.3), line("b", 1.1, 1.2)
    lines = [line("c", 1.11, 1.0, spread=0.1), first, line("d", 2.0, 2.0), second]
    pairs = {(pair.faster.planner, pair.slower.planner): pair for pair in simulated_report.close_pairs(lines)}
    assert set(pairs) == {("a", "b"), ("a", "c"), ("b", "c")}
    assert pairs["a", "b"].decided
    assert not pairs["a", "b"].right
    assert not pairs["b", "c"].decided
    found = simulated_report.summary(lines)
    assert (found.cases, found.close, found.pairs, found.decided, found.wrong) == (4, 3, 3, 2, 2)
    assert (found.clear, found.clear_wrong) == (2, 2)
    assert found.median_error == pytest.approx((abs(1.2 / 1.1 - 1) + abs(1.0 / 1.11 - 1)) / 2)
    assert found.worst_error == pytest.approx(0.3)
    assert sum("Wrong order" in sentence for sentence in simulated_report.in_words(lines)) == 2
    assert Pair(first, second).apart == pytest.approx(0.1)
    # A right order that is a tie in the simulation is said to be one.
    tie = simulated_report.in_words([line("a", 1.0, 1.0), line("b", 1.1, 1.001)])
    assert sum(sentence.startswith("No more than a tie in the simulation (0.1% apart)") for sentence in tie) == 1
    others = [line("a", 1.0, 1.0), replace(line("b", 1.0, 1.0), mbit=50.0), replace(line("c", 1.0, 1.0), batch=1)]
    assert not simulated_report.close_pairs(others)


@pytest.mark.parametrize("wrong", ["--planners te_rin", "--datasets x", "--tokens 1000", "--share 0.5"])
def test_wrong_options_are_one_line(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulated_command.main(["measure", *wrong.split()]) == simulated_command.USAGE_ERROR
    assert capsys.readouterr().err.startswith("error: ")


# Host time of real plans: exact counts against budgets, and what counting rests on.

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "measurements" / "host-time.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", host.BUDGETS)
def test_a_layer_keeps_its_budget_of_host_time(name):
    plan = host.plan_of(name)
    found = host.count(plan, host.rank_of(name, plan))
    assert found.group_calls > 0
    assert found.launches > 0
    assert found.copies == 1  # all tables of the microbatch
    counts = (found.group_calls, found.launches, found.operators, found.copies)
    assert f"| {name} | {' | '.join(map(str, counts))} |" in PAGE, f"docs/measurements/host-time.md is of old: {found}"
    time = host.host_time(found, plan, host.PYTHON_S[name])
    assert time.ratio <= host.BUDGETS[name], f"{found}, {time}"


@pytest.mark.parametrize("name", ["head exchange in a node", "zeppelin, routed", "te_ring"])
def test_wider_heads_change_no_count(name, monkeypatch):
    plan = host.plan_of(name, num_ranks=16)
    narrow = host.count(plan, host.rank_of(name, plan))
    monkeypatch.setattr(host, "HEAD_DIM", 2 * host.HEAD_DIM)
    assert host.count(plan, host.rank_of(name, plan)) == narrow
    if name.startswith("head exchange"):
        # Messages are written into the call's own memory by the mover, and read where they arrive.
        assert narrow.operators <= 8, "a copy of torch for a message"


def test_prices_and_python_make_host_time():
    found = host.Counted(group_calls=2, launches=3, operators=4, copies=1)
    plan = host.plan_of("distca", num_ranks=16)
    time = host.host_time(found, plan, 1e-3)
    assert time.priced_s == pytest.approx(2 * 35e-6 + 7 * 30e-6)
    assert time.ratio == pytest.approx((time.priced_s + 1e-3) / host.kernel_s(plan))
