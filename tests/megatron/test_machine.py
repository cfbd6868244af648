"""The cluster from what the ranks read of their nodes."""

from __future__ import annotations

import logging

import pytest

pytest.importorskip("megatron.training")

from megatron_balance.config import ClusterChoice, load_cluster
from megatron_balance.megatron.groups import Reading, cluster_of

pytestmark = pytest.mark.megatron

H200 = "base: h200\nname: machine\nnum_ranks: 8\nranks_per_node: 8\nranks_per_nic: 1\nnic_bytes_per_s: 50e9\n"


def test_the_machine_says_links_and_memory_and_the_configuration_sizes():
    found = cluster_of(ClusterChoice({"num_ranks": 16}), [Reading(H200)] * 16)
    assert found is not None
    built = found.build(num_ranks=16, ranks_per_node=8)
    assert (built.name, built.num_ranks, built.ranks_per_nic) == ("machine", 16, 1)
    assert built.flops_per_s == load_cluster("h200").build().flops_per_s
    assert found.ranks_per_node is None  # nobody set it: nodes are told apart by host name


@pytest.fixture
def warned(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("megatron_balance"), "propagate", True)
    caplog.set_level(logging.WARNING, "megatron_balance")
    return caplog


def test_of_nodes_that_are_not_alike_the_least_counts(warned):
    slower = H200.replace("50e9", "25e9").replace("ranks_per_nic: 1", "ranks_per_nic: 2")
    found = cluster_of(None, [Reading(H200), Reading(slower)])
    assert found is not None
    assert (found.given["nic_bytes_per_s"], found.given["ranks_per_nic"]) == (25e9, 2)
    assert "nodes are not alike in nic_bytes_per_s, ranks_per_nic" in warned.text


def test_a_rank_that_cannot_read_its_machine_is_told_and_all_go_on_alike(warned):
    given = ClusterChoice({"num_ranks": 2})
    assert cluster_of(given, [Reading(H200), Reading(failure="no nvidia-smi")]) is given
    assert "rank 1 cannot read its machine: no nvidia-smi" in warned.text
