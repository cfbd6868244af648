"""Head exchange, once per node: a key-value head that several ranks of a node attend with crosses to
one of them, and it passes it on inside.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from megatron_balance.ir.arrays import Ints
from megatron_balance.ir.columns import Message
from megatron_balance.ir.plan import Zone
from megatron_balance.ir.program import Kind
from megatron_balance.patterns.base import Context, Floats, GroupTraffic, Startable, ZoneRounds
from megatron_balance.patterns.head_exchange import (
    ChunkExchange,
    HeadExchange,
    HeadSlice,
    head_counts,
    head_slices,
    kv_heads_of,
    slices_of,
)
from megatron_balance.patterns.sends import Call, Send, Sends, table_of

_IN, _ON, _BACK = range(3)


class _Way:
    """Columns of a table of key-value heads on their way; ranks are group indices in the zone."""

    WIDTH = 5
    OWNER, SRC, DST, HEAD_START, HEAD_STOP = range(5)


@dataclass(frozen=True, slots=True)
class _Shared:
    """A node's ranks [n], as group indices, that all attend with key-value heads [start, stop)."""

    node: int
    members: Ints
    start: int
    stop: int


def _shared_heads(
    ranks: Sequence[int], slices: Sequence[Sequence[HeadSlice]], ranks_per_node: int
) -> Iterator[_Shared]:
    """The key-value heads of each node, cut where the ranks that need them differ."""
    needs: dict[int, list[tuple[int, int, int]]] = {}
    for index, (rank, own) in enumerate(zip(ranks, slices, strict=True)):
        if own:
            needs.setdefault(rank // ranks_per_node, []).append((*kv_heads_of(own), index))
    for node, spans in needs.items():
        edges = sorted({edge for start, stop, _ in spans for edge in (start, stop)})
        for start, stop in zip(edges, edges[1:], strict=False):
            members = [index for a, b, index in spans if a <= start and stop <= b]
            if members:
                yield _Shared(node, np.array(members, dtype=np.int64), start, stop)


def ways(ranks: Sequence[int], slices: Sequence[Sequence[HeadSlice]], ranks_per_node: int) -> tuple[Ints, Ints]:
    """`_Way` rows: heads that a zone's ranks send one another, and those passed on inside nodes."""
    nodes = np.array(ranks, dtype=np.int64) // ranks_per_node
    there, on = ([np.empty((0, _Way.WIDTH), dtype=np.int64)] for _ in range(2))
    for shared in _shared_heads(ranks, slices, ranks_per_node):
        heads, members = (shared.start, shared.stop), shared.members
        here = np.flatnonzero(nodes == shared.node)
        there.append(_rows(here[:, None], here[:, None], members, heads))
        away = np.flatnonzero(nodes != shared.node)
        first = members[np.arange(len(away)) % len(members)]
        there.append(_rows(away, away, first, heads))
        on.append(_rows(away[:, None], first[:, None], members, heads))
    return np.concatenate(there), np.concatenate(on)


def _rows(owner: Ints, src: Ints, dst: Ints, heads: tuple[int, int]) -> Ints:
    # `_Way` rows of all that moves; the columns are broadcast against one another.
    columns = np.broadcast_arrays(owner, src, dst, *(np.int64(head) for head in heads))
    rows = np.stack([column.ravel() for column in columns], axis=1)
    return rows[rows[:, _Way.SRC] != rows[:, _Way.DST]]


class Rates(NamedTuple):
    """Bytes of inputs a token: over the busiest NIC, `plain` and `once`; `passed_on` by a rank."""

    plain: float
    once: float
    passed_on: float


@lru_cache(maxsize=256)
def rates(
    ranks: tuple[int, ...], heads: tuple[int, int], node: tuple[int, int], head_bytes: tuple[float, float]
) -> Rates:
    """Bytes that a head exchange of `ranks` moves between nodes, and that it would once per node.

    `heads`: of queries and of keys; `node`: ranks of a node and of a NIC; `head_bytes`: of a token's
    query, and of its key and value.
    """
    (per_node, per_nic), size = node, len(ranks)
    at_node, place = np.divmod(np.array(ranks, dtype=np.int64), per_node)
    slices = head_slices(*heads, size)
    queries, keys = (each.astype(np.float64) for each in head_counts(slices))
    num_nodes = int(at_node.max()) + 1
    here = np.bincount(at_node, minlength=num_nodes)
    far = (size - here)[at_node] / size  # of the tokens
    came, passed_on, distinct = np.zeros(size), np.zeros(size), np.zeros(num_nodes)
    for shared in _shared_heads(ranks, slices, per_node):
        count, share = shared.stop - shared.start, len(shared.members)
        distinct[shared.node] += count
        came[shared.members] += count / share
        passed_on[shared.members] += count * (share - 1) / share
    nic = at_node * -(-per_node // per_nic) + place // per_nic

    def busiest(into: Floats, leaving: Floats) -> float:
        # `into` by rank, `leaving` by the node that it is for.
        out = (leaving.sum() - leaving)[at_node] / size
        return float(max(np.bincount(nic, each).max() for each in (into * far, out)))

    def by_node(each: Floats) -> Floats:
        return np.bincount(at_node, each, num_nodes)

    query, key = head_bytes
    plain = queries * query + keys * key
    once = busiest(queries * query + came * key, by_node(queries * query) + distinct * key)
    return Rates(busiest(plain, by_node(plain)), once, float((passed_on * far).max() * key))


# A head exchange (`patterns.head_exchange`) with one exchange more: in, on, back. The ranks of a
# node that share a key-value head receive it from other nodes in turns, one the tokens of one
# source, the next those of the next, so that all their NICs carry an equal part; inside the node of
# its owner a token goes straight to all of them. In the backward the way is turned: gradients of
# keys and values are added up inside the node, and cross once.
#
# A replayed backward brings the inputs the same way, the first exchange before anything else, since
# the second one passes on what it brings.
class HeadExchangeOnce(HeadExchange):
    """A head exchange; what a node's ranks share is passed on before the launch."""

    def num_exchanges(self, zone: Zone) -> int:
        # In, on and back, where there are other ranks (unused ids cost nothing).
        return 3 if len(zone.ranks) > 1 else 0

    def sends(self, zone: Zone, context: Context, rank: int | None = None, *, across: bool = False) -> Sends:
        # Those of the head exchange, with keys and values that cross once and are passed on.
        plain, ranks = super().sends(zone, context, rank, across=across), np.array(zone.ranks)
        keys: list[Ints] = []
        for step, rows in enumerate(ways(zone.ranks, slices_of(zone, context), context.ranks_per_node)):
            owner, src, dst, start, stop = rows.T
            made = table_of(step, ranks[src], ranks[dst], Kind.KV, start, stop, owner, 0)
            if across:
                made = made[context.crosses(made[:, Send.SRC], made[:, Send.DST])]
            keys.append(made if rank is None else made[(made[:, Send.SRC] == rank) | (made[:, Send.DST] == rank)])
        queries, back = (plain.rows[plain.rows[:, Send.KIND] == kind] for kind in (Kind.Q, Kind.OUT))
        there = np.concatenate([queries, keys[_IN]])
        # A replayed backward begins where the forward ended: there it brings what comes first, and
        # nothing where the forward did.
        made = replace(plain, rows=_as_exchange(there, _BACK), calls=_renamed(plain.calls, {0: _BACK}))
        rows = np.concatenate([there, keys[_ON], _as_exchange(back, _BACK)])
        return replace(plain, rows=rows, calls=_renamed(plain.calls, {0: _IN, 1: _BACK}), again=made, silent=(_IN,))

    def startable(self, zone: Zone) -> Startable:
        # The way in, its replay in the place of the way back, and the gradients of the outputs.
        del zone
        return Startable(forward=(_IN,), gradients=(_BACK,), replays=(_BACK,))

    def largest_exchange(self, zone: Zone, context: Context) -> Ints:
        # In the first all-to-all or behind it, whichever is more.
        return super(HeadExchange, self).largest_exchange(zone, context)  # by the table

    def rounds(self, zone: Zone, context: Context) -> ZoneRounds:
        # An all-to-all, what is passed on, a launch and an all-to-all.
        found = super().rounds(zone, context)
        if not isinstance(found.traffic, GroupTraffic):
            return found
        rows = self.sends(zone, context).messages()
        there = rows[(rows[:, Message.EXCHANGE] == _IN) & (rows[:, Message.KIND] == Kind.KV)]
        place = np.zeros(context.num_ranks, dtype=np.int64)
        place[found.ranks] = np.arange(len(found.ranks))
        keys = np.zeros((len(found.ranks),) * 2)
        heads = there[:, Message.HEAD_STOP] - there[:, Message.HEAD_START]
        ends = place[there[:, Message.SRC]], place[there[:, Message.DST]]
        np.add.at(keys, ends, there[:, Message.TOKENS] * heads)
        inputs, on = {**found.traffic.inputs, Kind.KV: keys}, rows[rows[:, Message.EXCHANGE] == _ON]
        return replace(found, traffic=replace(found.traffic, inputs=inputs, passed_on=on))


def _as_exchange(sends: Ints, number: int) -> Ints:
    sends = sends.copy()
    sends[:, Send.EXCHANGE] = number
    return sends


def _renamed(calls: Mapping[int, Call], numbers: Mapping[int, int]) -> dict[int, Call]:
    return {number: calls[at] for at, number in numbers.items() if at in calls}


class ChunkExchangeOnce(HeadExchangeOnce, ChunkExchange):
    """As `HeadExchangeOnce`, where every rank holds a contiguous chunk of each sequence."""
