"""The input of a planner: how long the sequences are, and which trees."""

import operator
from dataclasses import dataclass
from itertools import chain
from typing import Any

from megatron_balance.errors import ConfigError
from megatron_balance.ir import forest
from megatron_balance.ir.mask import Mask


@dataclass(frozen=True, slots=True)
class Batch:
    """Lengths in tokens of a microbatch's sequences (of the whole pool); the index is their id.

    `trees`: the tree of each sequence (`ir.forest`); none: all are plain documents. Raises
    ConfigError: lengths or trees that are none, or that do not fit one another.
    """

    lengths: tuple[int, ...]
    trees: tuple[forest.Tree, ...] = ()

    def __post_init__(self) -> None:
        if not set(map(type, self.lengths)) <= {int}:
            whole = tuple(_whole(seq, length) for seq, length in enumerate(self.lengths))
            object.__setattr__(self, "lengths", whole)
        if min(self.lengths, default=1) < 1:
            seq, length = next((seq, length) for seq, length in enumerate(self.lengths) if length < 1)
            raise ConfigError(
                f"sequence {seq} has {length} tokens; every sequence needs at least 1. Drop empty documents "
                "before planning"
            )
        if self.trees:
            object.__setattr__(self, "trees", forest.checked(self.trees))
            if tuple(map(forest.num_tokens, self.trees)) != self.lengths:
                raise ConfigError(
                    f"trees of {[*map(forest.num_tokens, self.trees)][:8]} tokens and sequences of "
                    f"{[*self.lengths[:8]]} (the first 8 each); every sequence has the length of its tree"
                )

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    def num_pairs(self, mask: Mask) -> int:
        """Visible (query, key) pairs in layers that have `mask`."""
        if self.trees:
            return sum(forest.num_pairs(tree, mask.window_size) for tree in self.trees)
        return sum(int(mask.num_pairs(length)) for length in self.lengths)

    def flattened(self) -> "Batch":
        """Each path from a root to a leaf as a sequence of its own."""
        paths = tuple(chain.from_iterable(map(forest.leaf_paths, self.trees)))
        return Batch(tuple(map(forest.num_tokens, paths)), forest.unless_plain(paths)) if paths else self


def _whole(seq: int, length: object) -> int:
    number = whole(length)
    if number is None:
        raise ConfigError(f"sequence {seq} has length {length!r}; a length is a whole number of tokens")
    return number


def whole(value: Any) -> int | None:
    """`value` (NumPy's, torch's) as Python's integer; None for what is none, as `True` and 2.0."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def at_least(least: int, what: str, value: Any) -> int:
    """`value` as Python's integer; ConfigError: it is none, or below `least`; `what`: its name."""
    number = whole(value)
    if number is None or number < least:
        raise ConfigError(f"{what}: expected a whole number of at least {least}, got {value!r}")
    return number
