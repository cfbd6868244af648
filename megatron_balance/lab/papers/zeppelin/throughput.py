"""Throughput of 3B on cluster A, 4k tokens a GPU.

Figure 9 and section 5.2: as GPUs and context grow together; Figure 10: cluster B beside cluster A on
32 GPUs (assumed, which is not printed); Figure 11 and section 5.3: what routing, the attention engine
and remapping add to Transformer Engine's ring.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

from megatron_balance.lab.papers.base import Effort, Ours, table
from megatron_balance.lab.papers.zeppelin.fig12 import serial_routing_s
from megatron_balance.lab.papers.zeppelin.systems import (
    DATASETS,
    DEFAULT,
    ENGINE,
    ENGINE_ROUTED,
    HYBRID,
    LLAMA,
    OURS,
    TE,
    TE_ROUTED,
    ZEPPELIN,
    ZeppelinCase,
    tokens_per_s,
)

SCALES = (16, 32, 64, 128)
SMALL = SCALES[:2]
SYSTEMS = (TE, LLAMA, HYBRID, ZEPPELIN, DEFAULT)

RatesByCase = Mapping[tuple[str, int], Mapping[str, float]]
"""Tokens per second by data set and number of GPUs, then by system."""


def fig9(effort: Effort) -> Ours:
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


CLUSTERS = {"A": "a800", "B": "h800"}


def fig10(effort: Effort) -> Ours:
    """Speedups on both clusters, and what the text says of them."""
    cases = {name: ZeppelinCase("llama-3b", cluster, 32) for name, cluster in CLUSTERS.items()}
    for dataset, label in effort.progress(list(DATASETS.items()), "fig10"):
        rate: dict[tuple[str, str], float] = {}
        for name, case in cases.items():
            batches = case.batches(dataset, effort.batches)
            for system in (TE, ZEPPELIN, DEFAULT):
                rate[name, system.name] = tokens_per_s(system, case, batches)
        speedup = {name: rate[name, ZEPPELIN.name] / rate[name, TE.name] for name in CLUSTERS}
        for name in CLUSTERS:
            yield f"{label}: Zeppelin over TE CP on {name}", speedup[name]
        for name in CLUSTERS:
            yield f"{label}: zeppelin, default, over TE CP on {name}", rate[name, DEFAULT.name] / rate[name, TE.name]
        yield f"{label}: speedup on A over that on B", speedup["A"] / speedup["B"]
        yield f"{label}: throughput on B over that on A", rate["B", ZEPPELIN.name] / rate["A", ZEPPELIN.name]


VARIANTS = {
    "attention engine alone": ENGINE,
    "engine and routing": ENGINE_ROUTED,
    "engine, routing and remapping": ZEPPELIN,
    "zeppelin, rule groups": OURS,
    "zeppelin, default": DEFAULT,
}


def fig11(effort: Effort) -> Ours:
    """Each variant's speedup over TE's ring, by data set."""
    case = ZeppelinCase("llama-3b", "a800", 32)
    for dataset, label in effort.progress(list(DATASETS.items()), "fig11"):
        batches = case.batches(dataset, effort.batches)
        base = tokens_per_s(TE, case, batches)
        yield f"{label}: routing alone", tokens_per_s(TE_ROUTED, case, batches) / base
        serial_s = sum(serial_routing_s(case, lengths) for lengths in batches)
        yield f"{label}: routing alone, rounds in series", sum(map(sum, batches)) / serial_s / base
        speedup = {name: tokens_per_s(system, case, batches) / base for name, system in VARIANTS.items()}
        yield from ((f"{label}: {name}", each) for name, each in speedup.items())
        remap = speedup["engine, routing and remapping"] / speedup["engine and routing"]
        yield f"{label}: what remapping adds", remap


FIG9, FIG10, FIG11 = (
    table("zeppelin", name, ours) for name, ours in {"fig9": fig9, "fig10": fig10, "fig11": fig11}.items()
)
