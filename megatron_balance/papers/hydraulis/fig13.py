"""Figure 13: Hydraulis over the best of Megatron-LM, DeepSpeed and HotSPa as Table 3 configures them.

DeepSpeed by our costs alone: the authors publish no coefficients of Ulysses or sharded weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from megatron_balance.ir.strategy import Strategy
from megatron_balance.papers.base import Effort, PaperTable, Row
from megatron_balance.papers.hydraulis.cases import AUTHORS, OURS, Job, K, Lengths, chosen, megatron
from megatron_balance.papers.hydraulis.deepspeed import deepspeed

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
SWITCH_S = {"7b": 1.54, "13b": 1.86, "32b": 2.19}
"""Seconds of its switches in a step, Table 4; those of 13B assumed in the middle."""
TOKENS = 100_000
LEAST, MOST = 1.32, 2.66
RANGE = (
    "published: least and most of all cells, over the best of Megatron-LM, DeepSpeed and HotSPa, whole steps; ours: "
    "HotSPa with Table 4's switches, DeepSpeed by our costs alone, propagation alone, 100K tokens a step "
    "(assumed: tokens by F are only drawn), both data sets"
)


def hotspa(source: str, job: Job, strategies: Sequence[str], batch: Lengths) -> float:
    """Seconds of a step in which each strategy trains its range of lengths, one after the other."""
    total_s, below = SWITCH_S[job.size], 0
    for text, longest in zip(reversed(strategies), RANGES, strict=False):
        own = [length for length in batch if below < length <= longest]
        below = longest
        total_s += max(megatron(source, replace(job, longest=longest), Strategy.parse(text), own))
    return total_s


def rows(effort: Effort) -> list[Row]:
    """Speed-up of each cell, and least and most of all.

    The authors have no coefficients for CP (Megatron-LM, 32B with 32K) and for 7B on one GPU (HotSPa).
    """
    found: list[Row] = []
    for source in (AUTHORS, OURS):
        gains: dict[str, float] = {}
        for cell in effort.progress(CELLS, f"fig13, {source}"):
            size, ranks, longest, text = cell
            for dataset in ("commoncrawl", "github-code"):
                job = Job(size, ranks, TOKENS, longest, dataset)
                batches = job.batches(effort.batches)
                before_s: list[float] = []
                if source == OURS or size != "7b":
                    before_s.append(
                        fmean(hotspa(source, job, HOTSPA[size, ranks, longest], batch) for batch in batches)
                    )
                if source == OURS or "cp2" not in text:
                    strategy = Strategy.parse(text)
                    before_s.append(fmean(max(megatron(source, job, strategy, batch)) for batch in batches))
                if source == OURS:
                    degree, recompute = ULYSSES[longest], size == "32b"
                    before_s.append(fmean(deepspeed(job, degree, batch, recompute=recompute) for batch in batches))
                after_s = fmean(chosen(source, job, batch)[1] for batch in batches)
                gains[f"{size.upper()}, {ranks} GPUs, {longest // K}K, {dataset}, {source}"] = min(before_s) / after_s
        found += [Row(name, None, gain, "x", "exact") for name, gain in gains.items()]
        found += [
            Row(f"least of all, {source}", LEAST, min(gains.values()), "x", "exact", note=RANGE),
            Row(f"most of all, {source}", MOST, max(gains.values()), "x", "exact", note=RANGE),
        ]
    return found


TABLE = PaperTable("Hydraulis over the best of the others", rows, batches=4)
