"""What a remap remaps among some ranks, and the first hops that the owners of it make for its holders (`compile.remap`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from megatron_balance.compile import layouts, remap
from megatron_balance.ir.arrays import Ints, as_array
from megatron_balance.ir.columns import Remote, Transfer
from megatron_balance.ir.plan import MicrobatchPlan, TaskTable, Zone
from megatron_balance.ir.program import Kind
from megatron_balance.patterns import dispatch


class RemapMerge:
    """A remapped plan as `ranks` know it; `zones[i]`: indices of the zones of rank `ranks[i]`.

    `regions`: rows of `remap.remote` of which one of them is the owner or the holder, or that one of them is sent by a owner.
    """

    def __init__(self, plan: MicrobatchPlan, ranks: Sequence[int], zones: Sequence[Sequence[int]]) -> None:
        self.plan = plan
        self.moves = as_array(plan.moves)
        self.task_tables = [zone for zone in plan.zones if isinstance(zone, TaskTable)]
        self.table = layouts.fragments(plan, self._known(ranks, zones))
        self._remote = layouts.remote(plan, self.table)
        self._fragment = self.table[self._remote[:, layouts.FRAGMENT]]
        self.regions = np.column_stack([self._fragment[:, layouts.SEQ], self._remote[:, layouts.BEGIN :]])
        self.sent_on = remap.SentOn(self._ring_hops(), self._task_table_hops())

    def _known(self, ranks: Sequence[int], zones: Sequence[Sequence[int]]) -> Ints:
        """`ranks`, the holders of what is theirs, and the givers from which something may come to them in the first exchange of a zone."""
        holders, owned = self.moves[:, 0], self.moves[:, 1]
        known, gives = np.zeros((2, self.plan.num_ranks), dtype=bool)
        gives[holders] = True
        if self.task_tables:
            known[holders] = True
        known[holders[np.isin(owned, ranks)]] = True
        for rank, own in zip(ranks, zones, strict=True):
            known[[before for before in self._before(rank, own) if gives[before]]] = True
        known[list(ranks)] = True
        return np.flatnonzero(known)

    def _before(self, rank: int, zones: Sequence[int]) -> Iterator[int]:
        """The rank before `rank` in each of its rings."""
        for index in zones:
            zone = self.plan.zones[index]
            if isinstance(zone, Zone) and zone.pattern == "ring":
                yield zone.ranks[zone.ranks.index(rank) - 1]

    def layout(self, rank: int) -> Ints:
        """The attention layout of one of the ranks: rows (seq, start, stop)."""
        begin, end = np.searchsorted(self.table[:, layouts.RANK], (rank, rank + 1))
        return self.table[begin:end, layouts.SEQ : layouts.ZONE]

    def linear(self, rank: int) -> Ints:
        """Its layout outside attention."""
        return remap.linear_layout(self.layout(rank), rank, self.moves, self.regions[self.regions[:, Remote.OWNER] == rank])

    def own(self, rank: int) -> Ints:
        """Regions that it attends to for others, then those that others attend to for it."""
        return np.concatenate([self.regions[self.regions[:, column] == rank] for column in (Remote.HOLDER, Remote.OWNER)])

    def stays(self, rows: Ints) -> Ints:
        """What is left of the transfers of a zone's first exchange once owners have sent what is theirs."""
        return remap.resourced(rows, self.regions)[0]

    def _ring_hops(self) -> Ints:
        """First hops of rings that owners make: each compile on what the holder would, whole fragments cut by owner."""
        chosen = self._fragment[:, layouts.ON] == 1
        regions, zones = self.regions[chosen], self._fragment[chosen, layouts.ZONE]
        targets = [self._after(*place) for place in zip(zones.tolist(), regions[:, Remote.HOLDER].tolist(), strict=True)]
        rows = np.empty((len(regions), Transfer.WIDTH), dtype=np.int64)
        rows[:, 0], rows[:, 1:4], rows[:, 6] = Kind.KV, regions[:, :3], regions[:, Remote.OWNER]
        rows[:, 4], rows[:, 5], rows[:, 7] = 0, self.plan.num_kv_heads, targets
        return rows[rows[:, 6] != rows[:, 7]]

    def _after(self, index: int, rank: int) -> int:
        zone = self.plan.zones[index]
        assert isinstance(zone, Zone), "a ring is a zone of ranks"
        return zone.ranks[(zone.ranks.index(rank) + 1) % len(zone.ranks)]

    def _task_table_hops(self) -> Ints:
        """The same of task tables."""
        tables = [as_array(dispatch.transfers(zone, self.plan.num_heads, self.plan.num_kv_heads)[0]) for zone in self.task_tables]
        return np.concatenate([np.empty((0, Transfer.WIDTH), dtype=np.int64), *(remap.resourced(rows, self.regions)[1] for rows in tables)])
