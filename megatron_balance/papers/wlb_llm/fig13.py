"""Figure 13: speedup over Plain-4D of each part of WLB-LLM alone, 7B-128K."""

from __future__ import annotations

from megatron_balance.papers.base import Effort, PaperTable, Published, Row
from megatron_balance.papers.wlb_llm.cases import B7_128K, FITTED, SKEW
from megatron_balance.papers.wlb_llm.fig12 import OURS_NOTE
from megatron_balance.papers.wlb_llm.systems import (
    ADAPTIVE,
    MIXED,
    PACKED,
    PER_DOCUMENT,
    PLAIN,
    WLB,
    speedups,
    with_error,
)

PUBLISHED = (
    (PER_DOCUMENT, Published(1.02)),
    (ADAPTIVE, Published(1.05)),
    (PACKED, Published(1.28)),
    (WLB, Published(1.33)),
    (MIXED, None),
)


def rows(effort: Effort) -> list[Row]:
    """A row for each part."""
    plain = PLAIN.blocks(B7_128K, SKEW, effort.batches)
    table_rows: list[Row] = []
    for system, printed in effort.progress(PUBLISHED, "fig13"):
        each = speedups(system.blocks(B7_128K, SKEW, effort.batches), plain)
        note = with_error(OURS_NOTE if system is MIXED else "", each)
        table_rows.append(Row(system.name, printed, each[0], "x", "simulated", note=note, inputs=FITTED[SKEW]))
    return table_rows


TABLE = PaperTable("speedup of each part over Plain-4D, 7B-128K", rows, batches=64)
