"""Appendix A: the longest sequence of large steps (A.1), and steps whose attention differs (A.2)."""

from __future__ import annotations

from itertools import count, islice

from megatron_balance.ir.strategy import Strategy
from megatron_balance.papers.base import ITSELF, Effort, PaperTable, Published, Row, published
from megatron_balance.papers.hydraulis.cases import SEED, SOURCES, SPREAD, K, TrainedCase, full, megatron, row

LARGE = TrainedCase("32b", 1024, 1_600_000)
TOKENS = "1.6M tokens a step, as printed here; section 8.3 says 16M of the same, Appendix F 3.2M"
CUT = f"{TOKENS}; pages are cut at 32K, the context length"
LEAST, MOST = published(15 * K, 32 * K)
SET = (ITSELF, SPREAD)
STEPS = 30
MICROBATCHES = 4
SMALL = TrainedCase("7b", 8, 100_000)
SETTINGS = {"PP without DP, <4,2,1>": "tp4-pp2-cp1", "DP without PP, <4,1,1> x 2": "2*tp4-pp1-cp1"}
FLUCTUATES = Published(0.20)
FIGURE_18 = "schemes are not printed and assumed"


def longest(effort: Effort) -> list[Row]:
    """The shortest and the longest of the steps' longest sequences."""
    del effort
    each = [max(batch) for batch in LARGE.batches(STEPS)]
    return [
        Row("longest sequence of a step, least of 30", LEAST, min(each), "tokens", "exact", note=TOKENS, inputs=SET),
        Row("longest sequence of a step, most of 30", MOST, max(each), "tokens", "exact", note=CUT, inputs=SET),
    ]


def fluctuation(effort: Effort) -> list[Row]:
    """(slowest - fastest) / slowest step among those that make four microbatches."""
    drawn = (SMALL.batches(1, SEED + at)[0] for at in count())
    four = (batch for batch in drawn if len(full(batch, SMALL.longest)) == MICROBATCHES)
    batches = list(islice(four, effort.batches))
    found: list[Row] = []
    for source in SOURCES:
        for name, text in SETTINGS.items():
            each = [max(megatron(source, SMALL, Strategy.parse(text), batch)) for batch in batches]
            spread = (max(each) - min(each)) / max(each)
            found.append(row(source, name, FLUCTUATES, spread, "of slowest", FIGURE_18))
    return found


LONGEST = PaperTable("the longest sequence of large steps", longest, batches=STEPS)
FLUCTUATION = PaperTable("steps of equal tokens and microbatches, 7B on 8 GPUs", fluctuation, batches=20)
