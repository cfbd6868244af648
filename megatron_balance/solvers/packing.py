"""Packing items into bins: least loaded first (LPT when the items come in descending order), best
fit, first fit into as many bins as it takes, and first fit into so many of one size.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Sequence


def least_loaded(sizes: Sequence[int], loads: Sequence[int], capacity: int) -> list[int]:
    """The bin of each item when every item in turn goes to the least loaded bin, up to the first
    one that does not fit there.

    Bins start with `loads`; ties go to the lower bin.
    """
    heap = [(load, index) for index, load in enumerate(loads)]
    heapq.heapify(heap)
    chosen: list[int] = []
    for size in sizes:
        load, index = heap[0]
        if load + size > capacity:
            break
        heapq.heapreplace(heap, (load + size, index))
        chosen.append(index)
    return chosen


def best_fit(sizes: Sequence[int], spaces: Sequence[int]) -> list[int | None]:
    """The bin of each item when every item in turn goes to the bin with the least room that holds
    it; None: no bin does.

    Ties go to the lower bin.
    """
    free = sorted((space, index) for index, space in enumerate(spaces))
    chosen: list[int | None] = []
    for size in sizes:
        at = bisect.bisect_left(free, (size, -1))
        if at == len(free):
            chosen.append(None)
            continue
        space, index = free.pop(at)
        bisect.insort(free, (space - size, index))
        chosen.append(index)
    return chosen


def first_fit_decreasing(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Items of each bin, the largest items first, each in the first bin that has room.

    An item that is larger than a bin has one of its own.
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for item in sorted(range(len(sizes)), key=lambda item: (-sizes[item], item)):
        at = next((number for number, left in enumerate(room) if left >= sizes[item]), len(bins))
        if at == len(bins):
            bins.append([])
            room.append(capacity)
        bins[at].append(item)
        room[at] -= sizes[item]
    return bins


GROWTH = 64
"""Bins of one size grow by this part of the smallest that could do, until all items fit."""


def first_fit_evenly(sizes: Sequence[int], num_bins: int, most: int | None) -> list[list[int]] | None:
    """Items of each bin by first fit, the largest first, into `num_bins` bins of one size, the
    smallest of those tried that does; None: bins of `most` (None: any size) do not.

    The same items of some of the bins, in order, packed alone into as many, fit as well.
    """
    smallest = max(-(-sum(sizes) // num_bins), max(sizes, default=0))
    size, step = smallest, max(1, smallest // GROWTH)
    while most is None or size <= most:
        bins = first_fit_decreasing(sizes, size)
        if len(bins) <= num_bins:
            return bins + [[] for _ in range(num_bins - len(bins))]
        size = size + step if most is None or size == most else min(size + step, most)
    return None
