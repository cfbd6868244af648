"""Hydraulis (arXiv 2412.07894): what its text and tables print beside ours.

What is only drawn has no number. Ours are given with the coefficients that the authors publish, and
with ours, from data sheets. Where they differ by more than 20 %, docs/reproduce-hydraulis.md says why.

Not printed and assumed:

- `commoncrawl` and `github-code` (`workloads.distributions`) stand for the two data sets.
- Table 1 and Figures 15 and 16 have 200K tokens a step, as Figure 20 and Appendix F say of the same
  job; section 8.1's default of 100K does not fit Table 1.
- Their homogeneous strategy is <16,1,1> x 4, the one that section 8.2 names for 32B on 64 GPUs.
- Megatron-LM packs to the context length by first fit decreasing, and deals microbatches in turn.
- The 32B model has 64 heads of 104: 52 heads cannot be split by TP 8 and 16, which it ran with.
- K is 1,000 for tokens of a step and 1,024 for lengths.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import count, islice
from statistics import fmean
from time import process_time
from typing import TypeVar

import numpy as np

from megatron_balance.analysis.change import base_for, base_sync_s, change
from megatron_balance.config import load_cluster, load_model, load_scheme_table
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.cost.modules import num_parameters
from megatron_balance.cost.parallel import WEIGHT_BYTES, all_gather_s, all_to_all_s, group_of
from megatron_balance.errors import InfeasibleError
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.model import Model
from megatron_balance.ir.strategy import Strategy
from megatron_balance.lab.papers.base import Effort, Ours, cases, paper
from megatron_balance.planners.pipelines import CandidateMovement, Microbatches, deal, fastest, pipeline_s
from megatron_balance.planning.strategies import PredictedCosts, SchemeCosts, TableCosts, costs_of, propose, rank
from megatron_balance.solvers.dispatch import PipelineCost, dispatch, exact, greedy, pack, slowest_s
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
# A mix that Figure 15a's kind of strategies is like: one pipeline for the longest sequences.
HETEROGENEOUS = Strategy.parse("tp16-pp1-cp1+6*tp8-pp1-cp1")


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
    return deal(batch, costs_of(strategy, costs(source, job.size), job.num_ranks))[1]


def chosen(
    source: str, job: TrainedCase, batch: Lengths, base: Strategy | None = None
) -> tuple[Strategy, float, Microbatches]:
    """The candidate that Hydraulis takes for a step, its seconds, and its microbatches."""
    # `base`: the layout that owns weights; choice and seconds then count what pull and push leave
    # uncovered, as planner hydraulis does. None: propagation alone.
    known = costs(source, job.size)
    pipelines = {each: costs_of(each, known, job.num_ranks) for each in candidates(source, job)}
    held = [each for each, own in pipelines.items() if max(cost.max_tokens for cost in own) >= max(batch)]
    ways = [_moving(job, base, each, overlap=True) for each in held] if base is not None else []
    best, made, step_s = fastest(batch, [pipelines[each] for each in held], moving=ways)
    return held[best], step_s, made


def _exchange_s(source: str, job: TrainedCase, batch: Lengths) -> tuple[float, float]:
    """Seconds of pull and push by links alone from `HOMOGENEOUS`: without overlap, and with it."""
    strategy, _, made = chosen(source, job, batch)
    own = costs_of(strategy, costs(source, job.size), job.num_ranks)
    ways = (_moving(job, HOMOGENEOUS, strategy, overlap=each) for each in (False, True))
    without, overlapped = (each.added_s(batch, made, own) for each in ways)
    return without, overlapped


def _moving(job: TrainedCase, base: Strategy, strategy: Strategy, *, overlap: bool) -> CandidateMovement:
    """The way of weights that `base` owns to a strategy, and of gradients back, by links alone."""
    cluster, model = cluster_and_model(job.size, job.num_ranks)
    moved = None if strategy == base else change(base, strategy, model, cluster)
    return CandidateMovement(moved, sum(base_sync_s(base, model, cluster)), model.num_layers, overlap)


def megatron(source: str, job: TrainedCase, strategy: Strategy, batch: Lengths) -> tuple[float, ...]:
    """Seconds of each pipeline; microbatches are packed to the context length and dealt in turn."""
    pipelines = costs_of(strategy, costs(source, job.size), job.num_ranks)
    packed = full(batch, job.longest)
    return tuple(pipeline_s(packed[at :: len(pipelines)], cost) for at, cost in enumerate(pipelines))


def _packed_to_the_most(
    source: str, job: TrainedCase, strategy: Strategy, batch: Lengths, dispatch: Callable[..., Sequence[Sequence[int]]]
) -> tuple[float, ...]:
    """Seconds of each pipeline; sequences are dispatched, then packed to the context length."""
    pipelines: tuple[PipelineCost, ...] = costs_of(strategy, costs(source, job.size), job.num_ranks)
    each = zip(dispatch(batch, pipelines), pipelines, strict=True)
    return tuple(pipeline_s(full([batch[seq] for seq in own], job.longest), cost) for own, cost in each)


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
    layer_s += max(backward_s, gather_s + all_gather_s(WEIGHT_BYTES * shard, everyone))
    return model.num_layers * layer_s + cost.head_s(tokens) + cost.head_s(tokens, backward=True)


# Figure 13: Hydraulis over the best of Megatron-LM, DeepSpeed and HotSPa as Table 3 configures
# them; Table 4's switches of HotSPa.
#
# DeepSpeed by our costs alone: the authors publish no coefficients of Ulysses or sharded weights.
# What moves weights and gradients is by links alone for all: Megatron-LM's all-gather and reduce-
# scatter, DeepSpeed's of every layer, HotSPa's to each of its strategies from weights that the
# first one owns, and what Hydraulis' pull and push leave uncovered. The optimizer is left out,
# alike for all.
SHORT, LONG = 16 * K, 32 * K
# Table 3 by model, GPUs and context length: Megatron-LM's strategy (F1; F2 and F3), and HotSPa's, for
# the longest sequences first (Appendix G). For 7B on 8 GPUs with 32K it names strategies of 16 GPUs;
# those of 16K stand in.
TABLE_3 = {(size, ranks, longest * K): of for size, ranks, longest, of in cases("hydraulis", "fig13")}
# Table 3's DeepSpeed: GPUs of a replica, by context length; with recomputation for 32B.
ULYSSES = {SHORT: 4, LONG: 8}
# Longest sequences of its strategies, from the last one on.
RANGES = (4 * K, 16 * K, 32 * K)
TOKENS = 100_000
# GPUs of Table 4, whose steps have the three strategies of Table 3 (assumed).
SWITCHED = (32, 64)


def hotspa(source: str, job: TrainedCase, strategies: Sequence[str], batch: Lengths) -> float:
    """Seconds of propagation of a step in which each strategy trains its range of lengths in turn."""
    total_s, below = 0.0, 0
    for text, longest in zip(reversed(strategies), RANGES, strict=False):
        own = [length for length in batch if below < length <= longest]
        below = longest
        total_s += max(megatron(source, replace(job, longest=longest), Strategy.parse(text), own))
    return total_s


def exchanged_s(job: TrainedCase, strategies: Sequence[str]) -> float:
    """Seconds of weights to each strategy from what the first one owns, and of gradients back."""
    base, *_ = each = [Strategy.parse(text) for text in strategies]
    return sum(_moving(job, base, strategy, overlap=False).least_s for strategy in each)


def step_s(source: str, job: TrainedCase, text: str, batches: Sequence[Lengths], *, whole: bool) -> tuple[float, float]:
    """Mean seconds of the best of the others, and of Hydraulis. `whole`: exchanges count."""
    # The authors have no coefficients for CP (Megatron-LM, 32B with 32K) and for 7B on one GPU
    # (HotSPa).
    others_s: list[float] = []
    if source == OURS or job.size != "7b":
        strategies = TABLE_3[job.size, job.num_ranks, job.longest]["HotSPa"]
        propagation_s = fmean(hotspa(source, job, strategies, batch) for batch in batches)
        others_s.append(propagation_s + (exchanged_s(job, strategies) if whole else 0.0))
    if source == OURS or "cp2" not in text:
        propagation_s = fmean(max(megatron(source, job, Strategy.parse(text), batch)) for batch in batches)
        others_s.append(propagation_s + (exchanged_s(job, [text]) if whole else 0.0))
    if source == OURS:
        degree, recompute = ULYSSES[job.longest], job.size == "32b"
        others_s.append(fmean(deepspeed(job, degree, batch, recompute=recompute) for batch in batches))
    base = base_for(candidates(source, job), job.num_ranks) if whole else None
    return min(others_s), fmean(chosen(source, job, batch, base)[1] for batch in batches)


def _fig13(effort: Effort) -> Ours:
    """Speed-up of each cell, least and most, and of propagation alone; HotSPa's switches."""
    for source in SOURCES:
        gains: dict[bool, dict[str, float]] = {True: {}, False: {}}
        for (size, ranks, longest), strategies in effort.progress(list(TABLE_3.items()), f"fig13, {source}"):
            for dataset in ("commoncrawl", "github-code"):
                job = TrainedCase(size, ranks, TOKENS, longest, dataset)
                batches = job.batches(effort.batches)
                for whole, by_cell in gains.items():
                    before_s, after_s = step_s(source, job, strategies["Megatron-LM"], batches, whole=whole)
                    by_cell[f"{size.upper()}, {ranks} GPUs, {longest // K}K, {dataset}"] = before_s / after_s
        yield from ((f"{name}, {source}", gain) for name, gain in gains[True].items())
        for whole, what in ((True, ""), (False, ", propagation alone")):
            yield f"least of all{what}, {source}", min(gains[whole].values())
            yield f"most of all{what}, {source}", max(gains[whole].values())
    for ranks in SWITCHED:
        switch_s = exchanged_s(TrainedCase("32b", ranks), TABLE_3["32b", ranks, LONG]["HotSPa"])
        yield f"HotSPa's switches in a step, 32B, {ranks} GPUs", switch_s


# Gains of strategies, Figures 14 to 16 and 20.
#
# Figure 14: seconds of propagation over GPUs, longest sequences and tokens a step, 7B. For 32B on
# 64 GPUs Figure 15: strategies chosen over 100 steps (a), and how even pipelines end (b); Figure
# 16: throughput as parts of Hydraulis are added one by one; Figure 20: greedy dispatching (Alg. 1)
# over ideal dispatching (Eq. 3).
BASE = TrainedCase("7b", 16)
JOBS = {name: replace(BASE, **changed) for name, changed in cases("hydraulis", "fig14").items()}
# Of a search for Eq. 3.
NODES = 20


def _fig14(effort: Effort) -> Ours:
    """Seconds of Hydraulis; jobs whose context length no scheme holds are left out."""
    for source in SOURCES:
        for name, job in effort.progress(list(JOBS.items()), f"fig14, {source}"):
            try:
                mean_s = fmean(chosen(source, job, batch)[1] for batch in job.batches(effort.batches))
            except InfeasibleError:
                continue
            yield f"{name}, {source}", mean_s


def _fig15a(effort: Effort) -> Ours:
    """How often each strategy is chosen, and what that gains over <16,1,1> x 4 where it is chosen."""
    batches = B32.batches(effort.batches)
    for source in effort.progress(SOURCES, "fig15a"):
        taken = [chosen(source, B32, batch) for batch in batches]
        homo_s = [max(seconds(source, B32, HOMOGENEOUS, batch)) for batch in batches]
        for name, number in Counter(str(strategy) for strategy, *_ in taken).most_common():
            yield f"{name}, {source}", number / len(batches)
        gains = sorted(slow / fast for slow, (_, fast, _) in zip(homo_s, taken, strict=True))
        yield f"chosen strategy over <16,1,1> x 4, median, {source}", gains[len(gains) // 2]


def _fig15b(effort: Effort) -> Ours:
    """(slowest - fastest) / slowest over pipelines."""
    batches = B32.batches(effort.batches)
    for source in effort.progress(SOURCES, "fig15b"):
        own = [gap(seconds(source, B32, chosen(source, B32, batch)[0], batch)) for batch in batches]
        theirs = [gap(megatron(source, B32, HOMOGENEOUS, batch)) for batch in batches]
        for system, each in (("Megatron-LM", theirs), ("Hydraulis", own)):
            yield f"{system}, mean, at least, {source}", fmean(each)
            yield f"{system}, mean, at most, {source}", fmean(each)
            yield f"{system}, largest, {source}", max(each)


def _fig16(effort: Effort) -> Ours:
    """Throughput over Megatron-LM's way; (c) is the candidate that holds the longest sequence."""
    batches = B32.batches(effort.batches)
    for source in effort.progress(SOURCES, "fig16"):
        widest = candidates(source, B32)[0]
        base_s = fmean(max(megatron(source, B32, HOMOGENEOUS, batch)) for batch in batches)
        steps = {
            "(a) dispatch": [max(_packed_to_the_most(source, B32, HOMOGENEOUS, batch, dispatch)) for batch in batches],
            "(b) and packing": [max(seconds(source, B32, HOMOGENEOUS, batch)) for batch in batches],
            "(c) and a heterogeneous strategy": [max(seconds(source, B32, widest, batch)) for batch in batches],
            "(d) and one chosen every step": [chosen(source, B32, batch)[1] for batch in batches],
        }
        yield from ((f"{name}, {source}", base_s / fmean(each)) for name, each in steps.items())


def _fig20(effort: Effort) -> Ours:
    """Least and most of Alg. 1's estimated seconds over the ideal ones; the mean of ours."""
    batches = B32.batches(effort.batches)
    for source in effort.progress(SOURCES, "fig20"):
        pipelines = costs_of(HETEROGENEOUS, costs(source, B32.size), B32.num_ranks)
        ideal = [slowest_s(batch, pipelines, exact(batch, pipelines, NODES)) for batch in batches]
        alg1, own = (
            [
                slowest_s(batch, pipelines, deal(batch, pipelines)) / best
                for batch, best in zip(batches, ideal, strict=True)
            ]
            for deal in (greedy, dispatch)
        )
        yield f"Alg. 1 over ideal, least, {source}", min(alg1)
        yield f"Alg. 1 over ideal, most, {source}", max(alg1)
        yield f"ours over ideal, mean, {source}", fmean(own)


# Table 1: seconds of propagation (P), of the optimizer (O) and of weights and gradients between the
# two (O-P), under one strategy and under several; Appendix B.2, from how many tokens on O-P hides.
COLUMNS = ("homogeneous", "heterogeneous without overlap", "heterogeneous with overlap")
PRINTED_FLOPS, PRINTED_BYTES_PER_S, PRINTED_TENSOR = 19.5e12, 200e9, 16


def _table1(effort: Effort) -> Ours:
    """Means over the batches, by the authors' coefficients and by ours."""
    batches = B32.batches(effort.batches)
    cluster, model = cluster_and_model(B32.size)
    homo_exchange_s = sum(base_sync_s(HOMOGENEOUS, model, cluster))
    optimizer_s = AnalyticCost(cluster, model).optimizer_s(num_parameters(model) / B32.num_ranks)
    for source in effort.progress(SOURCES, "table1"):
        homo_s = fmean(max(seconds(source, B32, HOMOGENEOUS, batch)) for batch in batches)
        mixed_s = fmean(max(seconds(source, B32, HETEROGENEOUS, batch)) for batch in batches)
        hetero_s = fmean(chosen(source, B32, batch)[1] for batch in batches)
        without_s, overlapped_s = map(fmean, zip(*(_exchange_s(source, B32, batch) for batch in batches), strict=True))
        counted_s = fmean(chosen(source, B32, batch, HOMOGENEOUS)[1] for batch in batches)
        exchanges_s = (homo_exchange_s, without_s, overlapped_s)
        steps_s = [
            own_s + each + optimizer_s for own_s, each in zip((homo_s, hetero_s, hetero_s), exchanges_s, strict=True)
        ]
        yield f"P, homogeneous <16,1,1> x 4, {source}", homo_s
        yield f"P, heterogeneous, chosen every step, {source}", hetero_s
        yield f"P, <16,1,1> + <8,1,1> x 6, {source}", mixed_s
        yield f"P, homogeneous over heterogeneous, {source}", homo_s / hetero_s
        for at, column in enumerate(COLUMNS[1:], start=1):
            yield f"O-P, {column}, {source}", exchanges_s[at]
            yield f"O-P, homogeneous over {column}, {source}", homo_exchange_s / exchanges_s[at]
            yield f"E2E, homogeneous over {column}, {source}", steps_s[0] / steps_s[at]
        yield from ((f"E2E, {name}, {source}", step_s) for name, step_s in zip(COLUMNS, steps_s, strict=True))
        yield f"E2E, with overlap, chosen by both, {source}", counted_s + optimizer_s
    yield "O", optimizer_s
    yield "O-P, homogeneous", homo_exchange_s
    yield "B.2, tokens that hide a pull, as printed", PRINTED_TENSOR * PRINTED_FLOPS / PRINTED_BYTES_PER_S
    yield "B.2, tokens that hide a pull, by B.1's own W / TP", cluster.flops_per_s / cluster.nic_bytes_per_s


T = TypeVar("T")
# Table 2: seconds that solving takes, for ten steps: the paper's greedy dispatching, and our own
# ways of all three parts beside it.
#
# Ideal dispatching (40.21 s) and packing by integer programs are not here: HiGHS takes minutes.
SOLVED_STEPS = 10
SOLVED_JOBS = {"64 GPUs, 200K tokens": B32, "1024 GPUs, 3.2M tokens": TrainedCase("32b", 1024, 3_200_000)}


def _timed_s(run: Callable[[], T]) -> tuple[T, float]:
    begin = process_time()
    made = run()
    return made, process_time() - begin


def _table2(effort: Effort) -> Ours:
    """Wall seconds on this machine."""
    del effort
    known = costs(AUTHORS, "32b")
    for name, job in SOLVED_JOBS.items():
        drawn = job.batches(SAMPLE_BATCHES * B32.tokens // job.tokens + 1, SAMPLE_SEED)
        sample = [length for batch in drawn for length in batch]
        proposed, proposal_s = _timed_s(
            lambda job=job, sample=sample: propose(sample, job.tokens, known, job.num_ranks)
        )
        pipelines, batches = costs_of(proposed[max(proposed)][0], known, job.num_ranks), job.batches(SOLVED_STEPS)
        _, greedy_s = _timed_s(lambda own=pipelines, each=batches: [greedy(batch, own) for batch in each])
        dealt, dispatch_s = _timed_s(lambda own=pipelines, each=batches: [dispatch(batch, own) for batch in each])
        parts = [
            ([batch[seq] for seq in own], cost)
            for batch, of_batch in zip(batches, dealt, strict=True)
            for own, cost in zip(of_batch, pipelines, strict=True)
        ]
        _, pack_s = _timed_s(lambda parts=parts: [pack(own, cost) for own, cost in parts])
        yield f"greedy dispatching (Alg. 1, 100 trials), {name}", greedy_s
        yield f"our strategy proposal, {name}", proposal_s
        yield f"our dispatching, {name}", dispatch_s
        yield f"our packing, {name}", pack_s


LARGE = TrainedCase("32b", 1024, 1_600_000)
LARGE_STEPS = 30
MICROBATCHES = 4
SMALL = TrainedCase("7b", 8, 100_000)
SETTINGS = {"PP without DP, <4,2,1>": "tp4-pp2-cp1", "DP without PP, <4,1,1> x 2": "2*tp4-pp1-cp1"}


def _longest_of_steps(effort: Effort) -> Ours:
    """The shortest and the longest of the steps' longest sequences."""
    del effort
    each = [max(batch) for batch in LARGE.batches(LARGE_STEPS)]
    yield "longest sequence of a step, least of 30", min(each)
    yield "longest sequence of a step, most of 30", max(each)


def _fluctuation(effort: Effort) -> Ours:
    """(slowest - fastest) / slowest step among those that make four microbatches."""
    drawn = (SMALL.batches(1, SEED + at)[0] for at in count())
    four = (batch for batch in drawn if len(full(batch, SMALL.longest)) == MICROBATCHES)
    batches = list(islice(four, effort.batches))
    for source in SOURCES:
        for name, text in SETTINGS.items():
            each = [max(megatron(source, SMALL, Strategy.parse(text), batch)) for batch in batches]
            yield f"{name}, {source}", (max(each) - min(each)) / max(each)


PAPER = paper(
    "hydraulis",
    "Hydraulis (arXiv 2412.07894)",
    {
        "fig13": _fig13,
        "fig14": _fig14,
        "fig15a": _fig15a,
        "fig15b": _fig15b,
        "fig16": _fig16,
        "fig20": _fig20,
        "table1": _table1,
        "a1": _longest_of_steps,
        "a2": _fluctuation,
        "table2": _table2,
    },
)
