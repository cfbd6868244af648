"""Figure 3: tokens that each GPU of the image and video workload loads, on average; Table 1:
imbalance, latency, throughput and utilisation of FLUX with and without the balancer.
"""

from __future__ import annotations

from statistics import fmean

from megatron_balance.lab.papers.base import Effort, Ours, table
from megatron_balance.lab.papers.knapformer.cases import TOPOLOGIES, WITHOUT, WORKLOADS, SystemResult, batches, run
from megatron_balance.workloads.datacodes import IMAGES_AND_VIDEOS, TEXT_TOKENS, parse

AUTO = "auto"
COLUMNS = ("WIR", "FBL", "TPS", "HFU")


def fig3(_: Effort) -> Ours:
    """A row a data code."""
    for text, code in zip(IMAGES_AND_VIDEOS.split(","), parse(IMAGES_AND_VIDEOS), strict=True):
        yield f"{text}: tokens a GPU", code.samples * (code.visual_tokens + TEXT_TOKENS / 2)


def table1(effort: Effort) -> Ours:
    """Four rows a workload and system; means over the batches."""
    for workload, codes in effort.progress(list(WORKLOADS.items()), "table1"):
        drawn = batches(codes, effort.batches)
        for system in (WITHOUT, *TOPOLOGIES, AUTO):
            each = [run(system, loaded) for loaded in drawn]
            for what, field in zip(COLUMNS, SystemResult.__slots__, strict=True):
                yield f"{workload}, {system}: {what}", fmean(getattr(one, field) for one in each)


FIG3, TABLE1 = table("knapformer", "fig3", fig3), table("knapformer", "table1", table1)
