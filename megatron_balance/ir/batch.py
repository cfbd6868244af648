"""The input of a planner: how long the sequences are."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_balance.errors import ConfigError
from megatron_balance.ir.whole import whole


@dataclass(frozen=True, slots=True)
class Batch:
    """Lengths in tokens of the sequences of one microbatch (of the whole pool); the index is the
    sequence's id.

    Integers of any library, such as NumPy's and torch's, become Python's.
    """

    lengths: tuple[int, ...]

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

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)


def _whole(seq: int, length: object) -> int:
    """A length as Python's own integer."""
    number = whole(length)
    if number is None:
        raise ConfigError(f"sequence {seq} has length {length!r}; a length is a whole number of tokens")
    return number
