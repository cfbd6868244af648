"""Into which groups the ranks are divided: as KnapFormer writes it (section 3.2), the price of it,
and the search for the cheapest (its future work, section 5).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from math import ceil
from typing import overload

import numpy as np

from megatron_balance.cost.base import CostModel, Floats, Ints
from megatron_balance.cost.kernel import backward_factor
from megatron_balance.errors import ConfigError, InfeasibleError
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.model import Model
from megatron_balance.planners.knapformer.knapsack import assign

_TERM = re.compile(r"g([1-9]\d*)n([1-9]\d*)")


@dataclass(frozen=True, slots=True)
class Topology:
    """Sizes of the groups of one unit, in the order of their ranks; a unit repeats over the pool."""

    sizes: tuple[int, ...]

    @property
    def num_ranks(self) -> int:
        return sum(self.sizes)

    def __str__(self) -> str:
        return "+".join(f"g{size}n{len(list(alike))}" for size, alike in groupby(self.sizes))

    def repeated(self, num_ranks: int) -> Topology:
        """The topology of a pool: the unit as often as it fits; ConfigError where it does not."""
        if num_ranks % self.num_ranks:
            raise ConfigError(
                f"topology {self}: a unit of {self.num_ranks} ranks does not divide the {num_ranks} ranks of the "
                f"pool. Change it so that its ranks (the sum of G x N over its terms gGnN) divide {num_ranks}"
            )
        return Topology(self.sizes * (num_ranks // self.num_ranks))

    def groups(self) -> list[tuple[int, ...]]:
        return [tuple(range(stop - size, stop)) for size, stop in zip(self.sizes, accumulate(self.sizes), strict=True)]


def parse(text: str) -> Topology:
    """The topology of a text such as `g1n2+g2n1+g4n1`; ConfigError says which term is wrong."""
    sizes: list[int] = []
    for term in text.split("+"):
        match = _TERM.fullmatch(term)
        if match is None:
            raise ConfigError(
                f"topology {text!r}: expected terms gGnN joined by '+', each N groups of G ranks (both 1 or more, no "
                f"spaces), such as g1n2+g2n1+g4n1; got {term!r}"
            )
        size, count = (int(number) for number in match.groups())
        sizes += [size] * count
    return Topology(tuple(sizes))


def check_heads(sizes: Sequence[int], num_heads: int) -> None:
    """Reject groups whose ranks cannot be given equally many heads; ConfigError says what would do."""
    wrong = sorted({size for size in sizes if num_heads % size})
    if wrong:
        right = [size for size in range(1, num_heads + 1) if num_heads % size == 0]
        raise ConfigError(
            f"a group of {wrong[0]} ranks cannot share {num_heads} heads equally; use groups of "
            f"{', '.join(map(str, right))} ranks, or choose a fallback: option heads: uneven (some ranks attend with "
            "a head more) or heads: ring (keys and values go round such groups)"
        )


# Gradients travel in fp32.
GRADIENT_BYTES = 4


# Forward and backward over the forward alone.
LINEAR, ATTENTION, EXPERTS = 3.0, 1 + backward_factor(), 2.0


# Seconds of packing and unpacking over those of moving inside a node: read and written twice, at
# a memory rate that is some seven times the link's.
PACKING = 0.4


_ROUNDING = 1 + 1e-9


class TopologyPrices:
    """Predicted seconds of a layer, forward and backward, of a batch's sequences under any
    topology. Ranks of a group are alike; attention, linear modules and the two all-to-alls come one
    after another.
    """

    def __init__(self, lengths: Sequence[int], cluster: Cluster, model: Model, cost: CostModel) -> None:
        self.cluster, self.model, self.cost = cluster, model, cost
        self.tokens = np.array(lengths, dtype=np.float64)
        known = {n: cost.attention_s(model.mask.num_pairs(n), n) for n in set(lengths)}
        self.attention_s = np.array([known[n] for n in lengths], dtype=np.float64)
        self.expert_s = cost.experts_s(2.0) - cost.experts_s(1.0)
        self.token_s = cost.linear_s(1.0) - self.expert_s
        self.token_bytes = cost.kv_bytes(1.0) + 2 * cost.query_bytes(1.0)
        self._exchanges: dict[tuple[int, int], float] = {}
        self._alone: dict[int, Floats] = {}

    def seconds(self, topology: Topology, group_of: Ints) -> float:
        return float(self.each(topology, group_of).max(initial=0.0))

    def each(self, topology: Topology, group_of: Ints) -> Floats:
        sizes = np.array(topology.sizes, dtype=np.float64)
        tokens = np.bincount(group_of, weights=self.tokens, minlength=len(sizes)) / sizes
        attention = np.bincount(group_of, weights=self.attention_s, minlength=len(sizes)) / sizes
        # The busiest rank's heads over the mean: 1 where the heads divide, [M].
        heads = np.ceil(self.model.num_heads / sizes) / (self.model.num_heads / sizes)
        stops = np.cumsum(topology.sizes)
        # On the first rank's node.
        room = self.cluster.node_size - (stops - topology.sizes) % self.cluster.node_size
        here = np.minimum(room, topology.sizes).tolist()
        exchange = np.array([self._exchange_s(*each) for each in zip(topology.sizes, here, strict=True)])
        own = LINEAR * self.token_s * tokens + ATTENTION * attention * heads + exchange * tokens
        return own + EXPERTS * self.expert_s * tokens.max()

    def is_slower(self, sizes: Sequence[int], seconds: float) -> bool:
        """Whether the slowest group takes longer than `seconds` however groups are filled."""
        limit, present = seconds * _ROUNDING, sorted(set(sizes))
        alone = np.array([self._alone_s(size) for size in present])
        fits = alone <= limit
        if not fits.any(axis=0).all():
            return True
        of_size = np.array(present, dtype=np.float64)
        # Rank-seconds.
        least = np.where(fits, alone * of_size[:, None], np.inf).min(axis=0)
        # From the largest size down: what only large groups do in time must fit into these.
        needs = np.bincount(fits.argmax(axis=0), weights=least, minlength=len(present))
        has = np.array([size * sizes.count(size) for size in present]) * limit
        return bool((np.cumsum(needs[::-1]) > np.cumsum(has[::-1])).any())

    def _alone_s(self, size: int) -> Floats:
        if size not in self._alone:
            heads = ceil(self.model.num_heads / size) / (self.model.num_heads / size)
            exchange_s = min(
                self._exchange_s(size, inside) for inside in range(1, min(size, self.cluster.node_size) + 1)
            )
            token_s = LINEAR * self.token_s + EXPERTS * self.expert_s + exchange_s
            self._alone[size] = (token_s * self.tokens + ATTENTION * heads * self.attention_s) / size
        return self._alone[size]

    def _exchange_s(self, size: int, inside: int) -> float:
        """Seconds of a group's all-to-alls, both ways and both passes, for each token that a rank
        holds; `inside`: ranks on the first one's node.
        """
        if (size, inside) not in self._exchanges:
            self._exchanges[size, inside] = self._all_to_alls_s(size, inside)
        return self._exchanges[size, inside]

    def _all_to_alls_s(self, size: int, inside: int) -> float:
        if size == 1:
            return 0.0
        both_ways = self.token_bytes * (1 + GRADIENT_BYTES / self.model.bytes_per_element)
        packing_s = PACKING * self.cost.intra_node_s(both_ways * (size - 1) / size, 0)
        inside_s = self.cost.intra_node_s(both_ways * (inside - 1) / size, 0)
        if inside == size:
            return packing_s + inside_s
        nics = 1 / self.cluster.ranks_per_nic
        return packing_s + max(inside_s, self.cost.inter_node_s(both_ways * (size - inside) / size, 0, nics))


@dataclass(frozen=True, slots=True)
class _Found:
    """A topology of the whole pool, the group of each sequence, and seconds of a layer."""

    topology: Topology
    group_of: Ints
    seconds: float


class TopologySearch:
    """Topologies of one size first; from the best of them groups are split and merged."""

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

    def best(self, tries: int) -> _Found:
        """The best of at most `tries`; one group of all where memory rules out the others."""
        best: _Found | None = None
        for size in self._uniform_sizes():
            best = self._better((size,) * (self.cluster.num_ranks // size), best)
        if best is None:
            everyone = np.zeros(len(self.lengths), dtype=np.int64)
            topology = Topology((self.cluster.num_ranks,))
            return _Found(topology, everyone, self._prices.seconds(topology, everyone))
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
            # Groups of `size` that are changed at a time.
            unit = 1 if size == large else ratio
            most = counts[size] // unit
            for times in sorted({1, most // 4, most // 2, most}):
                if not 0 < times <= most or len(self._tried) >= tries:
                    continue
                changed = dict(counts)
                changed[size] -= times * unit
                changed[other] += times * (ratio if size == large else 1)
                yield tuple(each for each in reversed(self.sizes) for _ in range(changed[each]))

    @overload
    def _better(self, sizes: tuple[int, ...], best: _Found) -> _Found: ...
    @overload
    def _better(self, sizes: tuple[int, ...], best: _Found | None) -> _Found | None: ...
    def _better(self, sizes: tuple[int, ...], best: _Found | None) -> _Found | None:
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
        found = _Found(topology, group_of, self._prices.seconds(topology, group_of))
        return found if best is None or _rank(found) < _rank(best) else best


def _rank(found: _Found) -> tuple[float, int]:
    return found.seconds, -len(found.topology.sizes)


def allowed_sizes(cluster: Cluster, num_heads: int) -> list[int]:
    """Sizes of groups, ascending, that divide the heads and lie in a node or are whole nodes."""
    node = cluster.node_size
    return [
        size
        for size in range(1, min(cluster.num_ranks, num_heads) + 1)
        if num_heads % size == 0 and (node % size == 0 or size % node == 0)
    ]
