"""From records of steps, and from simulated ones, to tables of step time and bubble."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, product

import numpy as np

from megatron_balance.planners.wlb_llm.packing import workload
from megatron_balance.simulator.machine import Machine
from megatron_balance.simulator.setup import Setup
from megatron_balance.simulator.step import simulate_step
from tools.bench.emulated.point import Point
from tools.bench.emulated.report import Record, net_step_s
from tools.bench.emulated.steps import WARM_UP
from tools.bench.microbatches.experiment import PAPER_CONTEXT, Dealt, Microbatches, dealt, emulated, small_step

CHUNKS = (1, 2)
"""Of the model on a stage, where simulated."""
Times = Callable[[int, int], tuple[float, float]]
"""(way, batch) -> seconds of the step, bubble over work."""


@dataclass(frozen=True, slots=True)
class Line:
    """One way to make microbatches, in pipelines of one depth.

    Seconds and shares: means over batches, of medians over repeats if measured.
    `kind`: "measured" or "simulated". `chunks`: of the model on a stage; more than 1 are
    interleaved. `ratio`: steps of equal length over this one's, `low` and `high` of one batch.
    `bubble_share`: idle time over work of all ranks. `imbalance`: work of the heaviest microbatch
    over the mean; `uneven`: the same of pipelines. `shortest`, `longest`: microbatches in tokens.
    `fewest`, `most`: microbatches of a pipeline.
    """

    kind: str
    stages: int
    replicas: int
    chunks: int
    variant: str
    step_s: float
    ratio: float
    low: float
    high: float
    bubble_share: float
    imbalance: float
    uneven: float
    shortest: int
    longest: int
    fewest: int
    most: int


def bubble_share(record: Record) -> float:
    """Measured idle time over work: transfers between stages, and the end, until the last rank is
    done.
    """
    last_s = max(rank["model_s"] for rank in record["ranks"])
    work_s = sum(rank["model_s"] - rank["between_s"] for rank in record["ranks"])
    return last_s * len(record["ranks"]) / work_s - 1


def fitted_microbatch_s(records: Sequence[Record]) -> float:
    """Seconds that a microbatch adds on a stage: measured seconds of each rank without its waiting
    between stages, by least squares over (query, key) pairs, tokens, microbatches, and being the last
    stage. Warm-ups are left out.
    """
    rows: list[list[float]] = []
    seconds: list[float] = []
    for record in records:
        if record["repeat"] == WARM_UP:
            continue
        ranks, dealt_to = record["ranks"], _dealt_of(record)
        of_stage = len(ranks) // record["stages"]
        for number, rank in enumerate(ranks):
            own = dealt_to[number % of_stage * len(dealt_to) // of_stage]
            lengths = list(chain.from_iterable(own))
            pairs = sum(length * (length + 1) / 2 for length in lengths)
            rows.append([pairs, sum(lengths), len(own), number >= len(ranks) - of_stage])
            seconds.append(rank["model_s"] - rank["between_s"])
    return float(np.linalg.lstsq(np.array(rows, dtype=np.float64), np.array(seconds), rcond=None)[0][2])


def small_lines(records: Sequence[Record], experiment: Microbatches, point: Point) -> list[Line]:
    """By depth, every way on the emulated cluster, measured, then simulated."""
    kept = [record for record in records if record["repeat"] != WARM_UP]
    found: list[Line] = []
    for stages in experiment.stages:
        machine = emulated(point, stages, experiment.layers, experiment.replicas)
        by_step: dict[tuple[int, int], list[Record]] = {}
        for record in kept:
            if record["stages"] == stages:
                by_step.setdefault((record["variant_id"], record["batch"]), []).append(record)
        steps = [
            [_dealt_of(by_step[way, batch][0]) for batch in range(experiment.batches)]
            for way in range(len(experiment.ways))
        ]

        def measured(
            way: int, batch: int, by_step: dict[tuple[int, int], list[Record]] = by_step
        ) -> tuple[float, float]:
            same = by_step[way, batch]
            return statistics.median(map(net_step_s, same)), statistics.median(map(bubble_share, same))

        def clocked(
            way: int, batch: int, machine: Machine = machine, stages: int = stages, steps: list[list[Dealt]] = steps
        ) -> tuple[float, float]:
            clocks = small_step(steps[way][batch], point, machine, stages)
            return clocks.total_s, clocks.bubble_share

        depth = experiment, stages, machine
        found += _lines("measured", depth, steps, measured)
        found += _lines("simulated", depth, steps, clocked)
    return found


def _dealt_of(record: Record) -> Dealt:
    return tuple(tuple(tuple(each) for each in own) for own in record["dealt"])


def large_lines(experiment: Microbatches, machine: Machine, count: int) -> list[Line]:
    """By depth, every way by the simulator on a large cluster; none of replicas, which `compare` has.

    `machine`: of a stage.
    """
    if experiment.replicas > 1:
        return []
    found: list[Line] = []
    drawn = experiment.drawn(count)
    planned = [
        [experiment.planned(each, at, machine, PAPER_CONTEXT) for each in drawn] for at in range(len(experiment.ways))
    ]
    steps = [[dealt(plan) for plan in plans] for plans in planned]
    for stages, chunks in product(experiment.stages, CHUNKS):
        setup = Setup(pipeline=stages, interleave=chunks)

        def times(way: int, batch: int, setup: Setup = setup) -> tuple[float, float]:
            step = simulate_step(planned[way][batch].plans, machine, setup)
            assert step.bubble_share is not None
            return step.step_s - step.phases_s["gradient_sync"] - step.phases_s["optimizer"], step.bubble_share

        found += _lines("simulated", (experiment, stages, machine), steps, times, chunks)
    return found


def _lines(
    kind: str,
    depth: tuple[Microbatches, int, Machine],
    steps: Sequence[Sequence[Dealt]],
    times: Times,
    chunks: int = 1,
) -> list[Line]:
    experiment, stages, machine = depth
    found: list[Line] = []
    base: list[float] = []
    work = workload(machine.cost, machine.cluster)
    for at, (way, of_batches) in enumerate(zip(experiment.ways, steps, strict=True)):
        seconds, bubbles = zip(*(times(at, batch) for batch in range(len(of_batches))), strict=True)
        base = base or list(seconds)
        ratios = [b / s for b, s in zip(base, seconds, strict=True)]
        works = [[[sum(map(work, each)) for each in own] for own in step] for step in of_batches]
        flat = [list(chain.from_iterable(step)) for step in works]
        own_works = [list(map(sum, step)) for step in works]
        tokens = [sum(each) for step in of_batches for own in step for each in own]
        counts = [len(own) for step in of_batches for own in step]
        found.append(
            Line(
                kind=kind,
                stages=stages,
                replicas=experiment.replicas,
                chunks=chunks,
                variant=way,
                step_s=statistics.fmean(seconds),
                ratio=sum(base) / sum(seconds),
                low=min(ratios),
                high=max(ratios),
                bubble_share=statistics.fmean(bubbles),
                imbalance=statistics.fmean(map(_over_mean, flat)),
                uneven=statistics.fmean(map(_over_mean, own_works)),
                shortest=min(tokens),
                longest=max(tokens),
                fewest=min(counts),
                most=max(counts),
            )
        )
    return found


def _over_mean(each: Sequence[float]) -> float:
    return max(each) * len(each) / sum(each)


HEADINGS = (
    *("pipeline", "microbatches", "step s", "ratio", "of a batch", "bubble", "work max/mean"),
    *("of pipelines", "tokens of a microbatch", "microbatches of a pipeline"),
)


def rows(lines: Sequence[Line]) -> list[list[str]]:
    """Cells of a table, by line."""
    return [
        [
            *(_pipeline(line), line.variant, f"{line.step_s:.2f}", f"{line.ratio:.2f}"),
            *(f"{line.low:.2f}-{line.high:.2f}", f"{100 * line.bubble_share:.0f} %", f"{line.imbalance:.2f}"),
            *(f"{line.uneven:.2f}", f"{line.shortest:,}-{line.longest:,}", f"{line.fewest}-{line.most}"),
        ]
        for line in lines
    ]


def _pipeline(line: Line) -> str:
    beside = f" x DP {line.replicas}" if line.replicas > 1 else f" x {line.chunks} chunks" if line.chunks > 1 else ""
    return f"PP {line.stages}{beside}, {line.kind}"


def brief(record: Record) -> Record:
    """A step without what each rank counted."""
    names = ("stages", "dataset", "batch", "repeat", "variant", "lengths", "dealt", "loss", "grad_norm")
    return {
        **{name: record[name] for name in names},
        "step_s": round(net_step_s(record), 4),
        "bubble_share": round(bubble_share(record), 4),
    }
