"""From one rank's program to its steps: every region looked up, all ops of a phase at once.

A ring over 64 ranks has 64 launches and 126 messages a phase; looked up one by one they would cost more than the step saves.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from megatron_balance.compile import order
from megatron_balance.compile.order import collective_stream, stream_name
from megatron_balance.compile.ping_pong import Cuts
from megatron_balance.compile.pipeline import PhaseOrder
from megatron_balance.compile.transpose import Policy, forward_id
from megatron_balance.ir.arrays import Ints, as_array, concat, run_bounds
from megatron_balance.ir.columns import Transfer
from megatron_balance.ir.program import MOVED, Attend, AttendGrad, Exchange, Kind, Op, RankProgram
from megatron_balance.runtime.counters import counts
from megatron_balance.runtime.kernels import Kernel
from megatron_balance.runtime.last_use import INPUTS, last_uses
from megatron_balance.runtime.launches import LaunchesOf, Launching, LookedUp, pack_runs
from megatron_balance.runtime.lowered import ExchangeStep, Finish, Launch, Message, Packed, Phase, PhaseName, Start, Step, Work
from megatron_balance.runtime.regions import REGION, Table, grouped_runs, without
from megatron_balance.runtime.routes import Routed, lower_routes, tag_base
from megatron_balance.runtime.shape import AttentionShape

_BOTH = (False, True)


@dataclass(frozen=True, slots=True)
class _Messages:
    """One side (sent or received) of all exchanges of a phase. `rows` sorted by message; message i is rows[begin[i]:begin[i+1]].

    `op`: index of the exchange among the phase's ops; `buffer`: of received inputs, else -1; `owned_rows`: the rows are those of the
    linear layout (see `Lowering`).
    """

    rows: Ints
    begin: Ints
    op: list[int]
    peer: list[int]
    kind: list[Kind]
    buffer: list[int]
    owned_rows: list[bool]


class Setting(NamedTuple):
    """What surrounds a rank's program. `orders`: of its phases, forward and backward; `nano_batch`: of two programs of the same ranks that run
    interleaved, which one this is: their messages are told apart by it; `phases`: those that will run.
    """

    ranks_per_node: int
    orders: tuple[PhaseOrder, PhaseOrder]
    nano_batch: int
    phases: Collection[PhaseName]


class Lowering:
    """The phases of one rank. `space`: where outputs and gradients lie; `values`: where a phase finds q, k and v; `owned`: all rows
    that the caller remaps.

    Where a remap hands regions of the owner to other ranks, the other two tables are without them: attention may bring such keys again,
    and what is computed with those belongs to the buffer they came in.
    """

    def __init__(
        self, program: RankProgram, shape: AttentionShape, device: torch.device, policy: Policy, kernel: Kernel, setting: Setting
    ) -> None:
        self.program = program
        self.ranks_per_node, self.orders, self.nano_batch, phases = setting
        self.device = device
        owned = as_array(program.owned)
        sizes = owned[:, 2] - owned[:, 1]
        heads = {Kind.Q: shape.num_heads, Kind.KV: shape.num_kv_heads}
        self.sizes = {kind: {0: (int(sizes.sum()), heads[kind])} for kind in INPUTS}
        self.num_buffers = 1
        own = {
            kind: np.column_stack([owned, np.tile([0, heads[kind], 0], (len(owned), 1)), np.cumsum(sizes) - sizes]).astype(np.int64)
            for kind in INPUTS
        }
        self.owned = {kind: Table(own[kind]) for kind in INPUTS}
        kept = {kind: _kept(program, own[kind]) for kind in INPUTS}
        # Gradients lie beside what the forward received, so this is looked up for the backward alone too.
        sent, received, instances = self.exchange_sides(program.forward, forward=True)
        self.space = {kind: Table(np.concatenate([kept[kind], *instances[kind]])) for kind in INPUTS}
        self.values = self.space
        self.launching = Launching(device, kernel)
        self.looked_up: LookedUp | None = None
        self.phases: dict[PhaseName, Phase] = {}
        if "forward" in phases:
            self.phases["forward"] = self.forward((sent, received), free=policy == "replay")
        if "backward" in phases:
            self.phases["backward"] = self.backward(kept, again=policy == "replay")

    def forward(self, sides: tuple[_Messages, _Messages], *, free: bool) -> Phase:
        """Steps of the forward; arguments as for `phase`."""
        ops, places = self.program.forward, _forward_queues(self.program)
        self.looked_up = self.launching.look_up(ops, self.values)
        launches = self.launching.forward(self.looked_up, places[1], self.space)
        return self.phase(ops, sides, places, launches, forward=True, free=free)

    def backward(self, kept: dict[Kind, Ints], *, again: bool) -> Phase:
        """Steps of the backward. `kept`: rows of the owner that stay there; `again`: inputs are received once more."""
        ops, places = self.program.backward, _backward_queues(self.program)
        sent, received, instances = self.exchange_sides(ops, forward=False)
        if again:
            self.values = {kind: Table(np.concatenate([kept[kind], *instances[kind]])) for kind in INPUTS}
            looked_up = self.launching.look_up(ops, self.values)
        else:  # the same launches in reverse, over the same rows
            looked_up = None if self.looked_up is None else self.looked_up.reversed(self.program)
        launches = self.launching.backward(looked_up, places[1], self.space)
        return self.phase(ops, (sent, received), places, launches, forward=False, free=True)

    # Messages

    def exchange_sides(self, ops: Sequence[Op], *, forward: bool) -> tuple[_Messages, _Messages, dict[Kind, list[Ints]]]:
        """Messages sent and received, and the received inputs as instances of new buffers."""
        owned = [(False, False)] * len(ops)
        if self.program.remap_in:
            owned = [self.owner_sides(op.id, forward=forward) if isinstance(op, Exchange) else (False, False) for op in ops]
        tables = [op.transfers if isinstance(op, Exchange) else None for op in ops]
        rows = concat([t for t in tables if t is not None], Transfer.WIDTH)
        op_index = np.repeat([i for i, t in enumerate(tables) if t is not None], [len(t) for t in tables if t is not None]).astype(np.int64)
        mine = rows[:, 6] == self.program.rank
        sent = self.messages(rows[mine], op_index[mine], 7, [sends for sends, _ in owned])
        mine = rows[:, 7] == self.program.rank
        received = self.messages(rows[mine], op_index[mine], 6, [receives for _, receives in owned])
        return sent, received, self.instances(received)

    def instances(self, received: _Messages) -> dict[Kind, list[Ints]]:
        """A new buffer for each message of inputs, numbered in order: the regions that then lie in it."""
        rows, begin = received.rows, received.begin
        sizes = rows[:, 3] - rows[:, 2]
        before = np.append(0, sizes.cumsum())
        totals, heads = np.diff(before[begin]).tolist(), (rows[begin[:-1], 5] - rows[begin[:-1], 4]).tolist()
        for i, kind in enumerate(received.kind):
            if kind in INPUTS:
                received.buffer[i] = self.num_buffers
                self.sizes[kind][self.num_buffers] = (totals[i], heads[i])
                self.num_buffers += 1
        of = np.repeat(np.arange(len(received.kind)), np.diff(begin))
        table = np.empty((len(rows), 7), dtype=np.int64)
        table[:, :5] = rows[:, 1:6]
        table[:, 5] = np.array(received.buffer, dtype=np.int64)[of]
        table[:, 6] = before[:-1] - before[begin[of]]
        return {kind: [table[rows[:, 0] == kind]] for kind in INPUTS}

    def owner_sides(self, exchange_id: int, *, forward: bool) -> tuple[bool, bool]:
        """Whether what an exchange of a remapped call sends, and what it receives, lies in the linear layout: at the ends."""
        if forward:
            return exchange_id < self.program.remap_in, exchange_id == self.program.num_exchanges - 1
        of = forward_id(exchange_id, self.program)
        reverses = exchange_id >= self.program.remap_in and (exchange_id - self.program.remap_in) % 2 == 1
        return (of == self.program.num_exchanges - 1, of < self.program.remap_in) if reverses else (of < self.program.remap_in, False)

    def messages(self, rows: Ints, op_index: Ints, peers: int, owned_rows: Sequence[bool]) -> _Messages:
        """A message is what one exchange moves of one kind and head span to or from one peer; both sides cut alike."""
        keys = np.stack([op_index, rows[:, peers], rows[:, 0], rows[:, 4], rows[:, 5]])
        changes = keys[:, 1:] != keys[:, :-1]
        first = changes.argmax(axis=0), np.arange(max(0, len(rows) - 1))  # the column that tells a row from the one before
        if (keys[:, 1:][first] < keys[:, :-1][first]).any():
            order = np.lexsort(keys[::-1])
            rows, op_index, keys = rows[order], op_index[order], keys[:, order]
            changes = keys[:, 1:] != keys[:, :-1]
        bounds = run_bounds(changes.any(axis=0), len(rows))
        begin = bounds[:-1]
        kinds = [_KINDS[k] for k in rows[begin, 0].tolist()]
        peer = rows[begin, peers].tolist()
        ops = op_index[begin].tolist()
        return _Messages(rows, bounds, ops, peer, kinds, [-1] * len(begin), [owned_rows[op] for op in ops])

    def exchange_steps(
        self, ops: Sequence[Op], sides: tuple[_Messages, _Messages], zones: Sequence[str], routed: dict[int, Routed], *, forward: bool
    ) -> dict[int, ExchangeStep]:
        """The exchanges of a phase by op index."""
        sends, receives = (self.messages_of(side) for side in sides)
        node = self.program.rank // self.ranks_per_node
        found: dict[int, ExchangeStep] = {}
        for i, op in enumerate(ops):
            if isinstance(op, Exchange):
                out, back = sends.get(i, ()), receives.get(i, ())
                part = routed.get(i, _NOT_ROUTED)
                far = frozenset([m.peer for m in (*out, *back) if m.peer // self.ranks_per_node != node])
                stream = collective_stream(op.group, self.ranks_per_node) if op.collective != "p2p" else ""
                tag = tag_base(op.id, forward=forward, nano_batch=self.nano_batch)
                found[i] = ExchangeStep(i, op.id, zones[i], op.collective, op.group, out, back, tag, part.sends, part.receives, far, stream)
        return found

    def messages_of(self, side: _Messages) -> dict[int, tuple[Message, ...]]:
        """One side of all exchanges by op index."""
        moved = {(op, peer) for op, peer, kind in zip(side.op, side.peer, side.kind, strict=True) if kind in MOVED}
        node, size = self.program.rank // self.ranks_per_node, self.ranks_per_node
        messages = [
            Message(peer, kind, packed, buffer, (), _DIRECT[peer // size != node, (op, peer) in moved])
            for op, peer, kind, buffer, packed in zip(side.op, side.peer, side.kind, side.buffer, self.packed_messages(side), strict=True)
        ]
        bounds = run_bounds(np.diff(side.op) != 0, len(side.op)).tolist() if messages else [0]
        return {side.op[a]: tuple(messages[a:b]) for a, b in pairwise(bounds)}

    def packed_messages(self, side: _Messages) -> list[Packed]:
        """Rows of every message; received inputs have none, they become buffers."""
        tables = {"values": self.values, "space": self.space, "home": self.owned}
        table_of: list[Table | None] = []
        for kind, owned_rows, buffer in zip(side.kind, side.owned_rows, side.buffer, strict=True):
            name, table = _TABLE_OF[owned_rows][kind]
            table_of.append(tables[name][table] if buffer < 0 else None)
        sizes = side.rows[:, 3] - side.rows[:, 2]
        num_rows = np.add.reduceat(sizes, side.begin[:-1]).tolist() if table_of else []
        num_heads = (side.rows[side.begin[:-1], 5] - side.rows[side.begin[:-1], 4]).tolist()
        owner = np.repeat(np.arange(len(table_of)), np.diff(side.begin))
        runs = grouped_runs(sizes, _resolve(side.rows[:, 1:6].T, owner, table_of), owner, len(table_of))
        packed = zip(runs, num_rows, num_heads, table_of, strict=True)
        return [pack_runs(of, rows, heads, self.device) if table else Packed((), rows, heads) for of, rows, heads, table in packed]

    # Phases

    def phase(
        self,
        ops: Sequence[Op],
        sides: tuple[_Messages, _Messages],
        places: tuple[Sequence[int], Sequence[str]],
        launches: LaunchesOf,
        *,
        forward: bool,
        free: bool,
    ) -> Phase:
        """Steps of one phase. `sides`: messages sent and received; `places`: queue and zone name of each op; `launches`: by op; `free`:
        drop received inputs once nothing reads them.
        """
        queues, zones = places
        routed, relay_tasks = lower_routes(ops, queues, self.program.rank, self.ranks_per_node, forward=forward, nano_batch=self.nano_batch)
        exchange_steps = self.exchange_steps(ops, sides, zones, routed, forward=forward)
        steps: list[Step] = []
        _, ordered, where = self.orders[0 if forward else 1]
        begins: list[int] = []  # of each step in the order: its first one here
        for step in ordered:
            begins.append(len(steps))
            match step:
                case order.Start(op):
                    steps.append(Start(exchange_steps[op]))
                case order.Finish(op):
                    steps.append(Finish(exchange_steps[op]))
                case order.Run(op):
                    steps += launches[op]
        begins.append(len(steps))
        blank: tuple[int, ...] = ()
        if forward:
            steps, blank = self.mark_merges(steps)
        remap_out = self.program.num_exchanges - 1 if self.program.remap_in else None
        work = Work(counts(steps, forward=forward, remap_out=remap_out))
        cuts = Cuts(*(begins[at] for at in where))
        return Phase(tuple(steps), cuts, last_uses(steps) if free else ((),) * len(steps), blank, work, relay_tasks)

    def mark_merges(self, steps: list[Step]) -> tuple[list[Step], tuple[int, ...]]:
        """Say of every output run whether it is the first there; buffers where that differs row by row start blank."""
        outputs = [s.out for s in steps if isinstance(s, Launch)]
        outputs += [m.packed for s in steps if isinstance(s, Finish) for m in s.exchange_step.receives if m.kind == Kind.OUT]
        sizes = self.sizes[Kind.Q]
        by_rows = all(run.num_heads == sizes[run.buffer][1] for packed in outputs for run in packed.runs)  # no run splits heads
        written = {buffer: np.zeros((rows, 1 if by_rows else heads), dtype=bool) for buffer, (rows, heads) in sizes.items()}
        blank: set[int] = set()
        whole: set[tuple[int, ...]] = set()  # (buffer, start, stop, head, heads) of consecutive rows that are all written

        def mark(packed: Packed) -> tuple[bool, ...]:
            merges: list[bool] = []
            for run in packed.runs:
                place = (run.buffer, run.start, run.stop, run.buffer_head, run.num_heads)
                if run.index is None and place in whole:
                    merges.append(True)
                    continue
                part = (
                    slice(run.start, run.stop) if run.index is None else run.index,
                    slice(run.buffer_head, run.buffer_head + run.num_heads),
                )
                before = written[run.buffer][part]
                merges.append(bool(before.any()))
                if merges[-1] and not before.all():
                    blank.add(run.buffer)
                if not merges[-1] or run.buffer in blank:
                    written[run.buffer][part] = True
                if run.index is None:
                    whole.add(place)
            return tuple(merges)

        marked: list[Step] = []
        for step in steps:
            if isinstance(step, Launch):
                marked.append(step._replace(merges=mark(step.out)))
            elif isinstance(step, Finish) and any(m.kind == Kind.OUT for m in step.exchange_step.receives):
                receives = tuple(m._replace(merges=mark(m.packed)) if m.kind == Kind.OUT else m for m in step.exchange_step.receives)
                marked.append(Finish(step.exchange_step._replace(receives=receives)))
            else:
                marked.append(step)
        return marked, tuple(sorted(blank))


_DIRECT = {(crosses, moved): stream_name("direct", crosses, "moved" if moved else "copied") for crosses in _BOTH for moved in _BOTH}
"""The stream of a direct message, by whether it crosses nodes and whether its lane is "moved"."""
_KINDS = tuple(Kind)
_REMOTE = {
    **{kind: ("values", kind) for kind in INPUTS},
    **dict.fromkeys((Kind.OUT, Kind.OUT_GRAD, Kind.Q_GRAD), ("space", Kind.Q)),
    Kind.KV_GRAD: ("space", Kind.KV),
}
_TABLE_OF = (_REMOTE, {kind: ("home", side) for kind, (_, side) in _REMOTE.items()})
"""Where the rows of a message are looked up, by whether they are owned, and kind: a table of `Lowering`, and of queries or keys."""
_NOT_ROUTED = Routed({}, {})


def _resolve(regions: Ints, owner: Ints, table_of: Sequence[Table | None]) -> Ints:
    """Pieces of regions [5, n], each in the table of its owner; none of those whose owner has no table."""
    tables = list(dict.fromkeys(table for table in table_of if table is not None))
    if len(tables) == 1 and None not in table_of:
        return tables[0].resolve(regions)
    numbers = {table: number for number, table in enumerate(tables)}
    number = np.array([-1 if table is None else numbers[table] for table in table_of], dtype=np.int64)[owner]
    parts = [np.empty((8, 0), dtype=np.int64)]
    for at, table in enumerate(tables):
        chosen = np.flatnonzero(number == at)
        pieces = table.resolve(regions[:, chosen])
        pieces[REGION] = chosen[pieces[REGION]]
        parts.append(pieces)
    if len(parts) <= 2:
        return parts[-1]
    pieces = np.concatenate(parts, axis=1)
    return pieces[:, pieces[REGION].argsort(kind="stable")]


def _kept(program: RankProgram, own: Ints) -> Ints:
    """The rows of the owner that a remap leaves there."""
    tables = [op.transfers for op in program.forward if isinstance(op, Exchange) and op.id < program.remap_in]
    given = concat(tables, Transfer.WIDTH)
    return without(own, given[(given[:, 6] == program.rank) & (given[:, 0] == Kind.KV), 1:4])


def _forward_queues(program: RankProgram) -> tuple[list[int], list[str]]:
    """The queue of each forward op and its zone's name."""
    queues = [queue for queue, (_, count) in enumerate(program.queues) for _ in range(count)]
    names = [name for name, count in program.queues for _ in range(count)]
    return (queues, names) if names else ([0] * len(program.forward), [""] * len(program.forward))


def _backward_queues(program: RankProgram) -> tuple[list[int], list[str]]:
    """Backward launches are the forward ones in reverse; exchanges belong to the forward exchange they come from."""
    forward = list(zip(*_forward_queues(program), strict=True))
    launches = [place for op, place in zip(program.forward, forward, strict=True) if isinstance(op, Attend)][::-1]
    exchanges = {op.id: place for op, place in zip(program.forward, forward, strict=True) if isinstance(op, Exchange)}
    places: list[tuple[int, str]] = []
    remaining = iter(launches)
    place = launches[0] if launches else (0, "")
    for op in program.backward:
        if isinstance(op, AttendGrad):
            place = next(remaining)
        places.append(exchanges.get(forward_id(op.id, program), place) if isinstance(op, Exchange) else place)
    return [queue for queue, _ in places], [name for _, name in places]
