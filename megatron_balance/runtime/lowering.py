"""From one rank's program to its steps: every region looked up, all ops of a phase at once.

A ring over 64 ranks has 64 launches and 126 messages a phase; looked up one by one they would cost more than the step saves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from megatron_balance.core.program import MOVED, PAIR_WIDTH, TRANSFER_WIDTH, Attend, AttendGrad, Exchange, Kind, Op, RankProgram
from megatron_balance.passes import order
from megatron_balance.passes.interleave import Cuts, parts
from megatron_balance.passes.order import collective_stream, stream_name
from megatron_balance.passes.tables import Ints, as_array, concat, run_bounds
from megatron_balance.passes.transpose import Policy, forward_id
from megatron_balance.runtime.counters import counts
from megatron_balance.runtime.entries import Fused, fuse, simple_pairs
from megatron_balance.runtime.frees import INPUTS, frees
from megatron_balance.runtime.kernels import Entries, Kernel
from megatron_balance.runtime.lowered import Finish, GradLaunch, Launch, Message, Operand, Packed, Phase, Start, Step, Swap, Work
from megatron_balance.runtime.regions import BUFFER, BUFFER_HEAD, BUFFER_ROW, NUM_HEADS, REGION, ROW, Run, Table, grouped_runs, without
from megatron_balance.runtime.routes import Routed, lower_routes, tag_base
from megatron_balance.runtime.shape import AttentionShape
from megatron_balance.schedules.early import Early

_SHIFT = 40
_BOTH = (False, True)


@dataclass(frozen=True, slots=True)
class _Messages:
    """One side (sent or received) of all exchanges of a phase. `rows` sorted by message; message i is rows[begin[i]:begin[i+1]].

    `op`: index of the exchange among the phase's ops; `buffer`: of received inputs, else -1; `at_home`: the rows are those of the
    linear layout (see `Lowering`).
    """

    rows: Ints
    begin: Ints
    op: list[int]
    peer: list[int]
    kind: list[Kind]
    buffer: list[int]
    at_home: list[bool]


class Setting(NamedTuple):
    """What surrounds a rank's program. `early`: exchanges that may start at once; `half`: of two programs of the same ranks that run
    interleaved, which one this is: their messages are told apart by it.
    """

    ranks_per_node: int
    early: Early
    half: int


class Lowering:
    """Both phases of one rank. `space`: where outputs and gradients lie; `values`: where a phase finds q, k and v; `home`: all rows
    that the caller hands over.

    Where a remap hands regions of the home to other ranks, the other two tables are without them: attention may bring such keys again,
    and what is computed with those belongs to the buffer they came in.
    """

    def __init__(
        self, program: RankProgram, shape: AttentionShape, device: torch.device, policy: Policy, kernel: Kernel, setting: Setting
    ) -> None:
        self.program = program
        self.ranks_per_node, self.early, self.half = setting
        self.device = device
        self.kernel = kernel
        home = as_array(program.home)
        sizes = home[:, 2] - home[:, 1]
        heads = {Kind.Q: shape.num_heads, Kind.KV: shape.num_kv_heads}
        self.sizes = {kind: {0: (int(sizes.sum()), heads[kind])} for kind in INPUTS}
        self.num_buffers = 1
        own = {
            kind: np.column_stack([home, np.tile([0, heads[kind], 0], (len(home), 1)), np.cumsum(sizes) - sizes]).astype(np.int64)
            for kind in INPUTS
        }
        self.home = {kind: Table(own[kind]) for kind in INPUTS}
        kept = {kind: _kept(program, own[kind]) for kind in INPUTS}
        sent, received, instances = self.exchange_sides(program.forward, forward=True)
        self.space = {kind: Table(np.concatenate([kept[kind], *instances[kind]])) for kind in INPUTS}
        self.values = self.space
        queues, names = _forward_queues(program)
        self.forward = self.phase(program.forward, (sent, received), (queues, names), forward=True, free=policy == "replay")
        sent, received, instances = self.exchange_sides(program.backward, forward=False)
        if policy == "replay":
            self.values = {kind: Table(np.concatenate([kept[kind], *instances[kind]])) for kind in INPUTS}
        self.backward = self.phase(program.backward, (sent, received), _backward_queues(program), forward=False, free=True)

    # Messages

    def exchange_sides(self, ops: Sequence[Op], *, forward: bool) -> tuple[_Messages, _Messages, dict[Kind, list[Ints]]]:
        """Messages sent and received, and the received inputs as instances of new buffers."""
        home = [self.home_sides(op.id, forward=forward) if isinstance(op, Exchange) else (False, False) for op in ops]
        tables = [op.transfers if isinstance(op, Exchange) else None for op in ops]
        rows = concat([t for t in tables if t is not None], TRANSFER_WIDTH)
        op_index = np.repeat([i for i, t in enumerate(tables) if t is not None], [len(t) for t in tables if t is not None]).astype(np.int64)
        mine = rows[:, 6] == self.program.rank
        sent = self.messages(rows[mine], op_index[mine], 7, [sends for sends, _ in home])
        mine = rows[:, 7] == self.program.rank
        received = self.messages(rows[mine], op_index[mine], 6, [receives for _, receives in home])
        instances: dict[Kind, list[Ints]] = {kind: [] for kind in INPUTS}
        for i, kind in enumerate(received.kind):
            if kind not in INPUTS:
                continue
            part = received.rows[received.begin[i] : received.begin[i + 1]]
            sizes = part[:, 3] - part[:, 2]
            buffer = received.buffer[i] = self.num_buffers
            self.num_buffers += 1
            instance = np.empty((len(part), 7), dtype=np.int64)
            instance[:, :5] = part[:, 1:6]
            instance[:, 5] = buffer
            instance[:, 6] = np.cumsum(sizes) - sizes
            instances[kind].append(instance)
            self.sizes[kind][buffer] = (int(sizes.sum()), int(part[0, 5] - part[0, 4]))
        return sent, received, instances

    def home_sides(self, exchange_id: int, *, forward: bool) -> tuple[bool, bool]:
        """Whether what an exchange sends, and what it receives, lies in the linear layout: at the ends of a remapped call."""
        if not self.program.opening:
            return False, False
        if forward:
            return exchange_id < self.program.opening, exchange_id == self.program.num_exchanges - 1
        of = forward_id(exchange_id, self.program)
        reverses = exchange_id >= self.program.opening and (exchange_id - self.program.opening) % 2 == 1
        return (of == self.program.num_exchanges - 1, of < self.program.opening) if reverses else (of < self.program.opening, False)

    def messages(self, rows: Ints, op_index: Ints, peers: int, at_home: Sequence[bool]) -> _Messages:
        """A message is what one exchange moves of one kind and head span to or from one peer; both sides cut alike."""
        order = np.lexsort((rows[:, 5], rows[:, 4], rows[:, 0], rows[:, peers], op_index))
        rows, op_index = rows[order], op_index[order]
        keys = np.column_stack([op_index, rows[:, peers], rows[:, 0], rows[:, 4], rows[:, 5]])
        bounds = run_bounds((keys[1:] != keys[:-1]).any(axis=1), len(rows))
        begin = bounds[:-1]
        kinds = [Kind(k) for k in rows[begin, 0].tolist()]
        peer = rows[begin, peers].tolist()
        ops = op_index[begin].tolist()
        return _Messages(rows, bounds, ops, peer, kinds, [-1] * len(begin), [at_home[op] for op in ops])

    def swaps(
        self, ops: Sequence[Op], sides: tuple[_Messages, _Messages], zones: Sequence[str], routed: dict[int, Routed], *, forward: bool
    ) -> dict[int, Swap]:
        """The exchanges of a phase by op index."""
        sends: dict[int, list[Message]] = {i: [] for i, op in enumerate(ops) if isinstance(op, Exchange)}
        receives: dict[int, list[Message]] = {i: [] for i in sends}
        for side, lists in zip(sides, (sends, receives), strict=True):
            for message in self.side_messages(side):
                lists[message[0]].append(message[1])
        found: dict[int, Swap] = {}
        node = self.program.rank // self.ranks_per_node
        for i, op in enumerate(ops):
            if isinstance(op, Exchange):
                part = routed.get(i, _NOT_ROUTED)
                far = frozenset(m.peer for m in (*sends[i], *receives[i]) if m.peer // self.ranks_per_node != node)
                stream = collective_stream(op.group, self.ranks_per_node) if op.pattern != "p2p" else ""
                swap = Swap(
                    *(i, op.id, zones[i], op.pattern, op.group, tuple(sends[i]), tuple(receives[i])),
                    *(tag_base(op.id, forward=forward, half=self.half), part.sends, part.receives, far, stream),
                )
                found[i] = swap
        return found

    def side_messages(self, side: _Messages) -> Iterator[tuple[int, Message]]:
        """(op index, message) of one side of all exchanges."""
        node = self.program.rank // self.ranks_per_node
        moved = {(op, peer) for op, peer, kind in zip(side.op, side.peer, side.kind, strict=True) if kind in MOVED}
        for op, peer, kind, buffer, packed in zip(side.op, side.peer, side.kind, side.buffer, self.packed_messages(side), strict=True):
            yield op, Message(peer, kind, packed, buffer, (), _DIRECT[peer // self.ranks_per_node != node, (op, peer) in moved])

    def packed_messages(self, side: _Messages) -> list[Packed]:
        """Rows of every message; received inputs have none, they become buffers."""
        found: list[Packed | None] = [None] * len(side.kind)
        sizes = side.rows[:, 3] - side.rows[:, 2]
        num_rows = np.add.reduceat(sizes, side.begin[:-1]).tolist() if len(side.kind) else []
        num_heads = (side.rows[side.begin[:-1], 5] - side.rows[side.begin[:-1], 4]).tolist()
        owner = np.repeat(np.arange(len(side.kind)), np.diff(side.begin))
        tables = {"values": self.values, "space": self.space, "home": self.home}
        places = zip(side.kind, side.at_home, side.buffer, strict=True)
        table_of = [_NO_TABLE if buffer >= 0 else _TABLE_OF[at_home][kind] for kind, at_home, buffer in places]
        for name in sorted(set(table_of) - {_NO_TABLE}):
            which = [i for i, table in enumerate(table_of) if table == name]
            mine = np.zeros(len(table_of), dtype=bool)
            mine[which] = True
            chosen = mine[owner]
            regions = side.rows[chosen, 1:6]
            renumbered = (np.cumsum(mine) - 1)[owner[chosen]]
            table = tables[name[0]][name[1]]
            for i, runs in zip(which, grouped_runs(regions, table.resolve(regions), renumbered, len(which)), strict=True):
                found[i] = self.packed(runs, num_rows[i], num_heads[i])
        return [p if p is not None else Packed((), num_rows[i], num_heads[i]) for i, p in enumerate(found)]

    def packed(self, runs: tuple[Run, ...], num_rows: int, num_heads: int) -> Packed:
        if len(runs) == 1 and runs[0].index is None:
            return Packed(runs, num_rows, num_heads, _CONSECUTIVE, runs[0].num_heads == num_heads)
        indices = tuple(None if r.index is None else torch.from_numpy(r.index).to(self.device, non_blocking=True) for r in runs)
        return Packed(runs, num_rows, num_heads, indices, direct=False)

    # Launches

    def operands(self, table: Table, regions: Ints, launch: Ints, count: int) -> tuple[list[Operand], Ints]:
        """For each launch an operand that holds its `regions` [n, 5] (of one head span), and the row where each region begins."""
        pieces = table.resolve(regions)
        begin = np.searchsorted(launch[pieces[:, REGION]], np.arange(count))
        first = np.searchsorted(pieces[:, REGION], np.arange(len(regions)))
        row = pieces[first, BUFFER_ROW] - pieces[first, ROW]
        wanted = regions[:, 4] - regions[:, 3]
        in_row = pieces[:, BUFFER_ROW] - pieces[:, ROW] == row[pieces[:, REGION]]
        in_row &= pieces[:, NUM_HEADS] == wanted[pieces[:, REGION]]
        direct = np.logical_and.reduceat(in_row, begin)
        for column in (BUFFER, BUFFER_HEAD):
            direct &= np.minimum.reduceat(pieces[:, column], begin) == np.maximum.reduceat(pieces[:, column], begin)
        found: list[Operand] = []
        starts = np.searchsorted(launch, np.arange(count + 1)).tolist()
        heads = wanted[starts[:-1]].tolist()
        buffers, buffer_heads = pieces[begin, BUFFER].tolist(), pieces[begin, BUFFER_HEAD].tolist()
        for i, is_direct in enumerate(direct.tolist()):
            if is_direct:
                found.append(Operand(buffers[i], buffer_heads[i], heads[i], _NOTHING))
                continue
            part = slice(starts[i], starts[i + 1])
            union = _union(regions[part])
            runs = grouped_runs(union, table.resolve(union), np.zeros(len(union), dtype=np.int64), 1)[0]
            sizes = union[:, 2] - union[:, 1]
            at = np.searchsorted((union[:, 0] << _SHIFT) | union[:, 1], (regions[part, 0] << _SHIFT) | regions[part, 1], side="right") - 1
            row[part] = (np.cumsum(sizes) - sizes)[at] + regions[part, 1] - union[at, 1]
            found.append(Operand(-1, 0, heads[i], self.packed(runs, int(sizes.sum()), heads[i])))
        return found, row

    def launches(self, ops: Sequence[Op], zones: Sequence[str], *, forward: bool) -> dict[int, list[Launch | GradLaunch]]:
        """Launches by op index; an op has one for each head span of its pairs."""
        indices = [i for i, op in enumerate(ops) if isinstance(op, Attend | AttendGrad)]
        tables = [op.pairs for op in ops if isinstance(op, Attend | AttendGrad)]
        if not indices:
            return {}
        pairs = concat(tables, PAIR_WIDTH)
        pairs, launch, op_of = _by_heads(pairs, np.repeat(indices, [len(t) for t in tables]))
        count = len(op_of)
        pairs, launch = simple_pairs(pairs, launch)
        queries, keys = pairs[:, :5], pairs[:, [0, 5, 6, 7, 8]]
        q, q_row = self.operands(self.values[Kind.Q], queries, launch, count)
        k, k_row = self.operands(self.values[Kind.KV], keys, launch, count)
        fused = fuse(pairs, launch, q_row, k_row)
        out = self.targets(self.space[Kind.Q], queries, launch, fused.q_pairs, count, distinct=forward)
        dk = [] if forward else self.targets(self.space[Kind.KV], keys, launch, fused.k_pairs, count)
        entries = _entries(fused, count, [] if forward else out)
        found: dict[int, list[Launch | GradLaunch]] = {}
        for i, op in enumerate(op_of):
            prepared, calls, reads = self.kernel.prepare(entries[i], self.device), self.kernel.launches(entries[i]), _reads(q[i], k[i])
            if forward:
                step = Launch(op, zones[op], q[i], k[i], prepared, out[i], (), reads, calls)
            else:
                step = GradLaunch(op, zones[op], q[i], k[i], _final_rows(out[i]), prepared, out[i], dk[i], reads, calls)
            found.setdefault(op, []).append(step)
        return found

    def targets(self, table: Table, regions: Ints, launch: Ints, chosen: Ints, count: int, *, distinct: bool = False) -> list[Packed]:
        """Where the packed rows of each launch go: `chosen` regions, in order."""
        regions, owner = regions[chosen], launch[chosen]
        runs = grouped_runs(regions, table.resolve(regions), owner, count, distinct=distinct)
        begin = np.searchsorted(owner, np.arange(count))
        rows = np.add.reduceat(regions[:, 2] - regions[:, 1], begin).tolist()
        heads = (regions[begin, 4] - regions[begin, 3]).tolist()
        return [self.packed(r, n, h) for r, n, h in zip(runs, rows, heads, strict=True)]

    # Phases

    def phase(
        self,
        ops: Sequence[Op],
        sides: tuple[_Messages, _Messages],
        places: tuple[Sequence[int], Sequence[str]],
        *,
        forward: bool,
        free: bool,
    ) -> Phase:
        """Steps of one phase. `sides`: messages sent and received; `places`: queue and zone name of each op; `free`: drop received
        inputs once nothing reads them.
        """
        queues, zones = places
        routed, duties = lower_routes(ops, queues, self.program.rank, self.ranks_per_node, forward=forward, half=self.half)
        swaps = self.swaps(ops, sides, zones, routed, forward=forward)
        launches = self.launches(ops, zones, forward=forward)
        steps: list[Step] = []
        early = self.early.forward if forward else self.early.backward
        ordered, where = parts(ops, order.order(ops, self.program.rank), early)
        begins: list[int] = []  # of each step in the order: its first one here
        for step in ordered:
            begins.append(len(steps))
            match step:
                case order.Start(op):
                    steps.append(Start(swaps[op]))
                case order.Finish(op):
                    steps.append(Finish(swaps[op]))
                case order.Run(op):
                    steps += launches[op]
        begins.append(len(steps))
        blank: tuple[int, ...] = ()
        if forward:
            steps, blank = self.mark_merges(steps)
        closing = self.program.num_exchanges - 1 if self.program.opening else None
        work = Work(counts(steps, forward=forward, closing=closing))
        cuts = Cuts(*(begins[at] for at in where))
        return Phase(tuple(steps), cuts, frees(steps) if free else ((),) * len(steps), blank, work, duties)

    def mark_merges(self, steps: list[Step]) -> tuple[list[Step], tuple[int, ...]]:
        """Say of every output run whether it is the first there; buffers where that differs row by row start blank."""
        outputs = [s.out for s in steps if isinstance(s, Launch)]
        outputs += [m.packed for s in steps if isinstance(s, Finish) for m in s.swap.receives if m.kind == Kind.OUT]
        sizes = self.sizes[Kind.Q]
        by_rows = all(run.num_heads == sizes[run.buffer][1] for packed in outputs for run in packed.runs)  # no run splits heads
        written = {buffer: np.zeros((rows, 1 if by_rows else heads), dtype=bool) for buffer, (rows, heads) in sizes.items()}
        blank: set[int] = set()

        def mark(packed: Packed) -> tuple[bool, ...]:
            merges = []
            for run in packed.runs:
                rows = slice(run.start, run.stop) if run.index is None else run.index
                part = written[run.buffer][rows, run.buffer_head : run.buffer_head + run.num_heads]
                some = bool(part.any())
                merges.append(some)
                if some and not part.all():
                    blank.add(run.buffer)
                if not some or run.buffer in blank:
                    written[run.buffer][rows, run.buffer_head : run.buffer_head + run.num_heads] = True
            return tuple(merges)

        marked: list[Step] = []
        for step in steps:
            if isinstance(step, Launch):
                marked.append(replace(step, merges=mark(step.out)))
            elif isinstance(step, Finish) and any(m.kind == Kind.OUT for m in step.swap.receives):
                receives = tuple(replace(m, merges=mark(m.packed)) if m.kind == Kind.OUT else m for m in step.swap.receives)
                marked.append(Finish(replace(step.swap, receives=receives)))
            else:
                marked.append(step)
        return marked, tuple(sorted(blank))


_DIRECT = {(crosses, moved): stream_name("direct", crosses, "moved" if moved else "copied") for crosses in _BOTH for moved in _BOTH}
"""The stream of a direct message, by whether it crosses nodes and whether its lane is "moved"."""
_NOTHING = Packed((), 0, 0)
_CONSECUTIVE = (None,)
_NO_TABLE = ("", Kind.Q)
_AWAY = {
    **{kind: ("values", kind) for kind in INPUTS},
    **dict.fromkeys((Kind.OUT, Kind.OUT_GRAD, Kind.Q_GRAD), ("space", Kind.Q)),
    Kind.KV_GRAD: ("space", Kind.KV),
}
_TABLE_OF = (_AWAY, {kind: ("home", side) for kind, (_, side) in _AWAY.items()})
"""Where the rows of a message are looked up, by whether they are at home, and kind: a table of `Lowering`, and of queries or keys."""
_NOT_ROUTED = Routed({}, {})


def _kept(program: RankProgram, own: Ints) -> Ints:
    """The rows of the home that a remap leaves there."""
    tables = [op.transfers for op in program.forward if isinstance(op, Exchange) and op.id < program.opening]
    given = concat(tables, TRANSFER_WIDTH)
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


def _by_heads(pairs: Ints, op_index: Ints) -> tuple[Ints, Ints, list[int]]:
    """Pairs sorted by launch (an op and a head span), the launch of each pair, and the op of each launch."""
    keys = np.column_stack([op_index, pairs[:, 3], pairs[:, 4], pairs[:, 7], pairs[:, 8]])
    changes = (keys[1:] != keys[:-1]).any(axis=1)
    if int((changes & (keys[1:, 0] == keys[:-1, 0])).sum()):
        order = np.lexsort(keys.T[::-1])
        pairs, keys = pairs[order], keys[order]
        changes = (keys[1:] != keys[:-1]).any(axis=1)
    bounds = run_bounds(changes, len(pairs))
    return pairs, np.repeat(np.arange(len(bounds) - 1), np.diff(bounds)), keys[bounds[:-1], 0].tolist()


def _entries(fused: Fused, count: int, out: list[Packed]) -> list[Entries]:
    """Per launch. With `out` (backward): entries also say where their rows of the output gradient lie."""
    q = list(zip(fused.q_start.tolist(), fused.q_stop.tolist(), strict=True))
    k = list(zip(fused.k_start.tolist(), fused.k_stop.tolist(), strict=True))
    causal = fused.causal.tolist()
    begin = np.searchsorted(fused.launch, np.arange(count + 1)).tolist()
    sizes = fused.q_stop - fused.q_start
    packed = np.cumsum(sizes) - sizes
    found = []
    for i in range(count):
        a, b = begin[i], begin[i + 1]
        dout: tuple[tuple[int, int], ...] = ()
        if out:
            start = packed[a:b] - packed[a] + (out[i].runs[0].start if out[i].direct else 0)
            dout = tuple(zip(start.tolist(), (start + sizes[a:b]).tolist(), strict=True))
        found.append(Entries(tuple(q[a:b]), tuple(k[a:b]), tuple(causal[a:b]), dout))
    return found


def _final_rows(packed: Packed) -> Operand:
    """The output's gradient, the output and its LSE of the packed rows: a view of one buffer, or gathered."""
    if packed.direct:
        return Operand(packed.runs[0].buffer, packed.runs[0].buffer_head, packed.num_heads, packed)
    return Operand(-1, 0, packed.num_heads, packed)


def _union(regions: Ints) -> Ints:
    """Disjoint regions, in order, over the same tokens as `regions` (which have the same heads)."""
    begin, end = (regions[:, 0] << _SHIFT) | regions[:, 1], (regions[:, 0] << _SHIFT) | regions[:, 2]
    order = np.argsort(begin, kind="stable")
    begin, end = begin[order], end[order]
    reach = np.maximum.accumulate(end)
    bounds = run_bounds(begin[1:] > reach[:-1], len(begin))
    first, last = bounds[:-1], bounds[1:] - 1
    union = np.tile(regions[0], (len(first), 1))
    union[:, 0], union[:, 1] = begin[first] >> _SHIFT, begin[first] & ((1 << _SHIFT) - 1)
    union[:, 2] = reach[last] & ((1 << _SHIFT) - 1)
    return union


def _reads(q: Operand, k: Operand) -> frozenset[tuple[Kind, int]]:
    found: set[tuple[Kind, int]] = set()
    for kind, operand in ((Kind.Q, q), (Kind.KV, k)):
        found |= {(kind, operand.buffer)} if operand.buffer >= 0 else {(kind, run.buffer) for run in operand.packed.runs}
    return frozenset(found)
