"""Run the GPU suite: `python -m tools.gpu.run [--json] [--parts kernels,step] [--limit-s 470]`.

On a GPU it takes less than eight minutes and writes docs/measurements/<gpu>-suite.json and .md.
`--gpus 8` runs what takes several ranks instead, over real NCCL, and writes <gpu>-x8-suite; with
`--ranks-per-gpu 8` they share one GPU (`tools/gpu/sharing.py`).
Without a GPU the same parts run small, Triton's kernels in its interpreter; what only a GPU can say
is then a row that reads "not measured", and no file is written. Needs torch, triton and the wheel of
megatron-core. `tools/gpu/bare` runs all of it on a machine that has no network.

Each part runs in a process of its own: one that fails or hangs costs its own rows only. Rows are
written as they come, to the file that `--rows` names.
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

from tools.gpu import report, sharing
from tools.gpu.parts import MANY, PARTS
from tools.gpu.rows import NEEDS_GPU, OUT_OF_TIME, Context, Figure, Part, Row

if TYPE_CHECKING:
    from tools.gpu.machine import Machine

ROOT = Path(__file__).resolve().parents[2]
MEASUREMENTS = ROOT / "docs" / "measurements"
CPU_FACTOR = 4.0
"""Of a part's seconds without a GPU, where other work keeps the processors busy, as long as later
parts have their own.
"""
LIMIT_S = {"cuda": 470.0, "cpu": 300.0}
"""Seconds that the whole suite may take by itself."""
START_S = 5.0
"""With less time left than this no part is begun."""
END_S = 5.0
"""For what a part has started to end, once it is killed."""
LINES = 60
"""Of a log that is shown: where all threads of a rank stand, and what it did."""
RANKS = (1, 2, 4, 8)


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
        sys.exit(f"error: --gpus {options.gpus}: there are {machine.gpus} here; ask for fewer, or --ranks-per-gpu")
    shares = machine.device == "cuda" and options.ranks_per_gpu > 1
    nccl = (options.nccl or sharing.torchs_own()) if shares else None
    refused = sharing.refusal(nccl) if shares else ""
    if refused and set(options.parts) <= MANY.keys():
        sys.exit(f"error: --ranks-per-gpu {options.ranks_per_gpu}: {refused}")
    prefix = _prefix(machine, options)
    deadline = began + (options.limit_s or LIMIT_S[machine.device])
    with tempfile.TemporaryDirectory() as folder:
        state = Path(folder)
        context = Context(
            machine.device, deadline, prefix, options.gpus * options.ranks_per_gpu, options.ranks_per_gpu, state
        )
        file = options.rows or (prefix.with_name(f"{prefix.name}-rows.jsonl") if prefix else state / "rows.jsonl")
        rows: list[Row] = []
        part_s: dict[str, float] = {}
        try:
            for at, name in enumerate(tqdm(options.parts, unit="part", file=sys.stderr, disable=None), 1):
                begin = time.monotonic()
                later = [_load(each) for each in options.parts[at:]]
                later_s = sum(part.BUDGET_S for part in later if _asked(part, context))
                rows += rows_of(name, context, file, nccl, refused if name in MANY else "", later_s)
                part_s[name] = round(time.monotonic() - begin, 1)
        finally:
            sharing.stop_mps(state)
        if prefix is not None and options.rows is None:
            file.unlink(missing_ok=True)  # the document holds them all
    command = " ".join(["tools/gpu/run", *(sys.argv[1:] if argv is None else argv)])
    document = report.document(machine, rows, part_s, options.command or command)
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
        "--parts",
        type=lambda text: text.split(","),
        metavar="A,B",
        help=f"of {', '.join(PARTS)}, or of {', '.join(MANY)}, which take several ranks (default: all of one kind)",
    )
    parser.add_argument("--gpus", type=int, default=1, metavar="N", help="run what takes several ranks, over N GPUs")
    parser.add_argument(
        "--ranks-per-gpu", type=int, default=1, metavar="N", help="the same with N ranks on each GPU, over NCCL >= 2.30"
    )
    parser.add_argument(
        "--nccl", type=Path, metavar="FILE", help="libnccl.so.2 for --ranks-per-gpu (default: torch's own)"
    )
    parser.add_argument(
        "--limit-s", type=float, metavar="S", help="seconds the suite may take (default: 470 on a GPU, 300 without)"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="where to write on a GPU (default: docs/measurements)")
    parser.add_argument("--rows", type=Path, metavar="FILE", help="append each row to this file as it comes, as JSON")
    parser.add_argument("--name", default="suite", help="of the files: <gpu>-NAME.json (default: suite)")
    # How the suite calls itself for one part, and `tools.gpu.bare` the suite.
    for name in ("part", "device", "until", "prefix", "state", "command"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    parser.add_argument("--ranks", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.part:
        return options
    for name in ("gpus", "ranks_per_gpu"):
        if getattr(options, name) not in RANKS:
            option = f"--{name.replace('_', '-')} {getattr(options, name)}"
            parser.error(f"{option}: expected 1, or 2, 4 or 8 (half of the ranks play one node, half another)")
    several = options.gpus * options.ranks_per_gpu > 1
    options.parts = options.parts or list(MANY if several else PARTS)
    for name in options.parts:
        if name not in PARTS | MANY:
            parser.error(f"--parts {name}: no such part; choose of {', '.join(PARTS | MANY)}")
        if name in MANY and not several:
            parser.error(f"--parts {name}: takes several ranks: add --gpus N or --ranks-per-gpu N")
    if options.limit_s is not None and options.limit_s <= 0:
        parser.error(f"--limit-s {options.limit_s:g}: expected seconds, more than 0")
    return options


def _prefix(machine: Machine, options: argparse.Namespace) -> Path | None:
    """How the files of this run begin; None without a GPU, whose figures are all that is kept."""
    if machine.device != "cuda":
        if options.out is not None:
            sys.exit(f"error: --out {options.out}: there is no GPU here, so there is nothing to keep; leave it out")
        return None
    folder = options.out or MEASUREMENTS
    folder.mkdir(parents=True, exist_ok=True)
    several = f"-x{options.gpus}" if options.gpus > 1 else ""
    return folder / f"{machine.slug}{several}-{options.name}"


def rows_of(
    name: str, context: Context, file: Path, nccl: Path | None = None, refused: str = "", later_s: float = 0.0
) -> list[Row]:
    """All rows of a part, appended to `file` as they come: those it measured, and for the others why
    not. `nccl`: the library that its ranks load; `refused`: why it is not even begun; `later_s`:
    seconds that the parts behind it shall have.
    """
    part = _load(name)
    asked = _asked(part, context)
    left = context.left_s()
    why, lost = refused or OUT_OF_TIME, bool(refused)
    measured: dict[str, Row] = {}
    if asked and left > START_S and not refused:
        seconds = min(left, limit_s(part.BUDGET_S, 0.0 if context.on_gpu else left - later_s))
        measured, trouble = _run_apart(name, context, seconds, file, nccl)
        why, lost = (trouble or "the part said nothing of it"), trouble != OUT_OF_TIME
    missing = {f.name: _missing(f, f in asked, why, lost) for f in part.FIGURES if f.name not in measured}
    for row in missing.values():
        _append(file, row)
    return [(measured | missing)[figure.name] for figure in part.FIGURES]


def limit_s(budget_s: float, free_s: float) -> float:
    """Seconds of a part of which nobody else needs `free_s`."""
    return max(budget_s, min(CPU_FACTOR * budget_s, free_s))


def _asked(part: Part, context: Context) -> list[Figure]:
    return [figure for figure in part.FIGURES if context.on_gpu or not figure.speed]


def _missing(figure: Figure, asked: bool, why: str, lost: bool) -> Row:
    if not asked:
        return figure.not_measured(NEEDS_GPU)
    return figure.failed(why) if lost else figure.not_measured(why)


def _load(name: str) -> Part:
    return cast("Part", importlib.import_module((MANY | PARTS)[name]))


def _run_apart(
    name: str, context: Context, seconds: float, file: Path, nccl: Path | None
) -> tuple[dict[str, Row], str]:
    """Rows by figure of a part, run in a process of its own, and the reason if it ended early."""
    words = ["--part", name, "--device", context.device, "--until", str(time.monotonic() + seconds)]
    words += ["--rows", str(file), "--state", str(context.state)]
    words += ["--ranks", str(context.ranks), "--ranks-per-gpu", str(context.ranks_per_gpu)]
    words += ["--prefix", str(context.prefix)] if context.prefix is not None else []
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    if context.on_gpu:
        # A process that forks ranks may look for a GPU, and must not begin to use it.
        environment["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
        environment |= {"LD_PRELOAD": str(nccl.absolute())} if nccl is not None and name in MANY else {}
    else:
        environment |= {"TRITON_INTERPRET": "1", "TORCHDYNAMO_DISABLE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        log, begin = Path(folder, "log"), file.stat().st_size if file.exists() else 0
        with log.open("w") as said:
            process = subprocess.Popen(
                [sys.executable, "-m", "tools.gpu.run", *words],
                cwd=ROOT, env=environment, stdout=said, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            trouble = _wait(process, seconds)
        rows = {row.name: row for row in _read(file, begin)}
        if trouble or any(row.ok is False for row in rows.values()):
            lines = log.read_text(errors="replace").strip().splitlines()
            sys.stderr.write("\n".join([f"{name}: {trouble or 'rows failed'}; its log ends:", *lines[-LINES:], ""]))
            if trouble == "failed":
                trouble = f"failed: {lines[-1] if lines else 'it said nothing'}"
    return rows, trouble


def _wait(process: subprocess.Popen[bytes], seconds: float) -> str:
    """'' if the process ended well, else 'failed' or that it ran out of time.

    All it has started ends with it.
    """
    try:
        return "" if process.wait(seconds) == 0 else "failed"
    except subprocess.TimeoutExpired:
        return OUT_OF_TIME
    finally:
        _end_session(process.pid)
        process.wait()


def _end_session(session: int) -> None:
    """Kill all processes of a session, whatever groups of their own they have made (ranks do), and
    wait until none runs.
    """
    until = time.monotonic() + END_S
    while (left := _running(session)) and time.monotonic() < until:
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.01)


def _running(session: int) -> list[int]:
    found: list[int] = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # "1234 (any name) S parent group session ..."
            state, _, _, of = stat.read_text().rpartition(") ")[2].split()[:4]
            if int(of) == session and state not in "ZX":
                found.append(int(stat.parent.name))
    return found


def _append(file: Path, row: Row) -> None:
    with file.open("a", encoding="utf-8") as rows:
        rows.write(json.dumps(dataclasses.asdict(row)) + "\n")


def _read(file: Path, begin: int) -> Iterator[Row]:
    """Rows of a file from a byte on."""
    if file.exists():
        for line in file.read_bytes()[begin:].decode(errors="replace").splitlines():
            # The last line of a part that was ended while it wrote.
            with contextlib.suppress(json.JSONDecodeError):
                yield Row(**json.loads(line))


def run_part(options: argparse.Namespace) -> int:
    """In a process of its own: measure one part, and write each row as soon as it is there."""
    part = _load(options.part)
    known = {figure.name for figure in part.FIGURES}
    prefix = Path(options.prefix) if options.prefix else None
    shared = options.ranks_per_gpu
    context = Context(options.device, float(options.until), prefix, options.ranks, shared, Path(options.state))
    for row in part.measure(context):
        assert row.name in known, f"{row.name} is not among the part's FIGURES"
        _append(options.rows, row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
