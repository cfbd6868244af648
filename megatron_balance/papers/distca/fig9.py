"""Figure 9 and section 6.2: speedup over Megatron, FlexSP and WLB-LLM without pipelines, on the
grid of Table 4.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import inf
from statistics import fmean

from megatron_balance.papers.base import Effort, PaperTable, Published, Row
from megatron_balance.papers.distca.baselines import flexsp_s, megatron_s, wlb_s
from megatron_balance.papers.distca.cases import DATASETS, DistcaCase
from megatron_balance.papers.distca.distca import distca_s
from megatron_balance.workloads.distributions import K

NODES = (8, 16, 32)
TABLE_4 = {
    ("8B", 128): (8, 16, 32),
    ("8B", 256): (4, 8, 16),
    ("8B", 512): (2, 4, 8),
    ("34B", 128): (4, 8, 16),
    ("34B", 256): (2, 4, 8),
    ("34B", 512): (2, 4, 8),
}
"""Batch size on 64, 128 and 256 GPUs, by model and MaxDocLen in K."""

GREEDY = "FlexSP's groups, greedy"
PUBLISHED = {"Megatron": Published(1.92), GREEDY: None, "WLB-ideal": Published(1.20)}
DRAWN = "drawn in the paper, not printed"
NOTES = {
    GREEDY: "not the paper's FlexSP+ (1.35 at most), which runs FlexSP's integer program for 300 s a batch",
    "WLB-ideal": "ours deals documents evenly at any scale, and its memory holds 1.3 to 1.5 times the mean tokens on "
    "most of the grid",
}


@dataclass(frozen=True, slots=True)
class GridCell:
    """A configuration of the grid and a data set."""

    case: DistcaCase
    dataset: str

    @property
    def name(self) -> str:
        return (
            f"{self.case.model_name}, {self.case.max_doc // K}K, {8 * self.case.num_nodes} GPUs, "
            f"{DATASETS[self.dataset]}"
        )


def grid() -> list[GridCell]:
    """All configurations of Table 4 with both data sets."""
    cells: list[GridCell] = []
    for (model, longest), sizes in TABLE_4.items():
        for (num_nodes, size), dataset in product(zip(NODES, sizes, strict=True), DATASETS):
            cells.append(GridCell(DistcaCase(model, num_nodes, size * longest * K, longest * K), dataset))
    return cells


def speedups(cell: GridCell, num_batches: int) -> dict[str, float]:
    """DistCA's speedup over each of the others: mean time over mean time.

    Infinite: one that does not fit the memory.
    """
    batches, case = cell.case.batches(cell.dataset, num_batches), cell.case
    ours = fmean(distca_s(case, batch) for batch in batches)
    return {
        "Megatron": fmean(megatron_s(case, batch) for batch in batches) / ours,
        GREEDY: fmean(flexsp_s(case, batch) for batch in batches) / ours,
        "WLB-ideal": fmean(wlb_s(case, batch) for batch in batches) / ours,
    }


def rows(effort: Effort) -> list[Row]:
    """The numbers that the text prints, then each cell of the grid."""
    by_cell = {cell.name: speedups(cell, effort.batches) for cell in effort.progress(grid(), "fig9")}
    summary: list[Row] = []
    for system, printed in PUBLISHED.items():
        finite = [each[system] for each in by_cell.values() if each[system] < inf]
        note = (
            f"without {len(by_cell) - len(finite)} configurations that do not fit the memory"
            if len(finite) < len(by_cell)
            else ""
        )
        summary.append(
            Row(f"over {system}, largest", printed, max(finite), "x", "simulated", note=_joined(note, system))
        )
        summary.append(Row(f"over {system}, mean", None, fmean(finite), "x", "simulated", note=DRAWN))
    cells = [
        Row(f"{name}: over {system}", None, each[system], "x", "simulated", note=DRAWN)
        for name, each in by_cell.items()
        for system in PUBLISHED
        if each[system] < inf
    ]
    return [*summary, *cells]


def _joined(note: str, system: str) -> str:
    return "; ".join(part for part in (note, NOTES.get(system, "")) if part)


TABLE = PaperTable("speedup without pipelines, tensor parallelism 8, on the grid of Table 4", rows, batches=2)
