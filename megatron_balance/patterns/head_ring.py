"""Head ring: heads are exchanged inside a group of ranks, keys go round from group to group. With
groups of one rank it is a ring: Ring Attention, Transformer Engine's context parallelism.

LoongTrain (arXiv 2406.18485) calls it 2D attention; here each zone has its own groups. It is
Zeppelin's ring between nodes (section 3.2) with all ranks of a node in place of one.

The zone's ranks, `group_size` in a row, form groups. Tokens are placed zigzag over the groups
(`patterns.zigzag`), and what a group holds lies in near-equal runs on its ranks. An all-to-all gives
every rank of a group all of its tokens with a slice of the heads (`patterns.head_exchange`); then
each slice goes round the ranks of the same place in the other groups (`patterns.ring`), and outputs
go back. So a ring has as many rounds as groups, every rank sends over its own NIC, and a rank
receives only the keys of its own heads.

With one group it is a head exchange. With fewer key-value heads than ranks in a group (GQA), several
ranks receive the same one. A rank without query heads attends nothing.

A replayed backward makes the first all-to-all again before anything else, since all rounds need what
it brings; the ring then turns the other way.

With a remap the owner of tokens makes their first hop in a ring for the rank that attends to them.
The replay's first hop is another, so there it stays with the holder.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter

import numpy as np

from megatron_balance.errors import InvalidProgramError
from megatron_balance.ir.arrays import Bools, Ints, sums
from megatron_balance.ir.columns import Held, Pair, RemoteHeld, Transfer, Value
from megatron_balance.ir.intervals import ranges
from megatron_balance.ir.mask import CAUSAL, Mask
from megatron_balance.ir.plan import Zone
from megatron_balance.ir.program import Attend, Exchange, Kind, Merge, Op
from megatron_balance.ir.rows import Rows
from megatron_balance.patterns.base import (
    CommPattern,
    Context,
    FirstHops,
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
    remote_of,
)
from megatron_balance.patterns.head_exchange import (
    HeadSlice,
    Trade,
    head_counts,
    head_slices,
    kv_heads_of,
    run_of,
    runs_of,
    trade_messages,
)
from megatron_balance.patterns.ring import Blocks, arriving, attention, ring_launches, walks
from megatron_balance.patterns.rows import messages_from, transfers_of
from megatron_balance.patterns.zigzag import Zigzag, chunk, fragments, holders, pairs_per_rank, tokens, zigzag

_BLOCK = 1 << 20
"""Cells of (rank, sequence) worked on at once, which bounds memory."""

_LISTED = 1 << 12
"""Zones of at most this many cells are listed together, fragment by fragment: a plan may have a
zone for each rank.
"""


@dataclass(frozen=True, slots=True)
class Shape:
    """A zone's groups: `ranks` [groups, group size]; the zigzag of its sequences over the groups;
    the heads of each place in a group.
    """

    ranks: tuple[tuple[int, ...], ...]
    placed: Zigzag
    slices: list[list[HeadSlice]]

    @classmethod
    def of(cls, zone: Zone, size: int, context: Context) -> Shape:
        """The shape of a zone whose groups have `size` ranks."""
        groups = tuple(zone.ranks[at : at + size] for at in range(0, len(zone.ranks), size))
        placed = _placed(zone, size, context.lengths, context.mask)
        return cls(groups, placed, head_slices(context.num_heads, context.num_kv_heads, size))

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
    """An all-to-all inside each group, a ring of every slice of the heads, an all-to-all back.

    `grouped`: groups are those of the zone (`head_ring`); else each has one rank (`ring`), there is
    no all-to-all, and owners may make the first hops for holders.
    """

    traffic = HeadsThenHops

    def __init__(self, *, grouped: bool) -> None:
        self._grouped = grouped
        self.routing = "never" if grouped else "pays"
        self.merges_remap = not grouped
        self.hops_again = grouped

    def size(self, zone: Zone) -> int:
        """Ranks of a group of the zone.

        Raises:
            InvalidProgramError: the group size does not divide the ranks.
        """
        if not self._grouped:
            return 1
        size = zone.group_size
        if size < 1 or len(zone.ranks) % size:
            raise InvalidProgramError(
                f"zone {zone.name}: a head ring over {len(zone.ranks)} ranks in groups of {size}; expected a group "
                "size that divides the ranks"
            )
        return size

    def ranks(self, zone: Zone, num_ranks: int) -> Sequence[int]:
        del num_ranks
        return zone.ranks

    def num_exchanges(self, zone: Zone) -> int:
        """Two all-to-alls of each group of several ranks, and the rounds between groups."""
        size = self.size(zone)
        groups = len(zone.ranks) // size
        return (2 * groups if size > 1 else 0) + groups - 1

    def place(self, zone: Zone, lengths: Ints, rank: int) -> Ints:
        """Rows (seq, start, stop) of `rank`: its run of its group's fragments."""
        size = self.size(zone)
        group, index = divmod(zone.ranks.index(rank), size)
        return run_of(fragments(_placed(zone, size, lengths), group), size, index)

    def project(self, zone: Zone, context: Context, rank: int) -> ZoneProgram:
        """The all-to-all of the rank's group, rounds of Exchange, Attend and Merge with its heads,
        and the all-to-all back.
        """
        shape = Shape.of(zone, self.size(zone), context)
        group, index = divmod(zone.ranks.index(rank), shape.size)
        trade = shape.trade(group) if shape.size > 1 else None
        ops: list[Op] = []
        replays: list[tuple[int, Exchange]] = []
        there, back = context.base + group, context.base + shape.last + group
        if trade is not None and trade.moves:
            inputs = exchange(context, group, trade.there(index), "all_to_all", trade.ranks)
            ops.append(inputs)
            # A replayed backward begins where the forward ended: there it makes the first
            # all-to-all, and nothing where the forward made it.
            replays.append((there, exchange(context, group, np.empty((0, Transfer.WIDTH), dtype=np.int64))))
            replays.append((back, Exchange(back, inputs.transfers, inputs.collective, inputs.group)))
        if shape.slices[index]:
            ring = self._ring(shape, context, (group, index))
            ops += ring.ops
            replays += ring.replays
        if trade is not None and trade.moves:
            ops.append(exchange(context, shape.last + group, trade.back(index), "all_to_all", trade.ranks, moves=True))
        return ZoneProgram(ops, replays if context.replays else [])

    def _ring(self, shape: Shape, context: Context, place: tuple[int, int]) -> ZoneProgram:
        """The rounds of one rank, at `place` (group, index in it)."""
        (group, index), size = place, shape.num_groups
        rank, own = shape.ranks[group][index], shape.slices[index]
        rounds = np.arange(size)
        blocks = Blocks(shape.placed, (group - rounds) % size, kv_heads_of(own))
        pairs, merges = attention(shape.placed, group, blocks, own) if context.attends else ([b""] * size,) * 2
        ops: list[Op] = []
        replays: list[tuple[int, Exchange]] = []
        if pairs[0]:
            ops.append(Attend(rank, Rows(Pair.WIDTH, pairs[0])))
        if size > 1:
            before, after = shape.ranks[group - 1][index], shape.ranks[(group + 1) % size][index]
            forward = blocks.transfers(rounds, blocks.reach_forward(), rank, before, after)
            backward: list[bytes] = []
            if context.replays:
                mirror = blocks.turned(-rounds % size)
                backward = mirror.transfers(rounds, mirror.reach_backward(), rank, after, before)
            for t in range(1, size):
                exchange_id = context.base + shape.trades + t - 1
                if forward[t]:
                    ops.append(Exchange(exchange_id, Rows(Transfer.WIDTH, forward[t])))
                if context.replays and (backward[size - t] or forward[t]):
                    replays.append((exchange_id, Exchange(exchange_id, Rows(Transfer.WIDTH, backward[size - t]))))
                if pairs[t]:
                    ops += [Attend(rank, Rows(Pair.WIDTH, pairs[t])), Merge(rank, Rows(Value.WIDTH, merges[t]))]
        return ZoneProgram(ops, replays)

    # Placement

    def place_all(self, zones: Sequence[ZoneAt[Zone]], lengths: Ints, wanted: Bools) -> Ints:
        """Rows of `ir.columns.Held` on the ranks that are `wanted` [num_ranks]."""
        rings = [(number, zone) for number, zone in zones if self.size(zone) == 1]
        tables = [self._place_rings(rings, lengths, wanted)]
        for number, zone in zones:
            size = self.size(zone)
            placed = _placed(zone, size, lengths)
            for group in range(len(zone.ranks) // size) if size > 1 else ():
                ranks = zone.ranks[group * size : (group + 1) * size]
                if not wanted[list(ranks)].any():
                    continue
                for rank, run in zip(ranks, runs_of(fragments(placed, group), size), strict=True):
                    if wanted[rank]:
                        rows = np.zeros((len(run), Held.WIDTH), dtype=np.int64)
                        rows[:, Held.RANK], rows[:, Held.FRAGMENT], rows[:, Held.ZONE] = rank, run, number
                        tables.append(rows)
        return np.concatenate(tables)

    def _place_rings(self, zones: Sequence[ZoneAt[Zone]], lengths: Ints, wanted: Bools) -> Ints:
        """As `place_all`, of zones with groups of one rank: a plan may have one for each rank."""
        sizes, counts = (
            np.array([len(of(zone)) for _, zone in zones], dtype=np.int64)
            for of in (attrgetter("ranks"), attrgetter("seqs"))
        )
        members = np.fromiter(chain.from_iterable(zone.ranks for _, zone in zones), np.int64, int(sizes.sum()))
        seqs = np.fromiter(chain.from_iterable(zone.seqs for _, zone in zones), np.int64, int(counts.sum()))
        stops = np.cumsum(counts)
        parts, first = holders(lengths[seqs], np.repeat(sizes, counts), np.repeat(stops - counts, counts))
        owner = np.repeat(np.arange(len(zones)), sizes)
        place = np.arange(len(members)) - (np.cumsum(sizes) - sizes)[owner]  # in its zone
        chosen = np.flatnonzero(wanted[members])
        members, owner, place = members[chosen], owner[chosen], place[chosen]
        index = np.array([index for index, _ in zones], dtype=np.int64)[owner]
        tables = [np.empty((0, Held.WIDTH), dtype=np.int64)]
        blocks = [*np.flatnonzero(np.diff(np.cumsum(counts[owner]) // _BLOCK)).tolist(), len(members)]
        for a, b in zip([0, *blocks], blocks, strict=False):
            member, seq = ranges((stops - counts)[owner[a:b]], stops[owner[a:b]])
            member += a
            position = (place[member] - first[seq]) % sizes[owner[member]]
            length, held_by = lengths[seqs[seq]], parts[seq]
            rows = np.zeros((len(member), 2, Held.WIDTH), dtype=np.int64)
            rows[:, :, Held.RANK], rows[:, :, Held.SEQ] = members[member, None], seqs[seq, None]
            rows[:, :, Held.ZONE] = index[member, None]
            rows[:, 0, Held.START], rows[:, 0, Held.STOP] = chunk(length, held_by, position)
            rows[:, 1, Held.START], rows[:, 1, Held.STOP] = chunk(length, held_by, 2 * held_by - 1 - position)
            if self.merges_remap:
                # The last chunk of a sequence is needed elsewhere only if the mask is not causal.
                shared = held_by > 1
                rows[:, 0, Held.SENT_ON], rows[:, 1, Held.SENT_ON] = shared, shared * np.where(position > 0, 1, 2)
            tables.append(rows[(position < held_by)[:, None] & (rows[:, :, Held.START] < rows[:, :, Held.STOP])])
        return np.concatenate(tables)

    def tokens(self, zones: Sequence[Zone], context: Context) -> Ints:
        """Tokens that the zones place on each rank: int64 [num_ranks]."""
        listed: list[Zone] = []
        others: list[Zone] = []
        for zone in zones:
            few = self.size(zone) == 1 and len(zone.ranks) * len(zone.seqs) <= _LISTED
            (listed if few else others).append(zone)
        held = super().tokens(listed, context)
        for zone in others:
            size, own = self.size(zone), context.lengths[list(zone.seqs)]
            of_group = tokens(own, len(zone.ranks) // size)
            held[list(zone.ranks)] += _runs(of_group, size).ravel()
        return held

    def sequences(self, zone: Zone, context: Context) -> Iterator[tuple[int, list[int]]]:
        """Each sequence with the ranks of the groups that hold some of it, ascending."""
        shape = Shape.of(zone, self.size(zone), context)
        for seq, first, parts in zip(zone.seqs, shape.placed.first.tolist(), shape.placed.parts.tolist(), strict=True):
            held_by = (shape.ranks[(first + at) % shape.num_groups] for at in range(parts))
            yield seq, sorted(chain.from_iterable(held_by))

    # Plan statistics and traffic between nodes

    def load(self, zones: Sequence[Zone], context: Context) -> Load:
        """Attention pairs and received tokens of the zones, over all ranks of the plan."""
        load = Load(context.num_ranks)
        local = [zone for zone in zones if len(zone.ranks) == 1]  # together: a plan may have one for each rank
        ranks = np.repeat([zone.ranks[0] for zone in local], [len(zone.seqs) for zone in local])
        seqs = np.fromiter(chain.from_iterable(zone.seqs for zone in local), np.int64, len(ranks))
        load.pairs += sums(ranks.astype(np.int64), context.mask.num_pairs(context.lengths[seqs]), context.num_ranks)
        for zone in zones:
            if len(zone.ranks) == 1:
                continue
            shape = Shape.of(zone, self.size(zone), context)
            queries, keys = shape.heads()
            ranks, active = np.array(shape.ranks), (queries > 0).astype(np.int64)
            # Cumulative rounding keeps the sum of the ranks' shares exact.
            shares = pairs_per_rank(shape.placed)[:, None] * np.cumsum(queries) // context.num_heads
            load.pairs[ranks] += np.diff(shares, prepend=0)
            if shape.size > 1:
                runs = shape.run_tokens()
                others = (runs.sum(axis=1, keepdims=True) - runs) * active
                load.receive(Kind.Q, ranks, others, queries)
                load.receive(Kind.KV, ranks, others, keys)
                load.tokens[Kind.OUT, ranks] += runs * (active.sum() - active)
                load.token_heads[Kind.OUT, ranks] += runs * (context.num_heads - queries)
            load.receive(Kind.KV, ranks, arriving(shape.placed).sum(axis=1)[:, None] * active, keys)
        return load

    def messages(self, zone: Zone, context: Context, *, across: bool = False) -> list[ZoneMessages]:
        """Messages of both all-to-alls of each group, and of the hops between groups."""
        shape = Shape.of(zone, self.size(zone), context)
        first: list[ZoneMessages] = []
        last: list[ZoneMessages] = []
        if shape.size > 1:
            for group, runs in enumerate(shape.run_tokens()):
                there, back = trade_messages(
                    shape.ranks[group], runs, shape.slices, context, (group, shape.last + group), across=across
                )
                first.append(there)
                last.append(back)
        return [*first, *_hops(shape, context, across=across), *last]

    def largest_exchange(self, zone: Zone, context: Context) -> Ints:
        """Keys and values of the others of the group, or the largest block that comes round, with the
        heads of a rank.
        """
        shape = Shape.of(zone, self.size(zone), context)
        most = arriving(shape.placed).max(axis=1)[:, None]
        if shape.size > 1:
            most = np.maximum(most, shape.group_tokens()[:, None] - shape.run_tokens())
        return (most * shape.heads()[1]).ravel()

    # The remap

    def first_senders(self, zone: Zone, rank: int, num_ranks: int) -> Ints:
        """The rank before `rank`, in a ring."""
        del num_ranks
        before = [zone.ranks[zone.ranks.index(rank) - 1]] if self.merges_remap else []
        return np.array(before, dtype=np.int64)

    def first_hops(self, zones: Sequence[ZoneAt[Zone]], context: Context, remote: Ints) -> FirstHops:
        """First hops to the rank after the holder, whole fragments divided by owner."""
        own = remote_of(zones, remote)
        sent_on = own[:, RemoteHeld.SENT_ON]
        own = own[(sent_on == 1) | ((sent_on == 2) & (context.mask != CAUSAL))]
        after: dict[tuple[int, int], int] = {}
        wanted = set(own[:, RemoteHeld.ZONE].tolist())
        for index, zone in zones:
            if index in wanted:
                next_ranks = (*zone.ranks[1:], zone.ranks[0])
                after.update(((index, rank), to) for rank, to in zip(zone.ranks, next_ranks, strict=True))
        places = zip(own[:, RemoteHeld.ZONE].tolist(), own[:, RemoteHeld.HOLDER].tolist(), strict=True)
        targets = np.array([after[place] for place in places], dtype=np.int64)
        rows = transfers_of(Kind.KV, own, (0, context.num_kv_heads), own[:, RemoteHeld.OWNER], targets)
        sent = rows[:, Transfer.SRC] != rows[:, Transfer.DST]
        return FirstHops(rows[sent], own[sent, RemoteHeld.HOLDER], own[sent, RemoteHeld.ZONE])

    # Starting early, routing

    def startable(self, zone: Zone) -> Startable:
        """The first all-to-all, the gradients of what the last one brings, and the replay of the
        first in its place. Of a ring the first hop, and that of the replay, which brings what the
        last exchange brought.
        """
        size = self.size(zone)
        groups = len(zone.ranks) // size
        if size == 1:
            return Startable(forward=(0,), replays=(groups - 2,))
        first = tuple(range(groups))
        last = tuple(2 * groups - 1 + group for group in first)
        return Startable(forward=first, gradients=last, replays=last)

    def reaches_out(self, zone: Zone, rank: int, ranks_per_node: int) -> bool:
        """Whether its group, or a neighbour in another group, is on another node."""
        size, at = self.size(zone), zone.ranks.index(rank)
        own = zone.ranks[at - at % size : at - at % size + size]
        neighbours = (zone.ranks[at - size], zone.ranks[(at + size) % len(zone.ranks)])
        return any(other // ranks_per_node != rank // ranks_per_node for other in (*own, *neighbours))

    # Simulation

    def rounds(self, zone: Zone, context: Context) -> ZoneRounds:
        """Launches of all rounds; the all-to-alls of each group, and the blocks that walk round
        between them.
        """
        shape = Shape.of(zone, self.size(zone), context)
        queries, keys = shape.heads()
        inside: list[GroupTraffic] = []
        for held in shape.run_tokens().astype(np.float64) if shape.size > 1 else ():
            inputs = {Kind.Q: np.outer(held, queries), Kind.KV: np.outer(held, keys)}
            outputs: dict[Kind, Floats] = {Kind.OUT: np.outer(queries, held)}
            inside.append(GroupTraffic(inputs, outputs, gathers=False))
        hops = None
        if shape.num_groups > 1:
            # A block of some of the heads counts as that part of its tokens.
            part = np.tile(keys / context.num_kv_heads, shape.num_groups)[:, None]
            forward, backward = (np.repeat(walk, shape.size, axis=0) * part for walk in walks(shape.placed))
            hops = HopByHop(forward, backward)
        traffic = HeadsThenHops(tuple(inside), hops) if len(zone.ranks) > 1 else None
        return ZoneRounds(np.array(zone.ranks), _launches(shape), traffic)


def _hops(shape: Shape, context: Context, *, across: bool) -> list[ZoneMessages]:
    """Messages of the hops; `across`: of the edges between nodes only."""
    size, rounds = shape.num_groups, np.arange(1, shape.num_groups)
    ranks, brought = np.array(shape.ranks), arriving(shape.placed)
    rows: list[Ints] = []
    for index, own in enumerate(shape.slices) if size > 1 else ():
        src, dst = ranks[:, index], np.roll(ranks[:, index], -1)
        edge = np.flatnonzero(context.crosses(src, dst)) if across else np.arange(size)
        if own and len(edge):
            ends, tokens = (src[edge, None], dst[edge, None]), brought[(edge + 1) % size, 1:]
            rows.append(messages_from(shape.trades + rounds - 1, *ends, Kind.KV, kv_heads_of(own), tokens))
    return [ZoneMessages(np.concatenate(rows))] if rows else []


def _runs(of_group: Ints, size: int) -> Ints:
    """Tokens of each rank [groups, group size] whose groups have so many [groups]."""
    edges = of_group[:, None] * np.arange(size + 1) // size
    return edges[:, 1:] - edges[:, :-1]


def _placed(zone: Zone, size: int, lengths: Ints, mask: Mask = CAUSAL) -> Zigzag:
    """The zigzag of a zone over its groups of `size` ranks."""
    return zigzag(lengths, np.array(zone.seqs, dtype=np.int64), len(zone.ranks) // size, mask)


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
