"""Experiments on the emulated cluster.

An `Experiment` is a list of variants, the documents of every step, the rates of the links, and
Megatron's flags. There are four:

- `Ablation`: the bars of Zeppelin's Fig. 11, and other planners beside them (docs/operating-point.md);
- `PingPong`: two nano-batches of DistCA (section 4.1) against one stream, te_ring and zeppelin;
- `Joint`: pipeline stages that attend together (DistCA, section 4.1) against each for itself;
- `Microbatches`: microbatches of equal length against equal work (WLB-LLM, section 4.1) in
  pipelines, or replicas that are pipelines: planner megatron against planner hydraulis.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np

from megatron_balance.config import ClusterChoice, load_cluster
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.cost.base import Floats, Ints
from megatron_balance.ir.arrays import as_array
from megatron_balance.ir.batch import Batch
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import MicrobatchPlan, TaskTable
from megatron_balance.ir.step import StepPlan
from megatron_balance.patterns import dispatch
from megatron_balance.patterns.rows import messages_of
from megatron_balance.planners import PLANNERS
from megatron_balance.planners.base import StepContext
from megatron_balance.planning.choice import PlannerChoice, choose_planner
from megatron_balance.planning.layers import Layers
from megatron_balance.simulator.machine import Machine
from megatron_balance.simulator.ping_pong import linear_s
from megatron_balance.simulator.tables import Tables
from megatron_balance.solvers.packing import nano_batches
from megatron_balance.workloads.lengths import Lengths, draw
from tools.bench.emulated.point import (
    BYTES_PER_ELEMENT,
    DATASETS,
    FFN_SIZE,
    GOODPUT,
    HEAD_DIM,
    HEADS,
    NUM_RANKS,
    PAPER_TOKENS,
    RANKS_PER_NODE,
    SCALE,
    SHAPE,
    SHAPES,
    Kernels,
    Point,
    Shape,
    draw_batches,
)

WARM_UP = -1
NICS = 4
"""Of a node, where they are not varied."""
BASELINE = "te_ring"


@dataclass(frozen=True, slots=True)
class Variant:
    """A planner and the layers around it. `ping_pong`: microbatches run as two nano-batches,
    `interleaved` or one after the other; `joint`: pipeline stages attend together; `options`: the
    planner's, by name.
    """

    name: str
    planner: str
    layers: Layers
    ping_pong: bool = False
    interleaved: bool = True
    joint: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    def choice(self, **more: Any) -> PlannerChoice:
        """As a configuration would say it, with `more` options."""
        return choose_planner(self.planner, {**self.options, **more}, self.name, self.layers)


def usual(name: str, planner: str, **options: Any) -> Variant:
    """A planner with the layers that it has by default."""
    return Variant(name, planner, PLANNERS[planner].layers, options=options)


RINGS = {"rule": "groups", "group_size": 1}
ABLATION = (
    Variant(BASELINE, "te_ring", Layers()),
    Variant("te_ring + routing", "te_ring", Layers(routing="always")),
    usual("zeppelin, printed rule", "zeppelin", rule="paper"),
    Variant("zeppelin, rings", "zeppelin", Layers(), options=RINGS),
    Variant("zeppelin, rings + routing", "zeppelin", Layers(routing="pays"), options=RINGS),
    Variant("zeppelin, rings, remap always", "zeppelin", Layers(routing="pays", remap=True), options=RINGS),
    usual("zeppelin, rings of groups", "zeppelin", rule="groups"),
    usual("zeppelin", "zeppelin"),
    usual("auto", "auto"),
    usual("ulysses", "ulysses"),
    usual("flexsp", "flexsp"),
    Variant("llama_all_gather", "llama_all_gather", Layers()),
    # gloo gathers round one ring, over one NIC of a node; NCCL uses all of them, as this does.
    Variant("llama_all_gather + routing", "llama_all_gather", Layers(routing="always")),
)
QUICK = (0, 2, 4, 6, 7, 8)
"""Places of what a short run compares."""

DISTCA = PLANNERS["distca"].layers
ONE_BY_ONE, PING_PONG = "distca, nano-batches one by one", "distca, ping-pong"
TURNS = (
    Variant(BASELINE, "te_ring", Layers()),
    usual("zeppelin", "zeppelin"),
    usual("distca, whole batch", "distca"),
    Variant(ONE_BY_ONE, "distca", DISTCA, ping_pong=True, interleaved=False),
    Variant(PING_PONG, "distca", DISTCA, ping_pong=True),
)
APART, TOGETHER = "stages", "joint"
"""By what `pipeline:` says in a configuration."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A step to be run. `variant`: its place in the list; `repeat`: `WARM_UP`, or from 0."""

    dataset: str
    batch: int
    repeat: int
    variant: int
    lengths: Lengths


class Training(NamedTuple):
    """One job of an experiment. `nics`: of a node; `stages`: of the pipeline."""

    nics: int
    stages: int
    steps: tuple[Planned, ...]


def interleaved(drawn: Mapping[str, Sequence[Lengths]], variants: Sequence[int], repeats: int) -> tuple[Planned, ...]:
    """A warm-up of every variant, then every batch under all variants in turn, in an order that
    rotates. `drawn`: by data set.
    """
    first = next(iter(drawn))
    steps = [Planned(first, 0, WARM_UP, variant, drawn[first][0]) for variant in variants]
    num_batches = len(drawn[first])
    turns = ((repeat, batch, name) for repeat in range(repeats) for batch in range(num_batches) for name in drawn)
    for turn, (repeat, batch, name) in enumerate(turns):
        rotated = (variants[(at + turn) % len(variants)] for at in range(len(variants)))
        steps += [Planned(name, batch, repeat, variant, drawn[name][batch]) for variant in rotated]
    return tuple(steps)


def cut(lengths: Sequence[int], tokens: int) -> list[Lengths]:
    """Consecutive documents of so many tokens each; some document ends there."""
    parts: dict[int, list[int]] = {}
    for length, start in zip(lengths, accumulate(lengths, initial=0), strict=False):
        parts.setdefault(start // tokens, []).append(length)
    return [tuple(part) for part in parts.values()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """A run of a benchmark; text for the process that does it."""

    PIPELINED: ClassVar[bool] = False
    """Whether a step is several microbatches, in pipeline stages."""

    out: str
    repeats: int
    seed: int
    layers: int
    backward: str
    nic_mbit: float | None
    """Rate of a NIC; None: by the operating point."""
    calibration_s: float
    core_share: float
    """Share that each compute thread asks for; 0: ranks share the cores as they come."""

    @property
    def folder(self) -> Path:
        """Where logs and records go."""
        return Path(self.out)

    @property
    def cluster_shape(self) -> Shape:
        """Ranks, and the model that they train."""
        return SHAPE

    @property
    def variants(self) -> tuple[Variant, ...]:
        """Variants that are compared; the first one is the baseline."""
        raise NotImplementedError

    def trainings(self) -> tuple[Training, ...]:
        """The jobs, one after the other."""
        raise NotImplementedError

    def samples(self, step: Planned) -> list[Lengths]:
        """The documents of a step by sample."""
        return [step.lengths]

    def config(self) -> dict[str, Any]:
        """Keys of the configuration."""
        return {"planner": {"name": self.variants[0].planner}}

    def flags(self, stages: int) -> dict[str, Any]:
        """Of Megatron, in place of the usual ones."""
        del stages
        return {}

    def needed(self, kernels: Kernels) -> Point:
        """The rates of links that this experiment asks for."""
        return Point.of(kernels, self.cluster_shape)

    def point(self, kernels: Kernels) -> Point:
        """The operating point: rates as needed, or as given."""
        found = self.needed(kernels)
        return found if self.nic_mbit is None else replace(found, nic_bits_per_s=round(1e6 * self.nic_mbit))

    def text(self) -> str:
        """One line that `parse` reads back."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> Self:
        """The experiment that `text` was made from."""
        found: dict[str, Any] = json.loads(text)
        keys: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in found.items()}
        return cls(**keys)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ablation(Experiment):
    """Variants of the list, on several topologies."""

    nics: tuple[int, ...]
    """NICs of a node, by topology."""
    batches: tuple[int, ...]
    """Batches of each data set, by topology."""
    chosen: tuple[int, ...]
    """Places in `ABLATION`."""
    shape: str
    """Name in `SHAPES`."""

    @property
    def cluster_shape(self) -> Shape:
        return SHAPES[self.shape]

    @property
    def variants(self) -> tuple[Variant, ...]:
        return ABLATION

    def trainings(self) -> tuple[Training, ...]:
        def steps(count: int) -> tuple[Planned, ...]:
            drawn = {name: draw_batches(name, count, self.seed) for name in DATASETS}
            return interleaved(drawn, self.chosen, self.repeats)

        return tuple(Training(nics, 1, steps(count)) for nics, count in zip(self.nics, self.batches, strict=True))


CONTEXTS = 4
"""In a batch of DistCA's: documents are no longer than a quarter of it, two ranks' tokens."""
MARGIN = 50 / 41.3
"""Bandwidth there is over bandwidth needed (DistCA, Table 7, 8B on 8 nodes)."""
GROUPED = Shape(heads=4, head_dim=32)
GROUPED_FLAGS: dict[str, Any] = {
    "num-attention-heads": GROUPED.heads,
    "kv-channels": GROUPED.head_dim,
    "group-query-attention": True,
    "num-query-groups": 1,
}
"""DistCA's 8B model has four query heads for a key-value head (Table 2); as many elements as the other
experiments' two heads of 64."""


def grouped_model(num_layers: int) -> Model:
    """The model of DistCA's experiments, as planners and the simulator are told of it."""
    return model_of(num_layers, GROUPED.heads, 1, GROUPED.head_dim, FFN_SIZE)


def model_of(num_layers: int, heads: int, kv_heads: int, head_dim: int, ffn_size: int) -> Model:
    """A model that is trained here."""
    return Model(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        num_layers=num_layers,
        hidden_size=heads * head_dim,
        ffn_size=ffn_size,
        gated_ffn=True,
        name="bench",
        bytes_per_element=BYTES_PER_ELEMENT,
        vocab_size=256,
    )


def machine_at(point: Point, model: Model, **ranks: int) -> Machine:
    """The emulated cluster at this point, or what `ranks` say of it."""
    keys = {name: value for name, value in point.cluster(NICS).items() if name != "base"}
    cluster = ClusterChoice({**load_cluster("emulated").given, **keys, **ranks}).build()
    return Machine(cluster, model, AnalyticCost(cluster, model))


def beside_computation(kernels: Kernels, drawn: Sequence[Lengths], num_layers: int) -> Point:
    """The point at which NICs have `MARGIN` times the bandwidth that these batches need.

    DistCA's Table 7 gives the bandwidth that hides all exchanges: the largest transfer over the
    shortest computation beside it. The 8B model needs 41.3 GB/s of the 50 GB/s that a GPU has.
    """
    needed = needed_bytes_per_s(drawn, machine_at(Point.of(kernels), grouped_model(num_layers)))
    return Point(kernels, round(8 * MARGIN * needed / GOODPUT))


def needed_bytes_per_s(drawn: Sequence[Lengths], on: Machine) -> float:
    """Of a NIC, so that every exchange of every batch fits beside what runs meanwhile, forward."""
    return max(_needed(lengths, on) for lengths in drawn)


def _needed(lengths: Lengths, on: Machine) -> float:
    planner = choose_planner("distca", {})
    plans = [
        planner.plan(Batch(tuple(lengths[i] for i in nano_batch)), on.cluster, on.model, on.cost)
        for nano_batch in nano_batches(lengths)
    ]
    linear = [float(linear_s(plan, on)[0].min()) for plan in plans]
    attention = [float(_attention_s(plan, on).min()) for plan in plans]
    (in_a, out_a), (in_b, out_b) = (_busiest_nic(plan, on) for plan in plans)
    return max(in_a / linear[1], in_b / attention[0], out_a / attention[1], out_b / linear[0])


def _attention_s(plan: MicrobatchPlan, on: Machine) -> Floats:
    return np.sum([table.forward_s[:, 0] for table in Tables(plan, on).zones], axis=0)


def _busiest_nic(plan: MicrobatchPlan, on: Machine) -> tuple[float, float]:
    """Bytes of the busiest NIC, in or out, of both exchanges."""
    (zone,) = plan.zones
    assert isinstance(zone, TaskTable), "distca plans a task table"
    there, back = (
        _nic_bytes(as_array(rows), on) for rows in dispatch.transfers(zone, plan.num_heads, plan.num_kv_heads)
    )
    return there, back


def _nic_bytes(rows: Ints, on: Machine) -> float:
    parcels = on.payload.parcels(messages_of(0, rows))
    across = on.crosses(parcels.src, parcels.dst)
    src, dst, num_bytes = parcels.src[across], parcels.dst[across], parcels.direct[across]
    return float(max(on.nics.sums(src, num_bytes).max(initial=0), on.nics.sums(dst, num_bytes).max(initial=0)))


@dataclass(frozen=True, slots=True, kw_only=True)
class PingPong(Experiment):
    """Nano-batches in turns, and what they are compared with, on one topology."""

    batches: int
    """Of each data set."""

    @property
    def variants(self) -> tuple[Variant, ...]:
        return TURNS

    def drawn(self) -> dict[str, list[Lengths]]:
        """By data set, batches of `CONTEXTS` contexts each."""
        size = CONTEXTS
        each = {name: draw_batches(name, self.batches * size, self.seed, SCALE * size) for name in DATASETS}
        return {name: joined(contexts, size) for name, contexts in each.items()}

    def trainings(self) -> tuple[Training, ...]:
        return (Training(NICS, 1, interleaved(self.drawn(), range(len(TURNS)), self.repeats)),)

    def config(self) -> dict[str, Any]:
        return {"planner": {"name": "distca"}}  # a job that may run nano-batches has Megatron's layers patched for them

    def flags(self, stages: int) -> dict[str, Any]:
        del stages
        return GROUPED_FLAGS

    def needed(self, kernels: Kernels) -> Point:
        return beside_computation(kernels, list(chain(*self.drawn().values())), self.layers)


def joined(contexts: Sequence[Lengths], size: int) -> list[Lengths]:
    """Join `size` contexts in a row to one batch."""
    return [tuple(chain(*contexts[at : at + size])) for at in range(0, len(contexts), size)]


STAGES = 2
REPLICAS = NUM_RANKS // STAGES
SAMPLE = 2048
"""Tokens that a replica reads for a microbatch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Joint(Experiment):
    """Stages that attend each for itself, and together."""

    PIPELINED: ClassVar[bool] = True

    batches: int
    """Of each data set; one is a step's."""
    microbatches: int
    """Of a step."""

    @property
    def variants(self) -> tuple[Variant, ...]:
        return tuple(
            Variant(name, "distca", DISTCA, ping_pong=True, joint=name == TOGETHER) for name in (APART, TOGETHER)
        )

    def drawn(self) -> dict[str, list[Lengths]]:
        """By data set, the documents of each step, sample after sample."""
        size = self.microbatches * REPLICAS
        each = {name: draw_batches(name, self.batches * size, self.seed, PAPER_TOKENS // SAMPLE) for name in DATASETS}
        return {name: joined(contexts, size) for name, contexts in each.items()}

    def trainings(self) -> tuple[Training, ...]:
        return (Training(NICS, STAGES, interleaved(self.drawn(), range(len(self.variants)), self.repeats)),)

    def samples(self, step: Planned) -> list[Lengths]:
        return cut(step.lengths, SAMPLE)

    def config(self) -> dict[str, Any]:
        return {"planner": {"name": "distca"}, "pipeline": "joint"}

    def needed(self, kernels: Kernels) -> Point:
        """By ticks in which every stage has a microbatch."""
        each = [cut(lengths, REPLICAS * SAMPLE) for lengths in chain(*self.drawn().values())]
        ticks = [
            tuple(chain(*microbatches[at : at + STAGES]))
            for microbatches in each
            for at in range(len(microbatches) - STAGES + 1)
        ]
        return beside_computation(kernels, ticks, self.layers)

    def flags(self, stages: int) -> dict[str, Any]:
        return {**GROUPED_FLAGS, **pipeline_flags(stages, 1, SAMPLE, self.microbatches * REPLICAS)}


def pipeline_flags(stages: int, context_parallel: int, tokens: int, samples: int) -> dict[str, Any]:
    """Megatron's flags of pipelines, and of samples of so many tokens."""
    return {
        "pipeline-model-parallel-size": stages,
        "context-parallel-size": context_parallel,
        "seq-length": tokens,
        "max-position-embeddings": tokens,
        "global-batch-size": samples,
    }


PAPER_CONTEXT = 128 * 1024
"""WLB-LLM's 7B-128K: tokens of a sample."""
CONTEXT_SCALE = 32
CONTEXT = PAPER_CONTEXT // CONTEXT_SCALE
NARROW_FFN = 64
"""So small that linear modules take no larger a part of a full context than in the 7B model: hidden
size 128 is a 32nd of its 4096, 4k tokens are a 32nd of 128k.
"""
SHORTEST = 128
"""Tokens: a kernel on a CPU pays for each document, which the work of shorter ones would drown in."""
WITHIN = "te_ring"
"""Cuts every document evenly over a stage's ranks, so that only microbatches differ."""
PACKINGS: dict[str, dict[str, str]] = {
    "equal length": {"packing": "original"},
    "equal work": {"packing": "workload"},
    "equal work, rise and fall": {"packing": "workload", "order": "rise_and_fall"},
}
"""Ways to make microbatches of one pool, by options of wlb_llm."""
Dealt = tuple[tuple[Lengths, ...], ...]
"""By pipeline, lengths of each of its microbatches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatches(Experiment):
    """Every way to make microbatches, in pipelines of several depths."""

    PIPELINED: ClassVar[bool] = True

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
    def variants(self) -> tuple[Variant, ...]:
        if self.replicas == 1:
            given = {"slack": self.room, "within": WITHIN}
            return tuple(Variant(name, "wlb_llm", Layers(), options={**way, **given}) for name, way in PACKINGS.items())
        told = {"within": WITHIN, "microbatch_s": self.microbatch_s}
        return Variant("megatron", "megatron", Layers()), Variant("hydraulis", "hydraulis", Layers(), options=told)

    def drawn(self, count: int) -> list[Lengths]:
        """Global batches in which each context is full, its last document cut."""
        return joined(draw(self.dataset, PAPER_CONTEXT, count * self.microbatches, self.seed), self.microbatches)

    def drawn_small(self) -> list[Lengths]:
        """Those that are trained: documents of `SHORTEST` tokens and more, contexts of `CONTEXT`."""
        drawn = chain.from_iterable(draw(self.dataset, PAPER_CONTEXT, 16 * self.batches * self.microbatches, self.seed))
        long = (length // CONTEXT_SCALE for length in drawn if length >= CONTEXT_SCALE * SHORTEST)
        contexts: list[Lengths] = []
        for _ in range(self.batches * self.microbatches):
            context: list[int] = []
            while sum(context) < CONTEXT:
                context.append(min(next(long), CONTEXT - sum(context)))
            contexts.append(tuple(context))
        return joined(contexts, self.microbatches)

    def trainings(self) -> tuple[Training, ...]:
        drawn, ways = self.drawn_small(), range(len(self.variants))
        return tuple(
            Training(NICS, stages, interleaved({f"PP {stages}": drawn}, ways, self.repeats)) for stages in self.stages
        )

    def samples(self, step: Planned) -> list[Lengths]:
        return cut(step.lengths, CONTEXT)

    def config(self) -> dict[str, Any]:
        return {"planner": {"name": self.variants[0].planner if self.replicas > 1 else WITHIN}}

    def planned(self, lengths: Lengths, variant: Variant, machine: Machine, context: int) -> StepPlan:
        """The step of these documents, dealt in contexts of so many tokens."""
        choice = variant.choice(tokens_per_rank=int(self.room * context) // machine.num_ranks)
        asked = StepContext(machine.cluster, machine.model, machine.cost, may_carry=False)
        step, _ = choice.plan_step(tuple(cut(lengths, context)), asked)
        return step

    def flags(self, stages: int) -> dict[str, Any]:
        context_parallel = NUM_RANKS // stages // self.replicas
        return {"ffn-hidden-size": NARROW_FFN, **pipeline_flags(stages, context_parallel, CONTEXT, self.microbatches)}

    def machine(self, point: Point, stages: int) -> Machine:
        """One stage of one pipeline of the emulated cluster."""
        ranks = NUM_RANKS // stages // self.replicas
        model = model_of(self.layers, HEADS, HEADS, HEAD_DIM, NARROW_FFN)
        return machine_at(point, model, num_ranks=ranks, ranks_per_node=min(ranks, RANKS_PER_NODE))


def dealt(step: StepPlan) -> Dealt:
    """Lengths of the microbatches of a step, nano-batches not split."""
    return tuple(tuple(step.plans[at].lengths for at in own) for own in step.pipelines)


EXPERIMENTS: dict[str, type[Experiment]] = {
    "ablation": Ablation,
    "distca": PingPong,
    "pipeline": Joint,
    "microbatches": Microbatches,
}
