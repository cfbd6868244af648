"""`megatron-balance reproduce`: a paper's published numbers beside ours, with the ratio.

Ours come from this project's planners, costs from data sheets, and simulator; a row says whether it
is exact, simulated or measured, and what of the paper's numbers goes into it.
"""

import argparse
from collections.abc import Collection
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from megatron_balance.cli import inputs
from megatron_balance.errors import ConfigError, suggest
from megatron_balance.files import json_text

if TYPE_CHECKING:
    from rich.console import Console

    from megatron_balance.lab.papers.base import Row


HELP = "a paper's published numbers beside ours"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("paper", metavar="PAPER", help="such as zeppelin")
    parser.add_argument("table", metavar="TABLE", nargs="?", help="one table or figure, such as fig11 (default: all)")
    drawn = "batches drawn for each number (default: each table's own)"
    parser.add_argument("--batches", type=int, metavar="K", help=drawn)
    inputs.add_json(parser)


def run(args: argparse.Namespace) -> int:
    from megatron_balance.lab.papers import PAPERS
    from megatron_balance.lab.papers.base import Effort

    _check(PAPERS, args.paper, "reproduce: no paper")
    paper = PAPERS[args.paper]
    if args.table is not None:
        _check(paper.tables, args.table, f"{args.paper} has no table")
    tables = {name: table for name, table in paper.tables.items() if args.table in (None, name)}
    inputs.check_positive(args, "batches")
    found: list[dict[str, Any]] = []
    console = inputs.console()
    if not args.json:
        console.print(paper.title)
    for name, table in inputs.progress(list(tables.items()), args.paper):
        rows = table.rows(Effort(args.batches or table.batches, inputs.progress))
        found += [{"paper": args.paper, "table": name, **asdict(row)} for row in rows]
        if not args.json:
            _show(console, f"{name}: {table.title}", rows)
    if args.json:
        print(json_text({"rows": found}))
    return 0


def _check(known: Collection[str], name: str, missing: str) -> None:
    if name not in known:
        hint = suggest(name, known) or f"there are {', '.join(known)}"
        raise ConfigError(f"{missing} {name!r}; {hint}")


def _show(console: "Console", title: str, rows: "list[Row]") -> None:
    from megatron_balance.lab.papers.base import ITSELF

    table = inputs.table(title, ("", "published", "ours", "unit", "ratio", "kind"), ("", "unit", "kind"))
    notes = list(dict.fromkeys(row.remark for row in rows if row.remark))
    for row in rows:
        sign = "" if row.sign == "=" else f"{row.sign} "
        published = "-" if row.published is None else f"{sign}{_figure(row.published)}"
        mark = f" [{notes.index(row.remark) + 1}]" if row.remark else ""
        ratio = "input" if ITSELF in row.inputs else "-" if row.ratio is None else f"{row.ratio:.2f}"
        table.add_row(f"{row.name}{mark}", published, _figure(row.ours), row.unit, ratio, row.kind)
    console.print(table)
    for number, note in enumerate(notes, start=1):
        console.print(f"[{number}] {note}")


def _figure(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
