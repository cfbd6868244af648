"""Published results beside ours: one file or folder for each paper, one function for each of its
tables (`base.PaperTable`).
"""

from megatron_balance.lab.papers import distca, hydraulis, knapformer, magi, megatron, trl, upipe, wlb_llm, zeppelin
from megatron_balance.lab.papers.base import Paper

PAPERS: dict[str, Paper] = {
    "distca": distca.PAPER,
    "hydraulis": hydraulis.PAPER,
    "knapformer": knapformer.PAPER,
    "magi": magi.PAPER,
    "megatron": megatron.PAPER,
    "trl": trl.PAPER,
    "upipe": upipe.PAPER,
    "wlb_llm": wlb_llm.PAPER,
    "zeppelin": zeppelin.PAPER,
}
