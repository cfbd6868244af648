"""Rules `hybrid`: the `BalancedCPScheduler` of megatron-core's releases
(`--hybrid-context-parallel`, 0.16 to 0.19 and main).

A sequence always takes the fewest ranks, a power of two, that hold it; each runs it as a forward
pass of its own, so groups have no limit on tokens. Sequences, longest first, are cut into as many
buckets of about equal work as there are sizes. Per microbatch: the first bucket whose longest
sequence finds ranks gives it away, to a new group if there are free ranks, else to the group of its
size with the least work; once sizes have come down from the first one, it ends as soon as work is
even within 5 %. Then the last sequences of the most loaded group are put back while that makes work
more even, and ranks left over make the smallest groups larger.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from megatron_balance.planners.megatron_dynamic.group import Group, Microbatch, fill, frozen
from megatron_balance.solvers.groups import needed, sizes

EVEN = 0.05
"""Share by which the least loaded rank may have less than the most loaded one where work counts as
even.
"""

BUCKET_SLACK = 1.1
"""Share by which a bucket's work may exceed the mean."""


def schedule(lengths: Sequence[int], tokens: int, num_ranks: int) -> list[Microbatch]:
    """Microbatches of groups, by the rules above."""
    left = sorted(range(len(lengths)), key=lambda seq: -lengths[seq])
    microbatches: list[Microbatch] = []
    while left:
        made = _HybridMicrobatch(lengths, tokens, num_ranks)
        left = made.take(_buckets(made, left))
        left += made.put_back()
        if not fill(made.groups, sizes(num_ranks), num_ranks):
            together = [seq for group in made.groups for seq in group.seqs]
            made.groups = [Group(num_ranks, together, 0.0, 0.0)]
        microbatches.append(frozen(made.groups))
    return microbatches


class _HybridMicrobatch:
    """One microbatch in the making."""

    def __init__(self, lengths: Sequence[int], tokens: int, num_ranks: int) -> None:
        self.lengths, self.num_ranks = lengths, num_ranks
        allowed = sizes(num_ranks)
        self.size = {length: needed(length, tokens, allowed) for length in set(lengths)}
        self.groups: list[Group] = []

    def work(self, seq: int) -> float:
        """Megatron's workload on each rank of the sequence's group."""
        return self.lengths[seq] ** 2 / self.size[self.lengths[seq]]

    @property
    def free(self) -> int:
        return self.num_ranks - sum(group.size for group in self.groups)

    def take(self, buckets: list[deque[int]]) -> list[int]:
        """Fill groups from the buckets. Returns what is left in them."""
        first_size: int | None = None
        sizes_came_down = False
        while True:
            bucket = next((b for b in buckets if b and self._place_for(b[0])), None)
            if bucket is None:
                break
            seq = bucket.popleft()
            size = self.size[self.lengths[seq]]
            first_size = size if first_size is None else first_size
            self._assign(seq, size)
            sizes_came_down = sizes_came_down or size < first_size
            if sizes_came_down and any(buckets) and self._is_even():
                break
        return [seq for bucket in buckets for seq in bucket]

    def put_back(self) -> list[int]:
        """Take the last sequence of the most loaded group away while that makes work more even.

        Returns them.
        """
        back: list[int] = []
        while not self.free and not self._is_even():
            loads = [group.load for group in self.groups]
            spread = max(loads) - min(loads)
            most = loads.index(max(loads))
            group = self.groups[most]
            if len(group.seqs) == 1:
                break
            loads[most] -= self.work(group.seqs[-1])
            if max(loads) - min(loads) >= spread:
                break
            back.append(group.drop_last(self.lengths[group.seqs[-1]]))
        return back

    def _place_for(self, seq: int) -> bool:
        size = self.size[self.lengths[seq]]
        return size <= self.free or any(group.size == size for group in self.groups)

    def _assign(self, seq: int, size: int) -> None:
        if size <= self.free:
            self.groups.append(Group(size, [], 0.0, 0.0))
            group = self.groups[-1]
        else:
            group = min((g for g in self.groups if g.size == size), key=lambda g: g.load)
        group.add(seq, self.lengths[seq])

    def _is_even(self) -> bool:
        loads = [group.load for group in self.groups]
        most = max(loads)
        return most - (0.0 if self.free else min(loads)) <= EVEN * most


def _buckets(making: _HybridMicrobatch, seqs: Sequence[int]) -> list[deque[int]]:
    """Consecutive sequences of about equal work, as many buckets as there are sizes, give or take."""
    num_buckets = len({making.size[making.lengths[seq]] for seq in seqs})
    target = sum(making.work(seq) for seq in seqs) / num_buckets
    buckets: list[deque[int]] = [deque()]
    work = 0.0
    for i, seq in enumerate(seqs):
        closed = len(buckets) - 1
        # Both terms count closed buckets, as in Megatron: the last ones are given one sequence each
        # only if enough are to come.
        scarce = len(seqs) - i <= num_buckets - closed - closed
        if buckets[-1] and (work + making.work(seq) > target * BUCKET_SLACK or scarce):
            buckets.append(deque())
            work = 0.0
        buckets[-1].append(seq)
        work += making.work(seq)
    return buckets
