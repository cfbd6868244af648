"""The communication routing layer (Zeppelin, section 3.3): a transfer between nodes goes over all NICs of both nodes.

Directly, the NICs of two ranks carry all that one sends the other, while those of their neighbours stand idle. Routed, the source
hands a piece to a proxy on each NIC of its node (dispatch), the proxies send their pieces to proxies on the other node (across), and
those hand them to the target (combine). The number of pieces is the smaller number of NICs of the two nodes (the paper's minimum
rule, which counts ranks; ranks that share a NIC gain nothing together). Any rank of the node serves, whatever it attends to.

Piece i crosses on NIC i at both ends; with several pieces a NIC, the dispatch of one overlaps the crossing of another. On their own
NIC source and target serve themselves; on another one the proxy is the rank that stands there as the source (the target) does on its
own, so that ranks sharing a NIC take turns.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from operator import itemgetter
from typing import NamedTuple, TypeAlias

import numpy as np

from megatron_balance.ir.arrays import Bools, Ints, as_array, as_rows, run_bounds
from megatron_balance.ir.columns import Route, Transfer
from megatron_balance.ir.program import Exchange, Op, Program, RankProgram
from megatron_balance.ir.rows import Rows


@dataclass(frozen=True, slots=True)
class Nics:
    """Which rank uses which NIC: ranks are numbered node by node, neighbours share one.

    `min_tokens`: fewer go directly. `pieces`: of one transfer on each NIC.
    """

    ranks_per_node: int
    ranks_per_nic: int
    min_tokens: int = 1
    pieces: int = 1

    @property
    def per_node(self) -> int:
        return -(-self.ranks_per_node // self.ranks_per_nic)

    def proxies(self, ranks: Ints) -> Ints:
        """The rank that serves each of `ranks` [n] on each NIC of its node: [n, NICs of a node]."""
        own, place = np.divmod(ranks % self.ranks_per_node, self.ranks_per_nic)
        before = np.arange(self.per_node) * self.ranks_per_nic  # ranks on the NICs before each
        sharing = np.minimum(self.ranks_per_nic, self.ranks_per_node - before)
        found = (ranks - ranks % self.ranks_per_node)[:, None] + before + place[:, None] % sharing
        found[np.arange(len(ranks)), own] = ranks
        return found


Pair: TypeAlias = tuple[int, int]
"""(src, dst)."""

Listed: TypeAlias = Sequence[tuple[int, Ints]]
"""Transfers of exchanges, by their numbers; those of one number may be listed in parts."""


class Passing(NamedTuple):
    """What the other ranks of a node exchange with other nodes in forward and in replayed exchanges that are routed."""

    forward: Listed
    replays: Listed


@dataclass(frozen=True, slots=True)
class _Pairs:
    """Pairs of ranks in exchanges, `keys` rows (number, src, dst) ascending, and what they move: `rows[begin[i] : begin[i + 1]]`."""

    keys: Ints
    begin: Ints
    rows: Ints

    @classmethod
    def between_nodes(cls, listed: Listed, nics: Nics) -> _Pairs:
        """Those on different nodes that move enough to be routed; none at all where a node has one NIC."""
        rows = np.concatenate([np.empty((0, Transfer.WIDTH), dtype=np.int64), *(table for _, table in listed)])
        number = np.repeat(np.array([at for at, _ in listed], dtype=np.int64), [len(table) for _, table in listed])
        across = rows[:, 6] // nics.ranks_per_node != rows[:, 7] // nics.ranks_per_node
        across &= nics.per_node > 1
        rows, number = rows[across], number[across]
        order = np.lexsort((rows[:, 7], rows[:, 6], number))
        rows = rows[order]
        keys = np.column_stack([number[order], rows[:, 6:8]])
        begin = run_bounds((keys[1:] != keys[:-1]).any(axis=1), len(rows)) if len(rows) else np.zeros(1, dtype=np.int64)
        pairs = cls(keys[begin[:-1]], begin, rows)
        return pairs.only(np.add.reduceat(rows[:, 3] - rows[:, 2], begin[:-1]) >= nics.min_tokens) if len(rows) else pairs

    def only(self, chosen: Bools) -> _Pairs:
        sizes = np.diff(self.begin)
        return _Pairs(self.keys[chosen], np.append(0, np.cumsum(sizes[chosen])), self.rows[np.repeat(chosen, sizes)])

    def passed_on(self, rank: int, nics: Nics) -> _Pairs:
        """Those for which `rank` is a proxy and neither source nor target."""
        ends = self.keys[:, 1:]
        serves = (nics.proxies(ends.ravel()) == rank).any(axis=1).reshape(ends.shape)
        return self.only(serves.any(axis=1) & (ends != rank).all(axis=1))


def pairs_between_nodes(exchanges: Iterable[tuple[int, Exchange]], nics: Nics) -> dict[int, dict[Pair, Ints]]:
    """By the number given with each exchange: the pairs of ranks on different nodes that move enough to be routed, and their rows.

    None at all where a node has one NIC.
    """
    pairs = _Pairs.between_nodes([(at, as_array(op.transfers)) for at, op in exchanges], nics)
    found: dict[int, dict[Pair, Ints]] = {}
    for (at, src, dst), start, stop in zip(pairs.keys.tolist(), pairs.begin[:-1].tolist(), pairs.begin[1:].tolist(), strict=True):
        found.setdefault(at, {})[src, dst] = pairs.rows[start:stop]
    return found


def routes(pairs: Iterable[Pair], nics: Nics) -> Rows:
    """Route rows (src, dst, piece, send_proxy, receive_proxy) of these pairs."""
    return as_rows(_routes(np.array(sorted(pairs), dtype=np.int64).reshape(-1, 2), nics))


def _routes(pairs: Ints, nics: Nics) -> Ints:
    """The same of pairs [n, 2], one pair after the other."""
    count = nics.pieces * nics.per_node
    rows = np.empty((len(pairs), count, Route.WIDTH), dtype=np.int64)
    rows[:, :, :2] = pairs[:, None]
    rows[:, :, 2] = np.arange(count)
    for column in (0, 1):
        rows[:, :, 3 + column] = np.tile(nics.proxies(pairs[:, column]), (1, nics.pieces))
    return rows.reshape(-1, Route.WIDTH)


def route(program: RankProgram, passing: Passing, ids: frozenset[int], nics: Nics) -> RankProgram:
    """`program` with its transfers between nodes routed, and with what the rank compile on for others of its node.

    `passing`: transfers, not routed, of which others of the node are source or target; others may be listed beside them. `ids`: the
    forward exchanges that are routed.
    """
    exchanges = {op.id: op for op in program.forward if isinstance(op, Exchange) and op.id in ids}
    routed = _all_routed(exchanges, passing.forward, program.rank, nics)
    again = {at: op for at, op in program.replays if at in ids}
    # A rank that compile something on in the forward alone has nothing to bring again.
    silent = {at: Exchange(at, Rows(Transfer.WIDTH)) for at, _ in passing.replays if at in routed}
    replays = silent | dict(program.replays) | _all_routed(again, passing.replays, program.rank, nics)
    forward, queues = _weave(program, routed)
    return replace(program, forward=forward, queues=queues, replays=tuple(sorted(replays.items(), key=itemgetter(0))))


def _all_routed(own: dict[int, Exchange], others: Listed, rank: int, nics: Nics) -> dict[int, Exchange]:
    """By number, every exchange that the rank takes part in or compile something on in, routed."""
    if not own and not others:
        return {}
    mine = _Pairs.between_nodes([(at, as_array(op.transfers)) for at, op in own.items()], nics)
    passed_on = _Pairs.between_nodes(others, nics).passed_on(rank, nics)
    numbers = sorted({*own, *passed_on.keys[:, 0].tolist()})
    keys = np.concatenate([mine.keys, passed_on.keys])
    keys = keys[np.lexsort(keys.T[::-1])]
    pieces = _cut(_routes(keys[:, 1:], nics), np.repeat(keys[:, 0], nics.pieces * nics.per_node), numbers)
    carried = _cut(passed_on.rows, np.repeat(passed_on.keys[:, 0], np.diff(passed_on.begin)), numbers)
    found: dict[int, Exchange] = {}
    for at, taken, routing in zip(numbers, carried, pieces, strict=True):
        bare = own[at].transfers.data if at in own else b""
        found[at] = Exchange(at, Rows(Transfer.WIDTH, bare + taken), routes=Rows(Route.WIDTH, routing))
    return found


def _cut(table: Ints, number: Ints, numbers: Sequence[int]) -> list[bytes]:
    """The rows of `table` of each of `numbers`; `number` [n], ascending: whose each row is."""
    data, width = as_rows(table).data, 8 * table.shape[1]
    begin, end = (np.searchsorted(number, numbers, side=side) * width for side in ("left", "right"))
    return [data[a:b] for a, b in zip(begin.tolist(), end.tolist(), strict=True)]


def _weave(program: RankProgram, routed: dict[int, Exchange]) -> tuple[tuple[Op, ...], tuple[tuple[str, int], ...]]:
    """The forward ops and queues with `routed` exchanges in their places.

    What the rank only compile on comes as late as the order of ids allows, so that what stands between two of its own exchanges stays
    where it is.
    """
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


def with_routes(program: Program, nics: Nics) -> Program:
    """A whole forward program, as parsed from text, with every transfer between nodes routed."""
    ops = [
        Exchange(op.id, op.transfers, routes=routes(pairs_between_nodes([(0, op)], nics).get(0, {}), nics))
        if isinstance(op, Exchange)
        else op
        for op in program.forward
    ]
    return replace(program, forward=tuple(ops))
