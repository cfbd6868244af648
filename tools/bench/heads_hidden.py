"""Time of zeppelin's transfers that shows, in microbatches whole and as two nano-batches: simulated.

python -m tools.bench.heads_hidden BATCHES.json [--batches 1] [--only h200/llama-7b]

Cases and batches as for `tools/bench/zeppelin_rules`. Each step is simulated twice, as it is and with
transfers that take no time; the difference over the bound (`simulator.bound`) is what shows. In two
nano-batches (ping-pong, docs/adr/0013) the exchanges of one stand beside the other's computation;
`one by one` runs the same two plans in turn.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from megatron_balance.config import load_cluster, load_model
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.ir.step import StepPlan
from megatron_balance.planners.base import StepContext
from megatron_balance.planning.choice import choose_planner
from megatron_balance.report.limits import without_transfers
from megatron_balance.simulator.bound import bound_s
from megatron_balance.simulator.machine import Machine
from megatron_balance.simulator.setup import Setup
from megatron_balance.simulator.training import simulate_planned
from tools.bench.zeppelin_rules import CASES, batches_of, case_parser

WHOLE, HALVES = "whole", "two nano-batches"
WAYS = {WHOLE: (False, True), "two nano-batches, one by one": (True, False), HALVES: (True, True)}
"""By label: whether microbatches run as two nano-batches, and whether these run interleaved."""


@dataclass(frozen=True, slots=True)
class Point:
    """A step over the bound, as it is and with transfers that take no time."""

    step: float
    free: float


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table for each cluster and model."""
    parser = case_parser(__doc__)
    parser.set_defaults(batches=1)
    options: argparse.Namespace = parser.parse_args(argv)
    document = json.loads(options.batches_file.read_text())
    for case in CASES:
        if options.only not in ("", "/".join(case[:2])):
            continue
        found: dict[str, list[Point]] = {label: [] for label in WAYS}
        for _, ranks, lengths in batches_of(document, options.batches, options.joined):
            if len(lengths) > 1:
                for label, point in _points(case, ranks, lengths).items():
                    found[label].append(point)
        print(f"\n{'/'.join(case[:2])}: means of {len(found[WHOLE])} batches of two sequences or more\n")
        print("| | step | transfers take no time | shows |\n|---|---:|---:|---:|")
        for label, points in found.items():
            step, free = fmean(point.step for point in points), fmean(point.free for point in points)
            print(f"| {label} | {step:.3f} | {free:.3f} | {step - free:.3f} |", flush=True)
        better = [min(*own, key=lambda point: point.step) for own in zip(found[WHOLE], found[HALVES], strict=True)]
        step, free = fmean(point.step for point in better), fmean(point.free for point in better)
        print(f"| the better of both for each batch | {step:.3f} | {free:.3f} | {step - free:.3f} |", flush=True)
    return 0


def _points(case: tuple[str, str, Any], ranks: int, lengths: Sequence[int]) -> dict[str, Point]:
    cluster = replace(load_cluster(case[0]).build(num_ranks=ranks), attention_kernel=case[2])
    model = load_model(case[1])
    machine = Machine(cluster, model, AnalyticCost(cluster, model))
    free, bound = without_transfers(machine, inside=True), bound_s((tuple(lengths),), machine)
    found: dict[str, Point] = {}
    for label, (ping_pong, interleaved) in WAYS.items():
        step, _ = choose_planner("zeppelin", {}).plan_step(
            (tuple(lengths),),
            StepContext(cluster, model, machine.cost, ping_pong=ping_pong, own_microbatches=False, may_carry=False),
        )
        setup = Setup(interleaved=interleaved)
        found[label] = Point(*(_step_s(step, each, setup) / bound for each in (machine, free)))
    return found


def _step_s(plan: StepPlan, machine: Machine, setup: Setup) -> float:
    """Forward and backward, without what no plan changes."""
    step = simulate_planned(plan, machine, machine, setup)
    return step.step_s - step.phases_s["gradient_sync"] - step.phases_s["optimizer"]


if __name__ == "__main__":
    raise SystemExit(main())
