"""The verb `tune`: the trade-off as a table and as JSON, and mistakes in one line."""

from __future__ import annotations

import pytest

from tests.support.cli import CommandLine

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
