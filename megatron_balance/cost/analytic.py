"""Costs from the figures of a data sheet: FLOPs over peak times efficiency, alpha-beta links."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, inf

from megatron_balance.core.cluster import Cluster
from megatron_balance.core.model import Model

LINEAR_EFFICIENCY = 0.6
"""Share of peak that large dense matrix products reach (about what training runs report)."""

TILE_TOKENS = 128
"""Side of the tiles that flash attention kernels work in."""

LAUNCH_S = 10e-6
"""A kernel launch with what surrounds it: index arithmetic, the merge of its partial result."""

INTRA_NODE_ALPHA_S = 5e-6
INTER_NODE_ALPHA_S = 15e-6
"""Fixed cost of a message; the usual order of magnitude of point-to-point calls, not measured."""


@dataclass(frozen=True, slots=True)
class AnalyticCost:
    """One layer's forward pass on `cluster` for `model`; implements `cost.base.CostModel`."""

    cluster: Cluster
    model: Model

    def attention_s(self, num_pairs: float, run_tokens: float = inf) -> float:
        """Seconds one rank takes for (query, key) pairs, all heads, when queries and keys come in runs of `run_tokens`.

        A kernel works in tiles: the last one of a run is padded, of the queries' and of the keys'.
        """
        padding = 1.0 if run_tokens == inf else (ceil(run_tokens / TILE_TOKENS) * TILE_TOKENS / run_tokens) ** 2
        return padding * num_pairs * self.model.attention_flops_per_pair / (self.cluster.flops_per_s * self.cluster.attention_efficiency)

    def launch_s(self, num_launches: float) -> float:
        """Seconds of fixed cost for so many attention launches and their merges."""
        return num_launches * LAUNCH_S

    def linear_s(self, num_tokens: float) -> float:
        """Seconds one rank takes for tokens in the projections and the MLP."""
        return num_tokens * self.model.linear_flops_per_token / (self.cluster.flops_per_s * LINEAR_EFFICIENCY)

    def intra_node_s(self, num_bytes: float, num_messages: float = 1) -> float:
        """Seconds to receive bytes from a rank of the same node: alpha a message + bytes / bandwidth."""
        return num_messages * INTRA_NODE_ALPHA_S + num_bytes / self.cluster.intra_bytes_per_s

    def inter_node_s(self, num_bytes: float, num_messages: float = 1, num_nics: float = 1) -> float:
        """Seconds to receive bytes from another node over `num_nics` NICs at once (a half: one NIC shared by two)."""
        return num_messages * INTER_NODE_ALPHA_S + num_bytes / (num_nics * self.cluster.nic_bytes_per_s)

    def kv_bytes(self, num_tokens: float) -> float:
        """Bytes of the keys and values of tokens."""
        return num_tokens * self.model.kv_bytes_per_token
