"""The trees of a forest as columns, for many positions at once."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from megatron_balance.ir.arrays import Bools, Ints, key

if TYPE_CHECKING:
    from megatron_balance.ir.forest import Forest


# A first child stands right behind its parent, so a chain of first children is one run of tokens
# in which positions and tokens of the path both count up. A path goes through one part of each of
# its chains, from the chain's start on, so a query sees as many runs of keys as its path has chains.
class Segments(NamedTuple):
    """By segment of all trees, [n] each; positions are those of the sequence.

    `begin`: `key` of the first token, ascending. `stop`; `end`: behind all that lies below it, too.
    `full`. `shift`: tokens before its first one that are not on its path. `base` [trees + 1]: the
    first segment of each tree.
    """

    begin: Ints
    start: Ints
    stop: Ints
    end: Ints
    full: Bools
    shift: Ints
    base: Ints

    def at(self, seq: Ints, position: Ints) -> Ints:
        """The segment of each position; behind the end of a sequence its last one."""
        found = np.searchsorted(self.begin, key(seq, position), side="right") - 1
        return np.minimum(found, self.base[np.asarray(seq) + 1] - 1)

    def last_key(self, seq: Ints, query: Ints) -> Ints:
        """One past the last key that each query sees."""
        at = self.at(seq, query)
        return np.where(self.full[at], self.stop[at], query + 1)

    def queries(self, seq: Ints, position: Ints) -> tuple[Ints, Ints]:
        """The run of queries [first, stop) that see each key."""
        at = self.at(seq, position)
        return np.where(self.full[at], self.start[at], position), self.end[at]


@lru_cache(maxsize=64)
def segments_of(forest: Forest) -> Segments:
    rows: list[tuple[int, ...]] = []
    base = [0]
    for seq, tree in enumerate(forest.trees):
        stops: list[int] = []
        paths: list[int] = []  # tokens of the path, its own included
        for length, parent, full in tree:
            start = stops[-1] if stops else 0
            path = paths[parent] if stops else 0
            stops.append(start + length)
            paths.append(path + length)
            rows.append((int(key(seq, start)), start, start + length, start + length, full, start - path))
        for at in range(len(tree) - 1, 0, -1):
            parent = tree[at].parent
            stops[parent] = max(stops[parent], stops[at])
        rows[base[-1] :] = [(*row[:3], end, *row[4:]) for row, end in zip(rows[base[-1] :], stops, strict=True)]
        base.append(len(rows))
    begin, start, stop, end, full, shift = np.array(rows, dtype=np.int64).reshape(-1, 6).T
    return Segments(begin, start, stop, end, full.astype(bool), shift, np.array(base))
