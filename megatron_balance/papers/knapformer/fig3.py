"""Figure 3: tokens that each GPU of the image and video workload loads, on average."""

from __future__ import annotations

from megatron_balance.papers.base import Effort, PaperTable, Row, published
from megatron_balance.workloads.datacodes import IMAGES_AND_VIDEOS, TEXT_TOKENS, parse

PUBLISHED = published(1808, 6100, 21460, 16580, 12200, 4292, 13192, 103184)
MISPRINT = "printed are the tokens of the four GPUs together; one has 25,796"


def rows(effort: Effort) -> list[Row]:
    """A row a data code."""
    del effort
    codes = zip(IMAGES_AND_VIDEOS.split(","), parse(IMAGES_AND_VIDEOS), PUBLISHED, strict=True)
    return [
        Row(
            f"{text}: tokens a GPU",
            printed,
            code.samples * (code.visual_tokens + TEXT_TOKENS / 2),
            "tokens",
            "exact",
            note=MISPRINT if text == "g4b1i512f85s1" else "",
        )
        for text, code, printed in codes
    ]


TABLE = PaperTable("tokens a GPU loads, images and videos", rows)
