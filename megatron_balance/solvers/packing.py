"""Packing items into bins: least loaded first (LPT when the items come in descending order)."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def least_loaded(sizes: Sequence[int], loads: Sequence[int], capacity: int) -> list[int] | None:
    """The bin of each item when every item in turn goes to the least loaded bin, or None if one does not fit there.

    Bins start with `loads`; ties go to the lower bin.
    """
    heap = [(load, index) for index, load in enumerate(loads)]
    heapq.heapify(heap)
    chosen: list[int] = []
    for size in sizes:
        load, index = heap[0]
        if load + size > capacity:
            return None
        heapq.heapreplace(heap, (load + size, index))
        chosen.append(index)
    return chosen
