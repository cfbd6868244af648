"""The input of a planner: how long the sequences are."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_balance.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Batch:
    """Lengths in tokens of the sequences of one microbatch (of the whole pool); the index is the
    sequence's id.
    """

    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        for seq, length in enumerate(self.lengths):
            if type(length) is not int:
                raise ConfigError(f"sequence {seq} has length {length!r}; a length is a whole number of tokens")
            if length < 1:
                raise ConfigError(
                    f"sequence {seq} has {length} tokens; every sequence needs at least 1. Drop empty documents "
                    "before planning"
                )

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)
