"""Random trees, and their masks by the rule itself: from token to token, along parents."""

from collections.abc import Sequence
from random import Random

import numpy as np

from megatron_balance.ir.arrays import Bools
from megatron_balance.ir.forest import Forest, Segment, Tree


def some_tree(random: Random, most: int = 12, longest: int = 12, depth: int = 8) -> Tree:
    """A tree of up to `most` segments of up to `longest` tokens; a third are full."""
    segments: list[Segment] = []
    path: list[int] = []
    for at in range(random.randint(1, most)):
        del path[random.randint(max(len(path) // 2, 1), depth) if path else 0 :]
        length = 1 if random.random() < 0.2 else random.randint(1, longest)
        segments.append(Segment(length, path[-1] if path else -1, random.random() < 1 / 3))
        path.append(at)
    return tuple(segments)


def visible(tree: Tree, window: int = 0) -> Bools:
    """Whether each query (row) of a tree sees each key (column), [T, T]."""
    owner = [at for at, segment in enumerate(tree) for _ in range(segment.length)]
    begins = np.cumsum([0, *(segment.length for segment in tree)])
    shown = np.zeros((len(owner), len(owner)), dtype=bool)
    for query, own in enumerate(owner):
        path = list(range(begins[own], query + 1))
        above = tree[own].parent
        while above >= 0:
            path[:0] = range(begins[above], begins[above + 1])
            above = tree[above].parent
        shown[query, path[-window:]] = True
        if tree[own].full:
            shown[query, query : begins[own + 1]] = True
    return shown


def some_forest(random: Random, trees: int = 4, window: int = 0, **sizes: int) -> Forest:
    return Forest(tuple(some_tree(random, **sizes) for _ in range(random.randint(1, trees))), window)


def dense(forest: Forest) -> Sequence[Bools]:
    return [visible(tree, forest.window) for tree in forest.trees]
