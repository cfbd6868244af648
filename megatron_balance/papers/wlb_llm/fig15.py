"""Figure 15 and section 7.4: one layer of the 7B model on four context-parallel ranks, forward and
backward, by sharding.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

import numpy as np

from megatron_balance.papers.base import Effort, PaperTable, Row
from megatron_balance.papers.wlb_llm.cases import B7_128K, SKEW, TABLE_1, Case
from megatron_balance.papers.wlb_llm.fig12 import OURS_NOTE
from megatron_balance.papers.wlb_llm.systems import ADAPTIVE, PER_DOCUMENT, PLAIN, System
from megatron_balance.simulator.attention import attention_call, linear_tokens
from megatron_balance.workloads.distributions import K
from megatron_balance.workloads.lengths import Lengths

CASES = (replace(TABLE_1[2], context=4), replace(B7_128K, context=4))
PER_DOCUMENT_PUBLISHED = {64 * K: 1.01, 128 * K: 1.07}
MIXED = System("a choice for each document", "mixed")
SHARDINGS = (PLAIN, PER_DOCUMENT, ADAPTIVE, MIXED)


def layer_s(case: Case, system: System, lengths: Lengths) -> float:
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
        by_window[case.window] = {
            system.name: [layer_s(case, system, lengths) for lengths in microbatches] for system in SHARDINGS
        }
    table_rows = [
        Row(
            f"{window // K}K: per-document over per-sequence",
            PER_DOCUMENT_PUBLISHED[window],
            _speedup(seconds, PER_DOCUMENT, PLAIN),
            "x",
            "simulated",
        )
        for window, seconds in by_window.items()
    ]
    for over, published in ((PLAIN, 1.075), (PER_DOCUMENT, 1.034)):
        ratios = [_speedup(seconds, ADAPTIVE, over) for seconds in by_window.values()]
        label = "per-sequence" if over is PLAIN else "per-document"
        table_rows.append(Row(f"adaptive over {label}, both windows", published, fmean(ratios), "x", "simulated"))
    for window, seconds in by_window.items():
        best = sum(map(min, zip(seconds[PLAIN.name], seconds[PER_DOCUMENT.name], strict=True)))
        note = "the better of both for each microbatch; in the paper very close"
        over_best = best / sum(seconds[ADAPTIVE.name])
        table_rows.append(Row(f"{window // K}K: adaptive over optimal", None, over_best, "x", "simulated", note=note))
        mixed = _speedup(seconds, MIXED, ADAPTIVE)
        name = f"{window // K}K: a choice for each document over adaptive"
        table_rows.append(Row(name, None, mixed, "x", "simulated", note=OURS_NOTE))
    return table_rows


def _speedup(seconds: dict[str, list[float]], system: System, over: System) -> float:
    return sum(seconds[over.name]) / sum(seconds[system.name])


TABLE = PaperTable("a layer of 7B by sharding, four context-parallel ranks", rows, batches=20)
