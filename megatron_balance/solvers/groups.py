"""Groups of ranks: which sizes there are, where they lie, and how much of a sequence a rank of one
holds.
"""

from __future__ import annotations

from collections.abc import Sequence


def sizes(num_ranks: int) -> tuple[int, ...]:
    """Powers of two below `num_ranks`, and all ranks together."""
    return (*(1 << i for i in range((num_ranks - 1).bit_length())), num_ranks)


def needed(length: int, tokens: float, allowed: Sequence[int]) -> int:
    """The smallest of the `allowed` sizes (ascending) whose ranks hold `tokens` each and the
    sequence together; else the largest.
    """
    return next((size for size in allowed if length <= size * tokens), allowed[-1])


def rank_tokens(length: int, size: int) -> int:
    """Tokens of a sequence that a rank holds at most: two of 2p near-equal chunks on p ranks
    (`patterns.zigzag`: p <= length / 2).
    """
    parts = max(1, min(size, length // 2))
    return length if parts == 1 else min(length, 2 * -(-length // (2 * parts)))


def blocks(size: int, num_ranks: int, node_size: int) -> list[range]:
    """Disjoint runs of `size` neighbouring ranks, inside nodes if a node holds one."""
    if size > node_size:
        return [range(first, first + size) for first in range(0, num_ranks - size + 1, size)]
    starts = range(0, node_size - size + 1, size)
    return [range(node + first, node + first + size) for node in range(0, num_ranks, node_size) for first in starts]


def arrange(wanted: Sequence[int], num_ranks: int, node_size: int) -> list[tuple[int, ...]]:
    """Disjoint ranks for groups of the `wanted` sizes, whose sum is at most `num_ranks`; inside a
    node where there is room for it.

    Larger groups choose first, each the fullest node that has room; a group that no node holds
    takes the emptiest nodes.
    """
    free = [list(range(first, min(first + node_size, num_ranks))) for first in range(0, num_ranks, node_size)]
    chosen: list[tuple[int, ...]] = [()] * len(wanted)
    for i in sorted(range(len(wanted)), key=lambda i: (-wanted[i], i)):
        roomy = [node for node in free if len(node) >= wanted[i]]
        order = [min(roomy, key=len)] if roomy else sorted(free, key=lambda node: (-len(node), node))
        taken: list[int] = []
        for node in order:
            count = min(len(node), wanted[i] - len(taken))
            taken += node[:count]
            del node[:count]
        chosen[i] = tuple(sorted(taken))
    return chosen
