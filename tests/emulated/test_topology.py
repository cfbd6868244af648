"""Counts, addresses and what is refused; no namespace is made."""

from __future__ import annotations

import pytest

from megatron_balance.errors import ConfigError
from tools.emulated_cluster import EmulatedCluster, Topology
from tools.emulated_cluster.command import parse

TWO_BY_FOUR = Topology(num_nodes=2, ranks_per_node=4, nics_per_node=2, nic_bits_per_s=50_000_000, intra_bits_per_s=None)


def test_ranks_are_numbered_node_by_node_with_one_address_each() -> None:
    assert [TWO_BY_FOUR.address(rank) for rank in (0, 3, 4, 7)] == [
        "10.201.0.1",
        "10.201.0.4",
        "10.201.1.1",
        "10.201.1.4",
    ]
    assert TWO_BY_FOUR.environment(6) == {
        "RANK": "6",
        "LOCAL_RANK": "2",
        "GROUP_RANK": "1",
        "WORLD_SIZE": "8",
        "LOCAL_WORLD_SIZE": "4",
        "GROUP_WORLD_SIZE": "2",
        "MASTER_ADDR": "10.201.0.1",
        "MASTER_PORT": "29500",
        "GLOO_SOCKET_IFNAME": "nic",
    }


def test_text_reads_back() -> None:
    shaped = TWO_BY_FOUR.at_rates(25_000_000, 200_000_000)
    assert Topology.parse(TWO_BY_FOUR.text()) == TWO_BY_FOUR
    assert Topology.parse(shaped.text()) == shaped


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"num_nodes": 0}, "num_nodes = 0: choose 1 to 256"),
        ({"ranks_per_node": 300}, "ranks_per_node = 300: choose 1 to 254"),
        ({"nics_per_node": 3}, "nics_per_node = 3: .* choose one of 1, 2, 4"),
        ({"nics_per_node": 8}, "choose one of 1, 2, 4"),
        ({"nic_bits_per_s": 0}, "nic_bits_per_s = 0: choose a rate of at least 1 bit/s"),
        ({"intra_bits_per_s": -1}, "intra_bits_per_s = -1"),
    ],
)
def test_what_no_cluster_has_is_refused(change: dict[str, int], sentence: str) -> None:
    fields = {"num_nodes": 2, "ranks_per_node": 4, "nics_per_node": 2, "nic_bits_per_s": 1, "intra_bits_per_s": None}
    with pytest.raises(ConfigError, match=sentence):
        Topology(**{**fields, **change})  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("tag", ["", "Upper", "with-dash", "thirteenchars", "../x"])
def test_a_tag_that_could_name_what_is_not_ours_is_refused(tag: str) -> None:
    with pytest.raises(ConfigError, match="choose 1 to 12 lower-case letters and digits"):
        EmulatedCluster(TWO_BY_FOUR, tag)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "name the command after '--'"),
        (["--", "-m"], "name the command after '--'"),
        (["--", "python", "x.py"], "python: no such script; .* without 'python'"),
    ],
)
def test_a_command_that_is_none_is_refused(words: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        parse(words)


def test_a_module_with_arguments_is_a_command() -> None:
    command = parse(["--", "-m", "package.module", "--flag", "--", "value"])
    assert (command.name, command.is_module, command.arguments) == ("package.module", True, ("--flag", "--", "value"))
