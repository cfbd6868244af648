"""Commands of the tour print what the page says, times aside; the README's table holds what
`compare` simulates."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from megatron_balance.cli import main
from megatron_balance.planners import PLANNERS

ROOT = Path(__file__).resolve().parents[3]
README = (ROOT / "README.md").read_text(encoding="utf-8")
TOUR = (ROOT / "docs" / "tour.md").read_text(encoding="utf-8")


def commands(page: str) -> list[tuple[str, str]]:
    """(command, output) of every `$ megatron-balance` in a code block; the output ends at the next
    command."""
    pairs = []
    for block in re.findall(r"```\n(\$ megatron-balance .*?)```", page, re.DOTALL):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            pairs.append((command, output))
    return pairs


def without_times(text: str) -> list[str]:
    """Lines without planning times: `12.3 ms`, and the column `plan ms` of a table."""
    lines, column = [], None
    for line in text.strip().splitlines():
        cells = re.split("[┃│]", line)
        if "┃" in line:
            column = next((at for at, cell in enumerate(cells) if cell.strip() == "plan ms"), None)
        if column is not None and "│" in line:
            cells[column] = ""
        lines.append(re.sub(r"[\d.]+ ms", "- ms", "|".join(cells)).rstrip())
    return lines


def test_every_command_prints_what_the_tour_says(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # one command's plan.json is the next one's input
    monkeypatch.setenv("COLUMNS", "120")
    toured = commands(TOUR)
    assert len(toured) >= 4
    for command, expected in toured:
        assert main(shlex.split(command)[1:]) == 0, command
        assert without_times(capsys.readouterr().out) == without_times(expected), command


def strategies() -> dict[str, list[str]]:
    """Cells of each row of the README's table of strategies, by planner."""
    section = README.partition("## Strategies")[2].partition("\n## ")[0]
    rows = [
        [cell.strip(" *†") for cell in line.strip("|").split("|")]
        for line in section.splitlines()
        if line.startswith("| `")
    ]
    return {row[0].strip("`"): row for row in rows}


def test_the_table_of_strategies_has_every_planner_and_its_file():
    assert strategies().keys() == PLANNERS.keys()
    assert all((ROOT / "megatron_balance" / row[2].strip("`")).exists() for row in strategies().values())


# flexsp is left out: its integer program takes seconds for each of the batches.
COMPARED = [name for name in PLANNERS if name != "flexsp"]


@pytest.mark.parametrize(
    "names", [["te_ring", "zeppelin", "distca"], pytest.param(COMPARED, marks=pytest.mark.product)]
)
def test_the_table_of_strategies_holds_what_compare_simulates(run, names):
    """The baseline and two that differ most in what they do; all of them are a `product`."""
    command = next(line for line in README.splitlines() if line.startswith("megatron-balance compare "))
    asked = (word for name in names for word in ("--planner", name))
    speedups = {
        row["planner"]: f"{row['speedup']:.2f}" for row in run.json("", *shlex.split(command)[1:], *asked)["rows"]
    }
    assert speedups == {name: strategies()[name][3] for name in names}
