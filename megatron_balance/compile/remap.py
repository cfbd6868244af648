"""The remapping layer (Zeppelin, section 3.4): inputs from the linear to the attention layout
first, outputs back last.

Outside attention all ranks own equally many tokens. For attention, some tokens go to the ranks that
the planner chose: `MicrobatchPlan.moves` says how many of the last tokens of one rank's attention
layout are owned by another. They become the first exchange of the program (remap in: queries, keys,
values) and the last one (remap out: outputs); the backward follows by `transpose`.

The remap in moves its inputs: the owner gives them up, so that a ring may bring them by later like
any other rank's.

The first hop of a ring would have the holder send on at once what it was just given. Its owner
sends that to the next rank itself, in the remap in (remap merge): one transfer less on the way
(`resourced`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from megatron_balance.compile.join import join, split
from megatron_balance.ir.arrays import Ints, as_array, as_rows
from megatron_balance.ir.columns import Fragment, Move, Remote, Transfer
from megatron_balance.ir.intervals import overlap_bounds
from megatron_balance.ir.program import Exchange, Kind, Program, RankProgram
from megatron_balance.ir.rows import Rows


def remote(layout: Ints, holder: int, moves: Ints) -> Ints:
    """`Remote` rows of the regions that `holder` attends to and another rank owns.

    `layout`: the holder's attention layout, `Fragment` rows. `moves`: `Move` rows of the plan.
    """
    given = moves[moves[:, Move.SRC] == holder]
    sizes = layout[:, Fragment.STOP] - layout[:, Fragment.START]
    begin = np.cumsum(sizes) - sizes
    end = int(sizes.sum()) - int(given[:, Move.TOKENS].sum())
    parts: list[Ints] = [np.empty((0, Remote.WIDTH), dtype=np.int64)]
    for _, dst, tokens in given.tolist():
        fragments = _tokens_between(layout, begin, end, end + tokens)
        parts.append(np.column_stack([fragments, np.full(len(fragments), dst), np.full(len(fragments), holder)]))
        end += tokens
    return np.concatenate(parts)


def linear_layout(layout: Ints, rank: int, moves: Ints, received: Ints) -> Ints:
    """The linear layout of `rank`: what it keeps of its attention layout, then what others attend
    to (`received`, `Remote` rows).
    """
    sizes = layout[:, Fragment.STOP] - layout[:, Fragment.START]
    kept = int(sizes.sum()) - int(moves[moves[:, Move.SRC] == rank, Move.TOKENS].sum())
    return np.concatenate([_tokens_between(layout, np.cumsum(sizes) - sizes, 0, kept), received[:, Remote.FRAGMENT]])


def _tokens_between(layout: Ints, begin: Ints, start: int, stop: int) -> Ints:
    """Rows of `layout` that are its tokens [start, stop), counted over the rows; `begin`: the first
    token of each row.
    """
    sizes = layout[:, Fragment.STOP] - layout[:, Fragment.START]
    low, high = np.maximum(begin, start), np.minimum(begin + sizes, stop)
    chosen = low < high
    rows, first = layout[chosen].copy(), layout[chosen, Fragment.START]
    rows[:, Fragment.START] = first + (low - begin)[chosen]
    rows[:, Fragment.STOP] = first + (high - begin)[chosen]
    return rows


def resourced(rows: Ints, regions: Ints) -> tuple[Ints, Ints]:
    """Split a zone's first exchange: transfers that stay there, and those that the owner of what is
    remote sends instead.

    `rows`: transfers of inputs; `regions`: `Remote` rows of their sources. What is owned by the
    target stays, since the target has handed it over.
    """
    stay, sent = [np.empty((0, Transfer.WIDTH), dtype=np.int64)], [np.empty((0, Transfer.WIDTH), dtype=np.int64)]
    for src in np.unique(rows[:, Transfer.SRC]).tolist():
        own, theirs = rows[rows[:, Transfer.SRC] == src], regions[regions[:, Remote.HOLDER] == src]
        theirs = theirs[np.lexsort((theirs[:, Remote.START], theirs[:, Remote.SEQ]))]
        first, last = overlap_bounds(own[:, Transfer.SPAN], theirs)
        stay.append(own[first >= last])
        for index in np.flatnonzero(first < last).tolist():
            row = own[index]
            at, end, target = (int(row[column]) for column in (Transfer.START, Transfer.STOP, Transfer.DST))
            for _, start, stop, owner, _ in theirs[first[index] : last[index]].tolist():
                low, high = max(start, at), min(stop, end)
                stay.append(_part(row, at, low, src))
                (stay if owner == target else sent).append(_part(row, low, high, src if owner == target else owner))
                at = high
            stay.append(_part(row, at, end, src))
    return np.concatenate(stay), np.concatenate(sent)


class SentOn(NamedTuple):
    """Transfers of `resourced` that join the remap's first exchange: in the forward only, and in a
    replayed backward too.
    """

    once: Ints
    again: Ints


NOTHING_SENT_ON = SentOn(*np.empty((2, 0, Transfer.WIDTH), dtype=np.int64))


class RemapEnds(NamedTuple):
    """Transfers of the remap's exchanges: `inputs` begin the forward, `again` a replayed backward,
    `outputs` end the forward.
    """

    inputs: Ints
    again: Ints
    outputs: Ints

    @classmethod
    def of(cls, regions: Ints, heads: tuple[int, int], sent_on: SentOn) -> RemapEnds:
        """Build the transfers of `regions`, `Remote` rows; arguments as in `remap`.

        Inputs are sorted, so that every rank lists them in one order, however it came to know of
        each.
        """
        num_heads, num_kv_heads = heads
        queries = _transfers(Kind.Q, regions, num_heads, Remote.OWNER, Remote.HOLDER)
        keys = _transfers(Kind.KV, regions, num_kv_heads, Remote.OWNER, Remote.HOLDER)
        again = np.concatenate([queries, keys, sent_on.again])
        inputs = np.concatenate([again, sent_on.once])
        return cls(
            _sorted(inputs), _sorted(again), _transfers(Kind.OUT, regions, num_heads, Remote.HOLDER, Remote.OWNER)
        )


def _part(row: Ints, start: int, stop: int, src: int) -> Ints:
    """The transfer `row` of tokens [start, stop) only, from `src`: one row, or none if there are no
    tokens.
    """
    part = np.repeat(row[None], int(start < stop), axis=0)
    part[:, Transfer.START], part[:, Transfer.STOP], part[:, Transfer.SRC] = start, stop, src
    return part


def remap(
    program: RankProgram, linear: Ints, regions: Ints, heads: tuple[int, int], sent_on: SentOn = NOTHING_SENT_ON
) -> RankProgram:
    """Add the remap's exchanges to `program`, made for the attention layout. All other exchange ids
    rise by one.

    `linear`: the rank's linear layout. `regions`: `Remote` rows of which the rank is the owner or
    the holder. `heads`: of queries and of keys. `sent_on`: transfers of `resourced` that join the
    first exchange.
    """
    ends = RemapEnds.of(regions, heads, sent_on)
    remap_in = (Exchange(0, as_rows(ends.inputs)),) if len(ends.inputs) else ()
    remap_out = (Exchange(program.num_exchanges + 1, as_rows(ends.outputs)),) if len(regions) else ()
    again = ((0, Exchange(0, as_rows(ends.again))),) if remap_in else ()
    return replace(
        program,
        owned=as_rows(linear),
        forward=(*remap_in, *(_later(op) if isinstance(op, Exchange) else op for op in program.forward), *remap_out),
        num_exchanges=program.num_exchanges + 2,
        replays=(*again, *((at + 1, _later(op)) for at, op in program.replays)),
        queues=(("remap", len(remap_in)), *program.queues, ("remap", len(remap_out))),
        remap_in=1,
    )


def _later(op: Exchange) -> Exchange:
    return replace(op, id=op.id + 1)


def _sorted(rows: Ints) -> Ints:
    return rows[np.lexsort(rows.T[::-1])]


def _transfers(kind: Kind, regions: Ints, num_heads: int, src: int, dst: int) -> Ints:
    """Transfers of all heads of `Remote` rows; `src`, `dst`: the columns that name the ranks."""
    rows = np.zeros((len(regions), Transfer.WIDTH), dtype=np.int64)
    rows[:, Transfer.KIND] = kind
    rows[:, Transfer.SPAN] = regions[:, Remote.FRAGMENT]
    rows[:, Transfer.HEAD_STOP] = num_heads
    rows[:, Transfer.SRC], rows[:, Transfer.DST] = regions[:, src], regions[:, dst]
    return rows


def with_remap(program: Program, moves: Rows) -> Program:
    """A whole forward program, as parsed from text, with its remap."""
    table = as_array(moves)
    layouts = [as_array(rows) for rows in program.owned]
    regions = np.concatenate([remote(layout, rank, table) for rank, layout in enumerate(layouts)])
    ranks: list[RankProgram] = []
    for rank, (layout, own) in enumerate(zip(layouts, split(program), strict=True)):
        linear = linear_layout(layout, rank, table, regions[regions[:, Remote.OWNER] == rank])
        mine = regions[(regions[:, Remote.OWNER] == rank) | (regions[:, Remote.HOLDER] == rank)]
        ranks.append(remap(own, linear, mine, (program.num_heads, program.num_kv_heads)))
    return join(ranks, program.lengths, program.num_heads, program.num_kv_heads)
