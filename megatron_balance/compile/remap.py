"""The remapping layer (Zeppelin, section 3.4): inputs from the linear to the attention layout
first, outputs back last.

Outside attention all ranks own equally many tokens. For attention, some tokens go to the ranks that
the planner chose: `MicrobatchPlan.moves` says how many of the last tokens of one rank's attention
layout are owned by another. They become the first exchange of the program (remap in: queries, keys,
values) and the last one (remap out: outputs); the backward follows by `transpose`.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from megatron_balance.ir.arrays import Ints, as_array, as_rows, overlap_bounds, ranges, sums
from megatron_balance.ir.columns import Held, Move, Placed, RemoteHeld, Transfer
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.ir.program import Exchange, Kind, RankProgram
from megatron_balance.patterns import by_pattern, pattern_of
from megatron_balance.patterns.base import Context
from megatron_balance.patterns.sends import transfers_of


class _RemapEnds(NamedTuple):
    """Transfers of the remap: at the forward's begin, a replayed backward's, the forward's end."""

    inputs: Ints
    again: Ints
    outputs: Ints


class RemapMerge:
    """A remapped plan as `ranks` know it; `zones[i]`: indices of the zones of rank `ranks[i]`.

    `regions`: `RemoteHeld` rows of which one of them is the owner or the holder, or of which one of
    them is sent a part by an owner.
    """

    # The first hop of a ring would have the holder send on at once what it was just given. Its owner
    # sends that to the next rank itself, in the remap in (remap merge): one transfer less on the way.

    def __init__(self, plan: MicrobatchPlan, ranks: Sequence[int], zones: Sequence[Sequence[int]]) -> None:
        self.plan = plan
        table = fragments(plan, self._known(ranks, zones))
        self.regions, self._linear = remapped(plan, table)
        context = Context.of(plan)
        # what owners send on, in the forward only and in a replayed backward too
        once, again = ([np.empty((0, Transfer.WIDTH), dtype=np.int64)] for _ in range(2))
        for pattern, of_pattern in by_pattern(plan.zones):
            hops = pattern.first_hops(of_pattern, context, self.regions)
            (again if pattern.hops_again else once).append(hops.rows)
        self._once, self._again = np.concatenate(once), np.concatenate(again)

    def _known(self, ranks: Sequence[int], zones: Sequence[Sequence[int]]) -> Ints:
        # Ranks whose layouts are needed: `ranks`, the holders of what is theirs, and the holders in
        # whose place an owner may send to them in the first exchange of a zone.
        moves = as_array(self.plan.moves)
        holders, owners = moves[:, Move.SRC], moves[:, Move.DST]
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

    def linear(self, rank: int) -> Ints:
        # The layout of one of the ranks outside attention: rows (seq, start, stop).
        begin, end = np.searchsorted(self._linear[:, Placed.RANK], (rank, rank + 1))
        return self._linear[begin:end, Placed.FRAGMENT]

    def ends(self, rank: int | None = None) -> _RemapEnds:
        # The remap's transfers that `rank` sends or is sent; None: all that are known here.
        regions, once, again = self.regions, self._once, self._again
        if rank is not None:
            # what it attends to for others, then what others attend to for it
            sides = (RemoteHeld.HOLDER, RemoteHeld.OWNER)
            regions = np.concatenate([regions[regions[:, side] == rank] for side in sides])
            once, again = (rows[(rows[:, Transfer.ENDS] == rank).any(axis=1)] for rows in (once, again))
        num_heads, num_kv_heads = self.plan.num_heads, self.plan.num_kv_heads
        queries = _transfers(Kind.Q, regions, num_heads, RemoteHeld.OWNER, RemoteHeld.HOLDER)
        keys = _transfers(Kind.KV, regions, num_kv_heads, RemoteHeld.OWNER, RemoteHeld.HOLDER)
        # Sorted: every rank lists them in one order, however it came to know of each.
        again = _sorted(np.concatenate([queries, keys, again]))
        inputs = _sorted(np.concatenate([again, once]))
        return _RemapEnds(inputs, again, _transfers(Kind.OUT, regions, num_heads, RemoteHeld.HOLDER, RemoteHeld.OWNER))

    def stays(self, rows: Ints) -> Ints:
        # Transfers of a zone's first exchange that are left once owners have sent what is theirs.
        stay = [np.empty((0, Transfer.WIDTH), dtype=np.int64)]
        for src in np.unique(rows[:, Transfer.SRC]).tolist():
            own, theirs = rows[rows[:, Transfer.SRC] == src], self.regions[self.regions[:, RemoteHeld.HOLDER] == src]
            theirs = theirs[np.lexsort((theirs[:, RemoteHeld.START], theirs[:, RemoteHeld.SEQ]))]
            first, last = overlap_bounds(own[:, Transfer.SPAN], theirs)
            stay.append(own[first >= last])
            for index in np.flatnonzero(first < last).tolist():
                row = own[index]
                at, end, target = (int(row[column]) for column in (Transfer.START, Transfer.STOP, Transfer.DST))
                for _, start, stop, owner, *_ in theirs[first[index] : last[index]].tolist():
                    low, high = max(start, at), min(stop, end)
                    stay.append(_part(row, at, low))
                    # What the target owns stays: the target has handed it over.
                    stay.append(_part(row, low, high if owner == target else low))
                    at = high
                stay.append(_part(row, at, end))
        return np.concatenate(stay)


def remap(program: RankProgram, merge: RemapMerge) -> RankProgram:
    """Add the remap's exchanges to a program of the attention layout; other ids rise by one."""
    ends = merge.ends(program.rank)
    # The remap in moves its inputs: the owner gives them up, so that a ring may bring them by later
    # like any other rank's.
    remap_in = (Exchange(0, as_rows(ends.inputs)),) if len(ends.inputs) else ()
    remap_out = (Exchange(program.num_exchanges + 1, as_rows(ends.outputs)),) if len(ends.outputs) else ()
    again = ((0, Exchange(0, as_rows(ends.again))),) if remap_in else ()
    return replace(
        program,
        owned=as_rows(merge.linear(program.rank)),
        forward=(*remap_in, *(_later(op) if isinstance(op, Exchange) else op for op in program.forward), *remap_out),
        num_exchanges=program.num_exchanges + 2,
        replays=(*again, *((at + 1, _later(op)) for at, op in program.replays)),
        queues=(("remap", len(remap_in)), *program.queues, ("remap", len(remap_out))),
        remap_in=1,
    )


def _later(op: Exchange) -> Exchange:
    return replace(op, id=op.id + 1)


def _part(row: Ints, start: int, stop: int) -> Ints:
    # The transfer `row` of tokens [start, stop) only: one row, or none if there are no tokens.
    part = np.repeat(row[None], int(start < stop), axis=0)
    part[:, Transfer.START], part[:, Transfer.STOP] = start, stop
    return part


def _sorted(rows: Ints) -> Ints:
    return rows[np.lexsort(rows.T[::-1])]


def _transfers(kind: Kind, regions: Ints, num_heads: int, src: int, dst: int) -> Ints:
    # Transfers of all heads of `RemoteHeld` rows; `src`, `dst`: the columns that name the ranks.
    return transfers_of(kind, regions, (0, num_heads), regions[:, src], regions[:, dst])


# All ranks' layouts at once, for what needs them all: the exchange of a step's tokens, and plan
# statistics of a remap.


def fragments(plan: MicrobatchPlan, ranks: Ints | None = None) -> Ints:
    """`Held` rows of attention layouts, rank by rank in token order. `ranks`: those wanted, or all."""
    lengths = np.array(plan.lengths, dtype=np.int64)
    wanted = np.ones(plan.num_ranks, dtype=bool)
    if ranks is not None:
        wanted[:] = False
        wanted[ranks] = True
    tables = [pattern.place_all(zones, lengths, wanted) for pattern, zones in by_pattern(plan.zones)]
    table = np.concatenate([np.empty((0, Held.WIDTH), dtype=np.int64), *tables])
    return table[np.lexsort((table[:, Held.ZONE], table[:, Held.RANK]))]


class _Remapped(NamedTuple):
    """`remote`: tokens that a rank attends to and another owns, `RemoteHeld` rows by holder, then
    owner; `linear`: `Placed` rows of linear layouts, rank by rank in their order outside attention.
    """

    remote: Ints
    linear: Ints


def remapped(plan: MicrobatchPlan, table: Ints) -> _Remapped:
    """Return what the moves of a plan make of its `fragments`, of all ranks or of some.

    `linear` is right for a rank where the table has it and all that hold something of its own.
    """
    moves, listed = as_array(plan.moves), np.zeros(plan.num_ranks, dtype=bool)
    listed[table[:, Held.RANK]] = True
    src, dst, tokens = moves[listed[moves[:, Move.SRC]]].T
    sizes = table[:, Held.STOP] - table[:, Held.START]
    ends = np.cumsum(sizes)
    begins = ends - sizes  # a token's place among all tokens, rank by rank
    # For each rank, the place where those begin that it gives away: [num_ranks].
    held, given = sums(table[:, Held.RANK], sizes, plan.num_ranks), sums(src, tokens, plan.num_ranks)
    kept_until = np.cumsum(held) - given
    before = np.cumsum(tokens) - tokens
    begin: Ints = kept_until[src] + before - before[np.searchsorted(src, src)]
    end: Ints = begin + tokens
    move, fragment = ranges(np.searchsorted(ends, begin, side="right"), np.searchsorted(begins, end, side="left"))
    low, high = np.maximum(begins[fragment], begin[move]), np.minimum(ends[fragment], end[move])
    rows = np.empty((len(move), RemoteHeld.WIDTH), dtype=np.int64)
    rows[:, RemoteHeld.SEQ] = table[fragment, Held.SEQ]
    rows[:, RemoteHeld.START] = table[fragment, Held.START] + low - begins[fragment]
    rows[:, RemoteHeld.STOP] = rows[:, RemoteHeld.START] + high - low
    rows[:, RemoteHeld.OWNER], rows[:, RemoteHeld.HOLDER] = dst[move], src[move]
    rows[:, RemoteHeld.ZONE], rows[:, RemoteHeld.SENT_ON] = table[fragment, Held.ZONE], table[fragment, Held.SENT_ON]
    rows[:, RemoteHeld.FRAGMENT] = fragment
    # A rank keeps its first tokens; then come those that others attend to for it, by holder.
    own = table[:, Held.PLACED].copy()
    kept = np.clip(kept_until[table[:, Held.RANK]] - begins, 0, sizes)
    own[:, Placed.STOP] = own[:, Placed.START] + kept
    linear = np.concatenate([own[kept > 0], np.column_stack([rows[:, RemoteHeld.OWNER], rows[:, RemoteHeld.SPAN]])])
    return _Remapped(rows, linear[np.argsort(linear[:, Placed.RANK], kind="stable")])


def remote_in(plan: MicrobatchPlan) -> Ints:
    """`_Remapped.remote` of all ranks; no rows where the plan has no remap."""
    if not plan.moves:
        return np.empty((0, RemoteHeld.WIDTH), dtype=np.int64)
    return remapped(plan, fragments(plan)).remote


def layouts(plan: MicrobatchPlan) -> Ints:
    """Linear layouts of all ranks: `Placed` rows, rank by rank in their order outside attention."""
    table = fragments(plan)
    return remapped(plan, table).linear if plan.moves else table[:, Held.PLACED]
