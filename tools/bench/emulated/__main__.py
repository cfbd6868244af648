"""The ablation of Zeppelin's Fig. 11 inside Megatron's pretrain loop, on an emulated cluster:
te_ring, routing, engine, remapping.

First measures the attention kernel and fixes the operating point (docs/operating-point.md), then
trains the same batches under every variant in turn, and prints attention and step times with their
ratios to te_ring.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from rich.console import Console

from tools.bench.emulated import launch, report
from tools.bench.emulated.device import SHARE
from tools.bench.emulated.point import SHAPES
from tools.bench.emulated.steps import Ablation
from tools.bench.emulated.variants import QUICK, VARIANTS

USAGE_ERROR = 2
BASE = 0
EXPLANATION = (
    "Steps of Megatron's own `pretrain`, the same batches and weights under every variant in turn; losses and "
    "gradient norms of a "
    "batch are equal to 1e-5. docs/operating-point.md derives the point and says what is left out.",
    "Attention: forward and backward, from when the last rank has come to a call until the last one leaves it. Step: "
    "without the "
    "reduction of gradients, which is timed apart behind a barrier. Medians over the repeats of a batch, then means "
    "over batches. "
    "Ratio: te_ring's time over this one's, summed over the batches; of a batch: the smallest and the largest; "
    "spread: the largest "
    "(max - min) / median over the repeats of a batch. NIC: most bytes that one sent or received in a step. Hidden: "
    "of the time that "
    "a rank's transfers were under way, the share in which it did not wait for them. Over mean: bytes of the busiest "
    "NIC over the mean of all. Disturbed: steps in which a rank had less than its share of a core, or other programs "
    "some of the cores.",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0; 1 if losses differ or a rank failed; 77 where namespaces are not permitted."""
    options = _parser().parse_args(argv)
    if not launch.able():
        return launch.SKIPPED
    experiment = _experiment(options)
    if BASE not in experiment.variants or len(experiment.nics) != len(experiment.batches):
        print(
            f"error: --variants must have {BASE} ({VARIANTS[BASE].name}), --batches a number for each of --nics",
            file=sys.stderr,
        )
        return USAGE_ERROR
    start = time.monotonic()
    # with --json standard output is JSON alone
    console = Console(stderr=options.json, width=max(180, Console().width))
    num_steps = sum(len(experiment.steps(at)) for at in range(len(experiment.nics)))

    def describe() -> None:
        console.print(launch.point(experiment).text(), highlight=False)

    if not launch.run("tools.bench.emulated.job", experiment, num_steps, describe):
        return 1
    records = launch.records(experiment)
    found, wrong, seconds = report.lines(records), report.check(records), time.monotonic() - start
    _show(console, found, records, seconds)
    body = launch.body(experiment, seconds, found, report.brief)
    body["counted_against_plan"] = report.counted_against_plan(records)
    launch.write(experiment.folder, "ablation", body, _text(experiment, records, found, argv), wrong)
    return launch.exit_code(body, wrong, as_json=options.json)


def _parser() -> argparse.ArgumentParser:
    # One layer: more batches in the same time.
    parser = launch.parser("bench_emulated.sh", __doc__, layers=1, backward="replay", share=SHARE, out="bench-emulated")
    parser.add_argument(
        "--quick", action="store_true", help="one batch of each data set, once, 4 NICs only: under 3 minutes"
    )
    parser.add_argument("--nics", type=_numbers, default=(4, 2), help="NICs of a node, by topology (default 4,2)")
    parser.add_argument(
        "--batches", type=_numbers, default=(4, 2), help="batches of each data set, by topology (default 4,2)"
    )
    parser.add_argument(
        "--variants",
        type=_numbers,
        default=None,
        help="places in the list, the first is te_ring (default: all; with --quick some)",
    )
    parser.add_argument(
        "--shape",
        choices=tuple(SHAPES),
        default=next(iter(SHAPES)),
        help="nodes x ranks, and a model with as many heads (default %(default)s)",
    )
    return parser


def _numbers(words: str) -> tuple[int, ...]:
    return tuple(int(word) for word in words.split(","))


def _experiment(options: argparse.Namespace) -> Ablation:
    quick = options.quick
    return Ablation(
        out=str(options.out.resolve()),
        nics=options.nics[:1] if quick else options.nics,
        batches=(1,) if quick else options.batches,
        repeats=1 if quick else options.repeats,
        seed=options.seed,
        layers=1 if quick else options.layers,
        backward=options.backward,
        variants=options.variants or (QUICK if quick else tuple(range(len(VARIANTS)))),
        shape=options.shape,
        nic_mbit=options.nic_mbit,
        core_share=options.core_share,
        calibration_s=min(2.0, options.calibration_s) if quick else options.calibration_s,
    )


def _show(console: Console, found: Sequence[report.Line], records: Sequence[report.Record], seconds: float) -> None:
    for nics in dict.fromkeys(line.nics for line in found):
        of_topology = [line for line in found if line.nics == nics]
        console.print(launch.table(report.HEADINGS, report.rows(of_topology), f"{nics} NICs a node"))
    console.print(
        "Bytes of a NIC as the kernel counted them, less headers, against the plan's: "
        f"{100 * report.counted_against_plan(records):.1f} % of the busiest NIC's apart at most, where that carries "
        f"1 MB or more. {len(records)} steps in {seconds:.0f} s. " + report.disturbance(records)
    )


def _text(
    experiment: Ablation, records: Sequence[report.Record], found: Sequence[report.Line], argv: Sequence[str] | None
) -> str:
    parts = [
        "# The ablation of Fig. 11 on the emulated cluster",
        launch.command_line(["./scripts/bench_emulated.sh"], argv),
        *EXPLANATION,
        "```\n" + launch.point(experiment).text() + "\n```",
    ]
    for at, nics in enumerate(experiment.nics):
        of_topology = [line for line in found if line.nics == nics]
        title = f"## {nics} NICs a node: {experiment.batches[at]} batches of each data set, {experiment.repeats} times"
        parts += [title, report.markdown(of_topology)]
    apart = 100 * report.counted_against_plan(records)
    parts.append(report.disturbance(records))
    parts.append(
        f"Bytes of a NIC as the kernel counted them, less headers, and as planned: {apart:.1f} % of the busiest NIC's "
        "apart at most, over "
        "the steps in which that one carries a megabyte or more (below, headers and barriers are most of it)."
    )
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    sys.exit(main())
