"""Zones to ops: where a plan's fragments lie, and what each rank does in one attention call.

Each movement is one module with `place(zone, lengths, rank)`, `num_exchanges(zone)` and `project(zone, context, rank)`.
Over them lie the two layers that work for any plan: the remap (`passes.remap`) and the routing (`passes.route`). Nothing here builds
more than one rank's share (and, routed, that of the ranks of its node that exchange anything with other nodes), except `expand`,
which is for proofs and pictures.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import accumulate, islice
from typing import Protocol

import numpy as np

from megatron_balance.core.plan import REMAP, MicrobatchPlan, Tiling, Zone
from megatron_balance.core.program import HOME_WIDTH, TRANSFER_WIDTH, Exchange, Op, Program, RankProgram
from megatron_balance.errors import InvalidProgramError
from megatron_balance.passes import remap, route
from megatron_balance.passes.join import join
from megatron_balance.passes.route import Nics
from megatron_balance.passes.tables import Ints, as_array, as_rows
from megatron_balance.passes.transpose import Policy, transpose
from megatron_balance.schedules import all_gather, dispatch, head_exchange, ring
from megatron_balance.schedules.context import Context, Share


class Schedule(Protocol):
    """A movement: see `schedules.ring` for the shape of one."""

    def num_exchanges(self, zone: Zone | Tiling, /) -> int: ...
    def place(self, zone: Zone | Tiling, lengths: Ints, rank: int, /) -> Ints: ...
    def project(self, zone: Zone | Tiling, context: Context, rank: int, /) -> Share: ...


SCHEDULES: dict[str, Schedule] = {
    "ring": ring,  # pyright: ignore[reportAssignmentType]
    "all_gather": all_gather,  # pyright: ignore[reportAssignmentType]
    "head_exchange": head_exchange,  # pyright: ignore[reportAssignmentType]
    "dispatch": dispatch,  # pyright: ignore[reportAssignmentType]
}


def schedule_of(zone: Zone | Tiling) -> Schedule:
    """The schedule of a zone.

    Raises InvalidProgramError: no such movement.
    """
    if zone.movement not in SCHEDULES:
        raise InvalidProgramError(f"zone {zone.name}: unknown movement {zone.movement!r}; known: {', '.join(SCHEDULES)}")
    return SCHEDULES[zone.movement]


def holds(zone: Zone | Tiling, rank: int) -> bool:
    """Whether `rank` takes part in the zone."""
    return isinstance(zone, Tiling) or rank in zone.ranks


def attention_layout(plan: MicrobatchPlan, rank: int) -> Ints:
    """Rows (seq, start, stop) int64 [n, 3]: the fragments that the zones place on `rank`, in order."""
    return _placed([zone for zone in plan.zones if holds(zone, rank)], np.array(plan.lengths, dtype=np.int64), rank)


def _placed(zones: Iterable[Zone | Tiling], lengths: Ints, rank: int) -> Ints:
    return np.concatenate([np.empty((0, HOME_WIDTH), dtype=np.int64), *(schedule_of(z).place(z, lengths, rank) for z in zones)])


def layout(plan: MicrobatchPlan, rank: int) -> Ints:
    """Rows (seq, start, stop) int64 [n, 3]: the fragments of `rank` outside attention, in the order of its tokens."""
    return _Projector(plan).linear(rank)


def project(plan: MicrobatchPlan, rank: int) -> RankProgram:
    """The forward ops of one rank, without building those of the others.

    Raises InvalidProgramError: an unknown movement.
    """
    projector = _Projector(plan)
    program = projector.unrouted(rank)
    if plan.routing is None:
        return program
    nics = Nics(plan.ranks_per_node, plan.routing.ranks_per_nic, plan.routing.min_tokens, plan.routing.pieces)
    neighbours = [projector.unrouted(other) for other in sorted(projector.talkers(rank) - {rank})]
    return route.route(program, neighbours, projector.routed_ids(), nics)


class _Projector:
    """A plan with what has been worked out for some of its ranks."""

    def __init__(self, plan: MicrobatchPlan) -> None:
        self.plan = plan
        self.moves = as_array(plan.moves)
        self.lengths = np.array(plan.lengths, dtype=np.int64)
        self.layouts: dict[int, Ints] = {}
        self.attentions: dict[int, RankProgram] = {}
        self.given: dict[int, Ints] = {}
        counts = [schedule_of(zone).num_exchanges(zone) for zone in plan.zones]
        self.ends = list(accumulate(counts))
        # The first exchange of each zone, and whether a replayed backward brings the same again (a ring turns the other way).
        firsts = zip(plan.zones, self.ends, counts, strict=True)
        self.firsts = {end - count: zone.movement != "ring" for zone, end, count in firsts if count}
        self.zones_of = _zones_by_rank(plan)

    def zones(self, rank: int) -> list[int]:
        """Indices of the zones that `rank` takes part in. Looked up: a plan may have a zone for each rank."""
        return self.zones_of[rank]

    def attention_layout(self, rank: int) -> Ints:
        if rank not in self.layouts:
            self.layouts[rank] = _placed([self.plan.zones[index] for index in self.zones(rank)], self.lengths, rank)
        return self.layouts[rank]

    def attention(self, rank: int) -> RankProgram:
        """The program of the zones alone, in the attention layout."""
        if rank not in self.attentions:
            ops: list[Op] = []
            replays: list[tuple[int, Exchange]] = []
            queues: list[tuple[str, int]] = []
            for index in self.zones(rank):
                zone, base = self.plan.zones[index], self.ends[index - 1] if index else 0
                share = schedule_of(zone).project(zone, Context(self.lengths, self.plan.num_heads, self.plan.num_kv_heads, base), rank)
                ops += share.ops
                replays += share.replays
                queues.append((zone.name, len(share.ops)))
            home = as_rows(self.attention_layout(rank))
            total = self.ends[-1] if self.ends else 0
            self.attentions[rank] = RankProgram(rank, home, tuple(ops), total, replays=tuple(replays), queues=tuple(queues))
        return self.attentions[rank]

    # The remap

    def away(self, holder: int) -> Ints:
        """What `holder` attends to for others: rows of `remap.away`."""
        if holder not in self.given:
            self.given[holder] = remap.away(self.attention_layout(holder), holder, self.moves)
        return self.given[holder]

    def received(self, rank: int) -> Ints:
        """What others attend to for `rank`, holder by holder."""
        regions = [self.away(holder) for holder in self.moves[self.moves[:, 1] == rank, 0].tolist()]
        return np.concatenate([_NOTHING_AWAY, *(r[r[:, remap.HOME] == rank] for r in regions)])

    def linear(self, rank: int) -> Ints:
        own = self.attention_layout(rank)
        return remap.home(own, rank, self.moves, self.received(rank)) if self.plan.moves else own

    def unrouted(self, rank: int) -> RankProgram:
        program = self.attention(rank)
        if not self.plan.moves:
            return program
        regions = np.concatenate([self.away(rank), self.received(rank)])
        program, sent_on = self.first_hops(program)
        return remap.remap(program, self.linear(rank), regions, (self.plan.num_heads, self.plan.num_kv_heads), sent_on)

    def exposed(self, holder: int) -> bool:
        """Whether `holder` attends for others to anything that it shares with further ranks."""
        zones = [self.plan.zones[index] for index in self.zones(holder)]
        shared = [seq for zone in zones if len(_members(zone)) != 1 for seq in zone.seqs]
        return bool(np.isin(self.away(holder)[:, remap.SEQ], shared).any())

    def first_hops(self, program: RankProgram) -> tuple[RankProgram, remap.SentOn]:
        """`program` without the first hops that the home of what is away makes instead, and those that this rank sends or receives so."""
        rank = program.rank
        sent: dict[bool, list[Ints]] = {again: [np.empty((0, TRANSFER_WIDTH), dtype=np.int64)] for again in (False, True)}
        givers = set(self.moves[:, 0].tolist())
        forward: list[Op] = []
        queues: list[tuple[str, int]] = []
        ops = iter(program.forward)
        for name, count in program.queues:
            before = len(forward)
            for op in islice(ops, count):
                if isinstance(op, Exchange) and op.id in self.firsts and op.pattern == "p2p":
                    rows = as_array(op.transfers)
                    sources = givers & set(rows[:, 6].tolist())
                    stay, on = remap.resourced(rows, np.concatenate([_NOTHING_AWAY, *(self.away(src) for src in sorted(sources))]))
                    sent[self.firsts[op.id]].append(on[on[:, 7] == rank])
                    if len(stay):
                        forward.append(replace(op, transfers=as_rows(stay)))
                else:
                    forward.append(op)
            queues.append((name, len(forward) - before))
        received = self.received(rank)
        for holder in np.unique(received[:, remap.HOLDER]).tolist():
            for op in self.attention(holder).forward if self.exposed(holder) else ():
                if isinstance(op, Exchange) and op.id in self.firsts and op.pattern == "p2p":
                    rows = as_array(op.transfers)
                    sent[self.firsts[op.id]].append(remap.resourced(rows[rows[:, 6] == holder], received)[1])
        sent_on = remap.SentOn(*(np.concatenate(sent[again]) for again in (False, True)))
        return replace(program, forward=tuple(forward), queues=tuple(queues)), sent_on

    # The routing

    def routed_ids(self) -> frozenset[int]:
        """The forward exchanges that are routed."""
        assert self.plan.routing is not None
        opening = 1 if self.plan.moves else 0
        ids: set[int] = set()
        for index, (begin, end) in enumerate(zip([0, *self.ends], self.ends, strict=False)):
            if index in self.plan.routing.zones:
                ids.update(range(opening + begin, opening + end))
        if opening and REMAP in self.plan.routing.zones:
            ids.update((0, opening + (self.ends[-1] if self.ends else 0)))
        return frozenset(ids)

    def talkers(self, rank: int) -> set[int]:
        """Ranks of the node of `rank` that may exchange anything with other nodes where that is routed."""
        assert self.plan.routing is not None
        size = self.plan.ranks_per_node
        first = rank - rank % size
        node = range(first, min(first + size, self.plan.num_ranks))
        found: set[int] = set()
        for index in self.plan.routing.zones:
            if index == REMAP:
                found |= self.remap_talkers(node)
                continue
            zone = self.plan.zones[index]
            if isinstance(zone, Zone) and zone.movement == "ring":
                nodes = np.array(zone.ranks) // size
                ends = np.flatnonzero((nodes != np.roll(nodes, 1)) | (nodes != np.roll(nodes, -1)))
                found.update(r for r in np.array(zone.ranks)[ends].tolist() if r in node)
            else:
                found.update(r for r in node if holds(zone, r))
        return found

    def remap_talkers(self, node: range) -> set[int]:
        """Of them, those that may in the remap's exchanges."""
        size = self.plan.ranks_per_node
        across = self.moves[self.moves[:, 0] // size != self.moves[:, 1] // size]
        found = {rank for rank in across[:, :2].ravel().tolist() if rank in node}
        givers = set(self.moves[:, 0].tolist())
        for zone in self.plan.zones:  # first hops that a home makes for a holder
            members = _members(zone) or range(self.plan.num_ranks)
            if len(members) > 1 and any(rank in node for rank in members):
                for holder in sorted(givers & set(members)):
                    regions = self.away(holder)
                    if np.isin(regions[:, remap.SEQ], zone.seqs).any():
                        found.update(rank for rank in (*members, *regions[:, remap.HOME].tolist()) if rank in node)
        return found


def _zones_by_rank(plan: MicrobatchPlan) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in range(plan.num_ranks)]
    for index, zone in enumerate(plan.zones):
        for rank in _members(zone) or range(plan.num_ranks):
            found[rank].append(index)
    return found


_NOTHING_AWAY = np.empty((0, remap.AWAY_WIDTH), dtype=np.int64)


def _members(zone: Zone | Tiling) -> tuple[int, ...]:
    """The ranks of a zone; of a tiling none in particular."""
    return () if isinstance(zone, Tiling) else zone.ranks


def expand(plan: MicrobatchPlan, policy: Policy | None = None) -> Program:
    """The whole program, from every rank's projection; with a policy, the backward too.

    Raises InvalidProgramError: the projections do not fit together.
    """
    ranks = [project(plan, rank) for rank in range(plan.num_ranks)]
    if policy is not None:
        ranks = [transpose(rank, policy) for rank in ranks]
    return join(ranks, plan.lengths, plan.num_heads, plan.num_kv_heads, policy)
