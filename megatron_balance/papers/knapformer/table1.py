"""Table 1: imbalance, latency, throughput and utilisation of FLUX with and without the balancer."""

from __future__ import annotations

from statistics import fmean

from megatron_balance.papers.base import Effort, PaperTable, Row
from megatron_balance.papers.knapformer.cases import TOPOLOGIES, WITHOUT, WORKLOADS, Result, batches, run

AUTO = "auto"

PUBLISHED: dict[str, dict[str, Result]] = {
    "low-resolution images": {
        WITHOUT: Result(1.22, 3.13, 147.63e3, 0.2472),
        "g1n32": Result(1.00, 2.95, 156.48e3, 0.2620),
        "g2n16": Result(1.00, 3.30, 139.77e3, 0.2340),
        "g4n8": Result(1.00, 3.51, 131.63e3, 0.2204),
        "g8n4": Result(1.00, 4.30, 107.28e3, 0.1796),
    },
    "mixed-resolution images": {
        WITHOUT: Result(17.14, 4.64, 58.58e3, 0.1454),
        "g1n32": Result(3.92, 4.62, 58.95e3, 0.1463),
        "g2n16": Result(1.27, 2.92, 93.08e3, 0.2310),
        "g4n8": Result(1.01, 2.62, 103.74e3, 0.2574),
        "g8n4": Result(1.00, 2.52, 108.06e3, 0.2681),
    },
    "images and videos": {
        WITHOUT: Result(28.11, 8.05, 45.88e3, 0.1269),
        "g1n32": Result(4.61, 8.11, 45.56e3, 0.1260),
        "g2n16": Result(1.62, 4.71, 78.40e3, 0.2168),
        "g4n8": Result(1.00, 3.55, 104.07e3, 0.2878),
        "g8n4": Result(1.00, 3.44, 107.54e3, 0.2974),
    },
}
FITTED = "sets the rate of the modules (cases.RATE)"
OURS = "not the paper's: its future work (section 5)"


def rows(effort: Effort) -> list[Row]:
    """Four rows a workload and system; means over the batches."""
    found: list[Row] = []
    for workload, codes in effort.progress(list(WORKLOADS.items()), "table1"):
        drawn = batches(codes, effort.batches)
        for system in (WITHOUT, *TOPOLOGIES, AUTO):
            published = PUBLISHED[workload].get(system)
            each = [run(system, loaded) for loaded in drawn]
            ours = Result(*(fmean(getattr(one, name) for one in each) for name in Result.__slots__))
            note = OURS if published is None else ""
            if (workload, system) == ("low-resolution images", "g1n32"):
                note = FITTED
            found += _rows(f"{workload}, {system}", published, ours, note)
    return found


def _rows(name: str, published: Result | None, ours: Result, note: str) -> list[Row]:
    def of(field: str) -> float | None:
        return None if published is None else getattr(published, field)

    return [
        Row(f"{name}: WIR", of("wir"), ours.wir, "x", "exact", note=note),
        Row(f"{name}: FBL", of("fbl_s"), ours.fbl_s, "s", "simulated", note=note),
        Row(f"{name}: TPS", of("tokens_per_s"), ours.tokens_per_s, "tokens/s", "simulated", note=note),
        Row(f"{name}: HFU", of("hfu"), ours.hfu, "of peak", "simulated", note=note),
    ]


TABLE = PaperTable("FLUX on 32 H100 GPUs, with and without the balancer", rows, batches=8)
