"""Trees of segments as the mask: a query sees all keys of the segments above its own, and of its own
segment those before it, or all of them.

A tree is one sequence, its segments laid out depth first, so that all that lies below a segment
stands in one run right behind it. One rule makes of it a document (one segment), rollouts of a
prompt (a root and its leaves), the turns of an agent, a prefix LM (a full root and a causal child),
image blocks (full segments in a chain of causal ones) and block-causal video (a chain of full
ones).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import is_
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from megatron_balance.errors import ConfigError
from megatron_balance.ir.mask import CAUSAL, END, FOREST, FULL, WINDOW, Band, Mask, Positions, SlidingWindow

if TYPE_CHECKING:
    from megatron_balance.ir.segments import Segments


class Segment(NamedTuple):
    """Tokens of a tree that stand together on every path that has them.

    `length`: in tokens. `parent`: index in the tree of the segment above; -1: there is none, this
    is the root. `full`: its queries see all of its keys, not only those before them.
    """

    length: int
    parent: int
    full: bool = False


# Depth first: the first is the root, and every other segment hangs below the one before it or below
# one of those above that.
Tree: TypeAlias = tuple[Segment, ...]


def document(length: int) -> Tree:
    """The tree of a plain sequence: one causal segment."""
    return (Segment(length, -1),)


def num_tokens(tree: Tree) -> int:
    return sum([length for length, _, _ in tree])


# The last few that were found to be trees: a batch, its masks and its plans have the same ones.
_RECENT: deque[tuple[Tree, ...]] = deque(maxlen=4)


def checked(trees: Iterable[Iterable[Sequence[object]]]) -> tuple[Tree, ...]:
    """Trees of the (length, parent, full) of their segments; ConfigError: one is no tree."""
    given = tuple(trees)
    for known in tuple(_RECENT):  # a copy: threads plan ahead
        if len(known) == len(given) and all(map(is_, known, given)):
            return known
    found = tuple(_checked(seq, tree) for seq, tree in enumerate(given))
    _RECENT.append(found)
    return found


def _no_tree(seq: int, at: int, why: str) -> ConfigError:
    return ConfigError(f"tree of sequence {seq}, segment {at}: {why}")


def _checked(seq: int, tree: Iterable[Sequence[object]]) -> Tree:
    segments: list[Segment] = []
    path: list[int] = [-1]  # the root's parent, the root, ... down to the last segment
    for at, given in enumerate(tree):
        if len(given) != 3 or [*map(type, given)] != [int, int, bool]:
            raise _no_tree(seq, at, f"expected (length, parent, full), two ints and a bool, got {given!r:.80}")
        # Types were looked at above.
        segment = given if isinstance(given, Segment) else Segment(*given)  # pyright: ignore[reportArgumentType]
        length, parent, _ = segment
        if length < 1:
            raise _no_tree(seq, at, f"{length} tokens; a segment has at least 1. Leave empty ones out")
        if at and parent == -1:
            raise _no_tree(seq, at, "a second root; make it a tree (a sequence) of its own")
        if parent not in path:
            above = "-1, since it is the root" if not at else f"one of {path[1:]}, the path to the segment before it"
            raise _no_tree(seq, at, f"parent {parent}; depth first it is {above}")
        del path[path.index(parent) + 1 :]
        path.append(at)
        segments.append(segment)
    if not segments:
        raise ConfigError(f"tree of sequence {seq}: no segments; a tree has at least its root")
    return tuple(segments)


@dataclass(frozen=True, slots=True)
class Forest(Mask):
    """The mask of sequences that are trees.

    `trees`: one for each sequence. `window`: of the keys that a tree shows, a query sees those that
    are fewer than so many tokens back on its path, and the later ones of its own full segment; 0:
    all of them. Raises ConfigError: a tree is none (`checked`).
    """

    trees: tuple[Tree, ...]
    window: int = 0
    # Worked out once: tables of many functions are kept by mask.
    _hash: int = field(default=0, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "trees", checked(self.trees))
        object.__setattr__(self, "_hash", hash((self.trees, self.window)))
        if self.window < 0:
            raise ConfigError(f"a sliding window has at least 1 key, got {self.window}")

    def __hash__(self) -> int:
        return self._hash

    @classmethod
    def from_position_ids(cls, position_ids: Iterable[int]) -> Forest:
        """The trees, one behind the other, whose tokens have these position ids (`tree_of`), as what
        packs rollouts depth first has them.
        """
        positions = list(position_ids)
        starts = [at for at, position in enumerate(positions) if position == 0 or not at]
        return cls(tuple(tree_of(positions[start:stop]) for start, stop in pairwise([*starts, len(positions)])))

    @property
    def name(self) -> str:
        """Without the trees: plans and programs list them beside it."""
        return f"{FOREST}_{SlidingWindow(self.window).name}" if self.window else FOREST

    @property
    def window_size(self) -> int:
        return self.window

    @property
    def without_window(self) -> Forest:
        return Forest(self.trees)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence."""
        return tuple(num_tokens(tree) for tree in self.trees)

    @property
    def segments(self) -> Segments:
        """All segments as columns."""
        from megatron_balance.ir.segments import segments_of  # NumPy, which data do not import

        return segments_of(self)

    def queries(self, seq: Positions, key: Positions) -> tuple[Positions, Positions]:
        of = self.segments
        at = of.at(seq, key)
        return key + of.full[at] * (of.start[at] - key), of.end[at]

    def keys(self, seq: Positions, query: Positions) -> tuple[Positions, Positions]:
        of = self.segments
        at = of.at(seq, query)
        first = 0 * query
        if self.window:
            place = query - of.shift[at] - self.window + 1
            first = of.on_path(seq, query, place * (place > 0))
        return first, query + 1 + of.full[at] * (of.stop[at] - query - 1)

    def band(self, seq: Positions, query: Positions, key: Positions) -> Band:
        of = self.segments
        at = of.at(seq, query)
        # Tokens between that are not on the path are in nobody's way.
        reach = self.window + of.shift[at] - of.shift[of.at(seq, key)] if self.window else END
        return Band(~of.full[at], reach)

    def num_pairs(self, length: Positions) -> Positions:
        """TypeError: of a tree its length does not tell them; `num_pairs` does."""
        raise TypeError(f"a tree of {length} tokens: its pairs are those of its segments")


def unless_plain(trees: Sequence[Tree]) -> tuple[Tree, ...]:
    """The trees; none where all are plain documents."""
    return () if all(tree == document(tree[0].length) for tree in trees) else tuple(trees)


def over(mask: Mask, trees: Sequence[Tree]) -> Mask:
    """The mask of a batch's `trees`, none where there are none, in layers that have `mask`.

    Trees that are all plain documents leave `mask` as it is. ConfigError: a full mask and trees.
    """
    if not unless_plain(trees):
        return mask
    if mask == FULL:
        raise ConfigError("a full mask shows siblings to one another; give trees a causal mask, and full segments")
    return Forest(tuple(trees), mask.size if isinstance(mask, SlidingWindow) else 0)


def named(name: str, trees: Iterable[Iterable[Sequence[object]]]) -> Forest:
    """The forest of this name (`Forest.name`) and these trees; ConfigError: no forest is called so."""
    window = name.removeprefix(FOREST).removeprefix(f"_{WINDOW}_")
    forest = Forest(checked(trees), int(window) if window.isdecimal() else 0)
    if forest.name != name:
        raise ConfigError(f"trees under mask {name!r}; expected {FOREST} or {FOREST}_{WINDOW}_KEYS")
    return forest


def _depths(tree: Tree) -> list[int]:
    """Of each segment, the tokens of its path, its own included."""
    found: list[int] = []
    for length, parent, _ in tree:
        found.append(length + (found[parent] if found else 0))
    return found


def num_pairs(tree: Tree, window: int = 0) -> int:
    """Visible (query, key) pairs of a tree."""
    mask = SlidingWindow(window) if window else CAUSAL
    return sum(
        mask.num_pairs(depth) - mask.num_pairs(depth - length) + full * (length * (length - 1) // 2)
        for (length, _, full), depth in zip(tree, _depths(tree), strict=True)
    )


def leaf_paths(tree: Tree) -> list[Tree]:
    """Each path from the root to a leaf, as a tree of its own in as few segments as it has."""
    leaves = set(range(len(tree))) - {segment.parent for segment in tree}
    return [_path_to(leaf, tree) for leaf in sorted(leaves)]


def _path_to(leaf: int, tree: Tree) -> Tree:
    path, at = list[Segment](), leaf
    while at >= 0:
        length, at, full = tree[at]
        if path and not (full or path[-1].full):
            length += path.pop().length
        path.append(Segment(length, -1, full))
    return tuple(each._replace(parent=place - 1) for place, each in enumerate(reversed(path)))


def path_positions(tree: Tree) -> list[int]:
    """Position ids of a tree's tokens, depth first: how many tokens stand before each on its path."""
    ends = zip(tree, _depths(tree), strict=True)
    return [at for segment, end in ends for at in range(end - segment.length, end)]


# A position that does not follow the one before it begins a branch. The branch hangs below the token
# of the path so far whose position is one less, so positions along paths, depth first, say the
# whole tree.
def tree_of(position_ids: Iterable[int]) -> Tree:
    """The tree, all segments causal, whose tokens have these position ids (`path_positions`).

    Full segments cannot be told by positions. ConfigError: they do not begin with 0, or one has no
    token of its path right before it.
    """
    starts: list[int] = []  # of each run of positions that ascend by one
    stops: list[int] = []
    cuts: list[set[int]] = []  # where others hang below tokens of the run
    above: list[int] = []  # the run that it hangs below
    path: list[int] = []  # runs, down to the last
    for token, position in enumerate(position_ids):
        if starts and position == stops[-1]:
            stops[-1] += 1
            continue
        while path and starts[path[-1]] >= position:
            path.pop()
        if position < 0 or (starts and not path) or position > (stops[path[-1]] if path else 0):
            raise ConfigError(
                f"position {position} of token {token}: a tree begins with position 0, and a branch with one more than "
                "that of a token of the path before it"
            )
        if path:
            cuts[path[-1]].add(position)
        above.append(path[-1] if path else -1)
        path.append(len(starts))
        starts.append(position)
        stops.append(position + 1)
        cuts.append(set())
    segments: list[Segment] = []
    ending: list[dict[int, int]] = []  # of each run, its segment that ends before a position
    for start, stop, cut, run in zip(starts, stops, cuts, above, strict=True):
        parent = ending[run][start] if run >= 0 else -1
        ending.append({})
        for begin, end in pairwise(sorted({start, stop} | cut)):
            segments.append(Segment(end - begin, parent))
            parent = ending[-1][end] = len(segments) - 1
    return checked([segments])[0]
