"""Head ring: heads are exchanged inside a group of ranks, keys go round from group to group. With
groups of one rank it is a ring: Ring Attention, Transformer Engine's context parallelism.

LoongTrain (arXiv 2406.18485) calls it 2D attention; here each zone has its own groups. It is
Zeppelin's ring between nodes (section 3.2) with all ranks of a node in place of one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Literal

import numpy as np

from megatron_balance.errors import InvalidProgramError
from megatron_balance.ir.arrays import Bools, Ints, as_array, ranges, sums
from megatron_balance.ir.columns import Held, Pair, RemoteHeld, Rows, Transfer, Value
from megatron_balance.ir.mask import CAUSAL, Mask
from megatron_balance.ir.plan import Zone
from megatron_balance.ir.program import Kind
from megatron_balance.patterns import base, head_exchange, zigzag
from megatron_balance.patterns.sends import Blocks, Send, Sends, in_turns, split_rows, table_of, transfers_of
from megatron_balance.patterns.zigzag import Zigzag

# Cells of (rank, sequence) worked on at once, which bounds memory.
_BLOCK = 1 << 20

# Zones of at most this many cells are listed together, fragment by fragment: a plan may have a zone
# for each rank.
_LISTED = 1 << 12


@dataclass(frozen=True, slots=True)
class _Shape:
    """A zone's groups: `ranks` [groups, group size]; its zigzag over them; heads of each place."""

    ranks: tuple[tuple[int, ...], ...]
    placed: Zigzag
    heads: head_exchange.HeadShares

    @classmethod
    def of(cls, zone: Zone, size: int, context: base.Context) -> _Shape:
        # The shape of a zone whose groups have `size` ranks.
        groups = tuple(zone.ranks[at : at + size] for at in range(0, len(zone.ranks), size))
        placed = _placed(zone, size, context.lengths, context.mask)
        return cls(groups, placed, head_exchange.HeadShares.of(*context.heads, size))

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
            group = sends
            src, dst = ranks[group % size, index], ranks[(group + step) % size, index]
            if among is not None:
                crosses = among(src, dst)
                src, dst, group = src[crosses], dst[crosses], group[crosses]
            if self.heads.attends[index]:
                number = self.trades + (hop if step == 1 else size - hop) - 1
                kv_heads = self.heads.kv_start[index], self.heads.kv_stop[index]
                block = self.num_runs + (group - step * (hop[:, None] - 1)) % size
                tables.append(table_of(number[:, None], src, dst, Kind.KV, *kv_heads, block, hop[:, None]))
        return np.concatenate(tables)

    @property
    def num_runs(self) -> int:
        # Blocks of ranks, before those of groups; in a ring they are not sent.
        return self.num_groups * self.size if self.size > 1 else 0

    def tokens(self) -> Ints:
        # Tokens of what each rank holds, in hop 0, and of the block of each group in each hop:
        # int64 [num_runs + groups, groups].
        walks = _forward_hops(self.placed)
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
        held = [self.placed.fragments(at) if group in (None, at) else nothing for at in range(self.num_groups)]
        runs = Blocks.of(
            [run for own in held for run in (head_exchange.runs_of(own, self.size) if len(own) else [own] * self.size)]
        )
        assert hops.reach is not None
        reach = np.append(np.zeros(len(runs.rows), dtype=np.int64), hops.reach)
        begin = np.append(runs.begin, runs.begin[-1] + hops.begin[1:])
        return Blocks(np.concatenate([runs.rows, hops.rows]), begin, reach)

    def group_tokens(self) -> Ints:
        # Tokens of each group: int64 [groups].
        return zigzag.tokens(self.placed.lengths, self.num_groups)

    def run_tokens(self) -> Ints:
        # Tokens of each rank: int64 [groups, group size].
        return _runs(self.group_tokens(), self.size)


# The zone's ranks, `group_size` in a row, form groups. Tokens are placed zigzag over the groups
# (`patterns.zigzag`), and what a group holds lies in near-equal runs on its ranks. An all-to-all
# gives every rank of a group all of its tokens with a slice of the heads
# (`patterns.head_exchange`); then each slice goes round the ranks of the same place in the other
# groups (`hops_of`), and outputs go back. So a ring has as many rounds as groups, every rank
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
class HeadRing(base.CommPattern[Zone]):
    """An all-to-all inside each group, a ring of every slice of the heads, an all-to-all back.

    `grouped`: groups are those of the zone (`head_ring`); else each has one rank (`ring`), there is
    no all-to-all, and owners may make the first hops for holders.
    """

    traffic = base.HeadsThenHops

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
        return head_exchange.run_of(_placed(zone, size, lengths).fragments(group), size, index)

    def sends(self, zone: Zone, context: base.Context, rank: int | None = None, *, across: bool = False) -> Sends:
        # The all-to-alls of each group, and the blocks that go round between them.
        shape = _Shape.of(zone, self.size(zone), context)
        place = None if rank is None else divmod(zone.ranks.index(rank), shape.size)
        among = context.crosses if across else None
        forward = shape.hops(place, among)
        if across and shape.size == 1:  # for messages, of which a replay has none of its own
            return Sends(forward, shape.tokens, shape.blocks)
        # In round t the replay brings what the forward brought in hop G - t.
        back = shape.hops(place, among, step=-1)
        if shape.size == 1:
            made = Sends(back, shape.tokens, partial(shape.blocks, back=True))
            return Sends(forward, shape.tokens, shape.blocks, again=made, silent=range(shape.last))
        group = None if place is None else place[0]
        trade = head_exchange.Trade(np.array(shape.ranks), shape.heads, place, among)
        runs = shape.run_tokens()
        rows = np.concatenate([trade.inputs(0, 0), forward, trade.outputs(shape.last, 0)])
        # A replayed backward begins where the forward ended: there it makes the first all-to-alls,
        # and nothing where the forward made them.
        again = np.concatenate([back, trade.inputs(shape.last, 0)])
        blocks = partial(shape.blocks, group=group)
        made = Sends(again, shape.tokens, partial(blocks, back=True), trade.calls(shape.last, runs))
        calls = trade.calls(0, runs) | trade.calls(shape.last, runs, moves=True)
        return Sends(rows, shape.tokens, blocks, calls, made, range(shape.last))

    def work(self, zone: Zone, context: base.Context, rank: int) -> Iterable[base.ZoneWork]:
        # The own keys of the group, then those that each round brings.
        shape = _Shape.of(zone, self.size(zone), context)
        group, index = divmod(zone.ranks.index(rank), shape.size)
        if slices := shape.heads.slices[index]:
            rounds = zip(*_attention(shape.placed, group, slices), strict=True)
            for at, (pairs, merges) in enumerate(rounds):
                yield base.ZoneWork(
                    shape.trades + at, Rows(Pair.WIDTH, pairs), Rows(Value.WIDTH, merges if at else b"")
                )

    # Placement

    def place_all(self, zones: Sequence[base.ZoneAt[Zone]], lengths: Ints, wanted: Bools) -> Ints:
        rings = [(number, zone) for number, zone in zones if self.size(zone) == 1]
        others = [(number, zone) for number, zone in zones if self.size(zone) > 1]
        tables = [self._place_rings(rings, lengths, wanted)]
        for number, zone in others:
            size = self.size(zone)
            placed = _placed(zone, size, lengths)
            for group in range(len(zone.ranks) // size):  # the runs of a group are cut from what it holds
                ranks = zone.ranks[group * size : (group + 1) * size]
                if wanted[list(ranks)].any():
                    each = zip(ranks, head_exchange.runs_of(placed.fragments(group), size), strict=True)
                    tables += [base.held_rows(number, rank, run) for rank, run in each if wanted[rank]]
        return np.concatenate(tables)

    def _place_rings(self, zones: Sequence[base.ZoneAt[Zone]], lengths: Ints, wanted: Bools) -> Ints:
        # As `place_all`, of zones with groups of one rank: a plan may have one for each rank.
        sizes = np.array([len(zone.ranks) for _, zone in zones], dtype=np.int64)
        counts = np.array([len(zone.seqs) for _, zone in zones], dtype=np.int64)
        members = np.fromiter(chain.from_iterable(zone.ranks for _, zone in zones), np.int64, int(sizes.sum()))
        seqs = np.fromiter(chain.from_iterable(zone.seqs for _, zone in zones), np.int64, int(counts.sum()))
        stops = np.cumsum(counts)
        parts, first = zigzag.holders(lengths[seqs], np.repeat(sizes, counts), np.repeat(stops - counts, counts))
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
            rows[:, 0, Held.START], rows[:, 0, Held.STOP] = zigzag.chunk(length, held_by, position)
            rows[:, 1, Held.START], rows[:, 1, Held.STOP] = zigzag.chunk(length, held_by, 2 * held_by - 1 - position)
            if self.merges_remap:
                # The last chunk of a sequence is needed elsewhere only if the mask is not causal.
                shared = held_by > 1
                rows[:, 0, Held.SENT_ON], rows[:, 1, Held.SENT_ON] = shared, shared * np.where(position > 0, 1, 2)
            tables.append(rows[(position < held_by)[:, None] & (rows[:, :, Held.START] < rows[:, :, Held.STOP])])
        return np.concatenate(tables)

    def tokens(self, zones: Sequence[Zone], context: base.Context) -> Ints:
        listed: list[Zone] = []
        others: list[Zone] = []
        alone: defaultdict[int, list[Zone]] = defaultdict(list)  # of one group, by its size
        for zone in zones:
            size = self.size(zone)
            if size == 1 and len(zone.ranks) * len(zone.seqs) <= _LISTED:
                listed.append(zone)
            else:
                (alone[size] if len(zone.ranks) == size else others).append(zone)
        held = super().tokens(listed, context)
        for size, own in alone.items():
            totals = np.array([context.lengths[list(zone.seqs)].sum() for zone in own])
            ranks = np.array([zone.ranks for zone in own])
            np.add.at(held, ranks, _runs(totals, size))
        for zone in others:
            size, lengths = self.size(zone), context.lengths[list(zone.seqs)]
            of_group = zigzag.tokens(lengths, len(zone.ranks) // size)
            held[list(zone.ranks)] += _runs(of_group, size).ravel()
        return held

    # Plan statistics and traffic between nodes

    def attended(self, zones: Sequence[Zone], context: base.Context) -> Ints:
        local = [zone for zone in zones if len(zone.ranks) == 1]  # together: a plan may have one for each rank
        ranks = np.repeat([zone.ranks[0] for zone in local], [len(zone.seqs) for zone in local])
        seqs = np.fromiter(chain.from_iterable(zone.seqs for zone in local), np.int64, len(ranks))
        pairs = sums(ranks.astype(np.int64), context.mask.num_pairs(context.lengths[seqs]), context.num_ranks)
        for zone in zones:
            if len(zone.ranks) > 1:
                shape = _Shape.of(zone, self.size(zone), context)
                of_group = shape.placed.pairs_per_rank()
                pairs[np.array(shape.ranks)] += shape.heads.pairs(of_group)
        return pairs

    # Closed forms of what the table of sends says, which planning asks for often

    def receive(self, load: base.Load, zone: Zone, context: base.Context) -> None:
        # Add what the all-to-alls and all hops bring.
        shape = _Shape.of(zone, self.size(zone), context)
        ranks, heads = np.array(shape.ranks), shape.heads
        if shape.size > 1:
            heads.bring(load, ranks, shape.run_tokens())
        load.bring(Kind.KV, ranks, _arriving(shape.placed).sum(axis=1)[:, None] * heads.attends, heads.keys)

    def largest_exchange(self, zone: Zone, context: base.Context) -> Ints:
        # Keys and values of the others of the group, or the largest block that comes round, with
        # the heads of a rank.
        shape = _Shape.of(zone, self.size(zone), context)
        most = _arriving(shape.placed).max(axis=1)[:, None]
        if shape.size > 1:
            most = np.maximum(most, shape.group_tokens()[:, None] - shape.run_tokens())
        return (most * shape.heads.keys).ravel()

    # The remap

    def first_senders(self, zone: Zone, rank: int, num_ranks: int) -> Ints:
        # The rank before `rank`, in a ring.
        del num_ranks
        before = [zone.ranks[zone.ranks.index(rank) - 1]] if self.merges_remap else []
        return np.array(before, dtype=np.int64)

    def first_hops(self, zones: Sequence[base.ZoneAt[Zone]], context: base.Context, remote: Ints) -> base.FirstHops:
        # First hops to the rank after the holder, whole fragments divided by owner.
        own = remote[np.isin(remote[:, RemoteHeld.ZONE], [index for index, _ in zones])]
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
        return base.FirstHops(rows[sent], own[sent, RemoteHeld.HOLDER], own[sent, RemoteHeld.ZONE])

    # Starting early, routing

    def startable(self, zone: Zone) -> base.Startable:
        # The first all-to-all, the gradients of what the last one brings, and the replay of the
        # first in its place. Of a ring the first hop, and that of the replay, which brings what the
        # last exchange brought.
        size = self.size(zone)
        groups = len(zone.ranks) // size
        if size == 1:
            return base.Startable(forward=(0,), replays=(groups - 2,))
        first = tuple(range(groups))
        last = tuple(2 * groups - 1 + group for group in first)
        return base.Startable(forward=first, gradients=last, replays=last)

    def reaches_out(self, zone: Zone, rank: int, ranks_per_node: int) -> bool:
        # Whether its group, or a neighbour in another group, is on another node.
        size, at = self.size(zone), zone.ranks.index(rank)
        own = zone.ranks[at - at % size : at - at % size + size]
        neighbours = (zone.ranks[at - size], zone.ranks[(at + size) % len(zone.ranks)])
        return any(other // ranks_per_node != rank // ranks_per_node for other in (*own, *neighbours))

    # Simulation

    def rounds(self, zone: Zone, context: base.Context) -> base.ZoneRounds:
        # Launches of all rounds; the all-to-alls of each group, and the blocks that walk round
        # between them.
        shape = _Shape.of(zone, self.size(zone), context)
        inside = shape.heads.traffic(shape.run_tokens()) if shape.size > 1 else []
        hops = None
        if shape.num_groups > 1:
            # A block of some of the heads counts as that part of its tokens.
            part = np.tile(shape.heads.keys / context.num_kv_heads, shape.num_groups)[:, None]
            forward, backward = (np.repeat(walk, shape.size, axis=0) * part for walk in walks(shape.placed))
            hops = base.HopByHop(forward, backward)
        traffic = base.HeadsThenHops(tuple(inside), hops) if len(zone.ranks) > 1 else None
        return base.ZoneRounds(np.array(zone.ranks), _launches(shape), traffic)


def _runs(of_group: Ints, size: int) -> Ints:
    # Tokens of each rank [groups, group size] whose groups have so many [groups].
    edges = of_group[:, None] * np.arange(size + 1) // size
    return edges[:, 1:] - edges[:, :-1]


def _placed(zone: Zone, size: int, lengths: Ints, mask: Mask = CAUSAL) -> Zigzag:
    # The zigzag of a zone over its groups of `size` ranks.
    return Zigzag.of(lengths, np.array(zone.seqs, dtype=np.int64), len(zone.ranks) // size, mask)


def _launches(shape: _Shape) -> base.Launches:
    # Launches of all groups, rounds and places; those of places with as many heads are alike.
    alike, place = np.unique(np.stack([shape.heads.queries, shape.heads.keys], 1), axis=0, return_inverse=True)
    pairs: list[Ints] = []
    launch: list[Ints] = []
    merging: list[base.Floats] = []
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
    return base.Launches(
        np.concatenate(pairs),
        np.concatenate(launch),
        np.concatenate(merging),
        rounds.transpose(1, 0, 2).reshape(shape.num_groups * shape.size, -1),
    )


# Blocks of keys and values that go round a ring of groups, one hop a round, while queries stay.
#
# Round t of G: group i attends to the block that started at group i - t. A fragment goes round only
# as far as some group still needs it. A replayed backward turns the other way, so that the block
# needed last in the forward pass, which the backward needs first, comes from its own group, and its
# gradient walks the forward path back.

# Rings of more cells (rank, round, sequence) are simulated by kind of launch, all others launch by
# launch.
_EXACT = 1 << 18


def hops_of(placed: Zigzag, *, back: bool = False) -> Blocks:
    """The block of each group index, with the hops that its rows make, turning forward or `back`."""
    position = placed.position(np.arange(placed.size)[:, None])
    lo, hi = placed.lo(position), placed.hi(position)
    reach = (_reach_backward if back else _reach_forward)(placed, position)
    # Few make a hop where sequences are short beside the ranks.
    there = position < placed.parts
    goes = np.stack([there & (reach[at] > 0) & (span[0] < span[1]) for at, span in enumerate((lo, hi))], 2)
    at = np.flatnonzero(goes)
    cell, high = at // 2, at % 2 == 1

    def of(low: Ints, other: Ints) -> Ints:
        return np.where(high, other.take(cell), low.take(cell))

    # `take` in mode "wrap" subtracts once for each time around.
    seq = placed.seqs.take(cell % max(1, len(placed.seqs)))
    rows = np.stack([seq, of(lo[0], hi[0]), of(lo[1], hi[1])], 1)
    begin = np.append(0, np.cumsum(np.count_nonzero(goes, axis=(1, 2))))
    return Blocks(rows, begin, of(*reach))


def _reach_forward(placed: Zigzag, position: Ints) -> tuple[Ints, Ints]:
    # Hops [..., S] that the low and the high chunk of a position make, turning forward.
    # The low chunk at position j is needed by all other positions, the high one by those below j;
    # turning forward, the last position before j again is j - 1. Position 0 has none behind it: its
    # low chunk ends at the last position and its high chunk stays. Under a full mask both are
    # needed by all.
    first = position == 0
    low = np.where(first, placed.parts - 1, placed.size - 1)
    return low, np.where(first, 0, placed.size - 1) if placed.causal else low


def _reach_backward(placed: Zigzag, position: Ints) -> tuple[Ints, Ints]:
    # Hops [..., S] that both chunks make, turning the other way.
    # High chunks end at position 0; low ones, and under a full mask both, go on to position j + 1
    # if there is one.
    last = position >= placed.parts - 1
    low = np.where(last, position, placed.size - 1)
    return low, position if placed.causal else low


_CAUSAL = np.array([(0, 0), (1, 0), (1, 1)])

# (query chunk, key chunk) that may be visible; chunk 0 is the low one.
_FULL = np.array([(0, 0), (0, 1), (1, 0), (1, 1)])


def _attention(
    placed: Zigzag, index: int, slices: Sequence[head_exchange.HeadSlice]
) -> tuple[list[bytes], list[bytes]]:
    # By round: pairs of a rank of group `index` with `slices` of the heads, and queries to merge.
    mine, source = placed.position(np.array(index)), (index - np.arange(placed.size)) % placed.size
    own = mine < placed.parts
    (lo0, lo1), (hi0, hi1) = placed.lo(mine), placed.hi(mine)
    theirs = placed.position(source[:, None])
    k_lo, k_hi = placed.lo(theirs), placed.hi(theirs)
    there = own & (theirs < placed.parts)
    # What is visible follows from whose chunk comes first, if the mask is causal.
    same, earlier, later = there & (theirs == mine), there & (theirs < mine), there & (theirs > mine)
    columns = [same | earlier, there, same | later] if placed.causal else [there] * len(_FULL)
    visible = np.stack(columns, 2)
    query, key = (_CAUSAL if placed.causal else _FULL).T
    q_start, q_stop = np.stack([lo0, hi0], 1)[:, query], np.stack([lo1, hi1], 1)[:, query]
    k_start, k_stop = (np.stack(ends, 2)[:, :, key] for ends in zip(k_lo, k_hi, strict=True))
    visible &= (q_start < q_stop) & (k_start < k_stop)
    queries = np.empty((*q_start.shape, 5), dtype=np.int64)  # as rows have them, to be copied
    queries[..., Pair.SEQ], queries[..., Pair.Q_START], queries[..., Pair.Q_STOP] = (
        placed.seqs[:, None],
        q_start,
        q_stop,
    )
    queries[..., Pair.Q_HEADS] = slices[0][:2]
    queries, k_start, k_stop = queries.reshape(-1, 5), k_start.ravel(), k_stop.ravel()
    # One merge row per query region and round: skip the second pair of the same query chunk.
    once = visible.copy()
    once[:, :, 1:] &= ~(visible[:, :, :-1] & (query[1:] == query[:-1]))
    at, of_round, merged = np.flatnonzero(visible), visible.sum(axis=(1, 2)), once.sum(axis=(1, 2))
    first = once.ravel()[at]
    pairs: list[bytes] = []
    merges: list[bytes] = []
    for block, chosen in in_turns(of_round):
        here = at[chosen]
        rows = np.empty((len(here), Pair.WIDTH), dtype=np.int64)
        rows[:, Pair.QUERY] = queries.take(here % len(queries), axis=0)
        rows[:, Pair.K_START], rows[:, Pair.K_STOP] = k_start[here], k_stop[here]
        rows[:, Pair.KV_HEADS] = slices[0][2:]
        pairs += [_of_each(own, slices) for own in split_rows(rows, of_round[block])]
        values = np.empty((int(merged[block].sum()), Value.WIDTH), dtype=np.int64)
        values[:, Value.KIND], values[:, Value.REGION] = Kind.OUT, rows[first[chosen], Pair.QUERY]
        values[:, Value.HEAD_STOP] = slices[-1].head_stop
        merges += split_rows(values, merged[block])
    return pairs, merges


def _of_each(pairs: bytes, slices: Sequence[head_exchange.HeadSlice]) -> bytes:
    if len(slices) == 1:
        return pairs
    rows = np.repeat(as_array(Rows(Pair.WIDTH, pairs))[None], len(slices), axis=0)
    heads = np.array(slices, dtype=np.int64)[:, None]
    rows[:, :, Pair.Q_HEADS], rows[:, :, Pair.KV_HEADS] = heads[:, :, :2], heads[:, :, 2:]
    return rows.tobytes()


# All ranks at once: blocks that walk


def _forward_hops(placed: Zigzag) -> Ints:
    # Tokens [G, G] of each group index's block in its n-th hop, turning forward; hop 0 is none.
    # All that several ranks hold goes all the way round, but for the chunks of position 0
    # (`_reach_forward`).
    size, several = placed.size, placed.parts > 1
    first = np.zeros_like(placed.lengths)
    (lo0, lo1), (hi0, hi1) = placed.lo(first), placed.hi(first)
    high = hi1 - hi0
    stays = sums(placed.first[several], high[several] * placed.causal, size)
    gone = np.zeros((size, size + 1), dtype=np.int64)
    np.add.at(gone, (placed.first[several], placed.parts[several]), (lo1 - lo0 + high * (not placed.causal))[several])
    tokens = (placed.shared_tokens() - stays)[:, None] - np.cumsum(gone[:, :size], axis=1)
    tokens[:, 0] = 0
    return tokens


def _arriving(placed: Zigzag) -> Ints:
    # Tokens [G, G] that each hop brings each group index, turning forward; hop 0 is none.
    hops = np.arange(placed.size)
    return _forward_hops(placed)[(hops[:, None] - hops) % placed.size, hops]


def walks(placed: Zigzag) -> tuple[Ints, Ints]:
    """Tokens [G, G] of each group index's block in its n-th hop, turning forward and the other way."""
    position = placed.position(np.arange(placed.size)[:, None])
    there = position < placed.parts
    lo, hi = (np.where(there, stop - start, 0) for start, stop in (placed.lo(position), placed.hi(position)))
    lo_reach, hi_reach = _reach_backward(placed, position)
    return _forward_hops(placed), _walked(lo, lo_reach) + _walked(hi, hi_reach)


def _walked(tokens: Ints, reach: Ints) -> Ints:
    # Tokens [G, S] summed over sequences in each hop [G, G] up to their reach; hop 0 is none.
    size = len(tokens)
    place = np.arange(size)[:, None] * (size + 1) + np.minimum(reach, size - 1) + 1
    gone = np.bincount(place.ravel(), weights=tokens.ravel(), minlength=size * (size + 1)).reshape(size, size + 1)
    moved = tokens.sum(axis=1)[:, None] - np.cumsum(gone.astype(np.int64), axis=1)[:, :size]
    moved[:, 0] = 0
    return moved


# All ranks at once: launches


def ring_launches(placed: Zigzag, heads: tuple[int, int]) -> base.Launches:
    """The launches of every (group index, round); `heads`: of queries and of keys."""
    exact = placed.size**2 * max(1, len(placed.seqs)) <= _EXACT
    return _each_launch(placed, heads) if exact else launches_by_kind(placed, heads)


def _each_launch(placed: Zigzag, heads: tuple[int, int]) -> base.Launches:
    size = placed.size
    index = np.arange(size)
    position = placed.position(index[:, None])
    own = position < placed.parts
    start = np.stack([placed.lo(position)[0], placed.hi(position)[0]], 2)
    stop = np.stack([placed.lo(position)[1], placed.hi(position)[1]], 2)
    source = (index[:, None] - index) % size
    theirs, both = position[source], own[:, None] & own[source]
    mine = position[:, None]
    same, earlier, later = both & (theirs == mine), both & (theirs < mine), both & (theirs > mine)
    pairs: list[Ints] = []
    launch: list[Ints] = []
    combinations = _CAUSAL if placed.causal else _FULL
    shown = (same | earlier, both, same | later) if placed.causal else (both,) * len(_FULL)
    for (query, key), visible in zip(combinations.tolist(), shown, strict=True):
        i, t, s = np.nonzero(visible)
        j = source[i, t]
        rows = np.zeros((len(i), Pair.WIDTH), dtype=np.int64)
        rows[:, Pair.SEQ], rows[:, Pair.Q_HEAD_STOP], rows[:, Pair.KV_HEAD_STOP] = placed.seqs[s], *heads
        rows[:, Pair.Q_START], rows[:, Pair.Q_STOP] = start[i, s, query], stop[i, s, query]
        rows[:, Pair.K_START], rows[:, Pair.K_STOP] = start[j, s, key], stop[j, s, key]
        keep = (rows[:, Pair.Q_START] < rows[:, Pair.Q_STOP]) & (rows[:, Pair.K_START] < rows[:, Pair.K_STOP])
        pairs.append(rows[keep])
        launch.append((i * size + t)[keep])
    merging = np.tile(index > 0, size).astype(np.float64)
    return base.Launches(
        np.concatenate(pairs), np.concatenate(launch), merging, np.arange(size * size).reshape(size, size)
    )


_LO, _HI, _KEYS, _KEYS_HI = 4, 6, 0, 2  # where chunks of a kind begin, in chunks


def launches_by_kind(placed: Zigzag, heads: tuple[int, int]) -> base.Launches:
    """As `ring_launches`, one of each kind: whose keys come first, short sequences in common."""
    # A ring over 1,024 ranks has a million launches, but few kinds: sequences that every rank
    # shares are alike on all of them, up to a token a chunk, and those too short for that are
    # chunks of a token or two. A pair that occurs n times in a launch is one row with n times the
    # heads, which costs the same.
    size = placed.size
    index = np.arange(size)
    short = placed.parts < size
    holds = (((index[:, None] - placed.first[short]) % size) < placed.parts[short]).astype(np.float32)
    together = np.rint(holds @ holds.T).astype(np.int64)
    source = (index[:, None] - index) % size
    kind = np.where(source == index[:, None], 0, np.where(source < index[:, None], 1, 2))
    most = together.max(initial=0) + 1
    kinds, which = np.unique(kind * most + together[index[:, None], source], return_inverse=True)
    order, shared = np.divmod(kinds, most)
    chunk = np.maximum(1, np.rint(placed.lengths[~short] / (2 * size)).astype(np.int64))
    combinations: tuple[tuple[tuple[int, int], ...], ...] = (
        ((_LO, _LO), (_HI, _LO), (_HI, _HI)),
        ((_LO, _KEYS), (_HI, _KEYS)),
        ((_HI, _KEYS), (_HI, _KEYS_HI)),
    )
    if not placed.causal:
        combinations = (((_LO, _LO), (_LO, _HI), (_HI, _LO), (_HI, _HI)),) * len(combinations)
    pairs: list[Ints] = []
    launch: list[Ints] = []
    for number, (of, count) in enumerate(zip(order.tolist(), shared.tolist(), strict=True)):
        for query, key in combinations[int(of)]:
            rows = np.zeros((len(chunk) + (count > 0), Pair.WIDTH), dtype=np.int64)
            alike = rows[: len(chunk)]
            alike[:, Pair.SEQ], alike[:, Pair.Q_HEAD_STOP], alike[:, Pair.KV_HEAD_STOP] = placed.seqs[~short], *heads
            alike[:, Pair.Q_START], alike[:, Pair.Q_STOP] = chunk * query, chunk * (query + 1)
            alike[:, Pair.K_START], alike[:, Pair.K_STOP] = chunk * key, chunk * (key + 1)
            if count:
                rows[-1] = (-1, query, query + 1, 0, heads[0] * count, key, key + 1, 0, heads[1] * count)
            pairs.append(rows)
            launch.append(np.full(len(rows), number))
    merging: base.Floats = (order > 0).astype(np.float64)
    return base.Launches(np.concatenate(pairs), np.concatenate(launch), merging, which.reshape(size, size))
