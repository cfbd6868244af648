"""From one rank's program to its steps: every region looked up, all ops of a phase at once.

A ring over 64 ranks has 64 launches and 126 messages a phase; looked up one by one they would cost more than the step saves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from megatron_balance.core.program import PAIR_WIDTH, TRANSFER_WIDTH, Attend, AttendGrad, Exchange, Kind, Op, RankProgram
from megatron_balance.passes.tables import Ints, as_array, concat
from megatron_balance.passes.transpose import Policy
from megatron_balance.runtime.counters import counts
from megatron_balance.runtime.entries import Fused, fuse, simple_pairs
from megatron_balance.runtime.kernels import Entries, Kernel
from megatron_balance.runtime.lowered import Finish, GradLaunch, Launch, Message, Operand, Packed, Phase, Step, Swap, Work
from megatron_balance.runtime.order import INPUTS, Steps, frees
from megatron_balance.runtime.regions import BUFFER, BUFFER_HEAD, BUFFER_ROW, NUM_HEADS, REGION, ROW, Run, Table, grouped_runs
from megatron_balance.runtime.shape import AttentionShape

_SHIFT = 40


@dataclass(frozen=True, slots=True)
class _Messages:
    """One side (sent or received) of all exchanges of a phase. `rows` sorted by message; message i is rows[begin[i]:begin[i+1]].

    `op`: index of the exchange among the phase's ops; `buffer`: of received inputs, else -1.
    """

    rows: Ints
    begin: Ints
    op: list[int]
    peer: list[int]
    kind: list[Kind]
    buffer: list[int]


class Lowering:
    """Both phases of one rank. `space`: where outputs and gradients lie; `values`: where a phase finds q, k and v."""

    def __init__(self, program: RankProgram, shape: AttentionShape, device: torch.device, policy: Policy, kernel: Kernel) -> None:
        self.program = program
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
        sent, received, instances = self.exchange_sides(program.forward)
        self.space = {kind: Table(np.concatenate([own[kind], *instances[kind]])) for kind in INPUTS}
        self.values = self.space
        self.forward = self.phase(program.forward, (sent, received), _forward_zones(program), forward=True, free=policy == "replay")
        sent, received, instances = self.exchange_sides(program.backward)
        if policy == "replay":
            self.values = {kind: Table(np.concatenate([own[kind], *instances[kind]])) for kind in INPUTS}
        self.backward = self.phase(program.backward, (sent, received), _backward_zones(program), forward=False, free=True)

    # Messages

    def exchange_sides(self, ops: Sequence[Op]) -> tuple[_Messages, _Messages, dict[Kind, list[Ints]]]:
        """Messages sent and received, and the received inputs as instances of new buffers."""
        tables = [op.transfers if isinstance(op, Exchange) else None for op in ops]
        rows = concat([t for t in tables if t is not None], TRANSFER_WIDTH)
        op_index = np.repeat([i for i, t in enumerate(tables) if t is not None], [len(t) for t in tables if t is not None]).astype(np.int64)
        mine = rows[:, 6] == self.program.rank
        sent = self.messages(rows[mine], op_index[mine], 7)
        mine = rows[:, 7] == self.program.rank
        received = self.messages(rows[mine], op_index[mine], 6)
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

    def messages(self, rows: Ints, op_index: Ints, peers: int) -> _Messages:
        """A message is what one exchange moves of one kind and head span to or from one peer; both sides cut alike."""
        order = np.lexsort((rows[:, 5], rows[:, 4], rows[:, 0], rows[:, peers], op_index))
        rows, op_index = rows[order], op_index[order]
        keys = np.column_stack([op_index, rows[:, peers], rows[:, 0], rows[:, 4], rows[:, 5]])
        begin = np.flatnonzero(np.append(True, (keys[1:] != keys[:-1]).any(axis=1))) if len(rows) else np.empty(0, dtype=np.int64)
        kinds = [Kind(k) for k in rows[begin, 0].tolist()]
        peer = rows[begin, peers].tolist()
        return _Messages(rows, np.append(begin, len(rows)), op_index[begin].tolist(), peer, kinds, [-1] * len(begin))

    def swaps(self, ops: Sequence[Op], sent: _Messages, received: _Messages, zones: Sequence[str]) -> dict[int, Swap]:
        """The exchanges of a phase by op index."""
        sends: dict[int, list[Message]] = {i: [] for i, op in enumerate(ops) if isinstance(op, Exchange)}
        receives: dict[int, list[Message]] = {i: [] for i in sends}
        for side, lists in ((sent, sends), (received, receives)):
            for op, peer, kind, buffer, packed in zip(side.op, side.peer, side.kind, side.buffer, self.packed_messages(side), strict=True):
                lists[op].append(Message(peer, kind, packed, buffer))
        found: dict[int, Swap] = {}
        for i, op in enumerate(ops):
            if isinstance(op, Exchange):
                found[i] = Swap(op.id, zones[i], op.pattern, op.group, tuple(sends[i]), tuple(receives[i]))
        return found

    def packed_messages(self, side: _Messages) -> list[Packed]:
        """Rows of every message; received inputs have none, they become buffers."""
        found: list[Packed | None] = [None] * len(side.kind)
        sizes = side.rows[:, 3] - side.rows[:, 2]
        num_rows = np.add.reduceat(sizes, side.begin[:-1]).tolist() if len(side.kind) else []
        num_heads = (side.rows[side.begin[:-1], 5] - side.rows[side.begin[:-1], 4]).tolist()
        owner = np.repeat(np.arange(len(side.kind)), np.diff(side.begin))
        for table, kinds in (
            (self.values[Kind.Q], (Kind.Q,)),
            (self.values[Kind.KV], (Kind.KV,)),
            (self.space[Kind.Q], (Kind.OUT, Kind.OUT_GRAD, Kind.Q_GRAD)),
            (self.space[Kind.KV], (Kind.KV_GRAD,)),
        ):
            which = [i for i, kind in enumerate(side.kind) if kind in kinds and side.buffer[i] < 0]
            if not which:
                continue
            chosen = np.isin(owner, which)
            regions = side.rows[chosen, 1:6]
            renumbered = np.searchsorted(which, owner[chosen])
            for i, runs in zip(which, grouped_runs(regions, table.resolve(regions), renumbered, len(which)), strict=True):
                found[i] = self.packed(runs, num_rows[i], num_heads[i])
        return [p if p is not None else Packed((), num_rows[i], num_heads[i]) for i, p in enumerate(found)]

    def packed(self, runs: tuple[Run, ...], num_rows: int, num_heads: int) -> Packed:
        indices = tuple(None if r.index is None else torch.from_numpy(r.index).to(self.device) for r in runs)
        direct = len(runs) == 1 and runs[0].index is None and runs[0].num_heads == num_heads
        return Packed(runs, num_rows, num_heads, indices, direct)

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
                step = Launch(zones[op], q[i], k[i], prepared, out[i], (), reads, calls)
            else:
                reads |= {(Kind.OUT_GRAD, -1)}
                step = GradLaunch(zones[op], q[i], k[i], _final_rows(out[i]), prepared, out[i], dk[i], reads, calls)
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

    def phase(self, ops: Sequence[Op], sides: tuple[_Messages, _Messages], zones: Sequence[str], *, forward: bool, free: bool) -> Phase:
        """Steps of one phase. `sides`: messages sent and received; `free`: drop received inputs once nothing reads them."""
        swaps = self.swaps(ops, *sides, zones)
        launches = self.launches(ops, zones, forward=forward)
        order = Steps()
        for i in range(len(ops)):
            if i in swaps:
                order.swap(swaps[i])
            for launch in launches.get(i, ()):
                order.launch(launch)
        steps = order.end()
        blank: tuple[int, ...] = ()
        if forward:
            steps, blank = self.mark_merges(steps)
        return Phase(tuple(steps), frees(steps) if free else ((),) * len(steps), blank, Work(counts(steps, forward=forward)))

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


_NOTHING = Packed((), 0, 0)


def _forward_zones(program: RankProgram) -> list[str]:
    names = [name for name, count in program.queues for _ in range(count)]
    return names or [""] * len(program.forward)


def _backward_zones(program: RankProgram) -> list[str]:
    """Backward launches are the forward ones in reverse; exchanges belong to the forward exchange they come from."""
    forward = _forward_zones(program)
    launches = [zone for op, zone in zip(program.forward, forward, strict=True) if isinstance(op, Attend)][::-1]
    exchanges = {op.id: zone for op, zone in zip(program.forward, forward, strict=True) if isinstance(op, Exchange)}
    names: list[str] = []
    remaining = iter(launches)
    zone = launches[0] if launches else ""
    for op in program.backward:
        if isinstance(op, AttendGrad):
            zone = next(remaining)
        names.append(exchanges.get(program.num_exchanges - 1 - op.id // 2, zone) if isinstance(op, Exchange) else zone)
    return names


def _by_heads(pairs: Ints, op_index: Ints) -> tuple[Ints, Ints, list[int]]:
    """Pairs sorted by launch (an op and a head span), the launch of each pair, and the op of each launch."""
    keys = np.column_stack([op_index, pairs[:, 3], pairs[:, 4], pairs[:, 7], pairs[:, 8]])
    changes = (keys[1:] != keys[:-1]).any(axis=1)
    if int((changes & (keys[1:, 0] == keys[:-1, 0])).sum()):
        order = np.lexsort(keys.T[::-1])
        pairs, keys = pairs[order], keys[order]
        changes = (keys[1:] != keys[:-1]).any(axis=1)
    launch = np.append(0, np.cumsum(changes))
    return pairs, launch, keys[np.flatnonzero(np.append(True, changes)), 0].tolist()


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
    first = np.flatnonzero(np.append(True, begin[1:] > reach[:-1]))
    last = np.append(first[1:], len(begin)) - 1
    union = np.tile(regions[0], (len(first), 1))
    union[:, 0], union[:, 1] = begin[first] >> _SHIFT, begin[first] & ((1 << _SHIFT) - 1)
    union[:, 2] = reach[last] & ((1 << _SHIFT) - 1)
    return union


def _reads(q: Operand, k: Operand) -> frozenset[tuple[Kind, int]]:
    found: set[tuple[Kind, int]] = set()
    for kind, operand in ((Kind.Q, q), (Kind.KV, k)):
        found |= {(kind, operand.buffer)} if operand.buffer >= 0 else {(kind, run.buffer) for run in operand.packed.runs}
    return frozenset(found)
