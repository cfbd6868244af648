"""`simulate`, `compare` and `trace`: their JSON, traces, and a sentence for every mistake."""

import json
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from megatron_balance import Batch, Cluster, MicrobatchPlan, make_planner, simulate
from megatron_balance.analysis.step_memory import StepMemory, stages_of
from megatron_balance.analysis.trace_format import Trace, TrackSpan, file_name, joined
from megatron_balance.config import load_cluster, load_model
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.cost.parallel import wide_ranks
from megatron_balance.errors import InvalidProgramError
from megatron_balance.planners import PLANNERS, zeppelin
from megatron_balance.planners.base import StepContext
from tests.support import trace_reader
from tests.support.cli import CommandLine

PIPED = (
    "--dataset github --tokens 4000 --batches 2 --microbatches 2 --pipeline 2 --ranks 4 --ranks-per-node 4 "
    "--tokens-per-rank 6000 --model gpt-tiny --json"
)
MOE = "--model moe-8x550m --expert-parallel"
INPUTS = "--lengths 9000,1200,700,64,64,17,1 --ranks 8 --ranks-per-node 4 --tokens-per-rank 4000"


@pytest.mark.parametrize("planner", ["te_ring", "zeppelin", "distca", "hydraulis", "wlb_llm"])
def test_simulate_has_the_documented_keys(run, planner):
    # A planner of each kind; `compare` simulates all of them.
    found = run.json(f"simulate --planner {planner} {INPUTS} --json")
    assert set(found["step_s"]) == {"median", "p5", "p95"}
    assert found["tokens_per_s"] == pytest.approx(11046 / found["step_s"]["median"])
    assert sum(found["phases_s"].values()) == pytest.approx(found["step_s"]["median"])
    assert set(found["attention_s"]) == {"forward", "backward"}
    assert len(found["peak_bytes_per_rank"]) == 8
    assert set(found["utilisation"]) == {"compute", "link", "nic"}
    assert all(0 <= share <= 1 for share in found["utilisation"].values())
    assert found["kind"] == "simulated"
    assert found["assumed"] == "llama-7b on h200 assumed"


def test_prices_of_hosts_and_bounds_of_steps_are_shown(run, tmp_path):
    # Prices of hosts are shown beside seconds without them.
    found: list[dict[str, Any]] = []
    for name, call_s, launch_s in (("free", 0.0, 0.0), ("slow", 0.02, 0.01)):
        path = tmp_path / f"{name}.yaml"
        path.write_text(f"host_call_s: {call_s}\nhost_launch_s: {launch_s}\n")  # the rest is h200's
        found.append(run.json(f"simulate --planner te_ring {INPUTS} --cluster {path} --json"))
        rows = run.json(f"compare --planner te_ring {INPUTS} --cluster {path} --json")["rows"]
        expected = found[-1]["step_with_host_s"]
        assert rows[0]["step_with_host_s"] == (None if expected is None else expected["median"])
        out = run.printed(f"simulate --planner te_ring {INPUTS} --cluster {path}")
        assert ("where devices wait for what their hosts issue" in out) == (name == "slow")
    assert found[0]["step_s"] == found[1]["step_s"]
    assert found[0]["step_with_host_s"] is None
    # 32 layers, forward and backward, of more than one group call and launch each
    assert found[1]["step_with_host_s"]["median"] > 32 * 2 * 0.03 > found[1]["step_s"]["median"]
    # The bound of each step and their mean are in the JSON.
    path, on = tmp_path / "lengths.json", "--planner te_ring --ranks 8 --ranks-per-node 4 --json"
    path.write_text("[[6000, 900, 300], [2000, 2000]]")
    for verb in ("simulate", "compare"):
        long, short = (run.json(f"{verb} {on} --lengths {lengths}") for lengths in ("6000,900,300", "2000,2000"))
        both = run.json(f"{verb} {on} --lengths-file {path}")
        assert both["bound_s_per_step"] == [long["bound_s"], short["bound_s"]]
        assert both["bound_s"] == pytest.approx(sum(both["bound_s_per_step"]) / 2)
        assert long["bound_s"] > short["bound_s"]


def test_stragglers_replays_batches_and_microbatches_change_what_they_should(run):
    given = f"simulate --planner te_ring {INPUTS} --json"
    usual, slow, replayed = (run.json(f"{given} {more}") for more in ("", "--slow 3=4", "--policy replay"))
    assert slow["step_s"]["median"] > usual["step_s"]["median"]
    assert replayed["step_s"]["median"] > usual["step_s"]["median"]
    assert max(replayed["peak_bytes_per_rank"]) < max(usual["peak_bytes_per_rank"])
    # Batches make steps and microbatches make one.
    data = "--planner te_ring --dataset github --tokens 20000 --batches 4 --ranks 8 --ranks-per-node 4 --json"
    data += " --tokens-per-rank 4000"
    four = run.json(f"simulate {data}")
    one = run.json(f"simulate {data} --microbatches 4")
    assert four["step_s"]["p5"] < four["step_s"]["median"] < four["step_s"]["p95"]
    assert one["step_s"]["p5"] == one["step_s"]["p95"] > 3 * four["step_s"]["median"]
    piped = run.json(f"simulate {data} --microbatches 4 --pipeline 2")
    assert len(piped["peak_bytes_per_rank"]) == 16
    assert piped["phases_s"]["waiting"] > 0
    # Simulate prints phases for people.
    out = run.printed(f"simulate --planner te_ring {INPUTS} --spread 0.1 --draws 3")
    shown = ("8 ranks (2 x 4), llama-7b on h200", "s a step (", "tokens/s, simulated", "forward attention")
    assert all(words in out for words in (*shown, "busy on average: compute"))


@pytest.mark.parametrize("command", [f"zeppelin {INPUTS}", f"distca --ping-pong false {PIPED}"])
def test_trace_is_a_chrome_trace_of_every_rank_also_of_stages_that_attend_together(run, tmp_path, command):
    path = tmp_path / "trace.json"
    assert run(f"simulate --planner {command} --trace {path}")[0] == 0
    document = json.loads(path.read_text())
    assert {event["pid"] for event in document["traceEvents"]} == set(range(8))
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in document["traceEvents"] if event["ph"] == "X")


def test_compare_has_a_row_for_every_planner_and_speedups_over_the_baseline(run):
    found = run.json(f"compare {INPUTS} --json")
    assert found["baseline"] == "megatron"
    rows = {row["planner"]: row for row in found["rows"]}
    assert set(rows) | set(found["left_out"]) == set(PLANNERS)
    for row in rows.values():
        assert {"planner", "step_s", "tokens_per_s", "speedup", "imbalance", "plan_ms", "peak_bytes"} <= set(row)
        assert row["speedup"] == pytest.approx(rows["megatron"]["step_s"] / row["step_s"])
        assert set(row["imbalance"]) == {"tokens", "attention"}
        assert row["over_bound"] == pytest.approx(row["step_s"] / found["bound_s"])
        assert row["over_bound"] > 1
    assert rows["megatron"]["speedup"] == 1
    # How far the simulator is from what others measured, where anybody did.
    assert rows["zeppelin"]["published_error"] is None
    assert rows["te_ring"]["published_error"]["forward"] > 100
    told = run(f"compare {INPUTS} --planner te_ring --planner zeppelin").out
    assert "te_ring 132 and 20 %; none is published of the others" in " ".join(told.split())


def test_plans_are_run_as_training_would_run_them(run):
    tiny = f"{INPUTS} --model gpt-tiny"
    ways = ("", "--ping-pong true", "--ping-pong false")
    found = [run.json(f"simulate --planner distca {tiny} --json {way}") for way in ways]
    assert [each["ping_pong"] for each in found] == [True, True, False]
    assert {each["pipeline"] for each in found} == {None}
    usual, asked, whole = (each["step_s"]["median"] for each in found)
    assert usual == asked != whole
    assert "two nano-batches interleaved" in run.printed(f"simulate --planner distca {tiny}")
    compared = run.printed(f"compare --planner distca --planner ulysses {tiny} --baseline distca")
    assert all(words in compared for words in ("nano-batches interleaved", "speedup over distca", "ulysses"))
    assert "te_ring" not in compared
    said = run.error(f"compare --planner ulysses {INPUTS} --baseline te_ring")
    assert said == "--baseline te_ring is not among the planners of this run: ulysses"
    assert not run.json(f"simulate --planner te_ring {tiny} --json")["ping_pong"]


def test_stages_attend_together_where_training_would_have_them(run, tmp_path):
    joint, apart = (run.json(f"simulate --planner distca {PIPED} {more}") for more in ("", "--stages stages"))
    assert (joint["pipeline"], apart["pipeline"]) == ("joint", "stages")
    assert joint["step_s"]["median"] != apart["step_s"]["median"]
    assert len(joint["peak_bytes_per_rank"]) == 8
    assert sum(joint["phases_s"].values()) == pytest.approx(joint["step_s"]["median"])
    assert all(joint["attention_s"][way] >= joint["phases_s"][f"{way}_attention"] > 0 for way in joint["attention_s"])
    rows = run.json(f"compare --planner te_ring --planner distca {PIPED}")["rows"]
    found = [(row["planner"], row["ping_pong"], row["pipeline"]) for row in rows]
    assert found == [("te_ring", False, "stages"), ("distca", True, "joint")]
    left_out = run.json(f"compare {PIPED} --stages joint --baseline distca")["left_out"]
    assert "plans each stage for itself" in left_out["te_ring"]
    said = run.error(f"simulate --planner te_ring {PIPED} --stages joint")
    assert said == "pipeline: joint: planner te_ring plans each stage for itself; choose distca, or 'stages'"
    # A configuration says how plans are run.
    config = tmp_path / "run.yaml"
    config.write_text("planner: {name: distca, tokens_per_rank: 6000}\nping_pong: false\npipeline: stages\n")
    found = run.json(f"simulate --config {config} {PIPED}")
    assert (found["ping_pong"], found["pipeline"]) == (False, "stages")
    assert run.json(f"simulate --config {config} {PIPED} --stages joint")["pipeline"] == "joint"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("distca --stages joint", "--stages joint goes with --pipeline P of several stages"),
        (
            "distca --trace x.json",
            "--trace x.json is of microbatches that run whole, and distca runs two nano-batches interleaved; "
            "add --ping-pong false",
        ),
        ("te_ring --slow 9=2", "--slow 9=2: expected RANK=FACTOR with a rank from 0 to 7, such as 3=1.5"),
        ("te_ring --slow 1=x", "--slow 1=x: expected RANK=FACTOR, such as 3=1.5"),
        ("te_ring --slow 1=0", "--slow 1=0: the factor must be more than 0"),
        ("te_ring --spread -1", "spread -1.0: must not be negative; 0.1 is about 10 %"),
        ("te_ring --draws 3", "--draws goes with --spread S, which is not given"),
        ("te_ring --spread-seed 3", "--spread-seed goes with --spread S, which is not given"),
        ("te_ring --pipeline 0", "pipeline 0: must be at least 1"),
        ("te_ring --microbatches 2", "--microbatches 2: 1 batches do not make whole steps of so many; give a divisor"),
        (
            "te_ring --planner ulysses --trace x.json",
            "--trace x.json is of one planner, and 2 are asked for; run simulate once for each",
        ),
        (
            "te_ring --trace x.json --transport sockets",
            "--trace has a lane for each stream, and --transport sockets has no streams; use --transport streams",
        ),
        ("te_ring --ranks 256 --trace x.json", "a trace of 256 ranks is too large to open; trace at most 128, *"),
        ("te_ring --costs nowhere.json", "*nowhere.json: *"),
        ("te_ring --tensor-parallel 0", "*--tensor-parallel 0: must be at least 1*"),
        ("te_ring --tensor-parallel 3", "*tensor parallelism 3 does not divide*"),
        ("te_ring --tensor-parallel 2 --costs table.json", "*--costs table.json goes with --tensor-parallel 1*"),
        ("te_ring --tensor-parallel 2 --plan-costs table.json", "*--plan-costs table.json goes with --tensor-*"),
        ("te_ring --expert-parallel 8", "*--expert-parallel 8: llama-7b has no experts*"),
        (f"te_ring {MOE} 3", "*--expert-parallel 3: must divide the 8 experts*"),
        (f"te_ring {MOE} 0", "*--expert-parallel 0: must*"),
        ("te_ring --model moe-8x550m --expert-spread 0.5", "*--expert-spread 0.5 goes with --expert-parallel E*"),
        (f"te_ring {MOE} 8 --expert-counts 1,x", "*--expert-counts 1,x: expected numbers*"),
        (f"te_ring {MOE} 8 --expert-counts 1,2", "*shares of 2 experts; the model has 8*"),
    ],
)
def test_mistakes_are_one_sentence(run, command, message):
    # `*` stands for any words.
    planner, _, options = command.partition(" ")
    assert fnmatchcase(run.error(f"simulate --planner {planner} {INPUTS} {options}"), message)


@pytest.mark.parametrize("lose", [None, lambda lengths: lengths[:-1], lambda lengths: [n // 2 for n in lengths]])
@pytest.mark.parametrize("verb", ["plan", "simulate", "compare --baseline te_ring"])
def test_a_plan_that_loses_tokens_is_refused(run, monkeypatch, verb, lose):
    planner = PLANNERS["te_ring"]
    right: Any = planner.plan

    def plan(batch: Batch, *given: Any) -> MicrobatchPlan:
        if lose is not None:
            return right(replace(batch, lengths=tuple(lose(batch.lengths))), *given)
        made = right(batch, *given)
        return replace(made, zones=tuple(replace(zone, seqs=zone.seqs[:-1]) for zone in made.zones))

    monkeypatch.setitem(PLANNERS, "te_ring", replace(planner, plan=plan))
    said = run.error(f"{verb} --planner te_ring --ranks 4 --model gpt-tiny --lengths 900,20,64")
    assert "te_ring" in said
    complaint = "is in 0 zones" if lose is None else "expected the same sequences"
    assert complaint in said
    with pytest.raises(InvalidProgramError, match=complaint):
        make_planner("te_ring", Cluster(4, 4), load_model("gpt-tiny"))((900, 20, 64))


def test_tensor_parallel_groups_are_ranks_and_experts_are_exchanged(run):
    # A tensor parallel group is one rank of several GPUs.
    data = "--planner te_ring --model llama-13b --cluster a800 --ranks 16 --lengths 65536 --tokens-per-rank 9000"
    found = run.json(f"simulate {data} --tensor-parallel 2 --policy keep --json")
    assert (found["num_ranks"], found["gpus_per_rank"], len(found["peak_bytes_per_rank"])) == (8, 2, 8)
    cluster = wide_ranks(load_cluster("a800").build(num_ranks=16), 2)
    model = load_model("llama-13b")
    plan = make_planner("te_ring", cluster, model)([65536])
    step_s = simulate(plan, cluster, model, AnalyticCost(cluster, model, 2))["step_s"]
    assert found["step_s"]["median"] == pytest.approx(step_s["median"])
    assert "8 ranks of 2 GPUs (2 x 4)" in run(f"simulate {data} --tensor-parallel 2 --policy keep")[1]
    # Experts are exchanged where ranks share them.
    data = "simulate --planner te_ring --model moe-8x550m --cluster a800 --ranks 16 --lengths 65536 --json"
    data += " --tokens-per-rank 5000"
    alone, shared = (run.json(f"{data} {more}") for more in ("", "--expert-parallel 8"))
    assert shared["phases_s"]["forward_linear"] > alone["phases_s"]["forward_linear"]
    assert max(shared["peak_bytes_per_rank"]) < max(alone["peak_bytes_per_rank"])
    skewed = run.json(f"{data} --expert-parallel 8 --expert-counts 3,1,1,1,1,1,1,1 --expert-spread 0.5")
    assert skewed["phases_s"]["forward_linear"] > 1.5 * shared["phases_s"]["forward_linear"]


def test_what_a_job_cannot_run_is_never_best(run, tmp_path):
    # `te_ring` keeps all keys and does not fit; the fastest that fits is best, and stands first.
    path = tmp_path / "small.yaml"
    path.write_text("memory_bytes: 57.5e9\n")
    given = f"compare --planner te_ring --planner megatron --planner ulysses {INPUTS} --cluster {path} --policy keep"
    found = run.json(f"{given} --json")
    fits = {row["planner"]: row["fits"] and row["hides"] for row in found["rows"]}
    assert list(fits.values()) == sorted(fits.values(), reverse=True)
    assert not all(fits.values()), found["rows"]
    running = [row for row in found["rows"] if fits[row["planner"]]]
    assert found["best"] == (min(running, key=lambda row: row["step_s"])["planner"] if running else None)
    none = run.printed(given.replace(str(path), "h200") + " --tensor-parallel 1")
    assert "best of those that run" in none


def test_a_model_like_deepseek_fits_as_its_jobs_run_it(run, tmp_path):
    # 61 layers are a prime number of them, and one more predicts a further token: no pipeline
    # divides them. Its experts fill the memory of a rank that has them all.
    sizes = {"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "kv_lora_rank": 16, "q_lora_rank": 24}
    sizes |= {"n_routed_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 4096, "n_shared_experts": 1}
    sizes |= {"num_hidden_layers": 13, "num_nextn_predict_layers": 1, "first_k_dense_replace": 1, "hidden_act": "silu"}
    sizes |= {"num_attention_heads": 8, "hidden_size": 2048, "intermediate_size": 20480, "vocab_size": 1000}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    given = f"--planner megatron --planner zeppelin --model {tmp_path} --cluster h100 --ranks 8 --lengths 9000,700,300"
    assert "does not fit h100" in run.error(f"compare {given}")
    spread = "--expert-parallel 8 --pipeline 4 --stages stages --microbatches 1"
    found = run.json(f"compare {given} {spread} --json")
    assert all(row["fits"] for row in found["rows"]), found["rows"]
    assert found["best"] in {"megatron", "zeppelin"}
    assert found["assumed"] == "14 layers in 4 chunks of at most 4, as if all were full"
    # What is computed is of 14 layers, what a step takes of 16: MFU says so.
    whole = run.json(f"compare {given} {spread} --json --model {tmp_path}".replace("--pipeline 4", "--pipeline 2"))
    assert whole["assumed"] is None


def test_planners_are_told_the_memory_that_is_simulated(run, monkeypatch, tmp_path):
    # Stages, experts, recomputation, policy and microbatches in flight.
    told: list[StepMemory | None] = []

    def plan_in(batch: Batch, context: StepContext) -> MicrobatchPlan:
        told.append(context.memory)
        return zeppelin.plan_in(batch, context)

    monkeypatch.setitem(PLANNERS, "zeppelin", replace(PLANNERS["zeppelin"], plan_in=plan_in))
    path = tmp_path / "lengths.json"
    path.write_text("[[900, 80], [700, 64], [900], [80, 64]]")
    given = f"--planner zeppelin --model moe-8x550m --ranks 8 --lengths-file {path} --microbatches 4 --policy keep"
    run.json(f"simulate {given} --pipeline 2 --expert-parallel 4 --recompute full --stages stages --json")
    (memory,) = set(told)
    assert memory is not None
    model = replace(load_model("moe-8x550m"), expert_split=4)
    stages = stages_of(model, 8, pipeline=2, experts=4, recompute="full")
    assert memory == StepMemory(model, tuple(stages), "keep").of_microbatches(4)
    assert memory.stages[0].in_flight == 2


def test_steps_of_a_pipeline_have_microbatches_enough_and_room_for_those_in_flight(run):
    given = "compare --planner megatron --planner zeppelin --cluster h100 --ranks 8 --model llama3-8b --pipeline 4"
    given += " --stages stages --dataset arxiv --global-tokens 64k --json"
    found = run.json(given)
    assert all(row["fits"] for row in found["rows"])
    said = run.json(given.replace("--global-tokens 64k", "--tokens 4k --batches 16 --microbatches 16"))
    assert found["capacity_tokens_per_rank"] == said["capacity_tokens_per_rank"]
    one = run.json(given.replace("--global-tokens 64k", "--tokens 4k"))
    assert one["capacity_tokens_per_rank"] > found["capacity_tokens_per_rank"]
    # An error about an assumed capacity says what recomputing makes of it.
    given = "compare --planner megatron --model llama3-8b --cluster h100 --ranks 8 --lengths 40k,40k"
    assert "--recompute full (of simulate, compare and report) makes it" in run.error(given)
    assert "recompute" not in run.error(f"{given} --tokens-per-rank 4k")


def test_replicas_hold_the_longest_sequence_or_what_is_asked(run):
    given = f"--planner megatron {INPUTS}"
    assert run.json(f"simulate {given} --json")["context_parallel"] == 4
    assert run.json(f"simulate {given} --context-parallel 8 --json")["context_parallel"] == 8
    assert "context parallelism 4" in run.printed(f"simulate {given}")
    assert "make replicas of 1, 2, 4, 8" in run(f"simulate {given} --context-parallel 3")[2]
    assert "goes with planner megatron" in run(f"simulate --planner te_ring {INPUTS} --context-parallel 4")[2]
    # Replicas too small for the longest sequence are refused with the fewest.
    said = run.error(f"compare --planner megatron {INPUTS} --context-parallel 1")
    assert "context_parallel 1: the longest sequence has" in said
    assert "; use 4, the fewest that hold it" in said


def test_the_baseline_has_its_fastest_size_of_replicas_and_the_smallest_beside_it(run, tmp_path):
    # The fewest ranks that hold the longest sequence, 4 of 8, leave the others without work.
    given = "--planner megatron --lengths 60000,900,100 --ranks 8 --tokens-per-rank 16000"
    found = run.json(f"compare {given} --planner zeppelin --json")
    sizes = {each["context_parallel"]: each["step_s"] for each in found["baseline_sizes"]}
    assert sizes == {
        size: run.json(f"simulate {given} --context-parallel {size} --json")["step_s"]["median"] for size in (4, 8)
    }
    assert sizes[8] < sizes[4]
    rows = {row["planner"]: row for row in found["rows"]}
    base, best = rows["megatron"], rows["zeppelin"]
    assert (base["context_parallel"], base["step_s"], base["sizes"]) == (8, sizes[8], found["baseline_sizes"])
    assert best["speedup"] == pytest.approx(sizes[8] / best["step_s"])
    asked = run.json(f"compare {given} --planner zeppelin --context-parallel 8 --json")
    saved = next(row["gpu_hours_saved"] for row in asked["rows"] if row["planner"] == "zeppelin")
    assert best["gpu_hours_saved"] == pytest.approx(saved)
    assert asked["baseline_sizes"] == []
    said = " ".join(run.printed(f"compare {given} --planner zeppelin").split())
    assert "speedup over megatron (CP 8)" in said
    assert f"CP 4, the fewest ranks that hold the longest sequence, a step takes {sizes[4]:.3f} s" in said
    assert f"beside that, zeppelin is {sizes[4] / best['step_s']:.2f}x" in said
    page = run.json(f"report {given} --planner zeppelin --json --out", tmp_path / "report.html")
    assert next(row for row in page["rows"] if row["planner"] == "megatron")["step_s"] == sizes[8]
    assert "as fast as megatron (CP 8)" in page["answer"][0]
    assert "with CP 4, the fewest ranks" in page["answer"][1]


def test_groups_as_wide_as_an_option_have_the_fastest_that_fits(run):
    # A rank that may hold the longest sequence gets it, and the others wait for that rank.
    given = f"--planner megatron_dynamic -o rules=hybrid {INPUTS.replace('4000', '10000')}"
    found = run.json(f"simulate {given} --json")
    tried = {each["tokens_per_rank"]: each["layer_s"] for each in found["tried"]}
    assert (min(tried), max(tried), len(tried)) == (1381, 10000, 10)
    assert found["tokens_per_rank"] == min(tried, key=tried.__getitem__) < 10000
    # What somebody asks of this planner it has.
    as_asked = [run.json(f"simulate {given} -o tokens_per_rank={each} --json") for each in (10000, 1381)]
    assert [(each["tokens_per_rank"], each["tried"]) for each in as_asked] == [(10000, []), (1381, [])]
    assert found["step_s"]["median"] < 0.75 * min(each["step_s"]["median"] for each in as_asked)
    row = run.json(f"compare {given} --baseline megatron_dynamic --json")["rows"][0]
    assert (row["step_s"], row["tried"]) == (found["step_s"]["median"], found["tried"])
    most = f"{found['tokens_per_rank']:,} tokens a rank"
    assert f"{most} (fastest by estimate)" in run.printed(f"simulate {given}")
    assert most in " ".join(run.printed(f"compare {given} --baseline megatron_dynamic").split())
    # Nothing that it holds: refused as any planner is.
    assert "hold" in run.error(f"simulate {given.replace('10000', '100')}")
    # Groups that exchange heads are as wide as an option: over slow NICs wider than a node.
    given = "--planner usp --cluster a800-ib --model llama-7b --dataset arxiv --tokens 131072 --ranks 32"
    found, of_a_node = (run.json(f"simulate {given} {more} --json") for more in ("", "-o group_size=8"))
    assert [each["group_size"] for each in found["tried"]] == [1, 2, 4, 8, 16, 32]
    assert (found["found"], of_a_node["found"], of_a_node["tried"]) == ("heads in groups of 16", "", [])
    assert found["step_s"]["median"] < 0.95 * of_a_node["step_s"]["median"]


def test_a_planner_with_replicas_has_its_fastest_size_of_those_that_fit(run, tmp_path):
    # A planner with replicas has its fastest size beside any baseline and alone.
    given = "--planner megatron --lengths 60000,900,100 --ranks 8 --tokens-per-rank 16000"
    alone = run.json(f"simulate {given} --json")
    rows = run.json(f"compare {given} --planner te_ring --baseline te_ring --json")["rows"]
    beside = next(row for row in rows if row["planner"] == "megatron")
    assert (beside["context_parallel"], alone["context_parallel"]) == (8, 8)
    assert beside["step_s"] == alone["step_s"]["median"]
    assert "context parallelism 8 (fastest of 4, 8)" in run.printed(f"simulate {given}")
    # The baselines size is the fastest of those that fit.
    # Over slow NICs replicas inside a node are faster, and one has two of the three sequences.
    path = tmp_path / "slow.yaml"
    path.write_text("num_ranks: 4\nranks_per_node: 2\nnic_bytes_per_s: 5e9\nmemory_bytes: 76e9\n")
    given = f"--model llama-7b --lengths 4000,4000,4000 --tokens-per-rank 4000 --policy replay --cluster {path}"
    found = run.json(f"simulate --planner megatron {given} --json")
    assert [(each["context_parallel"], each["fits"]) for each in found["sizes"]] == [(1, False), (2, False), (4, True)]
    assert found["sizes"][1]["step_s"] < found["sizes"][2]["step_s"] == found["step_s"]["median"]
    said = " ".join(run.printed(f"compare --planner megatron {given}").split())
    assert "megatron is held against the others with CP 4, the fastest of its sizes that fit; with CP 1" in said
    assert "s, which does not fit in memory" in said


def test_gpu_hours_and_their_cost_are_told(run):
    given = f"compare --planner megatron --planner zeppelin {INPUTS}"
    found = run.json(f"{given} --price-per-gpu-hour 2.5 --json")
    rows = {row["planner"]: row for row in found["rows"]}
    assert found["baseline"] == "megatron"
    assert found["price_per_gpu_hour"] == 2.5
    for row in rows.values():
        assert row["gpu_hours"] == pytest.approx(8e9 / row["tokens_per_s"] / 3600)
        assert row["gpu_hours_saved"] == pytest.approx(rows["megatron"]["gpu_hours"] - row["gpu_hours"])
        # 6 FLOPs a parameter and token, and attention, over 8 GPUs of 989 Tflop/s
        assert row["mfu"] > 6 * 6.5e9 * row["tokens_per_s"] / (8 * 989e12) > 0.8 * row["mfu"]
    assert "GPU-hours for a billion tokens" in run.printed(f"{given} --price-per-gpu-hour 2.5")
    assert "must be more than 0" in run(f"{given} --price-per-gpu-hour 0")[2]
    # Tokens of a step become the microbatches that ranks need.
    data = "--planner te_ring --dataset github --ranks 8 --ranks-per-node 4 --tokens-per-rank 4000 --json"
    found = run.json(f"simulate {data} --global-tokens 100000")
    same = run.json(f"simulate {data} --tokens 25000 --batches 4 --microbatches 4")
    assert found["step_s"] == same["step_s"]
    assert "use one" in run(f"simulate {data} --global-tokens 100000 --tokens 5")[2]
    assert "goes with --dataset" in run(f"simulate --planner te_ring {INPUTS} --global-tokens 9")[2]


# `megatron-balance trace`: files of ranks become one, or a sentence says what is missing.
def write(folder: Path, step: int, rank: int, late_s: float = 0.0, **facts: object) -> None:
    # One rank of two: rank 0 sends 64 bytes to rank 1, whose clock is `late_s` behind.
    way = {"sent": {1: 64}} if not rank else {"received": {0: 64}}
    start_s, stop_s = (5.0, 7.0) if not rank else (5.5 - late_s, 8.0 - late_s)
    spans = [
        TrackSpan(rank, "inter_node", "direct", start_s, stop_s, "forward", 0, 2, exchange=7, zone="far", **way),
        TrackSpan(rank, "inter_node", "direct", start_s + 0.5, stop_s + 0.5, "forward", 0, 2, exchange=8),
    ]
    facts = {"kind": "measured", "step": step, "rank": rank, "world_size": 2, **facts}
    folder.mkdir(parents=True, exist_ok=True)
    document = Trace(spans, {rank: f"rank {rank}, node {rank}"}, facts).document()
    (folder / file_name(step, rank)).write_text(json.dumps(document))


def test_the_ranks_of_a_step_are_joined_and_arrows_lead_between_them(run: CommandLine, tmp_path: Path) -> None:
    for rank in (0, 1):
        write(tmp_path / "traces", 12, rank)
    out = tmp_path / "joined.json"
    assert run.printed(f"trace {tmp_path} --out {out}") == f"{out}: step 12, 2 ranks, 4 spans\n"
    found = trace_reader.read(out.read_text())
    ((start, end),) = found.arrows
    assert (start["pid"], start["ts"], start["name"]) == (0, 5e6, "direct 7")
    assert (end["pid"], end["ts"], end["name"]) == (1, 5.5e6, "direct 7")
    assert found.processes == {0: "rank 0, node 0", 1: "rank 1, node 1"}
    assert set(found.tracks.values()) == {"inter_node", "inter_node (2)"}, "two exchanges are under way at once"
    assert json.loads(run.printed(f"trace {tmp_path / 'traces'} --out -")) == json.loads(out.read_text())


def test_clocks_of_nodes_are_moved_until_nothing_arrives_before_it_is_sent(run: CommandLine, tmp_path: Path) -> None:
    out = tmp_path / "joined.json"
    for rank in (0, 1):
        write(tmp_path, 12, rank, late_s=3.5, node=rank)
    said = run.printed(f"trace {tmp_path} --out {out}")
    assert said.endswith("; clocks of nodes moved by 500.001 ms, for nothing to arrive before it is sent\n")
    found = trace_reader.read(out.read_text())
    ((start, end),) = found.arrows
    assert (start["ts"], end["ts"], end["name"]) == (5e6, 5e6, "arriving 7")
    assert {e["pid"]: e["ts"] for e in found.spans if e["name"] == "direct 7"} == {0: 5e6, 1: pytest.approx(2500001)}
    # Clocks that disagree are told and no arrow points back in time.
    for rank in (0, 1):
        write(tmp_path, 12, rank, late_s=3.5)
    said = run.printed(f"trace {tmp_path} --out {out}")
    assert "clocks of ranks differ by at least 500.000 ms; arrows left out that would point back in time: 1" in said
    assert trace_reader.read(out.read_text()).arrows == []
    assert json.loads(out.read_text())["otherData"]["arrows_left_out"] == 1


def test_nodes_that_no_move_puts_right_stay_and_ranks_of_a_node_share_a_clock() -> None:
    # Clocks of nodes that no move puts right stay.
    # Each of two nodes hears from the other a second before that speaks.
    def of(rank: int) -> Trace:
        spans = [
            TrackSpan(rank, "inter_node", "direct", 5.0, 6.0, exchange=0, sent={1 - rank: 64}),
            TrackSpan(rank, "inter_node", "direct", 3.0, 4.0, exchange=0, received={1 - rank: 64}),
        ]
        return Trace(spans, {rank: f"rank {rank}"}, {"node": rank})

    found = joined([of(0), of(1)])
    assert (found.facts["moved_s"], found.facts["skew_s"]) == (0.0, 1.0)
    assert found.document()["otherData"]["arrows_left_out"] == 2

    # Ranks of a node are put on its one clock.
    def on_node(rank: int, node: int, began: float) -> Trace:
        facts = {"node": node, "began_unix_s": began}
        return Trace([TrackSpan(rank, "compute", "attention", 1.0, 2.0)], {rank: f"rank {rank}"}, facts)

    spans = joined([on_node(0, 0, 100.0), on_node(1, 0, 100.25), on_node(2, 1, 7.5), on_node(3, 1, 7.0)]).spans
    assert [span.start_s for span in spans] == [1.0, 1.25, 1.5, 1.0]


def test_mistakes_about_traces_are_one_sentence(run: CommandLine, tmp_path: Path) -> None:
    assert "no traces; train with trace_steps: [N]" in run.error(f"trace {tmp_path} --out x.json")
    write(tmp_path, 12, 1)
    assert "step 12 has no trace of ranks 0 of 2" in run.error(f"trace {tmp_path} --out x.json")
    write(tmp_path, 13, 0)
    assert "traces of steps 12, 13; choose one with --step N" in run.error(f"trace {tmp_path} --out x.json")
    assert "--step 14: " in run.error(f"trace {tmp_path} --step 14 --out x.json")
    (tmp_path / file_name(13, 0)).write_text("[]")
    assert "is not a trace of this package" in run.error(f"trace {tmp_path} --step 13 --out x.json")
    for facts in (
        *({"world_size": wrong} for wrong in ({}, None, 1.5, 1 << 40)),
        *({"began_unix_s": wrong} for wrong in (float("inf"), "x")),
        {"node": []},
        {"planner": float("nan")},
    ):
        document = Trace([], {0: "rank 0"}, {"step": 13, "rank": 0, "world_size": 1, **facts}).document()
        (tmp_path / file_name(13, 0)).write_text(json.dumps(document))
        assert "is not a trace of this package" in run.error(f"trace {tmp_path} --step 13 --out x.json"), facts
    spans = [TrackSpan(1, "compute", "attention", 1.0, 2.0)]
    document = Trace(spans, {0: "rank 0"}, {"step": 13, "rank": 0, "world_size": 1}).document()
    (tmp_path / file_name(13, 0)).write_text(json.dumps(document))
    assert "rank 1 without a name" in run.error(f"trace {tmp_path} --step 13 --out x.json")
    (tmp_path / file_name(13, 0)).write_text("{")
    assert file_name(13, 0) in run.error(f"trace {tmp_path} --step 13 --out x.json")
