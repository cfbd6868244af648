"""Ping-pong (DistCA, section 4.1) inside Megatron's pretrain loop on an emulated cluster: against
one stream, te_ring and zeppelin.

First measures the attention kernel and fixes the rate of the NICs (`tools.bench.distca.point`),
then trains the same batches under every variant in turn, and prints steps, and what of the
exchanges' time shows.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from rich.console import Console

from tools.bench.distca import report
from tools.bench.distca.job import Turns
from tools.bench.emulated import launch
from tools.bench.emulated.report import brief, check
from tools.bench.emulated.steps import Experiment

SHARE = 0.06
"""Of a core, for each rank's computation: so slow that NICs of a rate that emulated links keep can
hide their transfers behind it.
"""
EXPLANATION = (
    "Steps of Megatron's own `pretrain`, the same batches and weights under every variant in turn; losses and "
    "gradient norms of a batch "
    "are equal to 1e-5. Step: without the reduction of gradients. Medians over the repeats of a batch, then means "
    "over batches. Waited: "
    "for exchanges, mean over ranks. Hidden: of the time that exchanges were under way, from being issued until what "
    "they bring is put to "
    "use, the share in which the rank did not wait. Exposed: of the waiting, what is not for a sender that comes late "
    "itself; one by one, "
    "where nothing runs beside an exchange, that is all that exchanges take. Hidden of one by one's: what ping-pong "
    "exposes less than "
    "that. Spread: the largest (max - min) / median over the repeats of a batch.",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0; 1 if losses differ or a rank failed; 77 where namespaces are not permitted."""
    options = _parser().parse_args(argv)
    if not launch.able():
        return launch.SKIPPED
    keys = {name: value for name, value in vars(options).items() if name != "json"}
    experiment = Turns(**{**keys, "out": str(options.out.resolve())})
    start = time.monotonic()
    # with --json standard output is JSON alone
    console = Console(stderr=options.json, width=max(180, Console().width))

    def describe() -> None:
        console.print(point_text(experiment), highlight=False)

    if not launch.run("tools.bench.distca.job", experiment, len(experiment.steps()), describe):
        return 1
    found = launch.records(experiment)
    lines, wrong = report.lines(found), check(found)
    console.print(launch.table(report.HEADINGS, report.rows(lines)))
    body = launch.body(experiment, time.monotonic() - start, lines, brief)
    launch.write(experiment.folder, "distca", body, _text(experiment, lines, argv), wrong)
    return launch.exit_code(body, wrong, as_json=options.json)


def _parser() -> argparse.ArgumentParser:
    parser = launch.parser(
        "python -m tools.bench.distca", __doc__, layers=2, backward="keep", share=SHARE, out="bench-distca"
    )
    parser.add_argument("--batches", type=int, default=2, help="of each data set (default 2)")
    return parser


def _text(experiment: Turns, lines: Sequence[report.Line], argv: Sequence[str] | None) -> str:
    command = launch.command_line(["python", "-m", "tools.bench.distca"], argv)
    return "\n\n".join([command, *EXPLANATION, point_text(experiment), report.markdown(lines)]) + "\n"


def point_text(experiment: Experiment) -> str:
    """Of the cluster, and of what is trained on it."""
    point = launch.point(experiment)
    share = point.kernels.share
    speed = (
        f"each computes at {100 * share:.0f} % of a core" if share is not None else "they share the cores as they come"
    )
    return (
        f"2 nodes x 4 ranks, 4 NICs a node of {point.nic_bits_per_s / 1e6:.0f} Mbit/s, links in a node of "
        f"{point.intra_bits_per_s / 1e6:.0f} Mbit/s; {speed}. {experiment.layers} layers, backward "
        f"{experiment.backward}."
    )


if __name__ == "__main__":
    sys.exit(main())
