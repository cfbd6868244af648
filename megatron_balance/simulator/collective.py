"""Collectives among uneven ranks: the closed forms of `cost.collectives`, each rank and NIC with
what it really carries.

Only groups with a communicator of their own have them (`analysis.wire.is_collective`); the
exchanges of other groups are transfers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_balance.cost.base import Floats, Ints, Link
from megatron_balance.cost.parallel import CollectiveGroup
from megatron_balance.simulator.machine import Machine


@dataclass(frozen=True, slots=True)
class Taken:
    """`seconds` from when the last rank has begun; bytes by resource (`Machine.resources`)."""

    seconds: float
    load: Floats


def ring(group: Ints, block_bytes: float, machine: Machine) -> Taken:
    """A ring all-gather or reduce-scatter of blocks padded to the widest, `block_bytes`, over all
    NICs of a node.
    """
    after = np.roll(group, -1)
    load = _load(group, after, np.full(len(group), (len(group) - 1) * block_bytes), machine)
    counts = np.unique(machine.nics.node(group), return_counts=True)[1]
    here = int(counts.max())
    num_nics = min(machine.nics.per_node, -(-int(counts.min()) // machine.nics.ranks_per_nic))
    inter = Link(machine.inter.alpha_s, machine.inter.bytes_per_s * num_nics)
    step = CollectiveGroup(len(group), here if len(group) % here == 0 else 1, machine.intra, inter).slowest
    return Taken((len(group) - 1) * (step.alpha_s + block_bytes / step.bytes_per_s), load)


def exchange(group: Ints, num_bytes: Floats, machine: Machine) -> Taken:
    """A pairwise all-to-all; transfers inside a node go beside those between nodes.

    `num_bytes` [G, G]: from the rank of a row to that of a column.
    """
    node = machine.nics.node(group)
    src, dst = np.nonzero(~np.eye(len(group), dtype=bool))
    load = _load(group[src], group[dst], num_bytes[src, dst], machine)
    here = np.bincount(node)[node]
    links, nics = np.split(load / machine.capacity(), [2 * machine.num_ranks])
    inside = (here.max() - 1) * machine.intra.alpha_s + links.max()
    between = (len(group) - here.min()) * machine.inter.alpha_s + nics.max()
    return Taken(float(max(inside, between)), load)


def _load(src: Ints, dst: Ints, num_bytes: Floats, machine: Machine) -> Floats:
    uses = machine.resources(src, dst)
    return np.bincount(uses.ravel(), weights=np.repeat(num_bytes, 2), minlength=len(machine.capacity()))
