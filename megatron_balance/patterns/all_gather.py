"""All-gather: every rank receives all keys and values that it lacks and attends once (LLaMA 3's
context parallelism; WLB-LLM, section 5).
"""

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import TypeAlias

import numpy as np

from megatron_balance.ir.arrays import Bools, Ints, Rectangles, as_rows, laid, num_pairs, sums
from megatron_balance.ir.columns import Fragment, Held
from megatron_balance.ir.plan import Zone
from megatron_balance.ir.program import Kind
from megatron_balance.patterns import base
from megatron_balance.patterns.sends import Blocks, Call, Sends, table_of
from megatron_balance.patterns.zigzag import Zigzag

# From lengths and the number of ranks to a table of chunks, by rank, then by place, then by start.
_Cut: TypeAlias = Callable[[Ints, int], Ints]

# Its columns: group index, place of the sequence in its zone, tokens.
_INDEX, _PLACE, _START, _STOP = range(4)


# The three patterns differ in how sequences are cut, all of them zigzag (`patterns.zigzag`):
# `all_gather` as rings do, the other two so that every rank has as many tokens as any other,
# `gather_documents` every sequence on its own, `gather_sequence` the sequences of the zone one after
# the other, in the zone's order. Sequences that one rank holds do not travel. In even chunks a zone
# has a token more on its first ranks where ranks cannot be even, so the next zone of a plan that is
# to be even begins with the ranks after those.
class _AllGather(base.CommPattern[Zone]):
    """One collective brings all keys and values; queries and outputs stay."""

    routing = "never"
    merges_remap = False
    traffic = base.GroupTraffic

    def __init__(self, cut: _Cut) -> None:
        self._cut = cut

    def chunks(self, zone: Zone, lengths: Ints) -> "_Chunks":
        # The zone's chunks; `lengths`: of all sequences of the microbatch.
        return _chunks(self._cut, zone.seqs, lengths[np.array(zone.seqs, dtype=np.int64)].tobytes(), len(zone.ranks))

    def ranks(self, zone: Zone, num_ranks: int) -> Sequence[int]:
        del num_ranks
        return zone.ranks

    def place(self, zone: Zone, lengths: Ints, rank: int) -> Ints:
        # Rows (seq, start, stop) of `rank`, sequence by sequence, low chunk first.
        return self.chunks(zone, lengths).held(zone.ranks.index(rank))

    def num_exchanges(self, zone: Zone) -> int:
        # One, where there are other ranks.
        return 1 if len(zone.ranks) > 1 else 0

    def sends(self, zone: Zone, context: base.Context, rank: int | None = None, *, across: bool = False) -> Sends:
        # Of every rank one block, to all the others.
        del across
        chunks, ranks = self.chunks(zone, context.lengths), np.array(zone.ranks)
        if rank is None:
            src, dst = np.arange(len(ranks)), -1
        else:  # what it sends to each other rank, then what each sends to it
            index = zone.ranks.index(rank)
            others = np.delete(np.arange(len(ranks)), index)
            src, to = np.append(np.full_like(others, index), others), np.append(others, np.full_like(others, index))
            dst = ranks[to]
        rows = table_of(0, ranks[src], dst, Kind.KV, 0, context.num_kv_heads, src, 0)
        calls = {0: Call("all_gather", tuple(sorted(zone.ranks)))} if chunks.shared.any() else {}
        return Sends(rows if calls else rows[:0], chunks.shared_tokens, chunks.shared_blocks, calls)

    def work(self, zone: Zone, context: base.Context, rank: int) -> Iterable[base.ZoneWork]:
        # Each chunk over its prefix.
        held = self.chunks(zone, context.lengths).held(zone.ranks.index(rank))
        yield base.ZoneWork(1, as_rows(base.prefix_pairs(held, context)))

    # Placement

    def place_all(self, zones: Sequence[base.ZoneAt[Zone]], lengths: Ints, wanted: Bools) -> Ints:
        tables: list[Ints] = [np.empty((0, Held.WIDTH), dtype=np.int64)]
        for index, zone in zones:
            chunks = self.chunks(zone, lengths)
            rank = np.array(zone.ranks)[chunks.index]
            there = wanted[rank]
            tables.append(base.held_rows(index, rank[there], chunks.fragments[there]))
        return np.concatenate(tables)

    # Plan statistics and traffic between nodes

    def attended(self, zones: Sequence[Zone], context: base.Context) -> Ints:
        pairs = np.zeros(context.num_ranks, dtype=np.int64)
        for zone in zones:
            chunks = self.chunks(zone, context.lengths)
            seq, start, stop = chunks.fragments.T
            every = Rectangles(start, stop, np.zeros_like(start), context.lengths[seq])
            pairs += sums(np.array(zone.ranks)[chunks.index], num_pairs(seq, every, context.mask), context.num_ranks)
        return pairs

    def largest_exchange(self, zone: Zone, context: base.Context) -> Ints:
        # All that others hold of what several ranks hold.
        shared = self.chunks(zone, context.lengths).shared_tokens()
        return (shared.sum() - shared) * context.num_kv_heads

    # Starting early

    def startable(self, zone: Zone) -> base.Startable:
        # The gather, and its replay.
        del zone
        return base.Startable(forward=(0,), replays=(0,))

    # Simulation

    def rounds(self, zone: Zone, context: base.Context) -> base.ZoneRounds:
        # One gather and one launch; on one rank the launch alone.
        chunks, size = self.chunks(zone, context.lengths), len(zone.ranks)
        each = [base.prefix_pairs(chunks.held(index), context) for index in range(size)]
        launch = np.repeat(np.arange(size), [len(pairs) for pairs in each])
        launches = base.Launches(np.concatenate(each), launch, np.zeros(size), np.arange(size)[:, None])
        token_heads = (chunks.shared_tokens() * context.num_kv_heads).astype(np.float64)
        blocks = np.repeat(token_heads[:, None], size, axis=1)
        traffic = base.GroupTraffic({Kind.KV: blocks}, {}, gathers=True) if size > 1 else None
        return base.ZoneRounds(np.array(zone.ranks), launches, traffic)


class _Chunks:
    """The chunks of a zone, by group index, then by place in the zone, then by start.

    `index` [n]: group index; `fragments` [n, 3]: rows (seq, start, stop); `shared` [n]: whether
    several ranks hold the sequence.
    """

    def __init__(self, table: Ints, seqs: Ints, size: int) -> None:
        self.index: Ints = table[:, _INDEX]
        self.fragments: Ints = np.column_stack([seqs[table[:, _PLACE]], table[:, _START], table[:, _STOP]])
        holders = table[
            np.append(True, (table[1:, : _PLACE + 1] != table[:-1, : _PLACE + 1]).any(axis=1))[: len(table)]
        ]
        self.shared: Bools = (np.bincount(holders[:, _PLACE], minlength=len(seqs)) > 1)[table[:, _PLACE]]
        self._bounds = np.searchsorted(self.index, np.arange(size + 1)).tolist()

    def held(self, index: int) -> Ints:
        # Rows (seq, start, stop) of a group index.
        return self.fragments[slice(*self._bounds[index : index + 2])]

    def shared_blocks(self) -> Blocks:
        before = np.append(0, np.cumsum(self.shared))
        return Blocks(self.fragments[self.shared], before[self._bounds])

    def shared_tokens(self) -> Ints:
        # Tokens of each group index of sequences that several ranks hold: int64 [G].
        tokens = (self.fragments[:, Fragment.STOP] - self.fragments[:, Fragment.START])[self.shared]
        return sums(self.index[self.shared], tokens, len(self._bounds) - 1)


@lru_cache(maxsize=64)
def _chunks(cut: _Cut, seqs: tuple[int, ...], lengths: bytes, size: int) -> _Chunks:
    # `lengths`: int64, of `seqs`. All ranks of a zone are asked for one after another.
    return _Chunks(cut(np.frombuffer(lengths, dtype=np.int64), size), np.array(seqs, dtype=np.int64), size)


# Chunks of the three patterns


def _of_ring(lengths: Ints, size: int) -> Ints:
    # As rings have them.
    placed = Zigzag.of(lengths, np.arange(len(lengths)), size)
    index = np.arange(size)[:, None]
    position = placed.position(index)
    rows = np.empty((*position.shape, 2, 4), dtype=np.int64)
    rows[..., _INDEX], rows[..., _PLACE] = index[..., None], placed.seqs[:, None]
    for of_chunk, bounds in zip((0, 1), (placed.lo(position), placed.hi(position)), strict=True):
        rows[:, :, of_chunk, _START], rows[:, :, of_chunk, _STOP] = bounds
    return rows[(position < placed.parts)[..., None] & (rows[..., _START] < rows[..., _STOP])]


def _mirrored_edges(lengths: Ints, dealt: Ints, size: int) -> Ints:
    # Where the 2G chunks of each length begin and end: int64 [S, 2G + 1].
    #
    # `dealt` [S]: tokens left over that were dealt before. The n-th one goes to group index n mod
    # G: to its high chunk in even turns (n // G), to its low chunk in odd ones. So a round of 2G of
    # them goes to chunks 2G - 1, ..., G, 0, ..., G - 1.
    width = 2 * size
    whole, over = np.divmod(lengths, width)
    first = (dealt % width)[:, None]
    last = first + over[:, None]
    chunk = np.arange(width + 1)
    # Those in chunks below `chunk`: of the turn of low chunks the first ones, of high chunks the last.
    begin, end = np.where(chunk <= size, size, width - chunk), np.where(chunk <= size, size + chunk, width)
    below = sum(np.maximum(np.minimum(last, end + turn) - np.maximum(first, begin + turn), 0) for turn in (0, width))
    return whole[:, None] * chunk + below


def _of_documents(lengths: Ints, size: int) -> Ints:
    # Each of `lengths` on its own.
    over = lengths % (2 * size)
    edges = _mirrored_edges(lengths, np.cumsum(over) - over, size)
    index, place = np.arange(size), np.arange(len(lengths))
    rows = np.empty((size, len(lengths), 2, 4), dtype=np.int64)
    rows[..., _INDEX], rows[..., _PLACE] = index[:, None, None], place[:, None]
    rows[:, :, 0, _START], rows[:, :, 0, _STOP] = edges[:, index].T, edges[:, index + 1].T
    rows[:, :, 1, _START], rows[:, :, 1, _STOP] = edges[:, 2 * size - 1 - index].T, edges[:, 2 * size - index].T
    # The two chunks of the last rank touch: one fragment.
    rows[-1, :, 0, _STOP] = rows[-1, :, 1, _STOP]
    rows[-1, :, 1, _START] = rows[-1, :, 1, _STOP]
    table = rows.reshape(-1, 4)
    return table[table[:, _START] < table[:, _STOP]]


def _of_sequence(lengths: Ints, size: int) -> Ints:
    # `lengths` one after the other.
    total = lengths.sum(keepdims=True)
    edges = _mirrored_edges(total, np.zeros_like(total), size)[0]
    rows = laid(lengths, np.delete(edges, size))  # the two chunks of the last rank touch: one fragment
    rows[:, _INDEX] = np.minimum(rows[:, _INDEX], 2 * size - 2 - rows[:, _INDEX])
    return rows[np.argsort(rows[:, _INDEX], kind="stable")]


ALL_GATHER, GATHER_DOCUMENTS, GATHER_SEQUENCE = map(_AllGather, (_of_ring, _of_documents, _of_sequence))
