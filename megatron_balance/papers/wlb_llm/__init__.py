"""WLB-LLM: Workload-Balanced 4D Parallelism for Large Language Model Training (OSDI 2025).

Published values are those that its text and tables print.
"""

from __future__ import annotations

from megatron_balance.papers.base import Paper
from megatron_balance.papers.wlb_llm import table2

PAPER = Paper("WLB-LLM (OSDI 2025, arXiv 2503.17924)", {"table2": table2.TABLE})
