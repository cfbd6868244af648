"""Figure 15 and section 7.4: one layer of the 7B model on four context-parallel ranks, forward and
backward, by sharding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean

import numpy as np

from megatron_balance.analysis.statistics import linear_tokens
from megatron_balance.lab.papers.base import Effort, Ours, table
from megatron_balance.lab.papers.wlb_llm.cases import B7_128K, SKEW, TABLE_1, WlbCase
from megatron_balance.lab.papers.wlb_llm.systems import (
    ADAPTIVE,
    PER_DOCUMENT,
    PLAIN,
    WlbSystem,
    error_of,
    in_blocks,
    speedups,
)
from megatron_balance.simulator.attention import attention_call
from megatron_balance.workloads.distributions import K
from megatron_balance.workloads.lengths import Lengths

CASES = (replace(TABLE_1[2], context=4), replace(B7_128K, context=4))
OPTIMAL = "optimal"
MIXED = WlbSystem("a choice for each document", "mixed")
SHARDINGS = (PLAIN, PER_DOCUMENT, ADAPTIVE, MIXED)


def layer_s(case: WlbCase, system: WlbSystem, lengths: Lengths) -> float:
    """Seconds of a layer, forward and backward, until its slowest rank is done."""
    plan = system.plan(case, lengths)
    tokens = linear_tokens(plan).tolist()
    linear = [np.array([case.cost.layer_s(n, backward=b) for n in tokens]) for b in (False, True)]
    call = attention_call(plan, case.machine, "keep", (linear[0], linear[1]))
    return sum(float(outcome.end_s.max()) for outcome in call)


def ours(effort: Effort) -> Ours:
    """Ratios by context window, and over both."""
    by_window: dict[int, dict[str, list[float]]] = {}
    for case in effort.progress(CASES, "fig15"):
        microbatches = [lengths for batch in case.batches(SKEW, effort.batches) for lengths in batch]
        seconds = {system.name: [layer_s(case, system, lengths) for lengths in microbatches] for system in SHARDINGS}
        # The better of both for each microbatch.
        seconds[OPTIMAL] = list(map(min, zip(seconds[PLAIN.name], seconds[PER_DOCUMENT.name], strict=True)))
        by_window[case.window] = seconds

    def of(name: str, each: Sequence[float]) -> tuple[str, float, str]:
        return name, each[0], error_of(each)

    for window, seconds in by_window.items():
        yield of(f"{window // K}K: per-document over per-sequence", _speedups(seconds, PER_DOCUMENT.name, PLAIN.name))
    for over, label in ((PLAIN, "per-sequence"), (PER_DOCUMENT, "per-document")):
        ratios = [_speedups(seconds, ADAPTIVE.name, over.name) for seconds in by_window.values()]
        both = [fmean(each) for each in zip(*ratios, strict=True)]
        yield of(f"adaptive over {label}, both windows", both)
    for window, seconds in by_window.items():
        yield of(f"{window // K}K: adaptive over optimal", _speedups(seconds, ADAPTIVE.name, OPTIMAL))
        mixed = _speedups(seconds, MIXED.name, ADAPTIVE.name)
        yield of(f"{window // K}K: a choice for each document over adaptive", mixed)


def _speedups(seconds: Mapping[str, Sequence[float]], system: str, over: str) -> list[float]:
    """Of all microbatches together, then of each block of them."""
    of, by = (in_blocks([(1, each) for each in seconds[name]]) for name in (system, over))
    return speedups(of, by)


TABLE = table("wlb_llm", "fig15", ours)
