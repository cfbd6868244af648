"""Seconds of a remap, for planners that weigh it and for the layer that makes it (Zeppelin, section
3.4).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from megatron_balance.cost.base import CostModel
from megatron_balance.ir.arrays import Ints
from megatron_balance.ir.cluster import Cluster


def remap_s(tokens: Sequence[float] | Ints, cluster: Cluster, cost: CostModel) -> float:
    """Seconds to bring tokens from even to `tokens` a rank before attention, and their outputs back
    after it.

    An estimate of what the best moves take, without solving for them: the longest time of a rank's
    link, and of a node's NICs for what the node as a whole has above or below its share, one after
    the other; nothing of it hides behind attention.
    """
    size = cluster.node_size
    mean = sum(tokens) / len(tokens)
    most = max(max(tokens) - mean, mean - min(tokens))
    if most < 1:
        return 0.0
    nodes = [sum(tokens[first : first + size]) for first in range(0, len(tokens), size)]
    crossing = max(max(nodes) - mean * size, mean * size - min(nodes))
    num_nics = ceil(size / cluster.ranks_per_nic)
    seconds = cost.intra_node_s(float(most) * token_bytes(cost), 2)
    return seconds + (cost.inter_node_s(float(crossing) * token_bytes(cost), 2, num_nics) if crossing >= 1 else 0.0)


def token_bytes(cost: CostModel) -> float:
    """Bytes of one token that a remap moves in a layer: query, key and value one way, the output
    back.
    """
    return cost.kv_bytes(1) + 2 * cost.query_bytes(1)
