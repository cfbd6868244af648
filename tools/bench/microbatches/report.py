"""From records of steps, and from simulated ones, to tables of step time and bubble."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

from megatron_balance.ir.step import StepPlan
from megatron_balance.planners.wlb_llm.packing import workload
from megatron_balance.simulator.machine import Machine
from megatron_balance.simulator.setup import Setup
from megatron_balance.simulator.step import simulate_step
from megatron_balance.workloads.lengths import Lengths
from tools.bench.emulated.point import Point
from tools.bench.emulated.report import Record, net_step_s
from tools.bench.emulated.steps import WARM_UP
from tools.bench.microbatches.experiment import CONTEXT, PAPER_CONTEXT, VARIANTS, Microbatches, emulated, small_step

CHUNKS = (1, 2)
"""Of the model on a stage, where simulated."""
Times = Callable[[int, int, StepPlan], tuple[float, float]]
"""(variant, batch, its plan) -> seconds of the step, bubble over work."""


@dataclass(frozen=True, slots=True)
class Line:
    """One way to make microbatches, in one pipeline.

    Seconds and shares: means over batches, of medians over repeats if measured.
    `kind`: "measured" or "simulated". `chunks`: of the model on a stage; more than 1 are
    interleaved. `ratio`: steps of equal length over this one's, `low` and `high` of one batch.
    `bubble_share`: idle time over work of all ranks. `imbalance`: work of the heaviest microbatch
    over the mean. `shortest`, `longest`: microbatches in tokens.
    """

    kind: str
    stages: int
    chunks: int
    variant: str
    step_s: float
    ratio: float
    low: float
    high: float
    bubble_share: float
    imbalance: float
    shortest: int
    longest: int


def bubble_share(record: Record) -> float:
    """Measured idle time over work: transfers between stages, and the end, until the last rank is
    done.
    """
    last_s = max(rank["model_s"] for rank in record["ranks"])
    work_s = sum(rank["model_s"] - rank["between_s"] for rank in record["ranks"])
    return last_s * len(record["ranks"]) / work_s - 1


def small_lines(records: Sequence[Record], experiment: Microbatches, point: Point) -> list[Line]:
    """By depth, every way on the emulated cluster, measured, then simulated."""
    kept = [record for record in records if record["repeat"] != WARM_UP]
    found: list[Line] = []
    for stages in experiment.stages:

        def measured(variant: int, batch: int, _: StepPlan, stages: int = stages) -> tuple[float, float]:
            key = (stages, variant, batch)
            same = [r for r in kept if (r["stages"], r["variant_id"], r["batch"]) == key]
            return statistics.median(map(net_step_s, same)), statistics.median(map(bubble_share, same))

        machine = emulated(point, stages, experiment.layers)

        def clocked(
            _variant: int, _batch: int, plan: StepPlan, machine: Machine = machine, stages: int = stages
        ) -> tuple[float, float]:
            clocks = small_step(plan, point, machine, stages)
            return clocks.total_s, clocks.bubble_share

        planned = _planned(experiment, experiment.drawn_small(), machine, CONTEXT)
        found += _lines("measured", stages, planned, machine, measured)
        found += _lines("simulated", stages, planned, machine, clocked)
    return found


def large_lines(experiment: Microbatches, machine: Machine, count: int) -> list[Line]:
    """By depth, every way by the simulator on a large cluster. `machine`: of a stage."""
    found: list[Line] = []
    planned = _planned(experiment, experiment.drawn(count), machine, PAPER_CONTEXT)
    for stages, chunks in product(experiment.stages, CHUNKS):
        setup = Setup(pipeline=stages, interleave=chunks)

        def times(_variant: int, _batch: int, plan: StepPlan, setup: Setup = setup) -> tuple[float, float]:
            step = simulate_step(plan.plans, machine, setup)
            assert step.bubble_share is not None
            return step.step_s - step.phases_s["gradient_sync"] - step.phases_s["optimizer"], step.bubble_share

        found += _lines("simulated", stages, planned, machine, times, chunks)
    return found


def _planned(
    experiment: Microbatches, drawn: Sequence[Lengths], machine: Machine, context: int
) -> list[list[StepPlan]]:
    """By variant, the plans of all batches."""
    return [[experiment.planned(each, at, machine, context) for each in drawn] for at in range(len(VARIANTS))]


def _lines(
    kind: str, stages: int, planned: Sequence[Sequence[StepPlan]], machine: Machine, times: Times, chunks: int = 1
) -> list[Line]:
    found: list[Line] = []
    base: list[float] = []
    work = workload(machine.cost, machine.cluster)
    for at, (variant, plans) in enumerate(zip(VARIANTS, planned, strict=True)):
        seconds, bubbles = zip(*(times(at, batch, plan) for batch, plan in enumerate(plans)), strict=True)
        base = base or list(seconds)
        ratios = [b / s for b, s in zip(base, seconds, strict=True)]
        tokens = [each.num_tokens for plan in plans for each in plan.plans]
        works = [[sum(map(work, each.lengths)) for each in plan.plans] for plan in plans]
        found.append(
            Line(
                kind=kind,
                stages=stages,
                chunks=chunks,
                variant=variant,
                step_s=statistics.fmean(seconds),
                ratio=sum(base) / sum(seconds),
                low=min(ratios),
                high=max(ratios),
                bubble_share=statistics.fmean(bubbles),
                imbalance=statistics.fmean(max(each) * len(each) / sum(each) for each in works),
                shortest=min(tokens),
                longest=max(tokens),
            )
        )
    return found


HEADINGS = (
    *("pipeline", "microbatches", "step s", "ratio", "of a batch", "bubble", "work max/mean"),
    "tokens of a microbatch",
)


def rows(lines: Sequence[Line]) -> list[list[str]]:
    """Cells of a table, by line."""
    return [
        [
            *(_pipeline(line), line.variant, f"{line.step_s:.2f}", f"{line.ratio:.2f}"),
            *(f"{line.low:.2f}-{line.high:.2f}", f"{100 * line.bubble_share:.0f} %", f"{line.imbalance:.2f}"),
            f"{line.shortest:,}-{line.longest:,}",
        ]
        for line in lines
    ]


def _pipeline(line: Line) -> str:
    return f"PP {line.stages}{f' x {line.chunks} chunks' if line.chunks > 1 else ''}, {line.kind}"


def brief(record: Record) -> Record:
    """A step without what each rank counted."""
    names = ("stages", "dataset", "batch", "repeat", "variant", "lengths", "loss", "grad_norm")
    return {
        **{name: record[name] for name in names},
        "step_s": round(net_step_s(record), 4),
        "bubble_share": round(bubble_share(record), 4),
    }
