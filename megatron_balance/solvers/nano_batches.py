"""Split a batch into two nano-batches of sizes as equal as whole items allow."""

from __future__ import annotations

from collections.abc import Sequence

_EXACT = 1 << 24
"""Cells (items x size) up to which the most equal split is searched; beyond, the largest-first rule
decides.
"""


def nano_batches(sizes: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Indices of the items of both nano-batches, ascending, the larger nano-batch first.

    With fewer than two items the second one is empty. Items go largest first to the smaller
    nano-batch (of two equal ones, to that with the smaller sum of squares), which also spreads the
    large items evenly. Where that leaves more than a hundredth of the whole between them and the
    batch is small enough, the most equal split is taken instead (subset sums).
    """
    order = sorted(range(len(sizes)), key=lambda i: (-sizes[i], i))
    parts: tuple[list[int], list[int]] = ([], [])
    loads = [(0, 0), (0, 0)]
    for i in order:
        nano_batch = int(loads[1] < loads[0])
        parts[nano_batch].append(i)
        size, squares = loads[nano_batch]
        loads[nano_batch] = (size + sizes[i], squares + sizes[i] ** 2)
    total = sum(sizes)
    if abs(loads[0][0] - loads[1][0]) * 100 > total and len(sizes) * total <= _EXACT:
        parts = _best(sizes, total)
    first, second = sorted(parts, key=lambda part: (-sum(sizes[i] for i in part), part))
    return tuple(sorted(first)), tuple(sorted(second))


def _best(sizes: Sequence[int], total: int) -> tuple[list[int], list[int]]:
    """The two parts whose sizes differ least.

    Bit s of `reached[i]`: some of the first i items are s together.
    """
    reached = [1]
    for size in sizes:
        reached.append(reached[-1] | reached[-1] << size)
    lower = reached[-1] & ((1 << (total // 2 + 1)) - 1)
    left = lower.bit_length() - 1
    chosen: list[int] = []
    for i in range(len(sizes) - 1, -1, -1):
        if not reached[i] >> left & 1:
            chosen.append(i)
            left -= sizes[i]
    taken = set(chosen)
    return chosen, [i for i in range(len(sizes)) if i not in taken]
