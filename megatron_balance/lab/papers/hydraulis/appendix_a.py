"""Appendix A: the longest sequence of large steps (A.1), and steps whose attention differs (A.2)."""

from __future__ import annotations

from itertools import count, islice

from megatron_balance.ir.strategy import Strategy
from megatron_balance.lab.papers.base import Effort, Ours, table
from megatron_balance.lab.papers.hydraulis.cases import SEED, SOURCES, TrainedCase, full, megatron

LARGE = TrainedCase("32b", 1024, 1_600_000)
STEPS = 30
MICROBATCHES = 4
SMALL = TrainedCase("7b", 8, 100_000)
SETTINGS = {"PP without DP, <4,2,1>": "tp4-pp2-cp1", "DP without PP, <4,1,1> x 2": "2*tp4-pp1-cp1"}


def longest(effort: Effort) -> Ours:
    """The shortest and the longest of the steps' longest sequences."""
    del effort
    each = [max(batch) for batch in LARGE.batches(STEPS)]
    yield "longest sequence of a step, least of 30", min(each)
    yield "longest sequence of a step, most of 30", max(each)


def fluctuation(effort: Effort) -> Ours:
    """(slowest - fastest) / slowest step among those that make four microbatches."""
    drawn = (SMALL.batches(1, SEED + at)[0] for at in count())
    four = (batch for batch in drawn if len(full(batch, SMALL.longest)) == MICROBATCHES)
    batches = list(islice(four, effort.batches))
    for source in SOURCES:
        for name, text in SETTINGS.items():
            each = [max(megatron(source, SMALL, Strategy.parse(text), batch)) for batch in batches]
            yield f"{name}, {source}", (max(each) - min(each)) / max(each)


LONGEST, FLUCTUATION = table("hydraulis", "a1", longest), table("hydraulis", "a2", fluctuation)
