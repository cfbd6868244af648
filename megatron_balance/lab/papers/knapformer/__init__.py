"""KnapFormer: An Online Load Balancer for Efficient Diffusion Transformers Training.

Published values are those that Table 1 and Figure 3 print. Where ours differ by more than 20 %,
docs/reproduce-knapformer.md says why.
"""

from __future__ import annotations

from megatron_balance.lab.papers.base import Paper
from megatron_balance.lab.papers.knapformer import tables

PAPER = Paper("KnapFormer", {"fig3": tables.FIG3, "table1": tables.TABLE1})
