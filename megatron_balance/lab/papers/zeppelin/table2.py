"""Table 2: the distributions of sequence lengths that all other results are drawn from."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import cast

from megatron_balance.lab.papers.base import Effort, Ours, PaperTable, Published, Row, table
from megatron_balance.lab.papers.zeppelin.systems import DATASETS
from megatron_balance.workloads.distributions import DISTRIBUTIONS, Bins, K


def _shares() -> dict[str, tuple[Published, float]]:
    """By name of a row, what is printed, and as we draw from it; shares of 0 are left out."""
    found: dict[str, tuple[Published, float]] = {}
    for dataset, name in DATASETS.items():
        bins = cast("Bins", DISTRIBUTIONS[dataset])
        total = sum(bins.shares)
        found[f"{name}: sum of the row"] = Published(round(total, 6)), sum(share / total for share in bins.shares)
        for (low, high), share in zip(pairwise(bins.edges), bins.shares, strict=True):
            if share:
                span = "< 1k" if high == K else f"{low // K}k - {high // K}k"
                found[f"{name}: {span}"] = Published(share), share / total
    return found


def ours(_: Effort) -> Ours:
    """The sum of each row, and every share that is not 0."""
    return ((name, drawn) for name, (_, drawn) in _shares().items())


def rows(effort: Effort) -> list[Row]:
    """Printed are the numbers that we draw from."""
    printed = _shares()
    return [replace(row, published=printed[row.name][0]) for row in _TABLE.rows(effort)]


_TABLE = table("zeppelin", "table2", ours)
TABLE = PaperTable(_TABLE.title, rows)
