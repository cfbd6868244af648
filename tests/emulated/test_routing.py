"""Routed exchanges over real, shaped NICs: times beside Eq. 1, the bytes of NICs beside the plan's."""

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

pytest.importorskip("torch")

from megatron_balance import Cluster, MicrobatchPlan, Model, make_planner
from megatron_balance.analysis.statistics import traffic
from megatron_balance.analysis.wire import Payload
from megatron_balance.compile.pipeline import expand
from megatron_balance.compile.transpose import Policy
from megatron_balance.ir.program import Program
from megatron_balance.planning.layers import Layers
from tests.emulated import jobs, routed_calls
from tests.emulated.conftest import Emulate
from tests.emulated.routed_calls import MEGABYTE, NODES, NUM_RANKS, RANKS_PER_NODE, Case, Measured
from tests.emulated.test_run import ENDED_S, assert_no_namespace_but, network_namespaces
from tools.emulated_cluster import NicBytes, RankError, Topology

pytestmark = pytest.mark.dist

RATE = 100_000_000
SHAPED = 8 * RATE
TOLERANCE = 0.10
# The least gain of four NICs over one, of the 4 that they have.
GAIN = 3.5


def topology(nics: int, rate: int = RATE) -> Topology:
    return Topology(NODES, RANKS_PER_NODE, nics, rate, None)


def shortest(measured: Measured) -> list[tuple[float, float]]:
    # (direct, routed) seconds, forward and backward. What else runs on the cores can only lengthen
    # a call.
    direct, routed = (list(map(min, zip(*times, strict=True))) for times in (measured.direct, measured.routed))
    return list(zip(direct, routed, strict=True))


# Times


def test_four_nics_carry_a_transfer_and_a_ring_as_fast_as_eq_1_says(emulate: Emulate) -> None:
    cases = (
        Case("transfer", 8 * MEGABYTE, 4, 4, RATE, None),
        Case("transfer", 8 * MEGABYTE, 4, 4, RATE, SHAPED),
        Case("ring", 4 * MEGABYTE, 4, 4, RATE, None),
        Case("ring", 2 * MEGABYTE, 4, 4, RATE, SHAPED),
    )
    result = emulate(topology(4), routed_calls.measure, cases, deadline_s=240.0)
    assert all(measured.equal for of_rank in result.values for measured in of_rank)
    transfer, shaped_transfer, ring, shaped_ring = result.values[0]
    for measured in (transfer, ring):
        for direct_s, routed_s in shortest(measured):
            assert direct_s == pytest.approx(routed_calls.eq1(measured.case).direct_s, rel=TOLERANCE)
            assert direct_s / routed_s >= GAIN
    for direct_s, routed_s in shortest(shaped_transfer):
        expected = routed_calls.eq1(shaped_transfer.case)
        assert routed_s == pytest.approx(expected.routed_s, rel=TOLERANCE)
        assert direct_s / routed_s == pytest.approx(expected.direct_s / expected.routed_s, rel=TOLERANCE)
    # Rounds of a ring overlap: Eq. 1 bounds it from above, and its NICs from below.
    nics_s = routed_calls.eq1(replace(shaped_ring.case, intra_bits_per_s=None)).routed_s
    for _, routed_s in shortest(shaped_ring):
        assert nics_s * (1 - TOLERANCE) <= routed_s <= routed_calls.eq1(shaped_ring.case).routed_s * (1 + TOLERANCE)


@pytest.mark.parametrize(("nics", "pieces", "gain"), [(2, (2, 4), 2.0), (1, (4,), 1.0)])
def test_pieces_gain_what_nics_there_are(nics: int, pieces: tuple[int, ...], gain: float, emulate: Emulate) -> None:
    cases = tuple(Case("transfer", 4 * MEGABYTE, nics, count, RATE, None) for count in pieces)
    result = emulate(topology(nics), routed_calls.measure, cases, deadline_s=120.0)
    for measured in result.values[0]:
        for direct_s, routed_s in shortest(measured):
            assert direct_s / routed_s == pytest.approx(gain, rel=TOLERANCE)


# Bytes

MODEL = Model(num_heads=32, num_kv_heads=16, head_dim=256, bytes_per_element=4)
BATCHES = {
    "te_ring": (70, 45, 24, 9, 9, 9),
    "llama_all_gather": (70, 45, 24, 9, 9, 9),
    "zeppelin": (250, 90, 40, 11, 9, 8, 7, 6, 5, 5, 4, 3, 3, 2, 1),
}
CAPACITY = 60  # tokens of a rank: the longest sequence of the last batch fits no node
SLACK = 0.03
# Acknowledgements come to no more than this part of the bytes of the other direction.
ACKNOWLEDGED = 0.01
# Seconds of two barriers.
UNPLANNED_BYTES = 4_000


@pytest.mark.parametrize(("nics", "policy"), [(4, "keep"), (2, "replay")])
def test_every_nic_carries_what_the_plan_says(nics: int, policy: Policy, emulate: Emulate) -> None:
    ranks_per_nic = RANKS_PER_NODE // nics
    rates: dict[str, Any] = {"intra_bytes_per_s": 100e6, "nic_bytes_per_s": 12.5e6, "ranks_per_nic": ranks_per_nic}
    cluster = Cluster(NUM_RANKS, RANKS_PER_NODE, **rates)
    cases = [*product(["zeppelin"], (False, True), (False, True))]
    cases += [("te_ring", True, True), ("llama_all_gather", False, True)]
    plans = [planned(name, cluster, remapped=remapped, routed=routed) for name, remapped, routed in cases]
    result = emulate(topology(nics, rate=400_000_000), jobs.nic_bytes, plans, MODEL.head_dim, policy, deadline_s=120.0)
    for index, (name, remapped, routed) in enumerate(cases):
        program = expand(plans[index], policy)
        of_ranks = [of_rank[index] for of_rank in result.values]
        assert_carried(of_ranks[0].forward, replace(program, backward=()), ranks_per_nic)
        assert_carried(of_ranks[0].backward, replace(program, forward=()), ranks_per_nic)
        total = {counter: sum(of_rank.counters[counter] for of_rank in of_ranks) for counter in of_ranks[0].counters}
        assert bool(total["remap_tokens_received"]) == remapped
        assert bool(total["routed_transfers"]) == routed
        if name == "zeppelin":
            assert all(total[f"kernel_calls_{zone}"] for zone in ("inter_node", "intra_node", "local"))


def planned(name: str, cluster: Cluster, *, remapped: bool, routed: bool) -> MicrobatchPlan:
    layers = Layers(routing="always" if routed else "never", remap=remapped)
    rings = {"rule": "paper"} if name == "zeppelin" else {}
    return make_planner(name, cluster, MODEL, layers, tokens_per_rank=CAPACITY, **rings)(BATCHES[name])


def assert_carried(counted: Sequence[NicBytes], program: Program, ranks_per_nic: int) -> None:
    # In each direction.
    plan = traffic(program, Payload.of(MODEL), ranks_per_node=RANKS_PER_NODE, ranks_per_nic=ranks_per_nic)
    assert plan.nic_sent.sum() > MEGABYTE
    for nic in counted:
        sent, received = (int(of[nic.node, nic.nic]) for of in (plan.nic_sent, plan.nic_received))
        both = ("send", nic.sent, sent, received), ("receive", nic.received, received, sent)
        for what, count, payload, other_way in both:
            most = (1 + SLACK) * payload + ACKNOWLEDGED * other_way + UNPLANNED_BYTES
            assert payload <= count <= most, f"{nic}: the plan lets it {what} {payload} bytes"


# Failure


@pytest.mark.parametrize("victim", [1, RANKS_PER_NODE], ids=["proxy", "target"])
def test_a_rank_killed_in_the_middle_of_a_routed_call_ends_the_job_and_is_named(victim: int, emulate: Emulate) -> None:
    case = Case("transfer", 32 * MEGABYTE, 4, 4, RATE // 2, None)
    middle_s, plan = routed_calls.eq1(case).routed_s / 2, routed_calls.plan_of(case, routed=True)
    before = network_namespaces()
    start = time.monotonic()
    with pytest.raises(RankError, match=rf"rank {victim} \(node \d, local rank \d\) was killed by SIGKILL") as caught:
        emulate(topology(4, RATE // 2), jobs.killed, plan, routed_calls.HEAD_DIM, victim, middle_s)
    assert time.monotonic() - start < ENDED_S
    assert caught.value.rank == victim
    assert_no_namespace_but(before)
