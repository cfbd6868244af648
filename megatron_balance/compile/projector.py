"""One rank's program from a plan, and what the ranks of its node exchange with other nodes, where
that is routed.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from itertools import accumulate, chain, islice

import numpy as np

from megatron_balance.compile import remap, route
from megatron_balance.compile.remap_merge import RemapMerge
from megatron_balance.ir.arrays import Ints, as_array, as_rows
from megatron_balance.ir.columns import Fragment, Transfer
from megatron_balance.ir.plan import REMAP, MicrobatchPlan
from megatron_balance.ir.program import Exchange, Op, RankProgram
from megatron_balance.patterns import pattern_of
from megatron_balance.patterns.base import Context, ZoneProgram


class Projector:
    """A plan with what has been worked out for some of its ranks.

    `replays`: whether programs say what a replayed backward brings again.
    """

    def __init__(self, plan: MicrobatchPlan, *, replays: bool = True) -> None:
        self.plan, self.replays = plan, replays
        self.context = Context.of(plan)
        self.counts = [pattern_of(zone).num_exchanges(zone) for zone in plan.zones]
        self.ends = list(accumulate(self.counts))
        self.total = sum(self.counts)
        self._merge: tuple[tuple[int, ...], RemapMerge] | None = None
        self._sent: tuple[range, dict[tuple[int, int], route.Passing]] = (range(0), {})

    @cached_property
    def _members(self) -> tuple[Ints, Ints]:
        """Zones by member rank, and where those of each rank begin. Looked up: a plan may have a
        zone for each rank.
        """
        ranks = [pattern_of(zone).ranks(zone, self.plan.num_ranks) for zone in self.plan.zones]
        sizes = np.array([len(members) for members in ranks], dtype=np.int64)
        members = np.fromiter(chain.from_iterable(ranks), np.int64, int(sizes.sum()))
        order = np.argsort(members, kind="stable")
        return np.repeat(np.arange(len(ranks)), sizes)[order], np.searchsorted(
            members[order], np.arange(self.plan.num_ranks + 1)
        )

    def zones(self, rank: int) -> list[int]:
        """Indices of the zones that `rank` takes part in."""
        zones, begin = self._members
        return zones[begin[rank] : begin[rank + 1]].tolist()

    def attention_layout(self, rank: int) -> Ints:
        """Rows (seq, start, stop): the fragments that the zones place on `rank`, in order."""
        zones = [self.plan.zones[index] for index in self.zones(rank)]
        placed = (pattern_of(zone).place(zone, self.context.lengths, rank) for zone in zones)
        return np.concatenate([np.empty((0, Fragment.WIDTH), dtype=np.int64), *placed])

    def layout(self, rank: int) -> Ints:
        """Rows (seq, start, stop): the fragments of `rank` outside attention, in order."""
        return self.remap_merge([rank]).linear(rank) if self.plan.moves else self.attention_layout(rank)

    def node(self, rank: int) -> range:
        """The ranks of its node."""
        first = rank - rank % self.plan.ranks_per_node
        return range(first, min(first + self.plan.ranks_per_node, self.plan.num_ranks))

    def remap_merge(self, ranks: range | list[int]) -> RemapMerge:
        """The remap as `ranks` know it; kept until others are asked about, since a node's ranks ask in
        turn.
        """
        asked = tuple(ranks)
        if self._merge is None or self._merge[0] != asked:
            self._merge = asked, RemapMerge(self.plan, ranks, [self.zones(rank) for rank in ranks])
        return self._merge[1]

    # Attention

    def zone_program(self, index: int, rank: int, *, attends: bool = True) -> ZoneProgram:
        """The part of `rank` in zone `index`; `attends`: more than its exchanges."""
        zone, base = self.plan.zones[index], self.ends[index] - self.counts[index]
        context = replace(self.context, base=base, attends=attends, replays=self.replays)
        return pattern_of(zone).project(zone, context, rank)

    def attention(self, rank: int) -> RankProgram:
        """The program of the zones alone, in the attention layout."""
        ops: list[Op] = []
        replays: list[tuple[int, Exchange]] = []
        queues: list[tuple[str, int]] = []
        for index in self.zones(rank):
            part = self.zone_program(index, rank)
            ops += part.ops
            replays += part.replays
            queues.append((self.plan.zones[index].name, len(part.ops)))
        owned = as_rows(self.attention_layout(rank))
        return RankProgram(rank, owned, tuple(ops), self.total, replays=tuple(replays), queues=tuple(queues))

    def opens(self, index: int, number: int) -> bool:
        """Whether `number` is of the first exchange of zone `index`, of which a remap makes a part."""
        first = self.ends[index] - self.counts[index]
        return number == first and pattern_of(self.plan.zones[index]).merges_remap

    def without_hops(self, program: RankProgram, remap_merge: RemapMerge) -> RankProgram:
        """`program` without the first hops that the owner of what is remote makes instead."""
        forward: list[Op] = []
        queues: list[tuple[str, int]] = []
        ops = iter(program.forward)
        for index, (name, count) in zip(self.zones(program.rank), program.queues, strict=True):
            before = len(forward)
            for op in islice(ops, count):
                if isinstance(op, Exchange) and self.opens(index, op.id):
                    stay = remap_merge.stays(as_array(op.transfers))
                    forward += [replace(op, transfers=as_rows(stay))] if len(stay) else []
                else:
                    forward.append(op)
            queues.append((name, len(forward) - before))
        return replace(program, forward=tuple(forward), queues=tuple(queues))

    # The routing

    def routed_ids(self) -> frozenset[int]:
        """The forward exchanges that are routed."""
        assert self.plan.routing is not None
        remap_in = 1 if self.plan.moves else 0
        ids: set[int] = set()
        for index in self.plan.routing.zones:
            if index != REMAP:
                ids.update(range(remap_in + self.ends[index] - self.counts[index], remap_in + self.ends[index]))
            elif remap_in:
                ids.update((0, remap_in + self.total))
        return frozenset(ids)

    def passing(self, rank: int, remap_merge: RemapMerge | None) -> route.Passing:
        """Transfers of the other ranks of its node with other nodes, where these are routed."""
        assert self.plan.routing is not None
        forward: list[tuple[int, Ints]] = []
        replays: list[tuple[int, Ints]] = []
        remap_in = 0 if remap_merge is None else 1
        routed = set(self.plan.routing.zones)
        for other in self.node(rank):
            for index in self.zones(other) if other != rank else ():
                if index in routed and self.reaches_out(index, other):
                    sent = self._between_nodes(index, other)
                    forward += [(at + remap_in, self._left(index, at, rows, remap_merge)) for at, rows in sent.forward]
                    replays += [(at + remap_in, rows) for at, rows in sent.replays]
        if remap_merge is not None and REMAP in routed:
            ends = remap.RemapEnds.of(
                remap_merge.regions, (self.plan.num_heads, self.plan.num_kv_heads), remap_merge.sent_on
            )
            forward += [(0, ends.inputs), (1 + self.total, ends.outputs)]
            replays.append((0, ends.again))
        return route.Passing(forward, replays if self.replays else ())

    def _left(self, index: int, at: int, rows: Ints, remap_merge: RemapMerge | None) -> Ints:
        """`rows` of exchange `at` in zone `index` without those that the remap makes instead."""
        return remap_merge.stays(rows) if remap_merge is not None and self.opens(index, at) else rows

    def _between_nodes(self, index: int, rank: int) -> route.Passing:
        """Transfers of `rank` with other nodes in zone `index`, by the exchanges' ids in the zones
        alone. Kept for one node, whose ranks ask for one another's.
        """
        node, kept = self._sent
        if rank not in node:
            node, kept = self._sent = self.node(rank), {}
        if (index, rank) not in kept:
            part = self.zone_program(index, rank, attends=False)
            kept[index, rank] = route.Passing(
                [(op.id, self._crossing(op)) for op in part.ops if isinstance(op, Exchange)],
                [(at, self._crossing(op)) for at, op in part.replays],
            )
        return kept[index, rank]

    def _crossing(self, exchange: Exchange) -> Ints:
        rows = as_array(exchange.transfers)
        src_node, dst_node = (rows[:, Transfer.ENDS] // self.plan.ranks_per_node).T
        return rows[src_node != dst_node]

    def reaches_out(self, index: int, rank: int) -> bool:
        """Whether `rank` may exchange anything with other nodes in a zone of its own."""
        zone = self.plan.zones[index]
        return pattern_of(zone).reaches_out(zone, rank, self.plan.ranks_per_node)
