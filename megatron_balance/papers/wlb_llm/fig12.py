"""Figure 12 and section 7.2: speedup of WLB-LLM and of Fixed-4D over Plain-4D on the configurations
of Table 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from megatron_balance.papers.base import Effort, PaperTable, Row
from megatron_balance.papers.wlb_llm.cases import COUNTED, SKEW, TABLE_1, Case
from megatron_balance.papers.wlb_llm.systems import MIXED, PLAIN, WLB, fixed_tokens_per_s
from megatron_balance.workloads.distributions import K

DRAWN = "drawn in the paper, not printed"
OURS_NOTE = "not the paper's: its future work (section 8)"
FIXED = "Fixed-4D"
BY_WINDOW = {64 * K: 1.15, 128 * K: 1.30}


def speedups(case: Case, dataset: str, num_batches: int) -> dict[str, float]:
    """Tokens per second over those of Plain-4D."""
    plain = PLAIN.tokens_per_s(case, dataset, num_batches)
    return {
        FIXED: fixed_tokens_per_s(case, dataset, num_batches) / plain,
        **{system.name: system.tokens_per_s(case, dataset, num_batches) / plain for system in (WLB, MIXED)},
    }


def rows(effort: Effort) -> list[Row]:
    """Rows of the numbers that the text prints, then of each configuration."""
    found = {case: speedups(case, SKEW, effort.batches) for case in effort.progress(TABLE_1, "fig12")}
    counted = {case: speedups(case, COUNTED, effort.batches) for case in effort.progress(TABLE_1, f"fig12, {COUNTED}")}
    cells = [
        Row(f"{case.name}: {system} over Plain-4D", None, each[system], "x", "simulated", note=DRAWN)
        for case, each in found.items()
        for system in (FIXED, WLB.name)
    ]
    return [*_summary(found, ""), *_summary(counted, f"{COUNTED}: "), *cells]


def _summary(found: Mapping[Case, Mapping[str, float]], what: str) -> list[Row]:
    def mean(system: str, over: str | None = None, cases: Sequence[Case] = TABLE_1) -> float:
        return fmean(found[case][system] / (found[case][over] if over else 1.0) for case in cases)

    by_window = [
        Row(
            f"{what}WLB-LLM over Plain-4D, {window // K}K, mean",
            published,
            mean(WLB.name, cases=[case for case in TABLE_1 if case.window == window]),
            "x",
            "simulated",
        )
        for window, published in BY_WINDOW.items()
    ]
    return [
        Row(f"{what}WLB-LLM over Plain-4D, mean", 1.23, mean(WLB.name), "x", "simulated"),
        Row(f"{what}WLB-LLM over Fixed-4D, mean", 1.19, mean(WLB.name, FIXED), "x", "simulated"),
        Row(f"{what}Fixed-4D over Plain-4D, mean", 1.03, mean(FIXED), "x", "simulated"),
        *by_window,
        Row(
            f"{what}{MIXED.name}, over Plain-4D, mean",
            None,
            mean(MIXED.name),
            "x",
            "simulated",
            note=OURS_NOTE,
        ),
    ]


TABLE = PaperTable("speedup over Plain-4D on the configurations of Table 1", rows, batches=12)
