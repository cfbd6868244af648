"""Pipeline stages that attend together (DistCA, section 4.1) inside Megatron's pretrain loop on an
emulated cluster, against stages that attend each for itself under Megatron's 1F1B.

First measures the attention kernel and fixes the rate of the NICs (`tools.bench.distca.point`),
then trains the same batches both ways in turn, and prints steps, and what ranks attended to while
their stage was idle.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from rich.console import Console

from tools.bench.distca.__main__ import SHARE, point_text
from tools.bench.distca.pipeline import report
from tools.bench.distca.pipeline.experiment import REPLICAS, SAMPLE, STAGES, Pipelined
from tools.bench.emulated import launch
from tools.bench.emulated.report import Record, check

EXPLANATION = (
    "Steps of Megatron's own `pretrain`, the same batches and weights both ways in turn; losses and gradient norms of "
    "a batch are equal to "
    "1e-5. Stages: every stage plans and attends for itself, under Megatron's 1F1B. Joint: the attention of both "
    "stages of a tick is "
    "planned over all ranks, idle ones included; its backward brings keys again. Step: without the reduction of "
    "gradients. Medians over "
    "the repeats of a batch, then means over batches. Of a turn: the smallest and the largest ratio of two steps that "
    "follow one another. "
    "Spread: the largest (max - min) / median over the repeats of a batch. Attention: seconds in its kernels, mean "
    "over ranks. Waited: for "
    "exchanges of attention, mean over ranks; waiting for the other stage's hidden states is not in it.",
    "What ranks attended to in ticks in which their stage had no microbatch, a step's mean (joint). Warm-up: before "
    "the stage's first "
    "forward pass, or its first backward pass; drain: after its last. A task is a run of queries of one document with "
    "its keys, once a "
    "layer and nano-batch.",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0; 1 if losses differ or a rank failed; 77 where namespaces are not permitted."""
    options = _parser().parse_args(argv)
    if not launch.able():
        return launch.SKIPPED
    keys = {name: value for name, value in vars(options).items() if name != "json"}
    experiment = Pipelined(**{**keys, "out": str(options.out.resolve())})
    start = time.monotonic()
    # with --json standard output is JSON alone
    console = Console(stderr=options.json, width=max(180, Console().width))

    def describe() -> None:
        console.print(_point_text(experiment), highlight=False)

    if not launch.run("tools.bench.distca.pipeline.job", experiment, len(experiment.steps()), describe):
        return 1
    found = launch.records(experiment)
    lines, wrong = report.lines(found), check(found)
    console.print(launch.table(report.HEADINGS, report.rows(lines)))
    console.print(launch.table(report.IDLE_HEADINGS, report.idle_rows(found)))
    body = launch.body(experiment, time.monotonic() - start, lines, report.brief)
    launch.write(experiment.folder, "distca-pipeline", body, _text(experiment, found, argv), wrong)
    return launch.exit_code(body, wrong, as_json=options.json)


def _parser() -> argparse.ArgumentParser:
    name = "python -m tools.bench.distca.pipeline"
    parser = launch.parser(name, __doc__, layers=2, backward="keep", share=SHARE, out="bench-distca-pipeline")
    parser.add_argument("--batches", type=int, default=1, help="of each data set, each a step's (default 1)")
    parser.add_argument("--microbatches", type=int, default=4, help="of a step (default 4)")
    return parser


def _text(experiment: Pipelined, found: Sequence[Record], argv: Sequence[str] | None) -> str:
    command = launch.command_line(["python", "-m", "tools.bench.distca.pipeline"], argv)
    steps = report.markdown(report.HEADINGS, report.rows(report.lines(found)), 2)
    idle = report.markdown(report.IDLE_HEADINGS, report.idle_rows(found), 0)
    return "\n\n".join([command, EXPLANATION[0], _point_text(experiment), steps, EXPLANATION[1], idle]) + "\n"


def _point_text(experiment: Pipelined) -> str:
    return (
        f"{point_text(experiment)} {STAGES} pipeline stages, one on each node, of {REPLICAS} data-parallel ranks; "
        f"{experiment.microbatches} microbatches of {REPLICAS} samples of {SAMPLE:,} tokens."
    )


if __name__ == "__main__":
    sys.exit(main())
