"""The frame of `papers`: papers, tables and rows; the verb's JSON, its table for people, and a
sentence for every mistake."""

from __future__ import annotations

import json
from types import MappingProxyType

import pytest

import megatron_balance.lab.papers as package
from megatron_balance.errors import ConfigError
from megatron_balance.lab.papers import PAPERS, paper_of
from megatron_balance.lab.papers.base import ITSELF, Effort, Paper, PaperTable, Published, Row

KEYS = {"paper", "table", "name", "published", "ours", "unit", "kind", "sign", "note", "inputs"}


def two_rows(effort: Effort) -> list[Row]:
    drawn = [float(number) for number in effort.progress(list(range(effort.batches)), "draws")]
    return [
        Row("the sum", Published(2.0), sum(drawn), "x", "exact"),
        Row("only drawn", None, 1234.5, "tokens/s", "simulated", "<=", "a figure without numbers"),
        Row("set by it", Published(2.0), 2.0, "s", "simulated", inputs=(ITSELF, "a rate")),
    ]


@pytest.fixture
def sketch(monkeypatch) -> Paper:
    """A paper of two small tables in place of the real ones."""
    paper = Paper(
        "A sketch (arXiv 0)",
        MappingProxyType({"table1": PaperTable("one", two_rows, 3), "fig2": PaperTable("two", two_rows)}),
    )
    monkeypatch.setattr(package, "PAPERS", {"sketch": paper})
    return paper


def test_every_table_of_a_paper_comes_in_order_with_all_keys(run, sketch):
    code, out, err = run("reproduce sketch --json")
    rows = json.loads(out)["rows"]
    assert (code, err) == (0, "")
    assert [(row["table"], row["name"]) for row in rows] == [
        (t, n) for t in ("table1", "fig2") for n in ("the sum", "only drawn", "set by it")
    ]
    assert all(set(row) == KEYS and row["paper"] == "sketch" for row in rows)
    assert [row["ours"] for row in rows if row["name"] == "the sum"] == [3.0, 0.0]  # 0 + 1 + 2, and one batch
    assert rows[1] | {"table": ""} == {
        "paper": "sketch",
        "table": "",
        "name": "only drawn",
        "published": None,
        "ours": 1234.5,
        "unit": "tokens/s",
        "kind": "simulated",
        "sign": "<=",
        "note": "a figure without numbers",
        "inputs": [],
    }
    assert rows[2]["inputs"] == [ITSELF, "a rate"]


def test_one_table_and_a_number_of_batches_are_taken(run, sketch):
    rows = run.json("reproduce sketch fig2 --batches 5 --json")["rows"]
    assert {row["table"] for row in rows} == {"fig2"}
    assert rows[0]["ours"] == 10.0


def test_people_see_the_ratio_and_the_note(run, sketch):
    out = run("reproduce sketch table1")[1]
    assert "A sketch (arXiv 0)" in out
    assert "table1: one" in out
    sum_line = next(line for line in out.splitlines() if "the sum" in line)
    assert [cell.strip() for cell in sum_line.strip("│").split("│")] == ["the sum", "2", "3", "x", "1.50", "exact"]
    drawn = next(line for line in out.splitlines() if "only drawn" in line)
    assert [cell.strip() for cell in drawn.strip("│").split("│")] == [
        "only drawn [1]",
        "-",
        "1,234",
        "tokens/s",
        "-",
        "simulated",
    ]
    assert "[1] a figure without numbers" in out
    given = next(line for line in out.splitlines() if "set by it" in line)
    assert [cell.strip() for cell in given.strip("│").split("│")] == [
        "set by it [2]",
        "2",
        "2",
        "s",
        "input",
        "simulated",
    ]
    assert "[2] taken from the paper: this number, a rate" in out
    assert "fig2" not in out


def test_a_ratio_needs_something_published():
    assert Row("a", Published(2.0), 3.0, "", "exact").ratio == 1.5
    assert Row("a", None, 3.0, "", "exact").ratio is None
    assert Row("a", Published(0.0), 3.0, "", "exact").ratio is None
    assert Row("a", Published(2.0), 3.0, "", "exact", inputs=(ITSELF,)).ratio is None


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("reproduce zepelin", "reproduce: no paper 'zepelin'; did you mean 'zeppelin'?"),
        ("reproduce megascale", "reproduce: no paper 'megascale'; there are "),
        ("reproduce zeppelin fgi8", "zeppelin has no table 'fgi8'; did you mean 'fig8'?"),
        ("reproduce zeppelin appendix", "zeppelin has no table 'appendix'; there are fig3, fig5, table2"),
        ("reproduce zeppelin table2 --batches 0", "--batches 0: must be at least 1"),
        ("reproduce zeppelin table2 --batch 3", "unknown option '--batch'; did you mean '--batches'?"),
        ("reproduce", "the following arguments are required: PAPER"),
    ],
)
def test_a_mistake_is_one_line_that_says_what_would_be_right(run, command, message):
    code, out, err = run(command)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err


@pytest.mark.parametrize("name", PAPERS)
def test_papers_have_tables_with_titles_and_lower_case_names(name):
    paper = paper_of(name)
    assert paper.title
    assert paper.tables
    for table_name, table in paper.tables.items():
        assert table_name == table_name.lower()
        assert table.title
        assert table.batches >= 1


def test_a_paper_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match="no paper"):
        paper_of("")
