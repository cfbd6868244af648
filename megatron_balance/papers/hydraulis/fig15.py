"""Figure 15: strategies chosen over 100 steps (a), and how even pipelines end (b)."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from statistics import fmean

from megatron_balance.papers.base import Effort, PaperTable, Published, Row, published
from megatron_balance.papers.hydraulis.cases import B32, HOMOGENEOUS, SOURCES, chosen, gap, megatron, row, seconds

MEGATRON, HYDRAULIS = published(0.36, 0.65), published(0.02, 0.10)
"""Least and most of five steps, as printed."""
FASTER = Published(1.6)
DRAWN = "only drawn"
MEDIAN = 'published: "1.6x in most cases" of one strategy; ours: the median of the steps\' choices'
RANGE = "published: the range of five steps, end to end; ours: the mean of the steps, pipelines by estimated seconds"


def choices(effort: Effort) -> list[Row]:
    """How often each strategy is chosen, and what that gains over <16,1,1> x 4 where it is chosen."""
    batches, found = B32.batches(effort.batches), list[Row]()
    for source in effort.progress(SOURCES, "fig15a"):
        taken = [chosen(source, B32, batch) for batch in batches]
        homo_s = [max(seconds(source, B32, HOMOGENEOUS, batch)) for batch in batches]
        count = Counter(str(strategy) for strategy, _ in taken)
        gains = sorted(slow / fast for slow, (_, fast) in zip(homo_s, taken, strict=True))
        found += [
            row(source, name, None, number / len(batches), "of steps", DRAWN) for name, number in count.most_common()
        ]
        median = gains[len(gains) // 2]
        found.append(row(source, "chosen strategy over <16,1,1> x 4, median", FASTER, median, "x", MEDIAN))
    return found


def balance(effort: Effort) -> list[Row]:
    """(slowest - fastest) / slowest over pipelines."""
    batches, found = B32.batches(effort.batches), list[Row]()
    for source in effort.progress(SOURCES, "fig15b"):
        gaps = {
            "Megatron-LM": (MEGATRON, [gap(megatron(source, B32, HOMOGENEOUS, batch)) for batch in batches]),
            "Hydraulis": (
                HYDRAULIS,
                [gap(seconds(source, B32, chosen(source, B32, batch)[0], batch)) for batch in batches],
            ),
        }
        for system, ((least, most), each) in gaps.items():
            found += [
                replace(row(source, f"{system}, mean, at least", least, fmean(each), "of slowest", RANGE), sign=">="),
                replace(row(source, f"{system}, mean, at most", most, fmean(each), "of slowest", RANGE), sign="<="),
                row(source, f"{system}, largest", None, max(each), "of slowest"),
            ]
    return found


CHOICES = PaperTable("strategies chosen, 32B on 64 GPUs", choices, batches=40)
BALANCE = PaperTable("how unevenly pipelines end, 32B on 64 GPUs", balance, batches=20)
