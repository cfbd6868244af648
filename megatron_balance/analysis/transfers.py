"""When transfers from rank to rank end that share links and NICs, for the estimate and the round
engine.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from megatron_balance.analysis.machine import Machine
from megatron_balance.cost.base import Floats, Ints
from megatron_balance.ir.arrays import Bools


@dataclass(slots=True)
class Transfers:
    """Point-to-point transfers of one exchange, [n] each; which of them are `routed`."""

    src: Ints
    dst: Ints
    num_bytes: Floats
    routed: Bools

    def ends(self, begin_s: Floats, machine: Machine, share: Floats) -> Floats:
        """When each [n] ends. `share` [2, num_nics]: the free part of each NIC, out and in."""
        direct, stop = ~self.routed, np.zeros(len(self.src))
        src, dst, num_bytes = self.src[direct], self.dst[direct], self.num_bytes[direct]
        nics, intra, inter = machine.nics, machine.intra, machine.inter
        across, nic_s = nics.node(src) != nics.node(dst), share * inter.bytes_per_s
        ready = begin_s[direct] + np.where(across, inter.alpha_s, intra.alpha_s)
        # A link has an even number, a NIC an odd one: they are never one resource.
        each = [
            fair_ends(
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
        """When routed transfers end: to the proxies of the source, between the nodes, from those of
        the target. All NICs of a node have the same to move, so its slowest one is looked at.
        """
        src, dst, num_bytes = self.src[self.routed], self.dst[self.routed], self.num_bytes[self.routed]
        nics, intra, inter, call_s = machine.nics, machine.intra, machine.inter, machine.cost.call_s
        piece, inside = num_bytes / nics.per_node, np.full(len(src), intra.bytes_per_s)
        passed_on, slowest = piece * (nics.per_node - 1), nic_s.reshape(2, -1, nics.per_node).min(axis=2)
        at = fair_ends(src, passed_on, begin_s + intra.alpha_s, inside) + call_s + inter.alpha_s
        nodes = (nics.node(end) for end in (src, dst))
        each = [fair_ends(node, piece, at, rate[node]) for node, rate in zip(nodes, slowest, strict=True)]
        return fair_ends(dst, passed_on, np.maximum(*each) + call_s + intra.alpha_s, inside)


def fair_ends(resource: Ints, num_bytes: Floats, begin_s: Floats, rates: Floats) -> Floats:
    """End of each transfer [n] if it used one resource only, which those under way share evenly;
    `rates`: of the resource of each.

    As much of every one is moved at any time, so they end in the order of what had been moved when
    they began plus what they have to move.
    """
    order = np.lexsort((begin_s, resource))
    bounds = np.flatnonzero(np.diff(resource[order], prepend=-1, append=-1)).tolist()
    begin, size, rate = (each[order].tolist() for each in (begin_s, num_bytes, rates))
    found: list[float] = []
    for first, last in pairwise(bounds):
        found += _even_ends(begin[first:last], size[first:last], rate[first])
    ends = np.empty(len(order))
    ends[order] = found
    return ends


def _even_ends(begin_s: list[float], num_bytes: list[float], rate: float) -> list[float]:
    """`fair_ends` on one resource; `begin_s` rises."""
    if len(begin_s) == 1:
        return [begin_s[0] + num_bytes[0] / rate]
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
