"""Figure 13: Hydraulis over the best of Megatron-LM, DeepSpeed and HotSPa as Table 3 configures them;
Table 4's switches of HotSPa.

DeepSpeed by our costs alone: the authors publish no coefficients of Ulysses or sharded weights. What
moves weights and gradients is by links alone for all: Megatron-LM's all-gather and reduce-scatter,
DeepSpeed's of every layer, HotSPa's to each of its strategies from weights that the first one owns,
and what Hydraulis' pull and push leave uncovered. The optimizer is left out, alike for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from megatron_balance.analysis.change import base_for
from megatron_balance.ir.strategy import Strategy
from megatron_balance.lab.papers.base import Effort, Ours, table
from megatron_balance.lab.papers.hydraulis.cases import (
    OURS,
    SOURCES,
    K,
    Lengths,
    TrainedCase,
    candidates,
    chosen_step,
    megatron,
    moving,
)
from megatron_balance.lab.papers.hydraulis.deepspeed import deepspeed

SHORT, LONG = 16 * K, 32 * K
CELLS = (
    ("7b", 8, SHORT, "2*tp2-pp2-cp1"),
    ("7b", 8, LONG, "tp4-pp2-cp1"),
    ("7b", 16, SHORT, "4*tp2-pp2-cp1"),
    ("7b", 16, LONG, "2*tp4-pp2-cp1"),
    ("13b", 16, SHORT, "4*tp4-pp1-cp1"),
    ("13b", 16, LONG, "2*tp8-pp1-cp1"),
    ("13b", 32, SHORT, "8*tp4-pp1-cp1"),
    ("13b", 32, LONG, "4*tp8-pp1-cp1"),
    ("32b", 32, SHORT, "2*tp8-pp2-cp1"),
    ("32b", 32, LONG, "2*tp8-pp1-cp2"),
    ("32b", 64, SHORT, "4*tp8-pp2-cp1"),
    ("32b", 64, LONG, "4*tp8-pp1-cp2"),
)
"""Table 3's Megatron-LM: model, GPUs, context length (F1; F2 and F3), strategy."""
HOTSPA = {
    ("7b", 8, SHORT): ("2*tp2-pp2-cp1", "8*tp1-pp1-cp1"),
    ("7b", 8, LONG): ("tp4-pp2-cp1", "2*tp2-pp2-cp1", "8*tp1-pp1-cp1"),
    ("7b", 16, SHORT): ("4*tp2-pp2-cp1", "16*tp1-pp1-cp1"),
    ("7b", 16, LONG): ("2*tp4-pp2-cp1", "4*tp2-pp2-cp1", "16*tp1-pp1-cp1"),
    ("13b", 16, SHORT): ("4*tp4-pp1-cp1", "8*tp2-pp1-cp1"),
    ("13b", 16, LONG): ("2*tp8-pp1-cp1", "4*tp4-pp1-cp1", "8*tp2-pp1-cp1"),
    ("13b", 32, SHORT): ("8*tp4-pp1-cp1", "16*tp2-pp1-cp1"),
    ("13b", 32, LONG): ("4*tp8-pp1-cp1", "8*tp4-pp1-cp1", "16*tp2-pp1-cp1"),
    ("32b", 32, SHORT): ("2*tp8-pp2-cp1", "4*tp4-pp2-cp1"),
    ("32b", 32, LONG): ("2*tp16-pp1-cp1", "2*tp8-pp2-cp1", "4*tp4-pp2-cp1"),
    ("32b", 64, SHORT): ("4*tp8-pp2-cp1", "8*tp4-pp2-cp1"),
    ("32b", 64, LONG): ("4*tp16-pp1-cp1", "4*tp8-pp2-cp1", "8*tp4-pp2-cp1"),
}
"""Table 3's HotSPa, for the longest sequences first (Appendix G). For 7B on 8 GPUs with 32K it names
strategies of 16 GPUs; those of 16K stand in."""
ULYSSES = {SHORT: 4, LONG: 8}
"""Table 3's DeepSpeed: GPUs of a replica, by context length; with recomputation for 32B."""
RANGES = (4 * K, 16 * K, 32 * K)
"""Longest sequences of its strategies, from the last one on."""
TOKENS = 100_000
SWITCHED = (32, 64)
"""GPUs of Table 4, whose steps have the three strategies of Table 3 (assumed)."""


def hotspa(source: str, job: TrainedCase, strategies: Sequence[str], batch: Lengths) -> float:
    """Seconds of propagation of a step in which each strategy trains its range of lengths, one after
    the other.
    """
    total_s, below = 0.0, 0
    for text, longest in zip(reversed(strategies), RANGES, strict=False):
        own = [length for length in batch if below < length <= longest]
        below = longest
        total_s += max(megatron(source, replace(job, longest=longest), Strategy.parse(text), own))
    return total_s


def exchanged_s(job: TrainedCase, strategies: Sequence[str]) -> float:
    """Seconds of weights to each strategy from what the first one owns, and of gradients back."""
    base, *_ = each = [Strategy.parse(text) for text in strategies]
    return sum(moving(job, base, strategy, overlap=False).least_s for strategy in each)


def step_s(source: str, job: TrainedCase, text: str, batches: Sequence[Lengths], *, whole: bool) -> tuple[float, float]:
    """Mean seconds of the best of the others, and of Hydraulis. `whole`: exchanges count.

    The authors have no coefficients for CP (Megatron-LM, 32B with 32K) and for 7B on one GPU (HotSPa).
    """
    others_s: list[float] = []
    if source == OURS or job.size != "7b":
        strategies = HOTSPA[job.size, job.num_ranks, job.longest]
        propagation_s = fmean(hotspa(source, job, strategies, batch) for batch in batches)
        others_s.append(propagation_s + (exchanged_s(job, strategies) if whole else 0.0))
    if source == OURS or "cp2" not in text:
        propagation_s = fmean(max(megatron(source, job, Strategy.parse(text), batch)) for batch in batches)
        others_s.append(propagation_s + (exchanged_s(job, [text]) if whole else 0.0))
    if source == OURS:
        degree, recompute = ULYSSES[job.longest], job.size == "32b"
        others_s.append(fmean(deepspeed(job, degree, batch, recompute=recompute) for batch in batches))
    base = base_for(candidates(source, job), job.num_ranks) if whole else None
    return min(others_s), fmean(chosen_step(source, job, batch, base)[2] for batch in batches)


def ours(effort: Effort) -> Ours:
    """Speed-up of each cell, least and most, and of propagation alone; HotSPa's switches."""
    for source in SOURCES:
        gains: dict[bool, dict[str, float]] = {True: {}, False: {}}
        for size, ranks, longest, text in effort.progress(CELLS, f"fig13, {source}"):
            for dataset in ("commoncrawl", "github-code"):
                job = TrainedCase(size, ranks, TOKENS, longest, dataset)
                batches = job.batches(effort.batches)
                for whole, by_cell in gains.items():
                    before_s, after_s = step_s(source, job, text, batches, whole=whole)
                    by_cell[f"{size.upper()}, {ranks} GPUs, {longest // K}K, {dataset}"] = before_s / after_s
        yield from ((f"{name}, {source}", gain) for name, gain in gains[True].items())
        for whole, what in ((True, ""), (False, ", propagation alone")):
            yield f"least of all{what}, {source}", min(gains[whole].values())
            yield f"most of all{what}, {source}", max(gains[whole].values())
    for ranks in SWITCHED:
        switch_s = exchanged_s(TrainedCase("32b", ranks), HOTSPA["32b", ranks, LONG])
        yield f"HotSPa's switches in a step, 32B, {ranks} GPUs", switch_s


TABLE = table("hydraulis", "fig13", ours)
