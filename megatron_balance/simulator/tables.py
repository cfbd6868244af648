"""Zones as tables for `simulator.rounds`: seconds of every launch and bytes of every transfer, without the ops.

A ring over 1,024 ranks has a million launches and a million transfers, but few kinds of either: the sequences that every rank shares
are alike on all of them, up to a token a chunk, and those too short for that are chunks of a token or two. Rings of more than `EXACT`
cells (rank, round, sequence) are tabulated by kind, all others launch by launch.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from megatron_balance.analysis.wire import WIDTH, of_transfers
from megatron_balance.compile import layouts, remap
from megatron_balance.cost.base import Floats, Ints
from megatron_balance.ir.arrays import as_array
from megatron_balance.ir.columns import Pair
from megatron_balance.ir.plan import MicrobatchPlan, TaskTable, Zone
from megatron_balance.ir.program import Kind
from megatron_balance.patterns import dispatch, head_exchange, zigzag
from megatron_balance.patterns.zigzag import Zigzag
from megatron_balance.simulator.machine import Bools, Machine
from megatron_balance.simulator.work import launches

EXACT = 1 << 18


@dataclass(slots=True)
class Table:
    """One zone. `launch` [G, rounds]: which launch each rank runs in each round; `forward_s`, `backward_s`: its seconds, same shape.

    Of a ring, `hops` [G, G]: tokens of the block that began at a group index in its n-th hop forward; `back`: turning the other way.
    Of a collective, bytes [G, G] from rank to rank: `there` of its inputs, `owned` of its outputs, `out_grads` and `grads` of their
    gradients. Of a task table, `tiles`: messages (`analysis.wire`) of its inputs and of its outputs. `waits`: ranks [G] whose first
    launch needs what the remap brings; `waits_next`: whose second one does.
    """

    index: int
    zone: Zone | TaskTable
    ranks: Ints
    launch: Ints
    forward_s: Floats = field(default_factory=lambda: np.zeros((0, 0)))
    backward_s: Floats = field(default_factory=lambda: np.zeros((0, 0)))
    hops: Floats = field(default_factory=lambda: np.zeros((0, 0)))
    back: Floats = field(default_factory=lambda: np.zeros((0, 0)))
    there: Floats = field(default_factory=lambda: np.zeros((0, 0)))
    owned: Floats = field(default_factory=lambda: np.zeros((0, 0)))
    grads: Floats = field(default_factory=lambda: np.zeros((0, 0)))
    out_grads: Floats = field(default_factory=lambda: np.zeros((0, 0)))
    tiles: tuple[Ints, Ints] | None = None
    waits: Bools = field(default_factory=lambda: np.zeros(0, dtype=bool))
    waits_next: Bools = field(default_factory=lambda: np.zeros(0, dtype=bool))


class Tables:
    """All zones of a plan; the costs of all their launches are asked for at once."""

    def __init__(self, plan: MicrobatchPlan, machine: Machine) -> None:
        self.plan, self.machine = plan, machine
        self.lengths = np.array(plan.lengths, dtype=np.int64)
        self.pairs: list[Ints] = [np.empty((0, Pair.WIDTH), dtype=np.int64)]
        self.launch: list[Ints] = [np.empty(0, dtype=np.int64)]
        self.merging: list[Floats] = []
        self.num_launches = 0
        self.opened: list[Ints] = [np.empty((0, WIDTH), dtype=np.int64)]
        """Messages that the remap's first exchange carries beside those of the moves: first hops that the owner makes."""
        self.remote = _remote(plan)
        self.zones = [self._zone(index, zone) for index, zone in enumerate(plan.zones)]
        for table in self.zones:
            self._remap_transfers(table)
        self._price()

    def _remap_transfers(self, table: Table) -> None:
        """Leave to the remap what it brings, and first hops that owners make for holders (`compile.remap.resourced`)."""
        here = self.remote[self.remote[:, layouts.ZONE] == table.index]
        table.waits = np.isin(table.ranks, here[:, _HOLDER])
        table.waits_next = table.waits.copy()
        if not len(here):
            return
        if table.tiles is not None:
            there, _ = (as_array(rows) for rows in dispatch.transfers(_task_table_of(table), self.plan.num_heads, self.plan.num_kv_heads))
            stay, sent = remap.resourced(there, here[:, _REGION])
            table.tiles = of_transfers(0, stay), table.tiles[1]
            self.opened.append(of_transfers(0, sent))
            table.waits |= np.isin(table.ranks, sent[:, 7])
        elif table.hops.size:
            place = np.zeros(self.plan.num_ranks, dtype=np.int64)
            place[table.ranks] = np.arange(len(table.ranks))
            target = np.roll(table.ranks, -1)[place[here[:, _HOLDER]]]
            sent = here[(here[:, _ON] == 1) & (here[:, _OWNER] != target)]
            target = target[(here[:, _ON] == 1) & (here[:, _OWNER] != target)]
            tokens = sent[:, _STOP] - sent[:, _START]
            np.subtract.at(table.hops[:, 1], place[sent[:, _HOLDER]], tokens)
            table.waits_next |= np.isin(table.ranks, target)
            zero = np.zeros(len(sent), dtype=np.int64)
            heads = zero + self.plan.num_kv_heads
            self.opened.append(np.column_stack([zero, sent[:, _OWNER], target, zero + int(Kind.KV), zero, heads, tokens]))

    def _add(self, pairs: Ints, launch: Ints, merging: Floats) -> int:
        """Launches to be priced; the number of the first."""
        first = self.num_launches
        self.pairs.append(pairs)
        self.launch.append(launch + first)
        self.merging.append(merging)
        self.num_launches += len(merging)
        return first

    def _price(self) -> None:
        pairs, launch = np.concatenate(self.pairs), np.concatenate(self.launch)
        merging = np.concatenate([np.zeros(0), *self.merging])
        slow = self.machine.slow()
        forward, backward = (launches(pairs, launch, merging, self.machine, backward=backward).seconds for backward in (False, True))
        for table in self.zones:
            factor = slow[table.ranks][:, None]
            table.forward_s, table.backward_s = forward[table.launch] * factor, backward[table.launch] * factor

    def _zone(self, index: int, zone: Zone | TaskTable) -> Table:
        if isinstance(zone, TaskTable):
            return self._task_table(index, zone)
        ranks = np.array(zone.ranks)
        if len(ranks) == 1 or zone.pattern == "ring":
            return self._ring(index, zone, ranks)
        return self._heads(index, zone, ranks) if zone.pattern == "head_exchange" else self._gather(index, zone, ranks)

    # Rings, and local zones, which are rings of one

    def _ring(self, index: int, zone: Zone, ranks: Ints) -> Table:
        cut = zigzag.zigzag(self.lengths, np.array(zone.seqs, dtype=np.int64), len(ranks))
        heads = (self.plan.num_heads, self.plan.num_kv_heads)
        small = cut.size**2 * max(1, len(cut.seqs)) <= EXACT
        pairs, launch, merging, which = _ring_launches(cut, heads) if small else _ring_kinds(cut, heads)
        first = self._add(pairs, launch, merging)
        table = Table(index, zone, ranks, which + first)
        if cut.size > 1:
            table.hops, table.back = _walks(cut)
        return table

    # Collectives

    def _gather(self, index: int, zone: Zone, ranks: Ints) -> Table:
        cut = zigzag.zigzag(self.lengths, np.array(zone.seqs, dtype=np.int64), len(ranks))
        held = [zigzag.fragments(cut, i) for i in range(len(ranks))]
        own = np.concatenate(held)
        launch = np.repeat(np.arange(len(ranks)), [len(rows) for rows in held])
        pairs = np.zeros((len(own), Pair.WIDTH), dtype=np.int64)
        pairs[:, :3] = own
        pairs[:, 4], pairs[:, 6], pairs[:, 8] = self.plan.num_heads, own[:, 2], self.plan.num_kv_heads
        first = self._add(pairs, launch, np.zeros(len(ranks)))
        shared = np.zeros(len(self.lengths), dtype=bool)
        shared[cut.seqs[cut.parts > 1]] = True
        tokens = np.bincount(launch, weights=(own[:, 2] - own[:, 1]) * shared[own[:, 0]], minlength=len(ranks))
        table = Table(index, zone, ranks, (first + np.arange(len(ranks)))[:, None])
        sizes, kv_heads = self.machine.payload.row_bytes, self.plan.num_kv_heads
        table.there = np.repeat(tokens[:, None] * kv_heads * sizes[Kind.KV], len(ranks), axis=1)
        table.grads = np.repeat(tokens[None] * kv_heads * sizes[Kind.KV_GRAD], len(ranks), axis=0)
        return table

    def _heads(self, index: int, zone: Zone, ranks: Ints) -> Table:
        seqs, size = np.array(zone.seqs, dtype=np.int64), len(ranks)
        total = int(self.lengths[seqs].sum())
        runs = np.diff(total * np.arange(size + 1) // size).astype(np.float64)
        slices = head_exchange.head_slices(self.plan.num_heads, self.plan.num_kv_heads, size)
        queries = np.array([own[-1][1] - own[0][0] if own else 0 for own in slices], dtype=np.float64)
        keys = np.array([own[-1][3] - own[0][2] if own else 0 for own in slices], dtype=np.float64)
        parts = [(place, part) for place, own in enumerate(slices) for part in own]
        pairs = np.zeros((len(parts), len(seqs), Pair.WIDTH), dtype=np.int64)
        pairs[:, :, 0], pairs[:, :, 2], pairs[:, :, 6] = seqs, self.lengths[seqs], self.lengths[seqs]
        heads = np.array([part for _, part in parts]).reshape(-1, 4)
        pairs[:, :, 3:5], pairs[:, :, 7:9] = heads[:, None, :2], heads[:, None, 2:]
        launch = np.repeat([place for place, _ in parts], len(seqs)).astype(np.int64)
        first = self._add(pairs.reshape(-1, Pair.WIDTH), launch, np.zeros(size))
        table = Table(index, zone, ranks, (first + np.arange(size))[:, None])
        row, lse = self.machine.payload.row_bytes, self.machine.payload.lse_bytes
        table.there = np.outer(runs, queries * row[Kind.Q] + keys * row[Kind.KV])
        table.owned = np.outer(queries * (row[Kind.OUT] + lse), runs)
        table.out_grads = np.outer(runs, queries * (row[Kind.OUT_GRAD] + lse))
        table.grads = np.outer(queries * row[Kind.Q_GRAD] + keys * row[Kind.KV_GRAD], runs)
        return table

    def _task_table(self, index: int, zone: TaskTable) -> Table:
        tasks = as_array(zone.tasks)
        pairs = np.zeros((len(tasks), Pair.WIDTH), dtype=np.int64)
        pairs[:, :3], pairs[:, 5:7] = tasks[:, 1:4], tasks[:, 4:6]
        pairs[:, 1] = np.maximum(tasks[:, 2], tasks[:, 4])
        pairs[:, 6] = np.minimum(tasks[:, 5], tasks[:, 3])
        pairs[:, 4], pairs[:, 8] = self.plan.num_heads, self.plan.num_kv_heads
        num_ranks = self.plan.num_ranks
        first = self._add(pairs, tasks[:, 0], np.zeros(num_ranks))
        table = Table(index, zone, np.arange(num_ranks), (first + np.arange(num_ranks))[:, None])
        there, back = dispatch.transfers(zone, self.plan.num_heads, self.plan.num_kv_heads)
        table.tiles = of_transfers(0, as_array(there)), of_transfers(1, as_array(back))
        return table


_SEQ, _START, _STOP, _OWNER, _HOLDER, _ON = 0, 1, 2, 3, 5, 6
_REGION = [0, 1, 2, 3, 5]


def _remote(plan: MicrobatchPlan) -> Ints:
    """What is attended to away from owner: rows (seq, start, stop, owner, zone, holder, on); `on`: its ring's first exchange compile it on."""
    if not plan.moves:
        return np.empty((0, 7), dtype=np.int64)
    held = layouts.fragments(plan)
    remote = layouts.remote(plan, held)
    of = held[remote[:, layouts.FRAGMENT]]
    columns = [
        of[:, layouts.SEQ],
        *remote[:, [layouts.BEGIN, layouts.END, layouts.OWNER]].T,
        of[:, layouts.ZONE],
        remote[:, layouts.HOLDER],
    ]
    return np.column_stack([*columns, of[:, layouts.ON]])


def _task_table_of(table: Table) -> TaskTable:
    assert isinstance(table.zone, TaskTable), "tiles of a zone that is no task table"
    return table.zone


def _ring_launches(cut: Zigzag, heads: tuple[int, int]) -> tuple[Ints, Ints, Floats, Ints]:
    """Pairs and launch of each, what merges, and the launch of every (group index, round)."""
    size = cut.size
    index = np.arange(size)
    position = cut.position(index[:, None])
    own = position < cut.parts
    start = np.stack([cut.lo(position)[0], cut.hi(position)[0]], 2)
    stop = np.stack([cut.lo(position)[1], cut.hi(position)[1]], 2)
    source = (index[:, None] - index) % size
    theirs, both = position[source], own[:, None] & own[source]
    mine = position[:, None]
    same, earlier, later = both & (theirs == mine), both & (theirs < mine), both & (theirs > mine)
    found: list[Ints] = []
    where: list[Ints] = []
    for query, key, visible in ((0, 0, same | earlier), (1, 0, both), (1, 1, same | later)):
        i, t, s = np.nonzero(visible)
        j = source[i, t]
        rows = np.zeros((len(i), Pair.WIDTH), dtype=np.int64)
        rows[:, 0], rows[:, 1], rows[:, 2], rows[:, 4] = cut.seqs[s], start[i, s, query], stop[i, s, query], heads[0]
        rows[:, 5], rows[:, 6], rows[:, 8] = start[j, s, key], stop[j, s, key], heads[1]
        keep = (rows[:, 1] < rows[:, 2]) & (rows[:, 5] < rows[:, 6])
        found.append(rows[keep])
        where.append((i * size + t)[keep])
    merging = np.tile(index > 0, size).astype(np.float64)
    return np.concatenate(found), np.concatenate(where), merging, np.arange(size * size).reshape(size, size)


_LO, _HI, _KEYS, _KEYS_HI = 4, 6, 0, 2  # where chunks of a kind begin, in chunks


def _ring_kinds(cut: Zigzag, heads: tuple[int, int]) -> tuple[Ints, Ints, Floats, Ints]:
    """The same by kind of launch: whose keys come first, and how many short sequences both ranks hold.

    A pair that occurs n times in a launch is one row with n times the heads, which costs the same.
    """
    size = cut.size
    index = np.arange(size)
    short = cut.parts < size
    holds = (((index[:, None] - cut.first[short]) % size) < cut.parts[short]).astype(np.float32)
    together = np.rint(holds @ holds.T).astype(np.int64)
    source = (index[:, None] - index) % size
    kind = np.where(source == index[:, None], 0, np.where(source < index[:, None], 1, 2))
    kinds, which = np.unique(kind * (together.max(initial=0) + 1) + together[index[:, None], source], return_inverse=True)
    order, shared = np.divmod(kinds, together.max(initial=0) + 1)
    chunk = np.maximum(1, np.rint(cut.lengths[~short] / (2 * size)).astype(np.int64))
    combos: tuple[tuple[tuple[int, int], ...], ...] = (
        ((_LO, _LO), (_HI, _LO), (_HI, _HI)),
        ((_LO, _KEYS), (_HI, _KEYS)),
        ((_HI, _KEYS), (_HI, _KEYS_HI)),
    )
    found: list[Ints] = []
    where: list[Ints] = []
    for launch, (of, count) in enumerate(zip(order.tolist(), shared.tolist(), strict=True)):
        for query, key in combos[int(of)]:
            rows = np.zeros((len(chunk) + (count > 0), Pair.WIDTH), dtype=np.int64)
            rows[: len(chunk), 0], rows[: len(chunk), 4], rows[: len(chunk), 8] = cut.seqs[~short], heads[0], heads[1]
            for column, place in ((1, query), (2, query + 1), (5, key), (6, key + 1)):
                rows[: len(chunk), column] = chunk * place
            if count:
                rows[-1] = (-1, query, query + 1, 0, heads[0] * count, key, key + 1, 0, heads[1] * count)
            found.append(rows)
            where.append(np.full(len(rows), launch))
    return np.concatenate(found), np.concatenate(where), (order > 0).astype(np.float64), which.reshape(size, size)


def _walks(cut: Zigzag) -> tuple[Floats, Floats]:
    """Tokens [G, G] of the block of a group index in its n-th hop, turning forward and turning the other way (`patterns.ring`)."""
    size = cut.size
    position = cut.position(np.arange(size)[:, None])
    there = position < cut.parts
    lo, hi = (np.where(there, stop - start, 0) for start, stop in (cut.lo(position), cut.hi(position)))
    first, last = position == 0, position >= cut.parts - 1
    forward = _walked(lo, np.where(first, cut.parts - 1, size - 1)) + _walked(hi, np.where(first, 0, size - 1))
    return forward, _walked(lo, np.where(last, position, size - 1)) + _walked(hi, position)


def _walked(tokens: Ints, reach: Ints) -> Floats:
    """Tokens [G, S] summed over sequences in each hop [G, G] up to their reach; hop 0 is none."""
    size = len(tokens)
    place = np.arange(size)[:, None] * (size + 1) + np.minimum(reach, size - 1) + 1
    gone = np.bincount(place.ravel(), weights=tokens.ravel(), minlength=size * (size + 1)).reshape(size, size + 1)
    moved = tokens.sum(axis=1)[:, None] - np.cumsum(gone, axis=1)[:, :size]
    moved[:, 0] = 0.0
    return moved
