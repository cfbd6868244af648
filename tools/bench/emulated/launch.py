"""Shared by commands that train under several variants on an emulated cluster: options, the job
under a bar, what it leaves.
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table
from tqdm import tqdm

from tools.bench.emulated.job import POINT_FILE, STEPS_FILE
from tools.bench.emulated.point import Kernels, Point, Shape
from tools.bench.emulated.report import Record
from tools.bench.emulated.steps import Experiment
from tools.emulated_cluster import check

ROOT = Path(__file__).resolve().parents[3]
SKIPPED = 77
POLL_S = 0.3


def parser(
    prog: str, description: str | None, *, layers: int, backward: str, share: float, out: str
) -> argparse.ArgumentParser:
    """With the options that every one of these commands has, and their defaults here; `out`: a
    folder of out/.
    """
    found = argparse.ArgumentParser(
        prog=prog, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument(
        "--repeats", type=int, default=2, help="times that each batch is trained under each variant (default 2)"
    )
    found.add_argument("--layers", type=int, default=layers, help=f"of the GPT (default {layers})")
    found.add_argument("--seed", type=int, default=0, help="of the batches")
    found.add_argument(
        "--backward",
        choices=("keep", "replay"),
        default=backward,
        help=f"replay: backward rounds bring keys again, as Transformer Engine's (default {backward})",
    )
    found.add_argument("--nic-mbit", type=float, help="rate of a NIC in Mbit/s (default: by the operating point)")
    found.add_argument("--calibration-s", type=float, default=5.0, help="seconds of each measurement of a kernel")
    found.add_argument(
        "--core-share",
        type=float,
        default=share,
        help=f"of a core, for each rank's computation (default {share}; 0: as it comes)",
    )
    found.add_argument("--out", type=Path, default=ROOT / "out" / out, help="folder of logs and results")
    found.add_argument("--json", action="store_true", help="print the results as JSON; all else goes to standard error")
    return found


def able() -> bool:
    """Whether there can be an emulated cluster; says why not. From here on a signal to end ends the
    job, too.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    reason = check()
    if reason is not None:
        print(f"SKIP: no emulated cluster on this machine: {reason}")
    return reason is None


def run(job: str, experiment: Experiment, num_steps: int, describe: Callable[[], None]) -> bool:
    """Run the module `job` with a bar over its steps; whether all went well. `describe`: says what
    the point is, once it is known.
    """
    folder = experiment.folder
    folder.mkdir(parents=True, exist_ok=True)
    for old in (POINT_FILE, STEPS_FILE):
        (folder / old).unlink(missing_ok=True)
    command = [sys.executable, "-W", "ignore", "-m", job, experiment.text()]
    log, shown = folder / "job.log", False
    with log.open("w") as out:
        process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            with tqdm(total=num_steps, unit="step", desc=" kernels", file=sys.stderr, dynamic_ncols=True) as bar:
                while process.poll() is None:
                    time.sleep(POLL_S)
                    if not shown and (folder / POINT_FILE).exists():
                        shown = True
                        bar.clear()
                        describe()
                    _advance(bar, records(experiment))
                _advance(bar, records(experiment))
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(timeout=30)
    if process.returncode:
        print("\n".join(log.read_text(errors="replace").splitlines()[-25:]), file=sys.stderr)
        print(f"error: the job failed; its log is {log}, those of the ranks are beside it", file=sys.stderr)
    return not process.returncode


def _advance(bar: Any, found: Sequence[Record]) -> None:
    if len(found) > bar.n:
        last = found[-1]
        bar.set_description(f" {last['nics']} NICs, {last['dataset']}, {last['variant']}")
        bar.update(len(found) - bar.n)


def records(experiment: Experiment) -> list[Record]:
    """Measurements so far."""
    file = experiment.folder / STEPS_FILE
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]


def point(experiment: Experiment) -> Point:
    """The point that the job fixed."""
    keys: dict[str, Any] = json.loads((experiment.folder / POINT_FILE).read_text())
    return Point(Kernels(**keys["kernels"]), keys["nic_bits_per_s"], Shape(**keys["shape"]))


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], title: str | None = None) -> Table:
    """Of lines that begin with a data set and a variant; data sets apart."""
    found = Table(title=title, title_justify="left")
    for at, heading in enumerate(headings):
        found.add_column(heading, justify="left" if at < 2 else "right")
    before = None
    for row in rows:
        if before not in (None, row[0]):
            found.add_section()
        found.add_row(*row)
        before = row[0]
    return found


def body(
    experiment: Experiment, seconds: float, lines: Sequence[Any], brief: Callable[[Record], Record]
) -> dict[str, Any]:
    """The document of `--json`: the experiment, its point, the table's lines, and of each step what
    is worth keeping.
    """
    at = point(experiment)
    return {
        "experiment": {key: value for key, value in asdict(experiment).items() if key != "out"},
        "point": {**asdict(at), "intra_bits_per_s": at.intra_bits_per_s, "transfer_to_round": at.transfer_to_round},
        "seconds": seconds,
        "lines": [asdict(line) for line in lines],
        "steps": [brief(record) for record in records(experiment)],
    }


def rows_on_lines(content: dict[str, Any]) -> str:
    """JSON with one line for each entry of a list."""
    parts: list[str] = []
    for key, value in content.items():
        rows = ",\n  ".join(map(json.dumps, value)) if isinstance(value, list) else ""
        parts.append(f" {json.dumps(key)}: " + (f"[\n  {rows}\n ]" if rows else json.dumps(value)))
    return "{\n" + ",\n".join(parts) + "\n}\n"


def command_line(words: Sequence[str], argv: Sequence[str] | None) -> str:
    """The command line, for Markdown."""
    return f"`{shlex.join([*words, *(sys.argv[1:] if argv is None else argv)])}`"


def write(folder: Path, name: str, content: dict[str, Any], page: str, wrong: Sequence[str]) -> None:
    """`name`.json, and where nothing is wrong the page as `name`.md."""
    (folder / f"{name}.json").write_text(rows_on_lines(content))
    if not wrong:
        (folder / f"{name}.md").write_text(page)


def exit_code(content: dict[str, Any], wrong: Sequence[str], *, as_json: bool) -> int:
    """After the last words: 1 if a variant changed a loss."""
    if as_json:
        print(json.dumps(content))
    for line in wrong:
        print(f"error: {line}; a variant must not change the loss", file=sys.stderr)
    return 1 if wrong else 0
