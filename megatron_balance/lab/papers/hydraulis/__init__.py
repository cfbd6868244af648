"""Hydraulis: Balancing Large Transformer Model Training via Co-designing Parallel Strategies and Data
Assignment (arXiv 2412.07894).

Published values are those that its text and tables print; what is only drawn has none. Each number
is given with the coefficients that the authors publish and with ours, from data sheets. Where they
differ by more than 20 %, docs/reproduce-hydraulis.md says why.
"""

from __future__ import annotations

from megatron_balance.lab.papers.base import Paper
from megatron_balance.lab.papers.hydraulis import appendix_a, fig13, strategies, table1, table2

PAPER = Paper(
    "Hydraulis (arXiv 2412.07894)",
    {
        "fig13": fig13.TABLE,
        "fig14": strategies.FIG14,
        "fig15a": strategies.CHOICES,
        "fig15b": strategies.BALANCE,
        "fig16": strategies.FIG16,
        "fig20": strategies.FIG20,
        "table1": table1.TABLE,
        "a1": appendix_a.LONGEST,
        "a2": appendix_a.FLUCTUATION,
        "table2": table2.TABLE,
    },
)
