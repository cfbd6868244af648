"""Blocks of keys and values that go round a ring of groups, one hop a round, while queries stay (Ring
Attention; Zeppelin, section 3.2); comm pattern `patterns.head_ring`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from megatron_balance.ir.arrays import Ints, as_array, sums
from megatron_balance.ir.columns import Pair, Rows, Value
from megatron_balance.ir.program import Kind
from megatron_balance.patterns.base import Floats, Launches
from megatron_balance.patterns.head_exchange import HeadSlice
from megatron_balance.patterns.sends import Blocks, split_rows
from megatron_balance.patterns.zigzag import Zigzag, shared_tokens

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
