"""Figures 3 to 6: what gathering keys costs, what balance by tokens costs in memory, and how short
shards run.
"""

from __future__ import annotations

from math import inf
from statistics import fmean

import numpy as np

from megatron_balance.analysis.memory import Holding, Sharding, rank_memory
from megatron_balance.cost.parallel import all_gather_s
from megatron_balance.ir.columns import Pair
from megatron_balance.lab.papers.base import Effort, Ours, number, table
from megatron_balance.lab.papers.distca.baselines import (
    deal,
    degrees,
    document_s,
    group_on,
    layer_s,
    per_document,
    wlb_by_config,
)
from megatron_balance.lab.papers.distca.cases import TENSOR, DistcaCase
from megatron_balance.workloads.distributions import K

TOKENS_PER_NODE = 128 * K


def fig3(_: Effort) -> Ours:
    """The gathering of keys and values: share of a layer's time and of a rank's memory, by degree
    (8B, documents of 32K).
    """
    for degree in (2, 4, 8, 16, 32):
        case = DistcaCase("8B", degree, degree * TOKENS_PER_NODE, 32 * K)
        share = per_document([32 * K] * (case.num_tokens // (32 * K)), degree)
        gather_s = all_gather_s(case.cost.kv_bytes(float(TOKENS_PER_NODE)), group_on(case, degree))
        yield f"{degree} nodes: all-gather", gather_s / layer_s(case, share)[0]
        sharding, others = Sharding(TENSOR, optimizer=degree), case.num_tokens - TOKENS_PER_NODE
        held = rank_memory(case.model, TOKENS_PER_NODE, others, sharding, Holding())
        yield f"{degree} nodes: gathered keys", held.received / held.total


def fig4(effort: Effort) -> Ours:
    """Documents dealt to replicas by work, without limit and within memory (8B, chunks of 512K
    tokens, no context parallelism). The memory's limit is the most tokens of a rank over the mean
    that balance asks for, as printed.
    """
    for replicas in effort.progress([2, 4, 8], "fig4"):
        case = DistcaCase("8B", replicas, replicas * 512 * K, 512 * K)
        tokens: list[float] = []
        idle: list[tuple[float, float]] = []
        for batch in case.batches("pretrain", effort.batches):
            work = [document_s(case, n) for n in batch]
            loads: list[list[float]] = []
            for limit in (inf, number("distca", "fig4", "diverges") * case.tokens_per_rank):
                bins = deal(work, [float(n) for n in batch], replicas, limit)
                if bins is not None:
                    loads.append([sum(work[i] for i in each) for each in bins])
                    if limit == inf:
                        tokens.append(max(sum(batch[i] for i in each) for each in bins) / case.tokens_per_rank)
            idle.append((max(loads[-1]) - fmean(loads[-1]), max(loads[-1])))
        name = f"data parallelism {replicas}"
        yield f"{name}: most tokens over the mean", fmean(tokens)
        yield f"{name}: idle", sum(idle_s for idle_s, _ in idle) / sum(all_s for _, all_s in idle)


def fig5(effort: Effort) -> Ours:
    """Rate of the attention kernel on a 32K-token chunk of shards of one length, whose contexts are
    drawn, over that at 4K.
    """
    case, generator = DistcaCase("8B", 8, 1024 * K, 128 * K), np.random.default_rng(0)
    rates: dict[int, float] = {}
    for length in (32, 64, 128, 256, 512, 1024, 4096):
        count = 32 * K // length
        each: list[float] = []
        for _ in range(effort.batches):
            pairs = np.zeros((count, Pair.WIDTH), dtype=np.int64)
            stop = length + generator.integers(0, 32 * K, count)
            pairs[:, Pair.Q_START], pairs[:, Pair.Q_STOP], pairs[:, Pair.K_STOP] = stop - length, stop, stop
            pairs[:, Pair.Q_HEAD_STOP], pairs[:, Pair.KV_HEAD_STOP] = case.model.num_heads, case.model.num_kv_heads
            seconds = case.cost.attend_s(pairs, np.zeros(count, dtype=np.int64), 1)[0]
            each.append(float((length * (stop - length + (length + 1) / 2)).sum() / seconds))
        rates[length] = fmean(each)
    return ((f"shards of {n}", rate / rates[4096]) for n, rate in rates.items())


def fig6(effort: Effort) -> Ours:
    """Documents dealt to replicas and cut in their groups, by degree of context parallelism (8B, 64
    GPUs, chunks of 512K).
    """
    case = DistcaCase("8B", 8, 1024 * K, 512 * K)
    samples: dict[int, list[float]] = {degree: [] for degree in degrees(8)}
    for batch in case.batches("pretrain", effort.batches):
        by_degree: dict[int, float] = {}
        for config, seconds in wlb_by_config(case, batch).items():
            by_degree[config.degree] = min(seconds, by_degree.get(config.degree, inf))
        for degree, seconds in by_degree.items():
            samples[degree].append(case.num_tokens / seconds / 8 / TENSOR)
    for degree, each in samples.items():
        yield f"DP {8 // degree}, CP {degree}", fmean(each) if each else 0.0, f"{len(each)} batches fit"


FIG3, FIG4 = table("distca", "fig3", fig3), table("distca", "fig4", fig4)
FIG5, FIG6 = table("distca", "fig5", fig5), table("distca", "fig6", fig6)
