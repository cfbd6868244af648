"""Run the GPU suite: `python -m tools.gpu.run [--json] [--parts kernels,step] [--limit-s 470]`.

On a GPU it takes less than eight minutes and writes docs/measurements/<gpu>-suite.json and .md.
`--gpus 8` runs what takes several GPUs instead, over real NCCL, and writes <gpu>-x8-suite.
Without one the same parts run small, Triton's kernels in its interpreter, in less than a minute;
what only a GPU can say is then a row that reads "not measured", and no file is written. Needs
torch, triton and the wheel of megatron-core.

Each part runs in a process of its own: one that fails or hangs costs its own rows only.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from tqdm import tqdm

from tools.gpu import report
from tools.gpu.parts import MANY, PARTS
from tools.gpu.rows import NEEDS_GPU, OUT_OF_TIME, Context, Device, Figure, Part, Row

if TYPE_CHECKING:
    from tools.gpu.machine import Machine

ROOT = Path(__file__).resolve().parents[2]
MEASUREMENTS = ROOT / "docs" / "measurements"
LIMIT_S = {"cuda": 470.0, "cpu": 150.0}
"""Seconds that the whole suite may take by itself.

On a CPU it takes less than a minute where the processor is its own."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the suite, or one part of it in this process.

    Returns:
        0 if nothing that was measured misses its target and nothing failed.
    """
    options = _options(argv)
    if options.part:
        return run_part(options)
    # Imports torch, which the process of a part may do without.
    from tools.gpu.machine import describe

    began = time.monotonic()
    machine = describe()
    if machine.device == "cuda" and machine.gpus < options.gpus:
        sys.exit(f"error: --gpus {options.gpus}: there are {machine.gpus} here; ask for fewer")
    prefix = _prefix(machine, options.out)
    if prefix is not None and options.gpus > 1:
        prefix = prefix.with_name(f"{prefix.name}-x{options.gpus}")
    deadline = began + (options.limit_s or LIMIT_S[machine.device])
    rows: list[Row] = []
    for name in tqdm(options.parts, unit="part", file=sys.stderr, disable=None):
        rows += rows_of(name, machine.device, deadline, prefix, options.gpus)
    document = report.document(machine, rows, time.monotonic() - began)
    if prefix is not None:
        report.write(document, prefix)
    print(json.dumps(document) if options.json else report.text(document))
    return 1 if any(row.ok is False for row in rows) else 0


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="tools.gpu.run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout and nothing else there")
    parser.add_argument(
        "--parts", type=lambda text: text.split(","), default=list(PARTS), metavar="A,B", help=f"of {', '.join(PARTS)}"
    )
    parser.add_argument(
        "--gpus", type=int, default=1, metavar="N", help="run over 2, 4, 6 or 8 GPUs, a rank on each, and only that"
    )
    parser.add_argument(
        "--limit-s", type=float, metavar="S", help="seconds the suite may take (default: 470 on a GPU, 150 without)"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="where to write on a GPU (default: docs/measurements)")
    # How the suite calls itself for one part.
    for name in ("part", "device", "until", "rows", "prefix"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.gpus not in (1, 2, 4, 6, 8):
        parser.error(f"--gpus {options.gpus}: expected 1, or 2, 4, 6 or 8 (half of them play one node, half another)")
    if options.gpus > 1:
        options.parts = list(MANY)
        return options
    unknown = [name for name in options.parts if name not in PARTS]
    if unknown:
        parser.error(f"--parts {unknown[0]}: no such part; choose of {', '.join(PARTS)}")
    if options.limit_s is not None and options.limit_s <= 0:
        parser.error(f"--limit-s {options.limit_s:g}: expected seconds, more than 0")
    return options


def _prefix(machine: Machine, out: Path | None) -> Path | None:
    """Where the files of this run begin; None without a GPU, whose figures are all that is kept."""
    if machine.device != "cuda":
        if out is not None:
            sys.exit(f"error: --out {out}: there is no GPU here, so there is nothing to keep; leave it out")
        return None
    folder = out or MEASUREMENTS
    folder.mkdir(parents=True, exist_ok=True)
    return folder / machine.slug


def rows_of(name: str, device: Device, deadline: float, prefix: Path | None, ranks: int = 1) -> list[Row]:
    """All rows of a part: those it measured, and for the others why not."""
    part = _load(name)
    asked = [figure for figure in part.FIGURES if device == "cuda" or not figure.speed]
    left = deadline - time.monotonic()
    why, lost = OUT_OF_TIME, False
    measured: dict[str, Row] = {}
    if asked and left > (part.BUDGET_S if device == "cuda" else 0.0):
        budget = part.BUDGET_S if device == "cuda" else left
        measured, trouble = _run_apart(name, device, min(left, budget), prefix, ranks)
        why, lost = (trouble or "the part said nothing of it"), trouble != OUT_OF_TIME
    return [measured.get(figure.name) or _missing(figure, figure in asked, why, lost) for figure in part.FIGURES]


def _missing(figure: Figure, asked: bool, why: str, lost: bool) -> Row:
    if not asked:
        return figure.not_measured(NEEDS_GPU)
    return figure.failed(why) if lost else figure.not_measured(why)


def _load(name: str) -> Part:
    return cast("Part", importlib.import_module((PARTS | MANY)[name]))


def _run_apart(
    name: str, device: Device, seconds: float, prefix: Path | None, ranks: int
) -> tuple[dict[str, Row], str]:
    """Rows by figure of a part, run in a process of its own, and the reason if it ended early."""
    with tempfile.TemporaryDirectory() as folder:
        rows, log = Path(folder, "rows"), Path(folder, "log")
        words = ["--part", name, "--device", device, "--until", str(time.monotonic() + seconds), "--rows", str(rows)]
        words += ["--gpus", str(ranks), *(["--prefix", str(prefix)] if prefix is not None else [])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        if device == "cpu":
            environment |= {"TRITON_INTERPRET": "1", "TORCHDYNAMO_DISABLE": "1"}
        with log.open("w") as said:
            process = subprocess.Popen(
                [sys.executable, "-m", "tools.gpu.run", *words],
                cwd=ROOT, env=environment, stdout=said, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            trouble = _wait(process, seconds)
        if trouble == "failed":
            lines = log.read_text(errors="replace").strip().splitlines()
            sys.stderr.write("\n".join([f"{name} failed; its log ends:", *lines[-30:], ""]))
            trouble = f"failed: {lines[-1] if lines else 'it said nothing'}"
        return {row.name: row for row in _read(rows)}, trouble


def _wait(process: subprocess.Popen[bytes], seconds: float) -> str:
    """'' if the process ended well, else 'failed' or that it ran out of time.

    All it has started ends with it.
    """
    try:
        return "" if process.wait(seconds) == 0 else "failed"
    except subprocess.TimeoutExpired:
        return OUT_OF_TIME
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _read(rows: Path) -> Iterator[Row]:
    if rows.exists():
        for line in rows.read_text().splitlines():
            # The last line of a part that was ended while it wrote.
            with contextlib.suppress(json.JSONDecodeError):
                yield Row(**json.loads(line))


def run_part(options: argparse.Namespace) -> int:
    """In a process of its own: measure one part, and write each row as soon as it is there."""
    part = _load(options.part)
    known = {figure.name for figure in part.FIGURES}
    prefix = Path(options.prefix) if options.prefix else None
    context = Context(options.device, float(options.until), prefix, options.gpus)
    with Path(options.rows).open("a", encoding="utf-8") as file:
        for row in part.measure(context):
            assert row.name in known, f"{row.name} is not among the part's FIGURES"
            file.write(json.dumps(dataclasses.asdict(row)) + "\n")
            file.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
