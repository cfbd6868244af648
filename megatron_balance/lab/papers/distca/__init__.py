"""DistCA (core attention disaggregation): its figures and tables beside ours."""

from __future__ import annotations

from megatron_balance.lab.papers.base import Paper
from megatron_balance.lab.papers.distca import appendix_a, motivation, overheads, speedups, tolerance

PAPER = Paper(
    "DistCA: Efficient Long-context Language Model Training by Core Attention Disaggregation",
    {
        "fig3": motivation.FIG3,
        "fig4": motivation.FIG4,
        "fig5": motivation.FIG5,
        "fig6": motivation.FIG6,
        "fig9": speedups.FIG9,
        "fig10": speedups.FIG10,
        "fig11": tolerance.FIG11,
        "fig12": tolerance.FIG12,
        "appendixa": appendix_a.TABLE,
        "table6": overheads.TABLE6,
        "table7": overheads.TABLE7,
    },
)
