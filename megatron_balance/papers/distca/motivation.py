"""Figures 3 to 6: what gathering keys costs, what balance by tokens costs in memory, and how short
shards run.
"""

from __future__ import annotations

from math import inf
from statistics import fmean

import numpy as np

from megatron_balance.analysis.memory import Holding, Sharding, rank_memory
from megatron_balance.cost.collectives import all_gather_s
from megatron_balance.ir.columns import Pair
from megatron_balance.papers.base import Effort, PaperTable, Published, Row, published
from megatron_balance.papers.distca.baselines import (
    deal,
    degrees,
    document_s,
    group_on,
    layer_s,
    per_document,
    wlb_by_config,
)
from megatron_balance.papers.distca.cases import TENSOR, DistcaCase
from megatron_balance.workloads.distributions import K

TOKENS_PER_NODE = 128 * K
SHARES = {2: published(0.03, 0.03), 16: (None, Published(0.30)), 32: (Published(0.40), None)}
"""Of time and of memory, by degree."""
IDLE = {4: Published(0.19), 8: Published(0.55)}
DIVERGES = 1.17
"""Most tokens of a rank over the mean that balance asks for, as printed; the memory's limit here."""
DRAWN = "drawn in the paper, not printed"
TOKENS_NOTE = "tokens of a node are not printed; 128K, as in Table 4, the same at every degree"


def fig3(_: Effort) -> list[Row]:
    """The gathering of keys and values: share of a layer's time and of a rank's memory, by degree
    (8B, documents of 32K).
    """
    table_rows: list[Row] = []
    for degree in (2, 4, 8, 16, 32):
        case = DistcaCase("8B", degree, degree * TOKENS_PER_NODE, 32 * K)
        share = per_document([32 * K] * (case.num_tokens // (32 * K)), degree)
        gather_s = all_gather_s(case.cost.kv_bytes(float(TOKENS_PER_NODE)), group_on(case, degree))
        time_share = gather_s / layer_s(case, share)[0]
        held = rank_memory(
            case.model,
            TOKENS_PER_NODE,
            case.num_tokens - TOKENS_PER_NODE,
            Sharding(TENSOR, optimizer=degree),
            Holding(),
        )
        of_time, of_memory = SHARES.get(degree, (None, None))
        table_rows.append(
            Row(f"{degree} nodes: all-gather", of_time, time_share, "of a layer forward", "simulated", note=TOKENS_NOTE)
        )
        table_rows.append(
            Row(
                f"{degree} nodes: gathered keys",
                of_memory,
                held.received / held.total,
                "of memory",
                "simulated",
                note=TOKENS_NOTE,
            )
        )
    return table_rows


def fig4(effort: Effort) -> list[Row]:
    """Documents dealt to replicas by work, without limit and within memory (8B, chunks of 512K
    tokens, no context parallelism).
    """
    table_rows: list[Row] = []
    for replicas in effort.progress([2, 4, 8], "fig4"):
        case = DistcaCase("8B", replicas, replicas * 512 * K, 512 * K)
        tokens: list[float] = []
        idle: list[tuple[float, float]] = []
        for batch in case.batches("pretrain", effort.batches):
            work = [document_s(case, n) for n in batch]
            loads: list[list[float]] = []
            for limit in (float("inf"), DIVERGES * case.tokens_per_rank):
                bins = deal(work, [float(n) for n in batch], replicas, limit)
                if bins is not None:
                    loads.append([sum(work[i] for i in each) for each in bins])
                    if limit == float("inf"):
                        tokens.append(max(sum(batch[i] for i in each) for each in bins) / case.tokens_per_rank)
            idle.append((max(loads[-1]) - fmean(loads[-1]), max(loads[-1])))
        name = f"data parallelism {replicas}"
        table_rows.append(
            Row(
                f"{name}: most tokens over the mean",
                None,
                fmean(tokens),
                "x",
                "simulated",
                note="printed: 1.08 to 1.17",
            )
        )
        of_the_time = sum(idle_s for idle_s, _ in idle) / sum(all_s for _, all_s in idle)
        note = "average idle time over average time of a layer's forward pass; the memory's limit is not printed"
        table_rows.append(
            Row(
                f"{name}: idle",
                IDLE.get(replicas),
                of_the_time,
                "of the time",
                "simulated",
                note=note,
                inputs=("1.17 times the mean tokens, Fig. 4a's most, as the memory's limit",),
            )
        )
    return table_rows


def fig5(effort: Effort) -> list[Row]:
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
    note = "printed: it drops below 128 tokens, the kernel's tile, and is high above"
    return [
        Row(f"shards of {n}", None, rate / rates[4096], "of the rate at 4096", "simulated", note=note)
        for n, rate in rates.items()
    ]


def fig6(effort: Effort) -> list[Row]:
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
    rates = {degree: fmean(each) if each else 0.0 for degree, each in samples.items()}
    return [
        Row(
            f"DP {8 // degree}, CP {degree}",
            None,
            rate,
            "tokens/s/GPU",
            "simulated",
            note=f"{DRAWN}; {len(samples[degree])} batches fit",
        )
        for degree, rate in rates.items()
    ]


FIG3 = PaperTable("gathering keys and values, by degree of context parallelism", fig3)
FIG4 = PaperTable("variable-length chunks: memory and idle time", fig4, batches=10)
FIG5 = PaperTable("rate of the attention kernel, by length of a shard", fig5, batches=10)
FIG6 = PaperTable("variable-length chunks with per-document context parallelism", fig6, batches=10)
