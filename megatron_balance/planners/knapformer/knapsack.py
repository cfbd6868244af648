"""The first pass of KnapFormer's balancer: sequences to groups, no data moved (section 3.3).

In descending order of work each sequence goes to the least occupied group among those with room for
it, occupancy being work over capacity, and capacity the group's ranks times the mean work of a rank.
The paper leaves open what happens where no group has room; here the least occupied takes it.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from megatron_balance.cost.base import Floats
from megatron_balance.errors import InfeasibleError

_ROUNDING = 1 + 1e-9


def assign(work: Floats, lengths: Sequence[int], sizes: Sequence[int], tokens_per_rank: int | None) -> list[int]:
    """The group of each sequence.

    Args:
        work: of each sequence, [S], above 0.
        lengths: in tokens, [S].
        sizes: ranks of each group, [M]; a group may stay empty.
        tokens_per_rank: tokens that a rank can hold; None: any number.

    Raises:
        InfeasibleError: no group has memory left for a sequence.
    """
    if not len(work):
        return []
    chosen = _by_work(work, sizes)
    if tokens_per_rank is None:
        return chosen
    held = [0] * len(sizes)
    for group, length in zip(chosen, lengths, strict=True):
        held[group] += length
    if all(tokens <= size * tokens_per_rank for tokens, size in zip(held, sizes, strict=True)):
        return chosen
    return _within_memory(work, lengths, sizes, tokens_per_rank)


def _descending(work: Floats) -> list[int]:
    return (-work).argsort(kind="stable").tolist()


def _by_work(work: Floats, sizes: Sequence[int]) -> list[int]:
    """Groups of one size are a heap: if its least occupied one has no room, none of it has."""
    mean = float(work.sum()) / sum(sizes)
    heaps: list[tuple[float, list[tuple[float, int]]]] = [
        (size * mean, [(0.0, group) for group, other in enumerate(sizes) if other == size])
        for size in dict.fromkeys(sizes)
    ]
    chosen = [0] * len(work)
    works: list[float] = work.tolist()
    if len(heaps) == 1:  # all groups alike: the least occupied one takes it, room or not
        (_, heap) = heaps[0]
        for seq in _descending(work):
            load, group = heap[0]
            chosen[seq] = group
            heapq.heapreplace(heap, (load + works[seq], group))
        return chosen
    for seq in _descending(work):
        own = works[seq]
        options = [
            (heap[0][0] / room, heap[0][1], heap) for room, heap in heaps if heap[0][0] + own <= room * _ROUNDING
        ]
        options = options or [(heap[0][0] / room, heap[0][1], heap) for room, heap in heaps]
        _, group, heap = min(options, key=lambda option: option[:2])
        chosen[seq] = group
        heapq.heapreplace(heap, (heap[0][0] + own, group))
    return chosen


def _within_memory(work: Floats, lengths: Sequence[int], sizes: Sequence[int], tokens_per_rank: int) -> list[int]:
    """As `_by_work`, among the groups that have memory left."""
    mean = float(work.sum()) / sum(sizes)
    loads, left = [0.0] * len(sizes), [size * tokens_per_rank for size in sizes]
    chosen = [0] * len(work)
    for seq in _descending(work):
        own, length = float(work[seq]), lengths[seq]
        held = [group for group, room in enumerate(left) if length <= room]
        if not held:
            most = max(range(len(sizes)), key=lambda group: left[group])
            raise InfeasibleError(
                f"sequence {seq} has {length} tokens; the group with the most memory left, of {sizes[most]} ranks x "
                f"{tokens_per_rank} tokens, has room for {left[most]}. Use larger groups (topology), raise "
                "--tokens-per-rank (tokens_per_rank), or plan a smaller batch"
            )
        roomy = [group for group in held if loads[group] + own <= sizes[group] * mean * _ROUNDING]
        group = min(roomy or held, key=lambda each: (loads[each] / sizes[each], each))
        chosen[seq] = group
        loads[group] += own
        left[group] -= length
    return chosen
