"""Set up, tear down, and what is left: nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tools.emulated_cluster import ClusterError, EmulatedCluster, Topology, linux, wiring
from tools.emulated_cluster.sandbox import in_sandbox

SMALL = Topology(num_nodes=2, ranks_per_node=2, nics_per_node=1, nic_bits_per_s=100_000_000, intra_bits_per_s=None)

pytestmark = pytest.mark.usefixtures("permitted")


def names() -> list[str]:
    return sorted(os.listdir(linux.NAMESPACES)) if linux.NAMESPACES.is_dir() else []


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


def test_the_sandbox_shows_only_its_own_processes() -> None:
    def job() -> list[str]:
        return sorted(name for name in os.listdir("/proc") if name.isdigit())

    assert in_sandbox(job) == [str(1)]


def test_an_error_in_the_sandbox_comes_out_with_its_traceback() -> None:
    def job() -> None:
        raise KeyError("mislaid")

    with pytest.raises(RuntimeError, match=r"process 1 failed:[\s\S]*in job[\s\S]*mislaid"):
        in_sandbox(job)


def test_no_interface_of_the_host_is_touched() -> None:
    before = Path("/proc/self/net/dev").read_text().count(":")
    in_sandbox(lambda: EmulatedCluster(SMALL, "a").up())
    assert Path("/proc/self/net/dev").read_text().count(":") == before
