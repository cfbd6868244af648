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
def test_the_sandbox_shows_its_own_processes_only_touches_no_interface_of_the_host_and_tells_errors() -> None:
    assert in_sandbox(lambda: sorted(name for name in os.listdir("/proc") if name.isdigit())) == ["1"]
    before = Path("/proc/self/net/dev").read_text().count(":")
    in_sandbox(lambda: EmulatedCluster(SMALL, "a").up())
    assert Path("/proc/self/net/dev").read_text().count(":") == before

    def job() -> None:
        raise KeyError("mislaid")

    with pytest.raises(RuntimeError, match=r"process 1 failed:[\s\S]*in job[\s\S]*mislaid"):
        in_sandbox(job)


# Counts, addresses and what is refused; no namespace is made.

TWO_BY_FOUR = Topology(num_nodes=2, ranks_per_node=4, nics_per_node=2, nic_bits_per_s=50_000_000, intra_bits_per_s=None)


def test_ranks_are_numbered_node_by_node_with_one_address_each_and_text_reads_back() -> None:
    addresses = [TWO_BY_FOUR.address(rank) for rank in (0, 3, 4, 7)]
    assert addresses == ["10.201.0.1", "10.201.0.4", "10.201.1.1", "10.201.1.4"]
    place = {"RANK": "6", "LOCAL_RANK": "2", "GROUP_RANK": "1"}
    sizes = {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "2"}
    first = {"MASTER_ADDR": "10.201.0.1", "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": "nic"}
    assert TWO_BY_FOUR.environment(6) == {**place, **sizes, **first}
    for topology in (TWO_BY_FOUR, TWO_BY_FOUR.at_rates(25_000_000, 200_000_000)):
        assert Topology.parse(topology.text()) == topology


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


def test_a_tag_that_could_name_what_is_not_ours_is_refused() -> None:
    for tag in ("", "Upper", "with-dash", "thirteenchars", "../x"):
        with pytest.raises(ConfigError, match="choose 1 to 12 lower-case letters and digits"):
            EmulatedCluster(TWO_BY_FOUR, tag)


def test_a_module_with_arguments_is_a_command_and_what_is_none_is_refused() -> None:
    command = parse(["--", "-m", "package.module", "--flag", "--", "value"])
    assert (command.name, command.is_module, command.arguments) == ("package.module", True, ("--flag", "--", "value"))
    for words, sentence in (
        ([], "name the command after '--'"),
        (["--", "-m"], "name the command after '--'"),
        (["--", "python", "x.py"], "python: no such script; .* without 'python'"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            parse(words)
