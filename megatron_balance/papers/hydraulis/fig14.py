"""Figure 14: seconds of propagation over GPUs, longest sequences and tokens a step, 7B."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

from megatron_balance.errors import InfeasibleError
from megatron_balance.papers.base import Effort, PaperTable, Row
from megatron_balance.papers.hydraulis.cases import SOURCES, K, TrainedCase, chosen, row

BASE = TrainedCase("7b", 16)
JOBS = {
    "16 GPUs, 32K, 200K tokens": BASE,
    "32 GPUs": replace(BASE, num_ranks=32),
    "64 GPUs": replace(BASE, num_ranks=64),
    "longest 64K": replace(BASE, longest=64 * K),
    "longest 128K": replace(BASE, longest=128 * K),
    "100K tokens": replace(BASE, tokens=100_000),
    "400K tokens": replace(BASE, tokens=400_000),
}
DRAWN = "only drawn; documents of commoncrawl are hardly ever longer than 32K, so the longest length binds rarely"


def rows(effort: Effort) -> list[Row]:
    """Hydraulis' seconds; jobs whose context length no scheme holds are left out."""
    found: list[Row] = []
    for source in SOURCES:
        for name, job in effort.progress(list(JOBS.items()), f"fig14, {source}"):
            try:
                mean_s = fmean(chosen(source, job, batch)[1] for batch in job.batches(effort.batches))
            except InfeasibleError:
                continue
            found.append(row(source, name, None, mean_s, "s", DRAWN))
    return found


TABLE = PaperTable("Hydraulis over GPUs, lengths and tokens, 7B", rows, batches=6)
