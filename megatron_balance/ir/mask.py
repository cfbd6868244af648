"""The attention mask as a value: each query sees one run of the keys of its own sequence.

A mask answers one question, `keys`: which run of keys a query sees. Everything else follows from
it: the part of a (query, key) rectangle that counts (`ir.arrays`), numbers of pairs, completeness
(`compile.proof`). Positions are those of the sequence, so a mask never depends on how a sequence
is cut over ranks.
"""

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, TypeAlias

from megatron_balance.errors import ConfigError

# An int, or an int64 array [n]; functions return what they are given.
Positions: TypeAlias = Any

# Behind every position of every sequence (`ir.arrays.POSITION_BITS`).
END = 1 << 40


# Plans and programs carry a mask; it is causal unless they say otherwise. `verify`, `reference` and
# the passes of `compile` accept any mask. A model names its mask (`ir.model.Model.attention`),
# which planners hand to their plans. Costs and the executor handle causal, full and sliding-window
# masks (`mask_named`); a planner that cannot plan one of them refuses it
# (`planners.base.Planner.masks`). Under a window the keys that a query needs lie beside it, so no
# comm pattern of whole sequences is run there: `compile.halo` brings each rank the keys before its
# own tokens.
#
# Text and image tokens of one sample that attend to one another (a diffusion transformer's joint
# attention) are one sequence under a full mask.
@dataclass(frozen=True, slots=True)
class Mask(ABC):
    """A rule that gives each query one run of keys.

    The runs of consecutive queries overlap or touch, and neither end of them ever moves back.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """Name of the mask in the text form of programs and in the JSON of plans."""

    @abstractmethod
    def keys(self, seq: Positions, query: Positions) -> tuple[Positions, Positions]:
        """The run of keys [first, stop) that the query at position `query` of sequence `seq` sees.

        `stop` may lie behind the sequence's end: callers cut it there.
        """

    def queries(self, seq: Positions, key: Positions) -> tuple[Positions, Positions]:
        """The run of queries [first, stop) that see the key: the inverse of `keys`, by bisection."""
        return self._first_query(seq, key, stops=True), self._first_query(seq, key, stops=False)

    def num_pairs(self, length: Positions) -> Positions:
        """Visible (query, key) pairs of a sequence of `length` tokens; of an array of lengths only
        where a mask has a closed form.
        """
        runs = (self.keys(0, query) for query in range(length))
        return sum(min(stop, length) - first for first, stop in runs)

    def _first_query(self, seq: Positions, key: Positions, *, stops: bool) -> Positions:
        # The first query whose run stops behind `key` (`stops`), or begins behind it.
        # Arithmetic in place of `if`, since keys may be arrays. `behind`: it is `middle` or before.
        low, high = 0 * key, 0 * key + END
        for _ in range(END.bit_length()):
            middle = (low + high) // 2
            first, stop = self.keys(seq, middle)
            behind = ((stop > key) if stops else (first > key)) | (low == high)
            low, high = low + (1 - behind) * (middle + 1 - low), high + behind * (middle - high)
        return low


@dataclass(frozen=True, slots=True)
class Causal(Mask):
    """A query sees itself and the keys before it."""

    @property
    def name(self) -> str:
        return "causal"

    def keys(self, seq: Positions, query: Positions) -> tuple[Positions, Positions]:
        del seq
        return 0 * query, query + 1

    def queries(self, seq: Positions, key: Positions) -> tuple[Positions, Positions]:
        del seq
        return key, 0 * key + END

    def num_pairs(self, length: Positions) -> Positions:
        return length * (length + 1) // 2


@dataclass(frozen=True, slots=True)
class Full(Mask):
    """A query sees every key of its sequence."""

    @property
    def name(self) -> str:
        return "full"

    def keys(self, seq: Positions, query: Positions) -> tuple[Positions, Positions]:
        del seq
        return 0 * query, 0 * query + END

    def queries(self, seq: Positions, key: Positions) -> tuple[Positions, Positions]:
        del seq
        return 0 * key, 0 * key + END

    def num_pairs(self, length: Positions) -> Positions:
        return length * length


@dataclass(frozen=True, slots=True)
class SlidingWindow(Mask):
    """A query sees itself and the `size` - 1 keys before it: `window_size` (size - 1, 0)."""

    size: int

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ConfigError(f"a sliding window has at least 1 key, got {self.size}")

    @property
    def name(self) -> str:
        return f"window_{self.size}"

    def keys(self, seq: Positions, query: Positions) -> tuple[Positions, Positions]:
        del seq
        first = query - self.size + 1
        return first * (first > 0), query + 1

    def queries(self, seq: Positions, key: Positions) -> tuple[Positions, Positions]:
        del seq
        return key, key + self.size

    def num_pairs(self, length: Positions) -> Positions:
        hidden = (length - self.size) * (length > self.size)
        return CAUSAL.num_pairs(length) - CAUSAL.num_pairs(hidden)


CAUSAL = Causal()
FULL = Full()
# Masks of one size; sliding windows are named after theirs.
MASKS: dict[str, Mask] = {mask.name: mask for mask in (CAUSAL, FULL)}

WINDOW = "window"
# Kinds of masks, as planners name those that they plan for.
KINDS = (*MASKS, WINDOW)
# The kind of `ir.forest`'s masks; no model has one, batches do.
FOREST = "forest"
KNOWN = f"{', '.join(MASKS)}, window_KEYS (a sliding window, for example window_4096)"
_WINDOW_NAME = re.compile(rf"{WINDOW}_([1-9]\d{{0,9}})")


def mask_named(name: str) -> Mask:
    """The mask of this name; ConfigError where there is none."""
    window = _WINDOW_NAME.fullmatch(name)
    if window is not None:
        return SlidingWindow(int(window[1]))
    if name not in MASKS:
        raise ConfigError(f"unknown mask {name!r}; known: {KNOWN}")
    return MASKS[name]


def kind_of(mask: Mask) -> str:
    """The kind of a mask, one of `KINDS`, or `FOREST`."""
    return mask.name.partition("_")[0]
