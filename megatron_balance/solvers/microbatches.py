"""Packing of one pipeline's sequences into microbatches (Hydraulis, arXiv 2412.07894, Eq. 1,
Appendix D).

For each number V from tokens / MaxLen to tokens / UtilLen the longest sequences go first, each to
the microbatch with the least time that has room, or each V is solved as an integer program. Eq. 1's
(longest) (PP - 1 + V) picks the near-equal best; the clock of 1F1B decides between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush, heapreplace
from math import ceil

from megatron_balance.errors import InfeasibleError
from megatron_balance.solvers.dispatch import PipelineCost
from megatron_balance.solvers.packing import PackingProblem, longest_first, pack_better

# Share of the best tokens per second from which a microbatch counts as full (Appendix D).
EFFICIENCY = 0.85
NEAR = 1.02
MOST_TRIED = 24
# Of a microbatch's seconds; the backward of a matrix product is two of them.
FORWARD_SHARE = 1 / 3

Microbatches = tuple[tuple[int, ...], ...]


def util_tokens(pipeline: PipelineCost, efficiency: float = EFFICIENCY) -> int:
    """UtilLen: the least length with T(l) / l within 1 / `efficiency` of its best."""

    def quotient(length: float) -> float:
        return pipeline.a * length + pipeline.b + pipeline.c / length

    most = max(pipeline.max_tokens, 1)
    at = float(most) if pipeline.a == 0 else min(most, max(1.0, (pipeline.c / pipeline.a) ** 0.5))
    limit = quotient(at) / efficiency
    low, high = 1, max(1, ceil(at))
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if quotient(middle) <= limit else (middle + 1, high)
    return low


def pack(lengths: Sequence[int], pipeline: PipelineCost, node_limit: int = 0) -> Microbatches:
    """The microbatches of one pipeline: positions in `lengths`, none empty, none above
    `max_tokens`.

    `node_limit`: for each V the better of the longest first and HiGHS within so many nodes; 0:
    without.

    Raises:
        InfeasibleError: a sequence is longer than `max_tokens`.
        milp.NoSolverError: SciPy is missing.
    """
    if not lengths:
        return ()
    longest = max(lengths)
    if longest > pipeline.max_tokens:
        raise InfeasibleError(
            f"a sequence has {longest} tokens, the pipeline's MaxLen is {pipeline.max_tokens}; use a scheme with more "
            "tensor or context parallelism, or cut the sequence"
        )
    order = longest_first(lengths)
    times = [pipeline.sequence_s(length) for length in lengths]
    tokens = sum(lengths)
    fewest = max(1, -(-tokens // pipeline.max_tokens))
    most = max(fewest, min(len(lengths), tokens // util_tokens(pipeline)))
    best_s, near = float("inf"), list[tuple[float, Microbatches]]()
    for count in _counts(fewest, most, len(lengths)):
        # Without stages that wait for each other, each microbatch only adds its c.
        if near and (count > most or pipeline.stages == 1):
            break
        filled = _fill(lengths, times, order, pipeline.max_tokens, count)
        if node_limit:
            filled = _by_program(lengths, times, order, (pipeline.max_tokens, count), filled, node_limit)
        if filled is None:
            continue
        slowest_s, bins = filled
        value_s = _bound_s(slowest_s + pipeline.c, len(bins), pipeline)
        near.append((value_s, bins))
        best_s = min(best_s, value_s)
    if len(near) == 1:
        return near[0][1]
    close = [bins for value_s, bins in near if value_s <= best_s * NEAR]
    return min(close, key=lambda bins: clock_s([[lengths[seq] for seq in own] for own in bins], pipeline))


def _counts(fewest: int, most: int, limit: int) -> list[int]:
    """Numbers of microbatches to try: all of a small range, else with growing steps."""
    if most - fewest < MOST_TRIED:
        tried = list(range(fewest, most + 1))
    else:
        ratio = (most / fewest) ** (1 / (MOST_TRIED - 1))
        tried = sorted({min(most, round(fewest * ratio**k)) for k in range(MOST_TRIED)})
    return [*tried, *range(most + 1, limit + 1)]


def _fill(
    lengths: Sequence[int], times: Sequence[float], order: Sequence[int], most: int, count: int
) -> tuple[float, Microbatches] | None:
    """`count` microbatches, and seconds of the slowest without c; None: no room."""
    bins: list[list[int]] = [[] for _ in range(count)]
    room = [most] * count
    heap = [(0.0, number) for number in range(count)]
    for seq in order:
        length = lengths[seq]
        full: list[tuple[float, int]] = []
        while heap and room[heap[0][1]] < length:
            full.append(heappop(heap))
        if not heap:
            return None
        time_s, number = heap[0]
        bins[number].append(seq)
        room[number] -= length
        heapreplace(heap, (time_s + times[seq], number))
        for each in full:
            heappush(heap, each)
    return max(heap)[0], tuple(tuple(sorted(own)) for own in bins if own)


def _by_program(
    lengths: Sequence[int],
    times: Sequence[float],
    order: Sequence[int],
    bins: tuple[int, int],
    filled: tuple[float, Microbatches] | None,
    node_limit: int,
) -> tuple[float, Microbatches] | None:
    """The better of `filled` and what HiGHS finds; `bins`: most tokens of one, and how many."""
    work = [times[seq] for seq in order]
    problem = PackingProblem([lengths[seq] for seq in order], bins[1], bins[0], work)
    known: dict[int, int] = {} if filled is None else {seq: at for at, own in enumerate(filled[1]) for seq in own}
    found = pack_better(problem, [known.get(seq) for seq in order], node_limit)
    if None in found:
        return None
    own: list[list[int]] = [[] for _ in range(bins[1])]
    for seq, at in zip(order, found, strict=True):
        assert at is not None
        own[at].append(seq)
    return problem.largest(found), tuple(tuple(sorted(each)) for each in own if each)


def microbatch_s(lengths: Sequence[int], pipeline: PipelineCost) -> float:
    return sum(pipeline.sequence_s(length) for length in lengths) + pipeline.c


def _bound_s(slowest_s: float, count: int, pipeline: PipelineCost) -> float:
    return slowest_s * (pipeline.stages - 1 + count)


def clock_s(microbatches: Sequence[Sequence[int]], pipeline: PipelineCost) -> float:
    """Seconds of 1F1B over `microbatches` (lengths of each), as `simulator.pipeline.run`."""
    times = [microbatch_s(own, pipeline) for own in microbatches]
    stages, count = pipeline.stages, len(times)
    if stages == 1 or not count:
        return sum(times)
    forward = [[0.0] * count for _ in range(stages)]
    backward = [[0.0] * count for _ in range(stages)]
    clock = [0.0] * stages
    at = [(0, 0)] * stages
    moved = True
    while moved:
        moved = False
        for stage in range(stages):
            while sum(at[stage]) < 2 * count:
                ahead, behind = at[stage]
                warm = min(stages - stage - 1, count)
                if ahead < count and ahead - behind <= warm:
                    ready = forward[stage - 1][ahead] if stage else 0.0
                    if stage and at[stage - 1][0] <= ahead:
                        break
                    clock[stage] = forward[stage][ahead] = max(clock[stage], ready) + times[ahead] * FORWARD_SHARE
                    at[stage] = (ahead + 1, behind)
                else:
                    if stage < stages - 1 and at[stage + 1][1] <= behind:
                        break
                    ready = backward[stage + 1][behind] if stage < stages - 1 else forward[stage][behind]
                    spent = times[behind] * (1 - FORWARD_SHARE)
                    clock[stage] = backward[stage][behind] = max(clock[stage], ready) + spent
                    at[stage] = (ahead, behind + 1)
                moved = True
    return max(clock)
