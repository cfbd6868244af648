"""Rollouts as trees: token lists that begin alike share rows, and each row is computed once.

Two lists share a token where they agree on it, on all tokens before it and on the one after it. So
where they part, the last token that they have in common is there once for each of them, and every
row has one label, whatever lists it is of; that costs a row a branch. TRL 1.16 packs trees by the
same rule.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple

import numpy as np

from megatron_balance.errors import DataError
from megatron_balance.ir.arrays import Floats, Ints
from megatron_balance.ir.forest import Segment, Tree, checked, num_pairs, num_tokens, path_positions

IGNORED = -100  # the label of a token that has none, as `torch.nn.functional.cross_entropy` has it


class Sharing(NamedTuple):
    """`tokens` of rollouts and their causal `pairs`, each rollout by itself; the `rows` and
    `visible_pairs` of their trees.
    """

    tokens: int
    rows: int
    pairs: int
    visible_pairs: int


@dataclass(frozen=True, slots=True, eq=False)
class Rollouts:
    """Rollouts as trees, the same ones in whatever order they were given.

    Attributes:
        trees: one for all rollouts that share their first row, all segments causal; of several
            children the one with the most rows below it is first, since the keys of a first child
            go on where its parent's end, in one run.
        tokens, labels: int64 [T], of the trees one behind the other; a label is the next token,
            `IGNORED` for the last one of a rollout.
        paths: of each rollout, in the order given, the runs of rows [start, stop) that its tokens
            are.
    """

    trees: tuple[Tree, ...]
    tokens: Ints
    labels: Ints
    paths: tuple[tuple[tuple[int, int], ...], ...]

    @property
    def position_ids(self) -> Ints:
        """Of each row, the tokens before it on its path, int64 [T]."""
        return np.array([at for tree in self.trees for at in path_positions(tree)], dtype=np.int64)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each rollout."""
        return tuple(sum(stop - start for start, stop in path) for path in self.paths)

    @property
    def rows(self) -> Ints:
        """Of each rollout's tokens the row, rollout by rollout: int64 [sum of `lengths`]."""
        none = np.empty(0, dtype=np.int64)
        return np.concatenate([none, *(np.arange(*run) for path in self.paths for run in path)])

    def weights(self, given: Sequence[Any]) -> Floats:
        """Weights [T] of the rows' labels: sums over the rollouts that pass a row.

        They stand for the rollouts' own in a loss that is linear in them, such as a weighted sum of
        negative log likelihoods; one with clipped ratios is not.

        Args:
            given: of each rollout, one number a token: what its prediction counts. That of the first
                token, which nothing predicts, counts nowhere.

        Raises:
            DataError: another number of rollouts or tokens, or what is not a finite number.
        """
        if len(given) != len(self.paths):
            raise DataError(f"expected weights for each of {len(self.paths)} rollouts, got {len(given)}")
        total = np.zeros(len(self.tokens))
        for at, (each, length, path) in enumerate(zip(given, self.lengths, self.paths, strict=True)):
            weights = np.asarray(each, dtype=np.float64)
            if weights.shape != (length,) or not np.isfinite(weights).all():
                raise DataError(
                    f"weights of rollout {at}: expected {length} finite numbers, one for each token, got "
                    f"{'others' if weights.shape == (length,) else list(weights.shape)}"
                )
            # A row has the label of the token behind it.
            weights = np.append(weights[1:], 0)
            for start, stop in path:
                total[start:stop] += weights[: stop - start]
                weights = weights[stop - start :]
        return total

    def by_tree(self) -> "list[tuple[tuple[int, ...], Rollouts]]":
        """Of each tree, which of the rollouts are its own, and these alone."""
        bounds = [0, *accumulate(map(num_tokens, self.trees))]
        tree = np.searchsorted(bounds, [path[0][0] for path in self.paths], side="right") - 1
        made: list[tuple[tuple[int, ...], Rollouts]] = []
        for at, (start, stop) in enumerate(pairwise(bounds)):
            own = tuple(np.flatnonzero(tree == at).tolist())
            paths = tuple(tuple((a - start, b - start) for a, b in self.paths[each]) for each in own)
            made.append((own, Rollouts((self.trees[at],), self.tokens[start:stop], self.labels[start:stop], paths)))
        return made

    def state(self) -> tuple[Any, ...]:
        """Lists of plain numbers, for `of_state`."""
        trees = [[*map(list, tree)] for tree in self.trees]
        return trees, self.tokens.tolist(), self.labels.tolist(), [*map(list, self.paths)]

    @classmethod
    def of_state(cls, trees: Any, tokens: Any, labels: Any, paths: Any) -> "Rollouts":
        """TypeError or ValueError: no state of rollouts."""
        ids, targets = (np.array(each, dtype=np.int64) for each in (tokens, labels))
        return cls(checked(trees), ids, targets, tuple(tuple((int(a), int(b)) for a, b in path) for path in paths))

    @property
    def sharing(self) -> Sharing:
        """Tokens and pairs of the rollouts, and of their trees."""
        alone = sum(n * (n + 1) // 2 for n in self.lengths)
        return Sharing(sum(self.lengths), len(self.tokens), alone, sum(map(num_pairs, self.trees)))


def as_trees(rollouts: Sequence[Any]) -> Rollouts:
    """The trees of token ids [n], each a list, an array or a tensor on the host; none is fine.

    Equal rollouts share all their rows. DataError: one that is empty, or no token ids.
    """
    lists = [_tokens(at, each) for at, each in enumerate(rollouts)]
    order = sorted(range(len(lists)), key=lambda at: lists[at].astype(">i8").tobytes())
    lists = [lists[at] for at in order]
    sizes = [len(each) - 1 for each in lists]
    # Sorted, those that share most stand side by side. Of each list, the tokens that it shares with
    # the one before it, and how many rows it and all before it add.
    shared = [0, *(_num_shared(one, other) for one, other in pairwise(lists))][: len(lists)]
    added = [0, *accumulate(size - less for size, less in zip(sizes, shared, strict=True))]

    def parting(low: int, high: int, depth: int) -> list[tuple[int, int]]:
        """Lists [low, high) where they part after `depth` tokens, lightest first."""
        cuts = sorted({low, *(at for at in range(low + 1, high) if shared[at] <= depth), high})
        return sorted(pairwise(cuts), key=lambda part: sizes[part[0]] + added[part[1]] - added[part[0] + 1])

    trees: list[list[Segment]] = []
    tokens: list[Ints] = [np.empty(0, dtype=np.int64)]
    labels = tokens.copy()
    paths: list[list[tuple[int, int]]] = [[] for _ in lists]  # by list as given, its runs of rows
    num_rows = 0
    # Lists [low, high) that share `start` tokens and more, the segment above them and its path.
    nothing: list[tuple[int, int]] = []
    waiting = [(*part, 0, -1, nothing) for part in parting(0, len(lists), 0)]
    while waiting:
        low, high, start, parent, above = waiting.pop()
        if parent < 0:
            trees.append([])
        stop = min(shared[low + 1 : high], default=sizes[low])
        trees[-1].append(Segment(stop - start, parent))
        tokens.append(lists[low][start:stop])
        labels.append(lists[low][start + 1 : stop + 1])
        path = [*above, (num_rows, num_rows + stop - start)]
        num_rows += stop - start
        if stop == sizes[low]:  # the end of all these lists, which are equal
            for at in order[low:high]:
                paths[at] = path
        own = len(trees[-1]) - 1
        waiting += [(*part, stop, own, path) for part in parting(low, high, stop) if stop < sizes[low]]
    return Rollouts(tuple(map(tuple, trees)), np.concatenate(tokens), np.concatenate(labels), tuple(map(tuple, paths)))


def joined(parts: Sequence[Rollouts]) -> Rollouts:
    """The trees and the rollouts of several as one, one behind the other."""
    starts = accumulate((len(each.tokens) for each in parts), initial=0)
    none = np.empty(0, dtype=np.int64)
    return Rollouts(
        tuple(chain.from_iterable(each.trees for each in parts)),
        np.concatenate([none, *(each.tokens for each in parts)]),
        np.concatenate([none, *(each.labels for each in parts)]),
        tuple(
            tuple((first + start, first + stop) for start, stop in path)
            for each, first in zip(parts, starts, strict=False)
            for path in each.paths
        ),
    )


def _tokens(at: int, given: Any) -> Ints:
    """The tokens of a rollout, and `IGNORED` behind them, which is no token."""
    tokens = np.asarray(given)
    if tokens.ndim != 1 or not len(tokens) or tokens.dtype.kind not in "iu" or tokens.min() < 0:
        raise DataError(
            f"rollout {at}: expected token ids [n], at least one, none below 0; got {list(tokens.shape)} of "
            f"{tokens.dtype}. Give prompt and response in one list, without padding"
        )
    return np.append(tokens.astype(np.int64), IGNORED)


def _num_shared(one: Ints, other: Ints) -> int:
    """How many tokens two lists share, each with the token behind it."""
    size = min(len(one), len(other))
    differ = np.flatnonzero(one[:size] != other[:size])
    return max(0, (int(differ[0]) if len(differ) else size) - 1)
