"""Blocks of keys and values that go round a ring of groups, one hop a round, while queries stay (Ring
Attention; Zeppelin, section 3.2); comm pattern `patterns.head_ring`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_balance.ir.arrays import Ints, as_array, sums
from megatron_balance.ir.columns import Pair, Rows, Value
from megatron_balance.ir.mask import CAUSAL, FULL, Mask
from megatron_balance.ir.program import Kind
from megatron_balance.patterns.base import Floats, Launches
from megatron_balance.patterns.head_exchange import HeadSlice
from megatron_balance.patterns.sends import Blocks, split_rows

# Round t of G: group i attends to the block that started at group i - t. A fragment goes round only
# as far as some group still needs it. A replayed backward turns the other way, so that the block
# needed last in the forward pass, which the backward needs first, comes from its own group, and its
# gradient walks the forward path back. Placement is zigzag (`patterns.zigzag`).

# Rings of more cells (rank, round, sequence) are simulated by kind of launch, all others launch by
# launch.
_EXACT = 1 << 18

# About so many rows are made at once, which keeps them in the cache.
_ROWS = 1 << 14


def hops_of(placed: Zigzag, *, back: bool = False) -> Blocks:
    """The block of each group index, with the hops that its rows make, turning forward or `back`."""
    position = placed.position(np.arange(placed.size)[:, None])
    lo, hi = placed.lo(position), placed.hi(position)
    rows = np.empty((*position.shape, 2, 3), dtype=np.int64)
    rows[..., 0] = placed.seqs[:, None]
    rows[..., 0, 1], rows[..., 0, 2], rows[..., 1, 1], rows[..., 1, 2] = *lo, *hi
    reach = np.stack((_reach_backward if back else _reach_forward)(placed, position), 2)
    reach[(position >= placed.parts)[..., None] | (rows[..., 1] == rows[..., 2])] = 0
    begin = np.arange(placed.size + 1) * 2 * len(placed.seqs)
    return Blocks(rows.reshape(-1, 3), begin, reach.ravel())


def _reach_forward(placed: Zigzag, position: Ints) -> tuple[Ints, Ints]:
    """Hops [..., S] that the low and the high chunk of a position make, turning forward."""
    # The low chunk at position j is needed by all other positions, the high one by those below j;
    # turning forward, the last position before j again is j - 1. Position 0 has none behind it: its
    # low chunk ends at the last position and its high chunk stays. Under a full mask both are
    # needed by all.
    first = position == 0
    low = np.where(first, placed.parts - 1, placed.size - 1)
    return low, np.where(first, 0, placed.size - 1) if placed.causal else low


def _reach_backward(placed: Zigzag, position: Ints) -> tuple[Ints, Ints]:
    """Hops [..., S] that both chunks make, turning the other way."""
    # High chunks end at position 0; low ones, and under a full mask both, go on to position j + 1
    # if there is one.
    last = position >= placed.parts - 1
    low = np.where(last, position, placed.size - 1)
    return low, position if placed.causal else low


def _in_turns(counts: Ints) -> Iterator[tuple[slice, slice]]:
    # Rounds and their rows interleaved of not much more than `_ROWS` rows; `counts`: rows of each
    # round.
    ends = np.append(0, counts.cumsum())
    step = max(1, _ROWS * len(counts) // max(1, int(ends[-1])))
    for first in range(0, len(counts), step):
        last = min(first + step, len(counts))
        yield slice(first, last), slice(int(ends[first]), int(ends[last]))


_CAUSAL = np.array([(0, 0), (1, 0), (1, 1)])
# (query chunk, key chunk) that may be visible; chunk 0 is the low one.
_FULL = np.array([(0, 0), (0, 1), (1, 0), (1, 1)])


def attention(placed: Zigzag, index: int, slices: Sequence[HeadSlice]) -> tuple[list[bytes], list[bytes]]:
    """By round: pairs of a rank of group `index` with `slices` of the heads, and queries to merge."""
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
    for block, chosen in _in_turns(of_round):
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


def _of_each(pairs: bytes, slices: Sequence[HeadSlice]) -> bytes:
    if len(slices) == 1:
        return pairs
    rows = np.repeat(as_array(Rows(Pair.WIDTH, pairs))[None], len(slices), axis=0)
    heads = np.array(slices, dtype=np.int64)[:, None]
    rows[:, :, Pair.Q_HEADS], rows[:, :, Pair.KV_HEADS] = heads[:, :, :2], heads[:, :, 2:]
    return rows.tobytes()


# All ranks at once: blocks that walk


def forward_hops(placed: Zigzag) -> Ints:
    """Tokens [G, G] of each group index's block in its n-th hop, turning forward; hop 0 is none."""
    # All that several ranks hold goes all the way round, but for the chunks of position 0
    # (`_reach_forward`).
    size, several = placed.size, placed.parts > 1
    first = np.zeros_like(placed.lengths)
    (lo0, lo1), (hi0, hi1) = placed.lo(first), placed.hi(first)
    high = hi1 - hi0
    stays = sums(placed.first[several], high[several] * placed.causal, size)
    gone = np.zeros((size, size + 1), dtype=np.int64)
    np.add.at(gone, (placed.first[several], placed.parts[several]), (lo1 - lo0 + high * (not placed.causal))[several])
    tokens = (shared_tokens(placed) - stays)[:, None] - np.cumsum(gone[:, :size], axis=1)
    tokens[:, 0] = 0
    return tokens


def arriving(placed: Zigzag) -> Ints:
    """Tokens [G, G] that each hop brings each group index, turning forward; hop 0 is none."""
    hops = np.arange(placed.size)
    return forward_hops(placed)[(hops[:, None] - hops) % placed.size, hops]


def walks(placed: Zigzag) -> tuple[Ints, Ints]:
    """Tokens [G, G] of each group index's block in its n-th hop, turning forward and the other way."""
    position = placed.position(np.arange(placed.size)[:, None])
    there = position < placed.parts
    lo, hi = (np.where(there, stop - start, 0) for start, stop in (placed.lo(position), placed.hi(position)))
    lo_reach, hi_reach = _reach_backward(placed, position)
    return forward_hops(placed), _walked(lo, lo_reach) + _walked(hi, hi_reach)


def _walked(tokens: Ints, reach: Ints) -> Ints:
    # Tokens [G, S] summed over sequences in each hop [G, G] up to their reach; hop 0 is none.
    size = len(tokens)
    place = np.arange(size)[:, None] * (size + 1) + np.minimum(reach, size - 1) + 1
    gone = np.bincount(place.ravel(), weights=tokens.ravel(), minlength=size * (size + 1)).reshape(size, size + 1)
    moved = tokens.sum(axis=1)[:, None] - np.cumsum(gone.astype(np.int64), axis=1)[:, :size]
    moved[:, 0] = 0
    return moved


# All ranks at once: launches


def ring_launches(placed: Zigzag, heads: tuple[int, int]) -> Launches:
    """The launches of every (group index, round); `heads`: of queries and of keys."""
    exact = placed.size**2 * max(1, len(placed.seqs)) <= _EXACT
    return _each_launch(placed, heads) if exact else launches_by_kind(placed, heads)


def _each_launch(placed: Zigzag, heads: tuple[int, int]) -> Launches:
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
    return Launches(np.concatenate(pairs), np.concatenate(launch), merging, np.arange(size * size).reshape(size, size))


_LO, _HI, _KEYS, _KEYS_HI = 4, 6, 0, 2  # where chunks of a kind begin, in chunks


def launches_by_kind(placed: Zigzag, heads: tuple[int, int]) -> Launches:
    """As `ring_launches`, one launch of each kind: by whose keys come first, and how many short
    sequences both ranks hold.
    """
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
    kinds, which = np.unique(
        kind * (together.max(initial=0) + 1) + together[index[:, None], source], return_inverse=True
    )
    order, shared = np.divmod(kinds, together.max(initial=0) + 1)
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
    merging: Floats = (order > 0).astype(np.float64)
    return Launches(np.concatenate(pairs), np.concatenate(launch), merging, which.reshape(size, size))


# Zigzag placement: each of G ranks holds chunks i and 2G-1-i of every sequence (Zeppelin, section
# 3.2; TE CP).

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


def chunks(lengths: Ints, size: int) -> Ints:
    """The chunks of `lengths` on all ranks: a table as `of_documents` makes it."""
    placed = zigzag(lengths, np.arange(len(lengths)), size)
    index = np.arange(size)[:, None]
    position = placed.position(index)
    rows = np.empty((*position.shape, 2, 4), dtype=np.int64)
    rows[..., INDEX], rows[..., PLACE] = index[..., None], placed.seqs[:, None]
    for of_chunk, bounds in zip((0, 1), (placed.lo(position), placed.hi(position)), strict=True):
        rows[:, :, of_chunk, START], rows[:, :, of_chunk, STOP] = bounds
    return rows[(position < placed.parts)[..., None] & (rows[..., START] < rows[..., STOP])]


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
        pairs += np.diff((CAUSAL.num_pairs(lo) - CAUSAL.num_pairs(hi)).sum(axis=0))
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


# Columns of a table of chunks: group index, place of the sequence in its zone, tokens.
INDEX, PLACE, START, STOP = range(4)


def _mirrored_edges(lengths: Ints, dealt: Ints, size: int) -> Ints:
    """Where the 2G chunks of each length begin and end: int64 [S, 2G + 1].

    `dealt` [S]: tokens left over that were dealt before. The n-th one goes to group index n mod G:
    to its high chunk in even turns (n // G), to its low chunk in odd ones. So a round of 2G of them
    goes to chunks 2G - 1, ..., G, 0, ..., G - 1.
    """
    width = 2 * size
    whole, over = np.divmod(lengths, width)
    first = (dealt % width)[:, None]
    last = first + over[:, None]
    chunk = np.arange(width + 1)
    # Those in chunks below `chunk`: of the turn of low chunks the first ones, of high chunks the last.
    begin, end = np.where(chunk <= size, size, width - chunk), np.where(chunk <= size, size + chunk, width)
    below = sum(np.maximum(np.minimum(last, end + turn) - np.maximum(first, begin + turn), 0) for turn in (0, width))
    return whole[:, None] * chunk + below


def of_documents(lengths: Ints, size: int) -> Ints:
    """Chunks of each of `lengths` on its own: rows (group index, place, start, stop), by rank, then
    by place, then by start.
    """
    over = lengths % (2 * size)
    edges = _mirrored_edges(lengths, np.cumsum(over) - over, size)
    index, place = np.arange(size), np.arange(len(lengths))
    rows = np.empty((size, len(lengths), 2, 4), dtype=np.int64)
    rows[..., INDEX], rows[..., PLACE] = index[:, None, None], place[:, None]
    rows[:, :, 0, START], rows[:, :, 0, STOP] = edges[:, index].T, edges[:, index + 1].T
    rows[:, :, 1, START], rows[:, :, 1, STOP] = edges[:, 2 * size - 1 - index].T, edges[:, 2 * size - index].T
    # The two chunks of the last rank touch: one fragment.
    rows[-1, :, 0, STOP] = rows[-1, :, 1, STOP]
    rows[-1, :, 1, START] = rows[-1, :, 1, STOP]
    table = rows.reshape(-1, 4)
    return table[table[:, START] < table[:, STOP]]


def of_sequence(lengths: Ints, size: int) -> Ints:
    """Chunks of `lengths` one after the other; as `of_documents`."""
    ends = np.cumsum(lengths)
    total = ends[-1:] if len(ends) else np.zeros(1, dtype=np.int64)
    edges = _mirrored_edges(total, np.zeros_like(total), size)[0]
    bounds = np.delete(edges, size)  # the two chunks of the last rank touch: one fragment
    cuts = np.unique(np.concatenate([bounds, ends]))
    begin, end = cuts[:-1], cuts[1:]
    place = np.searchsorted(ends, begin, side="right")
    chunk = np.searchsorted(bounds, begin, side="right") - 1
    before = (ends - lengths)[place]
    rows = np.column_stack([np.minimum(chunk, 2 * size - 2 - chunk), place, begin - before, end - before])
    return rows[np.argsort(rows[:, INDEX], kind="stable")]
