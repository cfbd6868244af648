"""Bind a plan to one rank: project, transpose, and look up every row once per microbatch.

`run` (the executor) then serves every layer and every recomputation without planning, and without Python work per token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from megatron_balance.core.plan import MicrobatchPlan
from megatron_balance.core.program import Attend, AttendGrad, Exchange, Kind, Merge, Op, RankProgram
from megatron_balance.errors import ConfigError
from megatron_balance.passes.tables import Ints, as_array
from megatron_balance.passes.transpose import Policy, transpose
from megatron_balance.runtime.counters import Counters
from megatron_balance.runtime.entries import Fused, fuse, simple_pairs
from megatron_balance.runtime.groups import Groups
from megatron_balance.runtime.kernels import Entries, Kernel, choose_kernel
from megatron_balance.runtime.lowered import Finish, GradLaunch, Launch, Message, Operand, Packed, Phase, Start, Step, Swap, Work
from megatron_balance.runtime.regions import Table, runs
from megatron_balance.schedules import project

_INPUTS = (Kind.Q, Kind.KV)
_GRADS = (Kind.Q_GRAD, Kind.KV_GRAD)


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Heads of the tensors that this rank's attention sees (under tensor parallelism: this rank's share)."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True, eq=False)
class Bound:
    """A plan, looked up for one rank. Immutable but for `counters`; one serves all layers of its microbatch.

    `home`: int64 [n, 3] rows (seq, start, stop), the order of this rank's tokens. `query_rows`, `key_rows`: (rows,
    heads) of every buffer, by number. `counters`: what ran so far.
    """

    plan: MicrobatchPlan
    rank: int
    shape: AttentionShape
    home: Ints
    num_tokens: int
    policy: Policy
    forward: Phase
    backward: Phase
    groups: Groups
    kernel: Kernel
    query_rows: dict[int, tuple[int, int]]
    key_rows: dict[int, tuple[int, int]]
    counters: Counters = field(default_factory=Counters)


def bind(
    plan: MicrobatchPlan,
    rank: int,
    shape: AttentionShape,
    *,
    groups: Groups,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    policy: Policy = "keep",
    kernel: str = "auto",
) -> Bound:
    """Everything `rank` needs to run `plan`: steps, rows, messages, kernel.

    Raises ConfigError: the plan was made for other heads or another number of ranks. InvalidProgramError: a broken plan.
    """
    if (plan.num_heads, plan.num_kv_heads) != (shape.num_heads, shape.num_kv_heads):
        raise ConfigError(
            f"the plan is for {plan.num_heads} query and {plan.num_kv_heads} key-value heads, the tensors have "
            f"{shape.num_heads} and {shape.num_kv_heads}"
        )
    if plan.num_ranks != groups.size:
        raise ConfigError(f"the plan is for {plan.num_ranks} ranks, the pool has {groups.size}")
    program = transpose(project(plan, rank), policy)
    chosen = choose_kernel(kernel, torch.device(device), dtype, shape.head_dim)
    lowering = _Lowering(program, shape, torch.device(device), policy, chosen)
    home = as_array(program.home)
    return Bound(
        plan=plan,
        rank=rank,
        shape=shape,
        home=home,
        num_tokens=int((home[:, 2] - home[:, 1]).sum()),
        policy=policy,
        forward=lowering.forward_phase,
        backward=lowering.backward_phase,
        groups=groups,
        kernel=chosen,
        query_rows=lowering.sizes[Kind.Q],
        key_rows=lowering.sizes[Kind.KV],
    )


@dataclass(frozen=True, slots=True)
class _Draft:
    """A message before its rows are looked up. `regions`: [n, 5]; `buffer`: of received inputs, else -1."""

    peer: int
    kind: Kind
    regions: Ints
    buffer: int


class _Lowering:
    """Both phases of one rank. `space`: where outputs and gradients lie; `values`: where the backward finds q, k and v."""

    def __init__(self, program: RankProgram, shape: AttentionShape, device: torch.device, policy: Policy, kernel: Kernel) -> None:
        self.program = program
        self.rank = program.rank
        self.device = device
        self.kernel = kernel
        self.num_buffers = 1
        home = as_array(program.home)
        sizes = home[:, 2] - home[:, 1]
        heads = {Kind.Q: shape.num_heads, Kind.KV: shape.num_kv_heads}
        self.sizes = {kind: {0: (int(sizes.sum()), heads[kind])} for kind in _INPUTS}
        own = {
            kind: np.column_stack([home, np.tile([0, heads[kind], 0], (len(home), 1)), np.cumsum(sizes) - sizes]).astype(np.int64)
            for kind in _INPUTS
        }
        self.zones = _zone_of_exchange(program)
        self.drafts: dict[int, tuple[list[_Draft], list[_Draft]]] = {}
        received = self.receive(program.forward)
        self.space = {kind: Table(np.concatenate([own[kind], *received[kind]])) for kind in _INPUTS}
        self.values = self.space
        self.forward_phase = self.lower(program.forward, forward=True, free=policy == "replay")
        self.drafts = {}
        received = self.receive(program.backward)
        if policy == "replay":
            self.values = {kind: Table(np.concatenate([own[kind], *received[kind]])) for kind in _INPUTS}
        self.backward_phase = self.lower(program.backward, forward=False, free=True)

    def receive(self, ops: Sequence[Op]) -> dict[Kind, list[Ints]]:
        """Draft all messages and number the buffers of received inputs; returns those as instances of `regions.Table`."""
        instances: dict[Kind, list[Ints]] = {kind: [] for kind in _INPUTS}
        for op in ops:
            if not isinstance(op, Exchange):
                continue
            rows = as_array(op.transfers)
            sends = [_Draft(peer, kind, part, -1) for peer, kind, part in _messages(rows[rows[:, 6] == self.rank], 7)]
            receives: list[_Draft] = []
            for peer, kind, part in _messages(rows[rows[:, 7] == self.rank], 6):
                buffer = -1
                if kind in _INPUTS:
                    buffer = self.num_buffers
                    self.num_buffers += 1
                    sizes = part[:, 2] - part[:, 1]
                    instances[kind].append(np.column_stack([part, np.full(len(part), buffer), np.cumsum(sizes) - sizes]))
                    self.sizes[kind][buffer] = (int(sizes.sum()), int(part[0, 4] - part[0, 3]))
                receives.append(_Draft(peer, kind, part, buffer))
            self.drafts[op.id] = (sends, receives)
        return instances

    # Rows

    def packed(self, table: Table, regions: Ints, *, distinct: bool = False) -> Packed:
        found = runs(regions, table.resolve(regions), distinct=distinct)
        num_heads = int(regions[0, 4] - regions[0, 3]) if len(regions) else 0
        num_rows = int((regions[:, 2] - regions[:, 1]).sum())
        indices = tuple(None if r.index is None else torch.from_numpy(r.index).to(self.device) for r in found)
        return Packed(found, num_rows, num_heads, indices)

    def operand(self, table: Table, regions: Ints) -> tuple[Operand, Ints]:
        """An operand that holds `regions` [n, 5] (same heads), and the row at which each begins."""
        pieces = table.resolve(regions)
        num_heads = int(regions[0, 4] - regions[0, 3])
        buffer, head = int(pieces[0, 5]), int(pieces[0, 7])
        one_buffer = (pieces[:, 5] == buffer).all() and (pieces[:, 7] == head).all() and (pieces[:, 4] == num_heads).all()
        sizes = np.bincount(pieces[:, 0], minlength=len(regions))
        if one_buffer:
            first = np.cumsum(sizes) - sizes
            # A region in several pieces must still be consecutive rows.
            inside = np.repeat(pieces[first, 6], sizes) + pieces[:, 1]
            if (inside == pieces[:, 6]).all():
                return Operand(buffer, head, num_heads, Packed((), 0, num_heads)), pieces[first, 6]
        union = _union(regions)
        packed = self.packed(table, union)
        sizes = union[:, 2] - union[:, 1]
        at = np.searchsorted((union[:, 0] << 40) | union[:, 1], (regions[:, 0] << 40) | regions[:, 1], side="right") - 1
        return Operand(-1, 0, num_heads, packed), (np.cumsum(sizes) - sizes)[at] + regions[:, 1] - union[at, 1]

    # Steps

    def lower(self, ops: Sequence[Op], *, forward: bool, free: bool) -> Phase:
        steps: list[Step] = []
        zones = self.zones_of(ops, forward=forward)
        for op, zone in zip(ops, zones, strict=True):
            match op:
                case Exchange():
                    _place(steps, self.swap(op, zone))
                case Attend():
                    for pairs in _by_heads(as_array(op.pairs)):
                        _append(steps, self.launch(pairs, zone))
                case AttendGrad():
                    for pairs in _by_heads(as_array(op.pairs)):
                        _append(steps, self.grad_launch(pairs, zone))
                case Merge():
                    pass  # fused: a launch or a receive adds to what is already there
        _finish_all(steps)
        steps, blank = self.mark_merges(steps) if forward else (steps, ())
        return Phase(tuple(steps), _frees(steps) if free else ((),) * len(steps), blank, _work(steps))

    def zones_of(self, ops: Sequence[Op], *, forward: bool) -> list[str]:
        """The zone of every op: forward ops lie zone by zone, backward ones between exchanges of theirs."""
        if forward:
            return [name for name, count in self.program.queues for _ in range(count)] if self.program.queues else [""] * len(ops)
        launches = [zone for op, zone in zip(self.program.forward, self.zones_of(self.program.forward, forward=True), strict=True)
                    if isinstance(op, Attend)][::-1]
        names, at = [], iter(launches)
        zone = launches[0] if launches else ""
        for op in ops:
            if isinstance(op, AttendGrad):
                zone = next(at)
            elif isinstance(op, Exchange):
                zone = self.zones.get(self.program.num_exchanges - 1 - op.id // 2, zone)
            names.append(zone)
        return names

    def swap(self, op: Exchange, zone: str) -> Swap:
        sends, receives = self.drafts[op.id]
        return Swap(
            op.id,
            zone,
            op.pattern,
            op.group,
            tuple(Message(d.peer, d.kind, self.packed(self.table(d.kind), d.regions)) for d in sends),
            tuple(self.received(d) for d in receives),
        )

    def table(self, kind: Kind) -> Table:
        if kind in _INPUTS:
            return self.values[kind]
        return self.space[Kind.KV if kind == Kind.KV_GRAD else Kind.Q]

    def received(self, draft: _Draft) -> Message:
        if draft.buffer >= 0:
            num_rows, num_heads = self.sizes[draft.kind][draft.buffer]
            return Message(draft.peer, draft.kind, Packed((), num_rows, num_heads), draft.buffer)
        return Message(draft.peer, draft.kind, self.packed(self.table(draft.kind), draft.regions))

    def entries(self, pairs: Ints) -> tuple[Operand, Operand, Fused, Ints, Ints]:
        """Operands, fused entries, and the query and key regions of their packed rows."""
        pairs = simple_pairs(pairs)
        query_regions, key_regions = pairs[:, :5], pairs[:, [0, 5, 6, 7, 8]]
        q, q_row = self.operand(self.values[Kind.Q], query_regions)
        k, k_row = self.operand(self.values[Kind.KV], key_regions)
        fused = fuse(pairs, q_row, k_row)
        return q, k, fused, query_regions[fused.q_pairs], key_regions[fused.k_pairs]

    def launch(self, pairs: Ints, zone: str) -> Launch:
        q, k, fused, query_regions, _ = self.entries(pairs)
        entries = Entries(_spans(fused.q_start, fused.q_stop), _spans(fused.k_start, fused.k_stop), tuple(fused.causal.tolist()))
        out = self.packed(self.space[Kind.Q], query_regions, distinct=True)
        return Launch(zone, q, k, self.kernel.prepare(entries, self.device), out, (), _reads(q, k), self.kernel.launches(entries))

    def grad_launch(self, pairs: Ints, zone: str) -> GradLaunch:
        q, k, fused, query_regions, key_regions = self.entries(pairs)
        dq = self.packed(self.space[Kind.Q], query_regions)
        dk = self.packed(self.space[Kind.KV], key_regions)
        sizes = fused.q_stop - fused.q_start
        first = np.cumsum(sizes) - sizes
        dout = Operand(-1, 0, dq.num_heads, dq)
        if dq.direct:
            run = dq.runs[0]
            first += run.start
            dout = Operand(run.buffer, run.buffer_head, dq.num_heads, dq)
        entries = Entries(
            _spans(fused.q_start, fused.q_stop),
            _spans(fused.k_start, fused.k_stop),
            tuple(fused.causal.tolist()),
            _spans(first, first + sizes),
        )
        reads = _reads(q, k) | {(Kind.OUT_GRAD, -1)}
        return GradLaunch(zone, q, k, dout, self.kernel.prepare(entries, self.device), dq, dk, reads, self.kernel.launches(entries))

    def mark_merges(self, steps: list[Step]) -> tuple[list[Step], tuple[int, ...]]:
        """Say of every output run whether it is the first there; buffers where that differs row by row start blank."""
        written = {buffer: np.zeros(size, dtype=bool) for buffer, size in self.sizes[Kind.Q].items()}
        blank: set[int] = set()

        def mark(packed: Packed) -> tuple[bool, ...]:
            merges = []
            for run in packed.runs:
                rows = slice(run.start, run.stop) if run.index is None else run.index
                part = written[run.buffer][rows, run.buffer_head : run.buffer_head + run.num_heads]
                merges.append(bool(part.any()))
                if part.any() and not part.all():
                    blank.add(run.buffer)
                written[run.buffer][rows, run.buffer_head : run.buffer_head + run.num_heads] = True
            return tuple(merges)

        marked: list[Step] = []
        for step in steps:
            if isinstance(step, Launch):
                marked.append(replace(step, merges=mark(step.out)))
            elif isinstance(step, Finish):
                receives = tuple(replace(m, merges=mark(m.packed)) if m.kind == Kind.OUT else m for m in step.swap.receives)
                marked.append(Finish(replace(step.swap, receives=receives)))
            else:
                marked.append(step)
        return marked, tuple(sorted(blank))


def _spans(start: Ints, stop: Ints) -> tuple[tuple[int, int], ...]:
    return tuple(zip(start.tolist(), stop.tolist(), strict=True))


def _zone_of_exchange(program: RankProgram) -> dict[int, str]:
    names = [name for name, count in program.queues for _ in range(count)]
    return {op.id: zone for op, zone in zip(program.forward, names, strict=False) if isinstance(op, Exchange)}


def _messages(rows: Ints, peers: int) -> Iterator[tuple[int, Kind, Ints]]:
    """(peer, kind, regions [n, 5]) for every run of rows with one peer, kind and head span; both sides cut alike."""
    if not len(rows):
        return
    order = np.lexsort((rows[:, 5], rows[:, 4], rows[:, 0], rows[:, peers]))
    rows = rows[order]
    keys = rows[:, [peers, 0, 4, 5]]
    begins = np.flatnonzero(np.append(True, (keys[1:] != keys[:-1]).any(axis=1))).tolist()
    for a, b in zip(begins, [*begins[1:], len(rows)], strict=True):
        yield int(rows[a, peers]), Kind(int(rows[a, 0])), rows[a:b, 1:6]


def _by_heads(pairs: Ints) -> list[Ints]:
    """Pairs grouped by their head spans: a launch has one."""
    keys = pairs[:, [3, 4, 7, 8]]
    if (keys == keys[0]).all():
        return [pairs]
    _, group = np.unique(keys, axis=0, return_inverse=True)
    return [pairs[group.ravel() == g] for g in range(int(group.max()) + 1)]


def _union(regions: Ints) -> Ints:
    """Disjoint regions, in order, over the same tokens as `regions` (which have the same heads)."""
    begin, end = (regions[:, 0] << 40) | regions[:, 1], (regions[:, 0] << 40) | regions[:, 2]
    order = np.argsort(begin, kind="stable")
    begin, end = begin[order], end[order]
    reach = np.maximum.accumulate(end)
    first = np.flatnonzero(np.append(True, begin[1:] > reach[:-1]))
    last = np.append(first[1:], len(begin)) - 1
    union = np.tile(regions[0], (len(first), 1))
    union[:, 0], union[:, 1] = begin[first] >> 40, begin[first] & ((1 << 40) - 1)
    union[:, 2] = reach[last] & ((1 << 40) - 1)
    return union


def _reads(q: Operand, k: Operand) -> frozenset[tuple[Kind, int]]:
    found: set[tuple[Kind, int]] = set()
    for kind, operand in ((Kind.Q, q), (Kind.KV, k)):
        found |= {(kind, operand.buffer)} if operand.buffer >= 0 else {(kind, run.buffer) for run in operand.packed.runs}
    return frozenset(found)


# Order: an exchange starts as early as what it sends allows, and ends where its values are first needed.


def _gives(swap: Swap) -> set[tuple[Kind, int]]:
    return {(m.kind, m.buffer) for m in swap.receives}


def _takes(swap: Swap) -> set[tuple[Kind, int]]:
    """What a swap sends, as `_gives` names it: input buffers by number, everything else by kind."""
    takes = {(m.kind, run.buffer) for m in swap.sends if m.kind in _INPUTS for run in m.packed.runs}
    return takes | {(m.kind, -1) for m in swap.sends if m.kind not in _INPUTS}


def _append(steps: list[Step], launch: Launch | GradLaunch) -> None:
    steps += [Finish(swap) for swap in _pending(steps) if _gives(swap) & launch.reads]
    steps.append(launch)


def _pending(steps: list[Step]) -> list[Swap]:
    """Swaps started and not finished: few, and near the end of the list."""
    finished: set[int] = set()
    found: list[Swap] = []
    for step in reversed(steps):
        if isinstance(step, Finish):
            finished.add(step.swap.id)
        elif isinstance(step, Start) and step.swap.id not in finished:
            found.append(step.swap)
    return found[::-1]


def _place(steps: list[Step], swap: Swap) -> None:
    takes = _takes(swap)
    inputs_only = all(m.kind in _INPUTS for m in swap.sends) and all(m.kind in _INPUTS for m in swap.receives)
    needed = [s for s in _pending(steps) if _gives(s) & takes]
    if needed or not inputs_only:
        steps += [Finish(s) for s in needed]
        steps.append(Start(swap))
        return
    at = len(steps)
    while at and not isinstance(steps[at - 1], Start) and not (isinstance(steps[at - 1], Finish) and _gives(steps[at - 1].swap) & takes):
        at -= 1
    steps.insert(at, Start(swap))


def _finish_all(steps: list[Step]) -> None:
    steps += [Finish(swap) for swap in _pending(steps)]


def _frees(steps: list[Step]) -> tuple[tuple[tuple[Kind, int], ...], ...]:
    """After which step each received input buffer is read for the last time."""
    last: dict[tuple[Kind, int], int] = {}
    for index, step in enumerate(steps):
        if isinstance(step, Start):
            touched = {t for t in _takes(step.swap) if t[0] in _INPUTS}
        elif isinstance(step, Finish):
            touched = {g for g in _gives(step.swap) if g[0] in _INPUTS}
        else:
            touched = {r for r in step.reads if r[0] in _INPUTS}
        for key in touched:
            if key[1] > 0:
                last[key] = index
    frees: list[list[tuple[Kind, int]]] = [[] for _ in steps]
    for key, index in sorted(last.items()):
        frees[index].append(key)
    return tuple(tuple(f) for f in frees)


def _work(steps: Sequence[Step]) -> Work:
    calls: Counter[str] = Counter()
    exchanges: Counter[str] = Counter()
    tokens: Counter[Kind] = Counter()
    for step in steps:
        if isinstance(step, Launch | GradLaunch):
            calls[step.zone] += step.calls
        elif isinstance(step, Finish):
            exchanges[step.swap.pattern] += 1
            for message in step.swap.receives:
                tokens[message.kind] += message.packed.num_rows
    return Work(dict(calls), dict(exchanges), dict(tokens))
