"""Table 1: imbalance, latency, throughput and utilisation of FLUX with and without the balancer."""

from __future__ import annotations

from statistics import fmean

from megatron_balance.papers.base import Effort, Ours, table
from megatron_balance.papers.knapformer.cases import TOPOLOGIES, WITHOUT, WORKLOADS, SystemResult, batches, run

AUTO = "auto"
COLUMNS = ("WIR", "FBL", "TPS", "HFU")


def ours(effort: Effort) -> Ours:
    """Four rows a workload and system; means over the batches."""
    for workload, codes in effort.progress(list(WORKLOADS.items()), "table1"):
        drawn = batches(codes, effort.batches)
        for system in (WITHOUT, *TOPOLOGIES, AUTO):
            each = [run(system, loaded) for loaded in drawn]
            for what, field in zip(COLUMNS, SystemResult.__slots__, strict=True):
                yield f"{workload}, {system}: {what}", fmean(getattr(one, field) for one in each)


TABLE = table("knapformer", "table1", ours)
