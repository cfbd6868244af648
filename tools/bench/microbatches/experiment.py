"""The experiment: documents of each step, Megatron's flags, the machine as the simulator has it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Any

from megatron_balance.config import ClusterChoice, load_cluster
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.ir.batch import Batch
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.model import Model
from megatron_balance.planning.choice import choose_planner
from megatron_balance.planning.layers import Layers
from megatron_balance.simulator.machine import Machine
from megatron_balance.simulator.setup import Setup
from megatron_balance.simulator.step import Step, simulate_step
from megatron_balance.workloads.lengths import Lengths, draw
from tools.bench.emulated.batches import scaled
from tools.bench.emulated.point import BYTES_PER_ELEMENT, HEAD_DIM, HEADS, NUM_RANKS, RANKS_PER_NODE, Point
from tools.bench.emulated.steps import Experiment, Planned, interleaved
from tools.bench.emulated.variants import Variant
from tools.bench.microbatches.dealing import Work, equal_length, equal_work, work_of

PAPER_CONTEXT = 128 * 1024
"""WLB-LLM's 7B-128K: tokens of a sample."""
SCALE = 64
CONTEXT = PAPER_CONTEXT // SCALE
FFN_SIZE = 64
"""So small that linear modules take no larger a part of a full context than in the 7B model: hidden
size 128 is a 32nd of its 4096, 2k tokens are a 64th of 128k.
"""
NICS = 4
PLANNER = "te_ring"
"""Cuts every document evenly over a stage's ranks, so that only microbatches differ."""

VARIANTS = tuple(Variant(name, PLANNER, Layers()) for name in ("equal length", "equal work"))
LENGTH, WORK = range(2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatches(Experiment):
    """Both ways to deal, in pipelines of several depths."""

    stages: tuple[int, ...]
    """Pipeline stages, by training."""
    dataset: str
    batches: int
    """Global batches, each a step's."""
    microbatches: int
    """Of a step."""
    room: float
    """Most tokens of a microbatch, over the mean."""

    def drawn(self, count: int, scale: int = 1) -> list[Lengths]:
        """Global batches in which each context is full, its last document cut."""
        contexts = draw(self.dataset, PAPER_CONTEXT, count * self.microbatches, self.seed)
        cut = [scaled(each, scale) for each in contexts]
        return [tuple(chain(*cut[at : at + self.microbatches])) for at in range(0, len(cut), self.microbatches)]

    def steps(self, stages: int) -> tuple[Planned, ...]:
        """The steps of one training."""
        return interleaved({f"PP {stages}": self.drawn(self.batches, SCALE)}, range(len(VARIANTS)), self.repeats)

    def dealt(self, lengths: Lengths, variant: int, work: Work, context: int = CONTEXT) -> list[Lengths]:
        """The microbatches of a step."""
        if variant == LENGTH:
            return equal_length(lengths, context)
        return equal_work(lengths, self.microbatches, int(self.room * context), work)

    def flags(self, stages: int) -> dict[str, Any]:
        """Of Megatron."""
        room = int(self.room * CONTEXT)
        return {
            "pipeline-model-parallel-size": stages,
            "context-parallel-size": NUM_RANKS // stages,
            "ffn-hidden-size": FFN_SIZE,
            "seq-length": room,
            "max-position-embeddings": room,
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


def simulated(microbatches: list[Lengths], machine: Machine, stages: int) -> Step:
    """A step of these microbatches, in Megatron's 1F1B."""
    planner = choose_planner(PLANNER, {}, PLANNER, Layers())
    plans = [planner.plan(Batch(each), machine.cluster, machine.model, machine.cost) for each in microbatches]
    return simulate_step(plans, machine, Setup(pipeline=stages))


def work_on(machine: Machine) -> Work:
    """Of documents on this machine."""
    return work_of(machine.cost)
