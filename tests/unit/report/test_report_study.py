"""Figures of a simulated report: parts add up, limits are as made, suggestions do what they say."""

import json
from typing import Any

import pytest

from megatron_balance.analysis.machine import Machine
from megatron_balance.config import load_cluster, load_model
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.ir import batch, mask
from megatron_balance.lab.bench import best_of, hold_against, in_the_mean, saving
from megatron_balance.lab.report import limits, page
from megatron_balance.lab.report import run as run_log
from megatron_balance.lab.report.study import SHOWN_RANKS, answer, length_histogram, placement, timeline
from megatron_balance.planners import PLANNERS
from megatron_balance.planning.choice import choose_planner
from megatron_balance.simulator.timeline import layer_trace
from tests.support import by_hand

INPUTS = "--lengths 6000,1200,700,64,64,17,1 --ranks 4 --ranks-per-node 2 --tokens-per-rank 4000"


@pytest.fixture
def study(run, tmp_path):
    return lambda command: run.json(f"report --json {command} --out", tmp_path / "report.html")


@pytest.fixture
def limits_of(study, monkeypatch):
    """By planner what limits it, without simulating what else could be tried."""
    monkeypatch.setattr("megatron_balance.lab.report.limits._candidates", lambda _: iter(()))
    return lambda command: study(command)["limits"]


def test_without_planners_all_are_compared_as_compare_does(study, run):
    found = study(INPUTS)
    whole = run.json(f"compare --json --ping-pong false {INPUTS}")  # as a report's microbatches are
    compared = {row["planner"]: row for row in whole["rows"]}
    rows = {row["planner"]: row for row in found["rows"]}
    assert rows.keys() == compared.keys()
    for name, row in rows.items():
        shared = compared[name].keys() - {"plan_ms", "hides"}  # a clock's
        assert {key: row[key] for key in shared} == {key: compared[name][key] for key in shared}
        assert sum(row["phases_s"].values()) == pytest.approx(row["step_s"])
    fastest = min((row for row in found["rows"] if row["planner"] != "megatron"), key=lambda row: row["step_s"])
    assert (found["baseline"], found["best"]) == ("megatron", fastest["planner"])
    assert found["load"].keys() == rows.keys()
    assert found["asked"]["assumed"] == "llama-7b on h200 assumed"


def test_the_baseline_is_added_and_named_planners_are_alone_with_it(study, limits_of):
    found = study(f"{INPUTS} --planner zeppelin -o rule=paper --baseline ulysses")
    assert {row["planner"] for row in found["rows"]} == {"zeppelin", "ulysses"}
    said = found["answer"][0]
    assert said.startswith("zeppelin is ") or "No planner that was compared beats ulysses" in said
    one = study("--lengths 4000,100 --ranks 1 --tokens-per-rank 5000 --planner te_ring --baseline te_ring")
    each = one["limits"]["te_ring"]
    assert (each["limit"], each["busiest_nic"]) == ("compute", None), "one rank computes and loses nothing"
    assert each["computing_s"] == pytest.approx(each["step_s"])
    assert one["best"] == one["baseline"] == "te_ring"


PARTS = ["", "--slow 3=2", "--pipeline 4", "--recompute full --policy replay", "--transport sockets"]


@pytest.mark.parametrize("options", [*PARTS, "--model moe-8x550m --expert-parallel 4"])
def test_the_parts_of_a_step_add_up_to_it(study, limits_of, options):
    found = study(f"{INPUTS} --planner zeppelin {options}")
    for name, each in found["limits"].items():
        row = next(row for row in found["rows"] if row["planner"] == name)
        assert set(each["parts_s"]) == set(limits.PARTS)
        assert all(seconds >= 0 for seconds in each["parts_s"].values())
        assert sum(each["parts_s"].values()) == pytest.approx(row["step_s"], rel=1e-6)
        assert (each["parts_s"]["experts"] > 0) == ("expert" in options)
        assert each["kind"] == "simulated"
    assert not found["timeline"] or "sockets" not in options
    assert ("sockets" in found["timeline_left_out"]) == ("sockets" in options)


def test_a_hybrid_model_has_its_states_and_what_megatron_itself_takes(study, limits_of, tmp_path):
    model = tmp_path / "hybrid.yaml"
    recurrent = "{kind: mamba2, layers: 20, attention_layers: 6, mlp_layers: 26, heads: 32, value_dim: 64"
    model.write_text(f"base: llama-3b\nrecurrent: {recurrent}, key_heads: 8, key_dim: 128}}\n", encoding="utf-8")
    found = study(f"{INPUTS} --planner zeppelin --planner megatron --model {model}")
    for row in found["rows"]:
        assert 0 < row["phases_s"]["forward_states"] < row["phases_s"]["forward_linear"]
        assert sum(found["limits"][row["planner"]]["parts_s"].values()) == pytest.approx(row["step_s"], rel=1e-6)
    assert any("Megatron-core itself, whose recurrent layers exchange" in each for each in found["answer"])
    assert "states of recurrent layers" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_ranks_of_several_gpus_are_said_to_be(study, limits_of, tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_balance.lab.report.study.MOST_RANKS", 1)  # a cluster of 129 takes seconds
    found = study(f"{INPUTS} --planner zeppelin --tensor-parallel 2".replace("-rank 4000", "-rank 8000"))
    assert (found["asked"]["cluster"]["num_ranks"], found["asked"]["cluster"]["gpus_per_rank"]) == (2, 2)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "llama-7b on 4 GPUs of h200" in page
    assert "a rank is 2 GPUs (tensor parallelism)" in page
    assert found["timeline"] == {}
    assert "at most 1 ranks" in found["timeline_left_out"]


def test_what_was_made_to_limit_a_step_does(limits_of, run, tmp_path):
    # A slow rank is charged what the step gains without it.
    slow = limits_of(f"{INPUTS} --planner zeppelin --slow 3=9")["zeppelin"]
    with_it, without = (run.json(f"simulate --json {INPUTS} --planner zeppelin {more}") for more in ("--slow 3=9", ""))
    # Gradients are synchronised beside the backward, which is longer then: they have a part of
    # their own.
    gained = [found["step_s"]["median"] - found["phases_s"]["gradient_sync"] for found in (with_it, without)]
    assert slow["parts_s"]["straggler"] == pytest.approx(gained[0] - gained[1])
    assert slow["limit"] == "straggler"
    assert "Rank 3 computes 9.00 times as long as it should" in slow["sentence"]
    # A slow network limits a ring and its busiest nic is named.
    slow = tmp_path / "slow.yaml"
    slow.write_text("base: h200\nnic_bytes_per_s: 1.0e+8\n", encoding="utf-8")
    asked = f"--lengths 9000 --ranks 8 --ranks-per-node 4 --planner te_ring --cluster {slow}"
    found = limits_of(asked)["te_ring"]
    assert found["limit"] == "nic"
    # A ring over two nodes of four leaves each of them at one rank of four, the other way round in
    # the backward, which takes longer.
    assert found["busiest_nic"]["bytes"] > 2 * found["busiest_nic"]["mean_bytes"]
    assert found["busiest_nic"]["full_share"] > 0.5
    assert f"number {found['busiest_nic']['nic']} of node {found['busiest_nic']['node']}" in found["sentence"]
    # Few microbatches leave a pipeline waiting.
    found = limits_of("--lengths 4000,100 --ranks 1 --tokens-per-rank 5000 --planner te_ring --pipeline 8")["te_ring"]
    assert found["limit"] == "bubble"
    assert found["parts_s"]["bubble"] > 0.8 * found["step_s"]  # seven of eight stages wait at any time
    assert "1 microbatch for 8 pipeline stages" in found["sentence"]


def test_uneven_work_is_imbalance_and_the_remap_is_what_it_costs(limits_of):
    # Equal tokens on both ranks, in one sequence and in eighty: one rank has nearly all of the work.
    asked = f"--lengths 16000,{','.join(['200'] * 80)} --ranks 2 --tokens-per-rank 16000 --planner packing"
    uneven = limits_of(asked)["packing"]
    assert uneven["parts_s"]["imbalance"] == pytest.approx(uneven["parts_s"]["attention"] * 0.9, rel=0.15)
    assert uneven["largest_loss"] == "imbalance"
    remaps = [
        limits_of(f"{INPUTS} --planner zeppelin --baseline zeppelin {remap}")["zeppelin"]
        for remap in ("--remap", "--no-remap")
    ]
    assert remaps[0]["parts_s"]["remap"] > remaps[1]["parts_s"]["remap"] == 0


def test_every_suggestion_takes_as_long_as_its_options_simulated(study, run):
    told = "--routing always --no-remap"
    found = study(f"{INPUTS} --planner zeppelin {told}")
    tried = [row for row in found["try_next"]["tries"] if row["options"]]
    assert {row["where"] for row in tried} == {"planner", "step"}
    for row in tried:
        planner = "" if "--planner" in row["options"] else "--planner zeppelin"
        inputs = INPUTS.replace("--tokens-per-rank 4000", "") if "--tokens-per-rank" in row["options"] else INPUTS
        again = run.json(f"simulate --json {inputs} {planner} {told} {row['options']}")  # the last of two counts
        assert again["step_s"]["median"] == pytest.approx(row["step_s"], rel=1e-9), row["options"]
        assert row["saves"] == pytest.approx(1 - row["step_s"] / found["try_next"]["step_s"])


def test_what_is_tried_covers_planners_layers_options_capacity_step_and_machine_and_what_fits(study):
    # What is tried covers planners layers options capacity step and machine.
    step = "--dataset github --tokens 12000 --batches 2 --microbatches 2 --ranks 4 --ranks-per-node 2"
    found = study(f"{step} --tokens-per-rank 7000 --planner zeppelin --slow 1=2")["try_next"]
    names = [*(row["name"] for row in found["tries"]), *found["unchanged"], *found["impossible"]]
    assert {f"the planner {name}" for name in PLANNERS if name != "zeppelin"} <= set(names)
    for words_ in (
        "routing transfers",
        "rule paper",
        "tokens on a rank at most",
        "1 microbatches a step",
        "NICs twice",
    ):
        assert any(words_ in name for name in names), words_
    assert [row["step_s"] for row in found["tries"]] == sorted(row["step_s"] for row in found["tries"])
    assert next(row for row in found["tries"] if row["name"] == "no slow rank")["saves"] > 0
    assert any("no slow rank" in sentence for sentence in found["suggestions"])
    # A step that does not fit is said not to and what fits is suggested.
    step = "--lengths 30000,20000 --ranks 8 --ranks-per-node 4 --tokens-per-rank 10000"
    found = study(f"{step} --model llama-13b --planner zeppelin")
    assert not found["try_next"]["fits"]
    assert any("does not fit" in sentence for sentence in found["answer"])
    assert any(s.startswith("To make it fit") and "--recompute full" in s for s in found["try_next"]["suggestions"])


def test_mistakes_are_one_sentence(run, tmp_path):
    for command, message in (
        (f"{INPUTS} --planner zeppelin --baseline te_rng", "--baseline te_rng: no such planner; one of te_ring,"),
        ("--steps X --planner zeppelin", "--planner does not go with --steps"),
        ("--steps X --lengths 3", "--lengths does not go with --steps"),
        ("--steps X -o rule=paper", "-o does not go with --steps"),
        ("--steps X --run Y", "--run does not go with --steps"),
        ("--steps X --steps Y --steps Z", "--steps is given 3 times"),
    ):
        assert message in run.error(f"report {command} --out", tmp_path / "r.html")


# Parts


def test_lengths_are_counted_once_each_and_a_plan_says_which_ranks_share_each_sequence():
    # Lengths are counted once each by powers of two.
    batches = (batch.Batch((100, 255, 256, 511, 512, 9000)), batch.Batch((300,)))
    found = length_histogram(batches, mask.CAUSAL)
    bins = [(each["from"], each["below"], each["sequences"]) for each in found["bins"] if each["sequences"]]
    assert bins == [(0, 256, 2), (256, 512, 3), (512, 1024, 1), (8192, 16384, 1)]
    assert sum(each["tokens"] for each in found["bins"]) == found["num_tokens"] == 10934
    assert (found["shortest"], found["longest"], found["median"], found["num_batches"]) == (100, 9000, 300.0, 2)
    assert found["bins"][1]["attention_pairs"] == sum(n * (n + 1) // 2 for n in (256, 511, 300))
    full = length_histogram(batches, mask.FULL)
    assert full["bins"][1]["attention_pairs"] == sum(n * n for n in (256, 511, 300))
    # A plan says which ranks share each sequence.
    zones = (
        by_hand.ring(range(8), 0, 1),
        by_hand.head_exchange((4, 6), 2),
        by_hand.local(7, 3),
        by_hand.task_table([(5, 4, 0, 50), (6, 4, 50, 90)], [(5, 4, 0, 90, 0, 90)]),
    )
    found = placement(by_hand.plan((9000, 3, 400, 200, 90), 8, *zones, ranks_per_node=4, heads=(8, 8)))
    assert {row["seq"]: (row["where"], row["rank_runs"]) for row in found["longest"]} == {
        0: ("across nodes", [(0, 7)]),
        1: ("one rank", [(0, 0)]),  # three tokens are not cut
        2: ("inside one node", [(4, 4), (6, 6)]),
        3: ("one rank", [(7, 7)]),
        4: ("inside one node", [(5, 6)]),
    }
    kinds = [(kind["where"], kind["sequences"], kind["tokens"]) for kind in found["kinds"]]
    assert kinds == [("across nodes", 1, 9000), ("inside one node", 2, 490), ("one rank", 2, 203)]


def test_a_timeline_holds_the_trace_of_its_ranks_and_no_more():
    cluster, model = load_cluster("h200").build(num_ranks=16, ranks_per_node=8), load_model("llama-3b")
    machine = Machine(cluster, model, AnalyticCost(cluster, model))
    plan = choose_planner("te_ring", {}).plan(batch.Batch((9000, 2000)), cluster, model, machine.cost)
    found, spans = timeline(plan, machine, "keep"), layer_trace(plan, machine, "keep").spans
    assert found["total_ms"] == pytest.approx(1e3 * max(span.stop_s for span in spans))
    assert len(found["ranks"]) == SHOWN_RANKS
    assert {found["computing_share"][which] for which in ("most_rank", "least_rank")} <= set(found["ranks"])
    attention = dict.fromkeys((span.rank for span in spans), 0.0)
    for span in spans:
        if span.what == "attention":
            attention[span.rank] += 1e3 * (span.stop_s - span.start_s)
    for lane in found["lanes"]:
        drawn = lane["spans_ms"]
        assert all(a < b for a, b in drawn)
        assert all(b < c for (_, b), (c, _) in zip(drawn, drawn[1:], strict=False))
        if lane["activity"] == "attention":
            assert sum(b - a for a, b in drawn) >= attention[lane["rank"]] * (1 - 1e-4)


def test_numbers_read_well():
    seconds = {1.3249: "1.32 s", 0.0215: "21.5 ms", 999.7e-6: "1,000 us", 0: "0 s"}
    assert {each: page.seconds(each) for each in seconds} == seconds
    percents = {0.4123: "41 %", 0.0412: "4.1 %", 0.0001: "under 0.1 %", 0: "0 %"}
    assert {each: page.percent(each) for each in percents} == percents
    assert (page.size(4.234e9), page.size(12), page.rate(50e9)) == ("4.23 GB", "12 bytes", "400 Gbit/s (50.0 GB/s)")
    assert page.listed(["a", "b", "c"]) == "a, b and c"
    assert [page.count(each, "batch", "batches") for each in (1, 1200)] == ["1 batch", "1,200 batches"]


def test_a_runs_own_batches_are_simulated_by_every_planner_asked(study, limits_of, run, tmp_path):
    # Its configuration's planner is the one that others are held against.
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text("planner: {name: te_ring, tokens_per_rank: 4000}\n")
    (folder / "model.yaml").write_text("num_heads: 8\nnum_kv_heads: 8\nhead_dim: 64\nnum_layers: 4\n")
    (folder / "cluster.yaml").write_text("num_ranks: 4\nranks_per_node: 2\n")
    each = {"step_ms": 100.0, "planner": "te_ring"}
    records = [{"step": at, **each, "lengths": [[3000 + at, 50], [700, 700]]} for at in range(20)]
    records.append({"step": 20, **each, "lengths": [[9, 9]]})  # of another number of microbatches
    (folder / "steps.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    found = study(f"--run {folder} --planner packing --planner megatron --tokens-per-rank 4000")
    asked = found["asked"]
    assert (found["baseline"], asked["cluster"]["num_ranks"], asked["step"]["batches"]) == ("te_ring", 4, 2)
    assert {row["planner"] for row in found["rows"]} == {"te_ring", "packing", "megatron"}
    assert found["lengths"]["num_batches"] == 16
    assert any("those of 8 of the 21 steps of run; there they took 0.1 s" in each for each in found["answer"])
    assert run_log.real_batches(folder).steps == (2, 4, 6, 9, 11, 14, 16, 19), "without the warm-up"
    (folder / "steps.jsonl").write_text(json.dumps({"step": 1, "step_ms": 1.0}) + "\n")
    out = f"--out {tmp_path / 'x.html'}"
    assert "hold no lengths" in run.error(f"report --run {folder} {out}")
    branched = {"step": 1, "step_ms": 1.0, "lengths": [[9]], "segments": [[3]]}
    (folder / "steps.jsonl").write_text(json.dumps(branched) + "\n")
    assert "its steps have trees" in run.error(f"report --run {folder} {out}")
    assert "does not go with --run" in run.error(f"report --run {folder} {out} --lengths 5")


# Words about planners that a job can run or cannot, and what they save; rows by hand

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


def test_planners_that_a_job_cannot_run_and_means_that_say_otherwise_are_said_to_be() -> None:
    # Where nothing runs nothing is best and the answer begins with it.
    rows = [row("megatron", 2.0, fits=False), row("zeppelin", 1.0, hides=False)]
    assert best_of(rows) is None
    said = answered(*rows)
    assert said[0].startswith("No planner that was compared fits in memory and plans within a step; the nearest, zep")
    assert "longer than the step" in said[1]
    # A baseline that no job can run is said to be one.
    base, other = row("megatron", 2.0, fits=False, context_parallel=8), row("zeppelin", 1.0)
    assert answered(base, other)[0] == (
        "zeppelin is 2.00 times as fast as megatron (CP 8): 1.00 s instead of 2.00 s a step (simulated). megatron does "
        "not fit in memory: no job takes its time."
    )
    assert saving(other, base, None).endswith("; megatron does not fit in memory, so no job spends them")
    # Median steps that say otherwise than all of them are said to.
    base, other = row("megatron", 2.0), row("zeppelin", 1.0, tokens_per_s=505.0)
    said = answered(base, other)[0]
    assert other["mean_speedup"] == 1.01
    assert said.endswith(" These are median steps; over all steps 1.01x, over the median one 2.00x.")
    assert saving(other, base, None).endswith("; speedup over all steps 1.01x, over the median one 2.00x")
    alike = row("zeppelin", 1.0)
    assert "median" not in answered(row("megatron", 2.0), alike)[0]
    assert in_the_mean(alike) == ""
