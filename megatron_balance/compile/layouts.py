"""All ranks' layouts at once, for what needs them all: the exchange of a step's tokens, and plan
statistics of a remap.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megatron_balance.ir.arrays import Ints, as_array, ranges, sums
from megatron_balance.ir.columns import Held, Move, Placed, RemoteHeld
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.patterns import by_pattern


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
