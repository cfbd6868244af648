"""The ablation of Zeppelin's Fig. 11 inside Megatron's pretrain loop, on an emulated cluster: te_ring, routing, engine, remapping.

First measures the attention kernel and fixes the operating point (docs/operating-point.md), then trains the same batches under every
variant in turn, and prints attention and step times with their ratios to te_ring.
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

from tools.bench.emulated import report
from tools.bench.emulated.device import SHARE
from tools.bench.emulated.job import POINT_FILE, STEPS_FILE
from tools.bench.emulated.point import Kernels, Point
from tools.bench.emulated.steps import Experiment
from tools.bench.emulated.variants import VARIANTS
from tools.emulated_cluster import check

ROOT = Path(__file__).resolve().parents[3]
OUT = ROOT / "out" / "bench-emulated"
SKIPPED = 77
USAGE_ERROR = 2
BASE = 0
POLL_S = 0.3
QUICK_VARIANTS = 7
EXPLANATION = (
    "Steps of Megatron's own `pretrain`, the same batches and weights under every variant in turn; losses and gradient norms of a "
    "batch are equal to 1e-5. docs/operating-point.md derives the point and says what is left out.",
    "Attention: forward and backward, from when the last rank has come to a call until the last one leaves it. Step: without the "
    "reduction of gradients, which is timed apart behind a barrier. Medians over the repeats of a batch, then means over batches. "
    "Ratio: te_ring's time over this one's, summed over the batches; of a batch: the smallest and the largest; spread: the largest "
    "(max - min) / median over the repeats of a batch. NIC: most bytes that one sent or received in a step. Hidden: of the time that "
    "a rank's transfers were under way, the share in which it did not wait for them.",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0; 1 if losses differ or a rank failed; 77 where namespaces are not permitted."""
    options = _parser().parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the job is ended
    reason = check()
    if reason is not None:
        print(f"SKIP: no emulated cluster on this machine: {reason}")
        return SKIPPED
    experiment = _experiment(options)
    if BASE not in experiment.variants or len(experiment.nics) != len(experiment.batches):
        print(f"error: --variants must have {BASE} ({VARIANTS[BASE].name}), --batches a number for each of --nics", file=sys.stderr)
        return USAGE_ERROR
    experiment.folder.mkdir(parents=True, exist_ok=True)
    for old in (POINT_FILE, STEPS_FILE):
        (experiment.folder / old).unlink(missing_ok=True)
    start = time.monotonic()
    # With --json standard output is JSON alone.
    console = Console(stderr=options.json, width=max(150, Console().width))
    if _run(experiment, console):
        return 1
    records = _records(experiment.folder / STEPS_FILE)
    found = report.lines(records)
    wrong = report.check(records)
    seconds = time.monotonic() - start
    _show(console, found, records, seconds)
    body = _body(experiment, records, found, seconds)
    (experiment.folder / "ablation.json").write_text(_rows_on_lines(body))
    if not wrong:
        (experiment.folder / "ablation.md").write_text(_text(experiment, records, found, argv))
    if options.json:
        print(json.dumps(body))
    for line in wrong:
        print(f"error: {line}; a variant must not change the loss", file=sys.stderr)
    return 1 if wrong else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench_emulated.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one batch of each data set, once, 4 NICs only: under 3 minutes")
    parser.add_argument("--nics", type=_numbers, default=(4, 2), help="NICs of a node, by topology (default 4,2)")
    parser.add_argument("--batches", type=_numbers, default=(4, 2), help="batches of each data set, by topology (default 4,2)")
    parser.add_argument("--repeats", type=int, default=2, help="times that each batch is trained under each variant (default 2)")
    parser.add_argument("--layers", type=int, default=1, help="layers of the GPT (default 1: more batches in the same time)")
    parser.add_argument("--seed", type=int, default=0, help="of the batches")
    parser.add_argument(
        "--backward", choices=("replay", "keep"), default="replay", help="replay: backward rounds bring keys again, as TE's"
    )
    parser.add_argument("--variants", type=_numbers, default=tuple(range(len(VARIANTS))), help="places in the list, the first is te_ring")
    parser.add_argument("--nic-mbit", type=float, help="rate of a NIC in Mbit/s (default: from the measured kernel)")
    parser.add_argument("--calibration-s", type=float, default=5.0, help="seconds of each measurement of a kernel")
    parser.add_argument(
        "--core-share", type=float, default=SHARE, help=f"of a core, for each rank's computation (default {SHARE}; 0: as it comes)"
    )
    parser.add_argument("--out", type=Path, default=OUT, help="folder of logs and results")
    parser.add_argument("--json", action="store_true", help="print the results as JSON; all else goes to standard error")
    return parser


def _numbers(words: str) -> tuple[int, ...]:
    return tuple(int(word) for word in words.split(","))


def _experiment(options: argparse.Namespace) -> Experiment:
    quick = options.quick
    return Experiment(
        out=str(options.out.resolve()),
        nics=options.nics[:1] if quick else options.nics,
        batches=(1,) if quick else options.batches,
        repeats=1 if quick else options.repeats,
        seed=options.seed,
        layers=1 if quick else options.layers,
        backward=options.backward,
        variants=options.variants[:QUICK_VARIANTS] if quick else options.variants,
        nic_mbit=options.nic_mbit,
        core_share=options.core_share,
        calibration_s=min(2.0, options.calibration_s) if quick else options.calibration_s,
    )


def _run(experiment: Experiment, console: Console) -> int:
    """Run the job with a bar over its steps; its exit code, after what it said if it failed."""
    command = [sys.executable, "-W", "ignore", "-m", "tools.bench.emulated.job", experiment.text()]
    log = experiment.folder / "job.log"
    total = sum(len(experiment.steps(at)) for at in range(len(experiment.nics)))
    shown = False
    with log.open("w") as out:
        process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            with tqdm(total=total, unit="step", desc=" kernels", file=sys.stderr, dynamic_ncols=True) as bar:
                while process.poll() is None:
                    time.sleep(POLL_S)
                    if not shown and (experiment.folder / POINT_FILE).exists():
                        shown = True
                        bar.clear()
                        console.print(_point(experiment).text(), highlight=False)
                    _advance(bar, _records(experiment.folder / STEPS_FILE))
                _advance(bar, _records(experiment.folder / STEPS_FILE))
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(timeout=30)
    if process.returncode:
        print("\n".join(log.read_text(errors="replace").splitlines()[-25:]), file=sys.stderr)
        print(f"error: the job failed; its log is {log}, those of the ranks are beside it", file=sys.stderr)
    return process.returncode


def _advance(bar: Any, records: Sequence[report.Record]) -> None:
    if len(records) > bar.n:
        last = records[-1]
        bar.set_description(f" {last['nics']} NICs, {last['dataset']}, {last['variant']}")
        bar.update(len(records) - bar.n)


def _records(file: Path) -> list[report.Record]:
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]


def _point(experiment: Experiment) -> Point:
    keys: dict[str, Any] = json.loads((experiment.folder / POINT_FILE).read_text())
    return Point(Kernels(**keys["kernels"]), keys["nic_bits_per_s"])


def _show(console: Console, found: Sequence[report.Line], records: Sequence[report.Record], seconds: float) -> None:
    for nics in dict.fromkeys(line.nics for line in found):
        table = Table(title=f"{nics} NICs a node", title_justify="left")
        for at, heading in enumerate(report.HEADINGS):
            table.add_column(heading, justify="left" if at < 2 else "right")
        before = None
        for row in report.rows([line for line in found if line.nics == nics]):
            if before not in (None, row[0]):
                table.add_section()
            table.add_row(*row)
            before = row[0]
        console.print(table)
    console.print(
        f"Bytes of a NIC as the kernel counted them, less headers, against the plan's: {100 * report.counted_against_plan(records):.1f} % "
        f"of the busiest NIC's apart at most, where that carries 1 MB or more. {len(records)} steps in {seconds:.0f} s."
    )


def _body(experiment: Experiment, records: Sequence[report.Record], found: Sequence[report.Line], seconds: float) -> dict[str, Any]:
    point = _point(experiment)
    return {
        "experiment": {key: value for key, value in asdict(experiment).items() if key != "out"},
        "point": {**asdict(point), "intra_bits_per_s": point.intra_bits_per_s, "transfer_to_round": point.transfer_to_round},
        "seconds": seconds,
        "counted_against_plan": report.counted_against_plan(records),
        "lines": [asdict(line) for line in found],
        "steps": [report.brief(record) for record in records],
    }


def _rows_on_lines(body: dict[str, Any]) -> str:
    """JSON with one line for each entry of a list of the body."""
    parts: list[str] = []
    for key, value in body.items():
        rows = ",\n  ".join(map(json.dumps, value)) if isinstance(value, list) else ""
        parts.append(f" {json.dumps(key)}: " + (f"[\n  {rows}\n ]" if rows else json.dumps(value)))
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _text(experiment: Experiment, records: Sequence[report.Record], found: Sequence[report.Line], argv: Sequence[str] | None) -> str:
    command = shlex.join(["./scripts/bench_emulated.sh", *(sys.argv[1:] if argv is None else argv)])
    parts = [
        "# The ablation of Fig. 11 on the emulated cluster",
        f"`{command}`",
        *EXPLANATION,
        "```\n" + _point(experiment).text() + "\n```",
    ]
    for at, nics in enumerate(experiment.nics):
        of_topology = [line for line in found if line.nics == nics]
        title = f"## {nics} NICs a node: {experiment.batches[at]} batches of each data set, {experiment.repeats} times"
        parts += [title, report.markdown(of_topology)]
    apart = 100 * report.counted_against_plan(records)
    parts.append(
        f"Bytes of a NIC as the kernel counted them, less headers, and as planned: {apart:.1f} % of the busiest NIC's apart at most, over "
        "the steps in which that one carries a megabyte or more (below, headers and barriers are most of it)."
    )
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    sys.exit(main())
