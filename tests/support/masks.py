"""Masks that tests draw from, and masks as dense tables."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from megatron_balance.ir.mask import MASKS, Mask

# Masks that the contract suite draws from.
NAMES = (*MASKS, "window_3", "window_40")


def visible(mask: Mask) -> Callable[[int], NDArray[np.bool_]]:
    """By length, which query [row] sees which key [column]."""

    def table(length: int) -> NDArray[np.bool_]:
        runs = [mask.keys(0, query) for query in range(length)]
        return np.array([[first <= key < stop for key in range(length)] for first, stop in runs], dtype=bool).reshape(
            length, length
        )

    return table
