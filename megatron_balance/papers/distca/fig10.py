"""Figure 10 and section 6.2: speedup over Megatron and WLB-LLM with pipelines, on the grid of Table
5.
"""

from __future__ import annotations

from itertools import product
from math import inf
from statistics import fmean

from megatron_balance.papers.base import Effort, PaperTable, Published, Row
from megatron_balance.papers.distca.baselines import megatron_s, wlb_s
from megatron_balance.papers.distca.cases import DATASETS, DistcaCase
from megatron_balance.papers.distca.distca import distca_s
from megatron_balance.papers.distca.fig9 import DRAWN, GridCell
from megatron_balance.workloads.distributions import K

STAGES = (1, 2, 4)
NODES = {"8B": (8, 16, 32), "34B": (16, 32, 64)}
TABLE_5 = {
    ("8B", 128): (32, 64, 128),
    ("8B", 256): (16, 32, 32),
    ("8B", 512): (8, 8, 16),
    ("34B", 128): (32, 64, 128),
    ("34B", 256): (16, 32, 32),
    ("34B", 384): (8, 8, 16),
}
"""Batch size on `NODES`, by model and MaxDocLen in K."""

PUBLISHED = {
    ("8B", "Megatron"): Published(1.83),
    ("8B", "WLB-ideal"): Published(1.35),
    ("34B", "Megatron"): Published(1.72),
    ("34B", "WLB-ideal"): Published(1.25),
}


def grid() -> list[GridCell]:
    """All configurations of Table 5 with both data sets."""
    cells: list[GridCell] = []
    for (model, longest), sizes in TABLE_5.items():
        for (num_nodes, size), dataset in product(zip(NODES[model], sizes, strict=True), DATASETS):
            cells.append(GridCell(DistcaCase(model, num_nodes, size * longest * K, longest * K, STAGES), dataset))
    return cells


def rows(effort: Effort) -> list[Row]:
    """The numbers that the text prints, then each cell of the grid."""
    by_cell: dict[tuple[str, str], dict[str, float]] = {}
    for cell in effort.progress(grid(), "fig10"):
        case, batches = cell.case, cell.case.batches(cell.dataset, effort.batches)
        ours = fmean(distca_s(case, batch) for batch in batches)
        others = {"Megatron": megatron_s, "WLB-ideal": wlb_s}
        by_cell[case.model_name, cell.name] = {
            name: fmean(of(case, batch) for batch in batches) / ours for name, of in others.items()
        }
    summary: list[Row] = []
    for (model, system), printed in PUBLISHED.items():
        finite = [each[system] for (of, _), each in by_cell.items() if of == model and each[system] < inf]
        summary.append(Row(f"{model}: over {system}, largest", printed, max(finite), "x", "simulated"))
        summary.append(Row(f"{model}: over {system}, mean", None, fmean(finite), "x", "simulated", note=DRAWN))
    cells = [
        Row(f"{name}: over {system}", None, ratio, "x", "simulated", note=DRAWN)
        for (_, name), each in by_cell.items()
        for system, ratio in each.items()
        if ratio < inf
    ]
    return [*summary, *cells]


TABLE = PaperTable("speedup with pipelines of 1, 2 or 4 stages, tensor parallelism 8, on the grid of Table 5", rows)
