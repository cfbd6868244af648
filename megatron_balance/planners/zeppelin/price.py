"""The price of a placement: what the costed rule compares placements by, in predicted seconds of
one layer's forward pass.

A rank works through its zones in issue order. While it attends to the keys of one round those of
the next one travel, and nothing is attended out of turn, so a zone takes the longer of its
attention and of its transfers with the attention of the round that comes last; a rank takes the sum
of its zones. A ring's rounds all wait for its slowest link: the one between nodes, if there is one.

Between nodes a message goes by one NIC, or where transfers are routed by all NICs of both nodes if
that is faster (Eq. 1). Routed rings that cross the same node share its NICs.

Tokens: without a remap the rank with most of them is waited for in the linear parts, which is what
`weight_tokens` weighs. With a remap these are even whatever the placement, and what counts is what
the remap moves (section 3.4): a rank's tokens above or below the mean travel as queries, keys and
values before attention and as outputs after it, inside a node over the rank's link, and where a
node as a whole is above or below its share, over the node's NICs. Filling these in the best way
(Eq. 2, `solvers.remap`) is the remap's business; the price takes an estimate of it (`cost.remap`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import ceil
from typing import TypeAlias

import numpy as np

from megatron_balance.cost.base import CostModel
from megatron_balance.cost.remap import remap_s
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.mask import CAUSAL, Mask
from megatron_balance.solvers.groups import rank_tokens
from megatron_balance.solvers.placed import Placement, members

RankShare: TypeAlias = tuple[float, int]
"""Seconds and tokens that a sequence costs each rank of its ring."""


@dataclass(frozen=True, slots=True)
class Pricing:
    """Weights by which a placement is judged, beside the cost model.

    `weight_tokens`: of the longest linear time, beside the longest attention time.
    `weight_communication`: what share of the time it counts, hidden or not, to move as much as the
    trivial plan, all sequences over all ranks, does. `routed`: rings between nodes may use all
    NICs. `remapped`: what the remap moves is paid for.
    """

    weight_tokens: float
    weight_communication: float
    routed: bool = True
    remapped: bool = True


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted times of a placement.

    `attention_s`: of the slowest rank; `hops_s`: sum over ranks of the time on their links.
    """

    attention_s: float
    remap_s: float
    hops_s: float
    tokens: Sequence[float]

    @property
    def moved_tokens(self) -> float:
        """Tokens that a remap brings from one rank to another."""
        mean = sum(self.tokens) / len(self.tokens)
        return sum(max(0.0, held - mean) for held in self.tokens)


class Prices:
    """Costs of a batch's sequences on any number of ranks; holds no decisions.

    `pricing`: how it judges unless told otherwise; `shares`: those asked for so far, by length, ranks
    and whether the ring crosses nodes.
    """

    def __init__(
        self, lengths: Sequence[int], cluster: Cluster, cost: CostModel, pricing: Pricing, mask: Mask = CAUSAL
    ) -> None:
        self.lengths, self.cluster, self.cost, self.pricing, self.mask = lengths, cluster, cost, pricing, mask
        self.num_nics = ceil(cluster.node_size / cluster.ranks_per_nic)
        self.token_s, self.token_bytes = cost.linear_s(1.0), cost.kv_bytes(1.0)
        self.trivial_hops_s = cluster.num_ranks * self.hops_s(sum(lengths), cluster.num_ranks, cluster.num_nodes > 1)
        self._times = {1: _Times(cost, 1, mask)}
        self.shares: dict[tuple[int, int, bool], RankShare] = {}
        self.work_s = list(map(self._times[1].__getitem__, lengths))
        self._work, self._tokens = np.array(self.work_s, dtype=np.float64), np.array(lengths, dtype=np.float64)

    def hops_s(self, num_tokens: float, num_ranks: int, inter_node: bool, rings: int = 1) -> float:
        """Seconds that a ring's links are busy while `rings` rings use the NICs of a node."""
        if num_ranks == 1:
            return 0.0
        num_bytes, rounds = self.token_bytes * (num_tokens * (num_ranks - 1) / num_ranks), num_ranks - 1
        if not inter_node:
            return self.cost.intra_node_s(num_bytes, rounds)
        direct_s = self.cost.inter_node_s(num_bytes, rounds)
        if not self.pricing.routed:
            return direct_s
        others_s = (rings - 1) * self.cost.inter_node_s(num_bytes, 0, self.num_nics)
        return min(direct_s, self.cost.routed_s(num_bytes, rounds, self.num_nics) + others_s)

    def attention_s(self, length: int, num_ranks: int) -> float:
        """Seconds of attention of each rank of a ring for a sequence, of which it holds two chunks."""
        return self._times_on(num_ranks)[length]

    def _times_on(self, num_ranks: int) -> _Times:
        if num_ranks not in self._times:
            self._times[num_ranks] = _Times(self.cost, num_ranks, self.mask)
        return self._times[num_ranks]

    def share(self, length: int, num_ranks: int, inter_node: bool = False) -> RankShare:
        """The share of each rank in a ring that is the sequence's own."""
        key = (length, num_ranks, inter_node)
        known = self.shares.get(key)
        if known is None:
            zone_s = self._zone_s(
                self.attention_s(length, num_ranks), self.hops_s(length, num_ranks, inter_node), num_ranks
            )
            self.shares[key] = known = (zone_s, rank_tokens(length, num_ranks))
        return known

    def _zone_s(self, attention_s: float, hops_s: float, num_ranks: int) -> float:
        """Seconds of a zone: its transfers hide behind its attention, but for that of the last
        round.
        """
        busy_s = attention_s + self.cost.launch_s(num_ranks)
        return max(busy_s, hops_s + busy_s / num_ranks)

    def predict(self, placement: Placement) -> Prediction:
        """Time and tokens. Sequences with the same ranks share a ring and its rounds."""
        return self.predict_rings([ranks[0] if len(ranks) == 1 else -1 for ranks in placement], members(placement, 2))

    def predict_rings(self, rank_of: Sequence[int], rings: Mapping[tuple[int, ...], Sequence[int]]) -> Prediction:
        """`predict` for a placement given as the rank of each sequence that has one alone, -1 for
        others, and the others' `rings`, in the order of `solvers.placed.members`.
        """
        num_ranks = self.cluster.num_ranks
        ranks = np.array(rank_of, dtype=np.int64)
        alone = ranks >= 0
        ranks = ranks[alone]
        in_zones = np.bincount(ranks, self._work[alone], num_ranks).astype(
            np.float64
        )  # added up in the order of the sequences
        in_zones[ranks] += self.cost.launch_s(1)  # once a rank
        times, tokens = in_zones.tolist(), np.bincount(ranks, self._tokens[alone], num_ranks).tolist()
        hops = [0.0] * num_ranks
        for sharing, zone_s, hops_s, held in self._rings(rings):
            for rank in sharing:
                times[rank] += zone_s
                hops[rank] += hops_s
                tokens[rank] += held
        return Prediction(
            max(times), remap_s(tokens, self.cluster, self.cost) if self.pricing.remapped else 0.0, sum(hops), tokens
        )

    def _rings(
        self, rings: Mapping[tuple[int, ...], Sequence[int]]
    ) -> Iterator[tuple[tuple[int, ...], float, float, float]]:
        """Ranks of each ring, and the part of each rank: seconds in all, seconds of its links,
        tokens.
        """
        size = self.cluster.node_size
        crossed = {ranks: {rank // size for rank in ranks} for ranks in rings if ranks[0] // size != ranks[-1] // size}
        inter_node_traffic = Counter(chain.from_iterable(crossed.values()))
        for ranks, seqs in rings.items():
            lengths = [self.lengths[seq] for seq in seqs]
            num_tokens = sum(lengths)
            sharing = max((inter_node_traffic[node] for node in crossed.get(ranks, ())), default=1)
            hops_s = self.hops_s(num_tokens, len(ranks), ranks in crossed, sharing)
            attention_s = sum(map(self._times_on(len(ranks)).__getitem__, lengths))
            yield ranks, self._zone_s(attention_s, hops_s, len(ranks)), hops_s, num_tokens / len(ranks)

    def price_s(self, placement: Placement) -> float:
        """Predicted time with the weighted longest linear time, and a share for what moves."""
        return self.judge_s(self.predict(placement), self.pricing)

    def judge_s(self, prediction: Prediction, pricing: Pricing) -> float:
        """The price of what is predicted, judged by another `pricing`: of as many NICs, and with a
        remap only if ours is.
        """
        time_s = (
            prediction.attention_s
            + (prediction.remap_s if pricing.remapped else 0.0)
            + pricing.weight_tokens * self.token_s * max(prediction.tokens)
        )
        moved = prediction.hops_s / self.trivial_hops_s if self.trivial_hops_s else 0.0
        return time_s * (1 + pricing.weight_communication * moved)


class _Times(dict[int, float]):
    """Seconds of attention of each rank of a ring over `num_ranks` ranks, by length; worked out
    when asked for.
    """

    def __init__(self, cost: CostModel, num_ranks: int, mask: Mask) -> None:
        super().__init__()
        self.cost, self.num_ranks, self.mask = cost, num_ranks, mask

    def __missing__(self, length: int) -> float:
        num_ranks = self.num_ranks
        run = length / (2 * num_ranks) if num_ranks > 1 else length
        self[length] = seconds = self.cost.attention_s(self.mask.num_pairs(length) / num_ranks, run)
        return seconds
