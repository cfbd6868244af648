"""Sequences of one pipeline into microbatches (Hydraulis, arXiv 2412.07894, Eq. 1)."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_balance.solvers.dispatch import PipelineCost


def pack(lengths: Sequence[int], pipeline: PipelineCost) -> tuple[tuple[int, ...], ...]:
    """By microbatch, positions in `lengths`: the longest first, each into the first microbatch that
    has room.
    """
    found: list[list[int]] = []
    tokens: list[int] = []
    for at in sorted(range(len(lengths)), key=lambda at: -lengths[at]):
        room = (m for m, used in enumerate(tokens) if used + lengths[at] <= pipeline.max_tokens)
        into = next(room, len(found))
        if into == len(found):
            found.append([])
            tokens.append(0)
        found[into].append(at)
        tokens[into] += lengths[at]
    return tuple(tuple(sorted(each)) for each in found)
