"""Zones as tables for `simulator.rounds`: seconds of every launch and tokens or bytes of every
transfer, without the ops.

Launches and traffic of a zone are what its pattern says (`CommPattern.rounds`); here launches get
prices, and the remap takes what owners send for holders.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from megatron_balance.analysis.launches import launches
from megatron_balance.analysis.machine import Bools, Machine
from megatron_balance.analysis.wire import Payload
from megatron_balance.compile import layouts
from megatron_balance.cost.base import Floats, Ints
from megatron_balance.ir.columns import Message, Pair, RemoteHeld, Transfer
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.ir.program import Kind
from megatron_balance.patterns import by_pattern, pattern_of
from megatron_balance.patterns.base import (
    Context,
    FirstHops,
    GroupTraffic,
    HeadsThenHops,
    HopByHop,
    Launches,
    PointToPoint,
    WaveTraffic,
    ZoneTraffic,
    spared_messages,
)
from megatron_balance.patterns.sends import messages_of

GRAD_OF = {Kind.Q: Kind.Q_GRAD, Kind.KV: Kind.KV_GRAD, Kind.OUT: Kind.OUT_GRAD}


@dataclass(slots=True)
class Hops:
    """Tokens [G, G] of the block that began at a group index in its n-th hop, forward and the other
    way (`HopByHop`).
    """

    forward: Floats
    backward: Floats

    @classmethod
    def of(cls, traffic: HopByHop) -> Hops:
        return cls(traffic.forward.astype(np.float64), traffic.backward.astype(np.float64))


@dataclass(slots=True)
class Collectives:
    """Bytes [G, G] from rank to rank of a zone's collectives; an empty array: there is none.

    `inputs`, `outputs` and their gradients; `gathers`: all-gathers and reduce-scatters, else
    all-to-alls. `passed_on`: as in `GroupTraffic`.
    """

    inputs: Floats
    outputs: Floats
    input_grads: Floats
    output_grads: Floats
    gathers: bool
    passed_on: Ints

    @classmethod
    def of(cls, traffic: GroupTraffic, payload: Payload) -> Collectives:
        return cls(
            _bytes(traffic.inputs, payload),
            _bytes(traffic.outputs, payload),
            _bytes({GRAD_OF[kind]: sizes.T for kind, sizes in traffic.inputs.items()}, payload),
            _bytes({GRAD_OF[kind]: sizes.T for kind, sizes in traffic.outputs.items()}, payload),
            traffic.gathers,
            traffic.passed_on,
        )


@dataclass(slots=True)
class Nested:
    """Collectives inside each group of a zone, and the hops between them (`HeadsThenHops`)."""

    groups: tuple[Collectives, ...]
    hops: Hops | None


@dataclass(slots=True)
class Waves:
    """Collectives inside each group of a zone, and messages by wave between them (`WaveTraffic`)."""

    groups: tuple[Collectives, ...]
    waves: tuple[Ints, ...]
    late: tuple[Collectives, ...]


def _walks(traffic: ZoneTraffic | None) -> bool:
    """Whether blocks of keys walk round the ranks of a zone."""
    return isinstance(traffic, HeadsThenHops) and traffic.hops is not None


def _bytes(token_heads: Mapping[Kind, Floats], payload: Payload) -> Floats:
    row_bytes = payload.whole()
    terms = [sizes * float(row_bytes[kind]) for kind, sizes in token_heads.items()]
    return np.sum(terms, axis=0) if terms else np.zeros((0, 0))


Traffic: TypeAlias = Collectives | PointToPoint | Nested | Waves


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
    traffic: Traffic | None
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
    """All zones of a plan; the costs of all their launches are asked for at once."""

    def __init__(self, plan: MicrobatchPlan, machine: Machine) -> None:
        self.plan, self.machine = plan, machine
        self.pairs: list[Ints] = [np.empty((0, Pair.WIDTH), dtype=np.int64)]
        self.launch: list[Ints] = [np.empty(0, dtype=np.int64)]
        self.merging: list[Floats] = []
        self.walked: list[Bools] = []
        self.num_launches = 0
        context, remote = Context.of(plan), layouts.remote_in(plan)
        self.zones: list[ZoneTable] = []
        for index, zone in enumerate(plan.zones):
            rounds = pattern_of(zone).rounds(zone, context)
            holders = remote[remote[:, RemoteHeld.ZONE] == index, RemoteHeld.HOLDER] if len(remote) else remote[:, 0]
            waits = np.isin(rounds.ranks, holders)
            launch = rounds.launches.of_round + self._add(rounds.launches, walks=_walks(rounds.traffic))
            self.zones.append(
                ZoneTable(index, rounds.ranks, launch, self._traffic(rounds.traffic), waits, waits.copy())
            )
        self.first_hops: list[Ints] = [np.empty((0, Message.WIDTH), dtype=np.int64)]
        """Messages that the remap's first exchange carries beside those of the moves: first hops
        that owners make.
        """
        for pattern, zones in by_pattern(plan.zones) if len(remote) else ():
            self._remap_first_hops(pattern.first_hops(zones, context, remote))
        self._price()

    def _traffic(self, traffic: ZoneTraffic | None) -> Traffic | None:
        match traffic:
            case GroupTraffic():
                return Collectives.of(traffic, self.machine.payload)
            case HeadsThenHops(groups, hops):
                inside = tuple(Collectives.of(group, self.machine.payload) for group in groups)
                return Nested(inside, None if hops is None else Hops.of(hops))
            case WaveTraffic(groups, waves, late):
                inside, later = (
                    tuple(Collectives.of(group, self.machine.payload) for group in own) for own in (groups, late)
                )
                return Waves(inside, waves, later)
            case _:
                return traffic

    def _remap_first_hops(self, hops: FirstHops) -> None:
        """Leave to the remap the first hops that owners make for holders."""
        self.first_hops.append(messages_of(0, hops.rows))
        for table in self.zones:
            of_zone = hops.zones == table.index
            if not of_zone.any():
                continue
            targets = np.isin(table.ranks, hops.rows[of_zone, Transfer.DST])
            spared = spared_messages(hops)[of_zone]
            match table.traffic:
                case Nested(hops=Hops(forward)):
                    place = np.zeros(self.plan.num_ranks, dtype=np.int64)
                    place[table.ranks] = np.arange(len(table.ranks))
                    np.add.at(forward[:, 1], place[spared[:, Message.SRC]], spared[:, Message.TOKENS])
                    table.waits_next |= targets
                case PointToPoint(inputs, outputs):
                    table.traffic = PointToPoint(np.concatenate([inputs, spared]), outputs)
                    table.waits |= targets
                case _:
                    raise AssertionError("first hops of a zone whose exchanges are collectives")

    def _add(self, zone: Launches, *, walks: bool) -> int:
        """Launches to be priced; the number of the first. `walks`: a hop brings the keys of every
        round but the first.
        """
        first = self.num_launches
        self.pairs.append(zone.pairs)
        self.launch.append(zone.launch + first)
        self.merging.append(zone.merging)
        walked = np.zeros(len(zone.merging), dtype=bool)
        if walks:
            walked[zone.of_round[:, 1:]] = True
            walked[zone.of_round[:, 0]] = False
        self.walked.append(walked)
        self.num_launches += len(zone.merging)
        return first

    def _price(self) -> None:
        pairs, launch = np.concatenate(self.pairs), np.concatenate(self.launch)
        merging = np.concatenate([np.zeros(0), *self.merging])
        slow = self.machine.slow()
        walked = np.concatenate([np.zeros(0, dtype=bool), *self.walked])
        forward, backward = (
            launches(pairs, launch, merging, self.machine, backward=b, walked=walked).seconds for b in (False, True)
        )
        for table in self.zones:
            factor = slow[table.ranks][:, None]
            table.forward_s, table.backward_s = forward[table.launch] * factor, backward[table.launch] * factor
