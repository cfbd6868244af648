"""Table 1, row P: seconds of propagation under one strategy and under several."""

from __future__ import annotations

from statistics import fmean

from megatron_balance.papers.base import Effort, PaperTable, Row
from megatron_balance.papers.hydraulis.cases import B32, HETEROGENEOUS, HOMOGENEOUS, SOURCES, chosen, seconds

HOMO_S, HETERO_S = 6.78, 4.29
OVERLAP_S, NO_OVERLAP_S, HOMO_EXCHANGE_S = 1.18, 1.71, 1.11
TOKENS = "200K tokens a step; 100K, the default of section 8.1, take half as long"
STATIC = "not the paper's: one mix for every step"
MISPRINT = "printed as 0.69x beside its own two numbers"


def rows(effort: Effort) -> list[Row]:
    """Means over the batches, by the authors' coefficients and by ours."""
    batches, found = B32.batches(effort.batches), list[Row]()
    for source in effort.progress(SOURCES, "table1"):
        homo_s = fmean(max(seconds(source, B32, HOMOGENEOUS, batch)) for batch in batches)
        mixed_s = fmean(max(seconds(source, B32, HETEROGENEOUS, batch)) for batch in batches)
        hetero_s = fmean(chosen(source, B32, batch)[1] for batch in batches)
        found += [
            Row(f"P, homogeneous <16,1,1> x 4, {source}", HOMO_S, homo_s, "s", "exact", note=TOKENS),
            Row(f"P, heterogeneous, chosen every step, {source}", HETERO_S, hetero_s, "s", "exact", note=TOKENS),
            Row(f"P, <16,1,1> + <8,1,1> x 6, {source}", None, mixed_s, "s", "exact", note=STATIC),
            Row(f"P, homogeneous over heterogeneous, {source}", 1.58, homo_s / hetero_s, "x", "exact"),
        ]
    return [
        *found,
        Row(
            "O-P, homogeneous over heterogeneous without overlap",
            0.69,
            HOMO_EXCHANGE_S / NO_OVERLAP_S,
            "x",
            "exact",
            note=MISPRINT,
        ),
        Row("O-P, homogeneous over heterogeneous with overlap", 0.94, HOMO_EXCHANGE_S / OVERLAP_S, "x", "exact"),
    ]


TABLE = PaperTable("propagation of a step, 32B on 64 GPUs", rows, batches=20)
