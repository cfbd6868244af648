"""Rule `cost`: the fewest ranks and the narrowest zone in which a sequence still meets a target time, and the best such target.

For a target time (`price`), sequences are placed in descending order, each where it takes the fewest ranks without passing the
target or the capacity: one rank, else ranks of one node, else of two nodes or more. Where there is most room, if that works out;
else where it leaves the least room, which keeps whole nodes for those that need them; else on whole nodes, since a long sequence
fills ranks with time before it fills them with tokens; and where that strands room too, the longest sequences go over all ranks.
The target is found by bisection, as MULTIFIT packs bins, from below: what is too low is soon found out. Short sequences go last, each
to the least loaded rank.

Time is bought with uneven tokens, which cost something too: the slowest linear part, or what a remap moves. So the same is done again
under limits on a rank's tokens closer to the mean, and then with a little more time, since what moves also costs where it hides. Of
all these and the trivial placement, all sequences over all ranks, the one of the lowest price is taken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush, heapreplace
from math import inf, sqrt
from typing import Literal, TypeAlias

from megatron_balance.core.cluster import Cluster
from megatron_balance.cost.base import CostModel
from megatron_balance.planners.zeppelin.price import Prices, Pricing, Share
from megatron_balance.solvers.placed import Placement

Fill: TypeAlias = Literal["most", "least", "whole"]
"""Which room is taken: where there is most of it, where the least is left, or whole nodes."""

_SMALL = 8
"""A sequence of less than 1 / _SMALL of a rank's mean time and tokens is placed last and counts as a fluid until then."""

_MANY = 64
"""With more sequences than this above that size, only those above half a rank's mean are placed one by one."""

_STEPS = 4
_FEWER_STEPS = 2
_EFFORT = 300
"""Steps of the first bisection and of later ones, and fewer if that would place more than about this many sequences."""

_NODES = 32
"""Least loaded nodes that are looked at for room."""

_WIDEST = 48
"""Every number of ranks up to this is tried for the longest sequence, and multiples of a node beyond."""

_FIRST_FACTOR = 1.1
"""The first target tried is this much above what is known to be too low."""

_TOLERANCE = 0.01
"""Targets this close, relatively, are not told apart."""

_TOKEN_LIMITS = (1.15, 1.05)
"""Limits on a rank's tokens, over the mean, that are tried beside the capacity."""

_EASED = 3
_LESS = 0.97
"""How often the target is eased, each time but the first with so much fewer tokens on a rank."""


@dataclass(frozen=True, slots=True)
class _Target:
    """What no rank may pass, and how to get there: `fill`, and the `wide` longest sequences over all ranks."""

    time_s: float
    tokens: int
    fill: Fill = "most"
    wide: int = 0


def place(lengths: Sequence[int], cluster: Cluster, cost: CostModel, capacity: int, pricing: Pricing) -> Placement:
    """The ranks of each sequence. `capacity`: tokens a rank holds.

    Never of a higher price than the trivial plan, all sequences over all ranks, which is also what is left where nothing else fits.
    """
    problem = _Problem(lengths, cluster, cost, pricing)
    best = _Best(problem.prices, [tuple(range(cluster.num_ranks))] * len(lengths))
    found = problem.search(capacity, best.time_s)
    if found is None:
        return best.placement
    best.offer(found)
    for limit in problem.token_limits(capacity):
        if limit < max(found.tokens) and best.time_s > problem.mean_s * (1 + _TOLERANCE):
            evener = problem.evener(found.target, limit, best.time_s)
            if evener is not None:
                best.offer(evener)
                found = evener
    for state in problem.eased(best.target) if best.target is not None else ():
        best.offer(state)
    return best.placement


class _Best:
    """The placement of the lowest price so far, and the target it was found under (None: it is the first one)."""

    def __init__(self, prices: Prices, placement: Placement) -> None:
        self.prices, self.placement, self.price_s = prices, placement, prices.price_s(placement)
        self.target: _Target | None = None

    @property
    def time_s(self) -> float:
        """The longest time of a rank with which a placement may still have a lower price."""
        return self.price_s - self.prices.token_s * sum(self.prices.lengths) / self.prices.cluster.num_ranks

    def offer(self, state: _State) -> None:
        """Take it if it is better."""
        price_s = self.prices.price_s(state.placement)
        if price_s < self.price_s:
            self.placement, self.price_s, self.target = state.placement, price_s, state.target


class _Problem:
    """A batch with its costs; holds no decisions."""

    def __init__(self, lengths: Sequence[int], cluster: Cluster, cost: CostModel, pricing: Pricing) -> None:
        self.lengths, self.cluster = lengths, cluster
        self.prices = Prices(lengths, cluster, cost, pricing)
        self.work_s = self.prices.work_s
        self.all_s, self.all_tokens = sum(self.work_s), sum(lengths)
        self.mean_s, self.mean_tokens = self.all_s / cluster.num_ranks, self.all_tokens / cluster.num_ranks
        order = sorted(range(len(lengths)), key=lambda seq: (-lengths[seq], seq))
        self.large = self._above(order, 1 / _SMALL)
        if len(self.large) > _MANY:
            self.large = self._above(order, 1 / 2)
        placed_first = set(self.large)
        self.small = [seq for seq in order if seq not in placed_first]
        self.small_s = sum(self.work_s[seq] for seq in self.small)
        self.small_tokens = sum(lengths[seq] for seq in self.small)
        self.least_s = max(self.mean_s, self._longest_s() if self.large else 0.0)
        self.effort = _EFFORT // max(1, len(self.large))

    def _above(self, order: Sequence[int], part: float) -> list[int]:
        """Sequences of more than `part` of a rank's mean time or tokens."""
        return [seq for seq in order if self.work_s[seq] > part * self.mean_s or self.lengths[seq] > part * self.mean_tokens]

    def share(self, seq: int, num_ranks: int, inter_node: bool = False) -> Share:
        """The share of each rank in a ring that is the sequence's own."""
        return self.prices.share(self.lengths[seq], num_ranks, inter_node)

    def _longest_s(self) -> float:
        """The least time that the longest sequence takes a rank, whatever shares it."""
        num_ranks, size, longest = self.cluster.num_ranks, self.cluster.node_size, self.large[0]
        found = [self.share(longest, count)[0] for count in range(1, size + 1)]
        if num_ranks > size:
            counts = {*range(2, min(num_ranks, _WIDEST) + 1), *range(size, num_ranks + 1, size)}
            found += [self.share(longest, count, inter_node=True)[0] for count in counts]
        return min(found)

    def token_limits(self, capacity: int) -> list[int]:
        """Limits on a rank's tokens to try beside the capacity."""
        return [limit for factor in _TOKEN_LIMITS if (limit := int(self.mean_tokens * factor) + 1) < capacity]

    def search(self, limit: int, bound_s: float) -> _State | None:
        """The tightest placement found under a limit on a rank's tokens, if its longest time stays below `bound_s`."""
        wide = 0
        while wide <= len(self.large):
            found = self._bisect(self.least_s, bound_s, _Target(inf, limit, wide=wide), max(2, min(_STEPS, self.effort)))
            if found is not None and found.place_small():
                return found
            wide = max(1, 4 * wide)
        return None

    def evener(self, target: _Target, limit: int, bound_s: float) -> _State | None:
        """The tightest placement found with fewer tokens on a rank than under `target`, which takes at least as long."""
        found = self._bisect(target.time_s, bound_s, replace(target, tokens=limit), min(_FEWER_STEPS, self.effort))
        return found if found is not None and found.place_small() else None

    def eased(self, target: _Target) -> Iterator[_State]:
        """Placements under a target a little less tight than one that was reached: they may move less, and even out more tokens."""
        target = replace(target, time_s=target.time_s * (1 + self.prices.pricing.weight_communication))
        for _ in range(min(_EASED, self.effort)):
            found = self._attempt(target)
            if found is None or not found.place_small():
                return
            yield found
            target = replace(target, tokens=int(_LESS * max(found.tokens)))

    def _bisect(self, low: float, bound_s: float, loose: _Target, steps: int) -> _State | None:
        """The larger sequences under the lowest target time found from `low` on; None if `bound_s` is too low already."""
        high, factor = low, _FIRST_FACTOR
        while high < bound_s:
            low, high, factor = high, min(factor * high, bound_s), factor**2
            found = self._attempt(replace(loose, time_s=high))
            if found is not None:
                return self._tighten(found, low, steps)
        return None

    def _tighten(self, found: _State, low: float, steps: int) -> _State:
        """The same under the lowest target found in so many steps above `low`, which is too low."""
        for _ in range(steps):
            high = found.target.time_s
            if high <= low * (1 + _TOLERANCE):
                break
            middle = sqrt(low * high)
            tighter = self._attempt(replace(found.target, time_s=middle))
            if tighter is None:
                low = middle
            else:
                found = tighter
        return found

    def _attempt(self, target: _Target) -> _State | None:
        fills: tuple[Fill, ...] = ("whole",) if target.wide else ("most", "least", "whole")
        for fill in fills:
            state = _State(self, replace(target, fill=fill))
            if state.place_large():
                return state
        return None


class _State:
    """A placement in the making, under one target. Lists are by rank, those of nodes by node.

    `load` is what decides where there is most room: time and tokens, each over its limit, added.
    """

    def __init__(self, problem: _Problem, target: _Target) -> None:
        self.problem, self.target, self.cluster = problem, target, problem.cluster
        num_ranks, self.size = problem.cluster.num_ranks, problem.cluster.node_size
        self.time_s, self.load = ([0.0] * num_ranks for _ in range(2))
        self.idlest = [(0.0, rank) for rank in range(num_ranks)]  # a heap
        self.tokens = [0] * num_ranks
        self.node_load, self.node_s = ([0.0] * problem.cluster.num_nodes for _ in range(2))
        self.node_tokens = [0] * problem.cluster.num_nodes
        self.held_s, self.held_tokens = 0.0, 0
        self.placement: list[tuple[int, ...]] = [()] * len(problem.lengths)
        self.unit_s = target.time_s if target.time_s < inf else problem.mean_s

    def place_large(self) -> bool:
        """Place the larger sequences; False if one finds no place, or all that is left, as a fluid, no room."""
        problem, target = self.problem, self.target
        left_s, left_tokens = problem.all_s, problem.all_tokens
        if target.wide:
            longest = problem.large[: target.wide]
            self.put_everywhere(longest)
            left_s -= sum(problem.work_s[seq] for seq in longest)
            left_tokens -= sum(problem.lengths[seq] for seq in longest)
            if self.time_s[0] > target.time_s or self.tokens[0] > target.tokens:
                return False
        for seq in problem.large[target.wide :]:
            if not self.has_room(left_s, left_tokens) or not self.place(seq):
                return False
            left_s -= problem.work_s[seq]
            left_tokens -= problem.lengths[seq]
        return self.has_room(problem.small_s, problem.small_tokens)

    def has_room(self, time_s: float, tokens: int) -> bool:
        """Whether all ranks together have room for so much more."""
        num_ranks = self.cluster.num_ranks
        return num_ranks * self.target.time_s - self.held_s >= time_s and num_ranks * self.target.tokens - self.held_tokens >= tokens

    def place(self, seq: int) -> bool:
        """Place one sequence where it takes the fewest ranks; False if it fits nowhere."""
        problem, target = self.problem, self.target
        fewest = max(1, -(-problem.lengths[seq] // target.tokens), int(problem.work_s[seq] / target.time_s))
        if fewest > self.cluster.num_ranks:
            return False
        if fewest == 1 and self.on_idlest_rank(seq):
            return True
        nodes = sorted(range(self.cluster.num_nodes), key=self.node_load.__getitem__)
        across = self.across_leftovers if target.fill == "least" else self.across_idlest
        return self.on_one_node(seq, fewest, nodes) or across(seq, fewest, nodes)

    def on_idlest_rank(self, seq: int) -> bool:
        """Place a sequence whole on the least loaded rank, if it fits there: the common case, without looking at all ranks."""
        while self.idlest[0][0] < self.load[self.idlest[0][1]]:  # loads only grow; entries are brought up to date when they come up
            rank = self.idlest[0][1]
            heapreplace(self.idlest, (self.load[rank], rank))
        rank, share = self.idlest[0][1], self.problem.share(seq, 1)
        if not self.fitting((rank,), share):
            return False
        self.put(seq, (rank,), share)
        return True

    def on_one_node(self, seq: int, fewest: int, nodes: Sequence[int]) -> bool:
        for num_ranks in range(fewest, self.size + 1):
            if self.target.fill == "whole" and num_ranks not in (1, self.size):
                continue
            share = self.problem.share(seq, num_ranks)
            ranks = self.room_on_a_node(num_ranks, share, nodes) if self.within(share) else []
            if ranks:
                self.put(seq, self.least_loaded(ranks, num_ranks), share)
                return True
        return False

    def room_on_a_node(self, num_ranks: int, share: Share, nodes: Sequence[int]) -> list[int]:
        """The ranks with room on the least loaded node that has `num_ranks` of them, or on the most loaded one; none if no node has."""
        size = self.size
        full_s, full_tokens = size * self.target.time_s - num_ranks * share[0], size * self.target.tokens - num_ranks * share[1]
        for node in reversed(nodes) if self.target.fill == "least" else nodes[:_NODES]:
            if self.node_s[node] <= full_s and self.node_tokens[node] <= full_tokens:
                ranks = self.fitting(range(node * size, (node + 1) * size), share)
                if len(ranks) >= num_ranks:
                    return ranks
        return []

    def across_idlest(self, seq: int, fewest: int, nodes: Sequence[int]) -> bool:
        """Place a sequence on ranks of the least loaded nodes, as few nodes as do."""
        size = self.size
        for num_nodes in _steps(max(2, -(-fewest // size)), self.cluster.num_nodes):
            pool = [rank for node in nodes[:num_nodes] for rank in range(node * size, (node + 1) * size)]
            narrow = max(fewest, (num_nodes - 1) * size + 1)
            for num_ranks in (len(pool),) if self.target.fill == "whole" else range(narrow, len(pool) + 1):
                share = self.problem.share(seq, num_ranks, inter_node=True)
                ranks = self.fitting(pool, share) if self.within(share) else []
                if len(ranks) >= num_ranks:
                    self.put(seq, self.least_loaded(ranks, num_ranks), share)
                    return True
        return False

    def across_leftovers(self, seq: int, fewest: int, nodes: Sequence[int]) -> bool:
        """Place a sequence on ranks of several nodes, those first of which the fewest ranks have room."""
        size = self.size
        pool = [rank for node in sorted(nodes[:_NODES]) for rank in range(node * size, (node + 1) * size)]
        for num_ranks in range(max(2, fewest), min(len(pool), 2 * max(size, fewest)) + 1):
            share = self.problem.share(seq, num_ranks, inter_node=True)
            ranks = self.fitting(pool, share) if self.within(share) else []
            if len(ranks) >= num_ranks:
                room = Counter(rank // size for rank in ranks)
                ranks.sort(key=lambda rank: (room[rank // size], rank // size, self.load[rank]))
                self.put(seq, tuple(sorted(ranks[:num_ranks])), share)
                return True
        return False

    def within(self, share: Share) -> bool:
        """Whether an empty rank could take it."""
        return share[0] <= self.target.time_s and share[1] <= self.target.tokens

    def fitting(self, ranks: Sequence[int], share: Share) -> list[int]:
        """Those of `ranks` that can take this much more."""
        time_s, tokens = self.target.time_s - share[0], self.target.tokens - share[1]
        return [rank for rank in ranks if self.time_s[rank] <= time_s and self.tokens[rank] <= tokens]

    def least_loaded(self, ranks: list[int], count: int) -> tuple[int, ...]:
        return tuple(sorted(sorted(ranks, key=self.load.__getitem__)[:count] if count < len(ranks) else ranks))

    def put(self, seq: int, ranks: tuple[int, ...], share: Share) -> None:
        time_s, tokens = share
        load = time_s / self.unit_s + tokens / self.target.tokens
        self.placement[seq] = ranks
        self.held_s += len(ranks) * time_s
        self.held_tokens += len(ranks) * tokens
        for rank in ranks:
            self.time_s[rank] += time_s
            self.tokens[rank] += tokens
            self.load[rank] += load
            node = rank // self.size
            self.node_load[node] += load
            self.node_s[node] += time_s
            self.node_tokens[node] += tokens

    def put_everywhere(self, seqs: Sequence[int]) -> None:
        """Put sequences over all ranks, all at once."""
        everywhere = tuple(range(self.cluster.num_ranks))
        shares = [self.problem.share(seq, len(everywhere), self.cluster.num_nodes > 1) for seq in seqs]
        for seq in seqs:
            self.placement[seq] = everywhere
        self.put(seqs[0], everywhere, (sum(s[0] for s in shares), sum(s[1] for s in shares)))

    def place_small(self) -> bool:
        """Place the rest, each whole on the least loaded rank that has room for it; else as a large one, whatever the time."""
        problem, capacity = self.problem, self.target.tokens
        # Time weighs as much as the small sequences need of it: if all of them take none, only tokens count.
        weight_s = problem.small_s / self.unit_s**2
        weight_tokens = problem.small_tokens / capacity**2
        heap = [(weight_s * self.time_s[rank] + weight_tokens * self.tokens[rank], rank) for rank in range(self.cluster.num_ranks)]
        heapify(heap)
        full: list[tuple[int, float, int]] = []  # a heap of (tokens, load, rank): what had no room; sequences only get shorter
        left: list[int] = []
        for seq in problem.small:
            length, work_s = problem.lengths[seq], problem.work_s[seq]
            while full and full[0][0] + length <= capacity:
                heappush(heap, heappop(full)[1:])
            while heap and self.tokens[heap[0][1]] + length > capacity:
                load, rank = heappop(heap)
                heappush(full, (self.tokens[rank], load, rank))
            if heap:
                load, rank = heap[0]
                self.placement[seq] = (rank,)
                self.time_s[rank] += work_s
                self.tokens[rank] += length
                heapreplace(heap, (load + weight_s * work_s + weight_tokens * length, rank))
            else:
                left.append(seq)
        # What nodes hold was not kept up to date above; it only decides where room is looked for first.
        reached, self.target = self.target, _Target(inf, capacity)
        placed = all(self.place(seq) for seq in left)
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
