"""Zeppelin: Balancing Variable-length Workloads in Data Parallel Large Model Training (arXiv
2509.21841, EuroSys 2026).

Published values are those that its text, tables and captions print; what is only drawn has none.
Where ours differ by more than 20 %, docs/reproduce-zeppelin.md says why.
"""

from __future__ import annotations

from megatron_balance.lab.papers.base import Paper
from megatron_balance.lab.papers.zeppelin import fig3, fig5, fig8, fig12, table2, table3, throughput

PAPER = Paper(
    "Zeppelin (arXiv 2509.21841)",
    {
        "fig3": fig3.TABLE,
        "fig5": fig5.TABLE,
        "table2": table2.TABLE,
        "fig8": fig8.TABLE,
        "fig9": throughput.FIG9,
        "fig10": throughput.FIG10,
        "fig11": throughput.FIG11,
        "fig12": fig12.TABLE,
        "table3": table3.TABLE,
    },
)
