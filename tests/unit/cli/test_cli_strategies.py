"""The verb `strategies`: its table, its JSON, the file for training, and mistakes."""

from __future__ import annotations

import pytest

from megatron_balance.ir.strategy import Strategy
from tests.support.cli import CommandLine

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


def test_people_see_a_table(run):
    out = run.printed(COMMAND)
    assert "longest sequence" in out
    assert "4 GPUs, a800-7b; commoncrawl, 1 step of 20,000 tokens" in " ".join(out.split())


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("--tokens 0", "--tokens 0: must be at least 1"),
        ("--schemes a800-8b", "no scheme named 'a800-8b', did you mean"),
        ("--plan-costs x.json", "--schemes and --plan-costs are both given"),
        ("--out nowhere/x.txt", "--out nowhere/x.txt: no folder nowhere"),
        ("--out .", "--out .: is a folder"),
        ("--out /proc/strategies.txt", "--out /proc/strategies.txt: cannot be written: No such file"),
        ("--ranks 70000", "--ranks 70000: more than 65536"),
        ("--ranks 1", "fits no pipeline of 1 GPUs: none"),
    ],
)
def test_a_mistake_is_one_line(run, more, message):
    assert message in run.error(f"{COMMAND} {more}")


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


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("tune te_ring --lengths 4,5", "tune: planner 'te_ring' has nothing to tune; these have: wlb_llm"),
        ("tune wlb_llm --lengths 4,5 --planner te_ring", "name the one planner to tune right behind 'tune'"),
        ("tune wlb_llm --lengths 4,5", "expected a sample of steps of at least 2 microbatches"),
        (f"tune wlb_llm {SAMPLE} --most-delay -1", "--most-delay -1: expected at least 1, 1 and 0"),
    ],
)
def test_mistakes_are_one_line(run: CommandLine, command: str, message: str) -> None:
    assert message in run.error(command)
