"""The first hops that owners make for holders, merged into the remap's exchange (`compile.remap`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_balance.compile import layouts, remap
from megatron_balance.ir.arrays import Ints, as_array
from megatron_balance.ir.columns import Held, Move, Remote, RemoteHeld, Transfer
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.patterns import by_pattern, pattern_of
from megatron_balance.patterns.base import Context


class RemapMerge:
    """A remapped plan as `ranks` know it; `zones[i]`: indices of the zones of rank `ranks[i]`.

    `regions`: rows of `ir.columns.Remote` of which one of them is the owner or the holder, or of
    which one of them is sent a part by an owner.
    """

    def __init__(self, plan: MicrobatchPlan, ranks: Sequence[int], zones: Sequence[Sequence[int]]) -> None:
        self.plan = plan
        self.moves = as_array(plan.moves)
        self.table = layouts.fragments(plan, self._known(ranks, zones))
        remote = layouts.remote(plan, self.table)
        self.regions = remote[:, RemoteHeld.REMOTE]
        self.sent_on = self._first_hops(remote)

    def _known(self, ranks: Sequence[int], zones: Sequence[Sequence[int]]) -> Ints:
        """Ranks whose layouts are needed.

        `ranks`, the holders of what is theirs, and the holders in whose place an owner may send to
        them in the first exchange of a zone.
        """
        holders, owners = self.moves[:, Move.SRC], self.moves[:, Move.DST]
        known, gives = np.zeros((2, self.plan.num_ranks), dtype=bool)
        gives[holders] = True
        known[holders[np.isin(owners, ranks)]] = True
        for rank, own in zip(ranks, zones, strict=True):
            for index in own:
                zone = self.plan.zones[index]
                senders = pattern_of(zone).first_senders(zone, rank, self.plan.num_ranks)
                known[senders[gives[senders]]] = True
        known[list(ranks)] = True
        return np.flatnonzero(known)

    def _first_hops(self, remote: Ints) -> remap.SentOn:
        context = Context.of(self.plan)
        nothing = np.empty((0, Transfer.WIDTH), dtype=np.int64)
        once, again = [nothing], [nothing]
        for pattern, zones in by_pattern(self.plan.zones):
            hops = pattern.first_hops(zones, context, remote)
            (again if pattern.hops_again else once).append(hops.rows)
        return remap.SentOn(np.concatenate(once), np.concatenate(again))

    def layout(self, rank: int) -> Ints:
        """The attention layout of one of the ranks: rows (seq, start, stop)."""
        begin, end = np.searchsorted(self.table[:, Held.RANK], (rank, rank + 1))
        return self.table[begin:end, Held.FRAGMENT]

    def linear(self, rank: int) -> Ints:
        """Its layout outside attention."""
        return remap.linear_layout(
            self.layout(rank), rank, self.moves, self.regions[self.regions[:, Remote.OWNER] == rank]
        )

    def own(self, rank: int) -> Ints:
        """Regions that it attends to for others, then those that others attend to for it."""
        return np.concatenate([self.regions[self.regions[:, side] == rank] for side in (Remote.HOLDER, Remote.OWNER)])

    def stays(self, rows: Ints) -> Ints:
        """Transfers of a zone's first exchange that are left once owners have sent what is theirs."""
        return remap.resourced(rows, self.regions)[0]
