"""The trees of a forest as columns, for many positions at once."""

from __future__ import annotations

from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from megatron_balance.ir.arrays import Bools, Ints, Rectangles, key, key_position, ranges

if TYPE_CHECKING:
    from collections.abc import Sequence

    from megatron_balance.ir.forest import Forest, Tree

_Run: TypeAlias = tuple[int, int, int]  # first key, one past the last, shift


# A first child stands right behind its parent. So a chain of first children is one run of tokens in
# which positions and places on the path rise together, and their difference, the `shift`, tells
# chains apart: it is larger in every later one. A path goes through a part of each of its chains,
# from the chain's start on; so a query sees one run of keys in each.
#
# Along queries a chain is cut into stretches: full segments, and what is causal between them. The
# queries of a stretch times one run of its keys are a rectangle that no mask cuts, but at the
# diagonal and where a window ends.
class Segments(NamedTuple):
    """By segment of all trees, [n] each; positions are those of the sequence.

    `begin`: `arrays.key` of the first token, ascending. `stop`; `end`: behind all that lies below it,
    too. `above`: the last token of the parent; -1: there is none. `base` [trees + 1]: the first
    segment of each tree.

    By stretch: `stretches` [m]: `arrays.key` of the first token, ascending; `run_of` [m + 1]: where
    its runs of keys begin in `runs` [r, 3], rows (first, one past the last, shift), down the path;
    the last one is of its own chain and ends where the stretch does. `places` [r]: `arrays.key` of
    the stretch and the place on the path of each run's first key, ascending.
    """

    begin: Ints
    start: Ints
    stop: Ints
    end: Ints
    above: Ints
    full: Bools
    shift: Ints
    base: Ints
    stretches: Ints
    run_of: Ints
    runs: Ints
    places: Ints

    def at(self, seq: Ints, position: Ints) -> Ints:
        """The segment of each position; behind the end of a sequence its last one."""
        found = np.searchsorted(self.begin, key(seq, position), side="right") - 1
        return np.minimum(found, self.base[np.asarray(seq) + 1] - 1)

    def stretch_at(self, seq: Ints, position: Ints) -> Ints:
        return np.searchsorted(self.stretches, key(seq, position), side="right") - 1

    def on_path(self, seq: Ints, position: Ints, place: Ints) -> Ints:
        """The position of the token at each place on the path to a position."""
        run = np.searchsorted(self.places, key(self.stretch_at(seq, position), place), side="right") - 1
        return place + self.runs[run, 2]

    def parts(self, seq: Ints, rectangles: Rectangles) -> tuple[Ints, Rectangles]:
        """Each rectangle's parts, of one stretch and one run of its keys; and the row of each."""
        q_start, q_stop, k_start, k_stop = rectangles
        first, last = (self.run_of[self.stretch_at(seq, at) + side] for side, at in enumerate((q_start, q_stop - 1)))
        row, run = ranges(first, np.where(rectangles.some, last, 0))
        stretch = np.searchsorted(self.run_of, run, side="right") - 1
        return row, Rectangles(
            np.maximum(q_start[row], key_position(self.stretches)[stretch]),
            np.minimum(q_stop[row], self.runs[self.run_of[stretch + 1] - 1, 1]),
            np.maximum(k_start[row], self.runs[run, 0]),
            np.minimum(k_stop[row], self.runs[run, 1]),
        )


@lru_cache(maxsize=64)
def segments_of(forest: Forest) -> Segments:
    """The columns of a forest."""
    stop, depth, end = list[int](), list[int](), list[int]()
    base, stretches, runs = [0], list[tuple[int, int]](), list[list[_Run]]()
    for seq, tree in enumerate(forest.trees):
        stops, depths = list[int](), list[int]()  # depth: tokens of the path, its own included
        higher, own = list[list[_Run]](), list[_Run]()  # runs of the chains above, and in its own
        for at, (length, parent, full) in enumerate(tree):
            start, above = (stops[-1], depths[parent]) if at else (0, 0)
            stops.append(start + length)
            depths.append(above + length)
            first_child = at > 0 and parent == at - 1
            higher.append([] if not at else higher[parent] if first_child else [*higher[parent], own[parent]])
            own.append((own[parent][0] if first_child else start, stops[-1], start - above))
            if first_child and not full and not tree[parent].full:
                runs[-1][-1] = own[-1]
            else:
                stretches.append((seq, start))
                runs.append([*higher[-1], own[-1]])
        stop += stops
        depth += depths
        for at in range(len(tree) - 1, 0, -1):
            parent = tree[at][1]
            stops[parent] = max(stops[parent], stops[at])
        end += stops
        base.append(len(stop))
    # By segment [n, 3]; the sequence of each.
    given = np.fromiter(chain.from_iterable(chain.from_iterable(forest.trees)), np.int64, 3 * len(stop)).reshape(-1, 3)
    number = np.repeat(np.arange(len(forest.trees)), np.diff(base))
    (length, parent, full), stop, depth = given.T, np.array(stop, dtype=np.int64), np.array(depth, dtype=np.int64)
    start, base = stop - length, np.array(base)
    above = np.where(parent < 0, -1, stop[parent + base[number]] - 1)
    run_of = np.cumsum([0, *map(len, runs)])
    flat = chain.from_iterable(chain.from_iterable(runs))
    rows = np.fromiter(flat, np.int64, 3 * int(run_of[-1])).reshape(-1, 3)
    places = key(np.repeat(np.arange(len(runs)), np.diff(run_of)), rows[:, 0] - rows[:, 2])
    tables = base, key(*np.array(stretches, dtype=np.int64).reshape(-1, 2).T), run_of, rows, places
    of_tokens = start, stop, np.array(end, dtype=np.int64), above
    return Segments(key(number, start), *of_tokens, full.astype(bool), start - (depth - length), *tables)


class PathEnds(NamedTuple):
    """By segment of all sequences, ascending (a document is one): `arrays.key` of its first token,
    where it begins, where all that lies below it ends, where its parent ends (0: it is a root).
    """

    begin: Ints
    start: Ints
    end: Ints
    above: Ints

    @staticmethod
    def of(lengths: Sequence[int], trees: tuple[Tree, ...] = ()) -> PathEnds:
        if trees:
            from megatron_balance.ir.forest import Forest

            of = segments_of(Forest(trees))
            return PathEnds(of.begin, of.start, of.end, of.above + 1)
        number = np.arange(len(lengths))
        return PathEnds(key(number, 0), 0 * number, np.array(lengths, dtype=np.int64), 0 * number)

    def at(self, seq: Ints, token: Ints) -> Ints:
        """The segments of tokens."""
        return np.searchsorted(self.begin, key(seq, token), side="right") - 1

    def before(self, seq: Ints, token: Ints) -> Ints:
        """Where the path ends that leads to each token."""
        at = self.at(seq, token)
        return np.where(token == self.start[at], self.above[at], token)
