"""The topology of the least predicted time for a batch: KnapFormer's future work (section 5).

Groups have sizes that divide the heads, lie in a node or are made of whole nodes, and hold their
sequences in memory. Topologies of one size are priced first; from the best of them groups are split
and merged, as long as that makes the slowest group faster. Every topology is filled by the same
knapsack, so a price is that of the plan that would run. One that no filling makes as fast as the best
so far is not filled (`TopologyPrices.is_slower`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np

from megatron_balance.cost.base import CostModel, Floats, Ints
from megatron_balance.errors import InfeasibleError
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.model import Model
from megatron_balance.planners.knapformer.knapsack import assign
from megatron_balance.planners.knapformer.price import TopologyPrices
from megatron_balance.planners.knapformer.topology import Topology


@dataclass(frozen=True, slots=True)
class Found:
    """A topology of the whole pool, the group of each sequence, and the predicted seconds of a
    layer, forward and backward.
    """

    topology: Topology
    group_of: Ints
    seconds: float


class TopologySearch:
    """Topologies for one batch."""

    def __init__(
        self,
        lengths: Sequence[int],
        work: Floats,
        cluster: Cluster,
        model: Model,
        cost: CostModel,
        tokens_per_rank: int | None,
    ) -> None:
        self.lengths, self.work, self.cluster, self.tokens_per_rank = lengths, work, cluster, tokens_per_rank
        self.sizes = allowed_sizes(cluster, model.num_heads)
        self._prices = TopologyPrices(lengths, cluster, model, cost)
        self._tried: set[tuple[int, ...]] = set()

    def best(self, tries: int) -> Found:
        """The best topology of at most `tries` that are tried; one group of all ranks where memory
        rules out the others.
        """
        best: Found | None = None
        for size in self._uniform_sizes():
            best = self._better((size,) * (self.cluster.num_ranks // size), best)
        if best is None:
            everyone = np.zeros(len(self.lengths), dtype=np.int64)
            topology = Topology((self.cluster.num_ranks,))
            return Found(topology, everyone, self._prices.seconds(topology, everyone))
        while len(self._tried) < tries:
            better = best
            for sizes in self._neighbours(best.topology.sizes, tries):
                better = self._better(sizes, better)
            if better is best:
                return best
            best = better
        return best

    def _uniform_sizes(self) -> list[int]:
        return [size for size in self.sizes if self.cluster.num_ranks % size == 0]

    def _neighbours(self, sizes: tuple[int, ...], tries: int) -> Iterator[tuple[int, ...]]:
        """Some or all groups of one size split into smaller ones, or merged to larger ones."""
        counts = {size: sizes.count(size) for size in self.sizes}
        for size, other in ((a, b) for a in self.sizes for b in self.sizes if a != b):
            large, small = max(size, other), min(size, other)
            if large % small:
                continue
            ratio = large // small
            unit = 1 if size == large else ratio  # groups of `size` that are changed at a time
            most = counts[size] // unit
            for times in sorted({1, most // 4, most // 2, most}):
                if not 0 < times <= most or len(self._tried) >= tries:
                    continue
                changed = dict(counts)
                changed[size] -= times * unit
                changed[other] += times * (ratio if size == large else 1)
                yield tuple(each for each in reversed(self.sizes) for _ in range(changed[each]))

    @overload
    def _better(self, sizes: tuple[int, ...], best: Found) -> Found: ...
    @overload
    def _better(self, sizes: tuple[int, ...], best: Found | None) -> Found | None: ...
    def _better(self, sizes: tuple[int, ...], best: Found | None) -> Found | None:
        """The better of the best so far and a topology that fits memory, if that is a new one."""
        if sizes in self._tried:
            return best
        self._tried.add(sizes)
        if best is not None and self._prices.is_slower(sizes, best.seconds):
            return best
        try:
            group_of = assign(self.work, self.lengths, sizes, self.tokens_per_rank)
        except InfeasibleError:
            return best
        topology = Topology(sizes)
        found = Found(topology, group_of, self._prices.seconds(topology, group_of))
        return found if best is None or _rank(found) < _rank(best) else best


def _rank(found: Found) -> tuple[float, int]:
    """Of equally fast ones that of the most groups, which exchanges least."""
    return found.seconds, -len(found.topology.sizes)


def allowed_sizes(cluster: Cluster, num_heads: int) -> list[int]:
    """Sizes of groups, ascending, that divide the heads and lie in a node or are whole nodes."""
    node = cluster.node_size
    return [
        size
        for size in range(1, min(cluster.num_ranks, num_heads) + 1)
        if num_heads % size == 0 and (node % size == 0 or size % node == 0)
    ]
