"""What a planner may ask of a cost model."""

from __future__ import annotations

from math import inf
from typing import Protocol


class CostModel(Protocol):
    """Predicted seconds of one layer's forward pass. A planner gets one as an argument and reads no clock."""

    def attention_s(self, num_pairs: float, run_tokens: float = inf) -> float:
        """Seconds one rank takes for (query, key) pairs, all heads, when queries and keys come in runs of `run_tokens`."""
        ...

    def launch_s(self, num_launches: float) -> float:
        """Seconds of fixed cost for so many attention launches and their merges."""
        ...

    def linear_s(self, num_tokens: float) -> float:
        """Seconds one rank takes for tokens in the projections and the MLP."""
        ...

    def intra_node_s(self, num_bytes: float, num_messages: float = 1) -> float:
        """Seconds to receive bytes from a rank of the same node: alpha a message + bytes / bandwidth."""
        ...

    def inter_node_s(self, num_bytes: float, num_messages: float = 1, num_nics: float = 1) -> float:
        """Seconds to receive bytes from another node over `num_nics` NICs at once (a half: one NIC shared by two)."""
        ...

    def kv_bytes(self, num_tokens: float) -> float:
        """Bytes of the keys and values of tokens."""
        ...
