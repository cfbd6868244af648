"""Head exchange: trade a slice of the tokens for a slice of the heads (DeepSpeed Ulysses).

The tokens of the zone, one sequence after the other, are divided into G near-equal runs, one a
rank; with `chunk_exchange` every sequence is divided into G near-equal contiguous chunks instead
(KnapFormer, section 3.3), and tokens left over are dealt round robin over the zone. Query heads are
divided into G near-equal spans; a rank gets the key-value heads that its span needs, so with fewer
of those than ranks (GQA) a key-value head goes to several ranks and its gradients are summed at the
owner. With fewer query heads than ranks some ranks attend nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megatron_balance.ir.arrays import Bools, Ints
from megatron_balance.ir.columns import Fragment, Held, Message, Pair, Transfer
from megatron_balance.ir.plan import Zone
from megatron_balance.ir.program import Kind, Op
from megatron_balance.patterns.base import (
    CommPattern,
    Context,
    GroupTraffic,
    Launches,
    Load,
    Startable,
    ZoneAt,
    ZoneMessages,
    ZoneProgram,
    ZoneRounds,
    exchange,
)
from megatron_balance.patterns.rows import attend, messages_from, transfers_of


class HeadSlice(NamedTuple):
    """Query heads and the key-value heads that they need."""

    head_start: int
    head_stop: int
    kv_start: int
    kv_stop: int


def head_slices(num_heads: int, num_kv_heads: int, size: int) -> list[list[HeadSlice]]:
    """The slices that each of `size` ranks attends.

    Each slice maps its query heads evenly onto its key-value heads (one key-value head, or whole
    groups), as kernels need.
    """
    ratio = num_heads // num_kv_heads
    slices: list[list[HeadSlice]] = []
    for i in range(size):
        a, b = num_heads * i // size, num_heads * (i + 1) // size
        own: list[HeadSlice] = []
        while a < b:
            whole = b // ratio * ratio
            if a % ratio == 0 and whole > a:
                stop = whole
            else:
                stop = min(b, (a // ratio + 1) * ratio)
            own.append(HeadSlice(a, stop, a // ratio, -(-stop // ratio)))
            a = stop
        slices.append(own)
    return slices


def head_counts(slices: Sequence[Sequence[HeadSlice]]) -> tuple[Ints, Ints]:
    """Numbers of query and of key-value heads that each rank attends: int64 [ranks] each."""
    queries = [own[-1].head_stop - own[0].head_start if own else 0 for own in slices]
    keys = [own[-1].kv_stop - own[0].kv_start if own else 0 for own in slices]
    return np.array(queries, dtype=np.int64), np.array(keys, dtype=np.int64)


def run_of(rows: Ints, size: int, index: int) -> Ints:
    """Run `index` of `size` near-equal runs of the tokens of `rows` (seq, start, stop), one row
    after the other; rows (seq, start, stop).
    """
    ends = np.cumsum(rows[:, Fragment.STOP] - rows[:, Fragment.START])
    total = int(ends[-1]) if len(ends) else 0
    first, last = total * index // size, total * (index + 1) // size
    run = rows.copy()
    # A token's number in its row, and its position in the sequence, differ by the same throughout.
    shift = rows[:, Fragment.STOP] - ends
    run[:, Fragment.START] = np.maximum(rows[:, Fragment.START], first + shift)
    run[:, Fragment.STOP] = np.minimum(rows[:, Fragment.STOP], last + shift)
    return run[run[:, Fragment.START] < run[:, Fragment.STOP]]


def runs_of(rows: Ints, size: int) -> list[Ints]:
    """All runs (`run_of`)."""
    return [run_of(rows, size, index) for index in range(size)]


@dataclass(frozen=True, slots=True)
class Trade:
    """The two all-to-alls of a group of `ranks`: tokens for heads, and back.

    `runs`: by group index, rows (seq, start, stop) that it holds; `slices`: the heads that it
    attends.
    """

    ranks: tuple[int, ...]
    runs: Sequence[Ints]
    slices: Sequence[Sequence[HeadSlice]]

    @property
    def moves(self) -> bool:
        """Whether there are collectives: every rank takes part, or none does. Nothing moves if the
        one holder has all the heads.
        """
        size = range(len(self.ranks))
        return any(len(self.runs[i]) and self.slices[j] for i in size for j in size if i != j)

    def there(self, index: int) -> Ints:
        """Transfers of queries, keys and values that group index `index` sends or receives."""
        rows: list[Ints] = [_NO_TRANSFERS]
        for src, dst, ends in self._pairs(index):
            if self.slices[dst]:
                rows.append(transfers_of(Kind.Q, self.runs[src], query_heads(self.slices[dst]), *ends))
                rows.append(transfers_of(Kind.KV, self.runs[src], kv_heads_of(self.slices[dst]), *ends))
        return np.concatenate(rows)

    def back(self, index: int) -> Ints:
        """Transfers of outputs that group index `index` sends or receives."""
        rows: list[Ints] = [_NO_TRANSFERS]
        for src, dst, ends in self._pairs(index):
            if self.slices[src]:
                rows.append(transfers_of(Kind.OUT, self.runs[dst], query_heads(self.slices[src]), *ends))
        return np.concatenate(rows)

    def _pairs(self, index: int) -> Iterator[tuple[int, int, tuple[int, int]]]:
        """(source, target, their ranks) of every other group index and `index`, both ways."""
        rank = self.ranks[index]
        for i, other in enumerate(self.ranks):
            if i != index:
                yield index, i, (rank, other)
                yield i, index, (other, rank)


_NO_TRANSFERS = np.empty((0, Transfer.WIDTH), dtype=np.int64)


class GroupShares(NamedTuple):
    """Tokens that each of G ranks holds and numbers of query and key-value heads that it attends,
    int64 [G] each.
    """

    runs: Ints
    query_heads: Ints
    kv_heads: Ints

    @classmethod
    def of(cls, runs: Ints, zone: Zone, context: Context) -> GroupShares:
        return cls(runs, *head_counts(slices_of(zone, context)))


class HeadExchange(CommPattern[Zone]):
    """Two all-to-alls around one launch: tokens become heads, then heads become tokens."""

    routing = "never"
    merges_remap = False
    traffic = GroupTraffic

    def ranks(self, zone: Zone, num_ranks: int) -> Sequence[int]:
        del num_ranks
        return zone.ranks

    def num_exchanges(self, zone: Zone) -> int:
        """There and back, where there are other ranks."""
        return 2 if len(zone.ranks) > 1 else 0

    def place(self, zone: Zone, lengths: Ints, rank: int) -> Ints:
        """Rows (seq, start, stop) of `rank`: its run of the concatenated tokens."""
        return run_of(_sequences(zone, lengths), len(zone.ranks), zone.ranks.index(rank))

    def runs(self, zone: Zone, lengths: Ints) -> list[Ints]:
        """Rows (seq, start, stop) of every group index."""
        return runs_of(_sequences(zone, lengths), len(zone.ranks))

    def run_tokens(self, zone: Zone, lengths: Ints) -> Ints:
        """Tokens of every group index: int64 [G]."""
        return np.diff(_run_bounds(zone, lengths))

    def project(self, zone: Zone, context: Context, rank: int) -> ZoneProgram:
        """Exchange q and kv, Attend whole sequences with the rank's heads, Exchange the outputs
        back.
        """
        index, seqs = zone.ranks.index(rank), np.array(zone.seqs, dtype=np.int64)
        slices = slices_of(zone, context)
        trade = Trade(zone.ranks, self.runs(zone, context.lengths), slices)
        ops: list[Op] = []
        if trade.moves:
            ops.append(exchange(context, 0, trade.there(index), "all_to_all", zone.ranks))
        if slices[index] and len(seqs):
            ops.append(attend(rank, _whole_pairs(seqs, context.lengths, slices[index])))
        if trade.moves:
            ops.append(exchange(context, 1, trade.back(index), "all_to_all", zone.ranks, moves=True))
        return ZoneProgram(ops)

    # Placement

    def place_all(self, zones: Sequence[ZoneAt[Zone]], lengths: Ints, wanted: Bools) -> Ints:
        """Rows of `ir.columns.Held` on the ranks that are `wanted` [num_ranks]."""
        tables = [np.empty((0, Held.WIDTH), dtype=np.int64)]
        for index, zone in zones:
            seqs, ranks = np.array(zone.seqs, dtype=np.int64), np.array(zone.ranks)
            ends = np.cumsum(lengths[seqs])
            bounds = _run_bounds(zone, lengths)
            edges = np.unique(np.concatenate([bounds, ends]))
            begin, end = edges[:-1], edges[1:]
            seq = np.searchsorted(ends, begin, side="right")
            first = (ends - lengths[seqs])[seq]
            rows = np.zeros((len(begin), Held.WIDTH), dtype=np.int64)
            rows[:, Held.RANK] = ranks[np.searchsorted(bounds, begin, side="right") - 1]
            rows[:, Held.SEQ], rows[:, Held.START], rows[:, Held.STOP] = seqs[seq], begin - first, end - first
            rows[:, Held.ZONE] = index
            tables.append(rows[wanted[rows[:, Held.RANK]]])
        return np.concatenate(tables)

    def tokens(self, zones: Sequence[Zone], context: Context) -> Ints:
        """Tokens that the zones place on each rank: int64 [num_ranks]."""
        tokens = np.zeros(context.num_ranks, dtype=np.int64)
        for zone in zones:
            tokens[np.array(zone.ranks)] += self.run_tokens(zone, context.lengths)
        return tokens

    # Plan statistics and traffic between nodes

    def load(self, zones: Sequence[Zone], context: Context) -> Load:
        """Attention pairs and received tokens of the zones, over all ranks of the plan."""
        load = Load(context.num_ranks)
        for zone in zones:
            ranks, seqs = np.array(zone.ranks), np.array(zone.seqs, dtype=np.int64)
            runs, queries, keys = self._shares(zone, context)
            # Each rank computes all pairs of its share of the heads; cumulative rounding keeps the
            # sum exact.
            pairs, stops = int(context.mask.num_pairs(context.lengths[seqs]).sum()), np.cumsum(queries)
            load.pairs[ranks] += [
                pairs * b // context.num_heads - pairs * a // context.num_heads
                for a, b in zip((stops - queries).tolist(), stops.tolist(), strict=True)
            ]
            if len(ranks) == 1:
                continue
            active = (queries > 0).astype(np.int64)
            others = (runs.sum() - runs) * active
            load.receive(Kind.Q, ranks, others, queries)
            load.receive(Kind.KV, ranks, others, keys)
            # Every rank with heads sends its partial of each of a rank's tokens; all of them
            # together are all heads.
            load.tokens[Kind.OUT, ranks] += runs * (active.sum() - active)
            load.token_heads[Kind.OUT, ranks] += runs * (context.num_heads - queries)
        return load

    def messages(self, zone: Zone, context: Context, *, across: bool = False) -> list[ZoneMessages]:
        """Messages of both all-to-alls: to and from every rank that has heads."""
        if len(zone.ranks) == 1:
            return []
        runs, slices = self.run_tokens(zone, context.lengths), slices_of(zone, context)
        return trade_messages(zone.ranks, runs, slices, context, (0, 1), across=across)

    def largest_exchange(self, zone: Zone, context: Context) -> Ints:
        """All keys and values of others with the heads of a rank."""
        runs, _, keys = self._shares(zone, context)
        return (runs.sum() - runs) * keys

    # Starting early

    def startable(self, zone: Zone) -> Startable:
        """The inputs and their replay, and the gradients of the outputs that came back."""
        del zone
        return Startable(forward=(0,), gradients=(1,), replays=(0,))

    # Simulation

    def rounds(self, zone: Zone, context: Context) -> ZoneRounds:
        """An all-to-all, a launch and an all-to-all; on one rank the launch alone."""
        size = len(zone.ranks)
        seqs, slices = np.array(zone.seqs, dtype=np.int64), slices_of(zone, context)
        places = np.repeat(np.arange(size), [len(own) for own in slices])
        pairs = _whole_pairs(seqs, context.lengths, [each for own in slices for each in own])
        launches = Launches(pairs, np.repeat(places, len(seqs)), np.zeros(size), np.arange(size)[:, None])
        runs, queries, keys = (values.astype(np.float64) for values in self._shares(zone, context))
        inputs = {Kind.Q: np.outer(runs, queries), Kind.KV: np.outer(runs, keys)}
        outputs = {Kind.OUT: np.outer(queries, runs)}
        traffic = GroupTraffic(inputs, outputs, gathers=False) if size > 1 else None
        return ZoneRounds(np.array(zone.ranks), launches, traffic)

    def _shares(self, zone: Zone, context: Context) -> GroupShares:
        return GroupShares.of(self.run_tokens(zone, context.lengths), zone, context)


class ChunkExchange(HeadExchange):
    """Head exchange where every rank holds a contiguous chunk of each sequence."""

    def place(self, zone: Zone, lengths: Ints, rank: int) -> Ints:
        """Rows (seq, start, stop) of `rank`: its chunk of each sequence."""
        return self.runs(zone, lengths)[zone.ranks.index(rank)]

    def runs(self, zone: Zone, lengths: Ints) -> list[Ints]:
        """Rows (seq, start, stop) of every group index."""
        seqs = np.array(zone.seqs, dtype=np.int64)
        edges = chunk_edges(lengths[seqs], len(zone.ranks))
        rows = [np.stack([seqs, start, stop], 1) for start, stop in zip(edges.T[:-1], edges.T[1:], strict=True)]
        return [own[own[:, Fragment.START] < own[:, Fragment.STOP]] for own in rows]

    def run_tokens(self, zone: Zone, lengths: Ints) -> Ints:
        """Tokens of every group index: int64 [G]."""
        size = len(zone.ranks)
        whole, over = divmod(int(lengths[np.array(zone.seqs, dtype=np.int64)].sum()), size)
        return whole + (np.arange(size) < over)

    def place_all(self, zones: Sequence[ZoneAt[Zone]], lengths: Ints, wanted: Bools) -> Ints:
        """Rows of `ir.columns.Held` on the ranks that are `wanted` [num_ranks]."""
        tables: list[Ints] = [np.empty((0, Held.WIDTH), dtype=np.int64)]
        for index, zone in zones:
            for rank, own in zip(zone.ranks, self.runs(zone, lengths), strict=True):
                if wanted[rank]:
                    rows = np.zeros((len(own), Held.WIDTH), dtype=np.int64)
                    rows[:, Held.RANK], rows[:, Held.FRAGMENT], rows[:, Held.ZONE] = rank, own, index
                    tables.append(rows)
        return np.concatenate(tables)


def chunk_edges(lengths: Ints, size: int) -> Ints:
    """Where the `size` contiguous chunks of each length begin and end: int64 [S, size + 1].

    Tokens that `size` does not divide are dealt to the chunks round robin, from length to length,
    so that the sums of all i-th chunks differ by one token at most.
    """
    whole, over = np.divmod(lengths, size)
    first = ((np.cumsum(over) - over) % size)[:, None]
    last = first + over[:, None]
    chunk = np.arange(size + 1)
    dealt = np.clip(chunk - first, 0, over[:, None]) + np.minimum(chunk, np.maximum(last - size, 0))
    return whole[:, None] * chunk + np.minimum(dealt, over[:, None])


def trade_messages(
    ranks: tuple[int, ...],
    runs: Ints,
    slices: Sequence[Sequence[HeadSlice]],
    context: Context,
    steps: tuple[int, int],
    *,
    across: bool = False,
) -> list[ZoneMessages]:
    """Messages of both all-to-alls of a group, which are the exchanges `steps` of their zone.

    `runs`: tokens that each rank holds, int64 [G]; `across`: between nodes only.
    """
    members = np.array(ranks)
    there, back = ([np.empty((0, Message.WIDTH), dtype=np.int64)] for _ in range(2))
    for rank, own in zip(ranks, slices, strict=True):
        if own:
            others = context.crosses(members, rank) if across else members != rank
            others, tokens = members[others], runs[others]
            there.append(messages_from(steps[0], others, rank, Kind.Q, query_heads(own), tokens))
            there.append(messages_from(steps[0], others, rank, Kind.KV, kv_heads_of(own), tokens))
            back.append(messages_from(steps[1], rank, others, Kind.OUT, query_heads(own), tokens))
    return [ZoneMessages(np.concatenate(rows), "all_to_all", ranks) for rows in (there, back)]


def slices_of(zone: Zone, context: Context) -> list[list[HeadSlice]]:
    """The slices of the heads that each rank of a zone attends."""
    return head_slices(context.num_heads, context.num_kv_heads, len(zone.ranks))


def query_heads(slices: Sequence[HeadSlice]) -> tuple[int, int]:
    """Query heads [start, stop) of a rank's slices, of which there is one or more."""
    return slices[0].head_start, slices[-1].head_stop


def kv_heads_of(slices: Sequence[HeadSlice]) -> tuple[int, int]:
    """Key-value heads [start, stop) of a rank's slices, of which there is one or more."""
    return slices[0].kv_start, slices[-1].kv_stop


def _run_bounds(zone: Zone, lengths: Ints) -> Ints:
    """Tokens of the concatenated sequences at which the runs begin, and their number: int64 [G +
    1].
    """
    total = int(lengths[np.array(zone.seqs, dtype=np.int64)].sum())
    return total * np.arange(len(zone.ranks) + 1) // len(zone.ranks)


def _sequences(zone: Zone, lengths: Ints) -> Ints:
    """Whole sequences as rows (seq, start, stop)."""
    seqs = np.array(zone.seqs, dtype=np.int64)
    return np.stack([seqs, np.zeros_like(seqs), lengths[seqs]], 1)


def _whole_pairs(seqs: Ints, lengths: Ints, slices: Sequence[HeadSlice]) -> Ints:
    """Pairs of whole sequences with each slice of the heads in turn."""
    pairs = np.zeros((len(slices), len(seqs), Pair.WIDTH), dtype=np.int64)
    pairs[:, :, Pair.SEQ] = seqs
    pairs[:, :, Pair.Q_STOP] = pairs[:, :, Pair.K_STOP] = lengths[seqs]
    heads = np.array(slices, dtype=np.int64).reshape(-1, 1, 4)
    pairs[:, :, Pair.Q_HEADS], pairs[:, :, Pair.KV_HEADS] = heads[:, :, :2], heads[:, :, 2:]
    return pairs.reshape(-1, Pair.WIDTH)
