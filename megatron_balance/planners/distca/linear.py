"""The linear layout, outside attention: sequences one after the other, equally many tokens on every
rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_balance.ir.arrays import Ints


def linear_owned(lengths: Sequence[int], ranks: Sequence[int]) -> Ints:
    """Rows (rank, seq, start, stop) [n, 4] by rank; tokens of `ranks` differ by one at most
    (DistCA, section 6.1).
    """
    tokens = np.array(lengths, dtype=np.int64)
    ends = np.cumsum(tokens)
    total = int(tokens.sum())
    bounds = total * np.arange(len(ranks) + 1) // len(ranks)
    cuts = np.sort(np.concatenate([bounds, ends]))
    begin, end = cuts[:-1], cuts[1:]
    begin, end = begin[begin < end], end[begin < end]
    seq = np.searchsorted(ends, begin, side="right")
    rank = np.searchsorted(bounds, begin, side="right") - 1
    before = ends[seq] - tokens[seq]
    return np.column_stack([np.array(ranks, dtype=np.int64)[rank], seq, begin - before, end - before])


def spread(num_chosen: int, num_ranks: int) -> list[int]:
    """Choose `num_chosen` ranks, evenly over all and so over the nodes; rank 0 only if all are
    chosen.
    """
    return [num_ranks * (i + 1) // num_chosen - 1 for i in range(num_chosen)]
