"""Experiments inside Megatron's own pretrain loop on an emulated cluster: the same batches and weights
under every variant in turn.

    python -m tools.bench.emulated ablation      # Zeppelin's Fig. 11; ./scripts/bench_emulated.sh
    python -m tools.bench.emulated distca        # DistCA's nano-batches in turns
    python -m tools.bench.emulated pipeline      # DistCA's pipeline stages that attend together
    python -m tools.bench.emulated microbatches  # WLB-LLM's of equal work; replicas that are pipelines

First the attention kernel is measured and the operating point fixed (docs/operating-point.md), then
all steps are trained. Losses and gradient norms of a batch must be equal to 1e-5.
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
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from tools.bench.emulated import microbatches, report
from tools.bench.emulated.experiments import (
    ABLATION,
    BASELINE,
    CONTEXT,
    EXPERIMENTS,
    NARROW_FFN,
    NUM_RANKS,
    PAPER_CONTEXT,
    QUICK,
    REPLICAS,
    SAMPLE,
    SHORTEST,
    STAGES,
    Experiment,
    Joint,
    Microbatches,
)
from tools.bench.emulated.job import POINT_FILE, STEPS_FILE
from tools.bench.emulated.point import SHAPES, Kernels, Point, Shape
from tools.bench.emulated.report import Record
from tools.emulated_cluster import check

ROOT = Path(__file__).resolve().parents[3]
SKIPPED = 77
POLL_S = 0.3

DEFAULTS: dict[str, dict[str, Any]] = {
    # one layer: more batches in the same time
    "ablation": {"layers": 1, "backward": "replay", "core_share": 0.2},
    # so slow that NICs of a rate that emulated links keep can hide their transfers behind it
    "distca": {"layers": 2, "backward": "keep", "core_share": 0.06},
    "pipeline": {"layers": 2, "backward": "keep", "core_share": 0.06},
    # the fastest that emulated NICs keep: hidden states cross in a small part of the time of a pass
    "microbatches": {"layers": 4, "backward": "keep", "core_share": 0.1, "nic_mbit": 100.0},
}

STEP = "Step: without the reduction of gradients. Medians over the repeats of a batch, then means over batches."
EXPLANATIONS = {
    "ablation": "Attention: forward and backward, from when the last rank has come to a call until the last one leaves "
    f"it. {STEP} Ratio: te_ring's time over this one's, summed over the batches; least and most of one batch; "
    "spread: the largest (max - min) / median over the repeats of a batch. NIC: most bytes that one sent or "
    "received in a step; over mean: over the mean of all. Hidden: of the time that a rank's transfers were "
    "under way, the share in which it did not wait for them. Disturbed: steps in which a rank had less than "
    "its share of a core, or other programs some of the cores.",
    "distca": f"{STEP} Waited: for exchanges, mean over ranks. Hidden: of the time that exchanges were under way, from "
    "being issued until what they bring is put to use, the share in which the rank did not wait. Exposed: of "
    "the waiting, what is not for a sender that comes late itself; one by one, where nothing runs beside an "
    "exchange, that is all that exchanges take. Hidden of one by one's: what ping-pong exposes less than "
    "that.",
    "pipeline": "Stages: every stage plans and attends for itself, under Megatron's 1F1B. Joint: the attention of both "
    f"stages of a tick is planned over all ranks, idle ones included; its backward brings keys again. {STEP} "
    "Of a turn: two steps that follow one another. Attention: seconds in its kernels, mean over ranks. "
    "Waited: for exchanges of attention, mean over ranks; waiting for the other stage's hidden states is not "
    "in it. Second table: what ranks attended to in ticks in which their stage had no microbatch, a step's "
    "mean (joint). Warm-up: before the stage's first forward pass, or its first backward pass; drain: after "
    "its last. A task is a run of queries of one document with its keys, once a layer and nano-batch.",
    "microbatches": f"The same documents every way. {STEP} Ratio: to the first way. Bubble: idle time over work, all "
    "ranks: waiting for neighbouring stages, for the slowest replica, transfers, and the end. Equal length: as "
    "dealt, a context each, the last document cut (planner wlb_llm, packing: original). Equal work: packing: "
    "workload, within the step's documents, none delayed. Rise and fall: the least work first and last. "
    "megatron: full microbatches by first fit decreasing, dealt to the replicas in turn. hydraulis: sequences "
    "dealt by seconds, each replica its own microbatches of at most as many tokens.",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0; 1 if losses differ or a rank failed; 77 where namespaces are not permitted."""
    parser = _parser()
    options = parser.parse_args(argv)
    name: str = options.experiment
    experiment = _experiment(parser, options)
    start = time.monotonic()
    # with --json standard output is JSON alone
    console = Console(stderr=options.json, width=max(180, Console().width))
    at_scale: list[microbatches.Line] = []
    if isinstance(experiment, Microbatches):
        at_scale = microbatches.large_lines(experiment, options.simulated)
        if at_scale:
            title = _at_scale_text(options.simulated)
            console.print(_table(microbatches.HEADINGS, microbatches.rows(at_scale), title))
    if not _able():
        return SKIPPED
    if not _run(name, experiment, lambda: console.print(_point_text(experiment), highlight=False)):
        return 1
    found = _records(experiment)
    lines, tables, said = _tables(name, experiment, found)
    body = {"seconds": time.monotonic() - start, "lines": [*map(asdict, at_scale), *lines]}
    page = [_command_line(argv), EXPLANATIONS[name], _point_text(experiment)]
    if at_scale:
        cells = microbatches.rows(at_scale)
        page += [_at_scale_text(options.simulated), report.markdown(microbatches.HEADINGS, cells)]
    for heads, cells, title in tables:
        console.print(_table(heads, cells, title))
        page += [f"## {title}", report.markdown(heads, cells)]
    console.print(said, highlight=False)
    wrong = report.check(found)
    _write(experiment, body, [*page, said], wrong)
    if options.json:
        print(json.dumps(_document(experiment, body)))
    for line in wrong:
        print(f"error: {line}; a variant must not change the loss", file=sys.stderr)
    return 1 if wrong else 0


def _tables(
    name: str, experiment: Experiment, found: Sequence[Record]
) -> tuple[list[dict[str, Any]], list[tuple[Sequence[str], list[list[str]], str]], str]:
    """Lines of the records; headings, cells and title of each table; and what is said below them."""
    if isinstance(experiment, Microbatches):
        small = microbatches.small_lines(found, experiment, _point(experiment))
        said = f"A microbatch added {microbatches.fitted_microbatch_s(found):.3f} s on a stage (least squares)."
        return [asdict(line) for line in small], [(microbatches.HEADINGS, microbatches.rows(small), "Emulated")], said
    columns = report.COLUMNS[name]
    lines, heads = report.lines(found, columns), report.headings(columns)
    tables: list[tuple[Sequence[str], list[list[str]], str]] = [
        (heads, report.rows([line for line in lines if line["nics"] == nics], columns), f"{nics} NICs a node")
        for nics in dict.fromkeys(line["nics"] for line in lines)
    ]
    if isinstance(experiment, Joint):
        return lines, [*tables, (report.IDLE_HEADINGS, report.idle_rows(found), "Idle stages")], ""
    return lines, tables, report.health(found)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench.emulated",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = parser.add_subparsers(dest="experiment", required=True)
    for name, given in DEFAULTS.items():
        one = verbs.add_parser(name, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        one.set_defaults(**given)
        one.add_argument("--repeats", type=int, default=2, help="times that each batch is trained under each variant")
        one.add_argument("--layers", type=int, help="of the GPT")
        one.add_argument("--seed", type=int, default=0, help="of the batches")
        one.add_argument(
            "--backward", choices=("keep", "replay"), help="replay: brings keys again, as Transformer Engine's"
        )
        one.add_argument("--nic-mbit", type=float, help="rate of a NIC in Mbit/s (None: by the operating point)")
        one.add_argument("--calibration-s", type=float, default=5.0, help="seconds of each measurement of a kernel")
        one.add_argument("--core-share", type=float, help="of a core, for each rank (0: as it comes)")
        one.add_argument("--out", type=Path, default=ROOT / "out" / f"bench-{name}", help="folder of logs and results")
        one.add_argument("--json", action="store_true", help="print JSON; all else goes to standard error")
    ablation, distca, joint, micro = (verbs.choices[name] for name in DEFAULTS)
    ablation.add_argument("--quick", action="store_true", help="one batch of each set, once, 4 NICs: under 3 minutes")
    ablation.add_argument("--nics", type=_numbers, default=(4, 2), help="NICs of a node, by topology")
    ablation.add_argument("--batches", type=_numbers, default=(4, 2), help="batches of each data set, by topology")
    ablation.add_argument("--variants", type=_numbers, dest="chosen", help="places in the list, the first is te_ring")
    ablation.add_argument("--shape", choices=tuple(SHAPES), default=next(iter(SHAPES)), help="nodes x ranks")
    distca.add_argument("--batches", type=int, default=2, help="of each data set")
    joint.add_argument("--batches", type=int, default=1, help="of each data set, each a step's")
    joint.add_argument("--microbatches", type=int, default=4, help="of a step")
    micro.add_argument("--stages", type=int, nargs="+", default=[2, 4], help="pipeline stages")
    micro.add_argument("--dataset", default="wlb-skew", help="of document lengths")
    micro.add_argument("--batches", type=int, default=2, help="trained, each a step's")
    micro.add_argument("--microbatches", type=int, default=8, help="of a step")
    micro.add_argument("--room", type=float, default=2.0, help="most tokens of a microbatch over a context's")
    micro.add_argument("--replicas", type=int, default=1, help="data-parallel replicas, each a pipeline; 1: one pool")
    micro.add_argument("--microbatch-s", type=float, default=0.0, help="what hydraulis is told a microbatch adds")
    micro.add_argument("--simulated", type=int, default=10, help="batches of the large cluster")
    return parser


def _numbers(words: str) -> tuple[int, ...]:
    return tuple(int(word) for word in words.split(","))


def _experiment(parser: argparse.ArgumentParser, options: argparse.Namespace) -> Experiment:
    """The experiment that was asked for; a wrong combination of options ends the program."""
    kind = EXPERIMENTS[options.experiment]
    given = {field.name: getattr(options, field.name, None) for field in fields(kind)}
    keys: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in given.items()}
    keys["out"] = str(options.out.resolve())
    if options.experiment == "ablation":
        keys["chosen"] = options.chosen or (QUICK if options.quick else tuple(range(len(ABLATION))))
        if options.quick:
            keys |= {"nics": options.nics[:1], "batches": (1,), "repeats": 1, "layers": 1}
            keys["calibration_s"] = min(2.0, options.calibration_s)
        if 0 not in keys["chosen"] or len(keys["nics"]) != len(keys["batches"]):
            parser.error(f"--variants must have 0 ({BASELINE}), --batches a number for each of --nics")
    if options.experiment == "microbatches" and any(NUM_RANKS % (each * options.replicas) for each in options.stages):
        parser.error(f"--stages times --replicas: expected divisors of the {NUM_RANKS} ranks")
    return kind(**keys)


def _able() -> bool:
    """Whether there can be an emulated cluster; says why not. From here on a signal to end ends the
    job, too.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    reason = check()
    if reason is not None:
        print(f"SKIP: no emulated cluster on this machine: {reason}")
    return reason is None


def _run(name: str, experiment: Experiment, describe: Callable[[], None]) -> bool:
    """Run the job with a bar over its steps; whether all went well. `describe`: says what the point
    is, once it is known.
    """
    folder = experiment.folder
    folder.mkdir(parents=True, exist_ok=True)
    for old in (POINT_FILE, STEPS_FILE):
        (folder / old).unlink(missing_ok=True)
    command = [sys.executable, "-W", "ignore", "-m", "tools.bench.emulated.job", name, experiment.text()]
    log, shown = folder / "job.log", False
    total = sum(len(each.steps) for each in experiment.trainings())
    with log.open("w") as out:
        process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            with tqdm(total=total, unit="step", desc=" kernels", file=sys.stderr, dynamic_ncols=True) as bar:
                while process.poll() is None:
                    time.sleep(POLL_S)
                    if not shown and (folder / POINT_FILE).exists():
                        shown = True
                        bar.clear()
                        describe()
                    _advance(bar, _records(experiment))
                _advance(bar, _records(experiment))
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


def _records(experiment: Experiment) -> list[Record]:
    """Measurements so far."""
    file = experiment.folder / STEPS_FILE
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]


def _point(experiment: Experiment) -> Point:
    """The point that the job fixed."""
    keys: dict[str, Any] = json.loads((experiment.folder / POINT_FILE).read_text())
    return Point(Kernels(**keys["kernels"]), keys["nic_bits_per_s"], Shape(**keys["shape"]))


def _point_text(experiment: Experiment) -> str:
    """Of the cluster, and of what is trained on it."""
    text = f"{_point(experiment).text()} {experiment.layers} layers, backward {experiment.backward}."
    match experiment:
        case Joint():
            return (
                f"{text} {STAGES} pipeline stages, one on each node, of {REPLICAS} data-parallel ranks; "
                f"{experiment.microbatches} microbatches of {REPLICAS} samples of {SAMPLE:,} tokens."
            )
        case Microbatches():
            return (
                f"{text} MLP {NARROW_FFN}, contexts of {CONTEXT:,} tokens, documents of {SHORTEST} and more; "
                f"{experiment.microbatches} microbatches a step, {experiment.batches} batches of "
                f"'{experiment.dataset}'."
            )
        case _:
            return text


def _at_scale_text(batches: int) -> str:
    return (
        f"Simulated: 7B, contexts of {PAPER_CONTEXT:,} tokens, stages of {microbatches.PAPER_RANKS} H100s "
        f"(configs/cluster/h100), {batches} batches."
    )


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]], title: str | None = None) -> Table:
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
    """The command line, for Markdown."""
    return f"`{shlex.join(['python', '-m', 'tools.bench.emulated', *(sys.argv[1:] if argv is None else argv)])}`"


def _document(experiment: Experiment, body: dict[str, Any]) -> dict[str, Any]:
    """Of `--json`: the experiment, its point, the table's lines, and of each step what is worth
    keeping.
    """
    at = _point(experiment)
    return {
        "experiment": {key: value for key, value in asdict(experiment).items() if key != "out"},
        "point": {**asdict(at), "intra_bits_per_s": at.intra_bits_per_s, "transfer_to_round": at.transfer_to_round},
        **body,
        "steps": [report.brief(record) for record in _records(experiment)],
    }


def _write(experiment: Experiment, body: dict[str, Any], page: Sequence[str], wrong: Sequence[str]) -> None:
    """results.json, and where nothing is wrong the page as results.md."""
    (experiment.folder / "results.json").write_text(report.rows_on_lines(_document(experiment, body)))
    if not wrong:
        (experiment.folder / "results.md").write_text("\n\n".join(filter(None, page)) + "\n")


if __name__ == "__main__":
    sys.exit(main())
