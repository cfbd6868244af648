"""Zigzag placement: each of G ranks holds chunks i and 2G-1-i of every sequence (Zeppelin, section
3.2; TE CP).

Chunks are near equal (their sizes differ by at most one token), so any length is legal without
padding. A sequence shorter than 2G tokens cannot give every rank two tokens: it is divided into 2p
chunks, p = max(1, length // 2), on p neighbouring ranks; each such sequence begins where the last
one ended, so that many short sequences do not pile up on the first ranks.

`ZigzagPattern` answers what the patterns with this placement have in common (`ring`, `all_gather`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import attrgetter

import numpy as np

from megatron_balance.ir.arrays import Bools, Ints, sums
from megatron_balance.ir.columns import Held
from megatron_balance.ir.intervals import ranges
from megatron_balance.ir.mask import CAUSAL, FULL, Mask
from megatron_balance.ir.plan import Zone
from megatron_balance.patterns.base import CommPattern, Context, Load, ZoneAt
from megatron_balance.patterns.rows import causal_pairs

_BLOCK = 1 << 20
"""Cells of (rank, sequence) worked on at once, which bounds memory."""

_LISTED = 1 << 12
"""Zones of at most this many cells are listed together, fragment by fragment: a plan may have a
zone for each rank.
"""

_BY_SEQUENCE = ("seqs", "lengths", "parts", "first")
"""Fields of `Zigzag` with an entry a sequence."""

_NARROW = 1 << 15
"""With fewer ranks, 2 G^2 fits 32 bits."""


@dataclass(frozen=True, slots=True)
class Zigzag:
    """The division of the sequences of one zone among its `size` ranks. Arrays over the zone's
    sequences.

    `parts[s]`: ranks that hold sequence s; `first[s]`: the group index of the rank that holds its
    chunk 0. `causal`: whether queries see no later keys (a sliding window is counted as causal: no
    program of it is made here, `compile.halo`); the mask is full otherwise.
    """

    size: int
    seqs: Ints
    lengths: Ints
    parts: Ints
    first: Ints
    causal: bool = True

    def position(self, index: Ints) -> Ints:
        """Place of group index `index` [..., 1] in each sequence's own order: [..., S]; >= parts:
        it holds nothing.
        """
        return (index - self.first) % self.size

    def lo(self, position: Ints) -> tuple[Ints, Ints]:
        """Start and stop of the chunk `position`."""
        return chunk(self.lengths, self.parts, position)

    def hi(self, position: Ints) -> tuple[Ints, Ints]:
        """Start and stop of the chunk 2 * parts - 1 - `position`."""
        return chunk(self.lengths, self.parts, 2 * self.parts - 1 - position)


def chunk(lengths: Ints, parts: Ints, number: Ints) -> tuple[Ints, Ints]:
    """Start and stop of the chunk `number` of sequences that `parts` ranks hold."""
    width, first = 2 * parts, lengths * number
    return first // width, (first + lengths) // width


def zigzag(lengths: Ints, seqs: Ints, size: int, mask: Mask = CAUSAL) -> Zigzag:
    """Divide `seqs` (ids into `lengths`) among `size` ranks."""
    own = lengths[seqs]
    return Zigzag(size, seqs, own, *holders(own, np.full(len(own), size), np.zeros_like(own)), mask != FULL)


def of_zone(zone: Zone, lengths: Ints, mask: Mask = CAUSAL) -> Zigzag:
    """Divide the sequences of a zone among its ranks."""
    return zigzag(lengths, np.array(zone.seqs, dtype=np.int64), len(zone.ranks), mask)


def holders(lengths: Ints, sizes: Ints, begin: Ints) -> tuple[Ints, Ints]:
    """`parts` and `first`, as in `Zigzag`, of the sequences of many zones, zone by zone.

    `sizes`: ranks of each one's zone; `begin`: the number of its zone's first sequence.
    """
    parts = np.minimum(np.maximum(lengths // 2, 1), sizes)
    held = np.where(parts < sizes, parts, 0)  # a sequence that all ranks hold begins at the first one
    before = held.cumsum() - held
    return parts, np.where(held > 0, before - before[begin], 0) % sizes


def tokens(lengths: Ints, size: int) -> Ints:
    """Tokens that each rank of a group of `size` holds of sequences divided among it: int64 [size].

    A closed form: placing all chunks of 1,024 ranks and summing them takes many times as long.
    """
    held = np.zeros(size, dtype=np.int64)
    parts, first = holders(lengths, np.full(len(lengths), size), np.zeros_like(lengths))
    step, short = max(1, _BLOCK // size), parts < size
    # All chunks have l / 2G tokens, rounded down, and some of the rest r: of two that lie alike
    # from both ends, where the one begins is rounded down and where the other ends is rounded up.
    # No more than 2 G^2 is counted with, so narrow numbers do, which divide faster.
    whole, width = lengths[~short], 2 * size
    held += 2 * (whole // width).sum()
    rest, edges = (
        (values % width).astype(np.uint32 if size < _NARROW else np.int64) for values in (whole, np.arange(size + 1))
    )
    for begin in range(0, len(whole), step):
        before = rest[begin : begin + step, None] * edges
        held += np.diff((before // width + (before + (width - 1)) // width).sum(axis=0, dtype=np.int64))
    # The others lie end to end, with a token a chunk; where tokens are odd in number, the last
    # chunk, which is on the rank that the first is on, has one more, and a lone token is alone.
    rounds, more = divmod(int(parts[short].sum()), size)
    held += 2 * (rounds + (np.arange(size) < more))
    np.add.at(held, first[short], np.where(lengths[short] == 1, -1, lengths[short] % 2))
    return held


def fragments(placed: Zigzag, index: int) -> Ints:
    """Rows (seq, start, stop) that group index `index` holds, sequence by sequence, low chunk
    first.
    """
    position = placed.position(np.array(index))
    lo0, lo1 = placed.lo(position)
    hi0, hi1 = placed.hi(position)
    rows = np.stack(
        [np.repeat(placed.seqs, 2), np.stack([lo0, hi0], 1).ravel(), np.stack([lo1, hi1], 1).ravel()], axis=1
    )
    return rows[np.repeat(position < placed.parts, 2) & (rows[:, 1] < rows[:, 2])]


def pairs_per_rank(placed: Zigzag) -> Ints:
    """Visible pairs of each group index, its queries with the keys that they see: int64 [G]."""
    size, short = placed.size, placed.parts < placed.size
    pairs = np.zeros(size, dtype=np.int64)
    if not placed.causal:
        for seq in range(0, len(placed.seqs), max(1, _BLOCK // size)):
            some = slice(seq, seq + max(1, _BLOCK // size))
            block = replace(placed, **{name: getattr(placed, name)[some] for name in _BY_SEQUENCE})
            position = block.position(np.arange(size)[:, None])
            (lo0, lo1), (hi0, hi1) = block.lo(position), block.hi(position)
            pairs += np.where(position < block.parts, (lo1 - lo0 + hi1 - hi0) * block.lengths, 0).sum(axis=1)
        return pairs
    # Sequences that all ranks hold: group index i holds the chunks between edges i and i + 1 from
    # both ends.
    edges, whole = np.arange(size + 1), placed.lengths[~short, None]
    step = max(1, _BLOCK // size)
    for begin in range(0, len(whole), step):
        block = whole[begin : begin + step]
        lo, hi = block * edges // (2 * size), block * (2 * size - edges) // (2 * size)
        pairs += np.diff((causal_pairs(lo) - causal_pairs(hi)).sum(axis=0))
    # Of the others a chunk is a token: each holder has queries p and 2 parts - 1 - p. The last
    # query of an odd number of tokens is on the first holder, too; a lone token is all of its
    # sequence.
    first, parts, length = placed.first[short], placed.parts[short], placed.lengths[short]
    steps = sums(first, np.where(length > 1, 2 * parts + 1, 0), 2 * size)
    steps -= sums(first + parts, np.where(length > 1, 2 * parts + 1, 0), 2 * size)
    pairs += np.cumsum(steps).reshape(2, size).sum(axis=0)  # holders are neighbours, the last rank's the first
    return pairs + sums(first, np.where(length % 2 == 1, length, 0), size)


def shared_tokens(placed: Zigzag) -> Ints:
    """Tokens of each group index of sequences that several ranks hold: int64 [G]."""
    held, alone = tokens(placed.lengths, placed.size), placed.parts == 1
    return held - sums(placed.first[alone], placed.lengths[alone], placed.size)


class ZigzagPattern(CommPattern[Zone]):
    """The common part of patterns whose zones are placed zigzag and whose queries stay where they
    are.
    """

    def ranks(self, zone: Zone, num_ranks: int) -> Sequence[int]:
        del num_ranks
        return zone.ranks

    def place(self, zone: Zone, lengths: Ints, rank: int) -> Ints:
        """Rows (seq, start, stop) of `rank` in this zone."""
        return fragments(of_zone(zone, lengths), zone.ranks.index(rank))

    def sends_on(self, held_by: Ints, position: Ints) -> tuple[Ints | int, Ints | int]:
        """Whether the first exchange sends the low and the high chunk of `position` on to one rank.

        `held_by`: ranks that hold the sequence.
        """
        del held_by, position
        return 0, 0

    def place_all(self, zones: Sequence[ZoneAt[Zone]], lengths: Ints, wanted: Bools) -> Ints:
        """Rows of `ir.columns.Held` on the ranks that are `wanted` [num_ranks]: zone by zone, each
        as listed.
        """
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
            rows = np.empty((len(member), 2, Held.WIDTH), dtype=np.int64)
            rows[:, :, Held.RANK], rows[:, :, Held.SEQ] = members[member, None], seqs[seq, None]
            rows[:, :, Held.ZONE] = index[member, None]
            rows[:, 0, Held.START], rows[:, 0, Held.STOP] = chunk(length, held_by, position)
            rows[:, 1, Held.START], rows[:, 1, Held.STOP] = chunk(length, held_by, 2 * held_by - 1 - position)
            rows[:, 0, Held.SENT_ON], rows[:, 1, Held.SENT_ON] = self.sends_on(held_by, position)
            tables.append(rows[(position < held_by)[:, None] & (rows[:, :, Held.START] < rows[:, :, Held.STOP])])
        return np.concatenate(tables)

    def tokens(self, zones: Sequence[Zone], context: Context) -> Ints:
        """Tokens that the zones place on each rank: int64 [num_ranks]."""
        small = [zone for zone in zones if len(zone.ranks) * len(zone.seqs) <= _LISTED]
        held = super().tokens(small, context)
        for zone in zones:
            if len(zone.ranks) * len(zone.seqs) > _LISTED:
                seqs = np.array(zone.seqs, dtype=np.int64)
                held[np.array(zone.ranks)] += tokens(context.lengths[seqs], len(zone.ranks))
        return held

    def sequences(self, zone: Zone, context: Context) -> Iterator[tuple[int, list[int]]]:
        """Each sequence with the ranks that hold some of it, ascending."""
        placed = of_zone(zone, context.lengths)
        for seq, first, parts in zip(zone.seqs, placed.first, placed.parts, strict=True):
            yield seq, sorted(zone.ranks[(int(first) + at) % placed.size] for at in range(int(parts)))

    def load(self, zones: Sequence[Zone], context: Context) -> Load:
        """Attention pairs and received tokens of the zones, over all ranks of the plan."""
        load = Load(context.num_ranks)
        local = [zone for zone in zones if len(zone.ranks) == 1]
        ranks = np.repeat([zone.ranks[0] for zone in local], [len(zone.seqs) for zone in local])
        seqs = np.fromiter(chain.from_iterable(zone.seqs for zone in local), np.int64, len(ranks))
        load.pairs += sums(ranks.astype(np.int64), context.mask.num_pairs(context.lengths[seqs]), context.num_ranks)
        for zone in zones:
            if len(zone.ranks) > 1:
                placed = of_zone(zone, context.lengths, context.mask)
                members = np.array(zone.ranks)
                load.pairs[members] += pairs_per_rank(placed)
                self.receive(load, members, placed, context)
        return load

    @abstractmethod
    def receive(self, load: Load, ranks: Ints, placed: Zigzag, context: Context) -> None:
        """Add what reaches the `ranks` of a zone of several."""
