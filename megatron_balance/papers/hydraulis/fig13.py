"""Figure 13: Hydraulis over Megatron-LM as Table 3 configures it, propagation alone."""

from __future__ import annotations

from statistics import fmean

from megatron_balance.ir.strategy import Strategy
from megatron_balance.papers.base import Effort, PaperTable, Row
from megatron_balance.papers.hydraulis.cases import AUTHORS, OURS, Job, K, chosen, megatron

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
TOKENS = 100_000
LEAST, MOST = 1.32, 2.66
RANGE = (
    "published: least and most of all cells, over the best of Megatron-LM, DeepSpeed and HotSPa, whole steps; ours: "
    "over Megatron-LM, propagation alone, 100K tokens a step (assumed: tokens by F are only drawn), both data sets"
)


def rows(effort: Effort) -> list[Row]:
    """Speed-up of each cell, and least and most of all; CP has no coefficients of the authors."""
    found: list[Row] = []
    for source in (AUTHORS, OURS):
        gains: dict[str, float] = {}
        for cell in effort.progress(CELLS, f"fig13, {source}"):
            size, ranks, longest, text = cell
            if source == AUTHORS and "cp2" in text:
                continue
            for dataset in ("commoncrawl", "github-code"):
                job = Job(size, ranks, TOKENS, longest, dataset)
                batches = job.batches(effort.batches)
                before_s = fmean(max(megatron(source, job, Strategy.parse(text), batch)) for batch in batches)
                after_s = fmean(chosen(source, job, batch)[1] for batch in batches)
                gains[f"{size.upper()}, {ranks} GPUs, {longest // K}K, {dataset}, {source}"] = before_s / after_s
        found += [Row(name, None, gain, "x", "exact") for name, gain in gains.items()]
        found += [
            Row(f"least of all, {source}", LEAST, min(gains.values()), "x", "exact", note=RANGE),
            Row(f"most of all, {source}", MOST, max(gains.values()), "x", "exact", note=RANGE),
        ]
    return found


TABLE = PaperTable("Hydraulis over Megatron-LM", rows, batches=6)
