"""The experiment: documents of each step, Megatron's flags, the machine as the simulator has it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from megatron_balance.config import ClusterChoice, load_cluster
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.cost.base import Floats
from megatron_balance.cost.parallel import stage_transfer_s
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.model import Model
from megatron_balance.ir.step import StepPlan
from megatron_balance.planners.base import StepContext
from megatron_balance.planning.choice import PlannerChoice, choose_planner
from megatron_balance.planning.layers import Layers
from megatron_balance.simulator import pipeline
from megatron_balance.simulator.machine import Machine
from megatron_balance.simulator.pipeline import ChunkPass, PipelineClocks
from megatron_balance.workloads.lengths import Lengths, draw
from tools.bench.distca.pipeline.experiment import cut
from tools.bench.emulated.point import BYTES_PER_ELEMENT, HEAD_DIM, HEADS, NUM_RANKS, RANKS_PER_NODE, ROUND_PAIRS, Point
from tools.bench.emulated.steps import Experiment, Planned, interleaved

PAPER_CONTEXT = 128 * 1024
"""WLB-LLM's 7B-128K: tokens of a sample."""
SCALE = 32
CONTEXT = PAPER_CONTEXT // SCALE
FFN_SIZE = 64
"""So small that linear modules take no larger a part of a full context than in the 7B model: hidden
size 128 is a 32nd of its 4096, 4k tokens are a 32nd of 128k.
"""
SHORTEST = 128
"""Tokens: a kernel on a CPU pays for each document, which the work of shorter ones would drown in."""
NICS = 4
WITHIN = "te_ring"
"""Cuts every document evenly over a stage's ranks, so that only microbatches differ."""

VARIANTS: dict[str, dict[str, str]] = {
    "equal length": {"packing": "original"},
    "equal work": {"packing": "workload"},
    "equal work, rise and fall": {"packing": "workload", "order": "rise_and_fall"},
}
"""Ways to make microbatches of one pool, by options of wlb_llm."""
REPLICAS: dict[str, dict[str, Any]] = {
    "megatron": {},
    "hydraulis": {"within": WITHIN},
}
"""Planners of replicas that are pipelines, with their options: full microbatches in turn; each replica
its own."""
Dealt = tuple[tuple[Lengths, ...], ...]
"""By pipeline, lengths of each of its microbatches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatches(Experiment):
    """Every way, in pipelines of several depths."""

    stages: tuple[int, ...]
    """Pipeline stages, by training."""
    dataset: str
    batches: int
    """Global batches, each a step's."""
    microbatches: int
    """Of a step."""
    room: float
    """Most tokens of a microbatch of one pool, over those of a context."""
    replicas: int
    """Pipelines side by side; 1: all ranks of a stage are one pool."""
    microbatch_s: float
    """Planner hydraulis is told that a microbatch adds so many seconds on a stage."""

    @property
    def ways(self) -> tuple[str, ...]:
        """Names of what is compared, the baseline first."""
        return tuple(VARIANTS if self.replicas == 1 else REPLICAS)

    def drawn(self, count: int) -> list[Lengths]:
        """Global batches in which each context is full, its last document cut."""
        return self._batches(draw(self.dataset, PAPER_CONTEXT, count * self.microbatches, self.seed))

    def drawn_small(self) -> list[Lengths]:
        """Those that are trained: documents of `SHORTEST` tokens and more, contexts of `CONTEXT`."""
        drawn = chain.from_iterable(draw(self.dataset, PAPER_CONTEXT, 16 * self.batches * self.microbatches, self.seed))
        long = (length // SCALE for length in drawn if length >= SCALE * SHORTEST)
        contexts: list[Lengths] = []
        for _ in range(self.batches * self.microbatches):
            context: list[int] = []
            while sum(context) < CONTEXT:
                context.append(min(next(long), CONTEXT - sum(context)))
            contexts.append(tuple(context))
        return self._batches(contexts)

    def _batches(self, contexts: Sequence[Lengths]) -> list[Lengths]:
        size = self.microbatches
        return [tuple(chain(*contexts[at : at + size])) for at in range(0, len(contexts), size)]

    def steps(self, stages: int) -> tuple[Planned, ...]:
        """The steps of one training."""
        return interleaved({f"PP {stages}": self.drawn_small()}, range(len(self.ways)), self.repeats)

    def choice(self, variant: int, **options: Any) -> PlannerChoice:
        """The planner of a way, the `variant`-th of `ways`."""
        if self.replicas > 1:
            planner, given = list(REPLICAS.items())[variant]
            told = {"microbatch_s": self.microbatch_s} if planner == "hydraulis" else {}
            return choose_planner(planner, {**given, **told, **options}, planner, Layers())
        name, way = list(VARIANTS.items())[variant]
        given = {**way, "slack": self.room, "within": WITHIN, **options}
        return choose_planner("wlb_llm", given, name, Layers())

    def planned(self, lengths: Lengths, variant: int, machine: Machine, context: int) -> StepPlan:
        """The step of these documents, dealt in contexts of so many tokens."""
        choice = self.choice(variant, tokens_per_rank=int(self.room * context) // machine.num_ranks)
        asked = StepContext(machine.cluster, machine.model, machine.cost, may_carry=False)
        step, _ = choice.plan_step(tuple(cut(lengths, context)), asked)
        return step

    def flags(self, stages: int) -> dict[str, Any]:
        """Of Megatron."""
        return {
            "pipeline-model-parallel-size": stages,
            "context-parallel-size": NUM_RANKS // stages // self.replicas,
            "ffn-hidden-size": FFN_SIZE,
            "seq-length": CONTEXT,
            "max-position-embeddings": CONTEXT,
            "global-batch-size": self.microbatches,
        }


def emulated(point: Point, stages: int, num_layers: int, replicas: int = 1) -> Machine:
    """One stage of one pipeline of the emulated cluster."""
    ranks = NUM_RANKS // stages // replicas
    keys = {name: value for name, value in point.cluster(NICS).items() if name != "base"}
    keys |= {"num_ranks": ranks, "ranks_per_node": min(ranks, RANKS_PER_NODE)}
    model = Model(
        num_heads=HEADS,
        num_kv_heads=HEADS,
        head_dim=HEAD_DIM,
        num_layers=num_layers,
        hidden_size=HEADS * HEAD_DIM,
        ffn_size=FFN_SIZE,
        gated_ffn=True,
        name="bench",
        bytes_per_element=BYTES_PER_ELEMENT,
        vocab_size=256,
    )
    return machine_of(ClusterChoice({**load_cluster("emulated").given, **keys}).build(), model)


def dealt(step: StepPlan) -> Dealt:
    """Lengths of the microbatches of a step, nano-batches not split."""
    return tuple(tuple(step.plans[at].lengths for at in own) for own in step.pipelines)


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


def machine_of(cluster: Cluster, model: Model) -> Machine:
    """A machine with data-sheet costs."""
    return Machine(cluster, model, AnalyticCost(cluster, model))
