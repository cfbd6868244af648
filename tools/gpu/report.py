"""The suite's report: one document, and the same as text and as Markdown.

`python -m tools.gpu.report` prints what README's table says of GPUs, from docs/measurements.
"""

from __future__ import annotations

import dataclasses
import datetime
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.gpu.rows import Row

if TYPE_CHECKING:
    from tools.gpu.machine import Machine

COLUMNS = ("figure", "value", "unit", "target", "verdict", "note")


def document(machine: Machine, rows: Sequence[Row], part_s: dict[str, float], command: str) -> dict[str, Any]:
    """Everything a run has to say, as plain data. `part_s`: seconds by part. `command`: what was run,
    for whoever repeats it.
    """
    return {
        "command": command,
        "machine": dataclasses.asdict(machine),
        "mode": "gpu" if machine.device == "cuda" else "interpreter",
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "seconds": round(sum(part_s.values()), 1),
        "part_s": part_s,
        "rows": [dataclasses.asdict(row) for row in rows],
    }


def write(report: dict[str, Any], prefix: Path) -> None:
    """`<prefix>.json` and `<prefix>.md`."""
    prefix.with_name(f"{prefix.name}.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    prefix.with_name(f"{prefix.name}.md").write_text(markdown(report), encoding="utf-8")


def text(report: dict[str, Any]) -> str:
    from rich.console import Console
    from rich.table import Table

    console = Console(file=io.StringIO(), width=180, highlight=False, markup=False)
    table = Table(title=title(report), title_justify="left")
    for column in COLUMNS:
        table.add_column(column, justify="right" if column == "value" else "left", overflow="fold")
    for row in report["rows"]:
        table.add_row(*cells(row))
    console.print(table)
    console.print(remap_out(report))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().rstrip()


def markdown(report: dict[str, Any]) -> str:
    lines = [
        f"# {title(report)}",
        "",
        f"`{report['command']}`",
        "",
        f"| {' | '.join(COLUMNS)} |",
        "|" + "---|" * len(COLUMNS),
    ]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in cells(row)) + " |" for row in report["rows"]]
    return "\n".join([*lines, "", remap_out(report), ""])


def title(report: dict[str, Any]) -> str:
    """The machine, the date and versions, as lines."""
    machine = report["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items() if version is not None)
    where = f"{machine['name']}, CUDA {machine['cuda']}" if report["mode"] == "gpu" else f"no GPU ({machine['name']})"
    return f"GPU suite on {where}, {report['date']}; {versions}"


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    value = "not measured" if row["value"] is None else f"{row['value']:.4g}"
    verdict = {None: "", True: "met", False: "failed" if row["value"] is None else "missed"}[row["ok"]]
    return row["name"], value, row["unit"], row["target"], verdict, row["note"]


def remap_out(report: dict[str, Any]) -> str:
    """How many figures are what they should be."""
    rows = report["rows"]
    judged = [row["ok"] for row in rows if row["ok"] is not None]
    left_out = sum(row["kind"] == "not measured" for row in rows)
    missing = [name for name, version in report["machine"]["versions"].items() if version is None]
    without = f" Not installed: {', '.join(missing)}." if missing else ""
    return (
        f"{sum(judged)} of {len(judged)} figures with a target are met, {left_out} of {len(rows)} were not measured; "
        f"{report['seconds']:.0f} s: {', '.join(f'{name} {s:.0f}' for name, s in report['part_s'].items())}.{without}"
    )


def of_readme(folder: Path) -> str:
    """README's row "measured on GPUs": what the documents of all runs on a GPU say, or that there are
    none.
    """
    found: list[str] = []
    for path in sorted(folder.glob("*.json")):
        report = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(report, dict) and report.get("mode") == "gpu":
            judged = [row["ok"] for row in report["rows"] if row["ok"] is not None]
            page = f"[{path.stem}](docs/measurements/{path.stem}.md)"
            met = f"{sum(judged)} of {len(judged)} targets met"
            found.append(f"{report['machine']['name']}, {report['date']}, `{report['command']}`: {met} ({page})")
    none = "**none yet: the NCCL path is written and tested on CPU, and has never run on a GPU**"
    return f"| measured on GPUs | {'; '.join(found) or none} |"


if __name__ == "__main__":
    print(of_readme(Path(__file__).resolve().parents[2] / "docs" / "measurements"))
