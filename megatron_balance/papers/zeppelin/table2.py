"""Table 2: the distributions of sequence lengths that all other results are drawn from."""

from __future__ import annotations

from itertools import pairwise
from typing import cast

from megatron_balance.papers.base import ITSELF, Effort, PaperTable, Published, Row
from megatron_balance.workloads.distributions import DISTRIBUTIONS, Bins, K

TITLE = "shares of documents by length"
NAMES = {"arxiv": "ArXiv", "github": "GitHub", "prolong64k": "ProLong64k"}
SUM_NOTE = (
    "shares are divided by the sum of their row, which is 1 but for GitHub's: every printed share of it "
    "grows by 1 / 0.945"
)


def rows(_: Effort) -> list[Row]:
    """The sum of each row, and every share that is not 0 as we draw from it."""
    table_rows: list[Row] = []
    for dataset, name in NAMES.items():
        bins = cast("Bins", DISTRIBUTIONS[dataset])
        total = sum(bins.shares)
        table_rows.append(
            Row(
                f"{name}: sum of the row",
                Published(round(total, 6)),
                sum(share / total for share in bins.shares),
                "",
                "exact",
                note="" if abs(total - 1) < 1e-9 else SUM_NOTE,
                inputs=(ITSELF,),
            )
        )
        for (low, high), share in zip(pairwise(bins.edges), bins.shares, strict=True):
            if share:
                span = "< 1k" if high == K else f"{low // K}k - {high // K}k"
                printed = Published(share)
                table_rows.append(
                    Row(f"{name}: {span}", printed, share / total, "of documents", "exact", inputs=(ITSELF,))
                )
    return table_rows


TABLE = PaperTable(TITLE, rows)
