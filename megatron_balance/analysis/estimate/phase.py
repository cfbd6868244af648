"""One phase of a layer with zones in closed form beside those of the round engine."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_balance.analysis.clocks import COPIED, MOVED, TOGETHER
from megatron_balance.analysis.estimate.zones import Bulk, WaveTimes, ZoneTimes
from megatron_balance.analysis.memory import Policy
from megatron_balance.analysis.ring import RingClock
from megatron_balance.analysis.rounds import RoundsPhase
from megatron_balance.analysis.tables import Tables, ZoneTable
from megatron_balance.cost.base import ADD, Floats, Ints


class EstimatedPhase(RoundsPhase):
    """A phase in which zones whose ranks are alike (`ZoneTimes`) move the clocks by formula; others
    are played rank by rank. Of its outcome `end_s` alone holds: bytes and busy seconds are not kept.

    Clocks are those of `analysis.clocks.Clocks`, by rank. `zones`: as `zone_times` gives them.
    """

    # In a zone by formula the ranks of a group are in step: `by_group` takes the latest of each group
    # [num_groups], `by_rank` gives it back to the group's ranks.

    def __init__(
        self,
        zones: tuple[Tables, Sequence[ZoneTimes | ZoneTable]],
        policy: Policy,
        enter_s: Floats,
        *,
        backward: bool,
    ) -> None:
        super().__init__(zones[0], policy, enter_s, backward=backward)
        self._in_order, self.clocks.counts = zones[1], False

    def _run_zones(self) -> None:
        for zone in reversed(self._in_order) if self.clocks.backward else self._in_order:
            if isinstance(zone, ZoneTimes):
                self._alike(zone)
            else:
                self._enter(zone)

    def _alike(self, zone: ZoneTimes) -> None:
        """Exchanges inside groups, launches and what goes between groups, exchanges inside groups."""
        clocks, backward = self.clocks, self.clocks.backward
        self._bulk(zone, zone.output_grads if backward else zone.inputs, COPIED)
        if backward and clocks.policy == "replay":
            self._bulk(zone, zone.again, COPIED)
        if zone.waves is not None:
            (self._waves_backward if backward else self._waves_forward)(zone, zone.waves)
        elif zone.ring is not None and zone.hops is not None:
            if zone.inputs is not None:  # the rings pass on what the exchanges brought
                clocks.ready[zone.at] = clocks.done[zone.at]
            RingClock(clocks, zone.ring, zone.hops, len(zone.ranks) // zone.num_groups).run()
        else:
            clocks.done[zone.at] = np.maximum(clocks.done[zone.at], clocks.opened[zone.at]) + zone.first[backward]
        self._bulk(zone, zone.input_grads if backward else zone.outputs, MOVED)

    def _bulk(self, zone: ZoneTimes, bulk: Bulk | None, traffic_class: int) -> None:
        """The collective of every group at once; it begins when the last rank of the group has posted
        it.
        """
        if bulk is None:
            return
        clocks, ranks = self.clocks, zone.at
        # Of all ranks, or of each.
        packed, placed = (
            zone.by_rank(each) if isinstance(each, np.ndarray) else each
            for each in (self._packs_s(bulk.packed_bytes), self._packs_s(bulk.placed_bytes))
        )
        done = posted = clocks.done[ranks] + packed
        # What is copied is waited for before a launch, and posted when the start before it was reached
        # (`ready`). What is moved leaves when its launch is done, and nobody waits for it until the
        # end of the phase (`late`, `late_s`).
        if traffic_class == COPIED:
            done = np.maximum(done, clocks.opened[ranks])
            clocks.ready[ranks] = posted = np.maximum(clocks.ready[ranks] + packed, clocks.opened[ranks])
        begin = zone.by_group(np.maximum(posted, clocks.free[traffic_class, TOGETHER, ranks]))
        arrived = zone.by_rank(begin + clocks.call_s + bulk.seconds)
        clocks.free[traffic_class, TOGETHER, ranks] = arrived
        placed = placed * (ADD if bulk.adds else 1.0)
        if traffic_class == COPIED:
            clocks.done[ranks] = np.maximum(done, arrived) + placed
        else:
            clocks.done[ranks] = done
            clocks.late[ranks] = np.maximum(clocks.late[ranks], arrived)
            clocks.late_s[ranks] += placed

    def _packs_s(self, num_bytes: Floats | float) -> Floats | float:
        """Seconds of packing, of all groups or of each [groups]."""
        pack_s = self.clocks.machine.pack_s
        if isinstance(num_bytes, np.ndarray):
            return np.array([pack_s(each) for each in num_bytes.tolist()])
        return pack_s(num_bytes)

    def _waves_forward(self, zone: ZoneTimes, waves: WaveTimes) -> None:
        """Own work and waves of other groups' keys, forward."""
        # [groups, own launches and waves]. With late inputs there are two own launches: 0 runs while
        # they travel, own - 1 needs them; else one.
        launches, own = waves.launches[0], waves.own
        if waves.late is not None:
            begun = self.clocks.done[zone.at].copy()
            self._bulk(zone, waves.late[0], COPIED)
            done = np.maximum(begun, self.clocks.ready[zone.at]) + zone.by_rank(launches[:, 0])
            self.clocks.done[zone.at] = np.maximum(done, self.clocks.done[zone.at])
        done, come = self._keys_of(zone, waves, backward=False)
        done += launches[:, own - 1]
        for wave, arrived in enumerate(come):
            done = np.maximum(done, arrived) + launches[:, wave + own]
        self.clocks.done[zone.at] = zone.by_rank(done)

    def _waves_backward(self, zone: ZoneTimes, waves: WaveTimes) -> None:
        """Waves in reverse, each one's gradients sent home behind its launch, and own work."""
        ranks = zone.at
        done, come = (
            self._keys_of(zone, waves, backward=True)
            if self.clocks.policy == "replay"
            else (zone.by_group(self.clocks.done[ranks]), [])
        )
        free, owed = zone.by_group(self.clocks.free[MOVED, TOGETHER, ranks]), np.zeros(zone.num_groups)
        late = zone.by_group(self.clocks.late[ranks])
        for wave in reversed(range(len(waves.grads))):
            if come:
                done = np.maximum(done, come[wave])
            bulk = waves.grads[wave]
            done = done + waves.launches[1][:, wave + waves.own] + self._packs_s(bulk.packed_bytes)
            arrived = self._meet(done, free, bulk)
            free = np.where(arrived > 0, arrived, free)
            late, owed = np.maximum(late, arrived), owed + ADD * self._packs_s(bulk.placed_bytes)
        done = done + waves.launches[1][:, waves.own - 1]
        # What the waves brought is summed before the group sends it on; the gradients of late inputs
        # leave before the last launch, as in `RoundsPhase`.
        if zone.input_grads is not None:
            done, owed = np.maximum(done, late) + owed, np.zeros_like(owed)
        self.clocks.free[MOVED, TOGETHER, ranks], self.clocks.late[ranks] = zone.by_rank(free), zone.by_rank(late)
        self.clocks.done[ranks] = zone.by_rank(done)
        self.clocks.late_s[ranks] += zone.by_rank(owed)
        if waves.late is not None:
            self._bulk(zone, waves.late[1], MOVED)
            self.clocks.done[ranks] += zone.by_rank(waves.launches[1][:, 0])

    def _keys_of(self, zone: ZoneTimes, waves: WaveTimes, *, backward: bool) -> tuple[Floats, list[Floats]]:
        """When each group can begin its work, and when it has the keys of each wave."""
        ranks = zone.at
        self.clocks.done[ranks] = np.maximum(self.clocks.done[ranks], self.clocks.opened[ranks])
        done = zone.by_group(self.clocks.done[ranks])
        posted = np.maximum(zone.by_group(self.clocks.ready[ranks]), done)  # waves pass on what the collectives brought
        free = zone.by_group(self.clocks.free[COPIED, TOGETHER, ranks])
        come = [np.zeros(zone.num_groups)] * len(waves.keys)
        for wave in reversed(range(len(come))) if backward else range(len(come)):
            packed = self._packs_s(waves.keys[wave].packed_bytes)
            done, posted = done + packed, posted + packed
            come[wave] = self._meet(posted, free, waves.keys[wave])
            free = np.where(come[wave] > 0, come[wave], free)
        self.clocks.ready[ranks], self.clocks.free[COPIED, TOGETHER, ranks] = zone.by_rank(posted), zone.by_rank(free)
        return done, come

    def _meet(self, posted: Floats, free: Floats, bulk: Bulk) -> Floats:
        """When each group has what a wave brings; a transfer begins when both ends are at it.

        0: a group has no part in the wave.
        """
        assert bulk.partners is not None
        begin = _latest(np.maximum(posted, free), bulk.partners)
        return np.where(bulk.seconds > 0, begin + self.clocks.call_s + bulk.seconds, 0.0)


def _latest(clock: Floats, partners: Ints) -> Floats:
    """Of each group and those that it exchanges with, the latest."""
    latest = clock.copy()
    for one, other in ((0, 1), (1, 0)):
        np.maximum.at(latest, partners[:, one], clock[partners[:, other]])
    return latest
