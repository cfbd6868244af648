"""Outlier delay: the multi-level waiting queue of WLB-LLM (section 4.2).

Queue i holds documents of at least L_i and less than L_(i+1) tokens, first in, first out. What is
in a queue follows from lengths and from the order in which documents were dealt, so nothing but
that is carried.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from megatron_balance.errors import ConfigError
from megatron_balance.planners.wlb_llm.packing import Document


def check_thresholds(thresholds: Sequence[int]) -> tuple[int, ...]:
    """The thresholds L_1 to L_n of n queues, in tokens; none: nothing is delayed.

    Raises:
        ConfigError: they do not rise, or one is below 1 token.
    """
    given = tuple(thresholds)
    if any(each < 1 for each in given) or any(a >= b for a, b in zip(given, given[1:], strict=False)):
        raise ConfigError(
            f"thresholds: expected lengths in tokens that rise from queue to queue, such as [32768, 65536], got "
            f"{list(given)}; 'megatron-balance tune' finds some"
        )
    return given


def release(
    waiting: Sequence[Document], new: Sequence[Document], thresholds: Sequence[int], num_microbatches: int
) -> tuple[list[Document], list[Document]]:
    """The documents that are trained now, and those that wait on (WLB-LLM, Algorithm 1, lines 4 to
    15).

    A queue gives up its oldest `num_microbatches` documents as often as it has so many: where
    outliers come faster than one queue is emptied a step, the paper's queue would grow for ever.

    Args:
        waiting: in the queues so far, oldest first.
        new: just dealt.
        thresholds: L_1 to L_n, rising.
        num_microbatches: N.
    """
    now: list[Document] = []
    queues: list[list[Document]] = [[] for _ in thresholds]
    for document in [*waiting, *new]:
        level = bisect_right(thresholds, document.length)
        if level:
            queues[level - 1].append(document)
        else:
            now.append(document)
    held: list[Document] = []
    for queue in queues:
        released = len(queue) - len(queue) % num_microbatches
        now += queue[:released]
        held += queue[released:]
    return now, held
