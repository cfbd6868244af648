"""Head ring: heads are exchanged inside a group of ranks, keys go round from group to group.

LoongTrain (arXiv 2406.18485) calls it 2D attention; here each zone has its own groups. It is
Zeppelin's ring between nodes (section 3.2) with all ranks of a node in place of one.

The zone's ranks, `group_size` in a row, form groups. Tokens are placed zigzag over the groups
(`patterns.zigzag`), and what a group holds lies in near-equal runs on its ranks. An all-to-all gives
every rank of a group all of its tokens with a slice of the heads (`patterns.head_exchange`); then
each slice goes round the ranks of the same place in the other groups (`patterns.ring`), and outputs
go back. So a ring has as many rounds as groups, every rank sends over its own NIC, and a rank
receives only the keys of its own heads.

With groups of one rank it is a ring, with one group it is a head exchange. With fewer key-value heads
than ranks in a group (GQA), several ranks receive the same one. A rank without query heads attends
nothing.

A replayed backward makes the first all-to-all again before anything else, since all rounds need what
it brings; the ring then turns the other way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_balance.errors import InvalidProgramError
from megatron_balance.ir.arrays import Bools, Ints, as_array
from megatron_balance.ir.columns import Held, Message, Pair, Transfer, Value
from megatron_balance.ir.mask import CAUSAL, Mask
from megatron_balance.ir.plan import Zone
from megatron_balance.ir.program import Exchange, Kind, Op
from megatron_balance.ir.rows import Rows
from megatron_balance.patterns.base import (
    CommPattern,
    Context,
    Floats,
    GroupTraffic,
    HeadsThenHops,
    HopByHop,
    Launches,
    Load,
    Startable,
    ZoneAt,
    ZoneMessages,
    ZoneProgram,
    ZoneRounds,
    exchange,
)
from megatron_balance.patterns.head_exchange import (
    HeadSlice,
    Trade,
    head_counts,
    head_slices,
    kv_heads_of,
    query_heads,
    runs_of,
    trade_messages,
)
from megatron_balance.patterns.ring import Blocks, attention, forward_hops, most_in_a_hop, ring_launches, walks
from megatron_balance.patterns.rows import attend, merge, messages_from
from megatron_balance.patterns.zigzag import Zigzag, fragments, pairs_per_rank, tokens, zigzag


@dataclass(frozen=True, slots=True)
class Shape:
    """A zone's groups: `ranks` [groups, group size]; the zigzag of its sequences over the groups;
    the heads of each place in a group.
    """

    ranks: tuple[tuple[int, ...], ...]
    placed: Zigzag
    slices: list[list[HeadSlice]]

    @classmethod
    def of(cls, zone: Zone, context: Context) -> Shape:
        groups = _groups(zone)
        placed = _placed(zone, context.lengths, context.mask)
        return cls(groups, placed, head_slices(context.num_heads, context.num_kv_heads, len(groups[0])))

    @property
    def num_groups(self) -> int:
        return len(self.ranks)

    @property
    def size(self) -> int:
        """Ranks of a group."""
        return len(self.ranks[0])

    @property
    def trades(self) -> int:
        """Exchange ids of the first all-to-alls, and of the last: one a group, none in groups of
        one rank.
        """
        return self.num_groups if self.size > 1 else 0

    @property
    def last(self) -> int:
        """The first id of the last all-to-alls."""
        return self.trades + self.num_groups - 1

    def trade(self, group: int) -> Trade:
        """The all-to-alls of a group."""
        return Trade(self.ranks[group], runs_of(fragments(self.placed, group), self.size), self.slices)

    def group_tokens(self) -> Ints:
        """Tokens of each group: int64 [groups]."""
        return tokens(self.placed.lengths, self.num_groups)

    def run_tokens(self) -> Ints:
        """Tokens of each rank: int64 [groups, group size]."""
        return _runs(self.group_tokens(), self.size)

    def heads(self) -> tuple[Ints, Ints]:
        """Numbers of query and of key-value heads of each place in a group: int64 [group size]
        each.
        """
        return head_counts(self.slices)


class HeadRing(CommPattern[Zone]):
    """An all-to-all inside each group, a ring of every slice of the heads, an all-to-all back."""

    routing = "never"
    merges_remap = False
    traffic = HeadsThenHops

    def ranks(self, zone: Zone, num_ranks: int) -> Sequence[int]:
        del num_ranks
        return zone.ranks

    def num_exchanges(self, zone: Zone) -> int:
        """Two all-to-alls of each group of several ranks, and the rounds between groups."""
        groups = _groups(zone)
        return (2 * len(groups) if len(groups[0]) > 1 else 0) + len(groups) - 1

    def place(self, zone: Zone, lengths: Ints, rank: int) -> Ints:
        """Rows (seq, start, stop) of `rank`: its run of its group's fragments."""
        group, index = divmod(zone.ranks.index(rank), zone.group_size)
        return runs_of(fragments(_placed(zone, lengths), group), zone.group_size)[index]

    def project(self, zone: Zone, context: Context, rank: int) -> ZoneProgram:
        """The all-to-all of the rank's group, rounds of Exchange, Attend and Merge with its heads,
        and the all-to-all back.
        """
        shape = Shape.of(zone, context)
        group, index = divmod(zone.ranks.index(rank), shape.size)
        own, trade = shape.slices[index], shape.trade(group)
        trades = shape.trades > 0 and trade.moves
        ops: list[Op] = []
        replays: list[tuple[int, Exchange]] = []
        there, back = context.base + group, context.base + shape.last + group
        if trades:
            inputs = exchange(context, group, trade.there(index), "all_to_all", trade.ranks)
            ops.append(inputs)
            # A replayed backward begins where the forward ended: there it makes the first
            # all-to-all, and nothing where the forward made it.
            replays.append((there, exchange(context, group, np.empty((0, Transfer.WIDTH), dtype=np.int64))))
            replays.append((back, Exchange(back, inputs.transfers, inputs.collective, inputs.group)))
        if own:
            ring = self._ring(shape, context, (group, index))
            ops += ring.ops
            replays += ring.replays
        if trades:
            ops.append(exchange(context, shape.last + group, trade.back(index), "all_to_all", trade.ranks, moves=True))
        return ZoneProgram(ops, replays)

    def _ring(self, shape: Shape, context: Context, place: tuple[int, int]) -> ZoneProgram:
        """The rounds of one rank, at `place` (group, index in it)."""
        (group, index), size = place, shape.num_groups
        rank, own = shape.ranks[group][index], shape.slices[index]
        rounds = np.arange(size)
        blocks = Blocks(shape.placed, (group - rounds) % size, kv_heads_of(own))
        pairs, merges = attention(shape.placed, group, blocks, context) if context.attends else ([b""] * size,) * 2
        ops: list[Op] = []
        replays: list[tuple[int, Exchange]] = []
        if pairs[0]:
            ops.append(attend(rank, _of_heads(pairs[0], own)))
        if size > 1:
            before, after = shape.ranks[group - 1][index], shape.ranks[(group + 1) % size][index]
            forward = blocks.transfers(rounds, blocks.reach_forward(), rank, before, after)
            mirror = blocks.turned(-rounds % size)
            backward = mirror.transfers(rounds, mirror.reach_backward(), rank, after, before)
            for t in range(1, size):
                exchange_id = context.base + shape.trades + t - 1
                if forward[t]:
                    ops.append(Exchange(exchange_id, Rows(Transfer.WIDTH, forward[t])))
                if backward[size - t] or forward[t]:
                    replays.append((exchange_id, Exchange(exchange_id, Rows(Transfer.WIDTH, backward[size - t]))))
                if pairs[t]:
                    values = as_array(Rows(Value.WIDTH, merges[t])).copy()
                    values[:, [Value.HEAD_START, Value.HEAD_STOP]] = query_heads(own)
                    ops += [attend(rank, _of_heads(pairs[t], own)), merge(rank, values)]
        return ZoneProgram(ops, replays)

    # Placement

    def place_all(self, zones: Sequence[ZoneAt[Zone]], lengths: Ints, wanted: Bools) -> Ints:
        """Rows of `ir.columns.Held` on the ranks that are `wanted` [num_ranks]."""
        tables: list[Ints] = [np.empty((0, Held.WIDTH), dtype=np.int64)]
        for number, zone in zones:
            placed = _placed(zone, lengths)
            for group, ranks in enumerate(_groups(zone)):
                if not wanted[list(ranks)].any():
                    continue
                for rank, run in zip(ranks, runs_of(fragments(placed, group), len(ranks)), strict=True):
                    if wanted[rank]:
                        rows = np.zeros((len(run), Held.WIDTH), dtype=np.int64)
                        rows[:, Held.RANK], rows[:, Held.FRAGMENT], rows[:, Held.ZONE] = rank, run, number
                        tables.append(rows)
        return np.concatenate(tables)

    def tokens(self, zones: Sequence[Zone], context: Context) -> Ints:
        """Tokens that the zones place on each rank: int64 [num_ranks]."""
        held = np.zeros(context.num_ranks, dtype=np.int64)
        for zone in zones:
            ranks = _by_group(zone)
            own = context.lengths[list(zone.seqs)]
            of_group = tokens(own, len(ranks)) if len(ranks) > 1 else own.sum(keepdims=True)
            held[ranks] += _runs(of_group, zone.group_size)
        return held

    # Plan statistics and traffic between nodes

    def load(self, zones: Sequence[Zone], context: Context) -> Load:
        """Attention pairs and received tokens of the zones, over all ranks of the plan."""
        load = Load(context.num_ranks)
        for zone in zones:
            shape = Shape.of(zone, context)
            queries, keys = shape.heads()
            stops, active = np.cumsum(queries), (queries > 0).astype(np.int64)
            runs, walked = shape.run_tokens(), _walked_to(shape)
            for group, pairs in enumerate(pairs_per_rank(shape.placed).tolist()):
                ranks = np.array(shape.ranks[group])
                # Cumulative rounding keeps the sum of the ranks' shares exact.
                shares = pairs * stops // context.num_heads
                load.pairs[ranks] += np.diff(shares, prepend=0)
                own = runs[group]
                others = (own.sum() - own) * active
                if shape.size > 1:
                    load.receive(Kind.Q, ranks, others, queries)
                    load.receive(Kind.KV, ranks, others, keys)
                    load.tokens[Kind.OUT, ranks] += own * (active.sum() - active)
                    load.token_heads[Kind.OUT, ranks] += own * (context.num_heads - queries)
                load.receive(Kind.KV, ranks, walked[group] * active, keys)
        return load

    def messages(self, zone: Zone, context: Context, *, across: bool = False) -> list[ZoneMessages]:
        """Messages of both all-to-alls of each group, and of the hops between groups."""
        shape = Shape.of(zone, context)
        first: list[ZoneMessages] = []
        last: list[ZoneMessages] = []
        if shape.size > 1:
            for group, runs in enumerate(shape.run_tokens()):
                there, back = trade_messages(
                    shape.ranks[group], runs, shape.slices, context, (group, shape.last + group), across=across
                )
                first.append(there)
                last.append(back)
        return [*first, *self._hops(shape), *last]

    def _hops(self, shape: Shape) -> list[ZoneMessages]:
        size = shape.num_groups
        if size == 1:
            return []
        group, rounds = np.arange(size)[:, None], np.arange(1, size)
        sent = forward_hops(shape.placed)[(group - rounds + 1) % size, rounds]
        ranks = np.array(shape.ranks)
        rows: list[Ints] = [np.empty((0, Message.WIDTH), dtype=np.int64)]
        for index, own in enumerate(shape.slices):
            if own:
                src, dst = ranks[:, index][:, None], np.roll(ranks[:, index], -1)[:, None]
                rows.append(messages_from(shape.trades + rounds - 1, src, dst, Kind.KV, kv_heads_of(own), sent))
        return [ZoneMessages(np.concatenate(rows))]

    def largest_exchange(self, zone: Zone, context: Context) -> Ints:
        """Keys and values of the others of the group, or the largest block that comes round, with the
        heads of a rank.
        """
        shape = Shape.of(zone, context)
        others = shape.group_tokens()[:, None] - shape.run_tokens()
        return (np.maximum(others, most_in_a_hop(shape.placed)[:, None]) * shape.heads()[1]).ravel()

    # Starting early

    def startable(self, zone: Zone) -> Startable:
        """The first all-to-all, the gradients of what the last one brings, and the replay of the
        first in its place.
        """
        groups = _groups(zone)
        if len(groups[0]) == 1:
            return Startable()
        first = tuple(range(len(groups)))
        last = tuple(2 * len(groups) - 1 + group for group in first)
        return Startable(forward=first, gradients=last, replays=last)

    # Simulation

    def rounds(self, zone: Zone, context: Context) -> ZoneRounds:
        """Launches of all rounds; the all-to-alls of each group, and the blocks that walk round
        between them.
        """
        shape = Shape.of(zone, context)
        queries, keys = shape.heads()
        launches = _launches(shape)
        runs = shape.run_tokens().astype(np.float64)
        inside: list[GroupTraffic] = []
        for held in runs:
            inputs = {Kind.Q: np.outer(held, queries), Kind.KV: np.outer(held, keys)}
            outputs: dict[Kind, Floats] = {Kind.OUT: np.outer(queries, held)}
            inside.append(GroupTraffic(inputs, outputs, gathers=False))
        # A block of some of the heads counts as that part of its tokens.
        part = np.tile(keys / context.num_kv_heads, shape.num_groups)[:, None]
        hops = None
        if shape.num_groups > 1:
            forward, backward = (np.repeat(walk, shape.size, axis=0) * part for walk in walks(shape.placed))
            hops = HopByHop(forward, backward)
        return ZoneRounds(np.array(zone.ranks), launches, HeadsThenHops(tuple(inside), hops))


def _runs(of_group: Ints, size: int) -> Ints:
    """Tokens of each rank [groups, group size] whose groups have so many [groups]."""
    edges = of_group[:, None] * np.arange(size + 1) // size
    return edges[:, 1:] - edges[:, :-1]


def _groups(zone: Zone) -> tuple[tuple[int, ...], ...]:
    """The ranks of each group.

    Raises:
        InvalidProgramError: the group size does not divide the ranks.
    """
    return tuple(tuple(ranks) for ranks in _by_group(zone).tolist())


def _by_group(zone: Zone) -> Ints:
    """As `_groups`, [groups, group size]."""
    size = zone.group_size
    if size < 1 or len(zone.ranks) % size:
        raise InvalidProgramError(
            f"zone {zone.name}: a head ring over {len(zone.ranks)} ranks in groups of {size}; expected a group size "
            "that divides the ranks"
        )
    return np.array(zone.ranks, dtype=np.int64).reshape(-1, size)


def _placed(zone: Zone, lengths: Ints, mask: Mask = CAUSAL) -> Zigzag:
    return zigzag(lengths, np.array(zone.seqs, dtype=np.int64), len(_groups(zone)), mask)


def _walked_to(shape: Shape) -> Ints:
    """Tokens of other groups' blocks that come to each group, over all rounds: int64 [groups]."""
    size = shape.num_groups
    hops, arrived = forward_hops(shape.placed), np.zeros(size, dtype=np.int64)
    for origin in range(size):
        arrived += np.roll(hops[origin], origin)
    return arrived


def _of_heads(pairs: bytes, slices: Sequence[HeadSlice]) -> Ints:
    """Pairs of all heads, for each slice in turn."""
    rows = as_array(Rows(Pair.WIDTH, pairs))
    own = np.repeat(rows[None], len(slices), axis=0)
    heads = np.array(slices, dtype=np.int64).reshape(-1, 1, 4)
    own[:, :, Pair.Q_HEADS], own[:, :, Pair.KV_HEADS] = heads[:, :, :2], heads[:, :, 2:]
    return own.reshape(-1, Pair.WIDTH)


def _launches(shape: Shape) -> Launches:
    """Launches of all groups, rounds and places; those of places with as many heads are alike."""
    queries, keys = shape.heads()
    alike, place = np.unique(np.stack([queries, keys], 1), axis=0, return_inverse=True)
    pairs: list[Ints] = []
    launch: list[Ints] = []
    merging: list[Floats] = []
    of_round: list[Ints] = []
    first = 0
    for heads in alike.tolist():
        own = ring_launches(shape.placed, (heads[0], heads[1]))
        pairs.append(own.pairs if heads[0] else own.pairs[:0])
        launch.append((own.launch if heads[0] else own.launch[:0]) + first)
        merging.append(own.merging * (heads[0] > 0))
        of_round.append(own.of_round + first)
        first += len(own.merging)
    rounds = np.stack(of_round)[place.reshape(-1)]  # [group size, groups, rounds]
    return Launches(
        np.concatenate(pairs),
        np.concatenate(launch),
        np.concatenate(merging),
        rounds.transpose(1, 0, 2).reshape(shape.num_groups * shape.size, -1),
    )
