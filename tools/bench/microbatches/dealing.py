"""Documents of a step in microbatches of equal length, or of equal work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

from megatron_balance.cost.base import CostModel
from megatron_balance.errors import InfeasibleError
from megatron_balance.workloads.lengths import Lengths

Work = Callable[[int], float]
"""Seconds of a document of so many tokens, one layer forward on one rank."""


def work_of(cost: CostModel) -> Work:
    """Seconds of attention and linear modules, W_a + W_l of WLB-LLM (section 4.1)."""
    return lambda length: cost.attention_s(length * (length + 1) / 2) + cost.linear_s(length)


def equal_length(lengths: Sequence[int], context: int) -> list[Lengths]:
    """The documents in their order, a microbatch for each `context` tokens.

    Some document ends there.
    """
    parts: dict[int, list[int]] = {}
    for length, start in zip(lengths, accumulate(lengths, initial=0), strict=False):
        parts.setdefault(start // context, []).append(length)
    return [tuple(part) for part in parts.values()]


def equal_work(lengths: Sequence[int], num_microbatches: int, room: int, work: Work) -> list[Lengths]:
    """The longest document first, each to the microbatch with the least work that has room for it.

    WLB-LLM's Algorithm 1 within one global batch: no document waits for a later one.

    Raises:
        InfeasibleError: a document for which no microbatch has room left.
    """
    microbatches: list[list[int]] = [[] for _ in range(num_microbatches)]
    works = [0.0] * num_microbatches
    for length in sorted(lengths, reverse=True):
        able = [m for m in range(num_microbatches) if sum(microbatches[m]) + length <= room]
        if not able:
            raise InfeasibleError(
                f"a document of {length} tokens: no microbatch of {num_microbatches} has room for it below {room} "
                "tokens; raise --room"
            )
        chosen = min(able, key=works.__getitem__)
        microbatches[chosen].append(length)
        works[chosen] += work(length)
    return [tuple(each) for each in microbatches]


def imbalance(microbatches: Sequence[Lengths], work: Work) -> float:
    """Work of the heaviest microbatch over the mean."""
    works = [sum(map(work, each)) for each in microbatches]
    return max(works) * len(works) / sum(works)
