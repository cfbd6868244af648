"""Ping-pong (DistCA, section 4.1) inside Megatron's pretrain loop on an emulated cluster: against one stream, te_ring and zeppelin.

First measures the attention kernel and fixes the rate of the NICs (`tools.bench.distca.point`), then trains the same batches under every
variant in turn, and prints steps, and what of the exchanges' time shows.
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from tools.bench.distca import report
from tools.bench.distca.job import Experiment, records
from tools.bench.emulated.job import POINT_FILE, STEPS_FILE
from tools.bench.emulated.point import Kernels, Point
from tools.bench.emulated.report import brief
from tools.bench.emulated.report import check as check_losses
from tools.emulated_cluster import check

ROOT = Path(__file__).resolve().parents[3]
OUT = ROOT / "out" / "bench-distca"
SKIPPED = 77
POLL_S = 0.3
SHARE = 0.06
"""Of a core, for each rank's computation: so slow that NICs of a rate that emulated links keep can hide their transfers behind it."""
EXPLANATION = (
    "Steps of Megatron's own `pretrain`, the same batches and weights under every variant in turn; losses and gradient norms of a batch "
    "are equal to 1e-5. Step: without the reduction of gradients. Medians over the repeats of a batch, then means over batches. Waited: "
    "for exchanges, mean over ranks. Hidden: of the time that exchanges were under way, from being issued until what they bring is put to "
    "use, the share in which the rank did not wait. Exposed: of the waiting, what is not for a sender that comes late itself; one by one, "
    "where nothing runs beside an exchange, that is all that exchanges take. Hidden of one by one's: what ping-pong exposes less than "
    "that. Spread: the largest (max - min) / median over the repeats of a batch.",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0; 1 if losses differ or a rank failed; 77 where namespaces are not permitted."""
    options = _parser().parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the job is ended
    reason = check()
    if reason is not None:
        print(f"SKIP: no emulated cluster on this machine: {reason}")
        return SKIPPED
    keys = {name: value for name, value in vars(options).items() if name != "json"}
    experiment = Experiment(**{**keys, "out": str(options.out.resolve())})
    experiment.folder.mkdir(parents=True, exist_ok=True)
    for old in (POINT_FILE, STEPS_FILE):
        (experiment.folder / old).unlink(missing_ok=True)
    start = time.monotonic()
    console = Console(stderr=options.json, width=max(180, Console().width))  # with --json standard output is JSON alone
    if _run(experiment):
        return 1
    found = records(experiment.folder / STEPS_FILE)
    lines, wrong = report.lines(found), check_losses(found)
    _show(console, experiment, lines)
    body = {
        "experiment": {key: value for key, value in asdict(experiment).items() if key != "out"},
        "point": asdict(_point(experiment)),
        "seconds": time.monotonic() - start,
        "lines": [asdict(line) for line in lines],
        "steps": [brief(record) for record in found],
    }
    (experiment.folder / "distca.json").write_text(json.dumps(body) + "\n")
    if not wrong:
        (experiment.folder / "distca.md").write_text(_text(experiment, lines, argv))
    if options.json:
        print(json.dumps(body))
    for line in wrong:
        print(f"error: {line}; a variant must not change the loss", file=sys.stderr)
    return 1 if wrong else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench.distca", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batches", type=int, default=2, help="of each data set (default 2)")
    parser.add_argument("--repeats", type=int, default=2, help="times that each batch is trained under each variant (default 2)")
    parser.add_argument("--layers", type=int, default=2, help="of the GPT (default 2)")
    parser.add_argument("--seed", type=int, default=0, help="of the batches")
    parser.add_argument("--backward", choices=("keep", "replay"), default="keep", help="as in a configuration (default keep)")
    parser.add_argument("--nic-mbit", type=float, help="rate of a NIC in Mbit/s (default: by the operating point)")
    parser.add_argument("--calibration-s", type=float, default=5.0, help="seconds of each measurement of a kernel")
    parser.add_argument("--core-share", type=float, default=SHARE, help=f"of a core, for each rank's computation (default {SHARE})")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of logs and results")
    parser.add_argument("--json", action="store_true", help="print the results as JSON; all else goes to standard error")
    return parser


def _run(experiment: Experiment) -> int:
    """Run the job with a bar over its steps; its exit code, after what it said if it failed."""
    command = [sys.executable, "-W", "ignore", "-m", "tools.bench.distca.job", experiment.text()]
    log = experiment.folder / "job.log"
    with log.open("w") as out:
        process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            with tqdm(total=len(experiment.steps()), unit="step", desc=" kernels", file=sys.stderr, dynamic_ncols=True) as bar:
                while process.poll() is None:
                    time.sleep(POLL_S)
                    _advance(bar, records(experiment.folder / STEPS_FILE))
                _advance(bar, records(experiment.folder / STEPS_FILE))
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(timeout=30)
    if process.returncode:
        print("\n".join(log.read_text(errors="replace").splitlines()[-25:]), file=sys.stderr)
        print(f"error: the job failed; its log is {log}, those of the ranks are beside it", file=sys.stderr)
    return process.returncode


def _advance(bar: Any, found: Sequence[report.Record]) -> None:
    if len(found) > bar.n:
        bar.set_description(f" {found[-1]['dataset']}, {found[-1]['variant']}")
        bar.update(len(found) - bar.n)


def _point(experiment: Experiment) -> Point:
    keys: dict[str, Any] = json.loads((experiment.folder / POINT_FILE).read_text())
    return Point(Kernels(**keys["kernels"]), keys["nic_bits_per_s"])


def _show(console: Console, experiment: Experiment, lines: Sequence[report.Line]) -> None:
    console.print(_point_text(experiment), highlight=False)
    table = Table()
    for at, heading in enumerate(report.HEADINGS):
        table.add_column(heading, justify="left" if at < 2 else "right")
    before = None
    for row in report.rows(lines):
        if before not in (None, row[0]):
            table.add_section()
        table.add_row(*row)
        before = row[0]
    console.print(table)


def _point_text(experiment: Experiment) -> str:
    point = _point(experiment)
    share = point.kernels.share
    speed = f"each computes at {100 * share:.0f} % of a core" if share is not None else "they share the cores as they come"
    return (
        f"2 nodes x 4 ranks, 4 NICs a node of {point.nic_bits_per_s / 1e6:.0f} Mbit/s, links in a node of "
        f"{point.intra_bits_per_s / 1e6:.0f} Mbit/s; {speed}. {experiment.layers} layers, backward {experiment.backward}."
    )


def _text(experiment: Experiment, lines: Sequence[report.Line], argv: Sequence[str] | None) -> str:
    command = shlex.join(["python", "-m", "tools.bench.distca", *(sys.argv[1:] if argv is None else argv)])
    parts = [f"`{command}`", *EXPLANATION, _point_text(experiment), report.markdown(lines)]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    sys.exit(main())
