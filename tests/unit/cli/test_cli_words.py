"""Ways of all verbs: the bare call, numbers of tokens, where results go."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_balance import __version__
from megatron_balance.cli import main, verify
from megatron_balance.cli.inputs import tokens
from tests.support.cli import CommandLine


def test_a_bare_call_prints_help(run: CommandLine) -> None:
    assert run.printed("").startswith("usage: megatron-balance")


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert (stop.value.code, capsys.readouterr().out) == (0, f"megatron-balance {__version__}\n")


@pytest.mark.parametrize(
    ("word", "number"), [("4096", 4096), ("128k", 131072), ("1.5K", 1536), ("2m", 2097152), (" 7 ", 7), ("-3", -3)]
)
def test_tokens_may_be_thousands(word: str, number: int) -> None:
    assert tokens(word) == number


@pytest.mark.parametrize("word", ["", "k", "0.3k", "4.5", "1g", "nan", "infk", "9" * 30, "1e999999999k", "0x10"])
def test_what_is_no_number_of_tokens_is_refused(word: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="expected whole tokens such as 4096 or 128k"):
        tokens(word)


def test_lengths_and_tokens_take_thousands(run: CommandLine) -> None:
    report = run.json("plan --planner te_ring --ranks 4 --lengths 4k,512 --json")
    assert report["results"][0]["num_tokens"] == 4608
    report = run.json("plan --planner te_ring --ranks 4 --dataset github --tokens 4k --tokens-per-rank 1k --json")
    assert (report["results"][0]["num_tokens"], report["capacity_tokens_per_rank"]) == (4096, 1024)
    assert "argument --tokens: expected whole tokens such as 4096 or 128k, got '4x'" in run.error(
        "plan --planner te_ring --dataset github --tokens 4x"
    )


def test_a_plan_on_standard_output_is_the_plan_alone(run: CommandLine, tmp_path: Path) -> None:
    command = "plan --planner zeppelin --ranks 4 --lengths 900,20"
    run.printed(f"{command} --out", tmp_path / "plan.json")
    assert run.printed(f"{command} --out -") == (tmp_path / "plan.json").read_text()
    assert "--out - and --json both write to standard output" in run.error(f"{command} --out - --json")


def test_a_table_may_stand_behind_the_options(run: CommandLine) -> None:
    before, behind = (run.json(f"reproduce zeppelin {words}") for words in ("table2 --json", "--json table2"))
    assert before == behind
    assert {row["table"] for row in behind["rows"]} == {"table2"}
    assert "'table3'" in run.error("reproduce zeppelin table2 --json table3")


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


NUMBERS = [
    ("plan --planner te_ring --ranks 8 --dataset github --tokens 99999999999999999", "expected at most 100000000000"),
    ("plan --planner te_ring --ranks 8 --dataset github --tokens 4096 --batches 999999999", "in 1000000 batches at"),
    ("plan --planner te_ring --ranks 8 --dataset g8b4i256f1s0 --batches 999999999", "expected at most 10000000"),
    ("plan --planner te_ring --ranks 8000000 --lengths 8", "a cluster of 8000000 ranks: expected at most 1048576"),
    ("simulate --planner te_ring --ranks 8 --lengths 8 --microbatches 99999999", "--microbatches 99999999: expected"),
    ("simulate --planner te_ring --ranks 8 --dataset github --global-tokens 99999999999999999", "expected at most"),
]


@pytest.mark.parametrize(("command", "said"), NUMBERS, ids=[said for _, said in NUMBERS])
def test_numbers_that_no_machine_has_room_for_are_refused_at_once(run: CommandLine, command: str, said: str) -> None:
    assert said in run.error(command)


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
    """1 says that a plan does not hold."""

    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(verify, "read", fails)
    answer = run("verify plan.json")
    assert (answer.code, answer.out) == (code, "")
    assert answer.err.endswith(said)
    assert ("Traceback" in answer.err) == (code == 70)


def test_a_trace_on_standard_output_is_the_trace_alone(run: CommandLine, tmp_path: Path) -> None:
    command = "simulate --planner zeppelin --ranks 4 --model gpt-tiny --lengths 900,20 --trace"
    run.printed(command, tmp_path / "trace.json")
    assert run.printed(f"{command} -") == (tmp_path / "trace.json").read_text()
    assert "--trace - and --json both write to standard output" in run.error(f"{command} - --json")
