"""The event engine against times worked out by hand, and against the bytes and the order that the
executor has."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_balance.analysis.clocks import fair_ends
from megatron_balance.analysis.machine import Machine, fair_rates
from megatron_balance.analysis.wire import Payload, piece_bytes
from megatron_balance.compile.join import split
from megatron_balance.compile.order import Finish, Leg, RunLaunches, Start, Step
from megatron_balance.compile.pipeline import compile_policies, in_order
from megatron_balance.compile.route import Nics
from megatron_balance.compile.transpose import POLICIES
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.cost.base import NO_HOST, Contention, Host, Link
from megatron_balance.cost.perturbed import Factors, PerturbedCost
from megatron_balance.errors import ConfigError
from megatron_balance.ir.arrays import as_array
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.columns import Route, Rows, Transfer
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.ir.program import Attend, AttendGrad, Exchange, Kind, Program
from megatron_balance.patterns.sends import messages_of
from megatron_balance.planning.layers import Layers, with_layers
from megatron_balance.simulator import attention
from megatron_balance.simulator.attention import ENGINES, attention_call, events
from megatron_balance.simulator.phase import Flow, SimulatedPhase, phase_of
from tests.support import by_hand
from tests.support.flat_cost import MODEL, FlatCost, flat_machine
from tests.support.foreseen import streams
from tests.support.programs import with_routes
from tests.support.strategies import ALL_PLANNERS, Case, cases, plan

KV_BYTES = 128
CALL, INTRA, INTER = 0.0005, Link(0.001, 1e6), Link(0.002, 1e5)


def moving(num_ranks: int, *transfers: tuple[int, int, int], exchanges: int = 1) -> Program:
    """One exchange (or each transfer in one of its own) of keys: (src, dst, tokens) of sequence
    `src`.
    """
    rows = [(int(Kind.KV), src, 0, tokens, 0, 2, src, dst) for src, dst, tokens in transfers]
    ops = [Exchange(0, Rows.of(Transfer.WIDTH, rows))]
    if exchanges > 1:
        ops = [Exchange(at, Rows.of(Transfer.WIDTH, [row])) for at, row in enumerate(rows)]
    owned = tuple(Rows.of(3, [(rank, 0, 10_000)]) for rank in range(num_ranks))
    return Program((10_000,) * num_ranks, 2, 2, owned, tuple(ops))


def forward_s(program: Program, machine: Machine) -> np.ndarray:
    ranks = list(map(in_order, split(program)))
    return attention.play_events(phase_of(ranks, machine, backward=False), machine, np.zeros(machine.num_ranks)).end_s


def ring(num_ranks: int, ranks_per_node: int, *lengths: int) -> MicrobatchPlan:
    return by_hand.pool("ring", lengths, num_ranks, ranks_per_node=ranks_per_node, heads=(2, 2))


def test_one_transfer_takes_its_call_its_alpha_and_its_bytes():
    machine = flat_machine(4, 2)
    assert forward_s(moving(4, (0, 1, 100)), machine)[:2] == pytest.approx(CALL + INTRA.time_s(100 * KV_BYTES))
    assert forward_s(moving(4, (0, 2, 100)), machine)[[0, 2]] == pytest.approx(CALL + INTER.time_s(100 * KV_BYTES))


def test_two_transfers_to_one_rank_share_its_link_and_both_directions_do_not():
    machine = flat_machine(4, 4)
    alone = CALL + INTRA.time_s(100 * KV_BYTES)
    assert forward_s(moving(4, (0, 2, 100), (1, 2, 100)), machine)[2] == pytest.approx(
        alone + 100 * KV_BYTES / INTRA.bytes_per_s
    )
    assert forward_s(moving(4, (0, 1, 100), (1, 0, 100)), machine)[:2] == pytest.approx(alone)


@pytest.mark.parametrize(("ranks_per_nic", "share"), [(1, 1.0), (2, 0.5)])
def test_ranks_that_share_a_nic_have_half_of_it_each(ranks_per_nic: int, share: float):
    machine = flat_machine(4, 2, ranks_per_nic)
    stop = forward_s(moving(4, (0, 2, 100), (1, 3, 100)), machine)
    assert stop == pytest.approx(CALL + INTER.time_s(100 * KV_BYTES, share=share))


def test_the_longer_of_two_transfers_has_the_nic_to_itself_once_the_shorter_one_is_done():
    machine = flat_machine(4, 2, 2)
    stop = forward_s(moving(4, (0, 2, 100), (1, 3, 300)), machine)
    begin, rate = CALL + INTER.alpha_s, INTER.bytes_per_s
    assert stop[0] == pytest.approx(begin + 200 * KV_BYTES / rate)
    assert stop[1] == pytest.approx(begin + 400 * KV_BYTES / rate)


def test_a_routed_transfer_takes_what_eq_1_of_zeppelin_says():
    machine = flat_machine(8, 4)
    tokens = 4 * 128
    stop = forward_s(with_routes(moving(8, (0, 4, tokens)), Nics(4, 1)), machine)
    assert stop.max() == pytest.approx(3 * CALL + machine.cost.routed_s(tokens * KV_BYTES, 1, 4))
    direct = forward_s(moving(8, (0, 4, tokens)), machine).max()
    assert stop.max() < direct


def test_one_stream_takes_exchanges_in_turn():
    machine = flat_machine(4, 4)
    stop = forward_s(moving(4, (0, 1, 100), (0, 2, 100), exchanges=2), machine)
    assert stop[2] == pytest.approx(2 * (CALL + INTRA.time_s(100 * KV_BYTES)))


def test_a_piece_is_passed_on_when_it_has_come():
    machine = flat_machine(8, 4)
    program = moving(8, (0, 4, 128))
    op = program.forward[0]
    assert isinstance(op, Exchange)
    program = replace(program, forward=(replace(op, routes=Rows.of(Route.WIDTH, [(0, 4, 0, 1, 5)])),))
    stop = forward_s(program, machine)
    near, far = CALL + INTRA.time_s(128 * KV_BYTES), CALL + INTER.time_s(128 * KV_BYTES)
    assert stop[[0, 1, 5, 4]] == pytest.approx([near, near + far, near + far + near, near + far + near])


def test_a_ring_that_computes_longer_than_it_transfers_takes_its_launches():
    machine = flat_machine(4, 4, launch=10.0)
    call = attention_call(ring(4, 4, 800), machine, name="events")
    assert call.forward.end_s == pytest.approx(4 * 10.0)
    assert call.forward.compute_s == pytest.approx(4 * 10.0)


def test_a_ring_that_transfers_longer_takes_its_rounds_and_one_launch():
    machine = flat_machine(4, 4, launch=1e-6)
    each = CALL + INTRA.time_s(800 // 4 * KV_BYTES)
    call = attention_call(ring(4, 4, 800), machine, name="events")
    assert call.forward.end_s.max() == pytest.approx(3 * each + 1e-6, rel=1e-6)


def test_a_kernel_is_slowed_down_while_a_transfer_holds_its_processors():
    contention = Contention(100, 20, 0)
    machine = flat_machine(2, 2, launch=10.0, intra=Link(0.0, 1e4), call_s=0.0, contention=contention)
    lasts = 200 // 2 * KV_BYTES / 1e4
    call = attention_call(ring(2, 2, 200), machine, name="events")
    # Beside the transfer the first launch does 0.8 of its work; one chunk of each block stays.
    slower = call.forward.end_s.max() - 20.0
    assert 0 < slower <= lasts * 0.2 + 1e-9


@pytest.mark.parametrize(("waits", "across_s", "combine_s"), [(False, 0.0, 0.0), (True, 2.0, 8.0)])
def test_a_piece_waits_for_a_thread_block_between_nodes_and_for_the_last_ones_inside(
    waits: bool, across_s: float, combine_s: float
):
    """From rank 0 over proxies 1 and 5 to rank 4, while all of them attend for 10 s in thread
    blocks of 2 s.
    """
    machine = flat_machine(8, 4, contention=Contention(100, 0, 0, waits))
    num_bytes = 128 * KV_BYTES
    legs: list[tuple[Leg, str, int, int]] = [
        ("dispatch", "dispatch", 0, 1),
        ("across", "inter_node", 1, 5),
        ("combine", "combine", 5, 4),
    ]
    flows = [Flow(0, leg, stream, a, b, 0, 4, num_bytes) for leg, stream, a, b in legs]
    steps: list[tuple[Step, ...]] = [
        (Start(0), RunLaunches(1), Finish(0)) if rank in (0, 1, 4, 5) else (RunLaunches(1),) for rank in range(8)
    ]
    seconds = [[10.0 if isinstance(step, RunLaunches) else 0.0 for step in own] for own in steps]
    exchanges = [[-1 if isinstance(step, RunLaunches) else 0 for step in own] for own in steps]
    blocks_s = [[2.0 if isinstance(step, RunLaunches) else 0.0 for step in own] for own in steps]
    phase = SimulatedPhase(steps, seconds, exchanges, blocks_s, flows)
    found = attention.play_events(phase, machine, np.zeros(8), trace=True).occupied
    near, far = CALL + INTRA.time_s(num_bytes), CALL + INTER.time_s(num_bytes)
    stop = {each.what: each.stop_s for each in found if each.what in ("dispatch", "across", "combine")}
    crossed = near + across_s + far
    assert stop == pytest.approx({"dispatch": near, "across": crossed, "combine": max(crossed, combine_s) + near})


def test_thread_blocks_are_a_kernels_time_on_its_processors_and_a_kernel_that_leaves_some_free_has_none_to_wait_for():
    contention = Contention(100, 20, 2, True)
    assert contention.block_s(10.0, 400) == pytest.approx(10.0 / 4)
    assert contention.block_s(10.0, 100) == 0.0


def test_transfers_that_wait_make_a_routed_ring_slower_and_are_for_the_event_engine():
    whole = by_hand.pool("ring", (65536,), 16, ranks_per_node=8, heads=(32, 8))
    planned = with_layers(whole, Cluster(16, 8), flat_machine(16, 8).cost, Layers(routing="always"))
    clusters = [Cluster(16, 8, transfers_wait=waits) for waits in (False, True)]
    model = Model(num_heads=32, num_kv_heads=8, head_dim=128)
    usual, waiting = (Machine(cluster, model, AnalyticCost(cluster, model)) for cluster in clusters)
    usual_s, waiting_s = (attention_call(planned, each, name="auto").forward.end_s.max() for each in (usual, waiting))
    assert waiting_s > usual_s
    with pytest.raises(ConfigError, match="transfers that wait for SMs"):
        attention_call(planned, waiting, name="rounds")


def test_a_straggler_computes_slower_and_the_ring_waits_for_it():
    fair = flat_machine(4, 4, launch=10.0)
    slow = Machine(fair.cluster, fair.model, fair.cost, (1.0, 2.0, 1.0, 1.0))
    call = attention_call(ring(4, 4, 800), slow, name="events")
    assert call.forward.compute_s == pytest.approx([40, 80, 40, 40])
    assert call.forward.end_s.max() == pytest.approx(80.0)


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
    ends = fair_ends(np.zeros(2, dtype=np.int64), np.array([10.0, 10.0]), np.array([0.0, 5.0]), np.ones(2))
    # Alone until 5, then half each: the first has 5 left and needs 10; the second then has 5 left
    # and the resource to itself.
    assert ends == pytest.approx([15.0, 20.0])


@settings(max_examples=6, deadline=None)
@given(
    case=cases(num_ranks=(4, 8), max_length=120, max_sequences=4, min_sequences=1), name=st.sampled_from(ALL_PLANNERS)
)
def test_every_stream_does_what_the_order_of_streams_says(case: Case, name: str):
    planned = plan(name, case)
    cluster = replace(case.cluster, ranks_per_nic=1)
    machine = Machine(cluster, case.model, AnalyticCost(cluster, case.model))
    policy = POLICIES[case.seed % 2]
    call = events(planned, machine, policy, (np.zeros(planned.num_ranks), np.zeros(planned.num_ranks)), trace=True)
    for rank in range(planned.num_ranks):
        program = compile_policies(planned, rank, [policy])[0].program
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
    seconds = [
        [outcome.end_s.max() for outcome in attention_call(planned, machine, policy, name="events")]
        for policy in POLICIES
        for machine in (flat_machine(8, 4, inter=Link(0.002, rate)) for rate in (1e5, 2e5, 1e6, 1e9))
    ]
    for four in (seconds[:4], seconds[4:]):
        assert all(
            a >= b for slower, faster in zip(four, four[1:], strict=False) for a, b in zip(slower, faster, strict=True)
        )


def has_empty_piece(op: Exchange, machine: Machine) -> bool:
    """True if a routed parcel of the exchange has fewer blocks of bytes than pieces."""
    parcels = Payload.of(machine.model).parcels(messages_of(op.id, as_array(op.transfers)))
    packed = dict(zip(zip(parcels.src.tolist(), parcels.dst.tolist(), strict=True), parcels.packed, strict=True))
    pieces = Counter((row[0], row[1]) for row in op.routes)
    return any(bool((piece_bytes(np.array([packed[pair]]), count) == 0).any()) for pair, count in pieces.items())


# Hosts in the simulator: a device waits for what its host has not issued, in both engines alike.


def issued_ring(num_ranks: int = 2):
    return by_hand.pool("ring", (64,), num_ranks, ranks_per_node=num_ranks, heads=(2, 2))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_launch_does_not_start_before_its_host_issued_it(engine):
    # A group call of 7 s, then two launches of 2 x 5 s each: issued after 7, 17 and 27 s. The last
    # takes a second, forward, and two, backward, which ends by sending gradients.
    machine = replace(flat_machine(2, 2, launch=1.0), host=Host(7.0, 5.0))
    forward = attention_call(issued_ring(), machine, name=engine).forward
    assert forward.end_s == pytest.approx([28.0, 28.0])
    assert forward.compute_s == pytest.approx([2.0, 2.0])


class Packing(FlatCost):
    """Packing and unpacking take a second."""

    def pack_s(self, num_bytes):
        return float(num_bytes > 0)


def test_packing_and_unpacking_are_a_launch_each():
    # Of a head exchange: inputs are packed and sent, and read where they arrive; two launches; outputs
    # are packed, sent and unpacked. Issued after 12, 22, 34 and 39 s; unpacking takes a second.
    plan = by_hand.pool("head_exchange", (64,), 2, ranks_per_node=2, heads=(2, 2))
    machine = replace(flat_machine(2, 2, launch=1.0), cost=Packing(MODEL), host=Host(7.0, 5.0))
    assert attention_call(plan, machine).forward.end_s == pytest.approx([40.0, 40.0])


@pytest.mark.parametrize("engine", ENGINES)
def test_messages_of_a_group_call_have_a_price_of_their_own(engine):
    machine = replace(flat_machine(2, 2, launch=1.0), host=Host(7.0, 5.0, message_s=0.5))
    assert attention_call(issued_ring(), machine, name=engine).forward.end_s == pytest.approx([29.0, 29.0])


def test_a_host_that_is_ahead_of_its_device_holds_nothing_up():
    machine = flat_machine(2, 2, launch=1.0)
    without = attention_call(issued_ring(), machine)
    for outcome, same in zip(
        attention_call(issued_ring(), replace(machine, host=Host(0.1, 0.1))), without, strict=True
    ):
        assert outcome.end_s.tolist() == same.end_s.tolist()


@settings(max_examples=6, deadline=None)
@given(case=cases(), name=st.sampled_from(["te_ring", "zeppelin", "distca", "ulysses"]))
def test_slow_hosts_make_no_call_faster_and_take_at_least_what_they_issue(case: Case, name: str):
    planned = plan(name, case)
    ranks, per_node = planned.num_ranks, min(planned.ranks_per_node, planned.num_ranks)
    machine = flat_machine(ranks, per_node, launch=0.01, pair=1e-7)
    for engine in ("events", "rounds"):
        without = attention_call(planned, machine, name=engine)
        last = [outcome.end_s for outcome in without]
        for factor in (1.0, 4.0):
            slow = replace(machine, host=Host(0.02 * factor, 0.01 * factor))
            ends = [outcome.end_s for outcome in attention_call(planned, slow, name=engine)]
            for end, before in zip(ends, last, strict=True):
                assert (end >= before * (1 - 1e-9)).all()
            last = ends


def test_without_prices_seconds_are_the_same_bit_for_bit():
    cluster = Cluster(8, 4)
    assert AnalyticCost(cluster, MODEL).host == NO_HOST
    planned = by_hand.pool("ring", (300, 200), 8, ranks_per_node=4, heads=(2, 2))
    machine = flat_machine(8, 4, launch=0.01, pair=1e-6)
    for engine in ("events", "rounds"):
        plain, zero = (attention_call(planned, each, name=engine) for each in (machine, replace(machine, host=Host())))
        for a, b in zip(plain, zero, strict=True):
            assert np.array_equal(a.end_s, b.end_s)


def test_a_cluster_says_what_its_hosts_take():
    cluster = Cluster(8, 4, host_call_s=3e-5, host_launch_s=2e-5, host_message_s=1e-6)
    cost = AnalyticCost(cluster, MODEL)
    assert cost.host == Host(3e-5, 2e-5, 1e-6)
    assert PerturbedCost(cost, Factors(attention=2.0)).host == cost.host
    assert cost.host.issue_s(2, 3, 4) == pytest.approx(2 * 3e-5 + 3 * 2e-5 + 4e-6)
    with pytest.raises(ConfigError, match="cluster custom: host_call_s: expected seconds of at least 0, got -1"):
        Cluster(8, 4, host_call_s=-1.0)
