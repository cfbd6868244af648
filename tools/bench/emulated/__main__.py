"""The ablation of Zeppelin's Fig. 11 inside Megatron's own pretrain loop on an emulated cluster: the
same batches and weights under every variant in turn. ./scripts/bench_emulated.sh runs it.

First the attention kernel is measured and the operating point fixed (docs/operating-point.md), then
all steps are trained. Losses and gradient norms of a batch must be equal to 1e-5.
"""

import argparse
import json
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from tools.bench.emulated import report
from tools.bench.emulated.ablation import ABLATION, BASELINE, QUICK, Ablation
from tools.bench.emulated.job import POINT_FILE, STEPS_FILE
from tools.bench.emulated.point import SHAPES, Kernels, Point, Shape
from tools.bench.emulated.report import Record
from tools.emulated_cluster import check

ROOT = Path(__file__).resolve().parents[3]
SKIPPED = 77
POLL_S = 0.3

EXPLANATION = (
    "Attention: forward and backward, from when the last rank has come to a call until the last one leaves "
    "it. Step: without the reduction of gradients. Medians over the repeats of a batch, then means over batches. "
    "Ratio: te_ring's time over this one's, summed over the batches; least and most of one batch; "
    "spread: the largest (max - min) / median over the repeats of a batch. NIC: most bytes that one sent or "
    "received in a step; over mean: over the mean of all. Hidden: of the time that a rank's transfers were "
    "under way, the share in which it did not wait for them. Disturbed: steps in which a rank had less than "
    "its share of a core, or other programs some of the cores."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0; 1 if losses differ or a rank failed; 77 where namespaces are not permitted."""
    options, ablation = _asked(argv)
    start = time.monotonic()
    # with --json standard output is JSON alone
    console = Console(stderr=options.json, width=max(180, Console().width))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the job, too
    reason = check()
    if reason is not None:
        print(f"SKIP: no emulated cluster on this machine: {reason}")
        return SKIPPED
    if not _run(ablation, console):
        return 1
    found = _records(ablation)
    lines, said = report.lines(found), report.health(found)
    page = [_command_line(argv), EXPLANATION, _point_text(ablation)]
    for nics in dict.fromkeys(line["nics"] for line in lines):
        cells, title = report.rows([line for line in lines if line["nics"] == nics]), f"{nics} NICs a node"
        console.print(_table(report.HEADINGS, cells, title))
        page += [f"## {title}", report.markdown(report.HEADINGS, cells)]
    console.print(said, highlight=False)
    wrong = report.check(found)
    document = _document(ablation, {"seconds": time.monotonic() - start, "lines": lines})
    (ablation.folder / "results.json").write_text(report.rows_on_lines(document))
    if not wrong:
        (ablation.folder / "results.md").write_text("\n\n".join([*page, said]) + "\n")
    if options.json:
        print(json.dumps(document))
    for line in wrong:
        print(f"error: {line}; a variant must not change the loss", file=sys.stderr)
    return 1 if wrong else 0


def _asked(argv: Sequence[str] | None) -> tuple[argparse.Namespace, Ablation]:
    """Options, and the run that they ask for; a wrong combination ends the program."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench.emulated", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="one batch of each set, once, 4 NICs: under 3 minutes")
    add("--nics", type=_numbers, default=(4, 2), help="NICs of a node, by topology (default 4,2)")
    add("--batches", type=_numbers, default=(4, 2), help="batches of each data set, by topology (default 4,2)")
    add("--variants", type=_numbers, dest="chosen", help="places in the list, the first is te_ring (default: all)")
    add("--shape", choices=tuple(SHAPES), default=next(iter(SHAPES)), help="nodes x ranks (default 2x4)")
    add("--repeats", type=int, default=2, help="times that each batch is trained under each variant (default 2)")
    # one layer: more batches in the same time
    add("--layers", type=int, default=1, help="of the GPT (default 1)")
    add("--seed", type=int, default=0, help="of the batches")
    add("--backward", choices=("keep", "replay"), default="replay", help="replay (default): as Transformer Engine's")
    add("--nic-mbit", type=float, help="rate of a NIC in Mbit/s (default: by the operating point)")
    add("--calibration-s", type=float, default=5.0, help="seconds of each measurement of a kernel (default 5)")
    # faster ranks need rates that emulated links do not keep
    add("--core-share", type=float, default=0.2, help="of a core, for each rank (0: as it comes; default 0.2)")
    add("--out", type=Path, default=ROOT / "out" / "bench-ablation", help="folder of logs and results")
    add("--json", action="store_true", help="print JSON; all else goes to standard error")
    options = parser.parse_args(argv)
    keys: dict[str, Any] = {field.name: getattr(options, field.name) for field in fields(Ablation)}
    keys["out"] = str(options.out.resolve())
    keys["chosen"] = options.chosen or (QUICK if options.quick else tuple(range(len(ABLATION))))
    if options.quick:
        keys |= {"nics": options.nics[:1], "batches": (1,), "repeats": 1, "layers": 1}
        keys["calibration_s"] = min(2.0, options.calibration_s)
    if 0 not in keys["chosen"] or len(keys["nics"]) != len(keys["batches"]):
        parser.error(f"--variants must have 0 ({BASELINE}), --batches a number for each of --nics")
    return options, Ablation(**keys)


def _numbers(words: str) -> tuple[int, ...]:
    return tuple(int(word) for word in words.split(","))


def _run(ablation: Ablation, console: Console) -> bool:
    """Run the job with a bar over its steps; whether all went well."""
    folder = ablation.folder
    folder.mkdir(parents=True, exist_ok=True)
    for old in (POINT_FILE, STEPS_FILE):
        (folder / old).unlink(missing_ok=True)
    command = [sys.executable, "-W", "ignore", "-m", "tools.bench.emulated.job", ablation.text()]
    log, shown = folder / "job.log", False
    total = sum(len(each.steps) for each in ablation.trainings())
    with log.open("w") as out:
        process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            with tqdm(total=total, unit="step", desc=" kernels", file=sys.stderr, dynamic_ncols=True) as bar:
                while process.poll() is None:
                    time.sleep(POLL_S)
                    if not shown and (folder / POINT_FILE).exists():
                        shown = True
                        bar.clear()
                        console.print(_point_text(ablation), highlight=False)
                    _advance(bar, _records(ablation))
                _advance(bar, _records(ablation))
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


def _records(ablation: Ablation) -> list[Record]:
    file = ablation.folder / STEPS_FILE
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]


def _point(ablation: Ablation) -> Point:
    keys: dict[str, Any] = json.loads((ablation.folder / POINT_FILE).read_text())
    return Point(Kernels(**keys["kernels"]), keys["nic_bits_per_s"], Shape(**keys["shape"]))


def _point_text(ablation: Ablation) -> str:
    return f"{_point(ablation).text()} {ablation.layers} layers, backward {ablation.backward}."


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]], title: str) -> Table:
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


def _command_line(argv: Sequence[str] | None) -> str:
    return f"`{shlex.join(['python', '-m', 'tools.bench.emulated', *(sys.argv[1:] if argv is None else argv)])}`"


def _document(ablation: Ablation, body: dict[str, Any]) -> dict[str, Any]:
    """Of `--json`: the run, its point, the table's lines, and of each step what is worth keeping."""
    at = _point(ablation)
    return {
        "experiment": {key: value for key, value in asdict(ablation).items() if key != "out"},
        "point": {**asdict(at), "intra_bits_per_s": at.intra_bits_per_s, "transfer_to_round": at.transfer_to_round},
        **body,
        "steps": [report.brief(record) for record in _records(ablation)],
    }


if __name__ == "__main__":
    sys.exit(main())
