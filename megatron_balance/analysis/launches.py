"""Seconds of launches, and of merging and packing around them, for the estimate and both engines.

Packing (gathering what is sent) and adding up what arrives run on the compute stream, as in the
executor. What a ring passes on as it came is not packed again, and the gradients of a block that a
ring brought are added once: the launch leaves them as they are, what the next rank sends back is
added to them (`runtime.lower.lowering`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megatron_balance.analysis.machine import Machine
from megatron_balance.cost.base import ADD, Floats, Ints, Link
from megatron_balance.cost.kernel import distinct_rows
from megatron_balance.cost.parallel import CollectiveGroup
from megatron_balance.ir.arrays import Bools, sees
from megatron_balance.ir.columns import Pair
from megatron_balance.ir.program import Kind

STORED = (Kind.OUT, Kind.OUT_GRAD)
"""Kinds that are unpacked where they arrive; queries and keys stay as they came."""

ADDED = (Kind.Q_GRAD, Kind.KV_GRAD)
"""Kinds that are added to what is held."""


class _LaunchSeconds(NamedTuple):
    """Seconds of each launch: `kernel` alone, and `around` it: merging partial outputs, or adding
    up gradients.
    """

    kernel: Floats
    around: Floats

    @property
    def seconds(self) -> Floats:
        return self.kernel + self.around


def launches(
    pairs: Ints, launch: Ints, merging: Floats, machine: Machine, *, backward: bool, walked: Bools | None = None
) -> _LaunchSeconds:
    """Costs of launches [len(merging)].

    `pairs` and `launch` are as in `MachineCost.attend_s`. `merging`: 1 where a forward launch
    merges. `walked`: whether all keys of a launch came in a hop of a ring; None: no launch's did.
    """
    kernel = machine.cost.attend_s(pairs, launch, len(merging), backward=backward)
    if not (backward or merging.any()):
        return _LaunchSeconds(kernel, merging)
    seen = sees(pairs, machine.model.mask)
    pairs, launch = pairs[seen], launch[seen]
    queries = distinct_rows(pairs[:, Pair.QUERY], launch, len(merging))
    if not backward:
        tokens = queries / machine.model.num_heads
        return _LaunchSeconds(kernel, merging * np.array([machine.cost.merge_s(each) for each in tokens.tolist()]))
    keys = distinct_rows(pairs[:, Pair.KEY], launch, len(merging))
    if walked is not None:
        keys = np.where(walked, 0.0, keys)
    sizes = machine.payload.whole()
    num_bytes = queries * sizes[Kind.Q_GRAD] + keys * sizes[Kind.KV_GRAD]
    return _LaunchSeconds(kernel, np.array([ADD * machine.cost.pack_s(size) for size in num_bytes.tolist()]))


class LaunchPrices:
    """Launches of many zones, priced all at once."""

    def __init__(self) -> None:
        self._added: list[tuple[Ints, Ints, Floats, Bools]] = []
        self._count = 0

    def add(self, pairs: Ints, launch: Ints, merging: Floats, walked: Bools) -> int:
        """Launches, as for `launches`; the number of the first."""
        first = self._count
        self._added.append((pairs, launch + first, merging, walked))
        self._count += len(merging)
        return first

    def seconds(self, machine: Machine) -> tuple[Floats, Floats]:
        """Of each launch, forward and backward."""
        if not self._count:
            return np.zeros(0), np.zeros(0)
        pairs, launch, merging, walked = (np.concatenate(each) for each in zip(*self._added, strict=True))
        forward, backward = (
            launches(pairs, launch, merging, machine, backward=b, walked=walked).seconds for b in (False, True)
        )
        return forward, backward


class Taken(NamedTuple):
    """`seconds` from when the last rank has begun; bytes by resource (`Machine.resources`)."""

    seconds: float
    load: Floats


def ring_collective(group: Ints, block_bytes: float, machine: Machine) -> Taken:
    """A ring all-gather or reduce-scatter of blocks padded to the widest, `block_bytes`, over all
    NICs of a node.
    """
    after = np.roll(group, -1)
    load = _collective_load(group, after, np.full(len(group), (len(group) - 1) * block_bytes), machine)
    counts = np.unique(machine.nics.node(group), return_counts=True)[1]
    here = int(counts.max())
    num_nics = min(machine.nics.per_node, -(-int(counts.min()) // machine.nics.ranks_per_nic))
    inter = Link(machine.inter.alpha_s, machine.inter.bytes_per_s * num_nics)
    step = CollectiveGroup(len(group), here if len(group) % here == 0 else 1, machine.intra, inter).slowest
    return Taken((len(group) - 1) * (step.alpha_s + block_bytes / step.bytes_per_s), load)


def all_to_all(group: Ints, num_bytes: Floats, machine: Machine) -> Taken:
    """A pairwise all-to-all; transfers inside a node go beside those between nodes.

    `num_bytes` [G, G]: from the rank of a row to that of a column.
    """
    node = machine.nics.node(group)
    src, dst = np.nonzero(~np.eye(len(group), dtype=bool))
    load = _collective_load(group[src], group[dst], num_bytes[src, dst], machine)
    here = np.bincount(node)[node]
    links, nics = np.split(load / machine.capacity(), [2 * machine.num_ranks])
    inside = (here.max() - 1) * machine.intra.alpha_s + links.max()
    between = (len(group) - here.min()) * machine.inter.alpha_s + nics.max()
    return Taken(float(max(inside, between)), load)


def _collective_load(src: Ints, dst: Ints, num_bytes: Floats, machine: Machine) -> Floats:
    uses = machine.resources(src, dst)
    return np.bincount(uses.ravel(), weights=np.repeat(num_bytes, 2), minlength=len(machine.capacity()))
