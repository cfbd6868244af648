"""Costs of groups of ranks that split heads evenly, as one wide rank each: what a planner that places
sequences on groups asks (`patterns.head_ring`).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np

from megatron_balance.cost.base import CostModel, Floats, Ints, routed_s
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.model import Model


@dataclass(frozen=True, slots=True)
class WideCost:
    """`base` for groups of `size` ranks of `cluster` in a row; implements `cost.base.CostModel`.

    Bytes are those of a whole group, so its links and NICs carry a part each. What the group's ranks
    exchange among themselves is `trade_s`.
    """

    base: CostModel
    cluster: Cluster
    model: Model
    size: int

    def attention_s(self, num_pairs: float, run_tokens: float = inf) -> float:
        """See `cost.base.CostModel`."""
        return self.base.attention_s(num_pairs, run_tokens) / self.size

    def attend_s(self, pairs: Ints, launch: Ints, num_launches: int, *, backward: bool = False) -> Floats:
        """See `cost.base.CostModel`; the heads of each launch are split over the group."""
        seconds = self.base.attend_s(pairs, launch, num_launches, backward=backward)
        fixed = self.base.launch_s(1)
        return np.where(seconds > 0, fixed + np.maximum(seconds - fixed, 0.0) / self.size, 0.0)

    def launch_s(self, num_launches: float) -> float:
        """See `cost.base.CostModel`; all ranks of a group launch at once."""
        return self.base.launch_s(num_launches)

    def linear_s(self, num_tokens: float) -> float:
        """See `cost.base.CostModel`."""
        return self.base.linear_s(num_tokens / self.size)

    def experts_s(self, num_tokens: float) -> float:
        """See `cost.base.CostModel`."""
        return self.base.experts_s(num_tokens / self.size)

    def intra_node_s(self, num_bytes: float, num_messages: float = 1) -> float:
        """See `cost.base.CostModel`; between groups of one node."""
        return self.base.intra_node_s(num_bytes / self.size, num_messages)

    def inter_node_s(self, num_bytes: float, num_messages: float = 1, num_nics: float = 1) -> float:
        """See `cost.base.CostModel`; `num_nics`: of `cost.parallel.wide_ranks`, whose NICs are all
        those of a group.
        """
        return self.base.inter_node_s(num_bytes, num_messages, num_nics * self._nics)

    def routed_s(self, num_bytes: float, num_messages: float = 1, num_nics: float = 1) -> float:
        """See `cost.base.CostModel`."""
        return routed_s(self, num_bytes, num_messages, num_nics)

    def kv_bytes(self, num_tokens: float) -> float:
        """See `cost.base.CostModel`; with fewer key-value heads than ranks, of their copies too."""
        return self.base.kv_bytes(num_tokens) * self.copies

    def query_bytes(self, num_tokens: float) -> float:
        """See `cost.base.CostModel`."""
        return self.base.query_bytes(num_tokens)

    @property
    def copies(self) -> float:
        """Ranks of a group that need the same key-value head."""
        return max(1.0, self.size / self.model.num_kv_heads)

    @property
    def _nics(self) -> float:
        return max(1, self.size // self.cluster.ranks_per_nic)

    def trade_s(self, num_tokens: float) -> float:
        """Seconds of a group's two all-to-alls, forward, with `num_tokens` tokens in the group.

        A rank receives the queries, keys and values of the others with its heads, and sends back as
        many outputs.
        """
        if self.size == 1:
            return 0.0
        num_bytes = 2 * self.base.query_bytes(num_tokens) + self.copies * self.base.kv_bytes(num_tokens)
        part = num_bytes * (self.size - 1) / self.size**2
        return self.base.intra_node_s(part, 2 * (self.size - 1))
