"""Exchanges on gloo's sockets, against times by hand and what `docs/emulated-cluster.md` found."""

from __future__ import annotations

import heapq
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_balance.analysis import clocks, statistics
from megatron_balance.analysis.machine import Machine
from megatron_balance.compile import join, pipeline, route
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.ir.columns import Route, Rows, Transfer
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.ir.program import Collective, Exchange, Kind, Program
from megatron_balance.simulator import attention, emulated, phase
from tests.support import by_hand
from tests.support.flat_cost import INTER, INTRA, flat_machine
from tests.support.programs import with_routes
from tests.support.strategies import ALL_PLANNERS, Case, cases, plan

KV_BYTES, CALL = 128, 0.0005


def program(num_ranks: int, rows: list[Any], collective: Collective = "p2p", routes: Any = ()) -> Program:
    """One exchange of keys: (src, dst, tokens) of sequence `src`."""
    transfers = Rows.of(Transfer.WIDTH, [(int(Kind.KV), src, 0, tokens, 0, 2, src, dst) for src, dst, tokens in rows])
    group = tuple(range(num_ranks)) if collective != "p2p" else ()
    owned = tuple(Rows.of(3, [(rank, 0, 10_000)]) for rank in range(num_ranks))
    exchange = Exchange(0, transfers, collective=collective, group=group, routes=Rows.of(Route.WIDTH, list(routes)))
    return Program((10_000,) * num_ranks, 2, 2, owned, (exchange,))


def play(of: Program, machine: Machine, enter_s: list[float] | None = None) -> clocks.Outcome:
    ranks = list(map(pipeline.in_order, join.split(of)))
    start = np.zeros(machine.num_ranks) if enter_s is None else np.array(enter_s)
    return attention.play_events(phase.phase_of(ranks, machine, backward=False), machine, start, "sockets")


def everyone(num_ranks: int, tokens: int) -> list[tuple[int, int, int]]:
    return [(src, dst, tokens) for src in range(num_ranks) for dst in range(num_ranks) if src != dst]


@pytest.fixture
def even(monkeypatch: pytest.MonkeyPatch) -> None:
    # Segments so small that sockets that take turns have equal shares, and buckets that save nothing.
    monkeypatch.setattr(emulated, "SEGMENT_BYTES", (KV_BYTES, KV_BYTES))
    monkeypatch.setattr(emulated, "BURST_BYTES", (0, 0))


@pytest.mark.usefixtures("even")
def test_two_ranks_send_both_ways_at_once_but_in_an_all_to_all_that_they_begin_apart() -> None:
    machine, both = flat_machine(2, 1), [(0, 1, 1000), (1, 0, 1000)]
    end = play(program(2, both), machine).end_s
    assert end == pytest.approx(CALL + INTER.time_s(1000 * KV_BYTES), rel=0.01)
    for later_s, turns in ((0.0, 1), (0.01, 2)):  # as gloo's
        end = play(program(2, both, "all_to_all"), machine, [0.0, later_s]).end_s
        assert end.max() == pytest.approx(later_s + CALL + INTER.time_s(turns * 1000 * KV_BYTES), rel=0.01)


@pytest.mark.usefixtures("even")
def test_an_all_gather_goes_around_one_ring_however_many_nics_a_node_has() -> None:
    for ranks_per_nic in (1, 4):
        found = play(program(8, everyone(8, 250), "all_gather"), flat_machine(8, 4, ranks_per_nic))
        # Seven blocks cross on the NIC between the nodes; the last half block may have to go on
        # inside.
        crossing_s = 7 * 250 * KV_BYTES / INTER.bytes_per_s
        assert crossing_s < found.end_s.max() < 1.1 * crossing_s
    assert found.bytes_moved[16:].tolist() == [7 * 250 * KV_BYTES] * 4


@pytest.mark.usefixtures("even")
def test_exchanges_go_beside_one_another_and_pieces_overtake_one_another() -> None:
    # Exchanges go beside one another and a piece is passed on when it has come.
    one, other = (program(4, [(0, dst, 100)]) for dst in (1, 2))
    second = replace(other.forward[0], id=1)  # pyright: ignore[reportCallIssue]
    stop = play(replace(one, forward=(*one.forward, second)), flat_machine(4, 4)).end_s
    assert stop[1:3] == pytest.approx(CALL + INTRA.time_s(2 * 100 * KV_BYTES), rel=0.01)
    stop = play(program(8, [(0, 4, 128)], routes=[(0, 4, 0, 1, 5)]), flat_machine(8, 4)).end_s
    near, far = CALL + INTRA.time_s(128 * KV_BYTES), CALL + INTER.time_s(128 * KV_BYTES)
    # Whoever sends is through when its socket has the bytes.
    assert stop[[1, 5, 4]] == pytest.approx([near, near + far, near + far + near], rel=0.02)
    # Pieces overtake one another.
    machine = flat_machine(8, 4)
    whole_s, cut_s = (
        play(with_routes(program(8, [(0, 4, 4096)]), route.Nics(4, 1, pieces=n)), machine).end_s.max() for n in (1, 4)
    )
    num_bytes, near, far = 4096 * KV_BYTES, INTRA.bytes_per_s, INTER.bytes_per_s
    # One piece a NIC: handed out, across, handed on. Of four, three quarters of what is handed out
    # and on happens beside the crossing.
    assert whole_s == pytest.approx(3 * CALL + machine.cost.routed_s(num_bytes, 1, 4), rel=0.01)
    # A connection takes the next piece while the last bytes of the one before are on their way.
    expected_s = 2 * (CALL + INTRA.alpha_s) + CALL + INTER.alpha_s + num_bytes / 4 * (1 / far + 2 * 3 / 4 / near)
    assert cut_s == pytest.approx(expected_s, rel=0.05)


@pytest.mark.parametrize(("transport", "meanwhile"), [("sockets", True), ("streams", False)])
def test_what_comes_in_the_next_exchange_does_not_wait_for_a_rank_that_computes(
    transport: attention.Transport, meanwhile: bool
) -> None:
    slow = replace(flat_machine(4, 4, launch=0.001), slowdown=(1.0, 10_000.0, 1.0, 1.0))
    ring = by_hand.pool("ring", (8000,), 4, heads=(2, 2))
    forward = attention.events(ring, slow, "keep", (np.zeros(4), np.zeros(4)), transport, trace=True).forward
    assert forward.end_s[1] == pytest.approx(4 * 10.0, rel=0.05)
    came_s = min(each.stop_s for each in forward.occupied if (each.rank, each.exchange, each.what) == (1, 1, "direct"))
    assert (came_s < 10.0) == meanwhile


def test_receives_are_posted_as_far_ahead_and_wires_are_those_of_the_emulated_cluster() -> None:
    gloo = pytest.importorskip("megatron_balance.runtime.transport")
    assert gloo.Gloo.ahead == emulated.AHEAD
    wiring = pytest.importorskip("tools.emulated_cluster.wiring")
    assert (wiring.FAST_BURST_BYTES, wiring.NIC_BURST_BYTES) == emulated.BURST_BYTES
    assert int(wiring.RANK_SETTINGS["net/ipv4/tcp_wmem"].split()[-1]) == emulated.SOCKET_BYTES


SMALL = cases(num_ranks=(4, 8), max_length=120, max_sequences=4, min_sequences=1)


def machine_of(case: Case, planned: MicrobatchPlan) -> Machine:
    """The machine of a drawn case, with as many ranks on a NIC as its plan is routed for."""
    shared = planned.routing.ranks_per_nic if planned.routing is not None else 1
    cluster = replace(case.cluster, ranks_per_nic=shared)
    return Machine(cluster, case.model, AnalyticCost(cluster, case.model))


@pytest.mark.parametrize("transport", ["sockets", "streams"])
@settings(max_examples=12, deadline=None)
@given(case=SMALL, name=st.sampled_from(ALL_PLANNERS))
def test_every_link_and_nic_carries_the_bytes_that_the_executor_counts(
    transport: attention.Transport, case: Case, name: str
) -> None:
    # On streams forward alone: NCCL's reduce-scatters go around a ring, `traffic` has gloo's.
    planned = plan(name, case)
    machine, program = machine_of(case, planned), pipeline.expand(planned, "keep")
    call = attention.attention_call(planned, machine, "keep", name="events", transport=transport)
    moved = call.forward.bytes_moved + (call.backward.bytes_moved if transport == "sockets" else 0)
    program = program if transport == "sockets" else replace(program, backward=())
    shape = {"ranks_per_node": machine.cluster.node_size, "ranks_per_nic": machine.cluster.ranks_per_nic}
    expected = statistics.traffic(program, machine.payload, **shape)
    nics = (expected.nic_sent.ravel(), expected.nic_received.ravel())
    assert np.array_equal(moved, np.concatenate([expected.intra_node_sent, expected.intra_node_received, *nics]))


@settings(max_examples=8, deadline=None)
@given(case=SMALL, name=st.sampled_from(ALL_PLANNERS))
def test_faster_nics_are_never_slower_by_much(case: Case, name: str) -> None:
    # Precedence on a connection may change with the rates; nothing else may.
    planned = plan(name, case)
    fast = replace(case, cluster=replace(case.cluster, nic_bytes_per_s=4 * case.cluster.nic_bytes_per_s))
    machines = (machine_of(each, planned) for each in (case, fast))
    ends = [attention.attention_call(planned, on, "replay", name="events", transport="sockets") for on in machines]
    slower, faster = (call.forward.end_s.max() + call.backward.end_s.max() for call in ends)
    assert faster <= 1.05 * slower


# Bytes on TCP connections through token buckets, against times worked out by hand.

NIC, LINK = INTER.bytes_per_s, INTRA.bytes_per_s
FAST_BURST, NIC_BURST = emulated.BURST_BYTES


class Wires:
    """A network with clocks of its own; `left` and `came`: when, by message."""

    now = 0.0

    def __init__(self, machine: Machine, longest: int = 0) -> None:
        self.events, self.left_s, self.came_s = list[tuple[float, int]](), dict[int, float](), dict[int, float]()
        self.network = emulated._Network(machine, cast("emulated.Sockets", self), longest)

    def push(self, at: float, what: str, number: int) -> None:
        del what
        heapq.heappush(self.events, (at, number))

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


# Two nodes of two ranks, one NIC each.
SHARED = flat_machine(4, 2, 2)


def test_a_message_takes_its_bytes_but_for_the_burst_alone_and_beside_one_the_other_way() -> None:
    for num_bytes in (100_000, 1_000_000):
        alone_s = (num_bytes - NIC_BURST) / NIC
        assert Wires(SHARED).carry((0, 2, num_bytes)).came_s[0] == pytest.approx(alone_s)
        assert Wires(SHARED).carry((0, 1, num_bytes)).came_s[0] == pytest.approx((num_bytes - FAST_BURST) / LINK)
    both = Wires(flat_machine(2, 1)).carry((0, 1, 1_000_000), (1, 0, 1_000_000))
    assert both.came_s == pytest.approx({0: alone_s, 1: alone_s}, rel=0.02)


def test_messages_take_turns_and_a_socket_holds_so_much() -> None:
    # Messages take turns on a nic of ones own and on a shared one the first is first through.
    first, second = Wires(SHARED).carry((0, 2, 200_000), (1, 3, 200_000)).came_s.values()
    assert first == pytest.approx((200_000 - NIC_BURST) / NIC)
    assert second == pytest.approx((400_000 - NIC_BURST) / NIC)
    first, second = Wires(flat_machine(4, 2)).carry((0, 2, 200_000), (0, 3, 200_000)).came_s.values()
    assert second == pytest.approx((400_000 - NIC_BURST) / NIC)
    assert second - first <= emulated.SMALL_QUEUE * max(emulated.SEGMENT_BYTES) / NIC
    # Those of two ranks keep their order.
    came_s = Wires(SHARED).carry((0, 2, 150_000), (0, 2, 1), (0, 3, 1)).came_s
    assert came_s[0] < came_s[1] < came_s[2]
    # A socket holds so much and a long message goes in longer segments.
    # A message that its socket cannot hold waits for what goes the other way.
    back, rest = 2 * 200_000, 100_000
    came_s = Wires(SHARED).carry((2, 1, 200_000), (3, 1, 200_000), (0, 2, emulated.SOCKET_BYTES + rest)).came_s
    # The first acknowledgement waits until all that goes the other way has left; by then all the
    # socket held has come.
    assert came_s[2] == pytest.approx((back - NIC_BURST) / NIC + (rest - NIC_BURST) / NIC, rel=0.02)
    # A sender has done its part when the socket has the message.
    wires = Wires(flat_machine(2, 1)).carry((0, 1, emulated.SOCKET_BYTES), (0, 1, emulated.SOCKET_BYTES))
    assert wires.left_s[0] == 0.0
    assert wires.came_s[0] < wires.left_s[1] < wires.came_s[1]
    # A long message goes in longer segments and takes no longer.
    num_bytes = 300_000_000
    found = Wires(flat_machine(2, 1), num_bytes).carry((0, 1, num_bytes))
    assert found.came_s[0] == pytest.approx(num_bytes / NIC, rel=0.005)
    assert found.num_events < 10 * emulated.MOST_SEGMENTS
