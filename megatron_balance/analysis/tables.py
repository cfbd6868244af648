"""Zones as tables for `analysis.rounds`: seconds of every launch and tokens or bytes of every
transfer, without the ops.

Launches and traffic of a zone are what its pattern says (`CommPattern.rounds`); here launches get
prices, and the remap takes what owners send for holders.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron_balance.analysis.launches import LaunchPrices
from megatron_balance.analysis.machine import Machine
from megatron_balance.analysis.wire import Payload
from megatron_balance.compile import remap
from megatron_balance.cost.base import Floats, Ints
from megatron_balance.ir.arrays import Bools
from megatron_balance.ir.columns import Message, RemoteHeld, Transfer
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.ir.program import Kind
from megatron_balance.patterns import base, by_pattern, pattern_of
from megatron_balance.patterns.sends import messages_of

GRAD_OF = {Kind.Q: Kind.Q_GRAD, Kind.KV: Kind.KV_GRAD, Kind.OUT: Kind.OUT_GRAD}


def _walked(rounds: base.ZoneRounds) -> Bools:
    """Mark the launches of a zone whose keys came in a hop round its ranks: from round 1 on."""
    walked, of_round = np.zeros(len(rounds.launches.merging), dtype=bool), rounds.launches.of_round
    if isinstance(rounds.traffic, base.HeadsThenHops) and rounds.traffic.hops is not None:
        walked[of_round[:, 1:]] = True
        walked[of_round[:, 0]] = False
    return walked


def bytes_of(token_heads: Mapping[Kind, Floats], payload: Payload, *, turned: bool = False) -> Floats:
    """Bytes [G, G] from rank to rank of a collective (`GroupTraffic`), or, `turned`, of the gradients
    of what it carries; an empty array: nothing travels.
    """
    row_bytes = payload.whole()
    terms = [
        sizes.T * float(row_bytes[GRAD_OF[kind]]) if turned else sizes * float(row_bytes[kind])
        for kind, sizes in token_heads.items()
    ]
    return np.sum(terms, axis=0) if terms else np.zeros((0, 0))


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

    def part(self, start: int, size: int) -> ZoneTable:
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
        """Leave to the remap the first hops that owners make for holders."""
        self.first_hops.append(messages_of(0, hops.rows))
        for table in self.zones:
            of_zone = hops.zones == table.index
            if not of_zone.any():
                continue
            targets = np.isin(table.ranks, hops.rows[of_zone, Transfer.DST])
            spared = base.spared_messages(hops)[of_zone]
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
