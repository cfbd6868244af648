"""The cases that DistCA is evaluated on (section 6.1): nodes of H200 with tensor parallelism 8, two
models, two data sets.

Not printed and assumed: `pretrain` has documents of up to 128K; for a longer MaxDocLen its lengths
are scaled. Longer ones of `prolong` are cut. A batch is as many samples of MaxDocLen tokens as the
batch size says (Table 4's first row of 8B is then the 1M tokens, and that of 34B the 512K tokens,
that section 6.3 names), filled with documents as they come; one that passes the end of a sample is
cut there, and its parts do not see one another, under all systems alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from megatron_balance.analysis.memory import Holding, Policy, Recompute, Sharding, rank_memory
from megatron_balance.config import load_cluster, load_model
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.cost.parallel import wide_ranks
from megatron_balance.ir.batch import Batch
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.planners.distca import DistcaOptions, plan
from megatron_balance.simulator.machine import Machine
from megatron_balance.simulator.ping_pong import PingPongMode, layers
from megatron_balance.solvers.packing import nano_batches
from megatron_balance.workloads.distributions import K
from megatron_balance.workloads.lengths import Lengths, draw

TENSOR = 8
MODELS = {"8B": "llama3-8b", "34B": "llama-34b"}
DATASETS = {"pretrain": "Pretrain", "prolong": "ProLong"}
SEED = 0
PRETRAIN_LONGEST = 128 * K
TOLERANCE = DistcaOptions().tolerance
ROUNDS = PingPongMode(engine="rounds")


@lru_cache
def _loaded(model_name: str, num_nodes: int) -> tuple[Model, Cluster]:
    cluster = load_cluster("h200").build(num_ranks=TENSOR * num_nodes).with_kernel("flash_attn")  # what the paper ran
    return load_model(MODELS[model_name]), wide_ranks(cluster, TENSOR)


@dataclass(frozen=True, slots=True)
class DistcaCase:
    """A model on nodes of eight GPUs.

    A rank is a node, whose GPUs are tensor-parallel. `stages`: pipelines that are tried.
    """

    model_name: str
    num_nodes: int
    num_tokens: int
    max_doc: int
    stages: tuple[int, ...] = (1,)
    model: Model = field(init=False, repr=False, compare=False)
    cluster: Cluster = field(init=False, repr=False, compare=False)
    cost: AnalyticCost = field(init=False, repr=False, compare=False)
    machine: Machine = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        model, cluster = _loaded(self.model_name, self.num_nodes)
        cost = AnalyticCost(cluster, model, TENSOR)
        for name, value in (
            ("model", model),
            ("cluster", cluster),
            ("cost", cost),
            ("machine", Machine(cluster, model, cost)),
        ):
            object.__setattr__(self, name, value)

    def batches(self, dataset: str, count: int) -> list[Lengths]:
        """Batches of documents, sample after sample."""
        scale = max(1, self.max_doc // PRETRAIN_LONGEST) if dataset == "pretrain" else 1
        drawn = [[scale * n for n in lengths] for lengths in draw(dataset, self.num_tokens // scale, count, SEED)]
        return [tuple(piece for chunk in chunks(lengths, self.max_doc) for piece in chunk) for lengths in drawn]

    @property
    def tokens_per_rank(self) -> float:
        return self.num_tokens / self.num_nodes

    def ping_pong(self, lengths: Sequence[int], tolerance: float = TOLERANCE) -> tuple[MicrobatchPlan, ...]:
        """DistCA's plans of both nano-batches of a batch."""
        plans: list[MicrobatchPlan] = []
        for nano_batch in nano_batches(lengths):
            batch = Batch(tuple(lengths[i] for i in nano_batch))
            if batch.lengths:
                plans.append(plan(batch, self.cluster, self.model, self.cost, DistcaOptions(tolerance=tolerance)))
        return tuple(plans)

    def passes_s(
        self, lengths: Sequence[int], tolerance: float = TOLERANCE, way: PingPongMode = ROUNDS
    ) -> tuple[float, float]:
        """Seconds of all layers under DistCA, forward and backward, of the slowest rank."""
        forward, backward = layers(self.ping_pong(lengths, tolerance), self.machine, self.model.num_layers, way)
        return float(forward.end_s.max()), float(backward.end_s.max())

    def held_bytes(self, held: HeldTokens) -> float:
        """Peak bytes of a GPU of the first pipeline stage."""
        ranks = self.num_nodes // held.stages
        sharding = Sharding(TENSOR, held.stages, optimizer=ranks)
        holding = Holding(held.policy, held.recompute, held.num_microbatches)
        return rank_memory(self.model, held.tokens, held.received, sharding, holding).total

    def fits(self, held: HeldTokens) -> bool:
        """Whether a GPU holds it."""
        return self.held_bytes(held) <= self.cluster.memory_bytes / TENSOR


@dataclass(frozen=True, slots=True)
class HeldTokens:
    """Tokens of a rank of the first stage in each microbatch: its own, and those whose keys and
    values it receives.
    """

    tokens: float
    received: float
    stages: int = 1
    recompute: Recompute = "none"
    num_microbatches: int = 1
    policy: Policy = "keep"


def chunks(documents: Sequence[int], size: int) -> list[list[int]]:
    """Chunks of `size` tokens, documents as they come, each cut where a chunk ends; a cut document
    attends within its pieces only.
    """
    packed: list[list[int]] = [[]]
    left_in_chunk = size
    for document in documents:
        left = document
        while left:
            if not left_in_chunk:
                packed.append([])
                left_in_chunk = size
            piece = min(left, left_in_chunk)
            packed[-1].append(piece)
            left, left_in_chunk = left - piece, left_in_chunk - piece
    return packed
