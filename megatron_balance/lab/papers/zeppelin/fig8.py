"""Figure 8 and section 5.1: speedup over Transformer Engine's ring for four models, three data sets
and three context lengths.

What is not printed and assumed: the MoE model runs on cluster A, eight ranks share a layer's
experts; a context of 64k with tensor parallelism 2 is on 16 GPUs all the same ("4k per GPU"), so a
tensor-parallel group holds 8k tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from statistics import fmean

from megatron_balance.cost.experts import ExpertLoad
from megatron_balance.lab.papers.base import Effort, Ours, table
from megatron_balance.lab.papers.zeppelin.systems import (
    DATASETS,
    DEFAULT,
    HYBRID,
    LLAMA,
    OURS,
    TE,
    TOKENS_PER_GPU,
    ZEPPELIN,
    ZeppelinCase,
)
from megatron_balance.workloads.distributions import K
from megatron_balance.workloads.lengths import Lengths

CONTEXTS = (64 * K, 128 * K, 256 * K)
SYSTEMS = (TE, LLAMA, HYBRID, ZEPPELIN, OURS, DEFAULT)
UNEVEN = {
    "documents apart by 1": ExpertLoad(spread=1.0),
    "documents apart by 1.73": ExpertLoad(spread=1.73),
    "one expert 3 times as busy": ExpertLoad.counted((3, 1, 1, 1, 1, 1, 1, 1)),
}
"""Routing to experts: documents that prefer some, and as much as two of eight experts a token allow;
an expert that all prefer."""


@dataclass(frozen=True, slots=True)
class Panel:
    """A model of the figure. `label` as in the paper."""

    label: str
    model: str
    cluster: str
    tensor: int = 1
    experts: int = 1

    def case(self, context: int) -> ZeppelinCase:
        """On as many GPUs as the context fills."""
        return ZeppelinCase(self.model, self.cluster, context // TOKENS_PER_GPU, self.tensor, self.experts)


B7, B13 = Panel("7B", "llama-7b", "a800"), Panel("13B", "llama-13b", "a800", tensor=2)
B30, MOE = Panel("30B", "llama-30b", "h200", tensor=2), Panel("8x550M", "moe-8x550m", "a800", experts=8)
MODELS = (B7, B13, B30, MOE)

Cell = tuple[str, int, str]
"""Label of a model, context length, data set."""


def speedups(case: ZeppelinCase, batches: list[Lengths]) -> dict[str, float]:
    """Throughput of every system over that of TE's ring."""
    seconds = {system.name: sum(system.step_s(case, lengths) for lengths in batches) for system in SYSTEMS}
    return {name: seconds[TE.name] / each for name, each in seconds.items()}


def ours(effort: Effort) -> Ours:
    """Each cell of the grid, then what the text says of all."""
    by_cell: dict[Cell, dict[str, float]] = {}
    uneven: dict[str, list[dict[str, float]]] = {label: [] for label in UNEVEN}
    for model, context in effort.progress(list(product(MODELS, CONTEXTS)), "fig8"):
        case = model.case(context)
        for dataset in DATASETS:
            batches = case.batches(dataset, effort.batches)
            by_cell[model.label, context, dataset] = speedups(case, batches)
            if (model, context) == (MOE, CONTEXTS[0]):
                for label, load in UNEVEN.items():
                    uneven[label].append(speedups(replace(case, expert_load=load), batches))
    for (model, context, dataset), each in by_cell.items():
        cell = f"{model}, {context // K}k, {DATASETS[dataset]}"
        yield cell, each[ZEPPELIN.name]
        yield f"{cell}: zeppelin, default", each[DEFAULT.name]
    yield from _summary(by_cell)
    yield from _claims(by_cell)
    for label, found in uneven.items():
        for system in (ZEPPELIN, DEFAULT) if found else ():
            yield f"8x550M, 64k, {label}: LLaMA CP over {system.name}", _ahead(found, LLAMA.name, system.name)


def _ahead(found: Sequence[Mapping[str, float]], system: str, over: str) -> float:
    """One system's mean speedup over another's."""
    return fmean(each[system] for each in found) / fmean(each[over] for each in found)


def _summary(by_cell: Mapping[Cell, Mapping[str, float]]) -> Ours:
    cells = list(by_cell.values())
    names = {"Zeppelin": ZEPPELIN, "zeppelin with rule groups": OURS, "zeppelin by default": DEFAULT}
    for name, system in names.items():
        yield f"{name} over TE CP, mean", fmean(each[system.name] for each in cells)
        yield f"{name} over TE CP, largest", max(each[system.name] for each in cells)
    yield "zeppelin by default over Zeppelin, smallest", min(each[DEFAULT.name] / each[ZEPPELIN.name] for each in cells)
    for system in (HYBRID, LLAMA):
        yield f"{system.name} over TE CP, mean", fmean(each[system.name] for each in cells)


def _claims(by_cell: Mapping[Cell, Mapping[str, float]]) -> Ours:
    """Claims of the text without a number, each as a ratio that should be above or below 1."""

    def mean(model: str, dataset: str | None = None) -> float:
        return fmean(each[ZEPPELIN.name] for (m, _, d), each in by_cell.items() if m == model and dataset in (None, d))

    def ahead(system: str, over: str, context: int) -> float:
        return _ahead([each for (m, at, _), each in by_cell.items() if (m, at) == (MOE.label, context)], system, over)

    longest, shortest = CONTEXTS[-1], CONTEXTS[0]
    others = (TE.name, LLAMA.name, HYBRID.name)
    yield "7B: speedup on ArXiv over that on GitHub", mean("7B", "arxiv") / mean("7B", "github")
    yield "speedup of 13B over that of 7B, mean", mean("13B") / mean("7B")
    yield "8x550M, 64k: LLaMA CP over Zeppelin", ahead(LLAMA.name, ZEPPELIN.name, shortest)
    yield "8x550M, 256k: Zeppelin over LLaMA CP", ahead(ZEPPELIN.name, LLAMA.name, longest)
    best = min(
        each[ZEPPELIN.name] / max(each[name] for name in others)
        for (model, context, _), each in by_cell.items()
        if (model, context) != (MOE.label, shortest)
    )
    yield "Zeppelin over the best of the others, smallest", best


TABLE = table("zeppelin", "fig8", ours)
