"""The part of a (query, key) rectangle that a mask shows: the mask (`ir.mask`) applied to tables of
pairs.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megatron_balance.ir.arrays import Bools, Ints
from megatron_balance.ir.columns import Pair
from megatron_balance.ir.mask import CAUSAL, FULL, Mask, SlidingWindow


class Rectangles(NamedTuple):
    """Queries [q_start, q_stop) by keys [k_start, k_stop), one of each for every row: int64 [n]
    each.
    """

    q_start: Ints
    q_stop: Ints
    k_start: Ints
    k_stop: Ints


def trim(seq: Ints, rectangles: Rectangles, mask: Mask) -> Rectangles:
    """Cut off the queries that see none of the keys, and the keys that none of the queries sees.

    Where no query sees any key, nothing remains: both starts lie at or behind their stops.
    """
    q_start, q_stop, k_start, k_stop = rectangles
    return Rectangles(
        np.maximum(q_start, mask.queries(seq, k_start)[0]),
        np.minimum(q_stop, mask.queries(seq, k_stop - 1)[1]),
        np.maximum(k_start, mask.keys(seq, q_start)[0]),
        np.minimum(k_stop, mask.keys(seq, q_stop - 1)[1]),
    )


def trim_pairs(pairs: Ints, mask: Mask) -> Ints:
    """`Pair` rows, each trimmed to what the mask shows of it."""
    columns = (Pair.Q_START, Pair.Q_STOP, Pair.K_START, Pair.K_STOP)
    trimmed = pairs.copy()
    shown = trim(pairs[:, Pair.SEQ], Rectangles(*(pairs[:, column] for column in columns)), mask)
    for column, values in zip(columns, shown, strict=True):
        trimmed[:, column] = values
    return trimmed


def sees(pairs: Ints, mask: Mask) -> Bools:
    """Whether any query of each `Pair` row sees any of its keys."""
    seq = pairs[:, Pair.SEQ]
    first = np.maximum(pairs[:, Pair.K_START], mask.keys(seq, pairs[:, Pair.Q_START])[0])
    return first < np.minimum(pairs[:, Pair.K_STOP], mask.keys(seq, pairs[:, Pair.Q_STOP] - 1)[1])


def num_pairs(rectangles: Rectangles, mask: Mask) -> Ints:
    """Visible (query, key) pairs of each rectangle, under a causal, a full or a sliding-window mask.

    A causal one is a trapezium once the queries start, cut off where the keys end; a window hides
    what a query that many tokens before would see.
    """
    q_start, q_stop, k_start, k_stop = rectangles
    if isinstance(mask, SlidingWindow):
        hidden = Rectangles(q_start - mask.size, q_stop - mask.size, k_start, k_stop)
        return num_pairs(rectangles, CAUSAL) - num_pairs(hidden, CAUSAL)
    if mask == FULL:
        return np.maximum(q_stop - q_start, 0) * np.maximum(k_stop - k_start, 0)

    def seen(edge: Ints) -> Ints:
        """Of keys from `edge` on, by the queries before `q_stop` less those before `q_start`."""
        return CAUSAL.num_pairs(np.maximum(q_stop - edge, 0)) - CAUSAL.num_pairs(np.maximum(q_start - edge, 0))

    return seen(k_start) - seen(k_stop)
