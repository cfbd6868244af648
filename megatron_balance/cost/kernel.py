"""The attention kernels as tiles: how much work a launch is on a GPU, by library (`KernelLaw`).

A flash attention kernel gives each thread block one tile of queries of one head, which walks over
the tiles of keys that they may see. Tiles are computed whole: the last one of a run is padded
(WLB-LLM, section 5.2; DistCA, section 3.3), and on the diagonal half of one is thrown away. Before
and after the walk a block loads its queries and writes its output; over short keys this is what
counts. All counts are of one head.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from megatron_balance.ir.arrays import Floats, Ints, key, sees
from megatron_balance.ir.columns import Pair, Region
from megatron_balance.ir.mask import CAUSAL, Band, Mask

# Side of the tiles, of queries and of keys (WLB-LLM, section 5.2: "In FlashAttention's forward
# kernel the tile size is 128").
TILE_TOKENS = 128

# Cost of a thread block beside its tiles, in tiles of 128 x 128: the kernel is less efficient on
# short runs of keys.
#
# Least squares of 1 + BLOCK_TILES x 128 / l against the relative time a pair takes in the forward
# kernel of FlashAttention-2, heads of 128, no mask, on an H100: 309, 350, 362, 368, 370, 370
# TFLOP/s for l = 512, 1k, 2k, 4k, 8k, 16k (FlashAttention-3, arXiv 2407.08608, Figure 5). No mask:
# the diagonal plays no part.
BLOCK_TILES = 0.7

# Head dims that the kernels' libraries take are multiples of it; others are padded by copies, as in
# `runtime.kernels.PaddedKernel`.
_HEAD_DIM_MULTIPLE = 8

# Head dims are padded to a multiple of this: FlashAttention-2 rounds up to the next kernel it was
# built for (32, 64, 96, 128, ...).
_HEAD_DIM_STEP = 32

# Five matrix products a tile instead of two (FlashAttention-2, arXiv 2307.08691, section 4.1).
_BACKWARD_FLOPS = 2.5

# Share of the forward kernel's rate that the backward kernel reaches: 63 % against 73 % of an
# A100's peak (the same, section 1).
_BACKWARD_EFFICIENCY = 63 / 73


@dataclass(frozen=True, slots=True)
class KeyBlocks:
    """A backward kernel that gives each thread block one tile of keys of one query head.

    `queries`: of a tile that such a block walks over, `full_queries` where its entry has no mask;
    `block_tiles`: its cost beside these, in tiles of 128 x 128. `query_bytes`, `key_bytes`: memory
    traffic before and after the kernel, an element of queries and, where heads share keys, of keys,
    of keys once for each query head, and of 128 rows of keys more for each entry. Its grid has
    blocks for the longest keys of a launch for each of its entries; `empty_s`: seconds that an SM
    spends on one that finds no work.

    Prices of buckets of entries in launches of their own (`by_key_length`), in such blocks:
    `launch_blocks` of one more launch, `copy_blocks` of 128 rows of a head that are gathered for it
    and whose gradients are put back.
    """

    queries: int
    full_queries: int
    block_tiles: float
    query_bytes: int
    key_bytes: tuple[int, int, int]
    empty_s: float
    launch_blocks: int
    copy_blocks: int


@dataclass(frozen=True, slots=True)
class KernelLaw:
    """How the kernels of a library spend their time.

    `block_tiles`: a forward thread block's cost beside its tiles, in tiles. `packs_heads`: whether the
    query heads of a key head share tiles forward, where lengths vary. `backward_share`: rate of the
    backward kernel over the forward one's. `key_blocks`: of a backward over blocks of keys; None: it
    is counted as the forward is, by blocks of queries. `forward_empty_s`: `KeyBlocks.empty_s` of a
    forward whose grid has blocks for the longest queries of a launch for each of its entries.
    """

    block_tiles: float = BLOCK_TILES
    packs_heads: bool = False
    backward_share: float = _BACKWARD_EFFICIENCY
    key_blocks: KeyBlocks | None = None
    forward_empty_s: float = 0.0

    @property
    def backward_factor(self) -> float:
        """Time of a tile backward over forward."""
        return _BACKWARD_FLOPS / self.backward_share


# By library; others are as FlashAttention-2's forward: cuDNN's grids are not published, and
# Transformer Engine hands `max_seqlen` to them.
#
# FlashAttention-3 (Dao-AILab/flash-attention, hopper/). Derived: rate, `block_tiles` and
# `backward_share` by least squares on MagiAttention's kernel charts (H100, 64:8 heads of 128, one
# document, full and causal; forward 2k to 32k, backward 1k to 32k; rms 2.2 and 2.9 %): forward
# blocks are persistent, so that one's output is written while the next one's tiles run. Published:
# where lengths vary, heads are packed (heuristics.h); the backward has tiles of 64 x 128 under a
# mask, of 80 x 128 without one, and a grid of ceil(max_k / 128) x heads x entries
# (flash_bwd_launch_template.h); `query_bytes` are the output and its gradient read, the fp32 sum of
# query gradients cleared, read and written as bf16, `key_bytes` two fp32 sums cleared, with a block
# more for each entry (flash_api.cpp), read, and written as bf16. Estimated: `empty_s`, 900 cycles
# of start, barriers, two dependent reads of the offsets, and end. On 132 SMs as many are
# `launch_blocks` as take an attention launch and the host's (10 + 30 us, `analytic.LAUNCH_S` and
# the presets' `host_launch_s`), and `copy_blocks` as take 128 rows of 128 in bf16 at 2.65 TB/s: q,
# the output and its gradient, or k and v, read and written; gradients, too.
#
# FlashAttention-2 (csrc/flash_attn/src/). Published: the same tiles and grid of the backward
# (flash_bwd_launch_template.h; with deterministic algorithms fewer blocks, each of several tiles of
# keys), `query_bytes`, as above, of the kernels before and after it; `key_bytes`, gradients in bf16
# for each query head that are read and summed (flash_api.cpp). Derived: `backward_share` and
# `block_tiles` by least squares on 214, 260, 291, 310, 318, 322 TFLOP/s for l = 512, 1k, 2k, 4k, 8k,
# 16k (H100, heads of 128, no mask; arXiv 2407.08608, Figure 6; rms 0.4 %). Published, too: the
# forward's grid of ceil(max_q / 128) x entries x heads (flash_fwd_launch_template.h), whose blocks
# past an entry's end return once they have read its offsets (flash_fwd_kernel.h). Estimated:
# `empty_s` of both, as FlashAttention-3's.
LAWS = {
    "flash_attn": KernelLaw(
        backward_share=0.89,
        key_blocks=KeyBlocks(64, 64, 0.8, 14, (4, 4, 0), 0.5e-6, 10_560, 26),
        forward_empty_s=0.5e-6,
    ),
    "flash_attn_3": KernelLaw(0.5, True, 0.89, KeyBlocks(64, 80, 2.8, 14, (20, 0, 8), 0.5e-6, 10_560, 26)),
}
LAWS["torch_varlen"] = LAWS["flash_attn"]  # built into torch
_TILED = KernelLaw()


def law_of(library: str | None) -> KernelLaw:
    """The law of an attention library by its name in `runtime.kernels`; of unknown ones, and of none,
    FlashAttention-2's forward with a backward over blocks of queries.
    """
    return LAWS.get(library or "", _TILED)


def tiles(pairs: Ints, mask: Mask = CAUSAL, tokens: int = TILE_TOKENS) -> tuple[Ints, Ints, Ints]:
    """Tiles, thread blocks, and tiles of the longest block [n] of each `Pair` row [n, 9], one head;
    tiles of `tokens` queries, a divisor of `TILE_TOKENS`, by `TILE_TOKENS` keys.

    Causal: the query at position p sees the keys at [k_start, min(p + 1, k_stop)), so a region may
    be full, causal or neither. A window leaves out tiles at the other side, too.
    """
    (q_start, q_stop), (k_start, k_stop) = pairs[:, Pair.Q_SPAN].T, pairs[:, Pair.K_SPAN].T
    num_q, num_k, behind = q_stop - q_start, k_stop - k_start, q_start - k_start
    blocks, widest, parts = -(-num_q // tokens), -(-num_k // TILE_TOKENS), TILE_TOKENS // tokens
    causal, reach = band = _band(pairs, mask)
    if causal is False and not band.windowed:
        return blocks * widest, blocks, widest
    before = -(-behind // tokens)
    last = _between(-(-(behind + num_q) // TILE_TOKENS), widest)  # the last block need not be full
    # Block b walks min(ceil((before + b) / parts), widest) tiles, b = 1 .. blocks - 1; the last one is
    # counted apart.
    walked = _stepped_sum(before + blocks - 1, widest, parts) - _stepped_sum(before, widest, parts) + last
    if causal is not True:
        walked, last = np.where(causal, walked, blocks * widest), np.where(causal, last, widest)
    if band.windowed:
        # Whole tiles before the first key of a block's first query are left out, floor(y / parts) of
        # them, which is ceil((y - parts + 1) / parts).
        first = (behind - reach + 1) // tokens
        stops = first + blocks - parts, first - parts
        walked = walked - (_stepped_sum(stops[0], widest, parts) - _stepped_sum(stops[1], widest, parts))
        most = np.where(causal, (before - 1 - first) // parts + 2, widest)  # where a block straddles most tiles
        last = np.minimum(last, most)
    return walked, blocks, last


def _band(pairs: Ints, mask: Mask) -> Band:
    return mask.band(pairs[:, Pair.SEQ], pairs[:, Pair.Q_START], pairs[:, Pair.K_START])


def _stepped_sum(stop: Ints, top: Ints, parts: int) -> Ints:
    # Sum over j = 1 .. stop of min(ceil(j / parts), top); 0 if stop < 1.
    rising = _between(stop, top * parts)
    whole, rest = rising // parts, rising % parts
    return parts * CAUSAL.num_pairs(whole) + rest * (whole + 1) + np.maximum(stop - top * parts, 0) * top


def key_blocks(pairs: Ints, mask: Mask) -> Ints:
    """Tiles of keys [n] that some query of each pair sees."""
    (q_start, q_stop), (k_start, k_stop) = pairs[:, Pair.Q_SPAN].T, pairs[:, Pair.K_SPAN].T
    num_k, band = k_stop - k_start, _band(pairs, mask)
    stop = -(-np.where(band.causal, _between(q_stop - k_start, num_k), num_k) // TILE_TOKENS)
    if not band.windowed:
        return stop
    return np.maximum(stop - _between(q_start - band.reach + 1 - k_start, num_k) // TILE_TOKENS, 0)


def forward_work(
    pairs: Ints, launch: Ints, num_launches: int, mask: Mask, law: KernelLaw
) -> tuple[Floats, Floats, Floats]:
    """Tiles of 128 x 128 of each launch [num_launches], all heads, and of its longest thread block;
    and the blocks that its longest queries have more than the others', where such a grid is priced.
    """
    heads = pairs[:, Pair.Q_HEAD_STOP] - pairs[:, Pair.Q_HEAD_START]
    tokens, share = TILE_TOKENS, heads.astype(np.float64)
    if law.packs_heads:
        # A tile has so few queries, a power of two, that those of all heads of a key head fill it.
        kv_heads = np.maximum(pairs[:, Pair.KV_HEAD_STOP] - pairs[:, Pair.KV_HEAD_START], 1)
        group = int((heads // kv_heads).max(initial=1))
        tokens = max(1, TILE_TOKENS >> max(0, (group - 1).bit_length()))
        share = share * tokens / TILE_TOKENS
    walked, blocks, longest = tiles(pairs, mask, tokens)
    work = np.bincount(launch, weights=share * (walked + law.block_tiles * blocks), minlength=num_launches)
    widest = np.zeros(num_launches)
    np.maximum.at(widest, launch, (longest + law.block_tiles) * (heads > 0))
    empty = _past_the_end(blocks, heads, launch, num_launches) if law.forward_empty_s else np.zeros(num_launches)
    return work, widest, empty


def _past_the_end(blocks: Ints, heads: Ints, launch: Ints, num_launches: int) -> Floats:
    # Blocks [num_launches] of grids of the longest entry's blocks for every entry that find no work.
    most = np.zeros(num_launches, dtype=np.int64)
    np.maximum.at(most, launch, blocks)
    return np.bincount(launch, weights=heads * (most[launch] - blocks), minlength=num_launches)


def backward_work(
    pairs: Ints, launch: Ints, num_launches: int, mask: Mask, blocks_of: KeyBlocks, *, buckets: bool = True
) -> tuple[Floats, Floats, Floats]:
    """As `forward_work`, of a backward over blocks of keys; and its blocks without work
    [num_launches], those that buckets of key length cost included (`by_key_length`). Without
    `buckets` all entries of a launch stay in one.
    """
    if not buckets:
        blocks_of = replace(blocks_of, launch_blocks=1 << 60)
    heads = pairs[:, Pair.Q_HEAD_STOP] - pairs[:, Pair.Q_HEAD_START]
    walked, rows, _ = tiles(pairs, mask, blocks_of.queries)
    part, blocks = np.full(len(pairs), blocks_of.queries / TILE_TOKENS), key_blocks(pairs, mask)
    # Entries whose queries all see all keys are launched without a mask.
    (q_start, q_stop), (k_start, k_stop) = pairs[:, Pair.Q_SPAN].T, pairs[:, Pair.K_SPAN].T
    band = _band(pairs, mask)
    full = (
        np.logical_not(band.causal) | (q_start >= k_stop - 1) if not band.windowed else np.zeros(len(pairs), dtype=bool)
    )
    rows = np.where(full, -(-(q_stop - q_start) // blocks_of.full_queries), rows)
    walked = np.where(full, rows * -(-(k_stop - k_start) // TILE_TOKENS), walked)
    part[full] = blocks_of.full_queries / TILE_TOKENS
    tiles_of = heads * (part * walked + blocks_of.block_tiles * blocks)
    work = np.bincount(launch, weights=tiles_of, minlength=num_launches)
    widest = np.zeros(num_launches)
    np.maximum.at(widest, launch, (part * rows + blocks_of.block_tiles) * (heads > 0))
    kv_heads = pairs[:, Pair.KV_HEAD_STOP] - pairs[:, Pair.KV_HEAD_START]
    grid = KeyGrid.of(q_stop - q_start, blocks, heads, kv_heads)
    return work, widest, by_key_length(grid, launch, num_launches, blocks_of)[1]


class KeyGrid(NamedTuple):
    """Entries [n] of launches: blocks of keys, query heads, and blocks of rows of heads that are
    copied if not all entries are in one launch.
    """

    blocks: Ints
    heads: Ints
    copied: Ints

    @classmethod
    def of(cls, num_q: Ints, blocks: Ints, heads: Ints, kv_heads: Ints) -> "KeyGrid":
        """`num_q` queries, and `blocks` of keys; entries that have none are in no launch."""
        there = (blocks > 0) & (heads > 0)
        copied = heads * -(-num_q // TILE_TOKENS) + kv_heads * blocks
        return cls(*(np.where(there, each, 0) for each in (blocks, heads, copied)))


def by_key_length(grid: KeyGrid, launch: Ints, num_launches: int, blocks_of: KeyBlocks) -> tuple[Ints, Floats]:
    """The bucket of each entry [n] in its launch, from the longest keys on, each a launch of its own;
    and blocks without work [num_launches] that are left, with what the buckets cost in such blocks.

    A grid has a block for each of the longest entry's, of every entry. Entries of up to 1, 2, 4, 8 ...
    blocks stay together; the runs of these classes that form a bucket are the cheapest.
    """
    copied, needed = (
        np.bincount(launch, weights=each, minlength=num_launches)
        for each in (blocks_of.copy_blocks * grid.copied, grid.heads * grid.blocks)
    )
    of = np.zeros(len(launch), dtype=np.int64)
    blocks = _past_the_end(grid.blocks, grid.heads, launch, num_launches)
    wasteful = np.flatnonzero(blocks > blocks_of.launch_blocks + copied)
    if not len(wasteful):
        return of, blocks
    place = np.full(num_launches, -1)
    place[wasteful] = np.arange(len(wasteful))
    entries = np.flatnonzero(place[launch] >= 0)
    size = np.ceil(np.log2(np.maximum(grid.blocks[entries], 1))).astype(np.int64)
    count = int(size.max()) + 1
    at = place[launch[entries]], size
    heads, longest = np.zeros((2, len(wasteful), count))
    np.add.at(heads, at, grid.heads[entries])
    np.maximum.at(longest, at, grid.blocks[entries])
    # Of the first j classes the cheapest buckets, and where the last of them begins.
    least, begin = np.zeros((len(wasteful), count + 1)), np.zeros((len(wasteful), count + 1), dtype=np.int64)
    for j in range(1, count + 1):
        # [wasteful, j]: classes i .. j - 1 in one bucket.
        inside, tallest = (each[:, :j][:, ::-1] for each in (heads, longest))
        last = (inside.cumsum(axis=1) * np.maximum.accumulate(tallest, axis=1))[:, ::-1]
        each = least[:, :j] + last + blocks_of.launch_blocks
        begin[:, j] = each.argmin(axis=1)
        least[:, j] = each.min(axis=1)
    split = least[:, count] - blocks_of.launch_blocks + copied[wasteful] - needed[wasteful]
    better = split < blocks[wasteful]
    bucket, first = np.zeros((len(wasteful), count), dtype=np.int64), begin[:, count]
    number = np.zeros(len(wasteful), dtype=np.int64)
    for each in range(count - 1, -1, -1):
        bucket[:, each] = number * better
        ends = first == each
        number, first = number + ends, np.where(ends, begin[:, each], first)
    of[entries] = bucket[at]
    blocks[wasteful] = np.minimum(blocks[wasteful], split)
    return of, blocks


def _between(values: Ints, top: Ints) -> Ints:
    # `np.clip` from 0 to `top`, which takes several times as long.
    return np.minimum(np.maximum(values, 0), top)


def padded_head_dim(head_dim: int) -> int:
    return -(-head_dim // _HEAD_DIM_STEP) * _HEAD_DIM_STEP


def distinct_rows(regions: Ints, launch: Ints, num_launches: int) -> Floats:
    """Tokens times heads of each launch's regions [n, 5], each counted once in a launch."""
    of_seq = key(regions[:, Region.SEQ], regions[:, Region.START])
    order = np.lexsort((regions[:, Region.HEAD_START], of_seq, launch))
    regions, launch = regions[order], launch[order]
    begins = regions[:, [Region.SEQ, Region.START, Region.HEAD_START]]
    fresh = np.ones(len(regions), dtype=bool)
    fresh[1:] = (begins[1:] != begins[:-1]).any(axis=1) | (launch[1:] != launch[:-1])
    tokens = regions[:, Region.STOP] - regions[:, Region.START]
    size = tokens * (regions[:, Region.HEAD_STOP] - regions[:, Region.HEAD_START])
    return np.bincount(launch[fresh], weights=size[fresh], minlength=num_launches)


def padding_elements(
    pairs: Ints, launch: Ints, num_launches: int, widths: tuple[int, int], *, backward: bool, mask: Mask = CAUSAL
) -> Floats:
    """Elements that each launch [num_launches] reads and writes to pad its operands' heads and to
    cut its results'; 0 where the libraries take them as they are.

    `widths`: of queries and keys, and of values and outputs; both are padded to the wider one, and
    that to a multiple.
    """
    wide = -(-max(widths) // _HEAD_DIM_MULTIPLE) * _HEAD_DIM_MULTIPLE
    moved = sum(width + wide for width in widths if width != wide)
    if not moved or not len(pairs):
        return np.zeros(num_launches)
    seen = sees(pairs, mask)
    pairs, launch = pairs[seen], launch[seen]
    rows = distinct_rows(pairs[:, Pair.QUERY], launch, num_launches)
    rows = rows + distinct_rows(pairs[:, list(Pair.KEY)], launch, num_launches)
    # Of each width a tensor of queries' rows (q; out) and one of keys' (k; v); backward two (their
    # gradients).
    return (2 if backward else 1) * moved * rows
