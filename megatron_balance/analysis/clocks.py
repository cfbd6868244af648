"""The clocks of all ranks in a phase, and transfers and collectives that any zone may ask for."""

import heapq
from dataclasses import dataclass, field

import numpy as np

from megatron_balance.analysis.machine import Machine
from megatron_balance.analysis.tables import ADDED, STORED, Tables, ZoneTable, all_to_all, ring_collective
from megatron_balance.analysis.trace_format import TrackSpan
from megatron_balance.analysis.wire import is_collective
from megatron_balance.cost.base import ADD
from megatron_balance.ir.arrays import Bools, Floats, Ints
from megatron_balance.ir.columns import Message
from megatron_balance.ir.program import KEY_SIDE, Kind, Policy

# Traffic classes (`compile.order`).
COPIED, MOVED = range(2)

# Streams of a traffic class; the last one is that of collectives.
INTRA, INTER, DISPATCH, COMBINE, TOGETHER = range(5)

# By kind: whether what arrives is unpacked, and whether it is added to what is held.
_STORED, _ADDED = (np.isin(np.arange(len(Kind)), kinds) for kinds in (STORED, ADDED))


class Clocks:
    """The clocks of all ranks. All arrays are [num_ranks] unless said.

    `done`: when the compute stream has done all it was given; `ready`: when it had come to the last
    start of what is copied; `free` [traffic class, link, num_ranks]: when a stream is free;
    `opened`: when what a rank attends to is all there; `late`, `late_s`: when the last of what no
    launch waits for comes, and how long it takes to unpack. `share` [2, num_nics]: the part of each
    NIC, out and in, that is free for what comes next; `nic_bytes`: what has gone over it since that
    was set. `issued`: seconds that each host has spent issuing, which its device waits for where the
    host is `behind` (`hosts_behind`).
    """

    def __init__(
        self, tables: Tables, policy: Policy, enter_s: Floats, *, backward: bool, behind: Floats | None = None
    ) -> None:
        self.machine, self.plan, self.policy, self.backward = tables.machine, tables.plan, policy, backward
        self.call_s, self.cost, ranks = self.machine.cost.call_s, self.machine.cost, self.machine.num_ranks
        self.slow = self.machine.slow()
        self.entered, self.done, self.ready = enter_s, enter_s.copy(), enter_s.copy()
        self.opened, self.late, self.late_s, self.busy = np.zeros((4, ranks))
        self.issued, self.behind = np.zeros(ranks), behind
        self.free = np.zeros((2, 5, ranks))
        self.capacity = self.machine.capacity()
        self.bytes_moved = np.zeros(len(self.capacity))
        # Whether bytes are counted; an estimate has no use for them.
        self.counts = True
        self.share, self.nic_bytes = np.ones((2, self.machine.num_nics)), np.zeros((2, self.machine.num_nics))

    def issue(
        self, ranks: Ints, num_calls: Ints | int, num_launches: Ints | Bools | int, num_messages: Ints | int = 0
    ) -> None:
        """Let hosts issue calls and launches; the devices wait for hosts that are behind."""
        host = self.machine.host
        if not host.is_modelled:
            return
        self.issued[ranks] += host.call_s * num_calls + host.launch_s * num_launches + host.message_s * num_messages
        if self.behind is not None:
            reached = (self.behind * self.issued)[ranks]
            self.done[ranks] = np.maximum(self.done[ranks], reached)
            self.ready[ranks] = np.maximum(self.ready[ranks], reached)

    def open(self, ranks: Ints, waits: Bools, *, sends: bool = False) -> None:
        """Wait for what the remap brings, where it is needed; `sends`: to be sent on, too."""
        at = ranks[waits]
        self.done[at] = np.maximum(self.done[at], self.opened[at])
        if sends:
            self.ready[at] = np.maximum(self.ready[at], self.done[at])

    def settle(self, ranks: Ints) -> None:
        """Wait for all that is still to come, and unpack it."""
        self.done[ranks] = np.maximum(self.done[ranks], self.late[ranks]) + self.late_s[ranks]
        self.busy[ranks] += self.late_s[ranks]
        self.late_s[ranks] = 0.0

    def pack_s(self, num_bytes: Floats) -> Floats:
        """Seconds of packing, elementwise; nothing takes none."""
        packed, there = np.zeros(num_bytes.shape), num_bytes > 0
        if there.any():
            sizes, place = np.unique(num_bytes[there], return_inverse=True)  # few sizes, a call for each
            packed[there] = np.array([self.cost.pack_s(size) for size in sizes.tolist()])[place]
        return packed

    def carry(self, transfers: "_Transfers", posted: Floats, traffic_class: int) -> Floats:
        """Run transfers, each when both ends are `posted` and free; when each rank has all of its."""
        machine = self.machine
        arrived = np.zeros(machine.num_ranks)
        src, dst = transfers.src, transfers.dst
        if not len(src):
            return arrived
        free = self.free[traffic_class]
        across = machine.crosses(src, dst)
        link = np.where(across, INTER, INTRA)
        begin = [np.maximum(posted[end], free[link, end]) for end in (src, dst)]
        begin_s = np.maximum(*begin) + self.call_s
        stop = transfers.ends(begin_s, machine, self.share)
        self.count(src, dst, transfers.num_bytes, transfers.routed)
        for end in (src, dst):
            np.maximum.at(free, (link, end), stop)
        np.maximum.at(arrived, dst, free[link, dst])
        return arrived

    def count(self, src: Ints, dst: Ints, num_bytes: Floats, routed: Bools) -> None:
        """Add the bytes that transfers [n] move over each resource."""
        if not self.counts:
            return
        machine, load = self.machine, np.zeros(len(self.capacity))
        per_node, first = machine.nics.per_node, 2 * machine.num_ranks
        np.add.at(load, machine.resources(src, dst)[~routed], num_bytes[~routed, None])
        piece = num_bytes[routed, None] / per_node
        for part, ranks in enumerate((src[routed, None], dst[routed, None])):
            np.add.at(load, part * machine.num_ranks + ranks, piece * (per_node - 1))
            nics = machine.nics.node(ranks) * per_node + np.arange(per_node)
            np.add.at(load, first + part * machine.num_nics + nics, piece)
        self.bytes_moved += load
        self.nic_bytes += load[first:].reshape(2, -1)

    def routed(self, index: int, tokens: Ints | Floats) -> Bools:
        """Mark the transfers of a zone, or of the remap, that go over all NICs: bool, as `tokens`."""
        routing = self.plan.routing
        if routing is None or not self.is_routed(index):
            return np.zeros(tokens.shape, dtype=bool)
        return tokens >= routing.min_tokens

    def row_bytes(self, kind: Kind) -> int:
        """Bytes of a token, all heads."""
        heads = self.plan.num_kv_heads if kind in KEY_SIDE else self.plan.num_heads
        return heads * int(self.machine.payload.whole()[kind])

    def exchange(self, messages: Ints, index: int, traffic_class: int) -> tuple[Floats, Floats, Floats]:
        """One exchange: when each rank began, when it has all, how long unpacking that takes."""
        parcels = self.machine.payload.parcels(messages)
        routed = self.routed(index, parcels.tokens) & self.machine.crosses(parcels.src, parcels.dst)
        sent = _Transfers(
            parcels.src, parcels.dst, np.where(routed, parcels.packed, parcels.direct).astype(np.float64), routed
        )
        ranks = np.arange(self.machine.num_ranks)
        out = np.bincount(parcels.src, weights=parcels.direct, minlength=len(ranks))
        packed = self.pack_s(out) * self.slow
        calls, num_messages = self._calls(sent)
        self.issue(ranks, calls, packed > 0, num_messages)
        self.done += packed
        self.busy += packed
        # Results are sent when they are there; who sends none, and who sends inputs, began before.
        posted = np.where(out > 0, self.done, self.entered) if traffic_class == MOVED else self.ready + packed
        arrived = self.carry(sent, posted, traffic_class)
        num_bytes, kinds = np.add(*self.machine.payload.tensors(messages)), messages[:, Message.KIND]
        stored, added = (
            self.pack_s(np.bincount(messages[:, Message.DST], weights=num_bytes * those[kinds], minlength=len(ranks)))
            for those in (_STORED, _ADDED)
        )
        placed = (stored + ADD * added) * self.slow
        self.issue(ranks, 0, placed > 0)
        return posted, arrived, placed

    def _calls(self, transfers: "_Transfers") -> tuple[Ints, Ints]:
        # Group calls of each rank, and their messages: one call for the transfers inside its node,
        # one for those between nodes, and two more legs of those that are routed, in a piece for
        # each NIC; what it passes on for others left out.
        machine = self.machine
        calls = np.zeros((2, machine.num_ranks), dtype=np.int64)
        num_messages = np.zeros(machine.num_ranks, dtype=np.int64)
        if not machine.host.is_modelled:
            return calls[0], num_messages
        crosses = machine.crosses(transfers.src, transfers.dst).astype(np.int64)
        num_pieces = np.where(transfers.routed, machine.nics.per_node, 1)
        for end in (transfers.src, transfers.dst):
            np.maximum.at(calls, (crosses, end), 1 + transfers.routed)
            np.add.at(num_messages, end, num_pieces)
        return calls.sum(axis=0), num_messages

    def is_routed(self, index: int) -> bool:
        """Whether transfers of a zone, or of the remap, between nodes go over all NICs."""
        routing = self.plan.routing
        return routing is not None and index in routing.zones and self.machine.nics.per_node > 1

    def is_together(self, table: ZoneTable) -> bool:
        """Whether the zone's collectives are one call each: not routed, of a communicator."""
        ranks, machine = tuple(table.ranks.tolist()), self.machine
        return not self.is_routed(table.index) and is_collective(ranks, machine.num_ranks, machine.cluster.node_size)

    def all_together(
        self, table: ZoneTable, posted: Floats, num_bytes: Floats, traffic_class: int, *, ring: bool
    ) -> Floats:
        """When each rank of the zone has what a collective, or many transfers, bring it."""
        ranks, machine = table.ranks, self.machine
        if not self.is_together(table):
            src, dst = np.nonzero(num_bytes * ~np.eye(len(ranks), dtype=bool))
            src, dst, sizes = ranks[src], ranks[dst], num_bytes[src, dst]
            transfers = _Transfers(src, dst, sizes, machine.crosses(src, dst) & self.is_routed(table.index))
            calls, num_messages = self._calls(transfers)
            self.issue(np.arange(machine.num_ranks), calls, 0, num_messages)
            return self.carry(transfers, posted, traffic_class)[ranks]
        self.issue(ranks, 1, 0)
        taken = (
            ring_collective(ranks, float(num_bytes.max()), machine) if ring else all_to_all(ranks, num_bytes, machine)
        )
        self.bytes_moved += taken.load
        self.nic_bytes += taken.load[2 * machine.num_ranks :].reshape(2, -1)
        # Collectives of both traffic classes have one stream (`compile.order.collective_stream`).
        begin = max(posted[ranks].max(), self.free[:, TOGETHER, ranks].max())
        stop = begin + self.call_s + taken.seconds
        self.free[traffic_class, TOGETHER, ranks] = stop
        return np.full(len(ranks), stop)


@dataclass(slots=True)
class _Transfers:
    """Point-to-point transfers of one exchange, [n] each; which of them are `routed`."""

    src: Ints
    dst: Ints
    num_bytes: Floats
    routed: Bools

    def ends(self, begin_s: Floats, machine: Machine, share: Floats) -> Floats:
        # When each [n] ends. `share` [2, num_nics]: the free part of each NIC, out and in.
        direct, stop = ~self.routed, np.zeros(len(self.src))
        src, dst, num_bytes = self.src[direct], self.dst[direct], self.num_bytes[direct]
        nics, intra, inter = machine.nics, machine.intra, machine.inter
        across, nic_s = nics.node(src) != nics.node(dst), share * inter.bytes_per_s
        ready = begin_s[direct] + np.where(across, inter.alpha_s, intra.alpha_s)
        # A link has an even number, a NIC an odd one: they are never one resource.
        if len(src):
            each = [
                _fair_ends(
                    np.where(across, 2 * nics.nic(end) + 1, 2 * end),
                    num_bytes,
                    ready,
                    np.where(across, rate[nics.nic(end)], intra.bytes_per_s),
                )
                for end, rate in zip((src, dst), nic_s, strict=True)
            ]
            stop[direct] = np.maximum(*each)
        if self.routed.any():
            stop[self.routed] = self._by_proxies(begin_s[self.routed], machine, nic_s)
        return stop

    def _by_proxies(self, begin_s: Floats, machine: Machine, nic_s: Floats) -> Floats:
        # When routed transfers end: to the source's proxies, between nodes, from the target's.
        src, dst, num_bytes = self.src[self.routed], self.dst[self.routed], self.num_bytes[self.routed]
        nics, intra, inter, call_s = machine.nics, machine.intra, machine.inter, machine.cost.call_s
        # All NICs of a node have the same to move, so its slowest one is looked at.
        piece, inside = num_bytes / nics.per_node, np.full(len(src), intra.bytes_per_s)
        passed_on, slowest = piece * (nics.per_node - 1), nic_s.reshape(2, -1, nics.per_node).min(axis=2)
        at = _fair_ends(src, passed_on, begin_s + intra.alpha_s, inside) + call_s + inter.alpha_s
        nodes = (nics.node(end) for end in (src, dst))
        each = [_fair_ends(node, piece, at, rate[node]) for node, rate in zip(nodes, slowest, strict=True)]
        return _fair_ends(dst, passed_on, np.maximum(*each) + call_s + intra.alpha_s, inside)


def _fair_ends(resource: Ints, num_bytes: Floats, begin_s: Floats, rates: Floats) -> Floats:
    """End of each transfer [n] if it used one resource only, which those under way share evenly;
    `rates`: of the resource of each.

    As much of every one is moved at any time, so they end in the order of what had been moved when
    they began plus what they have to move.
    """
    order = np.lexsort((begin_s, resource))
    ordered = resource[order]
    first = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1]))
    begin, size, rate = (each[order] for each in (begin_s, num_bytes, rates))
    found = begin + size / rate
    # Those that share their resource are told one by one.
    several = np.diff(first, append=len(order)) > 1
    bounds = zip(first[several].tolist(), np.append(first, len(order))[1:][several].tolist(), strict=True)
    for start, stop in bounds:
        found[start:stop] = _even_ends(begin[start:stop].tolist(), size[start:stop].tolist(), float(rate[start]))
    ends = np.empty(len(order))
    ends[order] = found
    return ends


def _even_ends(begin_s: list[float], num_bytes: list[float], rate: float) -> list[float]:
    # `_fair_ends` on one resource; `begin_s` rises.
    ends = [0.0] * len(begin_s)
    # (bytes that each of them will have moved when this one ends, which)
    under_way: list[tuple[float, int]] = []
    now = moved = 0.0
    for number, (coming_s, size) in enumerate(zip(begin_s, num_bytes, strict=True)):
        while under_way:
            done_s = now + (under_way[0][0] - moved) * len(under_way) / rate
            if done_s > coming_s:
                moved += max(0.0, coming_s - now) * rate / len(under_way)
                break
            now = done_s
            moved, first = heapq.heappop(under_way)
            ends[first] = now
        now = max(now, coming_s)
        heapq.heappush(under_way, (moved + size, number))
    for left in range(len(under_way), 0, -1):
        upto, first = heapq.heappop(under_way)
        now, moved = now + (upto - moved) * left / rate, upto
        ends[first] = now
    return ends


@dataclass(slots=True)
class Outcome:
    """One phase as it went, by rank: when it is done and how long it computed; by resource
    (`Machine.resources`): bytes. `occupied`: what streams did, where that was traced.
    """

    end_s: Floats
    compute_s: Floats
    bytes_moved: Floats
    occupied: list[TrackSpan] = field(default_factory=list[TrackSpan])


def hosts_behind(total_s: Floats, end_s: Floats) -> Floats:
    """Mark hosts that take longer for a layer than it takes without them: 1, the others 0.

    `total_s`: to issue it, by rank; `end_s`: when ranks are done with it. Ranks go through layers in
    step, at the pace of the slowest.
    """
    return (total_s > end_s.max(initial=0.0)).astype(np.float64)
