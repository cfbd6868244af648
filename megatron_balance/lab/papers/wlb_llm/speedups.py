"""Figures 12 to 14 and sections 7.2 and 7.3: speedup of WLB-LLM, of Fixed-4D and of each part over
Plain-4D: on the configurations of Table 1, alone at 7B-128K, and by context window.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from megatron_balance.lab.papers.base import Effort, Ours, table
from megatron_balance.lab.papers.wlb_llm.cases import B7_128K, COUNTED, SKEW, TABLE_1, WlbCase
from megatron_balance.lab.papers.wlb_llm.systems import (
    ADAPTIVE,
    MIXED,
    PACKED,
    PER_DOCUMENT,
    PLAIN,
    WLB,
    error_of,
    fixed_blocks,
    speedups,
)
from megatron_balance.workloads.distributions import K

FIXED = "Fixed-4D"
BY_WINDOW = (64 * K, 128 * K)
WINDOWS = (32 * K, 64 * K, 96 * K, 128 * K, 160 * K)

Found = Mapping[WlbCase, Mapping[str, Sequence[float]]]
"""By case and system, speedup over Plain-4D: of all blocks together, then of each."""


def over_plain(case: WlbCase, dataset: str, num_batches: int) -> dict[str, list[float]]:
    """Tokens per second over those of Plain-4D."""
    plain = PLAIN.blocks(case, dataset, num_batches)
    return {
        FIXED: speedups(fixed_blocks(case, dataset, num_batches), plain),
        **{system.name: speedups(system.blocks(case, dataset, num_batches), plain) for system in (WLB, MIXED)},
    }


def fig12(effort: Effort) -> Ours:
    """The numbers that the text prints, on both data sets; then each configuration."""
    names = {SKEW: "fig12", COUNTED: f"fig12, {COUNTED}"}
    found = {
        dataset: {case: over_plain(case, dataset, effort.batches) for case in effort.progress(TABLE_1, name)}
        for dataset, name in names.items()
    }
    yield from _summary(found[SKEW], "")
    yield from _summary(found[COUNTED], f"{COUNTED}: ")
    for case, each in found[SKEW].items():
        for system in (FIXED, WLB.name):
            yield f"{case.name}: {system} over Plain-4D", each[system][0], error_of(each[system])


def _summary(found: Found, what: str) -> Ours:
    def mean(system: str, over: str | None = None, window: int | None = None) -> list[float]:
        cases = [each for case, each in found.items() if window in (None, case.window)]
        ratios = [
            [one / other for one, other in zip(each[system], each[over], strict=False)] if over else each[system]
            for each in cases
        ]
        return [fmean(of_block) for of_block in zip(*ratios, strict=False)]

    for name, each in {
        "WLB-LLM over Plain-4D, mean": mean(WLB.name),
        "WLB-LLM over Fixed-4D, mean": mean(WLB.name, FIXED),
        "Fixed-4D over Plain-4D, mean": mean(FIXED),
        **{f"WLB-LLM over Plain-4D, {each // K}K, mean": mean(WLB.name, window=each) for each in BY_WINDOW},
        f"{MIXED.name}, over Plain-4D, mean": mean(MIXED.name),
    }.items():
        yield f"{what}{name}", each[0], error_of(each)


def fig13(effort: Effort) -> Ours:
    """Each part alone."""
    plain = PLAIN.blocks(B7_128K, SKEW, effort.batches)
    for system in effort.progress((PER_DOCUMENT, ADAPTIVE, PACKED, WLB, MIXED), "fig13"):
        each = speedups(system.blocks(B7_128K, SKEW, effort.batches), plain)
        yield system.name, each[0], error_of(each)


def fig14(effort: Effort) -> Ours:
    """Each context window."""
    for window in effort.progress(WINDOWS, "fig14"):
        case = replace(B7_128K, window=window)
        each = speedups(*(system.blocks(case, SKEW, effort.batches) for system in (WLB, PLAIN)))
        yield f"{window // K}K", each[0], error_of(each)


FIG12, FIG13 = table("wlb_llm", "fig12", fig12), table("wlb_llm", "fig13", fig13)
FIG14 = table("wlb_llm", "fig14", fig14)
