"""Messages of one rank's exchanges, looked up in its buffers, all exchanges of a phase at once; and
its part in routed exchanges: its own pieces, and those that it relays for others.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import TypeAlias

import numpy as np

from megatron_balance.analysis.wire import Carried
from megatron_balance.compile import order
from megatron_balance.compile.ping_pong import NUM_NANO_BATCHES
from megatron_balance.compile.transpose import OpZones, forward_id
from megatron_balance.errors import InvalidProgramError
from megatron_balance.ir.arrays import Ints, as_array, numbered, run_bounds
from megatron_balance.ir.columns import Route, Rows, Transfer
from megatron_balance.ir.program import MOVED, Exchange, Kind, Op, RankProgram
from megatron_balance.runtime.lower import steps
from megatron_balance.runtime.lower.regions import Indexes, Instance, RegionIndex, RowRange, grouped_runs, pack_runs

# This rank's own pieces of one exchange, sent and received, by the peer at the other end.
_Routed: TypeAlias = tuple[dict[int, tuple[steps.Piece, ...]], dict[int, tuple[steps.Piece, ...]]]


@dataclass(frozen=True, slots=True)
class _Messages:
    """One side (sent or received) of all exchanges of a phase."""

    rows: Ints  # [n, Transfer.WIDTH]; of message i: rows[begin[i]:begin[i + 1]]
    begin: Ints  # [messages + 1]
    # Of each message: number of its op, rank at the other end, what it carries, the buffer that it
    # fills (-1: none; received inputs get one), and whether its rows lie in the linear layout.
    op: list[int]
    peer: list[int]
    kind: list[Kind]
    buffer: list[int]
    owned: list[bool]

    @property
    def num_heads(self) -> list[int]:
        first = self.rows[self.begin[:-1]]
        return (first[:, Transfer.HEAD_STOP] - first[:, Transfer.HEAD_START]).tolist()


class PhaseMessages:
    """The messages of one phase of a rank's program; received inputs become buffers.

    `sizes`: (rows, heads) of these buffers, by kind of input and number, from `num_buffers` on, which
    grows. `instances`: where the regions received lie in them, by kind, [n, `Instance.WIDTH`].
    """

    def __init__(self, program: RankProgram, ops: Sequence[Op], *, forward: bool, num_buffers: int = 1) -> None:
        self.program, self.ops, self.forward, self.num_buffers = program, ops, forward, num_buffers
        self.sizes: dict[Kind, dict[int, tuple[int, int]]] = {kind: {} for kind in steps.INPUTS}
        tables = [(i, op.transfers) for i, op in enumerate(ops) if isinstance(op, Exchange)]
        rows, op_of = numbered(tables, Transfer.WIDTH)
        owned = [self._owned(op) for op in ops] if program.remap_in else [(False, False)] * len(ops)
        mine = rows[:, Transfer.SRC] == program.rank
        self.sent = _messages(rows[mine], op_of[mine], Transfer.DST, [sends for sends, _ in owned])
        mine = rows[:, Transfer.DST] == program.rank
        self.received = _messages(rows[mine], op_of[mine], Transfer.SRC, [receives for _, receives in owned])
        self.instances = self._make_buffers(self.received)

    def _owned(self, op: Op) -> tuple[bool, bool]:
        """Whether an op of a remapped call sends, and receives, rows of the linear layout (the tokens
        as the rank owns them; all else lies as attention has it).
        """
        if not isinstance(op, Exchange):
            return False, False
        first, last = self.program.remap_in, self.program.num_exchanges - 1
        if self.forward:
            return op.id < first, op.id == last
        of = forward_id(op.id, self.program)
        # In the backward, behind the remap, exchanges take turns: one brings inputs of a forward
        # exchange again (replay), the next reverses it. So (sends, receives) of owned rows: a replay
        # of the remap sends them; the reverse of the last exchange sends what that one received; the
        # reverse of the remap receives what it had sent.
        reverses = op.id >= first and (op.id - first) % 2 == 1
        return (of == last, of < first) if reverses else (of < first, False)

    def _make_buffers(self, received: _Messages) -> dict[Kind, Ints]:
        rows, begin = received.rows, received.begin
        sizes = rows[:, Transfer.STOP] - rows[:, Transfer.START]
        # [n + 1]: rows before each region; a message's buffer begins with its first.
        before = np.append(0, sizes.cumsum())
        totals, heads = np.diff(before[begin]).tolist(), received.num_heads
        for i, kind in enumerate(received.kind):
            if kind in steps.INPUTS:
                received.buffer[i] = self.num_buffers
                self.sizes[kind][self.num_buffers] = (totals[i], heads[i])
                self.num_buffers += 1
        message = np.repeat(np.arange(len(received.kind)), np.diff(begin))
        table = np.empty((len(rows), Instance.WIDTH), dtype=np.int64)
        table[:, Instance.REGION] = rows[:, Transfer.REGION]
        table[:, Instance.BUFFER] = np.array(received.buffer, dtype=np.int64)[message]
        # Row in the buffer: rows before the region less those before its message.
        table[:, Instance.ROW] = before[:-1] - before[begin[message]]
        return {kind: table[rows[:, Transfer.KIND] == kind] for kind in steps.INPUTS}

    def exchanges(
        self, indexes: Indexes, places: OpZones, ranks_per_node: int, nano_batch: int
    ) -> tuple[dict[int, steps.ExchangeStep], tuple[tuple[steps.RelayTask, ...], ...]]:
        """The exchanges of the phase by op index, and what the rank relays for others beside them."""
        rank, node = self.program.rank, self.program.rank // ranks_per_node

        def tag(op: Exchange) -> int:
            """The first tag of an exchange's messages, which its direct ones have."""
            return ((op.id * 2 + self.forward) * NUM_NANO_BATCHES + nano_batch) * _TAGS

        routed, relay_tasks = _routes(self.ops, places.queues, rank, ranks_per_node, tag)
        sends, receives = (_by_op(side, indexes, rank, ranks_per_node) for side in (self.sent, self.received))
        exchanges: dict[int, steps.ExchangeStep] = {}
        for i, op in enumerate(self.ops):
            if isinstance(op, Exchange):
                out, back, own = sends.get(i, ()), receives.get(i, ()), routed.get(i, ({}, {}))
                exchanges[i] = steps.ExchangeStep(
                    op=i,
                    id=op.id,
                    zone=places.zones[i],
                    collective=op.collective,
                    group=op.group,
                    sends=out,
                    receives=back,
                    tag=tag(op),
                    routed_sends=own[0],
                    routed_receives=own[1],
                    far=frozenset([m.peer for m in (*out, *back) if m.peer // ranks_per_node != node]),
                    stream=order.collective_stream(op.group, ranks_per_node) if op.collective != "p2p" else "",
                    arrivals=arrivals(back),
                )
        return exchanges, relay_tasks


def _by_op(
    side: _Messages, indexes: Indexes, rank: int, ranks_per_node: int
) -> dict[int, tuple[steps.PeerMessage, ...]]:
    moved = {(op, peer) for op, peer, kind in zip(side.op, side.peer, side.kind, strict=True) if kind in MOVED}
    node = rank // ranks_per_node
    messages: list[steps.PeerMessage] = []
    columns = side.op, side.peer, side.kind, side.buffer, _packed(side, indexes)
    for op, peer, kind, buffer, packed in zip(*columns, strict=True):
        stream = order.stream_name("direct", peer // ranks_per_node != node, order.TRAFFIC_CLASSES[(op, peer) in moved])
        messages.append(steps.PeerMessage(peer, kind, packed, buffer, (), stream))
    bounds = run_bounds(np.diff(side.op) != 0, len(side.op)).tolist() if messages else [0]
    return {side.op[a]: tuple(messages[a:b]) for a, b in pairwise(bounds)}


def _packed(side: _Messages, indexes: Indexes) -> list[steps.Packed]:
    """Rows of every message; received inputs have none, they become buffers."""
    looked_up_in = [
        indexes.of(kind, owned=owned) if buffer < 0 else None
        for kind, owned, buffer in zip(side.kind, side.owned, side.buffer, strict=True)
    ]
    sizes = side.rows[:, Transfer.STOP] - side.rows[:, Transfer.START]
    num_rows = np.add.reduceat(sizes, side.begin[:-1]).tolist() if looked_up_in else []
    message = np.repeat(np.arange(len(looked_up_in)), np.diff(side.begin))
    row_ranges = _resolve(side.rows[:, Transfer.REGION].T, message, looked_up_in)
    runs = grouped_runs(sizes, row_ranges, message, len(looked_up_in))
    columns = zip(runs, num_rows, side.num_heads, looked_up_in, strict=True)
    return [
        pack_runs(of, rows, heads) if index else steps.Packed((), rows, heads) for of, rows, heads, index in columns
    ]


def _messages(rows: Ints, op_index: Ints, peers: int, owned: Sequence[bool]) -> _Messages:
    """Transfers as messages: what one exchange moves of one kind and head span to or from one peer.
    `peers`: the column of the rank at the other end, `Transfer.DST` of sent rows and `Transfer.SRC`
    of received ones; `owned`: of each op.
    """
    keys = np.stack(
        [op_index, rows[:, peers], rows[:, Transfer.KIND], rows[:, Transfer.HEAD_START], rows[:, Transfer.HEAD_STOP]]
    )
    changes = keys[:, 1:] != keys[:, :-1]
    first = changes.argmax(axis=0), np.arange(max(0, len(rows) - 1))  # where rows begin to differ
    if (keys[:, 1:][first] < keys[:, :-1][first]).any():
        sorting = np.lexsort(keys[::-1])
        rows, op_index, keys = rows[sorting], op_index[sorting], keys[:, sorting]
        changes = keys[:, 1:] != keys[:, :-1]
    begin = run_bounds(changes.any(axis=0), len(rows))
    first_rows = rows[begin[:-1]]
    kinds = [_KINDS[k] for k in first_rows[:, Transfer.KIND].tolist()]
    ops = op_index[begin[:-1]].tolist()
    return _Messages(rows, begin, ops, first_rows[:, peers].tolist(), kinds, [-1] * len(ops), [owned[op] for op in ops])


def _resolve(regions: Ints, message: Ints, index_of: Sequence[RegionIndex | None]) -> Ints:
    """Row ranges of regions [5, n], each in the index of its message [n], ascending, if it has one."""
    indexes = list(dict.fromkeys(index for index in index_of if index is not None))
    if len(indexes) == 1 and None not in index_of:
        return indexes[0].resolve(regions)
    numbers = {index: number for number, index in enumerate(indexes)}
    number = np.array([-1 if index is None else numbers[index] for index in index_of], dtype=np.int64)[message]
    resolved = [np.empty((RowRange.WIDTH, 0), dtype=np.int64)]
    for at, index in enumerate(indexes):
        chosen = np.flatnonzero(number == at)
        row_ranges = index.resolve(regions[:, chosen])
        row_ranges[RowRange.REGION] = chosen[row_ranges[RowRange.REGION]]
        resolved.append(row_ranges)
    if len(resolved) <= 2:
        return resolved[-1]
    row_ranges = np.concatenate(resolved, axis=1)
    return row_ranges[:, row_ranges[RowRange.REGION].argsort(kind="stable")]


# Kind and buffer, heads [start, stop), and rows [start, stop) that hold all that a run names.
_Box: TypeAlias = tuple[tuple[Kind, int], int, int, int, int]


def arrivals(receives: Sequence[steps.PeerMessage]) -> tuple[tuple[int, ...], ...]:
    """Numbers of messages in the order in which they are taken, those of one call together."""
    # A head exchange brings heads from every peer, and a launch for each would cost the host more
    # than the rows cost the device. Messages that touch no row and head in common may be placed, or
    # added, in one call of the mover, gradients of queries with those of keys; those that do are
    # taken one after the other.
    calls: dict[Kind, list[list[int]]] = {}
    boxes: dict[Kind, list[list[_Box]]] = {}
    for number, message in enumerate(receives):
        kind = Kind.Q_GRAD if message.kind in steps.GRADS else message.kind
        numbers, taken = calls.setdefault(kind, []), boxes.setdefault(kind, [])
        own = [_box(message.kind, run) for run in message.packed.runs]
        at = next((i + 1 for i in range(len(taken) - 1, -1, -1) if _meet(own, taken[i])), 0)
        if at == len(taken):
            numbers.append([])
            taken.append([])
        numbers[at].append(number)
        taken[at] += own
    return tuple(tuple(call) for numbers in calls.values() for call in numbers)


def _box(kind: Kind, run: steps.RowRun) -> _Box:
    rows = (run.start, run.stop) if run.index is None else (int(run.index.min()), int(run.index.max()) + 1)
    return (kind, run.buffer), run.buffer_head, run.buffer_head + run.num_heads, *rows


def _meet(own: Sequence[_Box], taken: Sequence[_Box]) -> bool:
    return any(a[0] == b[0] and a[1] < b[2] and b[1] < a[2] and a[3] < b[4] and b[3] < a[4] for a in own for b in taken)


_TAGS = 4 * (1 + len(order.LEGS))  # of an exchange: of its direct messages, and of hops (`_hop_tag`)
_RANK_BITS = 20  # of a rank (below `ir.cluster.MOST_RANKS`) or the index of an op
_RANK = (1 << _RANK_BITS) - 1
_PIECE = [Route.SRC, Route.DST, Route.PIECE]
_KINDS = tuple(Kind)


def _hop_tag(leg: order.Leg, *, first: bool, last: bool) -> int:
    """Offset of a hop's tag from the exchange's first."""
    # Messages between the same two ranks have different tags where they need not be received in the
    # order of sending: sources (`first`), targets (`last`) and proxies are different threads.
    return (1 + order.LEGS.index(leg)) * 4 + first * 2 + last


@lru_cache(maxsize=256)
def routes_of(
    routes: Rows, rank: int, ranks_per_node: int, moved: frozenset[tuple[int, int]]
) -> tuple[_Routed, tuple[steps.ProxyRoute, ...]]:
    """The pieces of an exchange that this rank sends or receives, and those that it relays, by
    source, target and piece: the order in which both ends of every hop have them.

    `moved`: (source, target) pairs whose traffic class is not "copied".
    """
    table = as_array(routes)
    table = table[np.lexsort(table.T[::-1])]
    _check_routes(table)
    # Pieces of a (source, target) pair stand together: their number, beside each of them.
    pairs = table[:, Route.PAIR]
    sizes = np.diff(run_bounds((pairs[1:] != pairs[:-1]).any(axis=1), len(table)))
    counts = np.repeat(sizes, sizes)
    concerned = (table[:, Route.STATIONS] == rank).any(axis=1)
    table, counts = table[concerned], counts[concerned]
    made: dict[tuple[int, ...], steps.Hop] = {}  # many pieces take the same

    def hop(end: Sequence[int], moves: bool) -> steps.Hop | None:
        key = (*end, moves)
        leg, peer, first, last = end
        if leg < 0:
            return None
        if key not in made:
            crosses, traffic_class = peer // ranks_per_node != rank // ranks_per_node, order.TRAFFIC_CLASSES[moves]
            tag = _hop_tag(order.LEGS[leg], first=bool(first), last=bool(last))
            made[key] = steps.Hop(
                peer, order.LEGS[leg], tag, order.stream_name(order.LEGS[leg], crosses, traffic_class), crosses
            )
        return made[key]

    sends: dict[int, list[steps.Piece]] = {}
    receives: dict[int, list[steps.Piece]] = {}
    proxy_routes: list[steps.ProxyRoute] = []
    ends = (side.tolist() for side in _ends(table, rank))
    for (src, dst, index), count, come, go in zip(table[:, _PIECE].tolist(), counts.tolist(), *ends, strict=True):
        arrives, leaves = hop(come, (src, dst) in moved), hop(go, (src, dst) in moved)
        if arrives is None and leaves is not None:
            sends.setdefault(dst, []).append(steps.Piece(index, count, leaves))
        elif leaves is None and arrives is not None:
            receives.setdefault(src, []).append(steps.Piece(index, count, arrives))
        elif arrives is not None and leaves is not None:
            proxy_routes.append(
                steps.ProxyRoute(order.relay_role(arrives.leg), src, dst, index, count, arrives, leaves)
            )
    out, back = ({peer: tuple(pieces) for peer, pieces in side.items()} for side in (sends, receives))
    return (out, back), tuple(proxy_routes)


def _check_routes(table: Ints) -> None:
    """Raise InvalidProgramError for a piece that comes back to a rank that it has left."""
    src, dst, _, send_proxy, receive_proxy = table.T
    left, far = src != send_proxy, receive_proxy != dst
    twice = (
        ((src == receive_proxy) & left)
        | ((send_proxy == dst) & far)
        | ((src == dst) & (left | far | (send_proxy != receive_proxy)))
    )
    for source, target, _, *proxies in table[twice].tolist():
        stations = [a for _, a, _ in order.hops((source, *proxies, target))] + [target]
        raise InvalidProgramError(f"a piece from rank {source} to rank {target} passes a rank twice: {stations}")


def _ends(table: Ints, rank: int) -> tuple[Ints, Ints]:
    """The hops by which pieces come to this rank, and those by which they leave it: [n, 4] of (leg,
    peer, first, last) each. `leg`: a place in `LEGS`, -1: there is none; `first`, `last`: of the
    piece.
    """
    # [4, n]: source, send proxy, receive proxy, target; a hop goes where two neighbours differ.
    stations = table[:, Route.STATIONS].T
    goes = stations[1:] != stations[:-1]
    leads = np.logical_and.accumulate(~np.insert(goes[:-1], 0, False, axis=0))  # no leg before it
    ends = np.logical_and.accumulate(~np.insert(goes[:0:-1], 0, False, axis=0))[::-1]
    hops_at: list[Ints] = []
    for here, there in ((stations[1:], stations[:-1]), (stations[:-1], stations[1:])):
        takes = goes & (here == rank)
        leg, piece = takes.argmax(axis=0), np.arange(len(table))
        leg_or_none = np.where(takes.any(axis=0), leg, -1)
        hops_at.append(np.stack([leg_or_none, there[leg, piece], leads[leg, piece], ends[leg, piece]], axis=1))
    return hops_at[0], hops_at[1]


def _routes(
    ops: Sequence[Op], queues: Sequence[int], rank: int, ranks_per_node: int, tag: Callable[[Exchange], int]
) -> tuple[dict[int, _Routed], tuple[tuple[steps.RelayTask, ...], ...]]:
    """This rank's own pieces by index of the op, and all relay tasks of the phase, in groups that
    wait for nothing in one another: of one role, traffic class and queue (`queues`: of each op).
    """
    routed = {i: op for i, op in enumerate(ops) if isinstance(op, Exchange) and op.routes}
    if not routed:
        return {}, ()
    own: dict[int, _Routed] = {}
    groups: dict[tuple[order.Role, bool, int], list[steps.RelayTask]] = {}
    carried, moved = _of_others(routed, rank)
    for i, op in routed.items():
        pairs = moved.get(i, frozenset())
        own[i], proxy_routes = routes_of(op.routes, rank, ranks_per_node, pairs)
        for route in proxy_routes:
            messages = carried.get((i, route.src, route.dst))
            if messages is not None:
                relay_task = steps.RelayTask(i, op.id, tag(op), messages, route)
                groups.setdefault((route.role, (route.src, route.dst) in pairs, queues[i]), []).append(relay_task)
    return own, tuple(tuple(group) for group in groups.values())


def _of_others(
    routed: dict[int, Exchange], rank: int
) -> tuple[dict[tuple[int, int, int], tuple[Carried, ...]], dict[int, frozenset[tuple[int, int]]]]:
    """Messages of other ranks by op, source and target, in the order in which both ends have them
    (by kind, then heads); and by op the (source, target) pairs that transfer anything whose traffic
    class is not "copied".
    """
    rows, op_of = numbered([(i, op.transfers) for i, op in routed.items()], Transfer.WIDTH)
    moved: dict[int, set[tuple[int, int]]] = {}
    src, dst = rows[:, Transfer.SRC], rows[:, Transfer.DST]
    # Op, source and target in one number, so that one `unique` finds the pairs.
    pairs = ((op_of << 2 * _RANK_BITS) | (src << _RANK_BITS) | dst)[order.is_moved(rows[:, Transfer.KIND])]
    for pair in np.unique(pairs).tolist():
        moved.setdefault(pair >> 2 * _RANK_BITS, set()).add((pair >> _RANK_BITS & _RANK, pair & _RANK))
    others = (src != rank) & (dst != rank)
    rows, op_of = rows[others], op_of[others]
    carried: dict[tuple[int, int, int], list[Carried]] = {}
    if len(rows):
        keys = np.column_stack([op_of, rows[:, Transfer.ENDS], rows[:, Transfer.KIND], rows[:, Transfer.HEADS]])
        sorting = np.lexsort(keys.T[::-1])
        rows, keys = rows[sorting], keys[sorting]
        begin = run_bounds((keys[1:] != keys[:-1]).any(axis=1), len(rows))[:-1]
        tokens = np.add.reduceat(rows[:, Transfer.STOP] - rows[:, Transfer.START], begin)
        for (op, src, dst, kind, h0, h1), count in zip(keys[begin].tolist(), tokens.tolist(), strict=True):
            carried.setdefault((op, src, dst), []).append((_KINDS[kind], count, h1 - h0))
    return {pair: tuple(messages) for pair, messages in carried.items()}, {
        op: frozenset(pairs) for op, pairs in moved.items()
    }
