"""Bytes of pulls and pushes, and the seconds that links take for them."""

from __future__ import annotations

import numpy as np

from megatron_balance.analysis.link import WeightTraffic
from megatron_balance.ir.cluster import Cluster


def test_seconds_are_those_of_the_fullest_link_or_nic():
    """Four ranks on two nodes, a NIC for two; [way, rank, inside or between nodes, direction]."""
    table = np.zeros((2, 4, 2, 2), dtype=np.int64)
    table[0, :, 0] = [[100, 40], [40, 100], [0, 0], [0, 0]]
    table[0, :, 1] = [[30, 0], [30, 0], [0, 20], [0, 40]]
    table[1, 3, 0] = [0, 500]
    cluster = Cluster(4, 2, intra_bytes_per_s=100.0, nic_bytes_per_s=10.0, ranks_per_nic=2)
    assert WeightTraffic(table).described(cluster) == {
        "pull_bytes": 200,
        "pull_bytes_inter_node": 60,
        "predicted_pull_s": 6.0,
        "push_bytes": 0,
        "push_bytes_inter_node": 0,
        "predicted_push_s": 5.0,
    }
    handed_on = WeightTraffic(table, handed_on=True).described(cluster)
    assert (handed_on["predicted_pull_s"], handed_on["predicted_push_s"]) == (6.0 + 1.0, 0.0 + 5.0)
