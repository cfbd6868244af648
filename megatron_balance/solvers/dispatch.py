"""Sequences to pipelines, so that the slowest ends early (Hydraulis, arXiv 2412.07894, Eq. 3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_balance.errors import InfeasibleError


@dataclass(frozen=True, slots=True)
class PipelineCost:
    """Cost of one pipeline: seconds of a microbatch in its longest stage are the sum of a l^2 + b l
    over its sequences, and c once.

    `stages`: of the pipeline; `max_tokens`: that a microbatch holds.
    """

    a: float
    b: float
    c: float
    stages: int
    max_tokens: int


def dispatch(lengths: Sequence[int], pipelines: Sequence[PipelineCost]) -> tuple[tuple[int, ...], ...]:
    """By pipeline, the numbers of its sequences, ascending.

    The longest first, each to the pipeline that holds it and would then be done first.

    Raises:
        InfeasibleError: a sequence that no pipeline holds.
    """
    done = [0.0] * len(pipelines)
    found: list[list[int]] = [[] for _ in pipelines]
    for seq in sorted(range(len(lengths)), key=lambda seq: -lengths[seq]):
        length = lengths[seq]
        able = [at for at, pipeline in enumerate(pipelines) if pipeline.max_tokens >= length]
        if not able:
            raise InfeasibleError(f"no pipeline holds a sequence of {length} tokens")
        then = {at: done[at] + (pipelines[at].a * length + pipelines[at].b) * length for at in able}
        best = min(able, key=then.__getitem__)
        done[best] = then[best]
        found[best].append(seq)
    return tuple(tuple(sorted(each)) for each in found)
