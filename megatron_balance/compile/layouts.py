"""All ranks' layouts at once, for what needs them all: the exchange of a step's tokens, and plan
statistics of a remap.
"""

from __future__ import annotations

import numpy as np

from megatron_balance.ir.arrays import Ints, as_array, sums
from megatron_balance.ir.columns import Held, Move, Placed, RemoteHeld
from megatron_balance.ir.intervals import ranges
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


def remote(plan: MicrobatchPlan, table: Ints) -> Ints:
    """Tokens that a rank attends to and another owns: `RemoteHeld` rows, by holder, then owner.

    `table`: the plan's `fragments`, of all ranks or of some, whose tokens alone are looked at.
    """
    moves, ends = _moves(plan, table), np.cumsum(table[:, Held.STOP] - table[:, Held.START])
    src, dst, tokens = moves[:, Move.SRC], moves[:, Move.DST], moves[:, Move.TOKENS]
    begins = ends - (table[:, Held.STOP] - table[:, Held.START])  # a token's place among all tokens, rank by rank
    before = np.cumsum(tokens) - tokens
    begin = _kept_until(plan, table)[src] + before - before[np.searchsorted(src, src)]
    end = begin + tokens
    move, fragment = ranges(np.searchsorted(ends, begin, side="right"), np.searchsorted(begins, end, side="left"))
    low, high = np.maximum(begins[fragment], begin[move]), np.minimum(ends[fragment], end[move])
    rows = np.empty((len(move), RemoteHeld.WIDTH), dtype=np.int64)
    rows[:, RemoteHeld.SEQ] = table[fragment, Held.SEQ]
    rows[:, RemoteHeld.START] = table[fragment, Held.START] + low - begins[fragment]
    rows[:, RemoteHeld.STOP] = rows[:, RemoteHeld.START] + high - low
    rows[:, RemoteHeld.OWNER], rows[:, RemoteHeld.HOLDER] = dst[move], src[move]
    rows[:, RemoteHeld.ZONE], rows[:, RemoteHeld.SENT_ON] = table[fragment, Held.ZONE], table[fragment, Held.SENT_ON]
    rows[:, RemoteHeld.FRAGMENT] = fragment
    return rows


def remote_in(plan: MicrobatchPlan) -> Ints:
    """`remote` of all ranks; no rows where the plan has no remap."""
    if not plan.moves:
        return np.empty((0, RemoteHeld.WIDTH), dtype=np.int64)
    return remote(plan, fragments(plan))


def layouts(plan: MicrobatchPlan) -> Ints:
    """Linear layouts of all ranks: `Placed` rows, rank by rank in their order outside attention."""
    table = fragments(plan)
    return linear(plan, table, remote(plan, table)) if plan.moves else table[:, Held.PLACED]


def linear(plan: MicrobatchPlan, table: Ints, given: Ints) -> Ints:
    """As `layouts`, of a remapped plan, by its `fragments` and `remote`."""
    # Right for a rank where the table has it and all that hold something of its own.
    rows = table[:, Held.PLACED].copy()
    sizes = table[:, Held.STOP] - table[:, Held.START]
    # A rank keeps its first tokens; then come those that others attend to for it, by holder.
    kept = np.clip(_kept_until(plan, table)[table[:, Held.RANK]] - (np.cumsum(sizes) - sizes), 0, sizes)
    rows[:, Placed.STOP] = rows[:, Placed.START] + kept
    received = np.column_stack([given[:, RemoteHeld.OWNER], given[:, RemoteHeld.SPAN]])
    rows = np.concatenate([rows[kept > 0], received])
    return rows[np.argsort(rows[:, Placed.RANK], kind="stable")]


def _moves(plan: MicrobatchPlan, table: Ints) -> Ints:
    # The moves of tokens that the ranks in `table` hold.
    moves = as_array(plan.moves)
    listed = np.zeros(plan.num_ranks, dtype=bool)
    listed[table[:, Held.RANK]] = True
    return moves[listed[moves[:, Move.SRC]]]


def _kept_until(plan: MicrobatchPlan, table: Ints) -> Ints:
    # For each rank, the place among all tokens where those begin that it gives away: [num_ranks].
    moves = _moves(plan, table)
    held = sums(table[:, Held.RANK], table[:, Held.STOP] - table[:, Held.START], plan.num_ranks)
    return np.cumsum(held) - sums(moves[:, Move.SRC], moves[:, Move.TOKENS], plan.num_ranks)
