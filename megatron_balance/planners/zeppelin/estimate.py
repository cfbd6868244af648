"""Seconds of a placement in uneven shares, forward and backward, without making its program.

Closed forms over groups of ranks: a share p of a sequence of l tokens cut zigzag is p of its work, p
of that on keys of its own; the other groups' keys before its last query come from them. Keys of a
wave travel while the one before is attended, and gradients of a wave while the next is; a rank's
exchange with another waits for its busier end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron_balance.cost.base import CostModel
from megatron_balance.cost.kernel import BLOCK_TILES, TILE_TOKENS
from megatron_balance.cost.remap import remap_s
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.columns import Pair
from megatron_balance.ir.model import Model
from megatron_balance.planners.zeppelin.shares import Shares

WAVES = (1, 2, 4, 8)
"""Numbers of waves that are priced."""

_TYPICAL = 8192
"""Tokens of the sequence whose backward is compared with its forward."""

_BLOCK_TOKENS = BLOCK_TILES * TILE_TOKENS
"""Keys that cost as much as the thread blocks of a piece of keys do beside them."""

_MERGED = 6.0
"""Bytes that a merge of partial outputs, and the sum of gradients of its launch in the backward, read
and write, over those of the queries: three values in fp32 each."""

_GRADIENT = 2.0
"""Bytes of a gradient of keys and values over theirs: they travel in fp32."""


@dataclass(slots=True)
class GroupCosts:
    """Seconds of work and traffic of groups of `size` ranks in a row."""

    cost: CostModel
    cluster: Cluster
    model: Model
    size: int
    backward: float = field(init=False)
    """Seconds of attention of a backward over those of its forward."""
    key_s: float = field(init=False)
    """Seconds a key of a lone thread block: a launch of few queries ends on its longest one."""

    def __post_init__(self) -> None:
        pairs = np.zeros((2, Pair.WIDTH), dtype=np.int64)
        pairs[:, Pair.Q_STOP] = pairs[:, Pair.K_STOP] = _TYPICAL
        pairs[0, Pair.Q_HEAD_STOP], pairs[0, Pair.KV_HEAD_STOP] = self.model.num_heads, self.model.num_kv_heads
        pairs[1, Pair.Q_START], pairs[1, Pair.Q_HEAD_STOP], pairs[1, Pair.KV_HEAD_STOP] = _TYPICAL - TILE_TOKENS, 1, 1
        launch = np.arange(2, dtype=np.int64)
        forward, backward = (self.cost.attend_s(pairs, launch, 2, backward=b).tolist() for b in (False, True))
        self.backward = backward[0] / forward[0]
        self.key_s = max(0.0, forward[1] - self.cost.launch_s(1)) / _TYPICAL

    @property
    def num_groups(self) -> int:
        return self.cluster.num_ranks // self.size

    def work_s(self, length: int) -> float:
        """Seconds of a group for the attention of a whole sequence, forward."""
        return self.cost.attention_s(length * (length + 1) / 2, length) / self._heads_share

    @property
    def _heads_share(self) -> float:
        """Ranks of a group that the heads divide among evenly: what the rank with most heads has."""
        most = -(-self.model.num_heads // self.size)
        return self.model.num_heads / most

    def keys_s(self, num_tokens: float, num_messages: float) -> float:
        """Seconds in which a rank receives its heads' keys and values of tokens from other groups."""
        copies = max(1.0, self.size / self.model.num_kv_heads)
        num_bytes = self.cost.kv_bytes(num_tokens) * copies / self.size
        if self.num_groups * self.size <= self.cluster.node_size:
            return self.cost.intra_node_s(num_bytes, num_messages)
        return self.cost.inter_node_s(num_bytes, num_messages, 1 / self.cluster.ranks_per_nic)

    def merge_s(self, num_tokens: float) -> float:
        """Seconds of merging partial outputs of a group's tokens; summing gradients takes as long."""
        return _MERGED * self.cost.query_bytes(num_tokens) / self.size / self.cluster.memory_bytes_per_s

    def trade_s(self, num_tokens: float) -> tuple[float, float]:
        """Seconds of a group's all-to-alls before and after attention, forward; `num_tokens`: of the
        group.
        """
        size, node = self.size, self.cluster.node_size
        if size == 1:
            return 0.0, 0.0
        query, copies = self.cost.query_bytes(num_tokens), max(1.0, size / self.model.num_kv_heads)
        seconds: list[float] = []
        for num_bytes in (query + copies * self.cost.kv_bytes(num_tokens), query):
            each = num_bytes / size
            inside = self.cost.intra_node_s(each * (min(size, node) - 1) / size, min(size, node) - 1)
            across = 0.0
            if size > node:
                nics = 1 / self.cluster.ranks_per_nic
                across = self.cost.inter_node_s(each * (size - node) / size, size - node, nics)
            seconds.append(max(inside, across))
        return seconds[0], seconds[1]


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds of one layer of a placement, and the waves it takes for them.

    `exposed_s`: by how much keys that are waited for, and what waves cost, make it longer.
    """

    seconds: float
    num_waves: int
    exposed_s: float


def estimate(placed: Shares, costs: GroupCosts, waves: Sequence[int] = WAVES, *, remapped: bool = True) -> Estimate:
    """Attention and linear modules of one layer, forward and backward, under the best of `waves`;
    `remapped`: a remap may even out tokens.
    """
    received, sent, *away = _traffic(placed)
    busiest = [max(pair) for pair in zip(received, sent, strict=True)]
    keys_s = [costs.keys_s(tokens, 0) for tokens in busiest]
    before_s, after_s = costs.trade_s(max(placed.held))
    seconds, num_waves = min((_attention_s(placed, costs, away, keys_s, n), n) for n in waves)
    # Gradients of queries, keys and values are twice as wide; an output comes with its gradient.
    trades_s = before_s + after_s + _GRADIENT * (before_s + after_s)
    total_s = seconds + trades_s + _linear_s(placed, costs, remapped=remapped)
    return Estimate(total_s, num_waves, seconds - placed.mean_work * (1 + costs.backward))


def _traffic(placed: Shares) -> list[list[float]]:
    """By group: tokens whose keys it receives and sends, work on keys that it receives, what a piece
    of keys for each source adds to it in every wave, and the most keys in a row: all that come of a
    sequence, and all that come from two neighbouring sources.
    """
    received, sent, far, pieces, whole, part = ([0.0] * placed.num_groups for _ in range(6))
    for seq, shares in enumerate(placed.of):
        if len(shares) == 1:
            continue
        length, before = placed.tokens[seq], 0.0
        for at, group in enumerate(sorted(shares)):
            share = shares[group]
            received[group] += length * (1 - share - before / 2)
            sent[group] += length * share / 2 * (len(shares) - 1 + at)
            away = placed.work[seq] * share * (1 - share)
            far[group] += away
            pieces[group] += away * _BLOCK_TOKENS * (len(shares) - 1) / (length * (1 - share))
            whole[group] = max(whole[group], length * (1 - share))
            part[group] = max(part[group], min(length * (1 - share), length / len(shares)))
            before += share
    return [received, sent, far, pieces, whole, part]


def _attention_s(
    placed: Shares, costs: GroupCosts, away: Sequence[list[float]], keys_s: list[float], num_waves: int
) -> float:
    """Seconds of own work and waves, forward and backward, of the slowest group."""
    launch_s = costs.cost.launch_s(1)
    call_s = costs.keys_s(0, 1) + launch_s
    longest = [0.0, 0.0]
    for load, held, far, pieces, whole, part, travel_s in zip(placed.load, placed.held, *away, keys_s, strict=True):
        own_s = load - far + launch_s
        if not far:
            longest = [max(longest[0], own_s), max(longest[1], own_s * costs.backward)]
            continue
        merge_s = costs.merge_s(held) + launch_s
        each_s = travel_s / num_waves + call_s
        in_a_row = part / num_waves if num_waves > 1 else whole
        wave_s = max(far / num_waves + pieces, in_a_row * costs.key_s)
        forward_s = wave_s + merge_s
        # Slowest is what is done, the first wave's way and all work, or all ways and the last work.
        waves_s = (num_waves - 1) * forward_s
        longest[0] = max(longest[0], max(own_s, each_s, num_waves * each_s - waves_s) + waves_s + forward_s)
        backward_s = wave_s * costs.backward + merge_s
        back_s = _GRADIENT * travel_s / num_waves + call_s
        own_s *= costs.backward
        waves_s = num_waves * backward_s
        longest[1] = max(longest[1], waves_s + max(own_s, back_s), backward_s + num_waves * back_s)
    return sum(longest)


def _linear_s(placed: Shares, costs: GroupCosts, *, remapped: bool) -> float:
    """Seconds of the linear modules, forward and twice that backward, with a remap where that pays."""
    cost, size = costs.cost, costs.size
    uneven_s = cost.linear_s(max(placed.held) / size)
    tokens = [held / size for held in placed.held for _ in range(size)]
    even_s = cost.linear_s(sum(tokens) / len(tokens))
    if remapped and uneven_s > 1.02 * even_s:
        uneven_s = min(uneven_s, even_s + remap_s(tokens, costs.cluster, cost))
    return 3 * uneven_s
