"""Seconds of a placement in uneven shares, forward and backward, without making its program.

Closed forms over groups of ranks: a share p of a sequence of l tokens cut zigzag is p of its work, p
of that on keys of its own; the other groups' keys before its last query come from them. Keys of a
wave travel while the one before is attended, and gradients of a wave while the next is; a rank's
exchange with another waits for its busier end.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from math import inf

import numpy as np

from megatron_balance.cost.base import CostModel, Floats
from megatron_balance.cost.kernel import BLOCK_TILES, TILE_TOKENS
from megatron_balance.cost.remap import remap_s
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.columns import Pair
from megatron_balance.ir.model import Model
from megatron_balance.planners.zeppelin.shares import Shares, Trimmed

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

_UNEVEN = 1.02
"""Tokens of the fullest rank over the mean from which a remap may even them out."""


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
    linear_s: float = field(init=False)
    """Seconds a token of a rank in the linear modules, forward."""
    heads: float = field(init=False)
    """Ranks of a group that the heads divide among evenly: what the rank with most heads has."""

    def __post_init__(self) -> None:
        pairs = np.zeros((2, Pair.WIDTH), dtype=np.int64)
        pairs[:, Pair.Q_STOP] = pairs[:, Pair.K_STOP] = _TYPICAL
        pairs[0, Pair.Q_HEAD_STOP], pairs[0, Pair.KV_HEAD_STOP] = self.model.num_heads, self.model.num_kv_heads
        pairs[1, Pair.Q_START], pairs[1, Pair.Q_HEAD_STOP], pairs[1, Pair.KV_HEAD_STOP] = _TYPICAL - TILE_TOKENS, 1, 1
        launch = np.arange(2, dtype=np.int64)
        forward, backward = (self.cost.attend_s(pairs, launch, 2, backward=b).tolist() for b in (False, True))
        self.backward = backward[0] / forward[0]
        self.key_s = max(0.0, forward[1] - self.cost.launch_s(1)) / _TYPICAL
        self.linear_s = self.cost.linear_s(1.0)
        self._share_heads()

    def _share_heads(self) -> None:
        self.heads = self.model.num_heads / -(-self.model.num_heads // self.size)

    def of_size(self, size: int) -> GroupCosts:
        """Those of groups of another size."""
        other = copy(self)
        other.size = size
        other._share_heads()
        return other

    @property
    def num_groups(self) -> int:
        return self.cluster.num_ranks // self.size

    def bound_s(self, lengths: Sequence[int], work: Sequence[float]) -> float:
        """Seconds that no placement comes below: work and tokens even, all keys hidden. `work`: of
        each sequence, `work_s`.
        """
        tokens = np.array([sum(lengths) / self.num_groups])
        before_s, after_s = _trade_s(tokens, self)
        attention_s = sum(work) / self.num_groups * (1 + self.backward)
        linear_s = tokens * self.linear_s / self.size
        return attention_s + float(((1 + _GRADIENT) * (before_s + after_s) + 3 * linear_s)[0])

    def work_s(self, length: int) -> float:
        """Seconds of a group for the attention of a whole sequence, forward."""
        return self.cost.attention_s(length * (length + 1) / 2, length) / self.heads

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
    found = cheapest(Trimmed.of(placed, [placed.kept()], [0.0]), costs, waves, remapped=remapped)
    assert found is not None
    return found[1]


def cheapest(
    placed: Trimmed,
    costs: GroupCosts,
    waves: Sequence[int] = WAVES,
    *,
    remapped: bool = True,
    capacity: float = inf,
    below_s: float = inf,
) -> tuple[int, Estimate] | None:
    """The first of the cheapest placements in which no group holds more tokens than `capacity`, and
    its estimate; None: none is below `below_s`.
    """
    attention = _attention_s(placed, costs, waves)
    best = attention.argmin(axis=1)
    attention_s = attention[np.arange(len(best)), best]
    most = placed.held.max(axis=1)
    before_s, after_s = _trade_s(most, costs)
    # Gradients of queries, keys and values are twice as wide; an output comes with its gradient.
    without_s = attention_s + (1 + _GRADIENT) * (before_s + after_s)
    uneven_s, even_s = (each * costs.linear_s / costs.size for each in (most, placed.held.mean(axis=1)))
    evened = remapped & (uneven_s > _UNEVEN * even_s)
    # The linear modules: forward and twice that backward, with a remap where that pays.
    least_s = without_s + 3 * np.where(evened, even_s, uneven_s)
    least_s[most > capacity] = inf
    found: tuple[float, int] | None = None
    for at in np.argsort(least_s, kind="stable").tolist():
        if least_s[at] >= (below_s if found is None else found[0]):
            break
        seconds = float(least_s[at])
        if evened[at]:
            moved_s = remap_s(np.repeat(placed.held[at] / costs.size, costs.size).tolist(), costs.cluster, costs.cost)
            seconds = float(without_s[at] + 3 * min(uneven_s[at], even_s[at] + moved_s))
        if seconds < below_s and (found is None or (seconds, at) < found):
            found = seconds, at
    if found is None:
        return None
    seconds, at = found
    work_s = placed.load[at].mean() * (1 + costs.backward)
    return at, Estimate(seconds, waves[int(best[at])], float(attention_s[at] - work_s))


def _trade_s(num_tokens: Floats, costs: GroupCosts) -> tuple[Floats, Floats]:
    """Seconds of the all-to-alls before and after attention, forward, of groups of so many tokens."""
    size, node, cost = costs.size, costs.cluster.node_size, costs.cost
    if size == 1:
        return np.zeros_like(num_tokens), np.zeros_like(num_tokens)
    copies, here = max(1.0, size / costs.model.num_kv_heads), min(size, node)
    seconds: list[Floats] = []
    for token_bytes in (cost.query_bytes(1.0) + copies * cost.kv_bytes(1.0), cost.query_bytes(1.0)):
        each = num_tokens * token_bytes / size
        inside = cost.intra_node_s(0.0, here - 1) + each * ((here - 1) / size * cost.intra_node_s(1.0, 0))
        if size > node:
            nics = 1 / costs.cluster.ranks_per_nic
            across = cost.inter_node_s(0.0, size - node, nics)
            inside = np.maximum(inside, across + each * ((size - node) / size * cost.inter_node_s(1.0, 0, nics)))
        seconds.append(inside)
    return seconds[0], seconds[1]


def _attention_s(placed: Trimmed, costs: GroupCosts, waves: Sequence[int]) -> Floats:
    """Seconds of own work and waves, forward and backward, of the slowest group: [placements,
    numbers of waves].
    """
    shape, share, count = placed.load.shape, placed.share, placed.count
    length, index = placed.tokens[placed.seq], placed.placement * shape[1] + placed.group

    def by_group(values: Floats) -> Floats:
        return np.bincount(index, weights=values, minlength=shape[0] * shape[1]).astype(np.float64).reshape(*shape, 1)

    def most_of_group(values: Floats) -> Floats:
        most = np.zeros(shape[0] * shape[1])
        np.maximum.at(most, index, values)
        return most.reshape(*shape, 1)

    others = length * (1 - share)
    # Tokens whose keys a group receives and sends, and the busier of the two on its links.
    received = by_group(others - length * placed.before / 2)
    sent = by_group(length * share / 2 * (count - 1 + placed.place))
    travel_s = np.maximum(received, sent) * costs.keys_s(1.0, 0)
    # Work on keys that it receives, and what a piece of keys for each source adds to it in every wave.
    work = placed.work[placed.seq] * share
    far, pieces = by_group(work * (1 - share)), by_group(work * (count - 1) * _BLOCK_TOKENS / length)
    # The most keys in a row: all that come of a sequence, and all from two neighbouring sources.
    whole, part = most_of_group(others), most_of_group(np.minimum(others, length / count))
    launch_s, numbers = costs.cost.launch_s(1), np.array(waves, dtype=np.float64)
    call_s = costs.keys_s(0, 1) + launch_s
    waits = far > 0
    merge_s = placed.held[:, :, None] * costs.merge_s(1.0) + launch_s
    own_s = placed.load[:, :, None] - far + launch_s
    in_a_row = np.where(numbers > 1, part / numbers, whole)
    wave_s = np.maximum(far / numbers + pieces, in_a_row * costs.key_s)
    each_s, back_s = (travel_s * wide / numbers + call_s for wide in (1.0, _GRADIENT))
    # Slowest is what is done, the first wave's way and all work, or all ways and the last work.
    forward_s = wave_s + merge_s
    waves_s = (numbers - 1) * forward_s
    begin_s = np.maximum(np.maximum(own_s, each_s), numbers * each_s - waves_s)
    ahead = np.where(waits, begin_s + waves_s + forward_s, own_s)
    backward_s, own_s = wave_s * costs.backward + merge_s, own_s * costs.backward
    behind = np.maximum(numbers * backward_s + np.maximum(own_s, back_s), backward_s + numbers * back_s)
    return ahead.max(axis=1) + np.where(waits, behind, own_s).max(axis=1)
