"""Set up, tear down, and what is left: nothing."""

import os
from pathlib import Path

import pytest

from megatron_balance.errors import ConfigError
from tools.emulated_cluster import ClusterError, EmulatedCluster, Topology, linux, wiring
from tools.emulated_cluster.command import parse
from tools.emulated_cluster.sandbox import in_sandbox

SMALL = Topology(num_nodes=2, ranks_per_node=2, nics_per_node=1, nic_bits_per_s=100_000_000, intra_bits_per_s=None)


def names() -> list[str]:
    return sorted(os.listdir(linux.NAMESPACES)) if linux.NAMESPACES.is_dir() else []


@pytest.mark.usefixtures("permitted")
def test_up_and_down_can_be_repeated_and_touch_only_their_own() -> None:
    def job() -> list[list[str]]:
        other, ours = EmulatedCluster(SMALL, "b"), EmulatedCluster(SMALL, "a")
        seen = [names()]
        for step in (other.up, ours.up, ours.up, ours.down, ours.down, other.down):
            step()
            seen.append(names())
        return seen

    a, b = (sorted(f"{tag}-{name}" for name in wiring.namespaces(SMALL)) for tag in "ab")
    before = names()
    assert in_sandbox(job) == [[], b, a + b, a + b, b, b, []]
    assert names() == before


@pytest.mark.usefixtures("permitted")
def test_set_up_that_fails_half_way_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wiring, "shaping", lambda _topology: {"n1": ["qdisc replace dev nonesuch root noqueue"]})

    def job() -> tuple[str, list[str]]:
        try:
            EmulatedCluster(SMALL, "a").up()
        except ClusterError as error:
            return str(error), names()
        return "no error", names()

    message, left = in_sandbox(job)
    assert message == 'tc qdisc replace dev nonesuch root noqueue: Cannot find device "nonesuch"'
    assert left == []


@pytest.mark.usefixtures("permitted")
def test_a_standing_cluster_is_found_by_its_tag_with_the_rates_it_has_now() -> None:
    def job() -> tuple[Topology, str]:
        with EmulatedCluster(SMALL, "a") as cluster:
            cluster.reshape(25_000_000, 400_000_000)
            found = EmulatedCluster.standing("a").topology
        try:
            EmulatedCluster.standing("a")
        except ClusterError as error:
            return found, str(error)
        return found, "still there"

    found, message = in_sandbox(job)
    assert found == SMALL.at_rates(25_000_000, 400_000_000)
    assert "no emulated cluster with the tag 'a' stands" in message


@pytest.mark.usefixtures("permitted")
def test_the_sandbox_shows_only_its_own_processes() -> None:
    def job() -> list[str]:
        return sorted(name for name in os.listdir("/proc") if name.isdigit())

    assert in_sandbox(job) == [str(1)]


@pytest.mark.usefixtures("permitted")
def test_an_error_in_the_sandbox_comes_out_with_its_traceback() -> None:
    def job() -> None:
        raise KeyError("mislaid")

    with pytest.raises(RuntimeError, match=r"process 1 failed:[\s\S]*in job[\s\S]*mislaid"):
        in_sandbox(job)


@pytest.mark.usefixtures("permitted")
def test_no_interface_of_the_host_is_touched() -> None:
    before = Path("/proc/self/net/dev").read_text().count(":")
    in_sandbox(lambda: EmulatedCluster(SMALL, "a").up())
    assert Path("/proc/self/net/dev").read_text().count(":") == before


# Counts, addresses and what is refused; no namespace is made.

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
