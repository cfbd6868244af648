"""The event engine against times worked out by hand, and against the executor's bytes and order."""

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_balance import Cluster, MicrobatchPlan, Model
from megatron_balance.analysis import clocks, wire
from megatron_balance.analysis.machine import Machine, fair_rates
from megatron_balance.compile import join, pipeline, route, transpose
from megatron_balance.compile.order import Finish, Leg, RunLaunches, Start, Step
from megatron_balance.cost import analytic, perturbed
from megatron_balance.cost.base import NO_HOST, Contention, Host, Link
from megatron_balance.errors import ConfigError
from megatron_balance.ir.arrays import as_array
from megatron_balance.ir.columns import Route, Rows, Transfer
from megatron_balance.ir.program import Attend, AttendGrad, Exchange, Kind, Program
from megatron_balance.patterns.sends import messages_of
from megatron_balance.planning.layers import Layers, with_layers
from megatron_balance.simulator import attention
from megatron_balance.simulator.attention import ENGINES, attention_call, events
from megatron_balance.simulator.phase import Flow, SimulatedPhase, phase_of
from tests.support import by_hand
from tests.support.flat_cost import INTER, INTRA, MODEL, FlatCost, flat_machine
from tests.support.foreseen import streams
from tests.support.programs import with_routes
from tests.support.strategies import ALL_PLANNERS, Case, cases, plan

KV_BYTES = 128
CALL = 0.0005


def near_s(tokens: float) -> float:
    """Seconds of a transfer of keys inside a node."""
    return CALL + INTRA.time_s(tokens * KV_BYTES)


def far_s(tokens: float, share: float = 1.0) -> float:
    """Seconds of one between nodes, with a share of the NIC."""
    return CALL + INTER.time_s(tokens * KV_BYTES, share=share)


def moving(num_ranks: int, *transfers: tuple[int, int, int], exchanges: int = 1) -> Program:
    # One exchange (or each transfer in one of its own) of keys: (src, dst, tokens) of sequence `src`.
    rows = [(int(Kind.KV), src, 0, tokens, 0, 2, src, dst) for src, dst, tokens in transfers]
    ops = [Exchange(0, Rows.of(Transfer.WIDTH, rows))]
    if exchanges > 1:
        ops = [Exchange(at, Rows.of(Transfer.WIDTH, [row])) for at, row in enumerate(rows)]
    owned = tuple(Rows.of(3, [(rank, 0, 10_000)]) for rank in range(num_ranks))
    return Program((10_000,) * num_ranks, 2, 2, owned, tuple(ops))


def forward_s(program: Program, machine: Machine) -> np.ndarray:
    ranks = list(map(pipeline.in_order, join.split(program)))
    return attention.play_events(phase_of(ranks, machine, backward=False), machine, np.zeros(machine.num_ranks)).end_s


def ring(num_ranks: int, ranks_per_node: int, *lengths: int) -> MicrobatchPlan:
    return by_hand.pool("ring", lengths, num_ranks, ranks_per_node=ranks_per_node, heads=(2, 2))


def test_transfers_to_one_rank_or_on_one_nic_share_it_and_both_directions_do_not():
    # One transfer takes its call its alpha and its bytes.
    machine = flat_machine(4, 2)
    assert forward_s(moving(4, (0, 1, 100)), machine)[:2] == pytest.approx(near_s(100))
    assert forward_s(moving(4, (0, 2, 100)), machine)[[0, 2]] == pytest.approx(far_s(100))
    # Transfers to one rank or on one nic share it and both directions do not.
    machine = flat_machine(4, 4)
    shared_s = near_s(100) + 100 * KV_BYTES / INTRA.bytes_per_s
    assert forward_s(moving(4, (0, 2, 100), (1, 2, 100)), machine)[2] == pytest.approx(shared_s)
    assert forward_s(moving(4, (0, 1, 100), (1, 0, 100)), machine)[:2] == pytest.approx(near_s(100))
    for ranks_per_nic, share in ((1, 1.0), (2, 0.5)):
        stop = forward_s(moving(4, (0, 2, 100), (1, 3, 100)), flat_machine(4, 2, ranks_per_nic))
        assert stop == pytest.approx(far_s(100, share))
    # The longer has the NIC to itself once the shorter one is done.
    stop = forward_s(moving(4, (0, 2, 100), (1, 3, 300)), flat_machine(4, 2, 2))
    assert stop[:2] == pytest.approx([far_s(200), far_s(400)])


def test_a_routed_transfer_takes_what_eq_1_of_zeppelin_says_and_exchanges_their_turn():
    # A routed transfer takes what eq 1 of zeppelin says.
    machine, tokens = flat_machine(8, 4), 4 * 128
    direct = moving(8, (0, 4, tokens))
    routed_s = forward_s(with_routes(direct, route.Nics(4, 1)), machine).max()
    assert routed_s == pytest.approx(3 * CALL + machine.cost.routed_s(tokens * KV_BYTES, 1, 4))
    assert routed_s < forward_s(direct, machine).max()
    # A piece is passed on when it has come.
    program = moving(8, (0, 4, 128))
    piece = replace(program.forward[0], routes=Rows.of(Route.WIDTH, [(0, 4, 0, 1, 5)]))  # pyright: ignore[reportCallIssue]
    stop = forward_s(replace(program, forward=(piece,)), machine)
    near, far = near_s(128), far_s(128)
    assert stop[[0, 1, 5, 4]] == pytest.approx([near, near + far, near + far + near, near + far + near])
    # One stream takes exchanges in turn.
    stop = forward_s(moving(4, (0, 1, 100), (0, 2, 100), exchanges=2), flat_machine(4, 4))
    assert stop[2] == pytest.approx(2 * near_s(100))


def test_a_ring_takes_its_launches_or_its_rounds_and_a_kernel_beside_a_transfer_is_slower():
    # A ring takes its launches or where it transfers longer its rounds and one launch.
    call = attention_call(ring(4, 4, 800), flat_machine(4, 4, launch=10.0), name="events")
    assert call.forward.end_s == pytest.approx(4 * 10.0)
    assert call.forward.compute_s == pytest.approx(4 * 10.0)
    call = attention_call(ring(4, 4, 800), flat_machine(4, 4, launch=1e-6), name="events")
    assert call.forward.end_s.max() == pytest.approx(3 * near_s(800 // 4) + 1e-6, rel=1e-6)
    # It waits for a straggler, which computes slower.
    slow = replace(flat_machine(4, 4, launch=10.0), slowdown=(1.0, 2.0, 1.0, 1.0))
    call = attention_call(ring(4, 4, 800), slow, name="events")
    assert call.forward.compute_s == pytest.approx([40, 80, 40, 40])
    assert call.forward.end_s.max() == pytest.approx(80.0)
    # A kernel is slowed down while a transfer holds its processors.
    machine = flat_machine(2, 2, launch=10.0, intra=Link(0.0, 1e4), call_s=0.0, contention=Contention(100, 20, 0))
    lasts = 200 // 2 * KV_BYTES / 1e4
    call = attention_call(ring(2, 2, 200), machine, name="events")
    # Beside the transfer the first launch does 0.8 of its work; one chunk of each block stays.
    slower = call.forward.end_s.max() - 20.0
    assert 0 < slower <= lasts * 0.2 + 1e-9


@pytest.mark.parametrize(("waits", "across_s", "combine_s"), [(False, 0.0, 0.0), (True, 2.0, 8.0)])
def test_a_piece_waits_for_a_thread_block_between_nodes_and_for_the_last_ones_inside(
    waits: bool, across_s: float, combine_s: float
):
    # From rank 0 over proxies 1 and 5 to rank 4, while all of them attend for 10 s in thread blocks
    # of 2 s.
    machine = flat_machine(8, 4, contention=Contention(100, 0, 0, waits))
    legs: list[tuple[Leg, str, int, int]]
    legs = [("dispatch", "dispatch", 0, 1), ("across", "inter_node", 1, 5), ("combine", "combine", 5, 4)]
    flows = [Flow(0, leg, stream, a, b, 0, 4, 128 * KV_BYTES) for leg, stream, a, b in legs]
    steps: list[tuple[Step, ...]] = [
        (Start(0), RunLaunches(1), Finish(0)) if rank in (0, 1, 4, 5) else (RunLaunches(1),) for rank in range(8)
    ]

    def of_each(launch: float, other: float) -> list[list[float]]:
        return [[launch if isinstance(step, RunLaunches) else other for step in own] for own in steps]

    phase = SimulatedPhase(steps, of_each(10.0, 0.0), of_each(-1, 0), of_each(2.0, 0.0), flows)  # pyright: ignore[reportArgumentType]
    found = attention.play_events(phase, machine, np.zeros(8), trace=True).occupied
    stop = {each.what: each.stop_s for each in found if each.what in ("dispatch", "across", "combine")}
    near, crossed = near_s(128), near_s(128) + across_s + far_s(128)
    assert stop == pytest.approx({"dispatch": near, "across": crossed, "combine": max(crossed, combine_s) + near})


def test_transfers_that_wait_make_a_routed_ring_slower_and_are_for_the_event_engine():
    # Thread blocks are a kernel's time on its processors; one that leaves some free has none.
    contention = Contention(100, 20, 2, True)
    assert (contention.block_s(10.0, 400), contention.block_s(10.0, 100)) == (pytest.approx(10.0 / 4), 0.0)
    whole = by_hand.pool("ring", (65536,), 16, ranks_per_node=8, heads=(32, 8))
    planned = with_layers(whole, Cluster(16, 8), flat_machine(16, 8).cost, Layers(routing="always"))
    clusters, model = [Cluster(16, 8, transfers_wait=waits) for waits in (False, True)], Model(32, 8, 128)
    usual, waiting = (Machine(cluster, model, analytic.AnalyticCost(cluster, model)) for cluster in clusters)
    usual_s, waiting_s = (attention_call(planned, each, name="auto").forward.end_s.max() for each in (usual, waiting))
    assert waiting_s > usual_s
    with pytest.raises(ConfigError, match="transfers that wait for SMs"):
        attention_call(planned, waiting, name="rounds")


@given(
    uses=st.lists(st.tuples(st.integers(0, 3), st.integers(4, 7)), min_size=1, max_size=12),
    capacity=st.lists(st.floats(0.5, 4.0), min_size=8, max_size=8),
)
def test_fair_shares_fill_a_resource_of_every_transfer_and_overfill_none(uses, capacity):
    table, rates_of = np.array(uses), np.array(capacity)
    rates = fair_rates(table, rates_of)
    load = np.bincount(table.ravel(), weights=np.repeat(rates, 2), minlength=8)
    assert (load <= rates_of * (1 + 1e-9)).all()
    full = load >= rates_of * (1 - 1e-9)
    # Max-min: each has a full resource on which no other is faster.
    for flow, (a, b) in enumerate(uses):
        assert any(full[r] and rates[flow] >= rates[(table == r).any(axis=1)].max() - 1e-9 for r in (a, b))


def test_transfers_on_one_resource_end_as_those_that_share_it_evenly():
    ends = clocks._fair_ends(np.zeros(2, dtype=np.int64), np.array([10.0, 10.0]), np.array([0.0, 5.0]), np.ones(2))
    assert ends == pytest.approx([15.0, 20.0]), "the first is alone until 5, the second from 15 on"


@settings(max_examples=6, deadline=None)
@given(
    case=cases(num_ranks=(4, 8), max_length=120, max_sequences=4, min_sequences=1), name=st.sampled_from(ALL_PLANNERS)
)
def test_every_stream_does_what_the_order_of_streams_says(case: Case, name: str):
    planned = plan(name, case)
    cluster = replace(case.cluster, ranks_per_nic=1)
    machine = Machine(cluster, case.model, analytic.AnalyticCost(cluster, case.model))
    policy = transpose.POLICIES[case.seed % 2]
    call = events(planned, machine, policy, (np.zeros(planned.num_ranks), np.zeros(planned.num_ranks)), trace=True)
    for rank in range(planned.num_ranks):
        program = pipeline.compile_policies(planned, rank, [policy])[0].program
        for outcome, ops in ((call.forward, program.forward), (call.backward, program.backward)):
            expected = {
                stream: [op.id for issue in issues if isinstance(op := ops[issue.op], Exchange)]
                for stream, issues in streams(ops, rank, machine.cluster.node_size).items()
                if stream != "compute" and not stream.endswith("collective")
            }
            began = sorted((e for e in outcome.occupied if e.rank == rank), key=lambda e: (e.start_s, e.stop_s))
            # Ranks without a communicator of their own send a collective's messages one by one.
            together = {op.id for op in ops if isinstance(op, Exchange) and op.collective != "p2p"}
            for stream, issued in expected.items():
                done = [e.exchange for e in began if e.track == stream and e.exchange not in together]
                # Of a parcel of a few bytes some pieces hold none, and these are not sent.
                assert done == [at for at in issued if at in done]
                exchanges = {op.id: op for op in ops if isinstance(op, Exchange)}
                assert all(has_empty_piece(exchanges[at], machine) for at in issued if at not in done)
            launches = sum(isinstance(op, Attend | AttendGrad) for op in ops)
            assert sum(e.what == "attention" for e in began) == launches


def test_more_bandwidth_is_never_slower():
    planned = ring(8, 4, 4000, 300, 77)
    machines = [flat_machine(8, 4, inter=Link(0.002, rate)) for rate in (1e5, 2e5, 1e6, 1e9)]
    for policy in transpose.POLICIES:
        calls = [attention_call(planned, machine, policy, name="events") for machine in machines]
        for seconds in zip(*([outcome.end_s.max() for outcome in call] for call in calls), strict=True):
            assert sorted(seconds, reverse=True) == list(seconds)


def has_empty_piece(op: Exchange, machine: Machine) -> bool:
    """True if a routed parcel of the exchange has fewer blocks of bytes than pieces."""
    parcels = wire.Payload.of(machine.model).parcels(messages_of(op.id, as_array(op.transfers)))
    packed = dict(zip(zip(parcels.src.tolist(), parcels.dst.tolist(), strict=True), parcels.packed, strict=True))
    pieces = Counter((row[0], row[1]) for row in op.routes)
    return any(bool((wire.piece_bytes(np.array([packed[pair]]), count) == 0).any()) for pair, count in pieces.items())


# Hosts in the simulator: a device waits for what its host has not issued, in both engines alike.


ISSUED_RING = ring(2, 2, 64)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_launch_does_not_start_before_its_host_issued_it(engine):
    # A group call of 7 s, then two launches of 2 x 5 s each: issued after 7, 17 and 27 s. The last
    # takes a second, forward, and two, backward, which ends by sending gradients.
    machine = replace(flat_machine(2, 2, launch=1.0), host=Host(7.0, 5.0))
    forward = attention_call(ISSUED_RING, machine, name=engine).forward
    assert forward.end_s == pytest.approx([28.0, 28.0])
    assert forward.compute_s == pytest.approx([2.0, 2.0])
    # Messages of a group call have a price of their own.
    machine = replace(machine, host=Host(7.0, 5.0, message_s=0.5))
    assert attention_call(ISSUED_RING, machine, name=engine).forward.end_s == pytest.approx([29.0, 29.0])


class Packing(FlatCost):
    def pack_s(self, num_bytes):
        return float(num_bytes > 0)


def test_packing_and_unpacking_are_a_launch_each_and_a_host_that_is_ahead_holds_nothing_up():
    # Packing and unpacking are a launch each.
    # Of a head exchange: inputs are packed and sent, and read where they arrive; two launches; outputs
    # are packed, sent and unpacked. Issued after 12, 22, 34 and 39 s; unpacking takes a second.
    plan = by_hand.pool("head_exchange", (64,), 2, ranks_per_node=2, heads=(2, 2))
    machine = replace(flat_machine(2, 2, launch=1.0), cost=Packing(MODEL), host=Host(7.0, 5.0))
    assert attention_call(plan, machine).forward.end_s == pytest.approx([40.0, 40.0])
    # A host that is ahead of its device holds nothing up.
    machine = flat_machine(2, 2, launch=1.0)
    calls = (attention_call(ISSUED_RING, each) for each in (machine, replace(machine, host=Host(0.1, 0.1))))
    for outcome, same in zip(*calls, strict=True):
        assert outcome.end_s.tolist() == same.end_s.tolist()


@settings(max_examples=6, deadline=None)
@given(case=cases(), name=st.sampled_from(["te_ring", "zeppelin", "distca", "ulysses"]))
def test_slow_hosts_make_no_call_faster_and_take_at_least_what_they_issue(case: Case, name: str):
    planned = plan(name, case)
    ranks, per_node = planned.num_ranks, min(planned.ranks_per_node, planned.num_ranks)
    machine = flat_machine(ranks, per_node, launch=0.01, pair=1e-7)
    for engine in ("events", "rounds"):
        last: tuple[Any, ...] = (0.0, 0.0)
        for factor in (0.0, 1.0, 4.0):
            slow = replace(machine, host=Host(0.02 * factor, 0.01 * factor))
            ends = tuple(outcome.end_s for outcome in attention_call(planned, slow, name=engine))
            assert all((end >= before * (1 - 1e-9)).all() for end, before in zip(ends, last, strict=True))
            last = ends


def test_a_cluster_says_what_its_hosts_take_and_without_prices_seconds_are_the_same():
    # Without prices seconds are the same bit for bit.
    planned, machine = ring(8, 4, 300, 200), flat_machine(8, 4, launch=0.01, pair=1e-6)
    for engine in ENGINES:
        plain, zero = (attention_call(planned, each, name=engine) for each in (machine, replace(machine, host=Host())))
        for a, b in zip(plain, zero, strict=True):
            assert np.array_equal(a.end_s, b.end_s)
    # A cluster says what its hosts take.
    assert analytic.AnalyticCost(Cluster(8, 4), MODEL).host == NO_HOST
    cost = analytic.AnalyticCost(Cluster(8, 4, host_call_s=3e-5, host_launch_s=2e-5, host_message_s=1e-6), MODEL)
    assert cost.host == Host(3e-5, 2e-5, 1e-6)
    assert perturbed.PerturbedCost(cost, perturbed.Factors(attention=2.0)).host == cost.host
    assert cost.host.issue_s(2, 3, 4) == pytest.approx(2 * 3e-5 + 3 * 2e-5 + 4e-6)
    with pytest.raises(ConfigError, match="cluster custom: host_call_s: expected seconds of at least 0, got -1"):
        Cluster(8, 4, host_call_s=-1.0)
