"""Figure 13: speedup over Plain-4D of each part of WLB-LLM alone, 7B-128K."""

from __future__ import annotations

from megatron_balance.papers.base import Effort, PaperTable, Row
from megatron_balance.papers.wlb_llm.cases import B7_128K, SKEW
from megatron_balance.papers.wlb_llm.fig12 import OURS_NOTE
from megatron_balance.papers.wlb_llm.systems import ADAPTIVE, MIXED, PACKED, PER_DOCUMENT, PLAIN, WLB

PUBLISHED = ((PER_DOCUMENT, 1.02), (ADAPTIVE, 1.05), (PACKED, 1.28), (WLB, 1.33), (MIXED, None))


def rows(effort: Effort) -> list[Row]:
    """A row for each part."""
    plain = PLAIN.tokens_per_s(B7_128K, SKEW, effort.batches)
    table_rows: list[Row] = []
    for system, published in effort.progress(PUBLISHED, "fig13"):
        speedup = system.tokens_per_s(B7_128K, SKEW, effort.batches) / plain
        note = OURS_NOTE if system is MIXED else ""
        table_rows.append(Row(system.name, published, speedup, "x", "simulated", note=note))
    return table_rows


TABLE = PaperTable("speedup of each part over Plain-4D, 7B-128K", rows, batches=20)
