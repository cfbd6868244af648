"""WLB-LLM: Workload-Balanced 4D Parallelism for Large Language Model Training (OSDI 2025, arXiv
2503.17924).

Published values are those that its text and tables print; what is only drawn has none. Where ours
differ by more than 20 %, docs/reproduce-wlb-llm.md says why. The loss of training (Figures 6 and
16) is trained, not simulated.
"""

from __future__ import annotations

from megatron_balance.lab.papers.base import Paper
from megatron_balance.lab.papers.wlb_llm import fig15, speedups, table2

PAPER = Paper(
    "WLB-LLM (OSDI 2025, arXiv 2503.17924)",
    {
        "fig12": speedups.FIG12,
        "fig13": speedups.FIG13,
        "fig14": speedups.FIG14,
        "table2": table2.TABLE,
        "fig15": fig15.TABLE,
    },
)
