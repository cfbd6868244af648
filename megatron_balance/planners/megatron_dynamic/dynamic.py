"""Rules `dynamic`: Megatron's `default_dynamic_cp` scheduler (`--dynamic-context-parallel`), which
packs sequences into groups.

Per microbatch: the longest sequence left takes the fewest ranks that hold it. No rank may get more
work than as many tokens as a rank holds would make in sequences of that length, and 5 % more. Every
other sequence, longest first, goes where the largest work of a rank stays lowest: into a group of
any size that can hold it and has room, or a new one on free ranks. What fits nowhere waits for the
next microbatch. Ranks left over make the smallest groups larger; where that does not come out
(sizes are powers of two, and all ranks), the microbatch is as many of the longest sequences as fit,
over all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_balance.planners.megatron_dynamic.group import Group, Microbatch, fill, frozen
from megatron_balance.solvers.groups import needed, sizes

SLACK = 0.05
"""Share by which a rank may exceed the bound on its work."""


def schedule(lengths: Sequence[int], tokens: int, num_ranks: int) -> list[Microbatch]:
    """Microbatches of groups, by the rules above."""
    left = sorted(range(len(lengths)), key=lambda seq: -lengths[seq])
    microbatches: list[Microbatch] = []
    while left:
        made, left = _next(lengths, left, tokens, num_ranks)
        microbatches.append(made)
    return microbatches


def _next(lengths: Sequence[int], order: list[int], tokens: int, num_ranks: int) -> tuple[Microbatch, list[int]]:
    """One microbatch, and what is left for the next ones."""
    allowed = sizes(num_ranks)
    first, *others = order
    most_work = lengths[first] * tokens * (1 + SLACK)
    making = _DynamicMicrobatch(lengths, tokens, allowed, most_work)
    making.put(first, Group(needed(lengths[first], tokens, allowed), [], 0.0, 0.0))
    left: list[int] = []
    for seq in others:
        group = making.choose(lengths[seq])
        if group is None:
            left.append(seq)
        else:
            making.put(seq, group)
    if fill(making.groups, allowed, num_ranks):
        return frozen(making.groups), left
    return _everywhere(lengths, order, tokens, num_ranks)


class _DynamicMicrobatch:
    """One microbatch in the making.

    `free`: ranks without a group; `highest`: the largest work of a rank.
    """

    def __init__(self, lengths: Sequence[int], tokens: int, allowed: Sequence[int], most_work: float) -> None:
        self.lengths, self.tokens, self.most_work = lengths, tokens, most_work
        self.of_size: dict[int, list[Group]] = {size: [] for size in allowed}
        self.groups: list[Group] = []
        self.free, self.highest = allowed[-1], 0.0

    def put(self, seq: int, group: Group) -> None:
        """Add a sequence to a group, which may be new."""
        if not group.seqs:
            self.groups.append(group)
            self.of_size[group.size].append(group)
            self.free -= group.size
        group.add(seq, self.lengths[seq])
        self.highest = max(self.highest, group.load)

    def choose(self, length: int) -> Group | None:
        """The group, or a new one, with which the largest work of any rank is lowest; ties go to
        the smaller and the older.
        """
        best, best_work = None, self.most_work
        for size, groups in self.of_size.items():
            if length > size * self.tokens:
                continue
            work, most_held = length * length / size, self.tokens - length / size
            candidates = [group for group in groups if group.tokens <= most_held]
            if size <= self.free:
                candidates.append(Group(size, [], 0.0, 0.0))
            for group in candidates:
                projected = max(self.highest, group.load + work)
                if projected < best_work or (best is None and projected == best_work):
                    best, best_work = group, projected
        return best


def _everywhere(
    lengths: Sequence[int], order: Sequence[int], tokens: int, num_ranks: int
) -> tuple[Microbatch, list[int]]:
    """The longest sequences that fit, over all ranks; one at least."""
    group = Group(num_ranks, [], 0.0, 0.0)
    left: list[int] = []
    for seq in order:
        if not group.seqs or group.tokens + lengths[seq] / num_ranks <= tokens:
            group.add(seq, lengths[seq])
        else:
            left.append(seq)
    return frozen([group]), left
