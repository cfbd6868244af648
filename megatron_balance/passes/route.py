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
from typing import TypeAlias

import numpy as np

from megatron_balance.core.program import ROUTE_WIDTH, TRANSFER_WIDTH, Exchange, Op, Program, RankProgram
from megatron_balance.core.rows import Rows
from megatron_balance.passes.tables import Ints, as_array, as_rows, concat


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

    def proxies(self, rank: int) -> list[int]:
        """The rank that serves `rank` on each NIC of its node."""
        first = rank - rank % self.ranks_per_node
        own, place = divmod(rank - first, self.ranks_per_nic)
        found: list[int] = []
        for nic in range(self.per_node):
            size = min(self.ranks_per_nic, self.ranks_per_node - nic * self.ranks_per_nic)
            found.append(rank if nic == own else first + nic * self.ranks_per_nic + place % size)
        return found


Pair: TypeAlias = tuple[int, int]
"""(src, dst)."""


def pairs_between_nodes(exchanges: Iterable[tuple[int, Exchange]], nics: Nics) -> dict[int, dict[Pair, Ints]]:
    """By the number given with each exchange: the pairs of ranks on different nodes that move enough to be routed, and their rows.

    None at all where a node has one NIC.
    """
    listed = [] if nics.per_node == 1 else list(exchanges)
    rows = concat([op.transfers for _, op in listed], TRANSFER_WIDTH)
    number = np.repeat(np.array([at for at, _ in listed], dtype=np.int64), [len(op.transfers) for _, op in listed])
    across = rows[:, 6] // nics.ranks_per_node != rows[:, 7] // nics.ranks_per_node
    if not across.any():
        return {}
    rows, number = rows[across], number[across]
    order = np.lexsort((rows[:, 7], rows[:, 6], number))
    rows, number = rows[order], number[order]
    keys = np.column_stack([number, rows[:, 6:8]])
    begin = np.flatnonzero(np.append(True, (keys[1:] != keys[:-1]).any(axis=1)))
    tokens = np.add.reduceat(rows[:, 3] - rows[:, 2], begin)
    found: dict[int, dict[Pair, Ints]] = {}
    ends = np.append(begin[1:], len(rows))
    for (at, src, dst), start, stop, count in zip(keys[begin].tolist(), begin.tolist(), ends.tolist(), tokens.tolist(), strict=True):
        if count >= nics.min_tokens:
            found.setdefault(at, {})[src, dst] = rows[start:stop]
    return found


def routes(pairs: Iterable[Pair], nics: Nics) -> Rows:
    """Route rows (src, dst, piece, send_proxy, receive_proxy) of these pairs."""
    return Rows.of(
        ROUTE_WIDTH,
        [
            (src, dst, piece, send_proxy, receive_proxy)
            for src, dst in sorted(pairs)
            for piece, (send_proxy, receive_proxy) in enumerate(nics.pieces * list(zip(nics.proxies(src), nics.proxies(dst), strict=True)))
        ],
    )


def route(program: RankProgram, neighbours: Sequence[RankProgram], ids: frozenset[int], nics: Nics) -> RankProgram:
    """`program` with its transfers between nodes routed, and with what the rank passes on for its `neighbours`.

    `neighbours`: programs, not routed, of the other ranks of its node that exchange anything with other nodes. `ids`: the forward
    exchanges that are routed.
    """
    listed = [[(op.id, op) for op in other.forward if isinstance(op, Exchange) and op.id in ids] for other in (program, *neighbours)]
    again = [[(at, op) for at, op in other.replays if at in ids] for other in (program, *neighbours)]
    routed = _all_routed(listed[0], [pair for other in listed[1:] for pair in other], program.rank, nics)
    replays = dict(program.replays) | _all_routed(again[0], [pair for other in again[1:] for pair in other], program.rank, nics)
    forward, queues = _weave(program, routed)
    return replace(program, forward=forward, queues=queues, replays=tuple(sorted(replays.items(), key=lambda item: item[0])))


def _all_routed(own: list[tuple[int, Exchange]], others: list[tuple[int, Exchange]], rank: int, nics: Nics) -> dict[int, Exchange]:
    """By number, every exchange of `own` and of the neighbours, routed: what the rank takes part in and what it passes on."""
    mine, theirs = pairs_between_nodes(own, nics), pairs_between_nodes(others, nics)
    bare = dict(own)
    found: dict[int, Exchange] = {}
    for at in sorted({*bare, *(at for at, _ in others)}):
        passed_on = {
            (src, dst): rows
            for (src, dst), rows in theirs.get(at, {}).items()
            if rank not in (src, dst) and (rank in nics.proxies(src) or rank in nics.proxies(dst))
        }
        tables = [as_array(bare[at].transfers)] if at in bare else []
        rows = np.concatenate([*tables, *passed_on.values(), np.empty((0, TRANSFER_WIDTH), dtype=np.int64)])
        found[at] = Exchange(at, as_rows(rows), routes=routes([*mine.get(at, {}), *passed_on], nics))
    return found


def _weave(program: RankProgram, routed: dict[int, Exchange]) -> tuple[tuple[Op, ...], tuple[tuple[str, int], ...]]:
    """The forward ops and queues with `routed` exchanges in their places.

    What the rank only passes on comes as late as the order of ids allows, so that what stands between two of its own exchanges stays
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
