"""Figure 16: throughput as parts of Hydraulis are added one by one."""

from __future__ import annotations

from statistics import fmean

from megatron_balance.papers.base import Effort, PaperTable, Row
from megatron_balance.papers.hydraulis.cases import (
    B32,
    HOMOGENEOUS,
    SOURCES,
    candidates,
    chosen,
    megatron,
    packed_to_the_most,
    row,
    seconds,
)
from megatron_balance.solvers.dispatch import dispatch

DRAWN = "only drawn; over packing to the context length, dealt in turn"


def rows(effort: Effort) -> list[Row]:
    """Throughput over Megatron-LM's way; (c) is the candidate that holds the longest sequence."""
    batches, found = B32.batches(effort.batches), list[Row]()
    for source in effort.progress(SOURCES, "fig16"):
        widest = candidates(source, B32)[0]
        base_s = fmean(max(megatron(source, B32, HOMOGENEOUS, batch)) for batch in batches)
        steps = {
            "(a) dispatch": [max(packed_to_the_most(source, B32, HOMOGENEOUS, batch, dispatch)) for batch in batches],
            "(b) and packing": [max(seconds(source, B32, HOMOGENEOUS, batch)) for batch in batches],
            "(c) and a heterogeneous strategy": [max(seconds(source, B32, widest, batch)) for batch in batches],
            "(d) and one chosen every step": [chosen(source, B32, batch)[1] for batch in batches],
        }
        found += [row(source, name, None, base_s / fmean(each), "x", DRAWN) for name, each in steps.items()]
    return found


TABLE = PaperTable("throughput by part, 32B on 64 GPUs", rows, batches=20)
