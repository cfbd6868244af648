"""Rule `cost`: sequences placed one after the other, under a limit on a rank's time and tokens
(`costed` says how the limit is found).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heappop, heappush, heapreplace
from math import inf
from typing import Literal, TypeAlias

from megatron_balance.planners.zeppelin.price import Prediction, Prices, RankShare
from megatron_balance.solvers.placed import Placement, grouped

Fill: TypeAlias = Literal["most", "least", "whole"]
"""Choice among ranks that have room: where there is most of it, where the least is left, or whole
nodes.
"""

_SMALL = 8
"""A sequence of less than 1 / _SMALL of a rank's mean time and tokens is placed last and counts as
a fluid until then.
"""

_MANY = 64
"""With more sequences than this above that size, only those above half a rank's mean are placed one
by one.
"""

_NODES = 32
"""Least loaded nodes that are looked at for room."""


@dataclass(frozen=True, slots=True)
class Target:
    """Limits on a rank's time and tokens, and how to meet them: `fill`, and the `wide` longest
    sequences over all ranks.
    """

    time_s: float
    tokens: int
    fill: Fill = "most"
    wide: int = 0

    def at(self, time_s: float) -> Target:
        """It under another limit on time."""
        return Target(time_s, self.tokens, self.fill, self.wide)

    def within(self, tokens: int) -> Target:
        """It under another limit on tokens."""
        return Target(self.time_s, tokens, self.fill, self.wide)


class Sizes:
    """The sequences of a batch as the larger ones and the rest, in descending order, with what they
    sum to; holds no decisions.
    """

    def __init__(self, prices: Prices) -> None:
        self.prices, self.cluster = prices, prices.cluster
        self.lengths, self.work_s, self._known = prices.lengths, prices.work_s, prices.shares
        self.all_s, self.all_tokens = sum(self.work_s), sum(self.lengths)
        self.mean_s, self.mean_tokens = self.all_s / self.cluster.num_ranks, self.all_tokens / self.cluster.num_ranks
        order = sorted(
            range(len(self.lengths)), key=self.lengths.__getitem__, reverse=True
        )  # stable: ties go to the lower sequence
        self.large = self._above(order, 1 / _SMALL)
        if len(self.large) > _MANY:
            self.large = self._above(order, 1 / 2)
        placed_first = set(self.large)
        self.small = [seq for seq in order if seq not in placed_first]
        self.small_s = sum(self.work_s[seq] for seq in self.small)
        self.small_tokens = sum(self.lengths[seq] for seq in self.small)
        self.ranks_of = [self.cluster.ranks_of(node) for node in range(self.cluster.num_nodes)]
        self.alone = {seq: self.share(seq, 1) for seq in self.large}

    def _above(self, order: Sequence[int], part: float) -> list[int]:
        """Sequences of more than `part` of a rank's mean time or tokens."""
        time_s, tokens = part * self.mean_s, part * self.mean_tokens
        return [seq for seq in order if self.work_s[seq] > time_s or self.lengths[seq] > tokens]

    def share(self, seq: int, num_ranks: int, inter_node: bool = False) -> RankShare:
        """The share of each rank in a ring that is the sequence's own."""
        known = self._known.get((self.lengths[seq], num_ranks, inter_node))
        return self.prices.share(self.lengths[seq], num_ranks, inter_node) if known is None else known


class Filling:
    """A placement in the making, under one target. Lists are by rank, those of nodes by node.

    `load` is what decides where there is most room: time and tokens, each over its limit, added.
    `rank_of`: by sequence, its rank, or -1 where it is not placed or in `wide`, which has the ranks
    of those with several.
    """

    def __init__(self, sizes: Sizes, target: Target) -> None:
        self.sizes, self.target, self.cluster = sizes, target, sizes.cluster
        num_ranks, num_nodes, self.size = self.cluster.num_ranks, self.cluster.num_nodes, self.cluster.node_size
        self.num_ranks, self.num_nodes = num_ranks, num_nodes
        self.time_s, self.load = [0.0] * num_ranks, [0.0] * num_ranks
        self.idlest = [(0.0, rank) for rank in range(num_ranks)]  # a heap
        self.tokens = [0] * num_ranks
        self.node_load, self.node_s = [0.0] * num_nodes, [0.0] * num_nodes
        self.node_tokens = [0] * num_nodes
        self.held_s, self.held_tokens = 0.0, 0
        self.rank_of = [-1] * len(sizes.lengths)
        self.wide: dict[int, tuple[int, ...]] = {}
        self.unit_s = target.time_s if target.time_s < inf else sizes.mean_s

    @property
    def placement(self) -> Placement:
        """The ranks of each sequence."""
        alone = [(rank,) for rank in range(self.cluster.num_ranks)]
        return [alone[rank] if rank >= 0 else self.wide[seq] for seq, rank in enumerate(self.rank_of)]

    @cached_property
    def complete(self) -> bool:
        """Whether all sequences are placed, the smaller ones too: they are, when this is asked for."""
        return self._place_small()

    @cached_property
    def prediction(self) -> Prediction:
        """Predicted times of the complete placement."""
        assert self.complete
        return self.sizes.prices.predict_rings(self.rank_of, grouped(sorted(self.wide.items())))

    def place_large(self) -> bool:
        """Place the larger sequences; False if one finds no place, or all that is left, as a fluid,
        no room.
        """
        sizes, target = self.sizes, self.target
        left_s, left_tokens = sizes.all_s, sizes.all_tokens
        if target.wide:
            longest = sizes.large[: target.wide]
            self._put_everywhere(longest)
            left_s -= sum(sizes.work_s[seq] for seq in longest)
            left_tokens -= sum(sizes.lengths[seq] for seq in longest)
            if self.time_s[0] > target.time_s or self.tokens[0] > target.tokens:
                return False
        for seq in sizes.large[target.wide :]:
            if not self._has_room(left_s, left_tokens) or not self._place(seq):
                return False
            left_s -= sizes.work_s[seq]
            left_tokens -= sizes.lengths[seq]
        return self._has_room(sizes.small_s, sizes.small_tokens)

    def _has_room(self, time_s: float, tokens: int) -> bool:
        """Whether all ranks together have room for these seconds and tokens."""
        num_ranks = self.num_ranks
        return (
            num_ranks * self.target.time_s - self.held_s >= time_s
            and num_ranks * self.target.tokens - self.held_tokens >= tokens
        )

    def _place(self, seq: int) -> bool:
        """Place one sequence where it takes the fewest ranks; False if it fits nowhere."""
        sizes, target = self.sizes, self.target
        fewest = max(1, -(-sizes.lengths[seq] // target.tokens), int(sizes.work_s[seq] / target.time_s))
        if fewest > self.num_ranks:
            return False
        if fewest == 1 and self._on_idlest_rank(seq):
            return True
        nodes = sorted(range(self.num_nodes), key=self.node_load.__getitem__)
        across = self._across_leftovers if target.fill == "least" else self._across_idlest
        return self._on_one_node(seq, fewest, nodes) or across(seq, fewest, nodes)

    def _on_idlest_rank(self, seq: int) -> bool:
        """Place a sequence whole on the least loaded rank, if it fits there: the common case,
        without looking at all ranks.
        """
        idlest, loads = self.idlest, self.load
        while idlest[0][0] < loads[idlest[0][1]]:  # loads only grow; entries are brought up to date when they come up
            rank = idlest[0][1]
            heapreplace(idlest, (loads[rank], rank))
        rank, (time_s, tokens) = idlest[0][1], self.sizes.alone.get(seq) or self.sizes.share(seq, 1)
        target = self.target
        if self.time_s[rank] > target.time_s - time_s or self.tokens[rank] > target.tokens - tokens:
            return False
        self._put(seq, (rank,), (time_s, tokens))
        return True

    def _on_one_node(self, seq: int, fewest: int, nodes: Sequence[int]) -> bool:
        for num_ranks in range(fewest, self.size + 1):
            if self.target.fill == "whole" and num_ranks not in (1, self.size):
                continue
            share = self.sizes.share(seq, num_ranks)
            ranks = self._room_on_a_node(num_ranks, share, nodes) if self._within(share) else ()
            if ranks:
                self._put(seq, self._least_loaded(ranks, num_ranks), share)
                return True
        return False

    def _room_on_a_node(self, num_ranks: int, share: RankShare, nodes: Sequence[int]) -> list[int]:
        """The ranks with room on the least loaded node that has `num_ranks` of them, or on the most
        loaded one; none if no node has.
        """
        size, ranks_of, node_s, node_tokens = self.size, self.sizes.ranks_of, self.node_s, self.node_tokens
        full_s, full_tokens = (
            size * self.target.time_s - num_ranks * share[0],
            size * self.target.tokens - num_ranks * share[1],
        )
        for node in reversed(nodes) if self.target.fill == "least" else nodes[:_NODES]:
            if node_s[node] <= full_s and node_tokens[node] <= full_tokens:
                ranks = self._fitting(ranks_of[node], share)
                if len(ranks) >= num_ranks:
                    return ranks
        return []

    def _across_idlest(self, seq: int, fewest: int, nodes: Sequence[int]) -> bool:
        """Place a sequence on ranks of the least loaded nodes, as few nodes as do."""
        size = self.size
        if size == 1:
            return self._on_idlest_nodes(seq, fewest, nodes)
        for num_nodes in _steps(max(2, -(-fewest // size)), self.num_nodes):
            pool: Sequence[int] = ()
            all_of_them, narrow = num_nodes * size, max(fewest, (num_nodes - 1) * size + 1)
            for num_ranks in (all_of_them,) if self.target.fill == "whole" else range(narrow, all_of_them + 1):
                share = self.sizes.share(seq, num_ranks, inter_node=True)
                if not self._within(share):
                    continue
                pool = pool or [rank for node in nodes[:num_nodes] for rank in range(node * size, (node + 1) * size)]
                ranks = self._fitting(pool, share)
                if len(ranks) >= num_ranks:
                    self._put(seq, self._least_loaded(ranks, num_ranks), share)
                    return True
        return False

    def _on_idlest_nodes(self, seq: int, fewest: int, nodes: Sequence[int]) -> bool:
        """As `_across_idlest`, nodes being of one rank: the least loaded ones must all have room."""
        held_s, held_tokens = self.time_s, self.tokens
        for count in _steps(max(2, fewest), self.num_nodes):
            share = self.sizes.share(seq, count, inter_node=True)
            time_s, tokens = self.target.time_s - share[0], self.target.tokens - share[1]
            if time_s < 0 or tokens < 0:
                continue
            for node in nodes[:count]:
                if held_s[node] > time_s or held_tokens[node] > tokens:
                    break
            else:
                self._put(seq, tuple(sorted(nodes[:count])), share)
                return True
        return False

    def _across_leftovers(self, seq: int, fewest: int, nodes: Sequence[int]) -> bool:
        """Place a sequence on ranks of several nodes, those first of which the fewest ranks have
        room.
        """
        size = self.size
        pool = [rank for node in sorted(nodes[:_NODES]) for rank in range(node * size, (node + 1) * size)]
        for num_ranks in range(max(2, fewest), min(len(pool), 2 * max(size, fewest)) + 1):
            share = self.sizes.share(seq, num_ranks, inter_node=True)
            ranks = self._fitting(pool, share) if self._within(share) else []
            if len(ranks) >= num_ranks:
                fitting_ranks = Counter(rank // size for rank in ranks)
                ranks.sort(key=lambda rank: (fitting_ranks[rank // size], rank // size, self.load[rank]))
                self._put(seq, tuple(sorted(ranks[:num_ranks])), share)
                return True
        return False

    def _within(self, share: RankShare) -> bool:
        """Whether an empty rank could take it."""
        return share[0] <= self.target.time_s and share[1] <= self.target.tokens

    def _fitting(self, ranks: Sequence[int], share: RankShare) -> list[int]:
        """The ranks of `ranks` that can take this share, too."""
        time_s, tokens = self.target.time_s - share[0], self.target.tokens - share[1]
        held_s, held_tokens = self.time_s, self.tokens
        return [rank for rank in ranks if held_s[rank] <= time_s and held_tokens[rank] <= tokens]

    def _least_loaded(self, ranks: list[int], count: int) -> tuple[int, ...]:
        return tuple(sorted(sorted(ranks, key=self.load.__getitem__)[:count] if count < len(ranks) else ranks))

    def _put(self, seq: int, ranks: tuple[int, ...], share: RankShare) -> None:
        time_s, tokens = share
        load = time_s / self.unit_s + tokens / self.target.tokens
        self._set(seq, ranks)
        self.held_s += len(ranks) * time_s
        self.held_tokens += len(ranks) * tokens
        held_s, held_tokens, loads, size = self.time_s, self.tokens, self.load, self.size
        node_load, node_s, node_tokens = self.node_load, self.node_s, self.node_tokens
        for rank in ranks:
            held_s[rank] += time_s
            held_tokens[rank] += tokens
            loads[rank] += load
            node = rank // size
            node_load[node] += load
            node_s[node] += time_s
            node_tokens[node] += tokens

    def _set(self, seq: int, ranks: tuple[int, ...]) -> None:
        if len(ranks) == 1:
            self.rank_of[seq] = ranks[0]
        else:
            self.wide[seq] = ranks

    def _put_everywhere(self, seqs: Sequence[int]) -> None:
        """Put sequences over all ranks, all at once."""
        everywhere = tuple(range(self.cluster.num_ranks))
        shares = [self.sizes.share(seq, len(everywhere), self.cluster.num_nodes > 1) for seq in seqs]
        for seq in seqs:
            self._set(seq, everywhere)
        self._put(seqs[0], everywhere, (sum(s[0] for s in shares), sum(s[1] for s in shares)))

    def _place_small(self) -> bool:
        """Place the rest, each whole on the least loaded rank that has room for it; else as a large
        one, whatever the time.
        """
        sizes, capacity = self.sizes, self.target.tokens
        lengths, work_s, tokens, rank_of = sizes.lengths, sizes.work_s, self.tokens, self.rank_of
        # Time weighs as much as the small sequences need of it: if all of them take none, only
        # tokens count.
        weight_s = sizes.small_s / self.unit_s**2
        weight_tokens = sizes.small_tokens / capacity**2
        heap = [
            (weight_s * time_s + weight_tokens * held, rank)
            for rank, (time_s, held) in enumerate(zip(self.time_s, tokens, strict=True))
        ]
        heapify(heap)
        full: list[
            tuple[int, float, int]
        ] = []  # a heap of (tokens, load, rank): what had no room; sequences only get shorter
        left: list[int] = []
        for seq in sizes.small:
            length = lengths[seq]
            while full and full[0][0] + length <= capacity:
                heappush(heap, heappop(full)[1:])
            while heap:
                load, rank = heap[0]
                held = tokens[rank] + length
                if held <= capacity:
                    rank_of[seq], tokens[rank] = rank, held
                    heapreplace(heap, (load + weight_s * work_s[seq] + weight_tokens * length, rank))
                    break
                heappop(heap)
                heappush(full, (tokens[rank], load, rank))
            else:
                left.append(seq)
        # What ranks hold of time, and nodes of either, was not kept up to date above: time is no
        # limit below, and the rest only decides where room is looked for first.
        reached, self.target = self.target, Target(inf, capacity)
        placed = all(self._place(seq) for seq in left)
        self.target = reached
        return placed


def _steps(first: int, last: int) -> Iterator[int]:
    """Numbers of nodes to try: `first`, the next one, then about double, up to `last`."""
    step = first
    while step < last:
        yield step
        step = step + 1 if step == first else 2 * step
    if first <= last:
        yield last
