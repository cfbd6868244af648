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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np

from megatron_balance.analysis.memory import Holding, Recompute, Sharding, rank_memory
from megatron_balance.config import load_cluster, load_model
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.cost.parallel import wide_ranks
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.model import Model
from megatron_balance.simulator.machine import Machine
from megatron_balance.simulator.setup import Setup
from megatron_balance.workloads.distributions import DISTRIBUTIONS, Distribution, K, Pareto
from megatron_balance.workloads.lengths import Lengths

SKEW, COUNTED = "wlb-skew", "wlb"
SEED = 0

ROOM = 1.25
"""Windows that S_max shall hold at least, or packing by workload could lengthen nothing."""


@dataclass(frozen=True, slots=True)
class WlbCase:
    """A model and a context window on GPUs: a row of Table 1."""

    model_name: str
    window: int
    tensor: int
    context: int
    stages: int
    replicas: int = 1
    model: Model = field(init=False, repr=False, compare=False)
    cluster: Cluster = field(init=False, repr=False, compare=False)
    cost: AnalyticCost = field(init=False, repr=False, compare=False)
    machine: Machine = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        model = load_model(self.model_name)
        gpus, preset = self.tensor * self.context, load_cluster("h100")
        node = max(self.tensor, min(gpus, 8))
        machine = preset.build(num_ranks=gpus, ranks_per_node=node).with_kernel("flash_attn_3")
        cluster = wide_ranks(machine, self.tensor)
        cost = AnalyticCost(cluster, model, self.tensor)
        for name, value in (
            ("model", model),
            ("cluster", cluster),
            ("cost", cost),
            ("machine", Machine(cluster, model, cost)),
        ):
            object.__setattr__(self, name, value)

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
