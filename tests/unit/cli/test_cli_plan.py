"""`plan`, `verify`, `strategies`, `tune`, and ways of all verbs; a sentence for every mistake."""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_balance import __version__
from megatron_balance.cli import main, verify
from megatron_balance.cli.inputs import tokens
from megatron_balance.ir.plan import from_json
from megatron_balance.ir.strategy import Strategy
from megatron_balance.planners import PLANNERS
from tests.support.cli import CommandLine
from tests.support.processes import ended

ROOT = Path(__file__).resolve().parents[3]

LENGTHS = "3000,1200,700,64,64,17,1"
OF_RANKS = ("attention_pairs", "bytes_received", "attention_tokens", "remap_tokens_received", "tokens")
RECEIVED = ("kv_tokens_received", "kv_tokens_received_inter_node", "query_tokens_received", "partial_tokens_received")
RESULT_KEYS = {f"{name}_per_rank" for name in (*OF_RANKS, *RECEIVED)}
RESULT_KEYS |= {"num_sequences", "num_tokens", "num_microbatches", "bytes_sent_per_nic", "bytes_received_per_nic"}
RESULT_KEYS |= {"routed_transfers", "remap", "imbalance", "plan_ms", "verified", "fingerprint"}


def test_json_has_the_documented_keys_for_every_planner(run):
    # Several planners give one document with each.
    asked = " ".join(f"--planner {planner}" for planner in PLANNERS)
    machine = "--ranks 8 --ranks-per-node 4 --tokens-per-rank 1024"
    planners = run.json(f"plan {asked} {machine} --lengths {LENGTHS} --verify --json")["planners"]
    assert list(planners) == list(PLANNERS)
    lengths = [int(word) for word in LENGTHS.split(",")]
    for planner, report in planners.items():
        assert (report["planner"], report["num_ranks"]) == (planner, 8)
        (result,) = report["results"]
        assert set(result) >= RESULT_KEYS
        assert (result["num_sequences"], result["num_tokens"]) == (7, 5046)
        assert sum(result["tokens_per_rank"]) == 5046
        assert sum(result["attention_pairs_per_rank"]) == sum(n * (n + 1) // 2 for n in lengths)
        assert set(result["bytes_received_per_rank"]) == {"total", "inter_node"}
        ranks = [each for key, each in result.items() if key.endswith("_per_rank") and isinstance(each, list)]
        assert {len(each) for each in ranks} == {8}
        assert result["verified"] is True
        assert len(result["fingerprint"]) == 16


def test_summary_defaults_and_thousands(run: CommandLine, tmp_path) -> None:
    # Summary is the mean over batches of the scalar fields.
    path = tmp_path / "lengths.json"
    path.write_text("[[4096, 512], [1024]]")
    report = run.json(f"plan --planner te_ring --ranks 4 --json --lengths-file {path}")
    assert [result["num_tokens"] for result in report["results"]] == [4608, 1024]
    assert (report["summary"]["num_tokens"], report["summary"]["num_sequences"]) == (2816, 1.5)
    mean = sum(result["imbalance"]["attention"] for result in report["results"]) / 2
    assert report["summary"]["imbalance"]["attention"] == pytest.approx(mean)
    assert report["results"][0]["verified"] is None
    # Defaults are said.
    _, out, _ = run("plan --planner te_ring --lengths 4096")
    assert "64 ranks (8 nodes x 8), llama-7b on h200 assumed" in out
    assert "assumed" not in run("plan --planner te_ring --lengths 4096 --model llama-13b --cluster a800")[1]
    assert "(llama-7b assumed)" in run("plan --planner te_ring --lengths 4096 --cluster a800")[1]
    # Lengths and tokens take thousands.
    report = run.json("plan --planner te_ring --ranks 4 --lengths 4k,512 --json")
    assert report["results"][0]["num_tokens"] == 4608
    report = run.json("plan --planner te_ring --ranks 4 --dataset github --tokens 4k --tokens-per-rank 1k --json")
    assert (report["results"][0]["num_tokens"], report["capacity_tokens_per_rank"]) == (4096, 1024)
    assert "argument --tokens: expected whole tokens such as 4096 or 128k, got '4x'" in run.error(
        "plan --planner te_ring --dataset github --tokens 4x"
    )


def test_config_file_gives_everything_and_options_win(run, tmp_path):
    path = tmp_path / "run.yaml"
    text = "planner: {name: zeppelin, tokens_per_rank: 2048}\ncluster: {base: a800, num_ranks: 16}\nmodel: llama3-8b\n"
    path.write_text(text + "dataset: {name: github, tokens: 16384, batches: 2}\n")
    report = run.json(f"plan --config {path} --json")
    said = [report[key] for key in ("num_ranks", "cluster", "model", "planner")]
    assert said == [16, "a800", "llama3-8b", "zeppelin"]
    assert (len(report["results"]), report["capacity_tokens_per_rank"], report["assumed"]) == (2, 2048, None)
    changed = run.json(f"plan --config {path} --ranks 8 --batches 1 --tokens 8192 -o tokens_per_rank=4096 --json")
    assert (changed["num_ranks"], len(changed["results"]), changed["capacity_tokens_per_rank"]) == (8, 1, 4096)
    other = run.json(f"plan --config {path} --lengths 100 --planner te_ring --json")
    assert (other["planner"], other["results"][0]["num_tokens"]) == ("te_ring", 100)
    # Option of one of several planners.
    run.json("plan --planner te_ring --planner zeppelin --ranks 4 --lengths 100 -o zeppelin.rule=paper --json")


def layers_of(run, options: str) -> tuple[str, bool, int, int]:
    # Routing, remapping, and what comes of them.
    report = run.json(f"plan --ranks 8 --ranks-per-node 4 --lengths {LENGTHS} --json --verify {options}")
    (result,) = report["results"]
    return report["routing"], report["remapping"], result["routed_transfers"], result["remap"]["tokens_moved"]


def test_layers_are_the_planners_own_or_as_told_and_even_out_tokens_and_nics(run, tmp_path):
    assert layers_of(run, "--planner te_ring") == ("never", False, 0, 0)
    assert layers_of(run, "--planner zeppelin")[:2] == ("pays", True)
    assert layers_of(run, "--planner zeppelin --remap")[3] > 0
    assert layers_of(run, "--planner zeppelin --routing never --no-remap") == ("never", False, 0, 0)
    all_of_them = layers_of(run, "--planner te_ring --routing always --remap --remap-solver exact")
    assert all_of_them[:2] == ("always", True)
    assert min(all_of_them[2:]) > 0
    path = tmp_path / "run.yaml"
    path.write_text("planner: te_ring\nrouting: always\nremap: {solver: exact}\n")
    assert layers_of(run, f"--config {path}")[:2] == ("always", True)
    assert layers_of(run, f"--config {path} --routing never --no-remap")[:2] == ("never", False)
    # Remapped tokens are even and routed bytes take every NIC.
    machine = "--ranks 8 --ranks-per-node 4 --tokens-per-rank 1024 --routing always --remap"
    (result,) = run.json(f"plan --planner zeppelin {machine} --lengths {LENGTHS} --json")["results"]
    assert max(result["tokens_per_rank"]) - min(result["tokens_per_rank"]) <= 1
    assert result["imbalance"]["tokens"] < 1.01 < max(result["attention_tokens_per_rank"]) / (5046 / 8)
    assert all(0 < min(node) >= 0.99 * max(node) for node in result["bytes_sent_per_nic"])


def test_table_says_what_each_rank_gets_and_what_the_layers_do(run):
    inputs = f"--ranks 8 --ranks-per-node 4 --tokens-per-rank 1024 --lengths {LENGTHS}"
    _, out, err = run(f"plan --planner zeppelin {inputs} --routing always --remap --verify")
    said = ("in attention", "remapped tokens received", "MB sent by each NIC", "have another rank for attention")
    said += ("routing always:", "attention pairs", "KV tokens received", "max / mean", "verified", "planned in")
    assert err == ""
    assert all(words in out for words in said)
    _, out, _ = run(f"plan --planner te_ring --ranks 8 --ranks-per-node 4 --lengths {LENGTHS}")
    assert "in attention" not in out
    assert "routing" not in out


def test_the_page_on_keep_and_replay_shows_what_its_command_prints(run):
    page = (ROOT / "docs" / "backward.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"```\n(backward: .+)\n```", page)
    (options,) = re.findall(r"`megatron-balance plan --config configs/([^`]+)`", page)
    printed = run.printed(f"plan --config {ROOT}/configs/{options}")
    assert shown in " ".join(printed.split())


USUAL, FOUR = "--planner te_ring --lengths 4", "--planner zeppelin --ranks 4 --tokens-per-rank 1000 --lengths"
POOL = "--planner distca --ranks 4 -o servers=pool -o pool_ranks=3 --lengths"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("--planner zepelin --lengths 4", "unknown planner 'zepelin', did you mean 'zeppelin'?"),
        ("--lengths 4", "no planner; give --planner NAME, one of te_ring"),
        ("--planner te_ring", "no sequence lengths to plan for; give --lengths 4096,512,..., --lengths-file FILE, "),
        ("--planner te_ring --lengths 4,x", "--lengths: entry 1 is 'x'; expected whole numbers"),
        ("--planner te_ring --lengths 4,0", "sequence 1 has 0 tokens; every sequence needs at least 1"),
        ("--planner te_ring --lengths 4,-7", "sequence 1 has -7 tokens"),
        ("--planner te_ring --lengths=", "--lengths: entry 0 is ''"),
        ("& --lengths-file f", "--lengths and --lengths-file are both given; use one"),
        ("--planner te_ring --lengths-file nowhere.json", "nowhere.json: No such file or directory"),
        ("--planner te_ring --dataset arxiv", "--dataset arxiv needs --tokens N"),
        ("--planner te_ring --dataset arxib --tokens 9", "--dataset 'arxib' is not known; choose one of arxiv"),
        ("& --tokens 9", "--tokens goes with --dataset NAME"),
        ("--planner te_ring --dataset arxiv --tokens 0", "--tokens 0: must be at least 1"),
        ("& --ranks 12", "12 ranks are not divisible by 8 ranks per node"),
        ("& --ranks 0", "--ranks 0: must be at least 1"),
        ("& --ranks x", "argument --ranks: invalid int value: 'x'"),
        ("& --cluster h20", "--cluster: no cluster named 'h20', did you mean 'h200'?"),
        ("& --model none.yaml", "none.yaml: cannot be read"),
        ("& --tokens-per-rank 0", "--tokens-per-rank 0: must be at least 1"),
        ("& -o rule", "-o rule: expected KEY=VALUE"),
        ("--planner zeppelin --lengths 4 -o rul=cost", "--planner zeppelin: rul: unknown key, did you mean 'rule'?"),
        ("--planner zeppelin --lengths 4 -o slack=much", "--planner zeppelin: slack: expected a number, got 'much'"),
        ("--planner zeppelin --lengths 4 -o te_ring.x=4", "planner 'te_ring' is not among the planners of this run: "),
        ("& --remap-solver highs", "--remap-solver highs goes with a remap, which te_ring leaves out; add --remap"),
        ("& --remap-solver gurob", "argument --remap-solver: invalid choice: 'gurob' (choose from 'exact', 'gurobi'"),
        ("& --routing sometimes", "--routing: invalid choice: 'sometimes' (choose from 'always', 'pays', 'never')"),
        ("& --remp", "plan: unknown option '--remp'; did you mean '--remap'?"),
        ("--planner te_ring --planner te_ring --lengths 4", "--planner te_ring is given twice"),
        ("& --planner zeppelin --out p.json", "--out p.json holds the plans of one planner"),
        ("& --out nowhere/p.json", "--out nowhere/p.json: cannot be written: No such file or directory"),
        ("& --jsn", "plan: unknown option '--jsn'; did you mean '--json'?"),
        ("& --config nowhere.yaml", "nowhere.yaml: cannot be read"),
        (f"{FOUR} 4001", "sequence 0 has 4001 tokens and needs 5 ranks of 1000 tokens; 4 are available"),
        (f"{FOUR} 2001,2000", "4 ranks x 1000 tokens hold 4000. Use at least 5 ranks, raise --tokens-per-rank"),
        (f"{POOL} 900,200 --tokens-per-rank 1000", "the batch has 1100 tokens; 1 ranks x 1000 tokens hold 1000"),
        (f"{POOL} 9 --remap", "distca keeps 3 of 4 ranks for attention alone (servers: pool), and a remap would give"),
        ("--planner zeppelin --ranks 8 --lengths 9000000", "capacity comes from the model and the cluster's memory"),
        ("--planner zeppelin --ranks 8 --lengths 9 --model llama-70b --cluster h100", "llama-70b does not fit h100"),
    ],
)
def test_mistake_is_one_line_and_exit_code_2(run, options, expected):
    # `&` stands for the usual command.
    assert expected in run.error(f"plan {options.replace('&', USUAL)}")


def test_help_and_version_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    # Help lists planners clusters and models.
    with pytest.raises(SystemExit) as stop:
        main(["plan", "--help"])
    out = " ".join(capsys.readouterr().out.split())
    assert stop.value.code == 0
    for word in (*PLANNERS, "a800-ib", "llama-550m", "--lengths-file"):
        assert word in out
    # A bare call prints it too.
    assert main([]) == 0
    assert capsys.readouterr().out.startswith("usage: megatron-balance")
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert (stop.value.code, capsys.readouterr().out) == (0, f"megatron-balance {__version__}\n")


def test_module_and_script_are_the_same_program_and_a_table_may_stand_behind_the_options(run: CommandLine) -> None:
    command = [sys.executable, "-m", "megatron_balance", "plan", "--planner", "te_ring", "--lengths", "8", "--json"]
    result = ended(command)
    assert result.returncode == 0
    assert json.loads(result.stdout)["planner"] == "te_ring"
    assert result.stderr == ""
    # What a library writes to standard output itself is not among the JSON.
    noisy = (
        "import os, runpy, sys; import megatron_balance.cli.plan as plan; run = plan.run; "
        "plan.run = lambda args: (os.write(1, b'a solver says\\n'), run(args))[1]; "
        "sys.argv = ['megatron-balance', *sys.argv[1:]]; runpy.run_module('megatron_balance', run_name='__main__')"
    )
    noted = ended([sys.executable, "-c", noisy, *command[3:]])
    assert (json.loads(noted.stdout)["planner"], noted.stderr) == ("te_ring", "a solver says\n")
    # A table may stand behind the options.
    before, behind = (run.json(f"reproduce zeppelin {words}") for words in ("table2 --json", "--json table2"))
    assert before == behind
    assert {row["table"] for row in behind["rows"]} == {"table2"}
    assert "'table3'" in run.error("reproduce zeppelin table2 --json table3")


# The verb `strategies`: its table, its JSON, the file for training, and mistakes.
COMMAND = "strategies --dataset commoncrawl --tokens 20000 --seq-length 4096 --ranks 4 --batches 1 --schemes a800-7b"


def test_json_and_the_file_name_the_same_strategies(run, tmp_path):
    out = tmp_path / "found.txt"
    found = run.json(f"{COMMAND} --out {out} --json")
    assert (found["num_ranks"], found["batches"]) == (4, 1)
    lines = [line.partition("#")[0].strip() for line in out.read_text().splitlines()]
    written = [Strategy.parse(line) for line in lines if line]
    assert [str(each) for each in written] == [row["strategy"] for row in found["strategies"]]
    assert sum(row["best_share"] for row in found["strategies"]) == pytest.approx(1)
    assert found["strategies"][0]["max_tokens"] >= 4096
    printed = run.printed(COMMAND)
    assert "longest sequence" in printed
    assert "4 GPUs, a800-7b; commoncrawl, 1 step of 20,000 tokens" in " ".join(printed.split())


# The verb `tune`: the trade-off as a table and as JSON, and mistakes in one line
SAMPLE = "--dataset wlb-skew --tokens 16384 --batches 60 --ranks 2 --model llama-7b --tokens-per-rank 16384 --queues 1"


def test_tune_prints_what_it_weighed(run: CommandLine) -> None:
    found = run.json(f"tune wlb_llm {SAMPLE} --json")
    assert found["steps"] >= 10
    chosen = next(trial for trial in found["trials"] if trial["chosen"])
    assert chosen["thresholds"] == found["thresholds"]
    assert chosen["delay"] <= 0.5
    assert chosen["imbalance"] <= found["trials"][0]["imbalance"]
    said = f"planner: {{thresholds: [{', '.join(map(str, found['thresholds']))}]}}"
    assert said in run.printed(f"tune wlb_llm {SAMPLE}")


# Ways of all verbs: the bare call, numbers of tokens, where results go.
@pytest.mark.parametrize("word", ["", "k", "0.3k", "4.5", "1g", "nan", "infk", "9" * 30, "1e999999999k", "0x10"])
def test_tokens_may_be_thousands_and_what_is_no_number_of_them_is_refused(word: str) -> None:
    numbers = {"4096": 4096, "128k": 131072, "1.5K": 1536, "2m": 2097152, " 7 ": 7, "-3": -3}
    assert {right: tokens(right) for right in numbers} == numbers
    with pytest.raises(argparse.ArgumentTypeError, match="expected whole tokens such as 4096 or 128k"):
        tokens(word)


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("plan --planner zeppelin --ranks 4 --lengths 900,20", "--out"),
        ("simulate --planner zeppelin --ranks 4 --model gpt-tiny --lengths 900,20", "--trace"),
    ],
)
def test_a_plan_or_trace_on_standard_output_is_alone(run: CommandLine, tmp_path: Path, command, option) -> None:
    run.printed(f"{command} {option}", tmp_path / "made.json")
    assert run.printed(f"{command} {option} -") == (tmp_path / "made.json").read_text()
    assert f"{option} - and --json both write to standard output" in run.error(f"{command} {option} - --json")


FULL = Path("/dev/full")

EACH = """
import os, runpy, sys
import megatron_balance.cli
for words in sys.argv[1:]:
    if not (child := os.fork()):
        sys.argv = ["megatron-balance", *words.split()]
        runpy.run_module("megatron_balance", run_name="__main__")
        sys.exit("it returned")
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=sys.stderr)
"""


@pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")
def test_a_full_disk_is_a_line() -> None:
    commands = ["plan --planner te_ring --ranks 2 --lengths 9 --out -", "--version", "", "plan --help"]
    with FULL.open("w") as full:
        command = [sys.executable, "-c", EACH, *commands]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.stderr == 4 * "error: standard output cannot be written: No space left on device\n2\n"


MISTAKES = [
    ("pln", "pln"),
    ("plan --ranks", "expected one argument"),
    ("strategies & --tokens 0", "--tokens 0: must be at least 1"),
    ("strategies & --schemes a800-8b", "no scheme named 'a800-8b', did you mean"),
    ("strategies & --plan-costs x.json", "--schemes and --plan-costs are both given"),
    ("strategies & --model llama-13b", "--schemes and --model are both given"),
    ("strategies & --out nowhere/x.txt", "--out nowhere/x.txt: no folder nowhere"),
    ("strategies & --out .", "--out .: is a folder"),
    ("strategies & --out /proc/strategies.txt", "--out /proc/strategies.txt: cannot be written: No such file"),
    ("strategies & --ranks 70000", "--ranks 70000: more than 65536"),
    ("strategies & --ranks 1", "fits no pipeline of 1 GPUs: none"),
    ("tune te_ring --lengths 4,5", "tune: planner 'te_ring' has nothing to tune; these have: wlb_llm"),
    ("tune wlb_llm --lengths 4,5 --planner te_ring", "name the one planner to tune right behind 'tune'"),
    ("tune wlb_llm --lengths 4,5", "expected a sample of steps of at least 2 microbatches"),
    (f"tune wlb_llm {SAMPLE} --most-delay -1", "--most-delay -1: expected at least 1, 1 and 0"),
    # Numbers that no machine has room for are refused at once.
    ("plan --planner te_ring --ranks 8 --dataset github --tokens 99999999999999999", "expected at most 100000000000"),
    ("plan --planner te_ring --ranks 8 --dataset github --tokens 4096 --batches 999999999", "in 1000000 batches at"),
    ("plan --planner te_ring --ranks 8 --dataset g8b4i256f1s0 --batches 999999999", "expected at most 10000000"),
    ("plan --planner te_ring --ranks 8000000 --lengths 8", "a cluster of 8000000 ranks: expected at most 1048576"),
    ("simulate --planner te_ring --ranks 8 --lengths 8 --microbatches 99999999", "--microbatches 99999999: expected"),
    ("simulate --planner te_ring --ranks 8 --dataset github --global-tokens 99999999999999999", "expected at most"),
]


@pytest.mark.parametrize(("command", "said"), MISTAKES)
def test_a_mistake_of_any_verb_is_one_line(run: CommandLine, command: str, said: str) -> None:
    # `&` stands for the usual strategies.
    assert said in run.error(command.replace("strategies &", COMMAND))


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (KeyError("of nobody"), 70, "KeyError: 'of nobody'\n"),
        (RecursionError("too deep"), 70, "RecursionError: too deep\n"),
        (PermissionError(1, "not here"), 70, "PermissionError: [Errno 1] not here\n"),
        (MemoryError("466 TiB for an array"), 2, "error: not enough memory: 466 TiB for an array\n"),
    ],
)
def test_a_traceback_has_an_exit_code_of_its_own(
    run: CommandLine, monkeypatch: pytest.MonkeyPatch, error: Exception, code: int, said: str
) -> None:
    # 1 says that a plan does not hold.
    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(verify, "read", fails)
    answer = run("verify plan.json")
    assert (answer.code, answer.out) == (code, "")
    assert answer.err.endswith(said)
    assert ("Traceback" in answer.err) == (code == 70)


# `plan --out` and `verify`: a plan file is proved, and any change to it is found.
NODES = "--ranks 4 --ranks-per-node 2"


@pytest.fixture
def plan_file(tmp_path, run) -> Path:
    path = tmp_path / "plan.json"
    run.printed(f"plan --planner zeppelin --tokens-per-rank 512 --lengths 900,300,60,7 {NODES} --out {path}")
    return path


def change(path: Path, **keys: object) -> Path:
    body = json.loads(path.read_text()) | keys
    path.write_text(json.dumps(body))
    return path


def body_of(path: Path) -> dict:
    return json.loads(path.read_text())


def test_written_plan_verifies_and_json_says_what_was_proved(plan_file, run):
    for policy in ("keep", "replay"):
        code, out, err = run("verify", plan_file, "--policy", policy)
        assert (code, err) == (0, "")
        assert "verified: zeppelin" in out
        assert "the program written with it is right too" in out
    report = run.json("verify --json", plan_file)
    assert report["verified"] is True
    assert report["results"][0]["num_ops"] > 0
    assert report["results"][0]["fingerprint"] == body_of(plan_file)["fingerprint"]


def test_dropping_any_line_of_the_program_is_found(tmp_path, run):
    # Of a dispatch, whose program is short and has every kind of line.
    plan_file = tmp_path / "plan.json"
    run.printed(f"plan --planner distca --ranks 2 --ranks-per-node 2 --lengths 900,7 --out {plan_file}")
    lines = body_of(plan_file)["program"]
    every = ("program", "owner", "forward", "exchange", "attend", "merge", "backward")  # what begins a block
    every += ("q", "kv", "out", "over", "dq", "dkv", "dout")
    assert {word for line in lines for word in line.split()} >= {*every}
    found = 0
    # a heading that reading does without
    for dropped in (number for number, line in enumerate(lines) if line != "forward"):
        change(plan_file, program=lines[:dropped] + lines[dropped + 1 :])
        code, out, err = run("verify", plan_file)
        # A missing op, transfer or route is a program that is not the planned one (1); a missing
        # header cannot be read (2).
        assert code in (1, 2), lines[dropped]
        assert err
        assert out == ""
        found += code == 1
    assert found > len(lines) // 2


def refused(run, path: Path, command: str = "verify") -> str:
    # What is said of a plan that does not hold.
    code, _, err = run(command, path)
    assert code == 1
    return err


def test_a_changed_program_or_plan_is_found(plan_file, tmp_path, run):
    # With another exchange id it computes the same, but it is not what the ranks run.
    lines = body_of(plan_file)["program"]
    last = max(number for number, line in enumerate(lines) if line.startswith("exchange "))
    word, number, rest = lines[last].split(" ", 2)
    change(plan_file, program=[*lines[:last], f"{word} {int(number) + 1} {rest}", *lines[last + 1 :]])
    assert "not the one that was proved" in refused(run, plan_file)
    # The program of another plan; another length under the old fingerprint.
    other = tmp_path / "other.json"
    run.printed(f"plan --planner te_ring {NODES} --lengths 900,300,60,7 --out {other}")
    change(plan_file, program=body_of(other)["program"])
    assert "the program written is not the plan's" in refused(run, plan_file)
    change(plan_file, lengths=[901, 300, 60, 7], program=None)
    assert "the plan was changed" in refused(run, plan_file)


def test_forged_plans_are_found_and_several_are_proved_one_by_one(plan_file, run, tmp_path, monkeypatch):
    # Forged plan that forgets a sequence is found.
    body = body_of(plan_file)
    body["zones"] = body["zones"][1:]
    body["program"] = None
    body["fingerprint"] = from_json(json.dumps(body)).fingerprint()
    plan_file.write_text(json.dumps(body))
    code, out, err = run("verify --json", plan_file)
    assert code == 1
    assert json.loads(out)["verified"] is False
    assert "not verified" in err
    # Several batches are proved one by one.
    lengths, path = tmp_path / "l.json", tmp_path / "plan.json"
    lengths.write_text("[[500, 20], [64, 64, 3]]")
    run.printed(f"plan --planner te_ring --ranks 2 --lengths-file {lengths} --out {path}")
    assert run.printed("verify", path).count("verified: te_ring") == 2
    body = body_of(path)
    body["plans"][1]["fingerprint"] = "0" * 16
    path.write_text(json.dumps(body))
    code, out, err = run("verify", path)
    assert code == 1
    assert "plan 1: not verified" in err
    assert out.count("verified: te_ring") == 1
    # Long program is left out and the plan still proved.
    monkeypatch.setattr(verify, "MAX_PROGRAM_LINES", 5)
    path = tmp_path / "plan.json"
    run.printed(f"plan --planner te_ring --ranks 2 --lengths 64 --out {path}")
    assert body_of(path)["program"] is None
    assert "program written" not in run.printed("verify", path)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "cannot be read: No such file or directory"),
        ("{", "not JSON"),
        ("[1]", "not a plan"),
        ("{}", "not a plan of this version"),
        ('{"format": "megatron-balance plan 3"}', "damaged plan"),
        ('{"format": "megatron-balance plans 1", "plans": []}', "holds no plans"),
        ('{"format": "megatron-balance plan 3", "program": 3}', "program: expected a list of lines or null"),
    ],
)
def test_unreadable_file_is_one_line_and_exit_code_2(tmp_path, run, content, expected):
    path = tmp_path / "plan.json"
    if content is not None:
        path.write_text(content)
    assert expected in run.error("verify", path)
