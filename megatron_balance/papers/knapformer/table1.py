"""Table 1: imbalance, latency, throughput and utilisation of FLUX with and without the balancer."""

from __future__ import annotations

from statistics import fmean

from megatron_balance.papers.base import ITSELF, Effort, Kind, PaperTable, Published, Row, published
from megatron_balance.papers.knapformer.cases import TOPOLOGIES, WITHOUT, WORKLOADS, SystemResult, batches, run

AUTO = "auto"

PUBLISHED: dict[str, dict[str, tuple[Published, ...]]] = {
    "low-resolution images": {
        WITHOUT: published(1.22, 3.13, 147.63e3, 0.2472),
        "g1n32": published(1.00, 2.95, 156.48e3, 0.2620),
        "g2n16": published(1.00, 3.30, 139.77e3, 0.2340),
        "g4n8": published(1.00, 3.51, 131.63e3, 0.2204),
        "g8n4": published(1.00, 4.30, 107.28e3, 0.1796),
    },
    "mixed-resolution images": {
        WITHOUT: published(17.14, 4.64, 58.58e3, 0.1454),
        "g1n32": published(3.92, 4.62, 58.95e3, 0.1463),
        "g2n16": published(1.27, 2.92, 93.08e3, 0.2310),
        "g4n8": published(1.01, 2.62, 103.74e3, 0.2574),
        "g8n4": published(1.00, 2.52, 108.06e3, 0.2681),
    },
    "images and videos": {
        WITHOUT: published(28.11, 8.05, 45.88e3, 0.1269),
        "g1n32": published(4.61, 8.11, 45.56e3, 0.1260),
        "g2n16": published(1.62, 4.71, 78.40e3, 0.2168),
        "g4n8": published(1.00, 3.55, 104.07e3, 0.2878),
        "g8n4": published(1.00, 3.44, 107.54e3, 0.2974),
    },
}
"""WIR, FBL, TPS, HFU."""
RATE = "FBL of low-resolution images under g1n32, which sets the rate of matrix products"
GAMMA = "gamma"
OURS = "not the paper's: its future work (section 5)"
COLUMNS: tuple[tuple[str, str, Kind], ...] = (
    ("WIR", "x", "exact"),
    ("FBL", "s", "simulated"),
    ("TPS", "tokens/s", "simulated"),
    ("HFU", "of peak", "simulated"),
)


def rows(effort: Effort) -> list[Row]:
    """Four rows a workload and system; means over the batches."""
    found: list[Row] = []
    for workload, codes in effort.progress(list(WORKLOADS.items()), "table1"):
        drawn = batches(codes, effort.batches)
        for system in (WITHOUT, *TOPOLOGIES, AUTO):
            printed = PUBLISHED[workload].get(system, (None,) * len(COLUMNS))
            each = [run(system, loaded) for loaded in drawn]
            fitted = (ITSELF,) if (workload, system) == ("low-resolution images", "g1n32") else ()
            for (what, unit, kind), known, field in zip(COLUMNS, printed, SystemResult.__slots__, strict=True):
                inputs = (GAMMA,) if kind == "exact" else (*fitted, RATE, GAMMA)
                ours = fmean(getattr(one, field) for one in each)
                note = OURS if system == AUTO else ""
                found.append(Row(f"{workload}, {system}: {what}", known, ours, unit, kind, note=note, inputs=inputs))
    return found


TABLE = PaperTable("FLUX on 32 H100 GPUs, with and without the balancer", rows, batches=8)
