"""Figure 9 and section 5.2: throughput as GPUs and context grow together. 3B on cluster A, 4k
tokens a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

from megatron_balance.papers.base import STATED, Effort, PaperTable, Row
from megatron_balance.papers.zeppelin.fig8 import DEFAULT_NOTE, DRAWN
from megatron_balance.papers.zeppelin.systems import (
    DATASETS,
    DEFAULT,
    HYBRID,
    LLAMA,
    TE,
    ZEPPELIN,
    ZeppelinCase,
    tokens_per_s,
)

SCALES = (16, 32, 64, 128)
SMALL = SCALES[:2]
SYSTEMS = (TE, LLAMA, HYBRID, ZEPPELIN, DEFAULT)

RatesByCase = Mapping[tuple[str, int], Mapping[str, float]]
"""Tokens per second by data set and number of GPUs, then by system."""


def rows(effort: Effort) -> list[Row]:
    """Throughput by scale, growth from the smallest to the largest scale, and the text's claims."""
    cases = {scale: ZeppelinCase("llama-3b", "a800", scale) for scale in SCALES}
    by_case: dict[tuple[str, int], dict[str, float]] = {}
    for dataset, scale in effort.progress(list(product(DATASETS, SCALES)), "fig9"):
        case = cases[scale]
        batches = case.batches(dataset, effort.batches)
        by_case[dataset, scale] = {system.name: tokens_per_s(system, case, batches) for system in SYSTEMS}
    return [*_rates(by_case), *_growth(by_case), *_claims(by_case)]


def _rates(by_case: RatesByCase) -> list[Row]:
    return [
        Row(
            f"{DATASETS[dataset]}, {scale} GPUs: {name}",
            None,
            rates[name],
            "tokens/s",
            "simulated",
            note=DEFAULT_NOTE if name == DEFAULT.name else DRAWN,
        )
        for (dataset, scale), rates in by_case.items()
        for name in rates
    ]


def _growth(by_case: RatesByCase) -> list[Row]:
    """Throughput on the most GPUs over that on the fewest."""
    note = f"tokens/s on {SCALES[-1]} GPUs over those on {SCALES[0]}; the paper: TE CP is nearly constant"
    return [
        Row(
            f"{label}: growth of {name}",
            STATED if name == TE.name else None,
            ratio(by_case, dataset, name),
            "x",
            "simulated",
            note=note,
        )
        for dataset, label in DATASETS.items()
        for name in by_case[dataset, SCALES[0]]
    ]


def ratio(by_case: RatesByCase, dataset: str, name: str) -> float:
    """A system's throughput on the most GPUs over that on the fewest."""
    return by_case[dataset, SCALES[-1]][name] / by_case[dataset, SCALES[0]][name]


def _claims(by_case: RatesByCase) -> list[Row]:
    def smallest(of: str, *over: str) -> float:
        return min(rates[of] / max(rates[name] for name in over) for rates in by_case.values())

    hybrid = max(rates[HYBRID.name] / rates[LLAMA.name] for (_, scale), rates in by_case.items() if scale in SMALL)
    slower = ratio(by_case, "github", ZEPPELIN.name) / ratio(by_case, "arxiv", ZEPPELIN.name)
    return [
        Row("LLaMA CP over TE CP, smallest", STATED, smallest(LLAMA.name, TE.name), "x", "simulated", ">="),
        Row("Hybrid DP over LLaMA CP on 16 and 32 GPUs, largest", STATED, hybrid, "x", "simulated", "<="),
        Row(
            "Zeppelin over the best of the others, smallest",
            STATED,
            smallest(ZEPPELIN.name, TE.name, LLAMA.name, HYBRID.name),
            "x",
            "simulated",
            ">=",
        ),
        Row("growth of Zeppelin on GitHub over that on ArXiv", STATED, slower, "x", "simulated", "<="),
    ]


TABLE = PaperTable("scaling from 16 to 128 GPUs at 4k tokens a GPU; 3B, cluster A", rows, batches=3)
