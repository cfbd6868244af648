"""The seconds of a remap."""

from __future__ import annotations

import pytest

from megatron_balance import Cluster, Model
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.cost.base import remap_s

MODEL = Model(32, 32, 128)
CLUSTER = Cluster(
    16, 8, intra_bytes_per_s=400e9, nic_bytes_per_s=50e9, ranks_per_nic=2, intra_alpha_s=2e-6, inter_alpha_s=9e-6
)
COST = AnalyticCost(CLUSTER, MODEL)
KV_BYTES = 2 * 32 * 128 * 2  # of a token


def test_a_remap_takes_the_fullest_or_emptiest_ranks_link_and_the_nics_of_such_a_node() -> None:
    token_bytes = 2 * KV_BYTES  # query, key, value and output, all of one size here
    assert remap_s([1000.0] * 16, CLUSTER, COST) == 0
    inside = [1600.0, 700, 700, *[1000.0] * 13]
    assert remap_s(inside, CLUSTER, COST) == pytest.approx(2 * 2e-6 + 600 * token_bytes / 400e9)
    across = [*[1100.0] * 8, *[900.0] * 8]
    over_nics = 2 * 9e-6 + 800 * token_bytes / 4 / 50e9
    assert remap_s(across, CLUSTER, COST) == pytest.approx(2 * 2e-6 + 100 * token_bytes / 400e9 + over_nics)
