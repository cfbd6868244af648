"""Microbatches of equal length (packed as documents come) against microbatches of equal work, and so
of different lengths (WLB-LLM, section 4.1), through Megatron's 1F1B with 2 and 4 pipeline stages.

With `--replicas` every data-parallel replica is a pipeline: full microbatches dealt in turn (planner
megatron) against each replica's own (planner hydraulis), for example `--stages 2 --replicas 4`.

First the simulator, at the size of WLB-LLM's 7B-128K on H100s. Then Megatron's pretrain loop on an
emulated cluster, the same batches every way in turn, and beside it the simulator's clocks of the
same pipelines, with the kernels' speed as it was calibrated.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Sequence

from rich.console import Console

from megatron_balance.config import load_cluster, load_model
from megatron_balance.simulator.machine import Machine
from tools.bench.distca.pipeline.report import markdown
from tools.bench.emulated import launch
from tools.bench.emulated.point import NUM_RANKS
from tools.bench.emulated.report import check
from tools.bench.microbatches import report
from tools.bench.microbatches.experiment import (
    CONTEXT,
    FFN_SIZE,
    NICS,
    PAPER_CONTEXT,
    SHORTEST,
    Microbatches,
    machine_of,
)

SHARE = 0.1
"""Of a core, for each rank's computation: eight ranks leave most of two cores to transfers."""
NIC_MBIT = 100.0
"""The fastest that emulated NICs keep (docs/emulated-cluster.md): hidden states cross in a small part
of the time of a pass.
"""
PAPER_RANKS = 8
"""Of a stage on the simulated cluster: a node, one tensor-parallel rank each."""
OF_REPLICAS = (
    "The same documents both ways, a step's in turn; every replica is a pipeline. megatron: full microbatches by first "
    "fit decreasing, dealt to the replicas in turn. hydraulis: sequences dealt by seconds, each replica its own "
    "microbatches of at most as many tokens. Step: without the reduction of gradients and the optimizer; means over "
    "batches, of medians over repeats where measured. Ratio: to megatron. Bubble: idle time over work, all ranks: "
    "waiting for neighbouring stages and for the slowest replica. Losses and gradient norms of a batch are equal to "
    "1e-5."
)
EXPLANATION = (
    "The same documents every way, a step's in turn; every document is cut evenly over the ranks of a stage "
    "(te_ring), so only microbatches differ. Equal length: as dealt, a context each, the last document cut (planner "
    "wlb_llm, packing: original). Equal work: packing: workload, within the step's documents, none delayed. Rise and "
    "fall: the same microbatches, the least work first and last (order: rise_and_fall). Step: without the reduction "
    "of gradients and the optimizer; means over batches, of medians over repeats where measured. Ratio: to equal "
    "length. Bubble: idle time over work, all ranks: waiting for neighbouring stages, transfers, and the end. Losses "
    "and gradient norms of a batch are equal to 1e-5."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0; 1 if losses differ or a rank failed; 77 where namespaces are not permitted."""
    parser = _parser()
    options = parser.parse_args(argv)
    if any(NUM_RANKS % (stages * options.replicas) for stages in options.stages):
        parser.error(f"--stages times --replicas: expected divisors of the {NUM_RANKS} ranks")
    keys = {name: value for name, value in vars(options).items() if name not in ("json", "simulated")}
    experiment = Microbatches(**{**keys, "out": str(options.out.resolve()), "stages": tuple(options.stages)})
    start = time.monotonic()
    # with --json standard output is JSON alone
    console = Console(stderr=options.json, width=max(150, Console().width))
    at_scale = report.large_lines(experiment, _paper_machine(), options.simulated)
    if at_scale:
        console.print(launch.table(report.HEADINGS, report.rows(at_scale), title=_at_scale_text(options.simulated)))
    if not launch.able():
        return launch.SKIPPED

    def describe() -> None:
        console.print(_point_text(experiment), highlight=False)

    num_steps = sum(len(experiment.steps(stages)) for stages in experiment.stages)
    if not launch.run("tools.bench.microbatches.job", experiment, num_steps, describe):
        return 1
    found, point = launch.records(experiment), launch.point(experiment)
    wrong = check(found)
    lines = report.small_lines(found, experiment, point)
    console.print(launch.table(report.HEADINGS, report.rows(lines)))
    fitted = f"A microbatch added {report.fitted_microbatch_s(found):.3f} s on a stage (least squares over all ranks)."
    console.print(fitted, highlight=False)
    body = launch.body(experiment, time.monotonic() - start, [*at_scale, *lines], report.brief)
    command = launch.command_line(["python", "-m", "tools.bench.microbatches"], argv)
    text = [command, OF_REPLICAS if experiment.replicas > 1 else EXPLANATION]
    for title, each in ((_at_scale_text(options.simulated), at_scale), (_point_text(experiment), lines)):
        text += [title, markdown(report.HEADINGS, report.rows(each), 2)] if each else []
    text.append(fitted)
    launch.write(experiment.folder, "microbatches", body, "\n\n".join(text) + "\n", wrong)
    return launch.exit_code(body, wrong, as_json=options.json)


def _parser() -> argparse.ArgumentParser:
    name = "python -m tools.bench.microbatches"
    parser = launch.parser(name, __doc__, layers=4, backward="keep", share=SHARE, out="bench-microbatches")
    parser.set_defaults(nic_mbit=NIC_MBIT)
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 4], help="pipeline stages (default 2 4)")
    parser.add_argument("--dataset", default="wlb-skew", help="of document lengths (default wlb-skew)")
    parser.add_argument("--batches", type=int, default=2, help="trained, each a step's (default 2)")
    parser.add_argument("--microbatches", type=int, default=8, help="of a step (default 8)")
    parser.add_argument(
        "--room", type=float, default=2.0, help="most tokens of a microbatch over a context's (default 2)"
    )
    parser.add_argument(
        "--replicas", type=int, default=1, help="data-parallel replicas, each a pipeline (default 1: one pool)"
    )
    parser.add_argument(
        "--microbatch-s",
        type=float,
        default=0.0,
        help="seconds a microbatch adds on a stage, as planner hydraulis is told (default 0; a run prints a fit)",
    )
    parser.add_argument("--simulated", type=int, default=10, help="batches of the large cluster (default 10)")
    return parser


def _paper_machine() -> Machine:
    """One pipeline stage of the simulated cluster."""
    cluster = dataclasses.replace(load_cluster("h100").build(), num_ranks=PAPER_RANKS)
    return machine_of(cluster, load_model("llama-7b"))


def _at_scale_text(batches: int) -> str:
    return (
        f"Simulated: 7B, contexts of {PAPER_CONTEXT:,} tokens, stages of {PAPER_RANKS} H100s (configs/cluster/h100), "
        f"{batches} batches."
    )


def _point_text(experiment: Microbatches) -> str:
    point = launch.point(experiment)
    share = "as it comes" if point.kernels.share is None else f"at {100 * point.kernels.share:.0f} % of a core"
    return (
        f"Emulated: 2 nodes x 4 ranks, {NICS} NICs a node of {point.nic_bits_per_s / 1e6:.0f} Mbit/s; each computes "
        f"{share}. GPT of {experiment.layers} layers, hidden size 128, MLP {FFN_SIZE}, contexts of {CONTEXT:,} tokens, "
        f"documents of {SHORTEST} and more; {experiment.microbatches} microbatches a step, {experiment.batches} "
        f"batches of '{experiment.dataset}', {len(experiment.ways)} ways, {experiment.repeats} repeats."
    )


if __name__ == "__main__":
    sys.exit(main())
