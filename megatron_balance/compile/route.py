"""Routing (Zeppelin, section 3.3): a transfer between nodes goes over all NICs of both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from operator import itemgetter
from typing import NamedTuple, TypeAlias

import numpy as np

from megatron_balance.ir.arrays import Bools, Ints, as_array, as_rows, run_bounds
from megatron_balance.ir.columns import Route, Rows, Transfer
from megatron_balance.ir.program import Exchange, Op, RankProgram


# Directly, the NICs of two ranks carry all that one sends the other, while those of their
# neighbours stand idle. Routed, the source hands a piece to a proxy on each NIC of its node
# (dispatch), the proxies send their pieces to proxies on the other node (across), and those hand
# them to the target (combine). The number of pieces is the smaller number of NICs of the two nodes
# (the paper's minimum rule, which counts ranks; ranks that share a NIC gain nothing together). Any
# rank of the node serves, whatever it attends to.
#
# Piece i crosses on NIC i at both ends; with several pieces a NIC, the dispatch of one overlaps the
# crossing of another. On their own NIC source and target serve themselves. On another NIC the proxy
# is the rank that stands there as the source (the target) does on its own, so that ranks sharing a
# NIC take turns.
@dataclass(frozen=True, slots=True)
class Nics:
    """The NICs of a cluster by rank: ranks are numbered node by node, neighbours share a NIC.

    `min_tokens`: transfers of fewer tokens go directly. `pieces`: number of pieces of one transfer
    on each NIC.
    """

    ranks_per_node: int
    ranks_per_nic: int
    min_tokens: int = 1
    pieces: int = 1

    @property
    def per_node(self) -> int:
        return -(-self.ranks_per_node // self.ranks_per_nic)

    def proxies(self, ranks: Ints) -> Ints:
        # The proxy of each of `ranks` [n] on each NIC of its node: [n, NICs of a node].
        own, place = np.divmod(ranks % self.ranks_per_node, self.ranks_per_nic)
        before = np.arange(self.per_node) * self.ranks_per_nic  # ranks on the NICs before each
        sharing = np.minimum(self.ranks_per_nic, self.ranks_per_node - before)
        proxies = (ranks - ranks % self.ranks_per_node)[:, None] + before + place[:, None] % sharing
        proxies[np.arange(len(ranks)), own] = ranks
        return proxies


# Transfers of exchanges, by their numbers; those of one number may be listed in parts.
Listed: TypeAlias = Sequence[tuple[int, Ints]]


class Passing(NamedTuple):
    """Transfers of the others of a node with other nodes, in routed exchanges."""

    forward: Listed
    replays: Listed


@dataclass(frozen=True, slots=True)
class _Pairs:
    """Pairs of ranks in exchanges, by number, then rank. `rows[begin[i] : begin[i + 1]]`: transfers
    of pair i.

    `number` [n]: of the exchange; `ends` [n, 2]: src and dst.
    """

    number: Ints
    ends: Ints
    begin: Ints
    rows: Ints

    @classmethod
    def between_nodes(cls, listed: Listed, nics: Nics) -> _Pairs:
        # The pairs on different nodes that move enough to be routed; none at all where a node has
        # one NIC.
        rows = np.concatenate([np.empty((0, Transfer.WIDTH), dtype=np.int64), *(table for _, table in listed)])
        number = np.repeat(np.array([at for at, _ in listed], dtype=np.int64), [len(table) for _, table in listed])
        src_node, dst_node = (rows[:, Transfer.ENDS] // nics.ranks_per_node).T
        across = (src_node != dst_node) & (nics.per_node > 1)
        rows, number = rows[across], number[across]
        order = np.lexsort((rows[:, Transfer.DST], rows[:, Transfer.SRC], number))
        rows, number = rows[order], number[order]
        ends = rows[:, Transfer.ENDS]
        begin = run_bounds((number[1:] != number[:-1]) | (ends[1:] != ends[:-1]).any(axis=1), len(rows))
        pairs = cls(number[begin[:-1]], ends[begin[:-1]], begin, rows)
        if not len(rows):
            return pairs
        tokens = np.add.reduceat(rows[:, Transfer.STOP] - rows[:, Transfer.START], begin[:-1])
        return pairs.only(tokens >= nics.min_tokens)

    def only(self, chosen: Bools) -> _Pairs:
        sizes = np.diff(self.begin)
        begin = np.append(0, np.cumsum(sizes[chosen]))
        return _Pairs(self.number[chosen], self.ends[chosen], begin, self.rows[np.repeat(chosen, sizes)])

    def passed_on(self, rank: int, nics: Nics) -> _Pairs:
        # The pairs for which `rank` is a proxy and neither source nor target.
        serves = (nics.proxies(self.ends.ravel()) == rank).any(axis=1).reshape(self.ends.shape)
        return self.only(serves.any(axis=1) & (self.ends != rank).all(axis=1))


def _routes(pairs: Ints, nics: Nics) -> Ints:
    # `Route` rows of pairs [n, 2], one pair after the other.
    count = nics.pieces * nics.per_node
    rows = np.empty((len(pairs), count, Route.WIDTH), dtype=np.int64)
    rows[:, :, Route.PAIR] = pairs[:, None]
    rows[:, :, Route.PIECE] = np.arange(count)
    for column, ranks in zip((Route.SEND_PROXY, Route.RECEIVE_PROXY), pairs.T, strict=True):
        rows[:, :, column] = np.tile(nics.proxies(ranks), (1, nics.pieces))
    return rows.reshape(-1, Route.WIDTH)


def route(program: RankProgram, passing: Passing, ids: frozenset[int], nics: Nics) -> RankProgram:
    """`program` with its transfers between nodes routed, and with what the rank passes on for
    others of its node.

    `passing`: transfers, not routed, of which others of the node are source or target; others may
    be listed beside them. `ids`: the forward exchanges that are routed.
    """
    exchanges = {op.id: op for op in program.forward if isinstance(op, Exchange) and op.id in ids}
    routed = _all_routed(exchanges, passing.forward, program.rank, nics)
    again = {at: op for at, op in program.replays if at in ids}
    # A rank that passes something on in the forward alone has nothing to bring again.
    silent = {at: Exchange(at, Rows(Transfer.WIDTH)) for at, _ in passing.replays if at in routed}
    replays = silent | dict(program.replays) | _all_routed(again, passing.replays, program.rank, nics)
    forward, queues = _weave(program, routed)
    return replace(program, forward=forward, queues=queues, replays=tuple(sorted(replays.items(), key=itemgetter(0))))


def _all_routed(own: dict[int, Exchange], others: Listed, rank: int, nics: Nics) -> dict[int, Exchange]:
    # Every exchange, routed, that the rank takes part in or passes something on in, by its number.
    if not own and not others:
        return {}
    mine = _Pairs.between_nodes([(at, as_array(op.transfers)) for at, op in own.items()], nics)
    passed_on = _Pairs.between_nodes(others, nics).passed_on(rank, nics)
    numbers = sorted({*own, *passed_on.number.tolist()})
    number, ends = np.concatenate([mine.number, passed_on.number]), np.concatenate([mine.ends, passed_on.ends])
    order = np.lexsort((*ends.T[::-1], number))
    pieces = _by_number(_routes(ends[order], nics), np.repeat(number[order], nics.pieces * nics.per_node), numbers)
    carried = _by_number(passed_on.rows, np.repeat(passed_on.number, np.diff(passed_on.begin)), numbers)
    routed: dict[int, Exchange] = {}
    for at, taken, routing in zip(numbers, carried, pieces, strict=True):
        bare = own[at].transfers.data if at in own else b""
        routed[at] = Exchange(at, Rows(Transfer.WIDTH, bare + taken), routes=Rows(Route.WIDTH, routing))
    return routed


def _by_number(table: Ints, number: Ints, numbers: Sequence[int]) -> list[bytes]:
    # The rows of `table`, as bytes, of each of `numbers`; `number` [n], ascending: that of each
    # row.
    data, width = as_rows(table).data, 8 * table.shape[1]
    begin, end = (np.searchsorted(number, numbers, side=side) * width for side in ("left", "right"))
    return [data[a:b] for a, b in zip(begin.tolist(), end.tolist(), strict=True)]


def _weave(program: RankProgram, routed: dict[int, Exchange]) -> tuple[tuple[Op, ...], tuple[tuple[str, int], ...]]:
    # The forward ops and queues with `routed` exchanges in their places.
    # Exchanges in which the rank is a proxy only come as late as the order of ids allows, so that
    # what stands between two of its own exchanges stays where it is.
    own = {op.id for op in program.forward if isinstance(op, Exchange)}
    waiting = [at for at, op in routed.items() if at not in own and op.transfers]
    forward: list[Op] = []
    queues: list[tuple[str, int]] = []
    ops = iter(program.forward)
    for name, count in program.queues:
        before = len(forward)
        for op in islice(ops, count):
            if not isinstance(op, Exchange):
                forward.append(op)
                continue
            while waiting and waiting[0] < op.id:
                forward.append(routed[waiting.pop(0)])
            replaced = routed.get(op.id, op)
            if replaced.transfers or replaced.group:
                forward.append(replaced)
        queues.append((name, len(forward) - before))
    forward += [routed[at] for at in waiting]
    return tuple(forward), (*queues, *([("proxy", len(waiting))] if waiting else []))
