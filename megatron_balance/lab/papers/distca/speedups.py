"""Figures 9 and 10 and section 6.2: speedup over Megatron, FlexSP and WLB-LLM without pipelines, on
the grid of Table 4; over Megatron and WLB-LLM with pipelines, on that of Table 5.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from math import inf
from statistics import fmean

from megatron_balance.lab.papers.base import Effort, Ours, table
from megatron_balance.lab.papers.distca.baselines import flexsp_s, megatron_s, wlb_s
from megatron_balance.lab.papers.distca.cases import DATASETS, DistcaCase
from megatron_balance.lab.papers.distca.distca import distca_s
from megatron_balance.workloads.distributions import K

Sizes = Mapping[tuple[str, int], Sequence[int]]
"""Batch size by number of nodes, by model and MaxDocLen in K."""
TABLE_4: Sizes = {
    ("8B", 128): (8, 16, 32),
    ("8B", 256): (4, 8, 16),
    ("8B", 512): (2, 4, 8),
    ("34B", 128): (4, 8, 16),
    ("34B", 256): (2, 4, 8),
    ("34B", 512): (2, 4, 8),
}
TABLE_5: Sizes = {
    ("8B", 128): (32, 64, 128),
    ("8B", 256): (16, 32, 32),
    ("8B", 512): (8, 8, 16),
    ("34B", 128): (32, 64, 128),
    ("34B", 256): (16, 32, 32),
    ("34B", 384): (8, 8, 16),
}
NODES = {"8B": (8, 16, 32), "34B": (8, 16, 32)}
NODES_5 = {"8B": (8, 16, 32), "34B": (16, 32, 64)}
STAGES = (1, 2, 4)
"""Of Figure 10's pipelines."""

GREEDY = "FlexSP's groups, greedy"
Seconds = Callable[[DistcaCase, Sequence[int]], float]
Speedups = dict[tuple[DistcaCase, str], dict[str, float]]
"""By configuration and data set, DistCA's speedup over each of the others; infinite: one that does not
fit the memory."""


def grid(sizes: Sizes, nodes: Mapping[str, Sequence[int]], stages: tuple[int, ...] = (1,)) -> list[DistcaCase]:
    """All configurations of a table."""
    return [
        DistcaCase(model, num_nodes, size * longest * K, longest * K, stages)
        for (model, longest), by_nodes in sizes.items()
        for num_nodes, size in zip(nodes[model], by_nodes, strict=True)
    ]


def speedups(effort: Effort, name: str, cases: Sequence[DistcaCase], others: Mapping[str, Seconds]) -> Speedups:
    """Mean time over mean time, with both data sets."""
    found: Speedups = {}
    for case, dataset in effort.progress(list(product(cases, DATASETS)), name):
        batches = case.batches(dataset, effort.batches)
        ours_s = fmean(distca_s(case, batch) for batch in batches)
        found[case, dataset] = {
            of: fmean(each(case, batch) for batch in batches) / ours_s for of, each in others.items()
        }
    return found


def _cells(found: Speedups) -> Ours:
    for (case, dataset), each in found.items():
        cell = f"{case.model_name}, {case.max_doc // K}K, {8 * case.num_nodes} GPUs, {DATASETS[dataset]}"
        yield from ((f"{cell}: over {system}", ratio) for system, ratio in each.items() if ratio < inf)


def fig9(effort: Effort) -> Ours:
    """The numbers that the text prints, then each cell of the grid."""
    others: dict[str, Seconds] = {"Megatron": megatron_s, GREEDY: flexsp_s, "WLB-ideal": wlb_s}
    found = speedups(effort, "fig9", grid(TABLE_4, NODES), others)
    for system in others:
        finite = [each[system] for each in found.values() if each[system] < inf]
        left = len(found) - len(finite)
        yield (
            f"over {system}, largest",
            max(finite),
            f"without {left} configurations that do not fit the memory" if left else "",
        )
        yield f"over {system}, mean", fmean(finite)
    yield from _cells(found)


def fig10(effort: Effort) -> Ours:
    """Speedups with pipelines, model by model."""
    others: dict[str, Seconds] = {"Megatron": megatron_s, "WLB-ideal": wlb_s}
    found = speedups(effort, "fig10", grid(TABLE_5, NODES_5, STAGES), others)
    for model, system in product(NODES_5, others):
        finite = [each[system] for (case, _), each in found.items() if case.model_name == model and each[system] < inf]
        yield f"{model}: over {system}, largest", max(finite)
        yield f"{model}: over {system}, mean", fmean(finite)
    yield from _cells(found)


FIG9, FIG10 = table("distca", "fig9", fig9), table("distca", "fig10", fig10)
