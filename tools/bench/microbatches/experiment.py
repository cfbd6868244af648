"""The experiment: documents of each step, Megatron's flags, the machine as the simulator has it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Any

from megatron_balance.config import ClusterChoice, load_cluster
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.model import Model
from megatron_balance.ir.step import StepPlan
from megatron_balance.planners.base import StepContext
from megatron_balance.planning.choice import PlannerChoice, choose_planner
from megatron_balance.planning.layers import Layers
from megatron_balance.simulator.machine import Machine
from megatron_balance.workloads.lengths import Lengths, draw
from tools.bench.distca.pipeline.experiment import cut
from tools.bench.emulated.batches import scaled
from tools.bench.emulated.point import BYTES_PER_ELEMENT, HEAD_DIM, HEADS, NUM_RANKS, RANKS_PER_NODE, Point
from tools.bench.emulated.steps import Experiment, Planned, interleaved

PAPER_CONTEXT = 128 * 1024
"""WLB-LLM's 7B-128K: tokens of a sample."""
SCALE = 64
CONTEXT = PAPER_CONTEXT // SCALE
FFN_SIZE = 64
"""So small that linear modules take no larger a part of a full context than in the 7B model: hidden
size 128 is a 32nd of its 4096, 2k tokens are a 64th of 128k.
"""
NICS = 4
WITHIN = "te_ring"
"""Cuts every document evenly over a stage's ranks, so that only microbatches differ."""

VARIANTS: dict[str, str] = {"equal length": "original", "equal work": "workload"}
"""Ways to make microbatches, by what wlb_llm calls its packing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatches(Experiment):
    """Both ways, in pipelines of several depths."""

    stages: tuple[int, ...]
    """Pipeline stages, by training."""
    dataset: str
    batches: int
    """Global batches, each a step's."""
    microbatches: int
    """Of a step."""
    room: float
    """Most tokens of a microbatch, over those of a context."""

    def drawn(self, count: int, scale: int = 1) -> list[Lengths]:
        """Global batches in which each context is full, its last document cut."""
        contexts = draw(self.dataset, PAPER_CONTEXT, count * self.microbatches, self.seed)
        small = [scaled(each, scale) for each in contexts]
        return [tuple(chain(*small[at : at + self.microbatches])) for at in range(0, len(small), self.microbatches)]

    def steps(self, stages: int) -> tuple[Planned, ...]:
        """The steps of one training."""
        return interleaved({f"PP {stages}": self.drawn(self.batches, SCALE)}, range(len(VARIANTS)), self.repeats)

    def choice(self, variant: int, **options: Any) -> PlannerChoice:
        """The planner of a variant, the `variant`-th of the table."""
        name, packing = list(VARIANTS.items())[variant]
        given = {"packing": packing, "slack": self.room, "within": WITHIN, **options}
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
            "context-parallel-size": NUM_RANKS // stages,
            "ffn-hidden-size": FFN_SIZE,
            "seq-length": CONTEXT,
            "max-position-embeddings": CONTEXT,
            "global-batch-size": self.microbatches,
        }


def emulated(point: Point, stages: int, num_layers: int) -> Machine:
    """One stage of the emulated cluster."""
    ranks = NUM_RANKS // stages
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


def machine_of(cluster: Cluster, model: Model) -> Machine:
    """A machine with data-sheet costs."""
    return Machine(cluster, model, AnalyticCost(cluster, model))
