"""Zigzag placement: rank i of G holds chunks i and 2G-1-i (Zeppelin, section 3.2; TE CP)."""

from dataclasses import dataclass, replace

import numpy as np

from megatron_balance.ir.arrays import Ints, sums
from megatron_balance.ir.mask import CAUSAL, FULL, Mask

# Cells of (rank, sequence) worked on at once, which bounds memory.
_BLOCK = 1 << 20

# Fields of `Zigzag` with an entry a sequence.
_BY_SEQUENCE = ("seqs", "lengths", "parts", "first")

# With fewer ranks, 2 G^2 fits 32 bits.
_NARROW = 1 << 15


# Chunks are near equal (their sizes differ by at most one token), so any length is legal without
# padding. A sequence shorter than 2G tokens cannot give every rank two tokens: it is divided into
# 2p chunks, p = max(1, length // 2), on p neighbouring ranks; each such sequence begins where the
# last one ended, so that many short sequences do not pile up on the first ranks.
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

    @classmethod
    def of(cls, lengths: Ints, seqs: Ints, size: int, mask: Mask = CAUSAL) -> "Zigzag":
        """Divide `seqs` (ids into `lengths`) among `size` ranks."""
        own = lengths[seqs]
        return cls(size, seqs, own, *holders(own, np.full(len(own), size), np.zeros_like(own)), mask != FULL)

    def position(self, index: Ints) -> Ints:
        """Place of group index [..., 1] in each sequence's order [..., S]; >= parts: none."""
        return (index - self.first) % self.size

    def lo(self, position: Ints) -> tuple[Ints, Ints]:
        """Start and stop of the chunk `position`."""
        return chunk(self.lengths, self.parts, position)

    def hi(self, position: Ints) -> tuple[Ints, Ints]:
        """Start and stop of the chunk 2 * parts - 1 - `position`."""
        return chunk(self.lengths, self.parts, 2 * self.parts - 1 - position)

    def fragments(self, index: int) -> Ints:
        """Rows (seq, start, stop) of group index `index`, by sequence, low chunk first."""
        position = self.position(np.array(index))
        lo0, lo1 = self.lo(position)
        hi0, hi1 = self.hi(position)
        rows = np.stack(
            [np.repeat(self.seqs, 2), np.stack([lo0, hi0], 1).ravel(), np.stack([lo1, hi1], 1).ravel()], axis=1
        )
        return rows[np.repeat(position < self.parts, 2) & (rows[:, 1] < rows[:, 2])]

    def pairs_per_rank(self) -> Ints:
        """Visible pairs of each group index, its queries with the keys that they see: int64 [G]."""
        size, short = self.size, self.parts < self.size
        pairs = np.zeros(size, dtype=np.int64)
        if not self.causal:
            for seq in range(0, len(self.seqs), max(1, _BLOCK // size)):
                some = slice(seq, seq + max(1, _BLOCK // size))
                block = replace(self, **{name: getattr(self, name)[some] for name in _BY_SEQUENCE})
                position = block.position(np.arange(size)[:, None])
                (lo0, lo1), (hi0, hi1) = block.lo(position), block.hi(position)
                pairs += np.where(position < block.parts, (lo1 - lo0 + hi1 - hi0) * block.lengths, 0).sum(axis=1)
            return pairs
        # Sequences that all ranks hold: group index i holds the chunks between edges i and i + 1 from
        # both ends.
        edges, whole = np.arange(size + 1), self.lengths[~short, None]
        step = max(1, _BLOCK // size)
        for begin in range(0, len(whole), step):
            block = whole[begin : begin + step]
            lo, hi = block * edges // (2 * size), block * (2 * size - edges) // (2 * size)
            pairs += np.diff((CAUSAL.num_pairs(lo) - CAUSAL.num_pairs(hi)).sum(axis=0))
        # Of the others a chunk is a token: each holder has queries p and 2 parts - 1 - p. The last
        # query of an odd number of tokens is on the first holder, too; a lone token is all of its
        # sequence.
        first, parts, length = self.first[short], self.parts[short], self.lengths[short]
        steps = sums(first, np.where(length > 1, 2 * parts + 1, 0), 2 * size)
        steps -= sums(first + parts, np.where(length > 1, 2 * parts + 1, 0), 2 * size)
        pairs += np.cumsum(steps).reshape(2, size).sum(axis=0)  # holders are neighbours, the last rank's the first
        return pairs + sums(first, np.where(length % 2 == 1, length, 0), size)

    def shared_tokens(self) -> Ints:
        """Tokens of each group index of sequences that several ranks hold: int64 [G]."""
        held, alone = tokens(self.lengths, self.size), self.parts == 1
        return held - sums(self.first[alone], self.lengths[alone], self.size)


def chunk(lengths: Ints, parts: Ints, number: Ints) -> tuple[Ints, Ints]:
    """Start and stop of the chunk `number` of sequences that `parts` ranks hold."""
    width, first = 2 * parts, lengths * number
    return first // width, (first + lengths) // width


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
