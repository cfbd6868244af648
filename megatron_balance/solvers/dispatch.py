"""Sequences to pipelines, so that the slowest ends early (Hydraulis, arXiv 2412.07894, Eq. 3).

Eq. 2 charges a pipeline for all its sequences, and PP - 1 times for its longest. The constant c of
T(l) = a l^2 + b l + c belongs to a microbatch, not to each of its sequences as printed.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np

from megatron_balance.errors import ConfigError, InfeasibleError
from megatron_balance.ir.arrays import Floats
from megatron_balance.solvers import makespan, milp
from megatron_balance.solvers.makespan import NOT_HELD, MachinesProblem
from megatron_balance.solvers.packing import PackingProblem, longest_first, members, pack_better, pack_greedily

# Of Alg. 1, as in the paper's experiments.
TRIALS = 100
# By pipeline, the numbers of its sequences, ascending.
Assigned = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class PipelineCost:
    """One stage runs one sequence of l tokens in `a` l^2 + `b` l + `d` seconds, forward and backward;
    each microbatch adds `c`. `max_tokens`: most tokens of a microbatch, MaxLen.
    """

    a: float
    b: float
    c: float
    stages: int
    max_tokens: int
    d: float = 0.0

    def __post_init__(self) -> None:
        if min(self.a, self.b, self.c, self.d) < 0 or self.stages < 1 or self.max_tokens < 0:
            raise ConfigError(f"{self}: coefficients and max_tokens must not be negative, stages at least 1")

    def sequence_s(self, length: int) -> float:
        """Seconds of one stage for one sequence, without what its microbatch adds."""
        return (self.a * length + self.b) * length + self.d

    def bound_s(self, lengths: Sequence[int]) -> float:
        """Seconds by Eq. 2 (E.1), c spread over full microbatches: up to (stages - 1) c above
        `least_s`, which no packing comes below.
        """
        if not lengths:
            return 0.0
        spread = self.c / max(self.max_tokens, 1)
        loads = [self.sequence_s(length) + spread * length for length in lengths]
        return (self.stages - 1) * (max(loads) + self.c) + sum(loads)

    def least_s(self, lengths: Sequence[int]) -> float:
        """Seconds that no packing comes below (Eq. 1): `bound_s`, c of the longest once."""
        if not lengths:
            return 0.0
        return self.bound_s(lengths) - (self.stages - 1) * self.c / max(self.max_tokens, 1) * max(lengths)


def slowest_s(
    lengths: Sequence[int],
    pipelines: Sequence[PipelineCost],
    assigned: Assigned,
    of: Callable[[PipelineCost, Sequence[int]], float] = PipelineCost.bound_s,
) -> float:
    """Seconds of the slowest pipeline; `of`: `bound_s` or `least_s` of each."""
    each = zip(pipelines, assigned, strict=True)
    return max(of(pipeline, [lengths[seq] for seq in seqs]) for pipeline, seqs in each)


def dispatch(
    lengths: Sequence[int],
    pipelines: Sequence[PipelineCost],
    searches: int = makespan.IMPROVED,
    *,
    filled: bool = False,
) -> Assigned:
    """Sequences by pipeline: each to one that holds it, the slowest as fast as was found; equal on
    every host.

    `searches`: as of `makespan.assign`. `filled`: later stages wait for the fullest microbatch that
    packing will make, not for the longest sequence alone as in Eq. 3.

    Raises:
        InfeasibleError: a sequence that no pipeline holds.
    """
    _check(lengths, pipelines)
    problem = _problem_of(lengths, pipelines, filled=filled)
    return _by_pipeline(makespan.assign(problem, searches=searches).tolist(), len(pipelines))


def _problem_of(lengths: Sequence[int], pipelines: Sequence[PipelineCost], *, filled: bool = False) -> MachinesProblem:
    """The pipelines as machines; c is spread over the tokens of full microbatches."""
    kinds = list(dict.fromkeys(pipelines))
    tokens = np.array(lengths, dtype=np.int64)
    per_token = np.array([each.b + each.c / max(each.max_tokens, 1) for each in kinds])
    work = np.array([each.a for each in kinds])[:, None] * tokens.astype(np.float64) ** 2 + per_token[:, None] * tokens
    work += np.array([each.d for each in kinds])[:, None]
    work[np.array([each.max_tokens for each in kinds])[:, None] < tokens] = NOT_HELD
    return MachinesProblem(
        work,
        np.array([kinds.index(each) for each in pipelines], dtype=np.int64),
        np.array([each.stages - 1.0 for each in pipelines]),
        np.array([(each.stages - 1.0) * each.c for each in pipelines]),
        tokens,
        _fullest_s(work, pipelines, kinds) if filled and len(tokens) else None,
    )


def _fullest_s(work: Floats, pipelines: Sequence[PipelineCost], kinds: Sequence[PipelineCost]) -> Floats:
    """Seconds of the fullest microbatch of each kind [kinds] with short sequences alone."""
    # A pipeline with `step_s` of work in microbatches of t seconds takes step_s + c step_s / t
    # + (stages - 1) t, least at t = sqrt(step_s c / (stages - 1)); one is no fuller than max_tokens.
    done = np.where(work < NOT_HELD, work, 0.0).sum(axis=1)
    counts = np.array([pipelines.count(each) for each in kinds])
    step_s = 1 / (counts / np.maximum(done, 1e-30)).sum()
    return np.array(
        [
            min((step_s * each.c / (each.stages - 1)) ** 0.5, each.b * each.max_tokens) if each.stages > 1 else 0.0
            for each in kinds
        ]
    )


def greedy(lengths: Sequence[int], pipelines: Sequence[PipelineCost], trials: int = TRIALS, seed: int = 0) -> Assigned:
    """Alg. 1: sequences in random order, each where the slowest pipeline then is least slow; the
    best of `trials`. Its l_j in the line of l_max is read as l_i, and an empty pipeline takes no
    time. InfeasibleError: a sequence that no pipeline holds.
    """
    _check(lengths, pipelines)
    problem = _problem_of(lengths, pipelines)
    found, seconds = makespan.trials(problem, trials, random.Random(seed))
    return _by_pipeline(found[int(seconds.max(axis=1).argmin())].tolist(), len(pipelines))


def exact(lengths: Sequence[int], pipelines: Sequence[PipelineCost], node_limit: int = 200) -> Assigned:
    """The better of `dispatch` and what HiGHS (in SciPy) finds for Eq. 3 within `node_limit` nodes.

    Raises:
        InfeasibleError: a sequence that no pipeline holds.
        milp.NoSolverError: SciPy is not there.
    """
    known = dispatch(lengths, pipelines)
    problem = _problem_of(lengths, pipelines)
    found = _solved(problem, node_limit) if lengths else None
    if found is None:
        return known
    assigned = _by_pipeline(found, len(pipelines))
    return min(known, assigned, key=lambda each: slowest_s(lengths, pipelines, each))


def _solved(problem: MachinesProblem, node_limit: int) -> list[int] | None:
    work = problem.work[problem.kind]
    machines, items = problem.num_machines, problem.num_items
    able = work < NOT_HELD
    scale = float(work[able].max())
    work = np.where(able, work / scale, 0.0)
    # Columns: item by machine; of each machine its largest item, whether it has any; the slowest.
    cells, end = machines * items, machines * (items + 2)
    row = np.repeat(np.arange(machines), items)
    cell, item = np.arange(cells), np.tile(np.arange(items), machines)
    every = np.arange(machines)
    of, has = cells + every, cells + machines + every
    rows = milp.Constraints()
    rows.add(items, 1.0, 1.0, (item, cell, 1.0))
    rows.add(
        *(machines, -np.inf, 0.0, (row, cell, work.ravel()), (every, of, problem.behind)),
        *((every, has, problem.start_s / scale), (every, np.full(machines, end), -1.0)),
    )
    rows.add(cells, -np.inf, 0.0, (cell, cell, work.ravel()), (cell, of[row], -1.0))
    rows.add(cells, -np.inf, 0.0, (cell, cell, 1.0), (cell, has[row], -1.0))
    column = np.arange(end + 1)
    upper = np.concatenate([able.ravel().astype(np.float64), np.full(2 * machines + 1, np.inf)])
    program = rows.program((column == end).astype(np.float64), column < cells, upper)
    try:
        values = milp.solve(program, node_limit, gap=1e-4)
    except milp.NoAnswerError:
        return None
    return values[:cells].reshape(machines, items).argmax(axis=0).tolist()


def _check(lengths: Sequence[int], pipelines: Sequence[PipelineCost]) -> None:
    if not pipelines or min(lengths, default=1) < 1:
        raise ConfigError(
            f"dispatch needs pipelines and lengths of at least 1, got {len(pipelines)} and {lengths!r:.60}"
        )
    most = max(pipeline.max_tokens for pipeline in pipelines)
    longest = max(lengths, default=0)
    if longest > most:
        raise InfeasibleError(
            f"a sequence has {longest} tokens, the best pipeline's MaxLen is {most}; add a pipeline with more tensor "
            "or context parallelism, or cut documents shorter"
        )


def _by_pipeline(pipeline_of: Sequence[int], count: int) -> Assigned:
    return tuple(map(tuple, members(pipeline_of, count)))


# Packing of one pipeline's sequences into microbatches (Hydraulis, arXiv 2412.07894, Eq. 1,
# Appendix D).
#
# For each number V from tokens / MaxLen to tokens / UtilLen the longest sequences go first, each to
# the microbatch with the least time that has room, or each V is solved as an integer program. Eq. 1's
# (longest) (PP - 1 + V) picks the near-equal best; the clock of 1F1B decides between them.

# Share of the best tokens per second from which a microbatch counts as full (Appendix D).
EFFICIENCY = 0.85
NEAR = 1.02
MOST_TRIED = 24
# Of a microbatch's seconds; the backward of a matrix product is two of them.
FORWARD_SHARE = 1 / 3
Microbatches = tuple[tuple[int, ...], ...]


def _util_tokens(pipeline: PipelineCost) -> int:
    """UtilLen: the least length with T(l) / l within 1 / `EFFICIENCY` of its best."""

    def quotient(length: float) -> float:
        return pipeline.a * length + pipeline.b + pipeline.c / length

    most = max(pipeline.max_tokens, 1)
    at = float(most) if pipeline.a == 0 else min(most, max(1.0, (pipeline.c / pipeline.a) ** 0.5))
    limit = quotient(at) / EFFICIENCY
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
    sizes, times = [lengths[seq] for seq in order], [pipeline.sequence_s(lengths[seq]) for seq in order]
    tokens = sum(lengths)
    fewest = max(1, -(-tokens // pipeline.max_tokens))
    most = max(fewest, min(len(lengths), tokens // _util_tokens(pipeline)))
    near: list[tuple[float, list[int | None]]] = []
    for count in _counts(fewest, most, len(lengths)):
        # Without stages that wait for each other, each microbatch only adds its c.
        if near and (count > most or pipeline.stages == 1):
            break
        problem = PackingProblem(sizes, count, pipeline.max_tokens, times)
        bins = pack_greedily(problem)
        if node_limit:
            bins = pack_better(problem, bins, node_limit)
        if None not in bins:
            near.append(((problem.largest(bins) + pipeline.c) * (pipeline.stages - 1 + len(set(bins))), bins))
    best_s = min(value_s for value_s, _ in near)
    close = [_filled(order, bins) for value_s, bins in near if value_s <= best_s * NEAR]
    if len(close) == 1:
        return close[0]
    return min(close, key=lambda filled: clock_s([[lengths[seq] for seq in own] for own in filled], pipeline))


def _filled(order: Sequence[int], bins: Sequence[int | None]) -> Microbatches:
    """The microbatches with sequences; `bins`: of those of `order`."""
    found = members(bins, len(bins))
    return tuple(tuple(sorted(order[at] for at in own)) for own in found if own)


def _counts(fewest: int, most: int, limit: int) -> list[int]:
    """Numbers of microbatches to try: all of a small range, else with growing steps."""
    if most - fewest < MOST_TRIED:
        tried = list(range(fewest, most + 1))
    else:
        ratio = (most / fewest) ** (1 / (MOST_TRIED - 1))
        tried = sorted({min(most, round(fewest * ratio**k)) for k in range(MOST_TRIED)})
    return [*tried, *range(most + 1, limit + 1)]


def microbatch_s(lengths: Sequence[int], pipeline: PipelineCost) -> float:
    return sum(pipeline.sequence_s(length) for length in lengths) + pipeline.c


def clock_s(microbatches: Sequence[Sequence[int]], pipeline: PipelineCost) -> float:
    """Seconds of 1F1B over `microbatches` (lengths of each), as `simulator.pipeline.run`."""
    times = [microbatch_s(own, pipeline) for own in microbatches]
    stages, count = pipeline.stages, len(times)
    if stages == 1 or not count:
        return sum(times)
    # In the order of slots as long as one pass: stage s runs forwards 0 to stages - s - 1, then
    # backwards and forwards in turn.
    passes = [(s + (i if i < stages - s else 2 * i), s, i, False) for s in range(stages) for i in range(count)]
    passes += [(2 * stages - 1 - s + 2 * i, s, i, True) for s in range(stages) for i in range(count)]
    done: dict[tuple[int, int, bool], float] = {}
    clock = [0.0] * stages
    for _, stage, at, backward in sorted(passes):
        last = backward and stage == stages - 1
        before = (stage, at, False) if last else (stage + (1 if backward else -1), at, backward)
        spent = times[at] * (1 - FORWARD_SHARE if backward else FORWARD_SHARE)
        clock[stage] = done[stage, at, backward] = max(clock[stage], done.get(before, 0.0)) + spent
    return max(clock)
