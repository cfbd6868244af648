"""Collectives and what surrounds a plan, against formulas worked by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_balance import Cluster, Model
from megatron_balance.cost.base import Link
from megatron_balance.cost.parallel import (
    CollectiveGroup,
    all_gather_s,
    all_to_all_s,
    experts_s,
    gradient_sync_s,
    group_of,
    reduce_scatter_s,
    stage_transfer_s,
    wide_ranks,
)
from megatron_balance.errors import ConfigError

INTRA, INTER = Link(1e-6, 100e9), Link(10e-6, 25e9)
NODE, NODES = CollectiveGroup(8, 8, INTRA, INTER), CollectiveGroup(16, 8, INTRA, Link(10e-6, 100e9))
SPREAD = CollectiveGroup(4, 1, INTRA, INTER)


def test_a_ring_takes_one_step_for_every_other_rank() -> None:
    assert all_gather_s(1e6, NODE) == pytest.approx(7 * (1e-6 + 1e-5))
    assert reduce_scatter_s(1e6, NODE) == all_gather_s(1e6, NODE)


def test_a_ring_over_nodes_goes_at_the_pace_of_its_slowest_step() -> None:
    slow = CollectiveGroup(16, 8, INTRA, INTER)
    assert all_gather_s(1e6, slow) == pytest.approx(15 * (10e-6 + 1e6 / 25e9))
    assert all_gather_s(1e6, SPREAD) == pytest.approx(3 * (10e-6 + 1e6 / 25e9))


def test_an_all_to_all_goes_over_the_links_inside_and_the_nics_at_once() -> None:
    inside = 7 * (1e-6 + 1e6 / 100e9)
    away = 8 * (10e-6 + 8 * 1e6 / 100e9)
    assert all_to_all_s(16e6, NODES) == pytest.approx(max(inside, away))
    assert all_to_all_s(8e6, NODE) == pytest.approx(7 * (1e-6 + 1e-5))


def test_one_rank_has_nothing_to_wait_for() -> None:
    alone = CollectiveGroup(1, 1, INTRA, INTER)
    assert all_gather_s(1e9, alone) == all_to_all_s(1e9, alone) == 0.0


def test_a_groups_nics_are_those_of_its_ranks_on_a_node() -> None:
    cluster = Cluster(16, 8, nic_bytes_per_s=25e9, ranks_per_nic=2)
    assert group_of(cluster, 16, 8).inter.bytes_per_s == 100e9
    assert group_of(cluster, 2, 1).inter.bytes_per_s == 25e9
    assert group_of(cluster, 2, 1, busy_nics=True).inter.bytes_per_s == 12.5e9
    with pytest.raises(ConfigError, match="9 ranks on a node: custom has 8"):
        group_of(cluster, 18, 9)
    with pytest.raises(ConfigError, match="a group of 9 ranks cannot have 8 on each node"):
        group_of(cluster, 9, 8)


def test_gradients_are_summed_in_fp32_and_weights_gathered_in_bf16() -> None:
    assert gradient_sync_s(8e6, NODE) == pytest.approx(7 * (2e-6 + (4e6 + 2e6) / 100e9))


def test_experts_are_reached_by_two_all_to_alls() -> None:
    moe = Model(8, 8, 64, hidden_size=512, num_experts=8, experts_per_token=2)
    cluster = Cluster(8, 8)
    group = group_of(cluster, 8, 8, busy_nics=True)
    assert experts_s(moe, 100, cluster, 8) == pytest.approx(2 * all_to_all_s(100 * 2 * 512 * 2, group))
    assert experts_s(replace(moe, num_experts=0), 100, cluster, 8) == 0.0


def test_a_stage_hands_on_hidden_states() -> None:
    assert stage_transfer_s(Model(8, 8, 64, hidden_size=512), 1000, INTER) == pytest.approx(
        10e-6 + 1000 * 512 * 2 / 25e9
    )


def test_tensor_parallelism_that_does_not_fit_a_node_is_refused() -> None:
    with pytest.raises(ConfigError, match="tensor parallelism 3 does not divide h's nodes of 8 ranks"):
        wide_ranks(Cluster(16, 8, name="h"), 3)
    with pytest.raises(ConfigError, match="one must divide the other"):
        wide_ranks(Cluster(24, 24, ranks_per_nic=3), 2)
