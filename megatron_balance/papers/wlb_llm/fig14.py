"""Figure 14 and section 7.3: speedup over Plain-4D by context window, 7B."""

from __future__ import annotations

from dataclasses import replace

from megatron_balance.papers.base import Effort, PaperTable, Published, Row
from megatron_balance.papers.wlb_llm.cases import B7_128K, FITTED, SKEW
from megatron_balance.papers.wlb_llm.fig12 import DRAWN
from megatron_balance.papers.wlb_llm.systems import PLAIN, WLB, speedups, with_error
from megatron_balance.workloads.distributions import K

WINDOWS = (32 * K, 64 * K, 96 * K, 128 * K, 160 * K)
PUBLISHED = {160 * K: Published(1.40)}


def rows(effort: Effort) -> list[Row]:
    """A row for each window."""
    table_rows: list[Row] = []
    for window in effort.progress(WINDOWS, "fig14"):
        case = replace(B7_128K, window=window)
        each = speedups(*(system.blocks(case, SKEW, effort.batches) for system in (WLB, PLAIN)))
        printed = PUBLISHED.get(window)
        note = with_error(DRAWN if printed is None else "", each)
        table_rows.append(Row(f"{window // K}K", printed, each[0], "x", "simulated", note=note, inputs=FITTED[SKEW]))
    return table_rows


TABLE = PaperTable("speedup over Plain-4D by context window, 7B", rows, batches=48)
