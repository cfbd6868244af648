"""Zigzag placement: each rank of a group of G holds chunk i and chunk 2G-1-i of every sequence (Zeppelin, section 3.2; TE CP).

Chunks are near equal (their sizes differ by at most one token), so any length is legal without padding. A sequence shorter
than 2G tokens cannot give every rank two tokens: it is cut into 2p chunks, p = max(1, length // 2), on p neighbouring ranks;
each such sequence begins where the last one ended, so that many short sequences do not pile up on the first ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_balance.ir.arrays import Ints

_BLOCK = 1 << 20
"""Cells of (rank, sequence) worked on at once, which bounds memory."""

_NARROW = 1 << 15
"""With fewer ranks, 2 G^2 fits 32 bits."""


@dataclass(frozen=True, slots=True)
class Zigzag:
    """How the sequences of one zone are cut over its `size` ranks. Arrays over the zone's sequences.

    `parts[s]`: ranks that hold sequence s; `first[s]`: the group index of the rank that holds its chunk 0.
    """

    size: int
    seqs: Ints
    lengths: Ints
    parts: Ints
    first: Ints

    def position(self, index: Ints) -> Ints:
        """Where group index `index` [..., 1] stands in each sequence's own order: [..., S]; >= parts: it holds nothing."""
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


def zigzag(lengths: Ints, seqs: Ints, size: int) -> Zigzag:
    """Cut `seqs` (ids into `lengths`) over `size` ranks."""
    own = lengths[seqs]
    return Zigzag(size, seqs, own, *cut(own, np.full(len(own), size), np.zeros_like(own)))


def cut(lengths: Ints, sizes: Ints, begin: Ints) -> tuple[Ints, Ints]:
    """`parts` and `first`, as in `Zigzag`, of the sequences of many zones, zone by zone.

    `sizes`: ranks of each one's zone; `begin`: the number of its zone's first sequence.
    """
    parts = np.minimum(np.maximum(lengths // 2, 1), sizes)
    held = np.where(parts < sizes, parts, 0)  # a sequence that all ranks hold begins at the first one
    before = held.cumsum() - held
    return parts, np.where(held > 0, before - before[begin], 0) % sizes


def tokens(lengths: Ints, size: int) -> Ints:
    """Tokens that each rank of a group of `size` holds of sequences cut over it: int64 [size]."""
    found = np.zeros(size, dtype=np.int64)
    parts, first = cut(lengths, np.full(len(lengths), size), np.zeros_like(lengths))
    step, short = max(1, _BLOCK // size), parts < size
    # All chunks have l / 2G tokens, rounded down, and some of the rest r: of two that lie alike from both ends, where the one begins is
    # rounded down and where the other ends is rounded up. No more than 2 G^2 is counted with, so narrow numbers do, which divide faster.
    whole, width = lengths[~short], 2 * size
    found += 2 * (whole // width).sum()
    rest, edges = ((values % width).astype(np.uint32 if size < _NARROW else np.int64) for values in (whole, np.arange(size + 1)))
    for begin in range(0, len(whole), step):
        before = rest[begin : begin + step, None] * edges
        found += np.diff((before // width + (before + (width - 1)) // width).sum(axis=0, dtype=np.int64))
    # The others lie end to end, with a token a chunk; where tokens are odd in number, the last chunk, which is owned by the ranks that the first
    # is, has one more, and a lone token is alone.
    rounds, more = divmod(int(parts[short].sum()), size)
    found += 2 * (rounds + (np.arange(size) < more))
    np.add.at(found, first[short], np.where(lengths[short] == 1, -1, lengths[short] % 2))
    return found


def fragments(cut: Zigzag, index: int) -> Ints:
    """Rows (seq, start, stop) that group index `index` holds, sequence by sequence, low chunk first."""
    position = cut.position(np.array(index))
    lo0, lo1 = cut.lo(position)
    hi0, hi1 = cut.hi(position)
    rows = np.stack([np.repeat(cut.seqs, 2), np.stack([lo0, hi0], 1).ravel(), np.stack([lo1, hi1], 1).ravel()], 1)
    return rows[np.repeat(position < cut.parts, 2) & (rows[:, 1] < rows[:, 2])]
