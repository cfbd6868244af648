"""Predicted seconds of a layer under a topology, forward and backward: those of its slowest group.

Ranks of a group are alike: each has an equal part of its tokens and of its heads. Attention, linear
modules and the two all-to-alls of a group come one after another. Where ranks share out experts, all
wait for those with the most tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import numpy as np

from megatron_balance.cost.base import CostModel, Floats, Ints
from megatron_balance.cost.kernel import backward_factor
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.model import Model
from megatron_balance.planners.knapformer.topology import Topology

GRADIENT_BYTES = 4
"""Gradients travel in fp32."""

LINEAR, ATTENTION, EXPERTS = 3.0, 1 + backward_factor(), 2.0
"""Forward and backward over the forward alone: two products for each; the backward kernel's factor;
exchanges of the same tokens.
"""

PACKING = 0.4
"""Seconds of packing and unpacking what is exchanged, over those of moving it inside a node: packed
once, and unpacked or added up, each read and written, at the memory's rate on the GPUs of
configs/cluster, which is some seven times the link's.
"""

_ROUNDING = 1 + 1e-9


class TopologyPrices:
    """Costs of a batch's sequences under any topology; holds no decisions."""

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
        """Seconds of the slowest group; `group_of`: of each sequence."""
        return float(self.each(topology, group_of).max(initial=0.0))

    def each(self, topology: Topology, group_of: Ints) -> Floats:
        """Seconds of each group."""
        sizes = np.array(topology.sizes, dtype=np.float64)
        tokens = np.bincount(group_of, weights=self.tokens, minlength=len(sizes)) / sizes
        attention = np.bincount(group_of, weights=self.attention_s, minlength=len(sizes)) / sizes
        heads = np.ceil(self.model.num_heads / sizes) / (self.model.num_heads / sizes)
        stops = np.cumsum(topology.sizes)
        room = self.cluster.node_size - (stops - topology.sizes) % self.cluster.node_size  # on the first rank's node
        here = np.minimum(room, topology.sizes).tolist()
        exchange = np.array([self._exchange_s(*each) for each in zip(topology.sizes, here, strict=True)])
        own = LINEAR * self.token_s * tokens + ATTENTION * attention * heads + exchange * tokens
        return own + EXPERTS * self.expert_s * tokens.max()

    def is_slower(self, sizes: Sequence[int], seconds: float) -> bool:
        """Whether the slowest group takes longer than `seconds` however groups of these sizes are
        filled: a sequence fits none in that time, or those that only large groups do in that time are
        too many for these.
        """
        limit, present = seconds * _ROUNDING, sorted(set(sizes))
        alone = np.array([self._alone_s(size) for size in present])
        fits = alone <= limit
        if not fits.any(axis=0).all():
            return True
        of_size = np.array(present, dtype=np.float64)
        least = np.where(fits, alone * of_size[:, None], np.inf).min(axis=0)  # rank-seconds
        needs = np.bincount(fits.argmax(axis=0), weights=least, minlength=len(present))
        has = np.array([size * sizes.count(size) for size in present]) * limit
        return bool((np.cumsum(needs[::-1]) > np.cumsum(has[::-1])).any())

    def _alone_s(self, size: int) -> Floats:
        """Of each sequence, the least seconds of a group of `size` ranks that has it alone."""
        if size not in self._alone:
            heads = ceil(self.model.num_heads / size) / (self.model.num_heads / size)
            exchange_s = min(
                self._exchange_s(size, inside) for inside in range(1, min(size, self.cluster.node_size) + 1)
            )
            token_s = LINEAR * self.token_s + EXPERTS * self.expert_s + exchange_s
            self._alone[size] = (token_s * self.tokens + ATTENTION * heads * self.attention_s) / size
        return self._alone[size]

    def _exchange_s(self, size: int, inside: int) -> float:
        """Seconds of all-to-alls of a group, both ways and both passes, for each token that a rank
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
