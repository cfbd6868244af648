"""Figure 12 and section 7.2: speedup of WLB-LLM and of Fixed-4D over Plain-4D on the configurations
of Table 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from megatron_balance.papers.base import Effort, PaperTable, Published, Row, published
from megatron_balance.papers.wlb_llm.cases import COUNTED, FITTED, SKEW, TABLE_1, WlbCase
from megatron_balance.papers.wlb_llm.systems import MIXED, PLAIN, WLB, fixed_blocks, speedups, with_error
from megatron_balance.workloads.distributions import K

DRAWN = "drawn in the paper, not printed"
OURS_NOTE = "not the paper's: its future work (section 8)"
FIXED = "Fixed-4D"
OVER_PLAIN, OVER_FIXED, FIXED_GAINS = published(1.23, 1.19, 1.03)
BY_WINDOW = {64 * K: Published(1.15), 128 * K: Published(1.30)}


Found = Mapping[WlbCase, Mapping[str, Sequence[float]]]
"""By case and system, speedup over Plain-4D: of all blocks together, then of each."""


def over_plain(case: WlbCase, dataset: str, num_batches: int) -> dict[str, list[float]]:
    """Tokens per second over those of Plain-4D."""
    plain = PLAIN.blocks(case, dataset, num_batches)
    return {
        FIXED: speedups(fixed_blocks(case, dataset, num_batches), plain),
        **{system.name: speedups(system.blocks(case, dataset, num_batches), plain) for system in (WLB, MIXED)},
    }


def rows(effort: Effort) -> list[Row]:
    """Rows of the numbers that the text prints, then of each configuration."""
    found = {case: over_plain(case, SKEW, effort.batches) for case in effort.progress(TABLE_1, "fig12")}
    counted = {
        case: over_plain(case, COUNTED, effort.batches) for case in effort.progress(TABLE_1, f"fig12, {COUNTED}")
    }
    cells = [
        _row(f"{case.name}: {system} over Plain-4D", None, each[system], SKEW, DRAWN)
        for case, each in found.items()
        for system in (FIXED, WLB.name)
    ]
    return [*_summary(found, "", SKEW), *_summary(counted, f"{COUNTED}: ", COUNTED), *cells]


def _row(name: str, printed: Published | None, each: Sequence[float], dataset: str, note: str = "") -> Row:
    return Row(name, printed, each[0], "x", "simulated", note=with_error(note, each), inputs=FITTED[dataset])


def _summary(found: Found, what: str, dataset: str) -> list[Row]:
    def mean(system: str, over: str | None = None, window: int | None = None) -> list[float]:
        cases = [each for case, each in found.items() if window in (None, case.window)]
        ratios = [
            [one / other for one, other in zip(each[system], each[over], strict=False)] if over else each[system]
            for each in cases
        ]
        return [fmean(of_block) for of_block in zip(*ratios, strict=False)]

    return [
        _row(f"{what}WLB-LLM over Plain-4D, mean", OVER_PLAIN, mean(WLB.name), dataset),
        _row(f"{what}WLB-LLM over Fixed-4D, mean", OVER_FIXED, mean(WLB.name, FIXED), dataset),
        _row(f"{what}Fixed-4D over Plain-4D, mean", FIXED_GAINS, mean(FIXED), dataset),
        *(
            _row(f"{what}WLB-LLM over Plain-4D, {window // K}K, mean", printed, mean(WLB.name, window=window), dataset)
            for window, printed in BY_WINDOW.items()
        ),
        _row(f"{what}{MIXED.name}, over Plain-4D, mean", None, mean(MIXED.name), dataset, OURS_NOTE),
    ]


TABLE = PaperTable("speedup over Plain-4D on the configurations of Table 1", rows, batches=32)
