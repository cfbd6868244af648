"""One layer's attention under the timeline, with batches issued as they were and as they are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.ir.batch import Batch
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import REMAP, MicrobatchPlan, Routing
from megatron_balance.planners import PLANNERS
from tools.gpu_model.record import Way, record
from tools.gpu_model.timeline import Machine, Timeline, play

MODEL = Model(num_heads=32, num_kv_heads=8, head_dim=128, hidden_size=4096, ffn_size=14336)
CLUSTER = Cluster(num_ranks=8, ranks_per_node=4)
LENGTHS = (24576, 12000, 9000, 6000, 5000, 3500, 2500, 1500, 1000, 460)
"""8 ranks of 8k tokens, most of them in few documents."""
SCALE = 8
"""Recorded with documents so much shorter, and attention and host as much slower: then every time is
a SCALE-th of that of `LENGTHS`, which would take minutes to record."""
BEFORE = ("inter_node",)
"""Streams that had high priority."""


@dataclass(frozen=True)
class Compared:
    """One planner's layer, forward and backward, of the rank that ends last.

    Attributes:
        planner: its name.
        queues: of the machine.
        before_s: every batch issued with its exchange, only transfers between nodes at high priority.
        legs_s: later legs behind launches, priorities as before.
        after_s: both as they are.
    """

    planner: str
    queues: str
    before_s: float
    legs_s: float
    after_s: float


def planned(name: str) -> MicrobatchPlan:
    """A planner's plan of `LENGTHS`, routed where that can be."""
    lengths = tuple(length // SCALE for length in LENGTHS)
    options = PLANNERS[name].options(tokens_per_rank=sum(lengths) // CLUSTER.num_ranks + 512 // SCALE)
    place = PLANNERS[name].plan
    assert place is not None, "a planner of whole steps"
    scaled = replace(CLUSTER, flops_per_s=CLUSTER.flops_per_s / SCALE)
    plan = place(Batch(lengths), scaled, MODEL, AnalyticCost(scaled, MODEL), options)
    return replace(plan, routing=Routing(1, (REMAP, *range(len(plan.zones)))))


def compare(name: str) -> Iterator[Compared]:
    """Times of a plan under one queue, then under a queue a stream."""
    plan, way = planned(name), Way("keep", num_layers=1, head_dim=MODEL.head_dim)
    eager, now = (
        [record([plan], rank, way, eager=at_once) for rank in range(plan.num_ranks)] for at_once in (True, False)
    )
    for queues in ("one", "one a stream"):
        machine = Machine(
            CLUSTER.ranks_per_node, queues, pairs_per_s=Machine.pairs_per_s / SCALE, launch_s=Machine.launch_s / SCALE
        )
        old = replace(machine, high=BEFORE)
        ends: list[Timeline] = [play(eager, old), play(now, old), play(now, machine)]
        yield Compared(name, queues, *(SCALE * timeline.end_s for timeline in ends))
