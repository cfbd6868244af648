"""Once per node: what ranks of a node share crosses to one of them, which passes it on inside."""

from collections import Counter, defaultdict
from dataclasses import replace
from functools import lru_cache
from typing import Any, ClassVar, TypeAlias, TypeVar

import numpy as np

from megatron_balance.ir.arrays import Ints, run_bounds
from megatron_balance.ir.columns import Message
from megatron_balance.ir.mask import Mask
from megatron_balance.ir.plan import TaskTable, Zone
from megatron_balance.ir.program import Kind
from megatron_balance.patterns.base import AnyZone, CommPattern, Context, GroupTraffic, Startable, ZoneRounds
from megatron_balance.patterns.dispatch import Dispatch
from megatron_balance.patterns.head_exchange import ChunkExchange, HeadExchange
from megatron_balance.patterns.sends import Blocks, Send, Sends, table_of

Z = TypeVar("Z", bound=AnyZone)
# The two exchanges that a pattern's first one becomes: IN crosses nodes (and goes straight to the
# ranks of the owner's node), ON passes on inside a node.
IN, ON = range(2)


# Ranks 4, 5 and 6 of a node need keys of rank 0: 4 needs [0, 300), 5 [0, 500), 6 [200, 500). Cut
# where the ranks that share them differ, these are three pieces. Each goes to one of its ranks, the
# one that is sent least so far, and from there to the others that need it: so no rank holds what it
# does not use, and each row crosses once. Where blocks of tokens go whole, heads are cut instead.
#
# In the backward the way is turned: gradients are added up inside the node, and cross once. A
# replayed backward brings the inputs the same way, but takes exchanges in reverse: there IN has the
# number of the last one, which comes first, since ON passes on what it brings.
class _OncePerNode(CommPattern[Z]):
    """Rewrites what the comm pattern `plain` sends; to be mixed into it."""

    merges_remap = False
    plain: ClassVar[CommPattern[Any]]
    # Whether needs are cut in heads; if not, each block of `plain` is one row of tokens.
    cuts_heads: ClassVar[bool] = False

    def num_exchanges(self, zone: Z) -> int:
        # One more than of `plain` (unused ids cost nothing).
        count = self.plain.num_exchanges(zone)
        return count + 1 if count else 0

    def sends(self, zone: Z, context: Context, rank: int | None = None, *, across: bool = False) -> Sends:
        # Those of `plain`, the way in cut in two.
        plain, last = self.plain.sends(zone, context, rank, across=across), self.plain.num_exchanges(zone)
        heads, nodes = context.heads, (context.num_ranks, context.ranks_per_node)
        ways = _ways(self, zone, context.lengths.tobytes(), heads, nodes, context.mask)
        if rank is not None:
            ways = tuple(rows[(rows[:, _Wanted.ENDS] == rank).any(axis=1)] for rows in ways)
        needs, number = np.concatenate(ways), np.repeat([IN, ON], [len(rows) for rows in ways])
        of, start, stop = needs[:, _Wanted.PIECE].T
        if self.cuts_heads:
            made, block = needs[:0, _Wanted.PIECE], of
        else:  # pieces are blocks of their own, before those of `plain`
            made, block = needs[:, _Wanted.PIECE], np.arange(len(needs))
            start, stop = np.zeros_like(start), np.where(needs[:, _Wanted.KIND] == Kind.KV, heads[1], heads[0])
        ends = needs[:, _Wanted.SRC], needs[:, _Wanted.DST]
        there = table_of(number, *ends, needs[:, _Wanted.KIND], start, stop, block, 0)
        later = plain.rows[plain.rows[:, Send.EXCHANGE] > 0]  # a copy
        later[:, Send.EXCHANGE] += 1
        later[:, Send.BLOCK] += len(made)

        def blocks() -> Blocks:
            rows, begin, _ = plain.blocks()
            return Blocks(np.concatenate([made, rows]), np.concatenate([np.arange(len(made)), len(made) + begin]))

        def tokens() -> Ints:
            return np.concatenate([made[:, 2] - made[:, 1], plain.tokens()])

        # A replayed backward begins where the forward ended: there it brings what comes first, and
        # nothing where the forward did.
        first = there[number == IN]
        first[:, Send.EXCHANGE] = last
        calls = {at + 1 if at else IN: call for at, call in plain.calls.items()}
        again = Sends(first, tokens, blocks, {last: calls[IN]} if IN in calls else {})
        return Sends(np.concatenate([there, later]), tokens, blocks, calls, again, silent=(IN,))

    def startable(self, zone: Z) -> Startable:
        # Exchanges that every rank can start at once: IN, its replay, the gradients of `plain`.
        plain = self.plain.startable(zone)
        return Startable(plain.forward, tuple(at + 1 for at in plain.gradients), (self.plain.num_exchanges(zone),))

    def largest_exchange(self, zone: Z, context: Context) -> Ints:
        # In the way in or behind it, whichever is more: by the table, not by a closed form of `plain`.
        return CommPattern.largest_exchange(self, zone, context)  # pyright: ignore[reportUnknownMemberType]

    def rounds(self, zone: Z, context: Context) -> ZoneRounds:
        # As of `plain`, with what is passed on before the launch.
        found = super().rounds(zone, context)
        if not isinstance(found.traffic, GroupTraffic):
            return found
        rows, inputs = self.sends(zone, context).messages(), dict(found.traffic.inputs)
        on = rows[rows[:, Message.EXCHANGE] == ON]
        place = np.zeros(context.num_ranks, dtype=np.int64)
        place[found.ranks] = np.arange(len(found.ranks))
        for kind in map(Kind, np.unique(on[:, Message.KIND]).tolist()):
            there = rows[(rows[:, Message.EXCHANGE] == IN) & (rows[:, Message.KIND] == kind)]
            heads = there[:, Message.HEAD_STOP] - there[:, Message.HEAD_START]
            inputs[kind] = np.zeros_like(inputs[kind])
            ends = place[there[:, Message.SRC]], place[there[:, Message.DST]]
            np.add.at(inputs[kind], ends, there[:, Message.TOKENS] * heads)
        return replace(found, traffic=replace(found.traffic, inputs=inputs, passed_on=on))


class _DispatchOnce(_OncePerNode[TaskTable], Dispatch):
    """Every rank sends what the tasks of others need, once to each node."""

    plain = Dispatch()


class _HeadExchangeOnce(_OncePerNode[Zone], HeadExchange):
    """Two all-to-alls around one launch; key-value heads that ranks of a node share cross once."""

    plain, cuts_heads = HeadExchange(), True


class _ChunkExchangeOnce(_OncePerNode[Zone], ChunkExchange):
    """As `_HeadExchangeOnce`, where every rank holds a contiguous chunk of each sequence."""

    plain, cuts_heads = ChunkExchange(), True


DISPATCH_ONCE, HEAD_EXCHANGE_ONCE, CHUNK_EXCHANGE_ONCE = _DispatchOnce(), _HeadExchangeOnce(), _ChunkExchangeOnce()


class _Wanted:
    """Columns of what ranks are sent: tokens [START, STOP) of sequence OF, or heads of block OF."""

    WIDTH = 6
    KIND, OF, START, STOP, SRC, DST = range(6)
    PIECE, ENDS = slice(1, 4), slice(4, 6)


_Source: TypeAlias = tuple[int, int, int]  # (kind, of, src) as in `_Wanted`
_Piece: TypeAlias = tuple[int, int, tuple[int, ...]]  # (start, stop, ranks that need it)


@lru_cache(maxsize=64)
def _ways(
    pattern: _OncePerNode[Any], zone: Any, lengths: bytes, heads: tuple[int, int], nodes: tuple[int, int], mask: Mask
) -> tuple[Ints, ...]:
    # `_Wanted` rows of both exchanges, IN and ON.
    context = Context(np.frombuffer(lengths, dtype=np.int64), *heads, *nodes, mask=mask)
    plain = pattern.plain.sends(zone, context)
    rows = plain.rows[plain.rows[:, Send.EXCHANGE] == IN]
    needs = np.empty((len(rows), _Wanted.WIDTH), dtype=np.int64)
    needs[:, _Wanted.KIND], needs[:, _Wanted.ENDS] = rows[:, Send.KIND], rows[:, [Send.SRC, Send.DST]]
    if pattern.cuts_heads:
        needs[:, _Wanted.PIECE] = rows[:, [Send.BLOCK, Send.HEAD_START, Send.HEAD_STOP]]
    else:
        spans, begin, _ = plain.blocks()
        needs[:, _Wanted.PIECE] = spans[begin[rows[:, Send.BLOCK]]]
    src_node, dst_node = (needs[:, _Wanted.ENDS] // context.ranks_per_node).T
    crossing = src_node != dst_node
    alone, several = _by_node(needs[crossing], dst_node[crossing])
    there, on, shared = list[tuple[int, ...]](), list[tuple[int, ...]](), list[tuple[int, _Source, _Piece]]()
    weights: dict[int, int] = {Kind.Q: heads[0], Kind.KV: 2 * heads[1]}
    loads = defaultdict[Any, Counter[int]](Counter[int])
    for kind, _, start, stop, _, dst in alone.tolist():
        loads[()][dst] += weights[kind] * (stop - start)
    for source, spans in several:
        for piece in _pieces(spans):
            start, stop, ranks = piece
            size = weights[source[0]] * (stop - start)
            if len(ranks) == 1:
                there.append((*source[:2], start, stop, source[2], ranks[0]))
                loads[()][ranks[0]] += size
            else:
                shared.append((size, source, piece))
    # The largest first, each to the rank that is sent least so far. Heads of all blocks are alike, so
    # ranks that share some receive them in turns.
    for size, (kind, of, src), (start, stop, ranks) in shared if pattern.cuts_heads else sorted(shared, reverse=True):
        load = loads[(start, ranks) if pattern.cuts_heads else ()]
        first = min(ranks if pattern.cuts_heads else sorted(ranks), key=load.__getitem__)
        load[first] += size
        there.append((kind, of, start, stop, src, first))
        on += [(kind, of, start, stop, first, other) for other in ranks if other != first]
    return np.concatenate([needs[~crossing], _sorted(np.concatenate([alone, _table(there)]))]), _sorted(_table(on))


def _by_node(needs: Ints, node: Ints) -> tuple[Ints, list[tuple[_Source, bytes]]]:
    # Rows that share nothing with others that a node needs of their source, and of the rest the
    # source and its spans, for `_pieces`; `node`: of each row's receiver.
    keys = np.column_stack([needs[:, [_Wanted.KIND, _Wanted.OF, _Wanted.SRC]], node])
    order = np.lexsort((needs[:, _Wanted.START], *keys.T[::-1]))
    needs, keys = needs[order], keys[order]
    fresh = (keys[1:] != keys[:-1]).any(axis=1)
    gap = needs[1:, _Wanted.START] - needs[:-1, _Wanted.STOP]
    meets = ~fresh & ((gap < 0) | ((gap == 0) & (needs[1:, _Wanted.DST] == needs[:-1, _Wanted.DST])))
    bounds = run_bounds(fresh, len(needs))
    group = np.searchsorted(bounds, np.arange(len(needs)), side="right") - 1
    several = np.unique(group[1:][meets])
    spans = needs[:, [_Wanted.START, _Wanted.STOP, _Wanted.DST]]
    found: list[tuple[_Source, bytes]] = []
    for a, b in zip(bounds[several].tolist(), bounds[several + 1].tolist(), strict=True):
        kind, of, src, _ = keys[a].tolist()
        found.append(((kind, of, src), spans[a:b].tobytes()))
    return needs[~np.isin(group, several)], found


# Blocks of a head exchange are cut alike.
@lru_cache(maxsize=1024)
def _pieces(spans: bytes) -> tuple[_Piece, ...]:
    # Spans (start, stop, rank) cut where any begins or ends: each piece with all its ranks; of
    # neighbours with the same ranks one.
    rows: list[list[int]] = np.frombuffer(spans, dtype=np.int64).reshape(-1, 3).tolist()
    edges = sorted({edge for start, stop, _ in rows for edge in (start, stop)})
    found: list[_Piece] = []
    for a, b in zip(edges, edges[1:], strict=False):
        ranks = tuple(rank for start, stop, rank in rows if start <= a and b <= stop)
        if found and found[-1][1:] == (a, ranks):
            found[-1] = (found[-1][0], b, ranks)
        elif ranks:
            found.append((a, b, ranks))
    return tuple(found)


def _table(rows: list[tuple[int, ...]]) -> Ints:
    return np.array(rows, dtype=np.int64).reshape(-1, _Wanted.WIDTH)


def _sorted(rows: Ints) -> Ints:
    return rows[np.lexsort(rows.T[::-1])]
