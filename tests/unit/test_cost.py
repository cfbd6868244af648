"""The analytic cost model against hand-worked numbers."""

from __future__ import annotations

import pytest

from megatron_balance import Cluster, Model
from megatron_balance.cost.analytic import INTER_NODE_ALPHA_S, INTRA_NODE_ALPHA_S, LAUNCH_S, LINEAR_EFFICIENCY, TILE_TOKENS, AnalyticCost

CLUSTER = Cluster(16, 8, intra_bytes_per_s=400e9, nic_bytes_per_s=50e9, flops_per_s=1000e12, attention_efficiency=0.5)
MODEL = Model(num_heads=32, num_kv_heads=8, head_dim=128, hidden_size=4096, ffn_size=14336)
COST = AnalyticCost(CLUSTER, MODEL)


def test_attention_takes_four_flops_a_pair_and_channel_at_the_kernels_efficiency() -> None:
    assert COST.attention_s(1e9) == pytest.approx(1e9 * 4 * 32 * 128 / 500e12)


def test_linear_time_counts_projections_with_fewer_kv_heads_and_the_gated_mlp() -> None:
    flops = 2 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    assert COST.linear_s(100) == pytest.approx(100 * flops / (1000e12 * LINEAR_EFFICIENCY))


def test_kv_bytes_are_keys_and_values_of_the_kv_heads() -> None:
    assert COST.kv_bytes(10) == 10 * 2 * 8 * 128 * 2


def test_a_message_costs_alpha_and_its_bytes() -> None:
    assert COST.intra_node_s(4e9) == pytest.approx(INTRA_NODE_ALPHA_S + 0.01)
    assert COST.inter_node_s(4e9, num_messages=3) == pytest.approx(3 * INTER_NODE_ALPHA_S + 0.08)


def test_more_nics_move_bytes_faster_and_half_a_nic_slower() -> None:
    assert COST.inter_node_s(4e9, num_nics=8) == pytest.approx(INTER_NODE_ALPHA_S + 0.01)
    assert COST.inter_node_s(4e9, num_nics=0.5) == pytest.approx(INTER_NODE_ALPHA_S + 0.16)


def test_launches_cost_each_the_same() -> None:
    assert COST.launch_s(7) == pytest.approx(7 * LAUNCH_S)


def test_short_runs_of_queries_and_keys_fill_whole_tiles() -> None:
    assert COST.attention_s(1e6, run_tokens=2 * TILE_TOKENS) == COST.attention_s(1e6)
    assert COST.attention_s(1e6, run_tokens=TILE_TOKENS / 2) == pytest.approx(4 * COST.attention_s(1e6))
