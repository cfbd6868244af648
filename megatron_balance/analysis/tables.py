"""Zones as tables for `analysis.rounds`: seconds of every launch and tokens or bytes of every
transfer, without the ops.

Launches and traffic of a zone are what its pattern says (`CommPattern.rounds`); here launches get
prices, and the remap takes what owners send for holders.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from megatron_balance.analysis.machine import Machine
from megatron_balance.compile import remap
from megatron_balance.cost.base import ADD, Link
from megatron_balance.cost.kernel import distinct_rows
from megatron_balance.cost.parallel import CollectiveGroup
from megatron_balance.ir.arrays import Bools, Floats, Ints, sees
from megatron_balance.ir.columns import Message, Pair, RemoteHeld, Transfer
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.ir.program import Kind
from megatron_balance.patterns import base, by_pattern, pattern_of
from megatron_balance.patterns.sends import messages_of

# Seconds of launches, and of merging and packing around them, for the estimate and both engines.
#
# Packing (gathering what is sent) and adding up what arrives run on the compute stream, as in the
# executor. What a ring passes on as it came is not packed again, and the gradients of a block that a
# ring brought are added once: the launch leaves them as they are, what the next rank sends back is
# added to them (`runtime.lower.lowering`).

# Kinds that are unpacked where they arrive; queries and keys stay as they came.
STORED = (Kind.OUT, Kind.OUT_GRAD)

# Kinds that are added to what is held.
ADDED = (Kind.Q_GRAD, Kind.KV_GRAD)


class _LaunchSeconds(NamedTuple):
    """Seconds of each launch: `kernel` alone; `around` it, merging outputs or adding gradients."""

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
    """A ring all-gather or reduce-scatter of padded blocks over all NICs of a node."""
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
    between = (len(group) - here.min()) * machine.inter.alpha_s + nics.max() / machine.cluster.all_to_all_efficiency
    return Taken(float(max(inside, between)), load)


def _collective_load(src: Ints, dst: Ints, num_bytes: Floats, machine: Machine) -> Floats:
    uses = machine.resources(src, dst)
    return np.bincount(uses.ravel(), weights=np.repeat(num_bytes, 2), minlength=len(machine.capacity()))


def _walked(rounds: base.ZoneRounds) -> Bools:
    # Mark the launches of a zone whose keys came in a hop round its ranks: from round 1 on.
    walked, of_round = np.zeros(len(rounds.launches.merging), dtype=bool), rounds.launches.of_round
    if isinstance(rounds.traffic, base.HeadsThenHops) and rounds.traffic.hops is not None:
        walked[of_round[:, 1:]] = True
        walked[of_round[:, 0]] = False
    return walked


@dataclass(slots=True)
class ZoneTable:
    """One zone. `launch` [G, rounds]: the launch of each rank in each round; `forward_s`,
    `backward_s`: its seconds, same shape.

    `traffic`: None where nothing moves. `waits`: ranks [G] whose first launch needs something that
    the remap brings; `waits_next`: whose second one does.
    """

    index: int
    ranks: Ints
    launch: Ints
    traffic: base.ZoneTraffic | None
    waits: Bools
    waits_next: Bools
    forward_s: Floats = field(default_factory=lambda: np.zeros((0, 0)))
    backward_s: Floats = field(default_factory=lambda: np.zeros((0, 0)))

    def part(self, start: int, size: int) -> "ZoneTable":
        """`size` ranks in a row of the zone, without traffic."""
        own = slice(start, start + size)
        waits, waits_next = self.waits[own], self.waits_next[own]
        seconds = self.forward_s[own], self.backward_s[own]
        return ZoneTable(self.index, self.ranks[own], self.launch[own], None, waits, waits_next, *seconds)


class Tables:
    """All zones of a plan, or the `chosen` ones; the costs of all their launches are asked for at
    once. Owners make first hops for holders only if all are chosen.
    """

    def __init__(self, plan: MicrobatchPlan, machine: Machine, chosen: Sequence[int] | None = None) -> None:
        self.plan, self.machine = plan, machine
        self.zones: list[ZoneTable] = []
        self.first_hops: list[Ints] = [np.empty((0, Message.WIDTH), dtype=np.int64)]
        """Messages that the remap's first exchange carries beside those of the moves: first hops
        that owners make.
        """
        chosen = range(len(plan.zones)) if chosen is None else chosen
        if not chosen:
            return
        context, remote, prices = base.Context.of(plan), remap.remote_in(plan), LaunchPrices()
        for index in chosen:
            zone = plan.zones[index]
            rounds = pattern_of(zone).rounds(zone, context)
            holders = remote[remote[:, RemoteHeld.ZONE] == index, RemoteHeld.HOLDER] if len(remote) else remote[:, 0]
            waits = np.isin(rounds.ranks, holders)
            own = rounds.launches
            launch = own.of_round + prices.add(own.pairs, own.launch, own.merging, _walked(rounds))
            self.zones.append(ZoneTable(index, rounds.ranks, launch, rounds.traffic, waits, waits.copy()))
        for pattern, zones in by_pattern(plan.zones) if len(remote) and len(self.zones) == len(plan.zones) else ():
            self._remap_first_hops(pattern.first_hops(zones, context, remote))
        forward, backward = prices.seconds(machine)
        for table in self.zones:
            factor = machine.slow()[table.ranks][:, None]
            table.forward_s, table.backward_s = forward[table.launch] * factor, backward[table.launch] * factor

    def _remap_first_hops(self, hops: base.FirstHops) -> None:
        # Leave to the remap the first hops that owners make for holders.
        self.first_hops.append(messages_of(0, hops.rows))
        for table in self.zones:
            of_zone = hops.zones == table.index
            if not of_zone.any():
                continue
            targets = np.isin(table.ranks, hops.rows[of_zone, Transfer.DST])
            spared = hops.spared()[of_zone]
            match table.traffic:
                case base.HeadsThenHops(groups, base.HopByHop(forward, backward)):
                    forward = forward.astype(np.float64)  # a copy
                    table.traffic = base.HeadsThenHops(groups, base.HopByHop(forward, backward))
                    place = np.zeros(self.plan.num_ranks, dtype=np.int64)
                    place[table.ranks] = np.arange(len(table.ranks))
                    np.add.at(forward[:, 1], place[spared[:, Message.SRC]], spared[:, Message.TOKENS])
                    table.waits_next |= targets
                case base.PointToPoint(inputs, outputs):
                    table.traffic = base.PointToPoint(np.concatenate([inputs, spared]), outputs)
                    table.waits |= targets
                case _:
                    raise AssertionError("first hops of a zone whose exchanges are collectives")
