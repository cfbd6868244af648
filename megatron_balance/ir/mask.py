"""The attention mask as a value: which queries of a sequence see which of its keys.

A sequence is a line of tokens, or a tree of them (`ir.forest`), and along its path a query sees one
run of keys. `queries` says who sees a key, `keys` what a query sees, both as hulls: between the keys
of a run a tree has others, of branches beside the path. `band` says what a kernel computes of a
rectangle of queries and keys. Everything else follows from these: the rectangles into which a mask
cuts another (`ir.arrays.split`), numbers of pairs, completeness (`compile.proof`). Positions are
those of the sequence, so a mask never depends on how a sequence is cut over ranks.
"""

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from megatron_balance.errors import ConfigError

# An int, or an int64 array [n]; functions return what they are given.
Positions: TypeAlias = Any

# Behind every position of every sequence (`ir.arrays.POSITION_BITS`).
END = 1 << 40


# Plans and programs carry a mask; it is causal unless they say otherwise. `verify`, `reference` and
# the passes of `compile` accept any mask. A model names its mask (`ir.model.Model.attention`),
# which planners hand to their plans. Costs and the executor read masks by `band`, so they handle
# whatever a kernel's entry does: full, causal at the bottom right, and windows of either. A planner
# that cannot plan one of them refuses it (`planners.base.Planner.masks`). Under a window the keys
# that a query needs lie beside it, under a tree on its path, so few comm patterns of whole
# sequences are run there: `compile.halo` brings each rank the keys that its own tokens see.
#
# Text and image tokens of one sample that attend to one another (a diffusion transformer's joint
# attention) are one sequence under a full mask.
@dataclass(frozen=True, slots=True)
class Mask(ABC):
    """A rule that gives each query one run of keys along its path.

    Where a sequence is a line, the runs of consecutive queries overlap or touch, and neither end of
    them ever moves back; `queries` and `keys` are then exact.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """Name of the mask in the text form of programs and in the JSON of plans."""

    @property
    def window_size(self) -> int:
        """Keys of its window; 0: it has none."""
        return 0

    @property
    def without_window(self) -> "Mask":
        return self

    @abstractmethod
    def queries(self, seq: Positions, key: Positions) -> tuple[Positions, Positions]:
        """The queries [first, stop) among which all are that see the key at position `key` of `seq`.

        `stop` may lie behind the sequence's end: callers cut it there.
        """

    @abstractmethod
    def keys(self, seq: Positions, query: Positions) -> tuple[Positions, Positions]:
        """The keys [first, stop) among which all are that the query sees; as `queries`."""

    @abstractmethod
    def band(self, seq: Positions, query: Positions, key: Positions) -> "Band":
        """The pairs that a kernel computes of a rectangle whose first query and key are these."""

    @abstractmethod
    def num_pairs(self, length: Positions) -> Positions:
        """Visible (query, key) pairs of sequences of `length` tokens that are lines."""


class Band(NamedTuple):
    """The pairs of a rectangle that count: of the query at q and the key at k those with
    q < k + `reach` and, if `causal`, k <= q.

    Of a rectangle that no mask has to cut (`ir.arrays.split`) these are the pairs that it shows, and
    one entry of a kernel computes them. Each is one value for all rectangles, or an array [n].
    """

    causal: Any
    reach: Any = END

    @property
    def windowed(self) -> bool:
        """Whether a window ends what queries see."""
        return self.reach is not END


@dataclass(frozen=True, slots=True)
class _Causal(Mask):
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

    def band(self, seq: Positions, query: Positions, key: Positions) -> Band:
        del seq, query, key
        return Band(causal=True)

    def num_pairs(self, length: Positions) -> Positions:
        return length * (length + 1) // 2


@dataclass(frozen=True, slots=True)
class _Full(Mask):
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

    def band(self, seq: Positions, query: Positions, key: Positions) -> Band:
        del seq, query, key
        return Band(causal=False)

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

    @property
    def window_size(self) -> int:
        return self.size

    @property
    def without_window(self) -> Mask:
        return CAUSAL

    def keys(self, seq: Positions, query: Positions) -> tuple[Positions, Positions]:
        del seq
        first = query - self.size + 1
        return first * (first > 0), query + 1

    def queries(self, seq: Positions, key: Positions) -> tuple[Positions, Positions]:
        del seq
        return key, key + self.size

    def band(self, seq: Positions, query: Positions, key: Positions) -> Band:
        del seq, query, key
        return Band(causal=True, reach=self.size)

    def num_pairs(self, length: Positions) -> Positions:
        hidden = (length - self.size) * (length > self.size)
        return CAUSAL.num_pairs(length) - CAUSAL.num_pairs(hidden)


CAUSAL = _Causal()
FULL = _Full()
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
