"""Head ring: heads are exchanged inside a group of ranks, keys go round from group to group. With
groups of one rank it is a ring: Ring Attention, Transformer Engine's context parallelism.

LoongTrain (arXiv 2406.18485) calls it 2D attention; here each zone has its own groups. It is
Zeppelin's ring between nodes (section 3.2) with all ranks of a node in place of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Literal

import numpy as np

from megatron_balance.errors import InvalidProgramError
from megatron_balance.ir.arrays import Bools, Ints, ranges, sums
from megatron_balance.ir.columns import Held, Pair, RemoteHeld, Rows, Transfer, Value
from megatron_balance.ir.mask import CAUSAL, Mask
from megatron_balance.ir.plan import Zone
from megatron_balance.ir.program import Kind
from megatron_balance.patterns.base import (
    CommPattern,
    Context,
    FirstHops,
    Floats,
    HeadsThenHops,
    HopByHop,
    Launches,
    Load,
    Startable,
    ZoneAt,
    ZoneRounds,
    ZoneWork,
    remote_of,
)
from megatron_balance.patterns.head_exchange import (
    HeadShares,
    HeadSlice,
    Trade,
    head_counts,
    head_slices,
    kv_heads_of,
    receive_trade,
    run_of,
    runs_of,
    shared_by_heads,
    traded,
)
from megatron_balance.patterns.ring import (
    Zigzag,
    arriving,
    attention,
    chunk,
    forward_hops,
    fragments,
    holders,
    hops_of,
    pairs_per_rank,
    ring_launches,
    tokens,
    walks,
    zigzag,
)
from megatron_balance.patterns.sends import Blocks, Send, Sends, table_of, transfers_of

# Cells of (rank, sequence) worked on at once, which bounds memory.
_BLOCK = 1 << 20

# Zones of at most this many cells are listed together, fragment by fragment: a plan may have a zone
# for each rank.
_LISTED = 1 << 12


@dataclass(frozen=True, slots=True)
class _Shape:
    """A zone's groups: `ranks` [groups, group size]; its zigzag over them; each place's heads."""

    ranks: tuple[tuple[int, ...], ...]
    placed: Zigzag
    slices: list[list[HeadSlice]]

    @classmethod
    def of(cls, zone: Zone, size: int, context: Context) -> _Shape:
        # The shape of a zone whose groups have `size` ranks.
        groups = tuple(zone.ranks[at : at + size] for at in range(0, len(zone.ranks), size))
        placed = _placed(zone, size, context.lengths, context.mask)
        return cls(groups, placed, head_slices(context.num_heads, context.num_kv_heads, size))

    @property
    def num_groups(self) -> int:
        return len(self.ranks)

    @property
    def size(self) -> int:
        return len(self.ranks[0])

    @property
    def trades(self) -> int:
        # Exchange ids of the first all-to-alls, and of the last: one a group, none in groups of one
        # rank.
        return self.num_groups if self.size > 1 else 0

    @property
    def last(self) -> int:
        return self.trades + self.num_groups - 1

    def hops(
        self,
        place: tuple[int, int] | None,
        among: Callable[[Ints, Ints], Bools] | None,
        step: Literal[1, -1] = 1,
    ) -> Ints:
        # `Send` rows of the blocks that go round, to the group `step` further; `place` and `among`
        # as in `Trade`.
        size, ranks = self.num_groups, np.array(self.ranks)
        sends = np.arange(size) if place is None else np.array([place[0], place[0] - step])
        hop = np.arange(1, size)[::step]
        tables = [np.empty((0, Send.WIDTH), dtype=np.int64)]
        for index in range(self.size) if place is None else (place[1],):
            own, group = self.slices[index], sends
            src, dst = ranks[group % size, index], ranks[(group + step) % size, index]
            if among is not None:
                crosses = among(src, dst)
                src, dst, group = src[crosses], dst[crosses], group[crosses]
            if own:
                number = self.trades + (hop if step == 1 else size - hop) - 1
                block = self.num_runs + (group - step * (hop[:, None] - 1)) % size
                tables.append(table_of(number[:, None], src, dst, Kind.KV, *kv_heads_of(own), block, hop[:, None]))
        return np.concatenate(tables)

    @property
    def num_runs(self) -> int:
        # Blocks of ranks, before those of groups; in a ring they are not sent.
        return self.num_groups * self.size if self.size > 1 else 0

    def tokens(self) -> Ints:
        # Tokens of what each rank holds, in hop 0, and of the block of each group in each hop:
        # int64 [num_runs + groups, groups].
        walks = forward_hops(self.placed)
        if self.size == 1:
            return walks
        runs = np.zeros((self.num_runs, self.num_groups), dtype=np.int64)
        runs[:, 0] = self.run_tokens().ravel()
        return np.concatenate([runs, walks])

    def blocks(self, *, group: int | None = None, back: bool = False) -> Blocks:
        # Rows that each rank holds, if asked of one `group` alone, and the block of each group.
        hops, nothing = hops_of(self.placed, back=back), np.empty((0, 3), dtype=np.int64)
        if self.size == 1:
            return hops
        held = [fragments(self.placed, at) if group in (None, at) else nothing for at in range(self.num_groups)]
        runs = Blocks.of([run for own in held for run in (runs_of(own, self.size) if len(own) else [own] * self.size)])
        assert hops.reach is not None
        reach = np.append(np.zeros(len(runs.rows), dtype=np.int64), hops.reach)
        return Blocks(
            np.concatenate([runs.rows, hops.rows]), np.append(runs.begin, runs.begin[-1] + hops.begin[1:]), reach
        )

    def group_tokens(self) -> Ints:
        # Tokens of each group: int64 [groups].
        return tokens(self.placed.lengths, self.num_groups)

    def run_tokens(self) -> Ints:
        # Tokens of each rank: int64 [groups, group size].
        return _runs(self.group_tokens(), self.size)

    def heads(self) -> tuple[Ints, Ints]:
        # Numbers of query and of key-value heads of each place in a group: int64 [group size] each.
        return head_counts(self.slices)


# The zone's ranks, `group_size` in a row, form groups. Tokens are placed zigzag over the groups
# (`patterns.zigzag`), and what a group holds lies in near-equal runs on its ranks. An all-to-all
# gives every rank of a group all of its tokens with a slice of the heads
# (`patterns.head_exchange`); then each slice goes round the ranks of the same place in the other
# groups (`patterns.ring`), and outputs go back. So a ring has as many rounds as groups, every rank
# sends over its own NIC, and a rank receives only the keys of its own heads.
#
# With one group it is a head exchange. With fewer key-value heads than ranks in a group (GQA),
# several ranks receive the same one. A rank without query heads attends nothing.
#
# A replayed backward makes the first all-to-all again before anything else, since all rounds need
# what it brings; the ring then turns the other way.
#
# With a remap the owner of tokens makes their first hop in a ring for the rank that attends to
# them. The replay's first hop is another, so there it stays with the holder.
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
        # Ranks of a group of the zone.
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
        # Two all-to-alls of each group of several ranks, and the rounds between groups.
        size = self.size(zone)
        groups = len(zone.ranks) // size
        return (2 * groups if size > 1 else 0) + groups - 1

    def place(self, zone: Zone, lengths: Ints, rank: int) -> Ints:
        # Rows (seq, start, stop) of `rank`: its run of its group's fragments.
        size = self.size(zone)
        group, index = divmod(zone.ranks.index(rank), size)
        return run_of(fragments(_placed(zone, size, lengths), group), size, index)

    def sends(self, zone: Zone, context: Context, rank: int | None = None, *, across: bool = False) -> Sends:
        # The all-to-alls of each group, and the blocks that go round between them.
        shape = _Shape.of(zone, self.size(zone), context)
        place = None if rank is None else divmod(zone.ranks.index(rank), shape.size)
        among = context.crosses if across else None
        forward = shape.hops(place, among)
        # In round t the replay brings what the forward brought in hop G - t.
        back = shape.hops(place, among, step=-1)
        if shape.size == 1:
            made = Sends(back, shape.tokens, partial(shape.blocks, back=True))
            return Sends(forward, shape.tokens, shape.blocks, again=made, silent=range(shape.last))
        group = None if place is None else place[0]
        trade = Trade(np.array(shape.ranks), HeadShares.of(shape.slices), place, among)
        runs = shape.run_tokens()
        rows = np.concatenate([trade.inputs(0, 0), forward, trade.outputs(shape.last, 0)])
        # A replayed backward begins where the forward ended: there it makes the first all-to-alls,
        # and nothing where the forward made them.
        again = np.concatenate([back, trade.inputs(shape.last, 0)])
        blocks = partial(shape.blocks, group=group)
        made = Sends(again, shape.tokens, partial(blocks, back=True), trade.calls(shape.last, runs))
        calls = trade.calls(0, runs) | trade.calls(shape.last, runs, moves=True)
        return Sends(rows, shape.tokens, blocks, calls, made, range(shape.last))

    def work(self, zone: Zone, context: Context, rank: int) -> Iterable[ZoneWork]:
        # The own keys of the group, then those that each round brings.
        shape = _Shape.of(zone, self.size(zone), context)
        group, index = divmod(zone.ranks.index(rank), shape.size)
        if shape.slices[index]:
            rounds = zip(*attention(shape.placed, group, shape.slices[index]), strict=True)
            for at, (pairs, merges) in enumerate(rounds):
                yield ZoneWork(shape.trades + at, Rows(Pair.WIDTH, pairs), Rows(Value.WIDTH, merges if at else b""))

    # Placement

    def place_all(self, zones: Sequence[ZoneAt[Zone]], lengths: Ints, wanted: Bools) -> Ints:
        rings = [(number, zone) for number, zone in zones if self.size(zone) == 1]
        others = [(number, zone) for number, zone in zones if self.size(zone) > 1]
        return np.concatenate([self._place_rings(rings, lengths, wanted), super().place_all(others, lengths, wanted)])

    def place_each(self, zone: Zone, lengths: Ints, wanted: Bools) -> Iterator[tuple[int, Ints]]:
        # Group by group: the runs of a group are cut from what it holds.
        size = self.size(zone)
        placed = _placed(zone, size, lengths)
        for group in range(len(zone.ranks) // size):
            ranks = zone.ranks[group * size : (group + 1) * size]
            if wanted[list(ranks)].any():
                each = zip(ranks, runs_of(fragments(placed, group), size), strict=True)
                yield from ((rank, run) for rank, run in each if wanted[rank])

    def _place_rings(self, zones: Sequence[ZoneAt[Zone]], lengths: Ints, wanted: Bools) -> Ints:
        # As `place_all`, of zones with groups of one rank: a plan may have one for each rank.
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

    # Plan statistics and traffic between nodes

    def attended(self, zones: Sequence[Zone], context: Context) -> Ints:
        local = [zone for zone in zones if len(zone.ranks) == 1]  # together: a plan may have one for each rank
        ranks = np.repeat([zone.ranks[0] for zone in local], [len(zone.seqs) for zone in local])
        seqs = np.fromiter(chain.from_iterable(zone.seqs for zone in local), np.int64, len(ranks))
        pairs = sums(ranks.astype(np.int64), context.mask.num_pairs(context.lengths[seqs]), context.num_ranks)
        for zone in zones:
            if len(zone.ranks) > 1:
                shape = _Shape.of(zone, self.size(zone), context)
                pairs[np.array(shape.ranks)] += shared_by_heads(pairs_per_rank(shape.placed), shape.slices, context)
        return pairs

    # Closed forms of what the table of sends says, which planning asks for often

    def receive(self, load: Load, zone: Zone, context: Context) -> None:
        # Add what the all-to-alls and all hops bring.
        shape = _Shape.of(zone, self.size(zone), context)
        ranks, (queries, keys) = np.array(shape.ranks), shape.heads()
        if shape.size > 1:
            receive_trade(load, ranks, shape.run_tokens(), shape.slices)
        load.bring(Kind.KV, ranks, arriving(shape.placed).sum(axis=1)[:, None] * (queries > 0), keys)

    def largest_exchange(self, zone: Zone, context: Context) -> Ints:
        # Keys and values of the others of the group, or the largest block that comes round, with
        # the heads of a rank.
        shape = _Shape.of(zone, self.size(zone), context)
        most = arriving(shape.placed).max(axis=1)[:, None]
        if shape.size > 1:
            most = np.maximum(most, shape.group_tokens()[:, None] - shape.run_tokens())
        return (most * shape.heads()[1]).ravel()

    # The remap

    def first_senders(self, zone: Zone, rank: int, num_ranks: int) -> Ints:
        # The rank before `rank`, in a ring.
        del num_ranks
        before = [zone.ranks[zone.ranks.index(rank) - 1]] if self.merges_remap else []
        return np.array(before, dtype=np.int64)

    def first_hops(self, zones: Sequence[ZoneAt[Zone]], context: Context, remote: Ints) -> FirstHops:
        # First hops to the rank after the holder, whole fragments divided by owner.
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
        # The first all-to-all, the gradients of what the last one brings, and the replay of the
        # first in its place. Of a ring the first hop, and that of the replay, which brings what the
        # last exchange brought.
        size = self.size(zone)
        groups = len(zone.ranks) // size
        if size == 1:
            return Startable(forward=(0,), replays=(groups - 2,))
        first = tuple(range(groups))
        last = tuple(2 * groups - 1 + group for group in first)
        return Startable(forward=first, gradients=last, replays=last)

    def reaches_out(self, zone: Zone, rank: int, ranks_per_node: int) -> bool:
        # Whether its group, or a neighbour in another group, is on another node.
        size, at = self.size(zone), zone.ranks.index(rank)
        own = zone.ranks[at - at % size : at - at % size + size]
        neighbours = (zone.ranks[at - size], zone.ranks[(at + size) % len(zone.ranks)])
        return any(other // ranks_per_node != rank // ranks_per_node for other in (*own, *neighbours))

    # Simulation

    def rounds(self, zone: Zone, context: Context) -> ZoneRounds:
        # Launches of all rounds; the all-to-alls of each group, and the blocks that walk round
        # between them.
        shape = _Shape.of(zone, self.size(zone), context)
        inside = traded(shape.run_tokens(), shape.slices) if shape.size > 1 else []
        hops = None
        if shape.num_groups > 1:
            # A block of some of the heads counts as that part of its tokens.
            part = np.tile(shape.heads()[1] / context.num_kv_heads, shape.num_groups)[:, None]
            forward, backward = (np.repeat(walk, shape.size, axis=0) * part for walk in walks(shape.placed))
            hops = HopByHop(forward, backward)
        traffic = HeadsThenHops(tuple(inside), hops) if len(zone.ranks) > 1 else None
        return ZoneRounds(np.array(zone.ranks), _launches(shape), traffic)


def _runs(of_group: Ints, size: int) -> Ints:
    # Tokens of each rank [groups, group size] whose groups have so many [groups].
    edges = of_group[:, None] * np.arange(size + 1) // size
    return edges[:, 1:] - edges[:, :-1]


def _placed(zone: Zone, size: int, lengths: Ints, mask: Mask = CAUSAL) -> Zigzag:
    # The zigzag of a zone over its groups of `size` ranks.
    return zigzag(lengths, np.array(zone.seqs, dtype=np.int64), len(zone.ranks) // size, mask)


def _launches(shape: _Shape) -> Launches:
    # Launches of all groups, rounds and places; those of places with as many heads are alike.
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
