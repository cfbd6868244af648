"""The remapping layer (Zeppelin, section 3.4): inputs from the linear to the attention layout first, outputs back last.

Outside attention a rank holds as many tokens as the others; for attention some of them are handed to the ranks that the planner
chose. `MicrobatchPlan.moves` says how many: the last tokens of the attention layout of one rank are owned by another. Here they
become the first exchange (queries, keys, values) and the last one (outputs) of any program; the backward follows by `transpose`.

The first exchange hands its inputs over: the owner gives them up, so that a ring may pass them by later like any other rank's.

What a holder would pass on at once (the first hop of a ring) its owner sends to the next rank itself, in the same exchange: that saves
one transfer on the way (`resourced`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from megatron_balance.compile.join import join, split
from megatron_balance.ir.arrays import Ints, as_array, as_rows
from megatron_balance.ir.program import FRAGMENT_WIDTH, TRANSFER_WIDTH, Exchange, Kind, Program, RankProgram
from megatron_balance.ir.rows import Rows

SEQ, START, STOP, OWNER, HOLDER = range(5)
REMOTE_WIDTH = 5
_SHIFT = 40  # a token's position needs fewer bits than this


def remote(layout: Ints, holder: int, moves: Ints) -> Ints:
    """Regions that `holder` attends to and that are owned by another rank: rows (seq, start, stop, owner, holder).

    `layout`: the holder's attention layout, rows (seq, start, stop). `moves`: rows (src, dst, tokens) of the plan.
    """
    own = moves[moves[:, 0] == holder]
    sizes = layout[:, 2] - layout[:, 1]
    begin = np.cumsum(sizes) - sizes
    end = int(sizes.sum()) - int(own[:, 2].sum())
    parts: list[Ints] = [np.empty((0, REMOTE_WIDTH), dtype=np.int64)]
    for dst, tokens in own[:, 1:].tolist():
        cut = _cut(layout, begin, end, end + tokens)
        parts.append(np.column_stack([cut, np.full(len(cut), dst), np.full(len(cut), holder)]))
        end += tokens
    return np.concatenate(parts)


def linear_layout(layout: Ints, rank: int, moves: Ints, received: Ints) -> Ints:
    """The linear layout of `rank`: what it keeps of its attention layout, then what others attend to (`received`, rows of `remote`)."""
    sizes = layout[:, 2] - layout[:, 1]
    kept = int(sizes.sum()) - int(moves[moves[:, 0] == rank, 2].sum())
    return np.concatenate([_cut(layout, np.cumsum(sizes) - sizes, 0, kept), received[:, :FRAGMENT_WIDTH]])


def _cut(layout: Ints, begin: Ints, start: int, stop: int) -> Ints:
    """Rows of `layout` that are its tokens [start, stop); `begin`: the first token of each row."""
    low, high = np.maximum(begin, start), np.minimum(begin + layout[:, 2] - layout[:, 1], stop)
    chosen = low < high
    rows = layout[chosen].copy()
    rows[:, 1] = layout[chosen, 1] + (low - begin)[chosen]
    rows[:, 2] = layout[chosen, 1] + (high - begin)[chosen]
    return rows


def resourced(rows: Ints, regions: Ints) -> tuple[Ints, Ints]:
    """Transfers of a zone's first exchange: those that stay there, and those that the owner of what is remote sends instead.

    `rows`: transfers of inputs; `regions`: rows of `remote` of their sources. What is owned by the target stays, since the target has
    handed it over.
    """
    stay, sent = [np.empty((0, TRANSFER_WIDTH), dtype=np.int64)], [np.empty((0, TRANSFER_WIDTH), dtype=np.int64)]
    for src in np.unique(rows[:, 6]).tolist():
        own, theirs = rows[rows[:, 6] == src], regions[regions[:, HOLDER] == src]
        theirs = theirs[np.lexsort((theirs[:, START], theirs[:, SEQ]))]
        begin, end = (_key(theirs[:, SEQ], theirs[:, column]) for column in (START, STOP))
        first = np.searchsorted(end, _key(own[:, 1], own[:, 2]), side="right")
        last = np.searchsorted(begin, _key(own[:, 1], own[:, 3]), side="left")
        stay.append(own[first >= last])
        for index in np.flatnonzero(first < last).tolist():
            row, at = own[index], int(own[index, 2])
            for _, start, stop, owner, _ in theirs[first[index] : last[index]].tolist():
                low, high = max(start, at), min(stop, int(row[3]))
                stay.append(_part(row, at, low, src))
                (stay if owner == row[7] else sent).append(_part(row, low, high, src if owner == row[7] else owner))
                at = high
            stay.append(_part(row, at, int(row[3]), src))
    return np.concatenate(stay), np.concatenate(sent)


class SentOn(NamedTuple):
    """Transfers of `resourced` that join the remap's first exchange: in the forward only, and in a replayed backward too."""

    once: Ints
    again: Ints


NOTHING_SENT_ON = SentOn(*np.empty((2, 0, TRANSFER_WIDTH), dtype=np.int64))


class Ends(NamedTuple):
    """Transfers of the remap's two exchanges: `inputs` open the forward, `again` a replayed backward, `outputs` close the forward."""

    inputs: Ints
    again: Ints
    outputs: Ints

    @classmethod
    def of(cls, regions: Ints, heads: tuple[int, int], sent_on: SentOn) -> Ends:
        """Of `regions`, rows of `remote`; arguments as in `remap`. Inputs are in one order, however a rank came to know of each."""
        num_heads, num_kv_heads = heads
        queries, keys = _transfers(Kind.Q, regions, num_heads, OWNER, HOLDER), _transfers(Kind.KV, regions, num_kv_heads, OWNER, HOLDER)
        again = np.concatenate([queries, keys, sent_on.again])
        inputs = np.concatenate([again, sent_on.once])
        return cls(_in_order(inputs), _in_order(again), _transfers(Kind.OUT, regions, num_heads, HOLDER, OWNER))


def _part(row: Ints, start: int, stop: int, src: int) -> Ints:
    """The transfer `row` of tokens [start, stop) only, from `src`: one row, or none."""
    part = np.repeat(row[None], int(start < stop), axis=0)
    part[:, 2], part[:, 3], part[:, 6] = start, stop, src
    return part


def _key(seq: Ints, position: Ints) -> Ints:
    return (seq << _SHIFT) | position


def remap(program: RankProgram, linear: Ints, regions: Ints, heads: tuple[int, int], sent_on: SentOn = NOTHING_SENT_ON) -> RankProgram:
    """`program`, made for the attention layout, for one rank of a remapped batch. All other exchange ids rise by one.

    `linear`: the rank's linear layout. `regions`: rows of `remote` of which the rank is the owner or the holder. `heads`: of queries and
    of keys. `sent_on`: transfers of `resourced` that join the first exchange.
    """
    ends = Ends.of(regions, heads, sent_on)
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
    return Exchange(op.id + 1, op.transfers, op.collective, op.group, op.routes)


def _in_order(rows: Ints) -> Ints:
    return rows[np.lexsort(rows.T[::-1])]


def _transfers(kind: Kind, regions: Ints, num_heads: int, src: int, dst: int) -> Ints:
    rows = np.zeros((len(regions), TRANSFER_WIDTH), dtype=np.int64)
    rows[:, 0] = kind
    rows[:, 1:4] = regions[:, :FRAGMENT_WIDTH]
    rows[:, 5] = num_heads
    rows[:, 6], rows[:, 7] = regions[:, src], regions[:, dst]
    return rows


def with_remap(program: Program, moves: Rows) -> Program:
    """A whole forward program, as parsed from text, with its remap."""
    table = as_array(moves)
    layouts = [as_array(rows) for rows in program.owned]
    regions = np.concatenate([remote(layout, rank, table) for rank, layout in enumerate(layouts)])
    ranks: list[RankProgram] = []
    for rank, layout in enumerate(layouts):
        linear = linear_layout(layout, rank, table, regions[regions[:, OWNER] == rank])
        mine = regions[(regions[:, OWNER] == rank) | (regions[:, HOLDER] == rank)]
        ranks.append(remap(split(program, rank), linear, mine, (program.num_heads, program.num_kv_heads)))
    return join(ranks, program.lengths, program.num_heads, program.num_kv_heads)
