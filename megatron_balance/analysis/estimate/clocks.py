"""The clocks of all ranks in one phase of a layer, zone by zone (`analysis.estimate`).

The rules are those of `simulator.rounds`; here the ranks of a group that exchanges heads are in step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_balance.analysis.estimate.times import Bulk, RingHop, WaveTimes, ZoneTimes, exchange_of, routed_from
from megatron_balance.analysis.machine import Machine
from megatron_balance.analysis.transfers import Transfers
from megatron_balance.cost.base import ADD, Floats, Ints
from megatron_balance.ir.arrays import as_array
from megatron_balance.ir.columns import Move
from megatron_balance.ir.plan import REMAP, MicrobatchPlan
from megatron_balance.ir.program import KEY_SIDE, Kind
from megatron_balance.patterns.sends import messages_from

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

    def __init__(self, plan: MicrobatchPlan, machine: Machine, enter_s: Floats) -> None:
        self.plan, self.machine = plan, machine
        self.entered, self.done, self.ready = enter_s, enter_s.copy(), enter_s.copy()
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
                self._ring_back(zone, zone.hop_again if replay else None, zone.back)
            self._bulk(zone, zone.input_grads, MOVED)
        return self._end((Kind.Q_GRAD, Kind.KV_GRAD))

    def _bulk(self, zone: ZoneTimes, bulk: Bulk | None, of: int) -> None:
        if bulk is None:
            return
        ranks, shape = zone.at, (zone.rounds, -1)
        packed, placed = (self._packs_s(each) for each in (bulk.packed_bytes, bulk.placed_bytes))
        packed, placed = (each.reshape(shape) if len(each) > 1 else each for each in (packed, placed))
        done = self.done[ranks].reshape(shape) + packed
        if of == COPIED:
            opened = self.opened[ranks].reshape(shape)
            done = np.maximum(done, opened)
            posted = np.maximum(self.ready[ranks].reshape(shape) + packed, opened)
            self.ready[ranks] = posted.ravel()
        elif bulk.transfers is None:
            posted = done
        else:  # who sends nothing was ready to receive before
            posted = np.where(packed > 0, done, self.entered[ranks].reshape(shape))
        begin = np.maximum(posted, self.free[of][ranks].reshape(shape))
        if bulk.transfers is not None:
            clock = np.zeros(self.plan.num_ranks)
            clock[ranks] = begin.ravel()
            arrived = self._carry(clock, bulk.transfers)[ranks].reshape(shape)
        else:
            if bulk.together or isinstance(bulk.seconds, float):  # of a collective
                begin = begin.max(axis=1, keepdims=True)
            seconds = np.reshape(bulk.seconds, (-1, 1)) if bulk.together else bulk.seconds
            arrived = np.broadcast_to(begin + self.machine.cost.call_s + seconds, done.shape)
        self.free[of][ranks] = arrived.ravel()
        placed = np.broadcast_to(placed * (ADD if bulk.adds else 1.0), done.shape)
        if of == COPIED:
            self.done[ranks] = (np.maximum(done, arrived) + placed).ravel()
        else:
            self.done[ranks] = done.ravel()
            self.late[ranks] = np.maximum(self.late[ranks], arrived.ravel())
            self.late_s[ranks] += placed.ravel()
        if bulk.then is not None:
            if of == MOVED:  # gradients are added up before they go on
                self.done[ranks] = np.maximum(self.done[ranks], self.late[ranks]) + self.late_s[ranks]
                self.late_s[ranks] = 0.0
            else:
                self.ready[ranks] = self.done[ranks]
            self._bulk(zone, bulk.then, of)

    def _carry(self, posted: Floats, transfers: Transfers | None) -> Floats:
        """When each rank of the plan has what transfers bring it."""
        assert transfers is not None
        arrived, share = posted.copy(), np.ones((2, self.machine.num_nics))
        begin = np.maximum(posted[transfers.src], posted[transfers.dst]) + self.machine.cost.call_s
        np.maximum.at(arrived, transfers.dst, transfers.ends(begin, self.machine, share))
        return arrived

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
            arrived = self._meet(done, free, bulk)
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
            come[wave] = self._meet(posted, free, waves.keys[wave])
            free = np.where(come[wave] > 0, come[wave], free)
        self.ready[ranks], self.free[COPIED, ranks] = zone.by_rank(posted), zone.by_rank(free)
        return done, come

    def _meet(self, posted: Floats, free: Floats, bulk: Bulk) -> Floats:
        """When each group has what a wave brings; a transfer begins when both ends are at it.

        0: a group has no part in the wave.
        """
        assert bulk.partners is not None
        begin = _latest(np.maximum(posted, free), bulk.partners)
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
        plan, owner, holder = self.plan, moves[:, Move.DST], moves[:, Move.SRC]
        src, dst = (owner, holder) if remap_in else (holder, owner)
        heads = [(0, plan.num_kv_heads if kind in KEY_SIDE else plan.num_heads) for kind in kinds]
        rows = [
            messages_from(0, src, dst, kind, own, moves[:, Move.TOKENS]) for kind, own in zip(kinds, heads, strict=True)
        ]
        bulk = exchange_of(np.concatenate(rows), self.machine, routed_from(plan, REMAP))
        packed, placed = self._packs_s(bulk.packed_bytes), self._packs_s(bulk.placed_bytes)
        if remap_in:
            self.done, self.ready = self.done + packed, self.ready + packed
            stored = kinds[0] == Kind.OUT_GRAD
            self.opened = np.where(placed > 0, self._carry(self.ready, bulk.transfers) + placed * stored, 0.0)
        else:
            sends = packed > 0
            self.done[sends] = np.maximum(self.done, self.late)[sends] + self.late_s[sends] + packed[sends]
            self.late_s[sends] = 0.0
            arrived = self._carry(np.where(sends, self.done, self.entered), bulk.transfers)
            self.late = np.where(placed > 0, np.maximum(self.late, arrived), self.late)
            self.late_s += placed * (1.0 if kinds[0] == Kind.OUT else ADD)

    def _end(self, kinds: Sequence[Kind]) -> float:
        self._remap(kinds, remap_in=False)
        return float(np.maximum(np.maximum(self.done, self.late) + self.late_s, self.opened).max())


def _latest(clock: Floats, partners: Ints) -> Floats:
    """Of each rank or group and those that it exchanges with, the latest."""
    latest = clock.copy()
    for one, other in ((0, 1), (1, 0)):
        np.maximum.at(latest, partners[:, one], clock[partners[:, other]])
    return latest
