"""A mask that the package does not have, and masks as dense tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_balance.ir.mask import Mask, Positions


@dataclass(frozen=True, slots=True)
class Window(Mask):
    """A query sees itself and the `size` - 1 keys before it."""

    size: int

    @property
    def name(self) -> str:
        return f"window_{self.size}"

    def keys(self, seq: Positions, query: Positions) -> tuple[Positions, Positions]:
        del seq
        first = query - self.size + 1
        return first * (first > 0), query + 1


def visible(mask: Mask) -> Callable[[int], NDArray[np.bool_]]:
    """By length, which query [row] sees which key [column]."""

    def table(length: int) -> NDArray[np.bool_]:
        runs = [mask.keys(0, query) for query in range(length)]
        return np.array([[first <= key < stop for key in range(length)] for first, stop in runs], dtype=bool).reshape(
            length, length
        )

    return table
