"""Batches of documents as Zeppelin draws them (arXiv 2509.21841, Table 2 and section 5.4.1), scaled
down to this machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from megatron_balance.workloads.lengths import Lengths, draw
from tools.bench.emulated.point import PAPER_TOKENS, SCALE

DATASETS = ("arxiv", "github", "prolong64k")


def draw_batches(name: str, count: int, seed: int, scale: int = SCALE) -> list[Lengths]:
    """Batches of a data set, `PAPER_TOKENS` tokens divided by `scale`.

    Documents come until a batch is full; the last one is cut, so that none is longer than the
    context.
    """
    # Of each data set its own random numbers: the same ones would give alike batches.
    return [scaled(batch, scale) for batch in draw(name, PAPER_TOKENS, count, (seed, DATASETS.index(name)))]


def scaled(lengths: Sequence[int], scale: int = SCALE) -> Lengths:
    """A batch of `PAPER_TOKENS` tokens as one of fewer: every boundary between documents divided by
    `scale`, rounded down.
    """
    bounds = (bound // scale for bound in accumulate(lengths, initial=0))
    return tuple(stop - start for start, stop in pairwise(bounds) if start < stop)
