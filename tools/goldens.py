"""Golden values of `reproduce`: every row of every paper, with how closely it is held.

    python -m tools.goldens                        # what differs, old and new; exit 1
    python -m tools.goldens zeppelin fig8 --write  # run one table, show what differs, keep it

A file of a paper has entries: a table, or `table@batches` with fewer batches than the table's own.
Entries with `suite: true`, set by hand, are quick and run with the suite; `pytest -m paper` runs all.
Kinds of a row:

- exact: closed forms and plans, equal to `tolerance` as a share (rounding alone);
- within: simulated, equal to `tolerance` as a share;
- trend: measured on the machine at hand, within a factor of `tolerance`.

A value changes only in a commit that says which law or price moved it.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megatron_balance.lab.papers import PAPERS
from megatron_balance.lab.papers.base import Effort, Row, silent

FOLDER = Path(__file__).parents[1] / "tests" / "golden"
HELD = {"exact": ("exact", 1e-6), "simulated": ("within", 0.005), "measured": ("trend", 30.0)}
"""Kind and tolerance of a row that has no golden value yet."""
DIGITS = 7


@dataclass(frozen=True, slots=True)
class Golden:
    """The value of a row. `published`: None where it is only drawn."""

    ours: float
    kind: str
    tolerance: float
    published: float | None = None

    def holds(self, ours: float) -> bool:
        """Whether a row's value is this one."""
        if self.kind == "trend":
            return 0 < ours <= self.ours * self.tolerance  # a clock's: a faster machine is no fault
        return abs(ours - self.ours) <= self.tolerance * abs(self.ours) + 1e-12


@dataclass(frozen=True, slots=True)
class Entry:
    """A table's golden rows by name. `suite`: quick enough for the suite."""

    rows: dict[str, Golden]
    suite: bool = False


def read(paper: str) -> dict[str, Entry]:
    path = FOLDER / f"{paper}.yaml"
    found: dict[str, Any] = yaml.load(path.read_text(), Loader=yaml.CSafeLoader) if path.exists() else {}

    def golden(ours: str, kind: str, tolerance: str, published: str | None) -> Golden:
        # YAML reads 1e-06 as text.
        return Golden(float(ours), kind, float(tolerance), None if published is None else float(published))

    return {
        name: Entry({row: golden(**each) for row, each in entry["rows"].items()}, entry["suite"])
        for name, entry in found.items()
    }


def write(paper: str, entries: dict[str, Entry]) -> None:
    """One line a row."""
    lines = [
        f"# Made by `python -m tools.goldens {paper} --write`; say in the commit which law or price moved a value."
    ]
    for name, entry in entries.items():
        lines += [f"{name}:", f"  suite: {json.dumps(entry.suite)}", "  rows:"]
        for row, each in entry.rows.items():
            fields = {"ours": each.ours, "kind": each.kind, "tolerance": each.tolerance, "published": each.published}
            lines.append(f"    {json.dumps(row)}: {json.dumps(fields)}")
    (FOLDER / f"{paper}.yaml").write_text("\n".join(lines) + "\n")


def rows_of(paper: str, name: str) -> list[Row]:
    title, _, batches = name.partition("@")
    table = PAPERS[paper].tables[title]
    return table.rows(Effort(int(batches) if batches else table.batches, silent))


def compared(rows: Iterable[Row], known: Entry) -> tuple[Entry, list[str]]:
    """The entry that these rows make, and a line for each that is not as it was."""
    found: dict[str, Golden] = {}
    lines: list[str] = []
    for row in rows:
        ours, printed = float(f"{row.ours:.{DIGITS}g}"), None if row.published is None else float(row.published)
        old = known.rows.get(row.name)
        kind, tolerance = (old.kind, old.tolerance) if old else HELD[row.kind]
        new = Golden(ours, kind, tolerance, printed)
        held = old is not None and old.holds(row.ours) and old.published == printed
        found[row.name] = old if held and old is not None else new
        if not held:
            share = f" ({ours / old.ours - 1:+.1%})" if old and old.ours else ""
            lines.append(f"{row.name}: {old.ours if old else 'new'} -> {ours:g} {row.unit}{share}, published {printed}")
    lines += [f"{name}: {old.ours:g} -> gone" for name, old in known.rows.items() if name not in found]
    return Entry(found, known.suite), lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare entries with what they give now; 1: some differ."""
    parser = argparse.ArgumentParser(prog="python -m tools.goldens", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("paper", nargs="?", choices=sorted(PAPERS), help="default: all")
    parser.add_argument(
        "entries", nargs="*", metavar="TABLE[@BATCHES]", help="default: all tables, and what the file has"
    )
    parser.add_argument("--write", action="store_true", help="keep the new values")
    parser.add_argument("--suite", action="store_true", help="entries of the suite alone")
    args = parser.parse_args(arguments)
    differs = 0
    for paper in [args.paper] if args.paper else PAPERS:
        known = read(paper)
        names = args.entries or [*PAPERS[paper].tables, *(name for name in known if "@" in name)]
        for name in names:
            old = known.get(name, Entry({}))
            if args.suite and not old.suite:
                continue
            entry, lines = compared(rows_of(paper, name), old)
            print(f"{paper} {name}: {len(lines)} of {len(entry.rows)} rows differ", flush=True)
            print(*(f"  {line}" for line in lines), sep="\n", end="\n" if lines else "", flush=True)
            differs += len(lines)
            if args.write:
                write(paper, {**read(paper), name: entry})  # another run may have written meanwhile
    return 0 if args.write or not differs else 1


if __name__ == "__main__":
    sys.exit(main())
