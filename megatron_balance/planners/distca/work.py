"""Seconds of attention at every place where a shard may be cut.

Each query sees all keys up to its own, so what a shard [a, b) of any sequence takes is S(b) - S(a),
with S(p) the time of the first p queries of a sequence. S is asked of the cost model (the
profiler's grid, DistCA, section 4.2) at whole tiles and its square root, nearly a straight line, is
interpolated. A kernel pads its last tile of queries, so the last block of a fragment counts as if
it were whole tiles (of the block's size if blocks are smaller).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_balance.cost.base import CostModel, Floats
from megatron_balance.cost.kernel import TILE_TOKENS
from megatron_balance.ir.arrays import Ints

RANK, SEQ, START, STOP = range(4)
"""Columns of `owned`: rows of the tokens that each rank holds outside attention."""


@dataclass(frozen=True, slots=True)
class Seconds:
    """S as knots.

    `pair_s`: the lowest time of another (query, key) pair, reached by the longest runs.
    """

    knots: Floats
    roots: Floats
    pair_s: float

    @classmethod
    def of(cls, cost: CostModel, longest: int) -> Seconds:
        """S up to `longest` tokens and another tile."""
        tiles = -(-longest // TILE_TOKENS) + 1
        steps = np.unique(np.rint(2 ** np.arange(0, np.log2(tiles), 0.5)))
        knots = TILE_TOKENS * np.append(steps[steps < tiles], tiles)
        pairs = knots * (knots + 1) / 2
        times = np.array([cost.attention_s(n, run) for n, run in zip(pairs.tolist(), knots.tolist(), strict=True)])
        times = np.maximum.accumulate(times)
        times, pairs = np.append(0.0, times), np.append(0.0, pairs)
        return cls(np.append(0.0, knots), np.sqrt(times), float((np.diff(times) / np.diff(pairs)).min()))

    def upto(self, positions: Ints) -> Floats:
        """S of each position."""
        return np.square(np.interp(positions, self.knots, self.roots))


@dataclass(frozen=True, slots=True)
class Edges:
    """Places where the fragments of `owned` may be cut: at multiples of the block from their start,
    and where they end.

    Fragment f has the edges first[f] .. last[f]; between two neighbours lies a block. `positions`
    in the sequence; `seconds`: S there, at the last edge where its tile would end.
    """

    owned: Ints
    first: Ints
    last: Ints
    positions: Ints
    seconds: Floats

    @classmethod
    def of(cls, owned: Ints, block: int, seconds: Seconds) -> Edges:
        """The edges of all fragments, one after the other."""
        starts, stops = owned[:, START], owned[:, STOP]
        counts = -(-(stops - starts) // block) + 1
        last = np.cumsum(counts) - 1
        first = last - counts + 1
        fragment = np.repeat(np.arange(len(owned)), counts)
        positions = starts[fragment] + block * (np.arange(len(fragment)) - first[fragment])
        upto = positions.copy()
        tile = min(block, TILE_TOKENS)
        upto[last] = starts + -(-(stops - starts) // tile) * tile
        positions[last] = stops
        return cls(owned, first, last, positions, seconds.upto(upto))
