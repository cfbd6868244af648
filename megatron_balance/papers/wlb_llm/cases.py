"""The configurations that WLB-LLM is evaluated on (section 7.1, Table 1), and its documents.

Not printed and assumed:

- The data are a 128K job's of Meta's. `wlb-skew` stands in for them, cut at the context window as
  the paper's longest documents are; `wlb`, the counts that DistCA published of the same figure, is
  beside it in Figure 12.
- The data loader deals documents whole, in their order, into samples of the context window; a
  sample ends where the next document does not fit.
- Model chunks of a stage in the interleaved schedule: two, or the fewest that divide the layers.
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

from megatron_balance.analysis.memory import Holding, Sharding, rank_memory
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


@dataclass(frozen=True, slots=True)
class Case:
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
        cluster = wide_ranks(preset.build(num_ranks=gpus, ranks_per_node=node), self.tensor)
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
        """The interleaved schedule, as few model chunks of a stage as divide its layers."""
        layers = self.model.num_layers // self.stages
        chunks = next(count for count in range(2, layers + 1) if layers % count == 0)
        return Setup(policy="keep", pipeline=self.stages, interleave=chunks)

    def most_tokens(self) -> int:
        """S_max: tokens of a microbatch for which the memory of the first stage's GPUs has room."""
        ranks = self.context

        def used(tokens: float) -> float:
            sharding = Sharding(self.tensor, self.stages, optimizer=ranks)
            received = tokens * (1 - 1 / ranks)
            holding = Holding("keep", num_microbatches=self.stages)
            return rank_memory(self.model, tokens / ranks, received, sharding, holding).total

        free = self.cluster.memory_bytes / self.tensor - used(0.0)
        return int(self.window * free / (used(float(self.window)) - used(0.0)))

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


TABLE_1: Sequence[Case] = (
    Case("llama-550m", 64 * K, 2, 2, 4, 2),
    Case("llama-550m", 128 * K, 2, 4, 4),
    Case("llama-7b", 64 * K, 4, 2, 4),
    Case("llama-7b", 128 * K, 8, 2, 4),
    Case("llama-30b", 64 * K, 8, 2, 4),
    Case("llama-30b", 128 * K, 8, 4, 4),
    Case("llama-70b", 64 * K, 16, 4, 4),
    Case("llama-70b", 128 * K, 16, 4, 4),
)
B7_128K = TABLE_1[3]
