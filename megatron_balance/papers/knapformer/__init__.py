"""KnapFormer: An Online Load Balancer for Efficient Diffusion Transformers Training.

Published values are those that Table 1 and Figure 3 print. Where ours differ by more than 20 %,
docs/reproduce-knapformer.md says why.
"""

from __future__ import annotations

from megatron_balance.papers.base import Paper
from megatron_balance.papers.knapformer import fig3, table1

PAPER = Paper("KnapFormer", {"fig3": fig3.TABLE, "table1": table1.TABLE})
