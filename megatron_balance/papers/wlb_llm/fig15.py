"""Figure 15 and section 7.4: one layer of the 7B model on four context-parallel ranks, forward and
backward, by sharding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean

import numpy as np

from megatron_balance.papers.base import Effort, PaperTable, Published, Row, published
from megatron_balance.papers.wlb_llm.cases import B7_128K, FITTED, SKEW, TABLE_1, WlbCase
from megatron_balance.papers.wlb_llm.fig12 import OURS_NOTE
from megatron_balance.papers.wlb_llm.systems import (
    ADAPTIVE,
    PER_DOCUMENT,
    PLAIN,
    WlbSystem,
    in_blocks,
    speedups,
    with_error,
)
from megatron_balance.simulator.attention import attention_call, linear_tokens
from megatron_balance.workloads.distributions import K
from megatron_balance.workloads.lengths import Lengths

CASES = (replace(TABLE_1[2], context=4), replace(B7_128K, context=4))
PER_DOCUMENT_PUBLISHED = published(1.01, 1.07)
ADAPTIVE_PUBLISHED = published(1.075, 1.034)
OPTIMAL = "optimal"
OPTIMAL_NOTE = "the better of both for each microbatch; in the paper very close"
MIXED = WlbSystem("a choice for each document", "mixed")
SHARDINGS = (PLAIN, PER_DOCUMENT, ADAPTIVE, MIXED)


def layer_s(case: WlbCase, system: WlbSystem, lengths: Lengths) -> float:
    """Seconds of a layer, forward and backward, until its slowest rank is done."""
    plan = system.plan(case, lengths)
    tokens = linear_tokens(plan).tolist()
    linear = [np.array([case.cost.layer_s(n, backward=b) for n in tokens]) for b in (False, True)]
    call = attention_call(plan, case.machine, "keep", (linear[0], linear[1]))
    return sum(float(outcome.end_s.max()) for outcome in call)


def rows(effort: Effort) -> list[Row]:
    """Ratios by context window, and over both."""
    by_window: dict[int, dict[str, list[float]]] = {}
    for case in effort.progress(CASES, "fig15"):
        microbatches = [lengths for batch in case.batches(SKEW, effort.batches) for lengths in batch]
        seconds = {system.name: [layer_s(case, system, lengths) for lengths in microbatches] for system in SHARDINGS}
        # The better of both for each microbatch.
        seconds[OPTIMAL] = list(map(min, zip(seconds[PLAIN.name], seconds[PER_DOCUMENT.name], strict=True)))
        by_window[case.window] = seconds
    table_rows = [
        _row(
            f"{window // K}K: per-document over per-sequence",
            printed,
            _speedups(seconds, PER_DOCUMENT.name, PLAIN.name),
        )
        for (window, seconds), printed in zip(by_window.items(), PER_DOCUMENT_PUBLISHED, strict=True)
    ]
    for over, printed in zip((PLAIN, PER_DOCUMENT), ADAPTIVE_PUBLISHED, strict=True):
        ratios = [_speedups(seconds, ADAPTIVE.name, over.name) for seconds in by_window.values()]
        label = "per-sequence" if over is PLAIN else "per-document"
        both = [fmean(each) for each in zip(*ratios, strict=True)]
        table_rows.append(_row(f"adaptive over {label}, both windows", printed, both))
    for window, seconds in by_window.items():
        over_best = _speedups(seconds, ADAPTIVE.name, OPTIMAL)
        table_rows.append(_row(f"{window // K}K: adaptive over optimal", None, over_best, OPTIMAL_NOTE))
        mixed = _speedups(seconds, MIXED.name, ADAPTIVE.name)
        table_rows.append(_row(f"{window // K}K: a choice for each document over adaptive", None, mixed, OURS_NOTE))
    return table_rows


def _row(name: str, printed: Published | None, each: Sequence[float], note: str = "") -> Row:
    return Row(name, printed, each[0], "x", "simulated", note=with_error(note, each), inputs=FITTED[SKEW])


def _speedups(seconds: Mapping[str, Sequence[float]], system: str, over: str) -> list[float]:
    """Of all microbatches together, then of each block of them."""
    of, by = (in_blocks([(1, each) for each in seconds[name]]) for name in (system, over))
    return speedups(of, by)


TABLE = PaperTable("a layer of 7B by sharding, four context-parallel ranks", rows, batches=48)
