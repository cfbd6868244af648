"""Rule `paper`: Algorithms 1 and 2 of Zeppelin as printed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np

from megatron_balance.ir.arrays import Ints
from megatron_balance.ir.cluster import Cluster
from megatron_balance.solvers.groups import Placement
from megatron_balance.solvers.packing import least_loaded


def place(lengths: Sequence[int], cluster: Cluster, capacity: int) -> Placement:
    """The ranks of each sequence: Algorithm 1 over nodes, then Algorithm 2 on each node."""
    # Stable: ties go to the lower sequence.
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    node_of, across = _inter_node(lengths, order, cluster, capacity)
    placement: list[tuple[int, ...]] = [()] * len(lengths)
    held = np.zeros(cluster.num_nodes)
    # Their ranks, and the nodes as an index.
    by_nodes: dict[tuple[int, ...], tuple[tuple[int, ...], Ints]] = {}
    for seq, nodes in across.items():
        if nodes not in by_nodes:
            by_nodes[nodes] = tuple(chain.from_iterable(cluster.ranks_of(node) for node in nodes)), np.array(nodes)
        placement[seq], index = by_nodes[nodes]
        held[index] += lengths[seq] / len(nodes)
    own: list[list[int]] = [[] for _ in range(cluster.num_nodes)]
    for seq, node in node_of.items():
        own[node].append(seq)
    for node in range(cluster.num_nodes):
        base = -(-int(held[node]) // cluster.node_size)
        first = cluster.ranks_of(node).start
        for seq, devices in _intra_node(lengths, own[node], cluster.node_size, capacity, base).items():
            placement[seq] = tuple(first + device for device in devices)
    return placement


def _inter_node(
    lengths: Sequence[int], order: Sequence[int], cluster: Cluster, capacity: int
) -> tuple[dict[int, int], dict[int, tuple[int, ...]]]:
    """Algorithm 1: the node of each shorter sequence, and the nodes of each longer one."""
    num_nodes, node_capacity = cluster.num_nodes, cluster.node_size * capacity
    # On one node nothing is between nodes.
    threshold = node_capacity if num_nodes > 1 else node_capacity + 1
    zone = _InterNodeZone(lengths, num_nodes, node_capacity)
    count, left = 0, sum(lengths)
    # The sequence, in order, that finds no node as long as all before it go to the least loaded
    # node each.
    stuck = -1
    while True:
        while count < len(order) and lengths[order[count]] >= threshold:
            if not zone.put(order[count]):
                stuck = -1
            left -= lengths[order[count]]
            count += 1
        if count > stuck and sum(zone.loads) + left <= num_nodes * node_capacity:
            short = order[count:]
            chosen = least_loaded([lengths[seq] for seq in short], zone.loads, node_capacity)
            if len(chosen) == len(short):
                return dict(zip(short, chosen, strict=True)), zone.nodes
            stuck = count + len(chosen)
        if count == len(order):
            # Only rounding passes the capacity.
            return {}, zone.nodes
        threshold = lengths[order[count]]


class _InterNodeZone:
    """Lines 6-10: each sequence evenly over ceil(|s| / s_avg) empty nodes, s_avg = total / N."""

    def __init__(self, lengths: Sequence[int], num_nodes: int, node_capacity: int) -> None:
        self.lengths, self.node_capacity, self.total = lengths, node_capacity, sum(lengths)
        self.nodes: dict[int, tuple[int, ...]] = {}
        self.loads = [0] * num_nodes
        self.held = 0
        self.everywhere = False

    def put(self, seq: int) -> bool:
        """Place a sequence; whether it went to the least loaded node alone."""
        num_nodes, loads = len(self.loads), self.loads
        self.held += self.lengths[seq]
        # ceil(|s| / s_avg) with s_avg = total / N, in whole numbers.
        wanted = -(-self.lengths[seq] * num_nodes // self.total)
        if not self.everywhere:
            by_load = (
                [loads.index(min(loads))] if wanted == 1 else sorted(range(num_nodes), key=loads.__getitem__)
            )  # ties: the lower node
            if self._fits(seq, by_load[:wanted]):
                return wanted == 1
            if self._fits(seq, range(num_nodes)):
                return False
            self.everywhere = True
            self.nodes = dict.fromkeys(self.nodes, tuple(range(num_nodes)))
        self.nodes[seq] = tuple(range(num_nodes))
        self.loads = [min(self.node_capacity, -(-self.held // num_nodes))] * num_nodes
        return False

    def _fits(self, seq: int, nodes: Sequence[int]) -> bool:
        part = -(-self.lengths[seq] // len(nodes))
        if any(self.loads[node] + part > self.node_capacity for node in nodes):
            return False
        self.nodes[seq] = tuple(sorted(nodes))
        for node in nodes:
            self.loads[node] += part
        return True


def _intra_node(
    lengths: Sequence[int], order: Sequence[int], num_devices: int, capacity: int, base: int
) -> dict[int, list[int]]:
    """Algorithm 2: devices of each sequence of a node. `base`: tokens of others on each."""
    threshold = capacity
    while True:
        split, loads = _fragments(
            [seq for seq in order if lengths[seq] >= threshold], lengths, num_devices, capacity, base
        )
        local = [seq for seq in order if lengths[seq] < threshold]
        if sum(loads) + sum(lengths[seq] for seq in local) <= num_devices * capacity:
            chosen = least_loaded([lengths[seq] for seq in local], loads, capacity)
            if len(chosen) == len(local):
                return split | {seq: [device] for seq, device in zip(local, chosen, strict=True)}
        if not local:
            return split
        threshold = lengths[local[0]]


def _fragments(
    seqs: Sequence[int], lengths: Sequence[int], num_devices: int, capacity: int, base: int
) -> tuple[dict[int, list[int]], list[int]]:
    """Lines 7-12: each sequence into ceil(|s|^2 / c_avg) fragments, dealt round-robin."""
    squares = sum(lengths[seq] ** 2 for seq in seqs)
    everywhere = list(range(num_devices))
    split: dict[int, list[int]] = {}
    loads = [base] * num_devices
    turn = 0
    for seq in seqs:
        # ceil(|s|^2 / c_avg) with c_avg the mean square of a device.
        wanted = -(-(lengths[seq] ** 2) * num_devices // squares)
        devices = [(turn + i) % num_devices for i in range(wanted)]
        if any(loads[device] + -(-lengths[seq] // wanted) > capacity for device in devices):
            devices = everywhere
        part = -(-lengths[seq] // len(devices))
        if any(loads[device] + part > capacity for device in devices):
            return dict.fromkeys(seqs, everywhere), [
                min(capacity, base + -(-sum(lengths[seq] for seq in seqs) // num_devices))
            ] * num_devices
        split[seq] = sorted(devices)
        for device in devices:
            loads[device] += part
        turn += len(devices)
    return split, loads
