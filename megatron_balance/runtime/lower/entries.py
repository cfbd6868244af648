"""Pairs to kernel entries: as few (query rows, key rows) blocks as the buffers' order allows.

An entry is *full* (every query sees every key) or *causal*, aligned at the bottom right: its last
query sees its last key, as in FlashAttention. A pair that is neither is split in two. Neighbouring
pairs that lie side by side in their buffers become one entry: in a zigzag ring every round then has
one entry a sequence. Under a sliding window every pair is an entry, of FlashAttention's
`window_size`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_balance.ir.arrays import Bools, Ints, run_bounds
from megatron_balance.ir.columns import Pair
from megatron_balance.ir.intervals import trim_pairs
from megatron_balance.ir.mask import CAUSAL, Mask, SlidingWindow


def simple_pairs(pairs: Ints, launch: Ints, mask: Mask = CAUSAL) -> tuple[Ints, Ints]:
    """Simple pairs, each either full or causal at the bottom right, and their launches.

    `pairs`: `ir.columns.Pair`, transposed: [9, n]. Queries and keys that take no part are left out.
    """
    if isinstance(mask, SlidingWindow):
        return trim_pairs(pairs.T, mask).T, launch
    if mask != CAUSAL:
        return pairs, launch
    pairs = pairs.copy()
    pairs[Pair.Q_START] = np.maximum(pairs[Pair.Q_START], pairs[Pair.K_START])
    pairs[Pair.K_STOP] = np.minimum(pairs[Pair.K_STOP], pairs[Pair.Q_STOP])
    neither = (pairs[Pair.K_STOP] > pairs[Pair.Q_START] + 1) & (pairs[Pair.K_STOP] < pairs[Pair.Q_STOP])
    if not neither.any():
        return pairs, launch
    upper, lower = pairs.copy(), pairs[:, neither]
    upper[Pair.Q_STOP, neither] = upper[Pair.K_STOP, neither]  # queries up to the last key: causal
    lower[Pair.Q_START] = lower[Pair.K_STOP]  # the queries behind it see all of the keys
    order = np.argsort(np.concatenate([np.arange(len(launch)), np.flatnonzero(neither)]), kind="stable")
    return np.concatenate([upper, lower], axis=1)[:, order], np.concatenate([launch, launch[neither]])[order]


@dataclass(frozen=True, slots=True)
class Fused:
    """Kernel entries of many launches, [n] each. Rows are rows of the launch's operands.

    `launch` is ascending. `q_pairs`, `k_pairs`: indices into the simple pairs whose query (key)
    regions, in order, make up the entries' packed rows. `windows` [n, 2]: `kernels.base.Window` of
    each, where the mask is a sliding window.
    """

    launch: Ints

    q_start: Ints
    q_stop: Ints
    k_start: Ints
    k_stop: Ints
    causal: Bools
    q_pairs: Ints
    k_pairs: Ints
    windows: Ints | None = None

    def __len__(self) -> int:
        return len(self.q_start)


def fuse(pairs: Ints, launch: Ints, q_row: Ints, k_row: Ints, mask: Mask = CAUSAL) -> Fused:
    """Join simple `pairs` [9, n] into entries.

    `launch` [n]: of each pair, ascending; `q_row`, `k_row` [n]: operand rows where its regions
    begin.
    """
    q_stop = q_row + pairs[Pair.Q_STOP] - pairs[Pair.Q_START]
    k_stop = k_row + pairs[Pair.K_STOP] - pairs[Pair.K_START]
    if isinstance(mask, SlidingWindow):
        behind = pairs[Pair.Q_STOP] - pairs[Pair.K_STOP]  # of a trimmed pair neither negative nor a whole window
        windows, each = np.stack([mask.size - 1 - behind, behind], axis=1), np.arange(len(launch))
        return Fused(launch, q_row, q_stop, k_row, k_stop, np.zeros(len(launch), dtype=bool), each, each, windows)
    causal = (pairs[Pair.K_STOP] > pairs[Pair.Q_START] + 1) & (mask == CAUSAL)
    # One after the other, the keys of the same queries: all but the last must be full.
    linked = (q_row[1:] == q_row[:-1]) & (q_stop[1:] == q_stop[:-1]) & (k_stop[:-1] == k_row[1:]) & ~causal[:-1]
    linked &= (pairs[Pair.SEQ, 1:] == pairs[Pair.SEQ, :-1]) & (launch[1:] == launch[:-1])
    bounds = run_bounds(~linked, len(launch))
    first, last = bounds[:-1], bounds[1:] - 1
    a, b, c, d, e = q_row[first], q_stop[first], k_row[first], k_stop[last], causal[last]
    # One below the other, queries of the same keys: all full over the same keys, or a staircase
    # that is causal as a whole.
    below = b[:-1] == a[1:]
    full = ~e[1:] & ~e[:-1] & (c[1:] == c[:-1]) & (d[1:] == d[:-1])
    stairs = e[1:] & e[:-1] & (c[1:] == c[:-1]) & (d[1:] - d[:-1] == b[1:] - b[:-1])
    linked = below & (full | stairs) & (launch[first[1:]] == launch[first[:-1]])
    bounds = run_bounds(~linked, len(first))
    top, bottom = bounds[:-1], bounds[1:] - 1
    lengths = last[bottom] - first[bottom] + 1
    offsets = np.cumsum(lengths) - lengths
    k_pairs = np.repeat(first[bottom] - offsets, lengths) + np.arange(int(lengths.sum()))
    return Fused(launch[first[top]], a[top], b[bottom], c[bottom], d[bottom], e[bottom], first, k_pairs)
