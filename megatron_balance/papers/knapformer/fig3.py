"""Figure 3: tokens that each GPU of the image and video workload loads, on average."""

from __future__ import annotations

from megatron_balance.papers.base import Effort, Ours, table
from megatron_balance.workloads.datacodes import IMAGES_AND_VIDEOS, TEXT_TOKENS, parse


def ours(effort: Effort) -> Ours:
    """A row a data code."""
    del effort
    for text, code in zip(IMAGES_AND_VIDEOS.split(","), parse(IMAGES_AND_VIDEOS), strict=True):
        yield f"{text}: tokens a GPU", code.samples * (code.visual_tokens + TEXT_TOKENS / 2)


TABLE = table("knapformer", "fig3", ours)
