"""Rule `cost`: the fewest ranks and the narrowest zone in which a sequence still meets a target time, and the best such target.

A rank's time is the longer of its attention and of the communication of its rings, since one zone's keys travel while another zone
is attended to. For a target, sequences are placed in descending order, each where it takes the fewest ranks without passing the
target or the capacity: one rank, else ranks of one node, else of two nodes or more. Where that strands room (a long sequence fills
ranks with time before it fills them with tokens), whole nodes are taken instead, and where that does too, the longest sequences go
over all ranks. The target is found by bisection, as MULTIFIT packs bins: first one for both times; then, where communication is the
longer, the lowest for attention alone under the same communication. Short sequences go last, each to the least loaded rank. Of the
placements found, and the trivial one, all sequences over all ranks, the one of the lowest price is taken: its predicted makespan, and
a little for what it moves, since communication that hides behind attention is not free either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush, heapreplace
from math import inf, sqrt
from typing import TypeAlias

from megatron_balance.core.cluster import Cluster
from megatron_balance.cost.base import CostModel
from megatron_balance.planners.zeppelin.placement import Placement, members, share

_SMALL = 8
"""A sequence of less than 1 / _SMALL of a rank's mean time and tokens is placed last and counts as a fluid until then."""

_MANY = 64
"""With more sequences than this above that size, only those above half a rank's mean are placed one by one."""

_STEPS = 6
_EFFORT = 300
"""Steps of a bisection, and fewer if that would place more than about this many sequences: this bounds planning time."""

_NODES = 32
"""Least loaded nodes that are looked at for room."""

_TOLERANCE = 0.01
"""Targets this close, relatively, are not told apart."""

_TOKEN_LIMITS = (1.25, 1.05)
"""Limits on a rank's tokens tried beside the capacity, over the mean: evenness of tokens is bought with time."""

Share: TypeAlias = tuple[float, float, int]
"""What a sequence costs each rank of its ring: seconds of attention, seconds of communication, tokens."""


@dataclass(frozen=True, slots=True)
class Pricing:
    """How a placement is judged, beside the cost model.

    `weight_tokens`: of the longest linear time, beside the longest attention time. `weight_communication`: what share of the time it
    counts, hidden or not, to move as much as the trivial plan, all sequences over all ranks, does. `num_nics`: NICs of a node that one
    ring uses at once.
    """

    weight_tokens: float
    weight_communication: float
    num_nics: float


@dataclass(frozen=True, slots=True)
class _Target:
    """What no rank may pass, and how: `whole` nodes only, and the `wide` longest sequences over all ranks."""

    attention_s: float
    hops_s: float
    tokens: int
    whole: bool = False
    wide: int = 0


def place(lengths: Sequence[int], cluster: Cluster, cost: CostModel, capacity: int, pricing: Pricing) -> Placement:
    """The ranks of each sequence. `capacity`: tokens a rank holds.

    Never of a higher price than the trivial plan, all sequences over all ranks, which is also what is left where nothing else fits.
    """
    problem = Problem(lengths, cluster, cost, pricing)
    best: Placement = [tuple(range(cluster.num_ranks))] * len(lengths)
    best_s, reached = problem.price_s(best), None
    for limit in problem.token_limits(capacity):
        found = problem.search(limit, best_s - problem.token_s * problem.mean_tokens, wider=limit == capacity)
        if found is not None:
            found_s = problem.price_s(found.placement)
            if found_s < best_s:
                best, best_s, reached = found.placement, found_s, found.target
    if reached is not None:
        eased = problem.ease(reached)
        if eased is not None and problem.price_s(eased.placement) < best_s:
            best = eased.placement
    return best


class Problem:
    """A batch with its costs; holds no decisions."""

    def __init__(self, lengths: Sequence[int], cluster: Cluster, cost: CostModel, pricing: Pricing) -> None:
        self.lengths, self.cluster, self.cost = lengths, cluster, cost
        self.num_nics = pricing.num_nics
        self.token_s = cost.linear_s(1.0) * pricing.weight_tokens
        order = sorted(range(len(lengths)), key=lambda seq: (-lengths[seq], seq))
        self.weight_communication = pricing.weight_communication
        self.trivial_hops_s = cluster.num_ranks * self.hops_s(sum(lengths), cluster.num_ranks, cluster.num_nodes > 1)
        work = {length: self._time_s(length, 1) for length in set(lengths)}
        self.work_s = [work[length] for length in lengths]
        self.mean_s = sum(self.work_s) / cluster.num_ranks
        self.mean_tokens = sum(lengths) / cluster.num_ranks
        self.large = self._above(order, 1 / _SMALL)
        if len(self.large) > _MANY:
            self.large = self._above(order, 1 / 2)
        placed_first = set(self.large)
        self.small = [seq for seq in order if seq not in placed_first]
        self.small_s = sum(self.work_s[seq] for seq in self.small)
        self.small_tokens = sum(lengths[seq] for seq in self.small)
        self.parts_s: dict[tuple[int, int], float] = {}
        self.shares: dict[tuple[int, int, bool], Share] = {}

    def _above(self, order: Sequence[int], part: float) -> list[int]:
        """Sequences of more than `part` of a rank's mean time or tokens."""
        return [seq for seq in order if self.work_s[seq] > part * self.mean_s or self.lengths[seq] > part * self.mean_tokens]

    def hops_s(self, num_tokens: float, num_ranks: int, inter_node: bool) -> float:
        """Seconds that a ring's links are busy; all its ranks wait for the slowest one."""
        if num_ranks == 1:
            return 0.0
        num_bytes = self.cost.kv_bytes(num_tokens * (num_ranks - 1) / num_ranks)
        if inter_node:
            return self.cost.inter_node_s(num_bytes, num_ranks - 1, self.num_nics)
        return self.cost.intra_node_s(num_bytes, num_ranks - 1)

    def share(self, seq: int, num_ranks: int, inter_node: bool = False) -> Share:
        """The share of each rank in a ring that is the sequence's own."""
        key = (self.lengths[seq], num_ranks, inter_node)
        if key not in self.shares:
            attention_s = self._attend_s(seq, num_ranks) + self.cost.launch_s(num_ranks)
            self.shares[key] = (attention_s, self.hops_s(self.lengths[seq], num_ranks, inter_node), share(self.lengths[seq], num_ranks))
        return self.shares[key]

    def _attend_s(self, seq: int, num_ranks: int) -> float:
        """Seconds of attention of each rank of a ring for a sequence, of which it holds two chunks."""
        if num_ranks == 1:
            return self.work_s[seq]
        key = (self.lengths[seq], num_ranks)
        if key not in self.parts_s:
            self.parts_s[key] = self._time_s(*key)
        return self.parts_s[key]

    def _time_s(self, length: int, num_ranks: int) -> float:
        return self.cost.attention_s(length * (length + 1) / (2 * num_ranks), length / (2 * num_ranks) if num_ranks > 1 else length)

    def price_s(self, placement: Placement) -> float:
        """Longest time of a rank in attention or its communication, and weighted longest linear time, and a share for what moves.

        Sequences with the same ranks share a ring and its rounds.
        """
        attention_s, hops_s, tokens = ([0.0] * self.cluster.num_ranks for _ in range(3))
        for ranks, seqs in members(placement).items():
            num_tokens = sum(self.lengths[seq] for seq in seqs)
            inter_node = self.cluster.node(ranks[0]) != self.cluster.node(ranks[-1])
            launch_s = self.cost.launch_s(len(ranks))
            more_s = launch_s + sum(self._attend_s(seq, len(ranks)) for seq in seqs)
            more_hops_s = self.hops_s(num_tokens, len(ranks), inter_node)
            for rank in ranks:
                attention_s[rank] += more_s
                hops_s[rank] += more_hops_s
                tokens[rank] += num_tokens / len(ranks)
        time_s = max(*attention_s, *hops_s) + self.token_s * max(tokens)
        moved = sum(hops_s) / self.trivial_hops_s if self.trivial_hops_s else 0.0
        return time_s * (1 + self.weight_communication * moved)

    def token_limits(self, capacity: int) -> list[int]:
        """Limits on a rank's tokens to try: the capacity, and closer to the mean if tokens count."""
        closer = (int(self.mean_tokens * factor) + 1 for factor in _TOKEN_LIMITS)
        return [capacity, *(limit for limit in closer if limit < capacity and self.token_s > 0)]

    def search(self, limit: int, bound_s: float, wider: bool) -> _State | None:
        """The tightest placement found under a limit on a rank's tokens, if its longest time stays below `bound_s`."""
        wide = 0
        while wide <= len(self.large):
            found = self._search(_Target(inf, inf, limit, wide=wide), bound_s)
            if found is not None and found.place_small():
                return found
            if not wider:
                return None
            wide = max(1, 4 * wide)
        return None

    def ease(self, target: _Target) -> _State | None:
        """The placement under a target a little less tight than one that was reached, which may move less."""
        ease = 1 + self.weight_communication
        found = self._attempt(replace(target, attention_s=target.attention_s * ease, hops_s=target.hops_s * ease)) if ease > 1 else None
        return found if found is not None and found.place_small() else None

    def _search(self, loose: _Target, bound_s: float) -> _State | None:
        """The larger sequences under the lowest target for both times, then, if communication is longer, the lowest for attention."""
        found = self._bisect(bound_s, lambda s: replace(loose, attention_s=s, hops_s=s))
        if found is not None and max(found.hops_s) > max(found.attention_s):
            both = found.target
            found = self._bisect(both.attention_s, lambda s: replace(both, attention_s=s)) or found
        return found

    def _bisect(self, high: float, target: Callable[[float], _Target]) -> _State | None:
        """Under the lowest target found; None if `high` is too low already."""
        low = self.mean_s
        tightest = self._attempt(target(high)) if high > low else None
        if tightest is None:
            return None
        for _ in range(max(2, min(_STEPS, _EFFORT // max(1, len(self.large))))):
            if high <= low * (1 + _TOLERANCE):
                break
            middle = sqrt(low * high)
            state = self._attempt(target(middle))
            if state is None:
                low = middle
            else:
                high, tightest = middle, state
        return tightest

    def _attempt(self, target: _Target) -> _State | None:
        for whole in (True,) if target.wide else (False, True):
            state = _State(self, replace(target, whole=whole))
            if state.place_large():
                return state
        return None


class _State:
    """A placement in the making, under one target. Lists are by rank, those of nodes by node.

    `load` is what decides where there is most room: time and tokens, each over its limit, added.
    """

    def __init__(self, problem: Problem, target: _Target) -> None:
        self.problem, self.target, self.cluster = problem, target, problem.cluster
        num_ranks, self.size = problem.cluster.num_ranks, problem.cluster.node_size
        self.attention_s, self.hops_s, self.load = ([0.0] * num_ranks for _ in range(3))
        self.idlest = [(0.0, rank) for rank in range(num_ranks)]  # a heap
        self.tokens = [0] * num_ranks
        self.node_load, self.node_s = ([0.0] * problem.cluster.num_nodes for _ in range(2))
        self.node_tokens = [0] * problem.cluster.num_nodes
        self.placement: list[tuple[int, ...]] = [()] * len(problem.lengths)
        self.unit_s = target.attention_s if target.attention_s < inf else problem.mean_s

    def place_large(self) -> bool:
        """Place the larger sequences; False if one finds no place, or the rest, as a fluid, no room."""
        problem, target = self.problem, self.target
        if target.wide:
            self.put_everywhere(problem.large[: target.wide])
            if self.attention_s[0] > target.attention_s or self.hops_s[0] > target.hops_s or self.tokens[0] > target.tokens:
                return False
        if not all(self.place(seq) for seq in problem.large[target.wide :]):
            return False
        room = sum(max(0.0, target.attention_s - held) for held in self.attention_s)
        tokens = sum(max(0, target.tokens - held) for held in self.tokens)
        return room >= problem.small_s and tokens >= problem.small_tokens

    def place(self, seq: int) -> bool:
        """Place one sequence where it takes the fewest ranks; False if it fits nowhere."""
        problem, target = self.problem, self.target
        fewest = max(1, -(-problem.lengths[seq] // target.tokens), int(problem.work_s[seq] / target.attention_s))
        if fewest > self.cluster.num_ranks:
            return False
        if fewest == 1 and self.on_idlest_rank(seq):
            return True
        nodes = sorted(range(self.cluster.num_nodes), key=self.node_load.__getitem__)
        return self.on_one_node(seq, fewest, nodes) or self.across_nodes(seq, fewest, nodes)

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
        size = self.size
        for num_ranks in range(fewest, size + 1):
            if self.target.whole and num_ranks not in (1, size):
                continue
            share = self.problem.share(seq, num_ranks)
            if not self.within(share):
                continue
            full_s = size * self.target.attention_s - num_ranks * share[0]
            full_tokens = size * self.target.tokens - num_ranks * share[2]
            for node in nodes[:_NODES]:
                if self.node_s[node] > full_s or self.node_tokens[node] > full_tokens:
                    continue
                ranks = self.fitting(range(node * size, (node + 1) * size), share)
                if len(ranks) >= num_ranks:
                    self.put(seq, self.least_loaded(ranks, num_ranks), share)
                    return True
        return False

    def across_nodes(self, seq: int, fewest: int, nodes: Sequence[int]) -> bool:
        size = self.size
        for num_nodes in _steps(max(2, -(-fewest // size)), self.cluster.num_nodes):
            pool = [rank for node in nodes[:num_nodes] for rank in range(node * size, (node + 1) * size)]
            narrow = max(fewest, (num_nodes - 1) * size + 1)
            for num_ranks in {len(pool): None} if self.target.whole else {narrow: None, len(pool): None}:
                share = self.problem.share(seq, num_ranks, inter_node=True)
                ranks = self.fitting(pool, share) if self.within(share) else []
                if len(ranks) >= num_ranks:
                    self.put(seq, self.least_loaded(ranks, num_ranks), share)
                    return True
        return False

    def within(self, share: Share) -> bool:
        """Whether an empty rank could take it."""
        return share[0] <= self.target.attention_s and share[1] <= self.target.hops_s and share[2] <= self.target.tokens

    def fitting(self, ranks: Sequence[int], share: Share) -> list[int]:
        """Those of `ranks` that can take this much more."""
        attention_s, hops_s, tokens = self.target.attention_s - share[0], self.target.hops_s - share[1], self.target.tokens - share[2]
        return [
            r
            for r in ranks
            if self.attention_s[r] <= attention_s and self.tokens[r] <= tokens and (self.hops_s[r] <= hops_s or not share[1])
        ]

    def least_loaded(self, ranks: list[int], count: int) -> tuple[int, ...]:
        return tuple(sorted(sorted(ranks, key=self.load.__getitem__)[:count] if count < len(ranks) else ranks))

    def put(self, seq: int, ranks: tuple[int, ...], share: Share) -> None:
        attention_s, hops_s, tokens = share
        load = attention_s / self.unit_s + tokens / self.target.tokens
        self.placement[seq] = ranks
        for rank in ranks:
            self.attention_s[rank] += attention_s
            self.hops_s[rank] += hops_s
            self.tokens[rank] += tokens
            self.load[rank] += load
            node = rank // self.size
            self.node_load[node] += load
            self.node_s[node] += attention_s
            self.node_tokens[node] += tokens

    def put_everywhere(self, seqs: Sequence[int]) -> None:
        """Put sequences over all ranks, all at once."""
        everywhere = tuple(range(self.cluster.num_ranks))
        shares = [self.problem.share(seq, len(everywhere), self.cluster.num_nodes > 1) for seq in seqs]
        for seq in seqs:
            self.placement[seq] = everywhere
        self.put(seqs[0], everywhere, (sum(s[0] for s in shares), sum(s[1] for s in shares), sum(s[2] for s in shares)))

    def place_small(self) -> bool:
        """Place the rest, each whole on the least loaded rank that has room for it; else as a large one, whatever the time."""
        problem, capacity = self.problem, self.target.tokens
        # Time weighs as much as the small sequences need of it: if all of them take none, only tokens count.
        weight_s = problem.small_s / self.unit_s**2
        weight_tokens = problem.small_tokens / capacity**2
        heap = [(weight_s * self.attention_s[rank] + weight_tokens * self.tokens[rank], rank) for rank in range(self.cluster.num_ranks)]
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
                self.put(seq, (rank,), (work_s, 0.0, length))
                heapreplace(heap, (load + weight_s * work_s + weight_tokens * length, rank))
            else:
                left.append(seq)
        reached, self.target = self.target, _Target(inf, inf, capacity)
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
