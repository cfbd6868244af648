"""A rank's place in a step: what attention and its rows need to know of the strategy."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_balance.runtime.bind import AttentionShape
from megatron_balance.runtime.groups import Groups


@dataclass(frozen=True, slots=True)
class RankPlace:
    """This rank under one strategy.

    `pipeline`: whose microbatches it runs. `attention`: the ranks that attend together. `shape`:
    heads of its tensor-parallel rank. `row_multiple`: the number of which its rows are a multiple.
    """

    pipeline: int
    attention: Groups
    shape: AttentionShape
    row_multiple: int
