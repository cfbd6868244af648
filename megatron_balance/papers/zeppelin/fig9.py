"""Figure 9 and section 5.2: throughput as GPUs and context grow together. 3B on cluster A, 4k
tokens a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

from megatron_balance.papers.base import Effort, Ours, table
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


def ours(effort: Effort) -> Ours:
    """Throughput by scale, growth from the smallest to the largest scale, and the text's claims."""
    cases = {scale: ZeppelinCase("llama-3b", "a800", scale) for scale in SCALES}
    by_case: dict[tuple[str, int], dict[str, float]] = {}
    for dataset, scale in effort.progress(list(product(DATASETS, SCALES)), "fig9"):
        batches = cases[scale].batches(dataset, effort.batches)
        by_case[dataset, scale] = {system.name: tokens_per_s(system, cases[scale], batches) for system in SYSTEMS}
    for (dataset, scale), rates in by_case.items():
        yield from ((f"{DATASETS[dataset]}, {scale} GPUs: {name}", rate) for name, rate in rates.items())
    for dataset, label in DATASETS.items():
        for name in by_case[dataset, SCALES[0]]:
            yield f"{label}: growth of {name}", ratio(by_case, dataset, name)

    def smallest(of: str, *over: str) -> float:
        return min(rates[of] / max(rates[name] for name in over) for rates in by_case.values())

    yield "LLaMA CP over TE CP, smallest", smallest(LLAMA.name, TE.name)
    hybrid = max(rates[HYBRID.name] / rates[LLAMA.name] for (_, scale), rates in by_case.items() if scale in SMALL)
    yield "Hybrid DP over LLaMA CP on 16 and 32 GPUs, largest", hybrid
    best = smallest(ZEPPELIN.name, TE.name, LLAMA.name, HYBRID.name)
    yield "Zeppelin over the best of the others, smallest", best
    slower = ratio(by_case, "github", ZEPPELIN.name) / ratio(by_case, "arxiv", ZEPPELIN.name)
    yield "growth of Zeppelin on GitHub over that on ArXiv", slower


def ratio(by_case: RatesByCase, dataset: str, name: str) -> float:
    """A system's throughput on the most GPUs over that on the fewest."""
    return by_case[dataset, SCALES[-1]][name] / by_case[dataset, SCALES[0]][name]


TABLE = table("zeppelin", "fig9", ours)
