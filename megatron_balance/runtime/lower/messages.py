"""Messages of one rank's exchanges, looked up in its buffers, all exchanges of a phase at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from megatron_balance.compile.order import collective_stream, stream_name
from megatron_balance.compile.transpose import forward_id
from megatron_balance.ir.arrays import Ints, concat, run_bounds
from megatron_balance.ir.columns import Transfer
from megatron_balance.ir.program import MOVED, Exchange, Kind, Op, RankProgram
from megatron_balance.runtime.lower.arrivals import arrivals
from megatron_balance.runtime.lower.last_use import INPUTS
from megatron_balance.runtime.lower.launches import pack_runs
from megatron_balance.runtime.lower.regions import Instance, RegionIndex, RowRange, grouped_runs
from megatron_balance.runtime.lower.routes import Routed, tag_base
from megatron_balance.runtime.lower.steps import ExchangeStep, Packed, PeerMessage

_BOTH = (False, True)
_DIRECT = {
    (crosses, moved): stream_name("direct", crosses, "moved" if moved else "copied")
    for crosses in _BOTH
    for moved in _BOTH
}
"""The stream of a direct message, by whether it crosses nodes and is of traffic class "moved"."""
_KINDS = tuple(Kind)
_NOT_ROUTED = Routed({}, {})


class Indexes(NamedTuple):
    """Regions of a rank by kind of input: queries, or keys.

    Where a remap sends owned regions to other ranks, `values` and `space` are without them:
    attention may bring such keys again, and gradients of those belong to the buffer they came in.

    Attributes:
        values: where a phase finds q, k and v.
        space: where outputs and gradients lie.
        owned: all rows that the caller passes in.
    """

    values: Mapping[Kind, RegionIndex]
    space: Mapping[Kind, RegionIndex]
    owned: Mapping[Kind, RegionIndex]

    def of(self, kind: Kind, *, owned: bool) -> RegionIndex:
        """Where to look up the rows of a message. `owned`: they are those of the linear layout."""
        side = Kind.KV if kind in (Kind.KV, Kind.KV_GRAD) else Kind.Q
        if owned:
            return self.owned[side]
        return self.values[side] if kind in INPUTS else self.space[side]


@dataclass(frozen=True, slots=True)
class Messages:
    """One side (sent or received) of all exchanges of a phase.

    Attributes:
        rows: transfers sorted by message; message i is rows[begin[i]:begin[i + 1]].
        begin: of each message, and the end of the last.
        op: index of the exchange among the phase's ops.
        peer: the rank at the other end.
        kind: of its rows.
        buffer: of received inputs, else -1.
        owned: its rows are those of the linear layout (see `Indexes`).
    """

    rows: Ints
    begin: Ints
    op: list[int]
    peer: list[int]
    kind: list[Kind]
    buffer: list[int]
    owned: list[bool]

    @property
    def num_heads(self) -> list[int]:
        """Heads of each message."""
        first = self.rows[self.begin[:-1]]
        return (first[:, Transfer.HEAD_STOP] - first[:, Transfer.HEAD_START]).tolist()


class MessageLookup:
    """Looks up the messages of one rank's program.

    `sizes`: (rows, heads) of its buffers, by kind of input and number. Received inputs become
    buffers there.
    """

    def __init__(self, program: RankProgram, ranks_per_node: int, nano_batch: int, device: torch.device) -> None:
        self.program, self.ranks_per_node, self.nano_batch, self.device = program, ranks_per_node, nano_batch, device
        self.sizes: dict[Kind, dict[int, tuple[int, int]]] = {kind: {} for kind in INPUTS}
        self.num_buffers = 1

    def sides(self, ops: Sequence[Op], *, forward: bool) -> tuple[Messages, Messages, dict[Kind, Ints]]:
        """Messages sent and received, and the received inputs as instances of new buffers."""
        owned = [(False, False)] * len(ops)
        if self.program.remap_in:
            owned = [
                self.owned_sides(op.id, forward=forward) if isinstance(op, Exchange) else (False, False) for op in ops
            ]
        tables = [op.transfers if isinstance(op, Exchange) else None for op in ops]
        rows = concat([t for t in tables if t is not None], Transfer.WIDTH)
        op_index = np.repeat(
            [i for i, t in enumerate(tables) if t is not None], [len(t) for t in tables if t is not None]
        ).astype(np.int64)
        mine = rows[:, Transfer.SRC] == self.program.rank
        sent = _messages(rows[mine], op_index[mine], Transfer.DST, [sends for sends, _ in owned])
        mine = rows[:, Transfer.DST] == self.program.rank
        received = _messages(rows[mine], op_index[mine], Transfer.SRC, [receives for _, receives in owned])
        return sent, received, self.instances(received)

    def owned_sides(self, exchange_id: int, *, forward: bool) -> tuple[bool, bool]:
        """Whether an exchange of a remapped call sends, and receives, rows of the linear layout."""
        if forward:
            return exchange_id < self.program.remap_in, exchange_id == self.program.num_exchanges - 1
        of = forward_id(exchange_id, self.program)
        reverses = exchange_id >= self.program.remap_in and (exchange_id - self.program.remap_in) % 2 == 1
        return (
            (of == self.program.num_exchanges - 1, of < self.program.remap_in)
            if reverses
            else (of < self.program.remap_in, False)
        )

    def instances(self, received: Messages) -> dict[Kind, Ints]:
        """Make a buffer of each message of inputs, numbered in order; the regions in it."""
        rows, begin = received.rows, received.begin
        sizes = rows[:, Transfer.STOP] - rows[:, Transfer.START]
        before = np.append(0, sizes.cumsum())
        totals, heads = np.diff(before[begin]).tolist(), received.num_heads
        for i, kind in enumerate(received.kind):
            if kind in INPUTS:
                received.buffer[i] = self.num_buffers
                self.sizes[kind][self.num_buffers] = (totals[i], heads[i])
                self.num_buffers += 1
        message = np.repeat(np.arange(len(received.kind)), np.diff(begin))
        table = np.empty((len(rows), Instance.WIDTH), dtype=np.int64)
        table[:, Instance.REGION] = rows[:, Transfer.REGION]
        table[:, Instance.BUFFER] = np.array(received.buffer, dtype=np.int64)[message]
        table[:, Instance.ROW] = before[:-1] - before[begin[message]]
        return {kind: table[rows[:, Transfer.KIND] == kind] for kind in INPUTS}

    def exchanges(
        self,
        ops: Sequence[Op],
        sides: tuple[Messages, Messages],
        zones: Sequence[str],
        routed: Mapping[int, Routed],
        indexes: Indexes,
        *,
        forward: bool,
    ) -> dict[int, ExchangeStep]:
        """The exchanges of a phase by op index. `zones`: of each op; `routed`: its own pieces."""
        sends, receives = (self.by_op(side, indexes) for side in sides)
        node = self.program.rank // self.ranks_per_node
        exchanges: dict[int, ExchangeStep] = {}
        for i, op in enumerate(ops):
            if isinstance(op, Exchange):
                out, back = sends.get(i, ()), receives.get(i, ())
                own = routed.get(i, _NOT_ROUTED)
                far = frozenset([m.peer for m in (*out, *back) if m.peer // self.ranks_per_node != node])
                stream = collective_stream(op.group, self.ranks_per_node) if op.collective != "p2p" else ""
                tag = tag_base(op.id, forward=forward, nano_batch=self.nano_batch)
                exchanges[i] = ExchangeStep(
                    *(i, op.id, zones[i], op.collective, op.group, out, back, tag, own.sends, own.receives, far),
                    stream,
                    arrivals(back),
                )
        return exchanges

    def by_op(self, side: Messages, indexes: Indexes) -> dict[int, tuple[PeerMessage, ...]]:
        """One side of all exchanges by op index."""
        moved = {(op, peer) for op, peer, kind in zip(side.op, side.peer, side.kind, strict=True) if kind in MOVED}
        node, size = self.program.rank // self.ranks_per_node, self.ranks_per_node
        messages = [
            PeerMessage(peer, kind, packed, buffer, (), _DIRECT[peer // size != node, (op, peer) in moved])
            for op, peer, kind, buffer, packed in zip(
                side.op, side.peer, side.kind, side.buffer, self.packed(side, indexes), strict=True
            )
        ]
        bounds = run_bounds(np.diff(side.op) != 0, len(side.op)).tolist() if messages else [0]
        return {side.op[a]: tuple(messages[a:b]) for a, b in pairwise(bounds)}

    def packed(self, side: Messages, indexes: Indexes) -> list[Packed]:
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
            pack_runs(of, rows, heads, self.device) if index else Packed((), rows, heads)
            for of, rows, heads, index in columns
        ]


def _messages(rows: Ints, op_index: Ints, peers: int, owned: Sequence[bool]) -> Messages:
    """Transfers as messages: what one exchange moves of one kind and head span to or from one peer.

    `peers`: the column of the rank at the other end; `owned`: of each op. Both ends group alike.
    """
    keys = np.stack(
        [op_index, rows[:, peers], rows[:, Transfer.KIND], rows[:, Transfer.HEAD_START], rows[:, Transfer.HEAD_STOP]]
    )
    changes = keys[:, 1:] != keys[:, :-1]
    first = changes.argmax(axis=0), np.arange(max(0, len(rows) - 1))  # where rows begin to differ
    if (keys[:, 1:][first] < keys[:, :-1][first]).any():
        order = np.lexsort(keys[::-1])
        rows, op_index, keys = rows[order], op_index[order], keys[:, order]
        changes = keys[:, 1:] != keys[:, :-1]
    begin = run_bounds(changes.any(axis=0), len(rows))
    first_rows = rows[begin[:-1]]
    kinds = [_KINDS[k] for k in first_rows[:, Transfer.KIND].tolist()]
    ops = op_index[begin[:-1]].tolist()
    return Messages(rows, begin, ops, first_rows[:, peers].tolist(), kinds, [-1] * len(ops), [owned[op] for op in ops])


def _resolve(regions: Ints, message: Ints, index_of: Sequence[RegionIndex | None]) -> Ints:
    """Row ranges of regions [5, n], each in the index of its message, if that has one.

    `message` [n]: of each region, ascending; `index_of`: of each message.
    """
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
