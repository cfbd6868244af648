"""Rates and counters, measured with gloo between ranks of two nodes."""

import itertools

import pytest

from tests.emulated import jobs
from tests.emulated.conftest import Emulate
from tests.emulated.jobs import Measured, Transfers
from tools.emulated_cluster import Controller, Result, Topology

pytest.importorskip("torch")
pytestmark = pytest.mark.dist

# Slow links: a send buffer of 256 KB then bridges the 50 ms in which others may hold the cores.
NUM_BYTES = 2 << 20
NIC = 40_000_000
INTRA = 160_000_000
# bytes of a full frame, and of it what TCP carries for its user: at rate R, R * PAYLOAD / FRAME is
# seen
FRAME, PAYLOAD = 9014, 8948
TOLERANCE = 0.10


def seconds(num_bytes: int, bits_per_s: int) -> float:
    # Seconds that a link of that rate needs.
    return num_bytes * 8 * FRAME / PAYLOAD / bits_per_s


ONE = seconds(NUM_BYTES, NIC)


def case(*pairs: tuple[int, int], takes_s: float, rates: tuple[int, int | None] | None = None) -> Transfers:
    return Transfers(pairs, takes_s * (1 + TOLERANCE), rates)


def assert_took(result: Result, expected_s: list[float]) -> None:
    # The shortest repetition of each of the first cases; and every payload of all cases arrived as
    # it was sent.
    assert all(measured.equal for rank in result.values for repetitions in rank for measured in repetitions)
    times = [min(measured.seconds for measured in repetitions) for repetitions in result.values[0][: len(expected_s)]]
    assert times == [pytest.approx(expected, rel=TOLERANCE) for expected in expected_s]


def test_links_have_their_rates_in_both_directions_and_counters_count_the_payload(emulate: Emulate) -> None:
    cases = (
        case((0, 4), takes_s=ONE),
        case((0, 4), (1, 5), takes_s=ONE),  # a NIC each on both sides
        case((0, 4), (1, 4), takes_s=2 * ONE),  # two sending NICs, one receiving
        case((0, 4), (4, 0), takes_s=ONE),  # both directions of the same NICs
        case((0, 1), takes_s=seconds(NUM_BYTES, INTRA)),
        case((0, 4), takes_s=ONE / 2, rates=(2 * NIC, INTRA)),
    )
    topology = Topology(num_nodes=2, ranks_per_node=4, nics_per_node=4, nic_bits_per_s=NIC, intra_bits_per_s=INTRA)
    result = emulate(topology, jobs.transfers, cases, NUM_BYTES, deadline_s=60.0)
    assert_took(result, [ONE, ONE, 2 * ONE, ONE, seconds(NUM_BYTES, INTRA), ONE / 2])
    direct, _, to_one, _, inside, _ = result.values[0]
    for measured in direct:
        assert_carried(measured, sent={(0, 0): NUM_BYTES}, received={(1, 0): NUM_BYTES})
    for measured in to_one:
        assert_carried(measured, sent={(0, 0): NUM_BYTES, (0, 1): NUM_BYTES}, received={(1, 0): 2 * NUM_BYTES})
    for measured in inside:
        assert_carried(measured, sent={}, received={})
    whole_job = {(nic.node, nic.nic): nic.sent for nic in result.nic_bytes}
    assert whole_job[(0, 0)] >= sum(len(repetitions) for repetitions in result.values[0][:4]) * NUM_BYTES


def test_ranks_that_share_a_nic_share_its_rate(emulate: Emulate) -> None:
    cases = (
        case((0, 4), (1, 6), takes_s=2 * ONE),  # ranks 0 and 1 send by the same NIC, to two
        case((0, 4), (2, 6), takes_s=ONE),  # two NICs on both sides
        # two NICs to ranks 4 and 5, which receive by the same
        case((0, 4), (2, 5), takes_s=2 * ONE),
    )
    topology = Topology(num_nodes=2, ranks_per_node=4, nics_per_node=2, nic_bits_per_s=NIC, intra_bits_per_s=None)
    result = emulate(topology, jobs.transfers, (*cases, case((0, 1), takes_s=ONE / 2)), NUM_BYTES, deadline_s=60.0)
    assert_took(result, [2 * ONE, ONE, 2 * ONE])
    sharing, _, _, inside = result.values[0]
    assert min(measured.seconds for measured in inside) < ONE / 2
    for measured in sharing:
        assert_carried(measured, sent={(0, 0): 2 * NUM_BYTES}, received={(1, 0): NUM_BYTES, (1, 1): NUM_BYTES})
    for measured in inside:
        assert_carried(measured, sent={}, received={})


def assert_carried(measured: Measured, sent: dict[tuple[int, int], int], received: dict[tuple[int, int], int]) -> None:
    # Every NIC's counters are the payload and at most 3 % more; acknowledgements and barriers are
    # less than that on the others.
    assert measured.nics
    for nic in measured.nics:
        for name, count, carried in (("sent", nic.sent, sent), ("received", nic.received, received)):
            payload = carried.get((nic.node, nic.nic), 0)
            most = payload + 0.03 * max(payload, NUM_BYTES)
            assert payload <= count <= most, f"{nic}: {name} {count} bytes, payload {payload}"


# A slow link and one that loses packets, among links of shaped NICs: found by measuring.

SLOW_NIC = 80_000_000
LINKS = tuple(itertools.permutations(range(4), 2))
# (bit/s, bytes that may wait) of rank 1's NIC: as it was, slow, and with a queue of two packets.
DISTURBED = ((SLOW_NIC, 16 << 20), (SLOW_NIC // 8, 16 << 20), (SLOW_NIC, 20_500))


def measured(rank: int, controller: Controller) -> list[tuple[list[tuple[int, int]], int]]:
    # By disturbance, the slow links, and on rank 0 the packets that were lost.
    import torch
    import torch.distributed as dist

    from megatron_balance.runtime.groups import make_groups
    from megatron_balance.training.stragglers import _slow_links, link_rates

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    groups = make_groups([range(4)], 2)
    found: list[tuple[list[tuple[int, int]], int]] = []
    for bits_per_s, queue_bytes in DISTURBED:
        before = 0
        if rank == 0:
            controller.disturb(0, 1, bits_per_s, queue_bytes)
            before = controller.dropped(0, 1)
        dist.barrier()
        slow = _slow_links(link_rates(LINKS, groups, 2), lambda at: at // 2)
        found.append((sorted(slow), controller.dropped(0, 1) - before if rank == 0 else 0))
        dist.barrier()
    dist.destroy_process_group()
    return found


def test_links_of_a_disturbed_nic_are_found_and_no_others(emulate: Emulate) -> None:
    topology = Topology(num_nodes=2, ranks_per_node=2, nics_per_node=2, nic_bits_per_s=SLOW_NIC, intra_bits_per_s=None)
    result = emulate(topology, measured, deadline_s=60.0)
    undisturbed, slow, lossy = result.values[0]
    assert undisturbed == ([], 0)
    assert slow == ([(1, 2), (1, 3)], 0)
    assert lossy[0] == [(1, 2), (1, 3)]
    assert lossy[1] > 0, "tc counts what was lost"
    assert [[links for links, _ in each] for each in result.values[1:]] == [[[], slow[0], lossy[0]]] * 3
