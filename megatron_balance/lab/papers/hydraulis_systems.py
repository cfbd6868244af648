"""Jobs of the paper's evaluation, and seconds of propagation of a step in each of its systems.

Not printed and assumed:

- `commoncrawl` and `github-code` (`workloads.distributions`) stand for the two data sets.
- Table 1 and Figures 15 and 16 have 200K tokens a step, as Figure 20 and Appendix F say of the same
  job; section 8.1's default of 100K does not fit Table 1.
- Their homogeneous strategy is <16,1,1> x 4, the one that section 8.2 names for 32B on 64 GPUs.
- Megatron-LM packs to the context length by first fit decreasing, and deals microbatches in turn.
- The 32B model has 64 heads of 104: 52 heads cannot be split by TP 8 and 16, which it ran with.
- K is 1,000 for tokens of a step and 1,024 for lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from megatron_balance.analysis.change import base_sync_s, change
from megatron_balance.config import load_cluster, load_model, load_scheme_table
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.cost.modules import num_parameters
from megatron_balance.cost.parallel import WEIGHT_BYTES, all_gather_s, all_to_all_s, group_of, reduce_scatter_s
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.model import Model
from megatron_balance.ir.strategy import Strategy
from megatron_balance.planners.pipelines import CandidateMovement, Microbatches, fastest, pipeline_s
from megatron_balance.planning.strategies import (
    PredictedCosts,
    SchemeCosts,
    TableCosts,
    costs_of,
    pipelines_s,
    propose,
    rank,
)
from megatron_balance.solvers.dispatch import PipelineCost
from megatron_balance.solvers.packing import first_fit_decreasing
from megatron_balance.workloads.lengths import draw

AUTHORS, OURS = "authors' coefficients", "our costs"
SOURCES = (AUTHORS, OURS)
SEED, SAMPLE_SEED, RANK_SEED = 0, 1, 2
SAMPLE_BATCHES, RANK_BATCHES = 50, 6
K = 1024
MODELS = {"7b": "llama-7b", "13b": "llama-13b", "32b": "llama2-32b"}
Lengths = Sequence[int]


@dataclass(frozen=True, slots=True)
class TrainedCase:
    """A model on GPUs, and the steps that it trains on. `longest`: the context length."""

    size: str
    num_ranks: int
    tokens: int = 200_000
    longest: int = 32 * K
    dataset: str = "commoncrawl"

    def batches(self, count: int, seed: int = SEED) -> list[tuple[int, ...]]:
        """Steps, documents cut at the context length."""
        drawn = draw(self.dataset, self.tokens, count, seed)
        return [tuple(min(length, self.longest) for length in batch) for batch in drawn]


B32 = TrainedCase("32b", 64)
HOMOGENEOUS = Strategy.parse("4*tp16-pp1-cp1")
HETEROGENEOUS = Strategy.parse("tp16-pp1-cp1+6*tp8-pp1-cp1")
"""A mix that Figure 15a's kind of strategies is like: one pipeline for the longest sequences."""


@lru_cache(maxsize=8)
def costs(source: str, size: str) -> SchemeCosts:
    """Costs of the model of that size by the authors' coefficients or by ours."""
    if source == AUTHORS:
        return TableCosts(load_scheme_table(f"a800-{size}"))
    cluster, model = cluster_and_model(size)
    return PredictedCosts(AnalyticCost(cluster, model), cluster, model)


@lru_cache(maxsize=8)
def cluster_and_model(size: str, num_ranks: int = 64) -> tuple[Cluster, Model]:
    """A cluster of so many A800s and the model of that size, for our costs."""
    model = load_model(MODELS[size])
    if size == "32b":
        model = replace(model, num_heads=64, num_kv_heads=64, head_dim=104)
    return load_cluster("a800-ib").build(num_ranks=num_ranks), model


@lru_cache(maxsize=64)
def candidates(source: str, job: TrainedCase) -> tuple[Strategy, ...]:
    """The strategies that Hydraulis chooses among, proposed and ranked on steps of their own."""
    known = costs(source, job.size)
    ranked_on = job.batches(RANK_BATCHES, RANK_SEED)
    sample = [length for batch in (*ranked_on, *job.batches(SAMPLE_BATCHES, SAMPLE_SEED)) for length in batch]
    # The context length itself must be held, drawn or not.
    proposed = propose([*sample, job.longest], job.tokens, known, job.num_ranks)
    return tuple(each.strategy for each in rank(proposed, ranked_on, known, job.num_ranks))


def seconds(source: str, job: TrainedCase, strategy: Strategy, batch: Lengths) -> tuple[float, ...]:
    """Seconds of each pipeline under dispatch (Eq. 3) and packing (Eq. 1)."""
    return pipelines_s(batch, costs_of(strategy, costs(source, job.size), job.num_ranks))


def chosen(source: str, job: TrainedCase, batch: Lengths) -> tuple[Strategy, float]:
    """The candidate that Hydraulis takes for a step, and its seconds."""
    strategy, _, found_s = chosen_step(source, job, batch)
    return strategy, found_s


def chosen_step(
    source: str, job: TrainedCase, batch: Lengths, base: Strategy | None = None
) -> tuple[Strategy, Microbatches, float]:
    """The candidate that Hydraulis takes for a step, its microbatches, and its seconds."""
    # `base`: the layout that owns weights; choice and seconds then count what pull and push leave
    # uncovered, as planner hydraulis does. None: propagation alone.
    known = costs(source, job.size)
    pipelines = {each: costs_of(each, known, job.num_ranks) for each in candidates(source, job)}
    held = [each for each, own in pipelines.items() if max(cost.max_tokens for cost in own) >= max(batch)]
    ways = [moving(job, base, each, overlap=True) for each in held] if base is not None else []
    best, made, found = fastest(batch, [pipelines[each] for each in held], moving=ways)
    added_s = ways[best].added_s(batch, made, pipelines[held[best]]) if ways else 0.0
    return held[best], made, max(found) + added_s


def exchange_s(source: str, job: TrainedCase, batch: Lengths) -> tuple[float, float]:
    """Seconds of pull and push by links alone from `HOMOGENEOUS`: without overlap, and with it."""
    strategy, made, _ = chosen_step(source, job, batch)
    own = costs_of(strategy, costs(source, job.size), job.num_ranks)
    ways = (moving(job, HOMOGENEOUS, strategy, overlap=each) for each in (False, True))
    without, overlapped = (each.added_s(batch, made, own) for each in ways)
    return without, overlapped


def moving(job: TrainedCase, base: Strategy, strategy: Strategy, *, overlap: bool) -> CandidateMovement:
    """The way of weights that `base` owns to a strategy, and of gradients back, by links alone."""
    cluster, model = cluster_and_model(job.size, job.num_ranks)
    moved = None if strategy == base else change(base, strategy, model, cluster)
    return CandidateMovement(moved, sum(base_sync_s(base, model, cluster)), model.num_layers, overlap)


def megatron(source: str, job: TrainedCase, strategy: Strategy, batch: Lengths) -> tuple[float, ...]:
    """Seconds of each pipeline; microbatches are packed to the context length and dealt in turn."""
    pipelines = costs_of(strategy, costs(source, job.size), job.num_ranks)
    packed = full(batch, job.longest)
    return tuple(pipeline_s(packed[at :: len(pipelines)], cost) for at, cost in enumerate(pipelines))


def packed_to_the_most(
    source: str, job: TrainedCase, strategy: Strategy, batch: Lengths, dispatch: Callable[..., Sequence[Sequence[int]]]
) -> tuple[float, ...]:
    """Seconds of each pipeline; sequences are dispatched, then packed to the context length."""
    pipelines: tuple[PipelineCost, ...] = costs_of(strategy, costs(source, job.size), job.num_ranks)
    found: list[float] = []
    for own, cost in zip(dispatch(batch, pipelines), pipelines, strict=True):
        found.append(pipeline_s(full([batch[seq] for seq in own], job.longest), cost))
    return tuple(found)


def full(lengths: Lengths, most: int) -> list[list[int]]:
    """Lengths by microbatch of at most `most` tokens, by first fit decreasing."""
    return [[lengths[seq] for seq in each] for each in first_fit_decreasing(lengths, most)]


def gap(pipelines: Sequence[float]) -> float:
    """(slowest - fastest) / slowest."""
    return (max(pipelines) - min(pipelines)) / max(pipelines)


# Seconds of DeepSpeed's steps by data sheets: Ulysses in a replica, weights sharded over all GPUs.
#
# Full microbatches go to the replicas in turn. A GPU has a part of the tokens in linear modules,
# and a part of the heads in attention; four all-to-alls a layer change from one to the other, and
# four back. Each layer's weights are gathered from all GPUs before its forward and again before its
# backward, and its gradients scattered (ZeRO 3, which the paper does not say: assumed). That hides
# behind the layer, or the layer behind it.
def deepspeed(job: TrainedCase, degree: int, batch: Lengths, *, recompute: bool) -> float:
    """Seconds of the slowest replica; `degree`: its GPUs, over which Ulysses splits sequences."""
    packed, replicas = full(batch, job.longest), job.num_ranks // degree
    times = [_microbatch_s(job, degree, each, recompute=recompute) for each in packed]
    return max(sum(times[at::replicas]) for at in range(replicas))


def _microbatch_s(job: TrainedCase, degree: int, lengths: Lengths, *, recompute: bool) -> float:
    cluster, model = cluster_and_model(job.size)
    cost = AnalyticCost(cluster, model)
    node = cluster.node_size
    inside = group_of(cluster, degree, min(degree, node), busy_nics=True)
    everyone = group_of(cluster, job.num_ranks, min(job.num_ranks, node), busy_nics=True)
    tokens = sum(lengths) / degree
    heads, kv_heads = max(1, model.num_heads // degree), max(1, model.num_kv_heads // degree)
    pairs = np.array([[0, 0, n, 0, heads, 0, n, 0, kv_heads] for n in lengths], dtype=np.int64)
    once = np.zeros(len(pairs), dtype=np.int64)
    exchange_s = 2 * all_to_all_s(cost.query_bytes(tokens), inside)
    exchange_s += all_to_all_s(cost.kv_bytes(tokens), inside)
    shard = num_parameters(model) / model.num_layers / job.num_ranks
    gather_s = all_gather_s(WEIGHT_BYTES * shard, everyone)
    forward_s, backward_s = (
        float(cost.attend_s(pairs, once, 1, backward=backward)[0])
        + cost.layer_s(tokens, backward=backward)
        + exchange_s
        for backward in (False, True)
    )
    if recompute:
        backward_s += forward_s
    layer_s = max(forward_s, gather_s)
    layer_s += max(backward_s, gather_s + reduce_scatter_s(WEIGHT_BYTES * shard, everyone))
    return model.num_layers * layer_s + cost.head_s(tokens) + cost.head_s(tokens, backward=True)
