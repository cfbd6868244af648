"""Figure 14 and section 7.3: speedup over Plain-4D by context window, 7B."""

from __future__ import annotations

from dataclasses import replace

from megatron_balance.papers.base import Effort, PaperTable, Row
from megatron_balance.papers.wlb_llm.cases import B7_128K, SKEW
from megatron_balance.papers.wlb_llm.fig12 import DRAWN
from megatron_balance.papers.wlb_llm.systems import PLAIN, WLB
from megatron_balance.workloads.distributions import K

WINDOWS = (32 * K, 64 * K, 96 * K, 128 * K, 160 * K)
PUBLISHED = {160 * K: 1.40}


def rows(effort: Effort) -> list[Row]:
    """A row for each window."""
    table_rows: list[Row] = []
    for window in effort.progress(WINDOWS, "fig14"):
        case = replace(B7_128K, window=window)
        ours, plain = (system.tokens_per_s(case, SKEW, effort.batches) for system in (WLB, PLAIN))
        speedup = ours / plain
        published = PUBLISHED.get(window)
        note = DRAWN if published is None else ""
        table_rows.append(Row(f"{window // K}K", published, speedup, "x", "simulated", note=note))
    return table_rows


TABLE = PaperTable("speedup over Plain-4D by context window, 7B", rows, batches=12)
