"""Microbatches in pipelines: measured steps to a table, and the simulator's beside them, of the
trained pipelines and of WLB-LLM's 7B-128K on H100s.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, product

import numpy as np

from megatron_balance.config import load_cluster, load_model
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.cost.base import Floats
from megatron_balance.cost.parallel import stage_transfer_s
from megatron_balance.planners.wlb_llm import workload
from megatron_balance.simulator import pipeline
from megatron_balance.simulator.machine import Machine
from megatron_balance.simulator.pipeline import ChunkPass, PipelineClocks
from megatron_balance.simulator.setup import Setup
from megatron_balance.simulator.step import simulate_step
from megatron_balance.workloads.lengths import Lengths
from tools.bench.emulated.experiments import PAPER_CONTEXT, Dealt, Microbatches, dealt
from tools.bench.emulated.point import ROUND_PAIRS, Point
from tools.bench.emulated.report import Record, measured, net_step_s

PAPER_RANKS = 8
"""Of a stage on the simulated cluster: a node, one tensor-parallel rank each."""
CHUNKS = (1, 2)
"""Of the model on a stage, where simulated."""
Times = Callable[[int, int], tuple[float, float]]
"""(way, batch) -> seconds of the step, bubble over work."""


@dataclass(frozen=True, slots=True)
class Line:
    """One way to make microbatches, in pipelines of one depth.

    Seconds and shares: means over batches, of medians over repeats if measured. `ratio`: steps of
    the first way over this one's, `low` and `high` of one batch. `bubble_share`: idle time over work
    of all ranks. `imbalance`: work of the heaviest microbatch over the mean; `uneven`: the same of
    pipelines. `shortest`, `longest`: microbatches in tokens; `fewest`, `most`: of a pipeline.
    """

    pipeline: str
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


HEADINGS = (
    *("pipeline", "microbatches", "step s", "ratio", "of a batch", "bubble", "work max/mean"),
    *("of pipelines", "tokens of a microbatch", "microbatches of a pipeline"),
)


def rows(lines: Sequence[Line]) -> list[list[str]]:
    """Cells of a table, by line."""
    return [
        [
            *(line.pipeline, line.variant, f"{line.step_s:.2f}", f"{line.ratio:.2f}"),
            *(f"{line.low:.2f}-{line.high:.2f}", f"{100 * line.bubble_share:.0f} %", f"{line.imbalance:.2f}"),
            *(f"{line.uneven:.2f}", f"{line.shortest:,}-{line.longest:,}", f"{line.fewest}-{line.most}"),
        ]
        for line in lines
    ]


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
    table: list[list[float]] = []
    seconds: list[float] = []
    for record in measured(records):
        ranks, dealt_to = record["ranks"], _dealt_of(record)
        of_stage = len(ranks) // record["stages"]
        for number, rank in enumerate(ranks):
            own = dealt_to[number % of_stage * len(dealt_to) // of_stage]
            lengths = list(chain.from_iterable(own))
            pairs = sum(length * (length + 1) / 2 for length in lengths)
            table.append([pairs, sum(lengths), len(own), number >= len(ranks) - of_stage])
            seconds.append(rank["model_s"] - rank["between_s"])
    return float(np.linalg.lstsq(np.array(table, dtype=np.float64), np.array(seconds), rcond=None)[0][2])


def _dealt_of(record: Record) -> Dealt:
    return tuple(tuple(tuple(each) for each in own) for own in record["dealt"])


def small_lines(records: Sequence[Record], experiment: Microbatches, point: Point) -> list[Line]:
    """By depth, every way on the emulated cluster, measured, then simulated."""
    found: list[Line] = []
    for stages in experiment.stages:
        machine = experiment.machine(point, stages)
        by_step: dict[tuple[int, int], list[Record]] = {}
        for record in (each for each in measured(records) if each["stages"] == stages):
            by_step.setdefault((record["variant_id"], record["batch"]), []).append(record)
        ways = range(len(experiment.variants))
        steps = [[_dealt_of(by_step[way, batch][0]) for batch in range(experiment.batches)] for way in ways]

        def timed(way: int, batch: int, by_step: dict[tuple[int, int], list[Record]] = by_step) -> tuple[float, float]:
            same = by_step[way, batch]
            return statistics.median(map(net_step_s, same)), statistics.median(map(bubble_share, same))

        def clocked(
            way: int, batch: int, machine: Machine = machine, stages: int = stages, steps: list[list[Dealt]] = steps
        ) -> tuple[float, float]:
            clocks = small_step(steps[way][batch], point, machine, stages)
            return clocks.total_s, clocks.bubble_share

        beside = f" x DP {experiment.replicas}" if experiment.replicas > 1 else ""
        found += _lines(f"PP {stages}{beside}, measured", (experiment, machine), steps, timed)
        found += _lines(f"PP {stages}{beside}, simulated", (experiment, machine), steps, clocked)
    return found


def large_lines(experiment: Microbatches, count: int) -> list[Line]:
    """By depth, every way by the simulator on a large cluster, `count` batches; none of replicas,
    which `compare` has.
    """
    if experiment.replicas > 1:
        return []
    # one pipeline stage
    cluster, model = dataclasses.replace(load_cluster("h100").build(), num_ranks=PAPER_RANKS), load_model("llama-7b")
    machine = Machine(cluster, model, AnalyticCost(cluster, model))
    drawn, found = experiment.drawn(count), list[Line]()
    planned = [[experiment.planned(each, way, machine, PAPER_CONTEXT) for each in drawn] for way in experiment.variants]
    steps = [[dealt(plan) for plan in plans] for plans in planned]
    for stages, chunks in product(experiment.stages, CHUNKS):
        setup = Setup(pipeline=stages, interleave=chunks)

        def times(way: int, batch: int, setup: Setup = setup) -> tuple[float, float]:
            step = simulate_step(planned[way][batch].plans, machine, setup)
            assert step.bubble_share is not None
            return step.step_s - step.phases_s["gradient_sync"] - step.phases_s["optimizer"], step.bubble_share

        beside = f" x {chunks} chunks" if chunks > 1 else ""
        found += _lines(f"PP {stages}{beside}, simulated", (experiment, machine), steps, times)
    return found


def _lines(name: str, of: tuple[Microbatches, Machine], steps: Sequence[Sequence[Dealt]], times: Times) -> list[Line]:
    experiment, machine = of
    found: list[Line] = []
    base: list[float] = []
    work = workload(machine.cost, machine.cluster)
    for at, (way, of_batches) in enumerate(zip(experiment.variants, steps, strict=True)):
        seconds, bubbles = zip(*(times(at, batch) for batch in range(len(of_batches))), strict=True)
        base = base or list(seconds)
        ratios = [b / s for b, s in zip(base, seconds, strict=True)]
        works = [[[sum(map(work, each)) for each in own] for own in step] for step in of_batches]
        tokens = [sum(each) for step in of_batches for own in step for each in own]
        counts = [len(own) for step in of_batches for own in step]
        found.append(
            Line(
                pipeline=name,
                variant=way.name,
                step_s=statistics.fmean(seconds),
                ratio=sum(base) / sum(seconds),
                low=min(ratios),
                high=max(ratios),
                bubble_share=statistics.fmean(bubbles),
                imbalance=statistics.fmean(_over_mean(list(chain.from_iterable(step))) for step in works),
                uneven=statistics.fmean(_over_mean(list(map(sum, step))) for step in works),
                shortest=min(tokens),
                longest=max(tokens),
                fewest=min(counts),
                most=max(counts),
            )
        )
    return found


def _over_mean(each: Sequence[float]) -> float:
    return max(each) * len(each) / sum(each)


def small_s(lengths: Lengths, point: Point, machine: Machine, *, backward: bool) -> float:
    """Seconds of a microbatch in one layer on each rank of a stage, by the kernels as calibrated.

    Pairs of attention, and products of the modules outside, evenly over the ranks; a CPU pads no
    tiles.
    """
    kernels, model = point.kernels, machine.model
    pairs = sum(length * (length + 1) / 2 for length in lengths)
    attention_s = pairs / ROUND_PAIRS * (kernels.backward_s if backward else kernels.forward_s)
    weights = 4 * model.hidden_size**2 + 3 * model.hidden_size * model.ffn_size
    linear_s = 2.0 * weights * sum(lengths) / kernels.linear_flops_per_s
    return (attention_s + (2 if backward else 1) * linear_s) / machine.num_ranks


def small_step(step: Dealt, point: Point, machine: Machine, stages: int) -> PipelineClocks:
    """The trained step on the simulator's clocks of pipelines, `small_s` for each pass; stages of
    all pipelines one after the other.

    One border between stages lies between the two nodes; a transfer takes the mean over borders.
    """
    clocks = [_pipeline(own or ((),), point, machine, stages) for own in step]
    done, busy = (
        tuple(chain.from_iterable(each)) for each in zip(*((c.done_s, c.busy_s) for c in clocks), strict=True)
    )
    return PipelineClocks(done, busy)


def _pipeline(microbatches: Sequence[Lengths], point: Point, machine: Machine, stages: int) -> PipelineClocks:
    layers = machine.model.num_layers // stages

    def each(_stage: int, one: ChunkPass, ready: Floats) -> Floats:
        return ready + layers * small_s(microbatches[one.microbatch], point, machine, backward=one.backward)

    def transfer(microbatch: int) -> Floats:
        tokens = sum(microbatches[microbatch]) / machine.num_ranks
        links = [machine.inter, *[machine.intra] * (stages - 2)]
        return np.full(1, np.mean([stage_transfer_s(machine.model, tokens, link) for link in links]))

    return pipeline.run(stages, len(microbatches), 1, 1, each, transfer)
