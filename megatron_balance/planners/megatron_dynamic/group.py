"""Common to both rules: groups of neighbouring ranks that fill a microbatch from the first rank on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

Microbatch: TypeAlias = tuple[tuple[int, tuple[int, ...]], ...]
"""Groups in the order of their ranks: how many ranks, and the ids of their sequences."""

Scheduler: TypeAlias = Callable[[Sequence[int], int, int], list[Microbatch]]
"""`(lengths, tokens, num_ranks)` to microbatches; `tokens` is Megatron's
`max_seqlen_per_dp_cp_rank`.
"""


@dataclass(slots=True)
class Group:
    """A group in the making.

    `tokens`: of each of its ranks; `load`: Megatron's workload of each, the sum of length^2 / size.
    """

    size: int
    seqs: list[int]
    tokens: float
    load: float

    def add(self, seq: int, length: int) -> None:
        self.seqs.append(seq)
        self.tokens += length / self.size
        self.load += length * length / self.size

    def drop_last(self, length: int) -> int:
        """Take away the sequence that came last. Returns its id."""
        self.tokens -= length / self.size
        self.load -= length * length / self.size
        return self.seqs.pop()

    def grow(self, size: int) -> None:
        """Spread over more ranks."""
        self.tokens *= self.size / size
        self.load *= self.size / size
        self.size = size


def fill(groups: list[Group], allowed: Sequence[int], num_ranks: int) -> bool:
    """Give the ranks that are left to the first of the smallest groups, which takes the next size,
    and again until none is left.

    Returns False if ranks are left over that no group can take.
    """
    free = num_ranks - sum(group.size for group in groups)
    while free:
        group = min(groups, key=lambda g: g.size)  # the first of them
        larger = next((size for size in allowed if size > group.size), None)
        if larger is None or larger - group.size > free:
            return False
        free -= larger - group.size
        group.grow(larger)
    return True


def frozen(groups: Sequence[Group]) -> Microbatch:
    return tuple((group.size, tuple(group.seqs)) for group in groups)
