"""The clocks of all ranks in one phase of a layer, zone by zone (`analysis.estimate`).

The rules are those of `simulator.rounds`; here the ranks of a group that exchanges heads are in step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_balance.analysis.estimate.times import Bulk, PricedMachine, RingHop, WaveTimes, ZoneTimes, by_rank
from megatron_balance.cost.base import ADD, Floats, Ints
from megatron_balance.ir.arrays import as_array
from megatron_balance.ir.columns import Move
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.ir.program import KEY_SIDE, Kind

COPIED, MOVED = range(2)

_SETTLED = 5
"""Rounds of a ring after which each takes as long as the one before."""


class _RingHops:
    """Hops round a ring of groups, `step` places on; `free`: when the links of each group are."""

    def __init__(self, zone: ZoneTimes, hop: RingHop, step: int, free: Floats, sharing: float = 1.0) -> None:
        self.there_s, self.next_s = sharing * hop.there_s, sharing * hop.next_s
        place = np.arange(zone.rounds)
        self.there, self.before = (place + step) % zone.rounds, (place - step) % zone.rounds
        self.free = zone.by_group(free)

    def carry(self, posted: Floats) -> Floats:
        """When each group has what the one before it sends once both are at it."""
        begin = np.maximum(posted, self.free)
        begin = np.maximum(begin, begin[self.there])
        stop = begin + self.there_s
        arrived = stop[self.before]
        self.free = np.maximum(stop, arrived) - self.there_s + self.next_s
        return arrived


class ZoneClocks:
    """By rank: when the compute stream is done, when it had come to the last start of copied rows,
    when each class of exchanges is free, and what is still to come and to be placed.
    """

    def __init__(self, plan: MicrobatchPlan, machine: PricedMachine, enter_s: Floats) -> None:
        self.plan, self.machine = plan, machine
        self.done, self.ready = enter_s.copy(), enter_s.copy()
        self.free = np.zeros((2, plan.num_ranks))
        self.opened, self.late, self.late_s = np.zeros((3, plan.num_ranks))
        contention = machine.cost.contention
        self.drag = (
            contention.slowdown(intra=True, inter=False) - 1.0,
            contention.slowdown(intra=False, inter=True) - 1.0,
        )

    def forward(self, zones: Sequence[ZoneTimes]) -> float:
        """Seconds until the last rank has all its outputs."""
        self._remap((Kind.Q, Kind.KV), remap_in=True)
        for zone in zones:
            self._bulk(zone, zone.inputs, COPIED)
            if zone.waves is not None:
                self._waves(zone, zone.waves)
            elif zone.hop is None:
                self.done[zone.at] += zone.first[0]
            else:
                self._ring(zone, zone.hop)
            self._bulk(zone, zone.outputs, MOVED)
        return self._end((Kind.OUT,))

    def backward(self, zones: Sequence[ZoneTimes], *, replay: bool) -> float:
        """Seconds until the last rank has all its gradients."""
        self._remap((Kind.OUT_GRAD, Kind.Q, Kind.KV) if replay else (Kind.OUT_GRAD,), remap_in=True)
        for zone in reversed(zones):
            self._bulk(zone, zone.output_grads, COPIED)
            if replay:
                self._bulk(zone, zone.again, COPIED)
            if zone.waves is not None:
                self._waves_back(zone, zone.waves, replay=replay)
            elif zone.hop is None or zone.back is None:
                self.done[zone.at] += zone.first[1]
            else:
                self._ring_back(zone, zone.hop if replay else None, zone.back)
            self._bulk(zone, zone.input_grads, MOVED)
        return self._end((Kind.Q_GRAD, Kind.KV_GRAD))

    def _bulk(self, zone: ZoneTimes, bulk: Bulk | None, of: int) -> None:
        if bulk is None:
            return
        ranks, shape = zone.at, (zone.rounds, -1)
        packed, placed = self._pack_s(bulk.packed_bytes), self._pack_s(bulk.placed_bytes)
        done = self.done[ranks].reshape(shape) + packed
        if of == COPIED:
            opened = self.opened[ranks].reshape(shape)
            done = np.maximum(done, opened)
            posted = np.maximum(self.ready[ranks].reshape(shape) + packed, opened)
            self.ready[ranks] = posted.ravel()
        else:
            posted = done
        begin = np.maximum(posted, self.free[of][ranks].reshape(shape))
        if bulk.together or isinstance(bulk.seconds, float):  # of a collective
            begin = begin.max(axis=1, keepdims=True)
        seconds = np.reshape(bulk.seconds, (-1, 1)) if bulk.together else bulk.seconds
        arrived = begin + self.machine.cost.call_s + seconds
        if arrived.shape != done.shape:
            arrived = arrived.repeat(done.shape[1], axis=1)
        self.free[of][ranks] = arrived.ravel()
        factor = ADD if bulk.adds else 1.0
        if of == COPIED:
            self.done[ranks] = (np.maximum(done, arrived) + placed * factor).ravel()
        else:
            self.done[ranks] = done.ravel()
            self.late[ranks] = np.maximum(self.late[ranks], arrived.ravel())
            self.late_s[ranks] += (
                zone.by_rank(placed.ravel() * factor) if isinstance(placed, np.ndarray) else placed * factor
            )

    def _pack_s(self, num_bytes: Floats | float) -> Floats | float:
        """Of all ranks, or of those of each group [groups, 1]."""
        return (
            self._packs_s(num_bytes)[:, None] if isinstance(num_bytes, np.ndarray) else self.machine.pack_s(num_bytes)
        )

    def _launch_s(self, seconds: float, *beside: RingHop) -> float:
        """Of a launch, slowed by the hops beside it."""
        inside, between = sum(hop.inside_s for hop in beside), sum(hop.between_s for hop in beside)
        return seconds + self.drag[0] * min(seconds, inside) + self.drag[1] * min(seconds, between)

    def _waves(self, zone: ZoneTimes, waves: WaveTimes) -> None:
        """Own work and waves of other groups' keys, forward."""
        launches, own = waves.launches[0], waves.own
        if waves.late is not None:
            begun = self.done[zone.at].copy()
            self._bulk(zone, waves.late[0], COPIED)
            done = np.maximum(begun, self.ready[zone.at]) + zone.by_rank(launches[:, 0])
            self.done[zone.at] = np.maximum(done, self.done[zone.at])
        done, come = self._keys_of(zone, waves, backward=False)
        done += launches[:, own - 1]
        for wave, arrived in enumerate(come):
            done = np.maximum(done, arrived) + launches[:, wave + own]
        self.done[zone.at] = zone.by_rank(done)

    def _waves_back(self, zone: ZoneTimes, waves: WaveTimes, *, replay: bool) -> None:
        """Waves in reverse, each one's gradients sent home behind its launch, and own work."""
        ranks = zone.at
        done, come = self._keys_of(zone, waves, backward=True) if replay else (zone.by_group(self.done[ranks]), [])
        free, owed = zone.by_group(self.free[MOVED, ranks]), np.zeros(zone.rounds)
        late = zone.by_group(self.late[ranks])
        for wave in reversed(range(len(waves.grads))):
            if come:
                done = np.maximum(done, come[wave])
            bulk = waves.grads[wave]
            done = done + waves.launches[1][:, wave + waves.own] + self._packs_s(bulk.packed_bytes)
            arrived = self._meet(done, free, waves.partners[wave], bulk)
            free = np.where(arrived > 0, arrived, free)
            late, owed = np.maximum(late, arrived), owed + ADD * self._packs_s(bulk.placed_bytes)
        done = done + waves.launches[1][:, waves.own - 1]
        if zone.input_grads is not None:  # what the waves brought is sent on
            done, owed = np.maximum(done, late) + owed, np.zeros_like(owed)
        self.free[MOVED, ranks], self.late[ranks] = zone.by_rank(free), zone.by_rank(late)
        self.done[ranks] = zone.by_rank(done)
        self.late_s[ranks] += zone.by_rank(owed)
        if waves.late is not None:
            self._bulk(zone, waves.late[1], MOVED)
            self.done[ranks] += zone.by_rank(waves.launches[1][:, 0])

    def _keys_of(self, zone: ZoneTimes, waves: WaveTimes, *, backward: bool) -> tuple[Floats, list[Floats]]:
        """When each group can begin its work, and when it has the keys of each wave."""
        ranks = zone.at
        self.done[ranks] = np.maximum(self.done[ranks], self.opened[ranks])
        done = zone.by_group(self.done[ranks])
        posted = np.maximum(zone.by_group(self.ready[ranks]), done)  # waves pass on what the collectives brought
        free = zone.by_group(self.free[COPIED, ranks])
        come = [np.zeros(zone.rounds)] * len(waves.keys)
        for wave in reversed(range(len(come))) if backward else range(len(come)):
            packed = self._packs_s(waves.keys[wave].packed_bytes)
            done, posted = done + packed, posted + packed
            come[wave] = self._meet(posted, free, waves.partners[wave], waves.keys[wave])
            free = np.where(come[wave] > 0, come[wave], free)
        self.ready[ranks], self.free[COPIED, ranks] = zone.by_rank(posted), zone.by_rank(free)
        return done, come

    def _meet(self, posted: Floats, free: Floats, partners: Ints, bulk: Bulk) -> Floats:
        """When each group has what a wave brings; a transfer begins when both ends are at it.

        0: a group has no part in the wave.
        """
        at = np.maximum(posted, free)
        begin = at.copy()
        for one, other in ((0, 1), (1, 0)):
            np.maximum.at(begin, partners[:, one], at[partners[:, other]])
        return np.where(bulk.seconds > 0, begin + self.machine.cost.call_s + bulk.seconds, 0.0)

    def _packs_s(self, num_bytes: Floats | float) -> Floats:
        return np.array([self.machine.pack_s(each) for each in np.atleast_1d(num_bytes).tolist()])

    def _ring(self, zone: ZoneTimes, hop: RingHop) -> None:
        ranks, packed = zone.at, self.machine.pack_s(hop.num_bytes)
        if zone.inputs is not None:
            self.ready[ranks] = self.done[ranks]
        ring = _RingHops(zone, hop, 1, self.free[COPIED, ranks])
        done, posted = (zone.by_group(clock[ranks]) + packed for clock in (self.done, self.ready))
        done = np.maximum(done, zone.by_group(self.opened[ranks]))
        arrived = ring.carry(posted)
        done += self._launch_s(float(zone.first[0]), hop)
        other = self._launch_s(zone.other[0], hop)
        at = 1
        while at < zone.rounds:
            done = np.maximum(done, arrived)
            if at < zone.rounds - 1:
                posted = done
                arrived = ring.carry(posted)
            done = done + (other if at < zone.rounds - 1 else zone.other[0])
            if at == _SETTLED and (skipped := zone.rounds - 2 - at) > 0:
                later = skipped * max(other, ring.next_s)
                done, posted, arrived, ring.free = done + later, posted + later, arrived + later, ring.free + later
                at += skipped
            at += 1
        self.free[COPIED, ranks] = zone.by_rank(ring.free)
        self.done[ranks], self.ready[ranks] = zone.by_rank(done), zone.by_rank(posted)

    def _ring_back(self, zone: ZoneTimes, again: RingHop | None, back: RingHop) -> None:
        """Gradients walk back a round behind the launches; `again`: keys come again, and share the
        links with them.
        """
        ranks, owed = zone.at, ADD * self.machine.pack_s(back.num_bytes)
        done, posted = (zone.by_group(clock[ranks]) for clock in (self.done, self.ready))
        done = np.maximum(done, zone.by_group(self.opened[ranks]))
        sharing = 1.0 if again is None else 1 + again.num_bytes / max(back.num_bytes, again.num_bytes)
        returning, coming = _RingHops(zone, back, -1, self.free[MOVED, ranks], sharing), None
        arrived, returned = done, np.full(zone.rounds, -np.inf)
        if again is not None:
            coming = _RingHops(zone, again, -1, self.free[COPIED, ranks], sharing)
            packed = self.machine.pack_s(again.num_bytes)
            done, posted = done + packed, posted + packed
            arrived = coming.carry(posted)
        launch_s = self._launch_s(zone.other[1], *((back,) if again is None else (back, again)))
        at = zone.rounds - 1
        while at > 0:
            done = np.maximum(done, arrived)
            if coming is not None and at > 1:
                posted = done
                arrived = coming.carry(posted)
            done = done + launch_s
            if at < zone.rounds - 1:
                done = np.maximum(done, returned) + owed
            returned = returning.carry(done)
            if zone.rounds - at == _SETTLED and (skipped := at - 2) > 0:
                later = skipped * max(launch_s + owed, returning.next_s)
                done, posted, arrived, returned = done + later, posted + later, arrived + later, returned + later
                for ring in (returning, coming):
                    if ring is not None:
                        ring.free = ring.free + later
                at -= skipped
            at -= 1
        done = done + self._launch_s(float(zone.first[1]), back)
        self.done[ranks], self.ready[ranks] = zone.by_rank(done), zone.by_rank(posted)
        self.free[MOVED, ranks] = zone.by_rank(returning.free)
        self.late[ranks] = np.maximum(self.late[ranks], zone.by_rank(returned))
        self.late_s[ranks] += owed

    def _remap(self, kinds: Sequence[Kind], *, remap_in: bool) -> None:
        """The exchange of a remap: attention that needs what it brings waits for it."""
        moves = as_array(self.plan.moves)
        if not len(moves):
            return
        machine, plan = self.machine, self.plan
        each = sum(
            machine.row_bytes[kind] * (plan.num_kv_heads if kind in KEY_SIDE else plan.num_heads) for kind in kinds
        )
        src, dst = moves[:, Move.SRC], moves[:, Move.DST]
        num_bytes = each * moves[:, Move.TOKENS].astype(np.float64)
        across = machine.nics.node(src) != machine.nics.node(dst)
        routed = plan.routing is not None and -1 in plan.routing.zones
        seconds = np.zeros(plan.num_ranks)
        for end in (src, dst):
            inside = by_rank(end, num_bytes * ~across, plan.num_ranks)
            per_nic = by_rank(machine.nics.nic(end), num_bytes * across, machine.nics.num_nodes * machine.nics.per_node)
            if routed:
                per_nic = np.repeat(per_nic.reshape(-1, machine.nics.per_node).mean(axis=1), machine.nics.per_node)
            nic = per_nic[machine.nics.nic(np.arange(plan.num_ranks))] * (
                by_rank(end, across.astype(np.int64), plan.num_ranks) > 0
            )
            seconds = np.maximum(seconds, inside / machine.intra.bytes_per_s + machine.intra.alpha_s * (inside > 0))
            seconds = np.maximum(seconds, nic / machine.inter.bytes_per_s + machine.inter.alpha_s * (nic > 0))
        moving = seconds > 0
        totals = [by_rank(end, num_bytes, plan.num_ranks) for end in (src, dst)]
        packed = np.array([machine.pack_s(total) for total in totals[1 if remap_in else 0].tolist()])
        self.done += packed
        if remap_in:
            self.ready += packed
            self.opened = np.where(moving, self.ready.max() + machine.cost.call_s + seconds, 0.0)
        else:
            begin = np.maximum(self.done, self.late) + self.late_s
            self.late = np.where(moving, begin[moving].max(initial=0.0) + machine.cost.call_s + seconds, self.late)

    def _end(self, kinds: Sequence[Kind]) -> float:
        self._remap(kinds, remap_in=False)
        return float(np.maximum(np.maximum(self.done, self.late) + self.late_s, self.opened).max())
