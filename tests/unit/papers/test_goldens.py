"""Every row of every paper: as golden as it was, and made of no number that it is compared with."""

import fnmatch
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from types import MappingProxyType, ModuleType
from typing import Any

import pytest

from megatron_balance.lab.papers import PAPERS, base
from megatron_balance.lab.papers.base import ITSELF, Effort, Paper, PaperTable, Published, Row
from tools import goldens
from tools.goldens import Entry, Golden, compared, read, rows_of

GOLDEN = {paper: read(paper) for paper in PAPERS}
ENTRIES = [
    pytest.param(paper, name, marks=[pytest.mark.paper, *([] if entry.suite else [pytest.mark.product])])
    for paper, entries in GOLDEN.items()
    for name, entry in entries.items()
]
once = cache(rows_of)
# Patterns of all tables of a paper.
SHARED = {"*, authors' coefficients", "*, our costs"}


def changed(value: Any) -> Any:
    # A constant or a table with other published numbers; one factor would leave their ratios.
    if isinstance(value, Published):
        return Published(1.3 * value + 0.7)
    if isinstance(value, tuple):
        return tuple(map(changed, value))
    if isinstance(value, Mapping):
        return {key: changed(each) for key, each in value.items()}
    return value


@pytest.fixture
def change_published(monkeypatch: pytest.MonkeyPatch):
    def change(modules: list[ModuleType], paper: str = "") -> None:
        if paper:
            monkeypatch.setitem(base.PRINTED, paper, changed(base.PRINTED[paper]))
        for module in modules:
            for name, value in list(vars(module).items()):
                if not name.startswith("__") and isinstance(value, Published | tuple | dict):
                    monkeypatch.setattr(module, name, changed(value))

    return change


def compared_with_themselves(before: list[Row], after: list[Row]) -> Iterator[str]:
    # Rows made of published numbers that they do not name, or whose own is no constant.
    for one, other in zip(before, after, strict=True):
        if one.kind != "measured" and not one.inputs and one.ours != other.ours:
            yield f"{one.name}: ours is made of what is published"
        if one.published is not None and ITSELF not in one.inputs and other.published != changed(one.published):
            yield f"{one.name}: {one.published} stands in no YAML and is no constant of a module"


@pytest.mark.parametrize(("paper", "name"), ENTRIES)
def test_rows_are_golden(paper: str, name: str) -> None:
    lines = compared(once(paper, name), GOLDEN[paper][name])[1]
    assert not lines, "say in the commit which law or price moved them; python -m tools.goldens --write"


@pytest.mark.parametrize(("paper", "name"), ENTRIES)
def test_no_number_is_compared_with_itself(paper: str, name: str, change_published) -> None:
    # Of a batch: that a row is made of what is published needs no mean of many.
    if PAPERS[paper].tables[title := name.partition("@")[0]].batches > 1:
        name = f"{title}@1"
    before = once(paper, name)
    modules = [each for key, each in sys.modules.items() if key.startswith(f"megatron_balance.lab.papers.{paper}")]
    change_published(modules, paper)
    assert not list(compared_with_themselves(before, rows_of(paper, name)))


def test_every_table_is_golden() -> None:
    # And every golden entry is of a table.
    for paper, of in PAPERS.items():
        assert {*of.tables} == {name.partition("@")[0] for name in GOLDEN[paper]}
        assert {*of.tables} <= GOLDEN[paper].keys()


def test_a_ratio_of_published_numbers_given_as_ours_is_found(change_published) -> None:
    # Hydraulis' Table 1 had 0.649, which is 1.11 / 1.71, beside the printed 0.69.
    table = ModuleType("table")
    constants = vars(table)
    constants |= {"FIRST": Published(1.11), "SECOND": Published(1.71), "RATIO": Published(0.69)}

    def rows() -> list[Row]:
        own, fair = constants["FIRST"] / constants["SECOND"], 0.37 / 1.13
        return [
            Row("its own", constants["RATIO"], own, "x", "exact"),
            Row("said", constants["RATIO"], own, "x", "exact", inputs=("both columns",)),
            Row("computed", constants["RATIO"], fair, "x", "exact"),
            Row("literal", Published(0.69), fair, "x", "exact"),
        ]

    before = rows()
    change_published([table])
    assert [each.split(":")[0] for each in compared_with_themselves(before, rows())] == ["its own", "literal"]


def test_a_printed_number_given_as_ours_is_found(change_published, monkeypatch, tmp_path) -> None:
    file = tmp_path / "sketch.yaml"
    file.write_text('t: {title: one, numbers: {n: 3.64 / 3.51}, rows: {said: {published: 2, inputs: [n]}, "its *": 2}}')
    monkeypatch.setitem(base.PRINTED, "sketch", base._read(file))

    def ours(_: Effort) -> base.Ours:
        return [(name, base.number("sketch", "t", "n")) for name in ("said", "its own")] + [("its other", 1.0)]

    table = base.table("sketch", "t", ours)
    before = table.rows(Effort(1))
    assert [(row.published, row.ours) for row in before] == [(2, 3.64 / 3.51), (2, 3.64 / 3.51), (2, 1)]
    change_published([], "sketch")
    found = list(compared_with_themselves(before, table.rows(Effort(1))))
    assert found == ["its own: ours is made of what is published"]


@pytest.mark.parametrize("paper", PAPERS)
def test_what_a_paper_prints_names_its_source_and_rows_that_are_there(paper: str) -> None:
    names = {
        name: {row for key, each in GOLDEN[paper].items() if key.split("@")[0] == name for row in each.rows}
        for name in PAPERS[paper].tables
    }
    for name, printed in base.PRINTED[paper].items():
        assert printed["source"]
        assert all(given.keys() <= base.DEFAULTS.keys() for given in printed["rows"].values())
        plain = {pattern for pattern in printed["rows"] if "*" not in pattern}
        assert plain <= names[name]
        assert all(fnmatch.filter(names[name], pattern) for pattern in set(printed["rows"]) - plain - SHARED)


def test_goldens_say_what_moved_and_keep_how_closely_a_row_is_held(monkeypatch, tmp_path, capsys) -> None:
    value = [2.0]

    def rows(effort: Effort) -> list[Row]:
        return [Row("sum", Published(3.0), value[0] + effort.batches, "s", "simulated")]

    monkeypatch.setattr(
        goldens, "PAPERS", {"sketch": Paper("A sketch", MappingProxyType({"t": PaperTable("one", rows)}))}
    )
    monkeypatch.setattr(goldens, "FOLDER", tmp_path)
    assert goldens.main(["sketch", "t", "t@2", "--write"]) == 0
    assert read("sketch") == {
        "t": Entry({"sum": Golden(3.0, "within", 0.005, 3.0)}),
        "t@2": Entry({"sum": Golden(4.0, "within", 0.005, 3.0)}),
    }
    value[0] = 2.01
    assert goldens.main([]) == 0
    value[0] = 2.3
    capsys.readouterr()
    assert goldens.main(["sketch", "t"]) == 1
    assert "sum: 3.0 -> 3.3 s (+10.0%), published 3.0" in capsys.readouterr().out
    # What is measured is held within a factor.
    golden = Golden(2.0, "trend", 10.0)
    assert golden.holds(0.3)
    assert golden.holds(19)
    assert not golden.holds(21)
    assert not golden.holds(0)
