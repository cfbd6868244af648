"""A slow link and one that loses packets, among links of shaped NICs: found by measuring."""

from __future__ import annotations

import itertools

import pytest

from tests.emulated.conftest import Emulate
from tools.emulated_cluster import Controller, Topology

pytestmark = pytest.mark.dist
pytest.importorskip("torch")

NIC = 80_000_000
LINKS = tuple(itertools.permutations(range(4), 2))
DISTURBED = ((NIC, 16 << 20), (NIC // 8, 16 << 20), (NIC, 20_500))
"""(bit/s, bytes that may wait) of rank 1's NIC: as it was, slow, and with a queue of two packets."""


def measured(rank: int, controller: Controller) -> list[tuple[list[tuple[int, int]], int]]:
    """By disturbance, the slow links, and on rank 0 the packets that were lost."""
    import torch
    import torch.distributed as dist

    from megatron_balance.runtime.groups import make_groups
    from megatron_balance.training.stragglers import link_rates, slow_links

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
        slow = slow_links(link_rates(LINKS, groups, 2), lambda at: at // 2)
        found.append((sorted(slow), controller.dropped(0, 1) - before if rank == 0 else 0))
        dist.barrier()
    dist.destroy_process_group()
    return found


def test_links_of_a_disturbed_nic_are_found_and_no_others(emulate: Emulate) -> None:
    topology = Topology(num_nodes=2, ranks_per_node=2, nics_per_node=2, nic_bits_per_s=NIC, intra_bits_per_s=None)
    result = emulate(topology, measured, deadline_s=60.0)
    undisturbed, slow, lossy = result.values[0]
    assert undisturbed == ([], 0)
    assert slow == ([(1, 2), (1, 3)], 0)
    assert lossy[0] == [(1, 2), (1, 3)]
    assert lossy[1] > 0, "tc counts what was lost"
    assert [[links for links, _ in each] for each in result.values[1:]] == [[[], slow[0], lossy[0]]] * 3
