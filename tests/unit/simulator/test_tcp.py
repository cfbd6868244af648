"""Bytes on TCP connections through token buckets, against times worked out by hand."""

from __future__ import annotations

import heapq

import pytest

from megatron_balance.analysis.machine import Machine
from megatron_balance.simulator import emulated
from tests.support.flat_cost import INTER, INTRA, flat_machine

NIC, LINK = INTER.bytes_per_s, INTRA.bytes_per_s
FAST_BURST, NIC_BURST = emulated.BURST_BYTES


class Wires:
    """A network with clocks of its own; `left` and `came`: when, by message."""

    def __init__(self, machine: Machine, longest: int = 0) -> None:
        self.now = 0.0
        self.events: list[tuple[float, int]] = []
        self.left_s: dict[int, float] = {}
        self.came_s: dict[int, float] = {}
        self.network = emulated.Network(
            machine, lambda: self.now, lambda at, number: heapq.heappush(self.events, (at, number)), self, longest
        )

    def left(self, message: int) -> None:
        self.left_s[message] = self.now

    def came(self, message: int) -> None:
        self.came_s[message] = self.now

    def carry(self, *messages: tuple[int, int, int]) -> Wires:
        """(src, dst, bytes), numbered from 0, all given at once."""
        for number, (src, dst, num_bytes) in enumerate(messages):
            self.network.give(src, dst, number, num_bytes)
        while self.events:
            self.now, number = heapq.heappop(self.events)
            self.network.event(number)
        self.num_events = number if messages else 0
        return self


def shared() -> Machine:
    """Two nodes of two ranks, one NIC each."""
    return flat_machine(4, 2, 2)


@pytest.mark.parametrize("num_bytes", [100_000, 1_000_000])
def test_a_message_alone_takes_its_bytes_but_for_the_burst(num_bytes: int) -> None:
    between = Wires(shared()).carry((0, 2, num_bytes))
    assert between.came_s[0] == pytest.approx((num_bytes - NIC_BURST) / NIC)
    inside = Wires(shared()).carry((0, 1, num_bytes))
    assert inside.came_s[0] == pytest.approx((num_bytes - FAST_BURST) / LINK)


def test_both_ways_at_once_take_as_long_as_one() -> None:
    both = Wires(flat_machine(2, 1)).carry((0, 1, 1_000_000), (1, 0, 1_000_000))
    assert both.came_s == pytest.approx(dict.fromkeys((0, 1), (1_000_000 - NIC_BURST) / NIC), rel=0.02)


def test_on_a_nic_that_ranks_share_the_message_that_came_first_is_first_through() -> None:
    first, second = Wires(shared()).carry((0, 2, 200_000), (1, 3, 200_000)).came_s.values()
    assert first == pytest.approx((200_000 - NIC_BURST) / NIC)
    assert second == pytest.approx((400_000 - NIC_BURST) / NIC)


def test_on_a_nic_of_its_own_a_ranks_messages_take_turns() -> None:
    first, second = Wires(flat_machine(4, 2)).carry((0, 2, 200_000), (0, 3, 200_000)).came_s.values()
    assert second == pytest.approx((400_000 - NIC_BURST) / NIC)
    assert second - first <= emulated.SMALL_QUEUE * max(emulated.SEGMENT_BYTES) / NIC


def test_a_message_that_its_socket_cannot_hold_waits_for_what_goes_the_other_way() -> None:
    back, rest = 2 * 200_000, 100_000
    came_s = Wires(shared()).carry((2, 1, 200_000), (3, 1, 200_000), (0, 2, emulated.SOCKET_BYTES + rest)).came_s
    # The first acknowledgement waits until all that goes the other way has left; by then all the
    # socket held has come.
    assert came_s[2] == pytest.approx((back - NIC_BURST) / NIC + (rest - NIC_BURST) / NIC, rel=0.02)


def test_a_sender_has_done_its_part_when_the_socket_has_the_message() -> None:
    wires = Wires(flat_machine(2, 1)).carry((0, 1, emulated.SOCKET_BYTES), (0, 1, emulated.SOCKET_BYTES))
    assert wires.left_s[0] == 0.0
    assert wires.came_s[0] < wires.left_s[1] < wires.came_s[1]


def test_a_long_message_goes_in_longer_segments_and_takes_no_longer() -> None:
    num_bytes = 300_000_000
    found = Wires(flat_machine(2, 1), num_bytes).carry((0, 1, num_bytes))
    assert found.came_s[0] == pytest.approx(num_bytes / NIC, rel=0.005)
    assert found.num_events < 10 * emulated.MOST_SEGMENTS


def test_messages_of_two_ranks_keep_their_order() -> None:
    came_s = Wires(shared()).carry((0, 2, 150_000), (0, 2, 1), (0, 3, 1)).came_s
    assert came_s[0] < came_s[1] < came_s[2]


def test_the_wires_are_those_of_the_emulated_cluster() -> None:
    wiring = pytest.importorskip("tools.emulated_cluster.wiring")
    assert (wiring.FAST_BURST_BYTES, wiring.NIC_BURST_BYTES) == emulated.BURST_BYTES
    assert int(wiring.RANK_SETTINGS["net/ipv4/tcp_wmem"].split()[-1]) == emulated.SOCKET_BYTES
