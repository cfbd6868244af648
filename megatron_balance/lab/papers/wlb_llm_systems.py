"""The configurations that WLB-LLM is evaluated on (section 7.1, Table 1), and its documents.

Not printed and assumed:

- The data are a 128K job's of Meta's. `wlb-skew` stands in for them, cut at the context window as
  the paper's longest documents are; `wlb`, the counts that DistCA published of the same figure, is
  beside it in Figure 12.
- The data loader deals documents whole, in their order, into samples of the context window; a
  sample ends where the next document does not fit.
- Attention kernels have the rate of FlashAttention-3 (the paper speaks of Hopper's tensor memory
  accelerator; its artifact's image has FlashAttention 2.4.2).
- Model chunks of a stage in the interleaved schedule: two, or the fewest that divide the layers.
- S_max is what the memory holds; where that is less than 1.25 windows (30B), all systems recompute
  activations.
- Figure 14 runs every context window on the GPUs of 7B-128K, Figure 15 with the tensor parallelism
  of Table 1 for its window.
- Tensor parallelism 16 spans two nodes. They act as one node of 16 GPUs here: a ring over all eight
  NICs of both carries 400 GB/s, NVLink 450 GB/s.
- Weights and gradients are spread over the context-parallel ranks of a stage; what data parallelism
  adds is left out, alike for all systems.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import islice, pairwise
from statistics import stdev
from typing import Any

import numpy as np

from megatron_balance.analysis.memory import Holding, Recompute, Sharding, rank_memory
from megatron_balance.config import load_cluster, load_model
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.cost.parallel import wide_ranks
from megatron_balance.ir.batch import Batch
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.ir.step import EMPTY
from megatron_balance.lab.papers.base import SimulatedCase
from megatron_balance.planners.base import StepContext
from megatron_balance.planners.wlb_sharding import WlbShardingOptions
from megatron_balance.planners.wlb_sharding import plan as shard
from megatron_balance.planning.choice import choose_planner
from megatron_balance.simulator.setup import Setup
from megatron_balance.simulator.step import simulate_step
from megatron_balance.workloads.distributions import DISTRIBUTIONS, Distribution, K, Pareto
from megatron_balance.workloads.lengths import Lengths

SKEW, COUNTED = "wlb-skew", "wlb"
SEED = 0
ROOM = 1.25
"""Windows that S_max shall hold at least, or packing by workload could lengthen nothing."""


@dataclass(frozen=True)
class WlbCase(SimulatedCase):
    """A model and a context window on GPUs: a row of Table 1."""

    model_name: str
    window: int
    tensor: int
    context: int
    stages: int
    replicas: int = 1

    @cached_property
    def cost(self) -> AnalyticCost:
        model = load_model(self.model_name)
        gpus, preset = self.tensor * self.context, load_cluster("h100")
        node = max(self.tensor, min(gpus, 8))
        machine = preset.build(num_ranks=gpus, ranks_per_node=node).with_kernel("flash_attn_3")
        cluster = wide_ranks(machine, self.tensor)
        return AnalyticCost(cluster, model, self.tensor)

    @property
    def name(self) -> str:
        """As the paper names it: 7B-128K."""
        return f"{self.model_name.removeprefix('llama-').upper()}-{self.window // K}K"

    @property
    def num_microbatches(self) -> int:
        """Of a global batch: pipeline stages times replicas (section 7.1)."""
        return self.stages * self.replicas

    @property
    def setup(self) -> Setup:
        """The interleaved schedule, and recomputation where memory is short, alike for all systems."""
        layers = self.model.num_layers // self.stages
        chunks = next(count for count in range(2, layers + 1) if layers % count == 0)
        return Setup("keep", self.recompute, self.stages, chunks)

    @property
    def recompute(self) -> Recompute:
        """Full where memory would hold less than `ROOM` windows otherwise."""
        return "full" if self.held_tokens("none") < ROOM * self.window else "none"

    def most_tokens(self) -> int:
        """S_max: tokens of a microbatch for which the memory of the first stage's GPUs has room."""
        return self.held_tokens(self.recompute)

    def held_tokens(self, recompute: Recompute) -> int:
        """Tokens of each microbatch that a GPU of the first stage holds its share of."""
        ranks, sharding = self.context, Sharding(self.tensor, self.stages, optimizer=self.context)
        holding = Holding("keep", recompute, self.stages)

        def used(tokens: float) -> float:
            return rank_memory(self.model, tokens / ranks, tokens * (1 - 1 / ranks), sharding, holding).total

        free = self.cluster.memory_bytes / self.tensor - used(0.0)
        return int(self.window * free / (used(float(self.window)) - used(0.0)))  # used bytes are linear in tokens

    def batches(self, dataset: str, count: int) -> list[tuple[Lengths, ...]]:
        """Global batches as dealt: by microbatch, the documents of a sample."""
        documents = samples(_documents(dataset, self.window), self.window)
        return [tuple(islice(documents, self.num_microbatches)) for _ in range(count)]


def _documents(dataset: str, window: int) -> Iterator[int]:
    """Lengths of documents without end, none longer than the context window."""
    distribution: Distribution = DISTRIBUTIONS[dataset]
    if isinstance(distribution, Pareto):
        distribution = replace(distribution, most=window)  # a longer window has longer documents
    generator = np.random.default_rng(SEED)
    while True:
        yield min(distribution.document(generator), window)


def samples(documents: Iterator[int], window: int) -> Iterator[Lengths]:
    """Samples of at most `window` tokens, documents whole and in their order."""
    sample: list[int] = []
    for document in documents:
        if sum(sample) + document > window:
            yield tuple(sample)
            sample = []
        sample.append(document)


TABLE_1: Sequence[WlbCase] = (
    WlbCase("llama-550m", 64 * K, 2, 2, 4, 2),
    WlbCase("llama-550m", 128 * K, 2, 4, 4),
    WlbCase("llama-7b", 64 * K, 4, 2, 4),
    WlbCase("llama-7b", 128 * K, 8, 2, 4),
    WlbCase("llama-30b", 64 * K, 8, 2, 4),
    WlbCase("llama-30b", 128 * K, 8, 4, 4),
    WlbCase("llama-70b", 64 * K, 16, 4, 4),
    WlbCase("llama-70b", 128 * K, 16, 4, 4),
)
B7_128K = TABLE_1[3]
WINDOW = 128 * K

THRESHOLDS = {
    "wlb-skew": {1: (65536,), 2: (10321, 52016), 3: (16384, 32768, 65536)},
    "wlb": {1: (49727,), 2: (9867, 78936), 3: (15663, 78936, 125303)},
}

# The systems that WLB-LLM compares (section 7.1) and its parts (Figure 13), on the simulator's
# clocks.
#
# Plain-4D trains samples as the data loader deals them, each cut as one sequence. Fixed-4D packs
# the documents of a global batch greedily into microbatches of the context window, with the
# sharding that is faster over the whole run. WLB-LLM packs by workload, with two queues for
# outliers, and chooses the sharding of each microbatch; the thresholds are those of Table 2, in
# proportion to the window. All are planners: `wlb_llm` for packing and delay, `wlb_sharding` inside
# a microbatch. Every system trains all documents of a run: steps without new ones come behind it
# until nothing waits, and count.
BLOCKS = 4
"""Parts of a run, by which its standard error is estimated."""

Block = tuple[int, float]
"""Tokens that some steps of a run train, and their seconds."""

QUEUES = 2
"""Of WLB-LLM's own choice (section 7.4: with a third the imbalance stays the same)."""


@dataclass(frozen=True, slots=True)
class WlbSystem:
    """How documents come to microbatches, and how a microbatch is cut."""

    name: str
    sharding: str
    packing: Mapping[str, Any] = field(default_factory=dict[str, Any])
    delays: bool = False

    def steps(self, case: WlbCase, dataset: str, batches: Sequence[tuple[Lengths, ...]]) -> list[tuple[Lengths, ...]]:
        """The documents of each microbatch of each step; further steps train what waits at the end."""
        if not self.packing:
            return list(batches)
        options: dict[str, Any] = {**self.packing, "context_tokens": case.window}
        if self.delays:
            options |= {
                "thresholds": [each * case.window // WINDOW for each in THRESHOLDS[dataset][QUEUES]],
                "tokens_per_rank": case.most_tokens() // case.context,
            }
        plan_step = choose_planner("wlb_llm", options).plan_step
        context, carry = StepContext(case.cluster, case.model, case.cost), EMPTY
        packed: list[tuple[Lengths, ...]] = []
        for batch in batches:
            planned, carry = plan_step(batch, context, carry)
            packed.append(tuple(plan.lengths for plan in planned.plans))
        while carry.waiting:
            nothing_new: tuple[Lengths, ...] = ((),) * case.num_microbatches
            planned, carry = plan_step(nothing_new, replace(context, may_delay=False), carry)
            packed.append(tuple(plan.lengths for plan in planned.plans))
        return packed

    def plan(self, case: WlbCase, lengths: Lengths) -> MicrobatchPlan:
        """The plan of a microbatch on the context-parallel ranks of a stage."""
        options = WlbShardingOptions(sharding=self.sharding)  # pyright: ignore[reportArgumentType]  one of SHARDINGS
        return shard(Batch(lengths), case.cluster, case.model, case.cost, options)

    def blocks(self, case: WlbCase, dataset: str, num_batches: int) -> list[Block]:
        """The steps of the run in order, in `BLOCKS` blocks (of fewer steps: one each)."""
        steps = self.steps(case, dataset, case.batches(dataset, num_batches))
        return in_blocks([(sum(map(sum, step)), self.step_s(case, step)) for step in steps])

    def step_s(self, case: WlbCase, step: Sequence[Lengths]) -> float:
        """Simulated seconds of a step: of its slowest replica."""
        replicas = [step[first :: case.replicas] for first in range(case.replicas)]
        return max(_step_s(case, tuple(self.plan(case, lengths) for lengths in own)) for own in replicas)


FIXED: dict[str, Any] = {"packing": "fixed"}
WORKLOAD: dict[str, Any] = {"packing": "workload"}
PLAIN = WlbSystem("Plain-4D", "sequence")
PER_DOCUMENT = WlbSystem("per-document sharding", "document")
ADAPTIVE = WlbSystem("adaptive sharding", "adaptive")
FIXED_SEQUENCE = WlbSystem("Fixed-4D, per sequence", "sequence", FIXED)
FIXED_DOCUMENT = WlbSystem("Fixed-4D, per document", "document", FIXED)
PACKED = WlbSystem("packing and delay", "sequence", WORKLOAD, delays=True)
WLB = WlbSystem("WLB-LLM", "adaptive", WORKLOAD, delays=True)
MIXED = WlbSystem("WLB-LLM, a choice for each document", "mixed", WORKLOAD, delays=True)


@lru_cache(maxsize=4096)
def _step_s(case: WlbCase, plans: tuple[MicrobatchPlan, ...]) -> float:
    """Several tables and systems share steps."""
    return simulate_step(plans, case.machine, case.setup).step_s


def fixed_blocks(case: WlbCase, dataset: str, num_batches: int) -> list[Block]:
    """Fixed-4D's run: the better of its two shardings."""
    each = (system.blocks(case, dataset, num_batches) for system in (FIXED_SEQUENCE, FIXED_DOCUMENT))
    return min(each, key=lambda found: sum(seconds for _, seconds in found))


def in_blocks(each: Sequence[Block]) -> list[Block]:
    """Steps, summed in their order to `BLOCKS` blocks, or fewer."""
    borders = [len(each) * at // BLOCKS for at in range(BLOCKS + 1)]
    parts = [each[begin:end] for begin, end in pairwise(borders) if begin < end]
    return [(sum(tokens for tokens, _ in part), sum(seconds for _, seconds in part)) for part in parts]


def speedups(of: Sequence[Block], over: Sequence[Block]) -> list[float]:
    """Speedup in tokens per second: of all blocks together, then of each."""
    pairs = [(of, over), *(([one], [other]) for one, other in zip(of, over, strict=False))]
    return [tokens_per_s(one) / tokens_per_s(other) for one, other in pairs]


def tokens_per_s(blocks: Sequence[Block]) -> float:
    return sum(tokens for tokens, _ in blocks) / sum(seconds for _, seconds in blocks)


def error_of(each: Sequence[float]) -> str:
    """The standard error of the first number by the blocks behind it."""
    return f"standard error {stdev(each[1:]) / (len(each) - 1) ** 0.5:.3f}" if len(each) > 2 else ""
