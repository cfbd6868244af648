"""Dispatch of sequences to unequal pipelines (Hydraulis, arXiv 2412.07894, Eq. 3, Appendix E).

A pipeline takes at least the sum of its sequences' stage times, and (PP - 1) times that of its
longest one for filling and draining. The slowest pipeline is to be as fast as possible.

Here: longest sequences first, each to the pipeline that is done first with it, from several starts
(all pipelines; only those that the prices of the linear relaxation allow; only those where filling
is short), then moves and swaps out of the slowest pipeline. No randomness, no clock: every process
gets the same answer. `greedy` is the paper's Algorithm 1, `exact` its Eq. 3 as a mixed-integer
program.

Differs: Eq. 3 as printed counts c once a sequence; c is paid once a microbatch. Of those there are
at least tokens / MaxLen, which keeps the sum a lower bound of Eq. 1. Algorithm 1's l_j in the line
of l_max is l_i. An empty pipeline takes 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_balance.errors import ConfigError, InfeasibleError

Assignment = tuple[tuple[int, ...], ...]
"""By pipeline, the numbers of its sequences, ascending."""

PRICE_ROUNDS = 60
ROUNDS_PER_PIPELINE = 4
CLOSE_PRICES = (1.02, 1.15)
FILL_SHARES = (0.05, 0.12, 0.25)
IMPROVED = 6
CLOSE_ENOUGH = 5e-4
"""Distance from the bound at which the search ends."""
TRIALS = 100
"""Trials of Algorithm 1 (footnote 8)."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class PipelineCost:
    """Times and room of one pipeline.

    One stage runs one sequence of l tokens in `a` l^2 + `b` l seconds, forward and backward, and
    each microbatch adds `c`. `max_tokens`: most tokens of a microbatch, MaxLen.
    """

    a: float
    b: float
    c: float
    stages: int
    max_tokens: int

    def __post_init__(self) -> None:
        if min(self.a, self.b, self.c) < 0 or self.stages < 1 or self.max_tokens < 0:
            raise ConfigError(f"{self}: coefficients and max_tokens must not be negative, stages at least 1")

    def sequence_s(self, length: int) -> float:
        """Seconds of one stage for one sequence, without what its microbatch adds."""
        return (self.a * length + self.b) * length

    def bound_s(self, lengths: Sequence[int]) -> float:
        """A lower bound of the pipeline's seconds for these sequences (Appendix E.1)."""
        if not lengths:
            return 0.0
        fill_s = (self.stages - 1) * (self.sequence_s(max(lengths)) + self.c)
        return fill_s + sum(self._load_s(length) for length in lengths)

    def _load_s(self, length: int) -> float:
        return self.sequence_s(length) + self.c * length / max(self.max_tokens, 1)


def dispatch(lengths: Sequence[int], pipelines: Sequence[PipelineCost]) -> Assignment:
    """The numbers of each pipeline's sequences; every sequence once, where it fits.

    Raises:
        InfeasibleError: a sequence is longer than every pipeline's `max_tokens`.
        ConfigError: no pipelines, or a length below 1.
    """
    problem = _Problem.of(lengths, pipelines)
    bound_s, weights = _prices(problem)
    starts = [_longest_first(problem, allowed) for allowed in _allowed(problem, bound_s, weights)]
    best = min(starts, key=problem.slowest_s)
    for start in sorted(starts, key=problem.slowest_s)[:IMPROVED]:
        if problem.slowest_s(best) <= bound_s * (1 + CLOSE_ENOUGH):
            break
        best = min(best, _improve(problem, start), key=problem.slowest_s)
    return problem.numbered(best)


def _allowed(problem: _Problem, bound_s: float, weights: Floats) -> list[NDArray[np.bool_]]:
    """Tables [classes, sequences] of who may take what, one a start.

    All that hold them; those of nearly the least price; those that filling costs only a share of
    the bound. A sequence that would have no class keeps all of its own.
    """
    tables = [problem.fits]
    if len(problem.classes) > 1:
        priced = np.where(problem.fits, problem.load_s * weights[:, None], np.inf)
        tables += [priced <= priced.min(0) * close for close in CLOSE_PRICES]
    if any(each.stages > 1 for each in problem.classes):
        tables += [table & (problem.fill_s <= share * bound_s) for table in tables for share in FILL_SHARES]
    return [np.where((table & problem.fits).any(0), table & problem.fits, problem.fits) for table in tables]


def slowest_s(lengths: Sequence[int], pipelines: Sequence[PipelineCost], assignment: Assignment) -> float:
    """Seconds of the slowest pipeline by `PipelineCost.bound_s`: what dispatch minimises."""
    return max(
        pipeline.bound_s([lengths[seq] for seq in seqs]) for pipeline, seqs in zip(pipelines, assignment, strict=True)
    )


def lower_bound_s(lengths: Sequence[int], pipelines: Sequence[PipelineCost]) -> float:
    """Seconds below which no dispatch gets the slowest pipeline.

    The larger of the dual of the linear relaxation, sequences cut at will and filling left out, and
    of the sequence that takes longest alone where it is fastest.

    Raises:
        InfeasibleError, ConfigError: as `dispatch`.
    """
    problem = _Problem.of(lengths, pipelines)
    if not problem.lengths.size:
        return 0.0
    alone = np.where(problem.fits, problem.load_s + problem.fill_s, np.inf).min(0).max()
    return float(max(alone, _prices(problem)[0]))


@dataclass(frozen=True, slots=True)
class _Problem:
    """Sequences from the longest on, pipelines by class of equal ones.

    `load_s`, `fill_s`, `fits` [classes, sequences]: what a sequence adds, what filling takes where it
    is the longest, whether the class holds it.
    """

    order: NDArray[np.int64]
    lengths: NDArray[np.int64]
    classes: tuple[PipelineCost, ...]
    class_of: tuple[int, ...]
    load_s: Floats
    fill_s: Floats
    fits: NDArray[np.bool_]

    @staticmethod
    def of(lengths: Sequence[int], pipelines: Sequence[PipelineCost]) -> _Problem:
        if not pipelines:
            raise ConfigError("dispatch: no pipelines; give at least one")
        tokens = np.asarray(lengths, dtype=np.int64).reshape(-1)
        if tokens.size and tokens.min() < 1:
            raise ConfigError(f"dispatch: a sequence of {tokens.min()} tokens; lengths are whole numbers from 1")
        best = max(pipeline.max_tokens for pipeline in pipelines)
        if tokens.size and tokens.max() > best:
            raise InfeasibleError(
                f"a sequence has {tokens.max()} tokens, the best pipeline's MaxLen is {best}; use a scheme with more "
                "tensor or context parallelism, or cut the sequence"
            )
        order = np.argsort(-tokens, kind="stable")
        tokens = tokens[order]
        classes = tuple(dict.fromkeys(pipelines))
        class_of = tuple(classes.index(pipeline) for pipeline in pipelines)
        a, b, c, stages, room = (
            np.array([getattr(each, name) for each in classes], dtype=np.float64)[:, None]
            for name in ("a", "b", "c", "stages", "max_tokens")
        )
        sequence_s = (a * tokens + b) * tokens
        load_s = sequence_s + c * tokens / np.maximum(room, 1)
        return _Problem(order, tokens, classes, class_of, load_s, (stages - 1) * (sequence_s + c), tokens <= room)

    def numbered(self, places: list[list[int]]) -> Assignment:
        return tuple(tuple(sorted(int(self.order[place]) for place in own)) for own in places)

    def pipeline_s(self, pipeline: int, own: Sequence[int]) -> float:
        kind = self.class_of[pipeline]
        return float(self.load_s[kind, own].sum() + self.fill_s[kind, min(own)]) if own else 0.0

    def slowest_s(self, places: list[list[int]]) -> float:
        return max(self.pipeline_s(pipeline, own) for pipeline, own in enumerate(places))


def _prices(problem: _Problem) -> tuple[float, Floats]:
    """The best bound found for the linear relaxation, and the weights of classes that give it.

    For weights w >= 0 with sum(pipelines of k * w_k) = 1 no time is below the sum over sequences of
    their least w_k T_k(l). Classes with more work than their share are made dearer; steps shrink.
    """
    counts = np.bincount(problem.class_of, minlength=len(problem.classes)).astype(np.float64)
    if not problem.lengths.size:
        return 0.0, counts / counts.sum()
    room_load = np.where(problem.fits, problem.load_s, np.inf)
    work = np.where(problem.fits, problem.load_s, 0.0)
    weights = np.where(work.sum(1) > 0, 1 / np.maximum(work.sum(1), 1e-300), 0.0)
    weights /= (weights * counts).sum()
    best_s, best = 0.0, weights
    step = 0.5
    for _ in range(PRICE_ROUNDS):
        priced = (
            room_load * weights[:, None] if weights.all() else np.where(problem.fits, work * weights[:, None], np.inf)
        )
        chosen = priced.argmin(0)
        bound_s = float(priced.min(0).sum())
        if bound_s > best_s:
            best_s, best = bound_s, weights
        taken = np.bincount(chosen, work[chosen, np.arange(chosen.size)], len(counts)) / counts
        mean = taken.mean()
        weights = weights * np.exp(step * np.clip(taken / mean - 1 if mean else taken, -1, 1))
        weights = weights / (weights * counts).sum()
        step *= 0.92
    return best_s, best


def _longest_first(problem: _Problem, allowed: NDArray[np.bool_]) -> list[list[int]]:
    """Each sequence, from the longest on, where it is done first.

    Among equal pipelines only the least loaded and one empty one can be that.
    """
    places: list[list[int]] = [[] for _ in problem.class_of]
    empty = [[p for p in reversed(range(len(places))) if problem.class_of[p] == k] for k in range(len(problem.classes))]
    busy: list[list[tuple[float, int]]] = [[] for _ in problem.classes]
    load_s, fill_s, may = problem.load_s.tolist(), problem.fill_s.tolist(), allowed.tolist()
    kinds = range(len(problem.classes))
    for place in range(problem.lengths.size):
        best_s, best, fresh = float("inf"), -1, False
        for kind in kinds:
            if not may[kind][place]:
                continue
            extra_s = load_s[kind][place]
            if empty[kind]:
                done_s = extra_s + fill_s[kind][place]
                if done_s < best_s:
                    best_s, best, fresh = done_s, kind, True
            if busy[kind]:
                done_s = busy[kind][0][0] + extra_s
                if done_s < best_s:
                    best_s, best, fresh = done_s, kind, False
        if fresh:
            pipeline = empty[best].pop()
            busy[best].append((best_s, pipeline))
            heapify(busy[best])
        else:
            pipeline = busy[best][0][1]
            heapreplace(busy[best], (best_s, pipeline))
        places[pipeline].append(place)
    return places


def _improve(problem: _Problem, start: list[list[int]]) -> list[list[int]]:
    """Move or swap sequences out of the slowest pipeline while that helps the slower of the two."""
    places = [list(own) for own in start]
    count = len(places)
    total_s = np.array([problem.pipeline_s(p, own) for p, own in enumerate(places)])
    longest = np.array([own[0] if own else problem.lengths.size for own in places])
    for _ in range(ROUNDS_PER_PIPELINE * count + 32):
        slow = int(total_s.argmax())
        own = np.array(places[slow], dtype=np.int64)
        change = _best_move(problem, total_s, longest, slow, own)
        for other in np.argsort(total_s, kind="stable")[: 8 if change is None else 0]:
            if other != slow and (swap := _best_swap(problem, total_s, places, slow, int(other))):
                change = swap
                break
        if change is None:
            break
        out, other, back = change
        places[slow].remove(out)
        if back is not None:
            places[other].remove(back)
            places[slow] = sorted([*places[slow], back])
        places[other] = sorted([*places[other], out])
        for pipeline in (slow, other):
            total_s[pipeline] = problem.pipeline_s(pipeline, places[pipeline])
            longest[pipeline] = places[pipeline][0] if places[pipeline] else problem.lengths.size
    return places


Change = tuple[int, int, int | None]
"""A sequence out of the slowest pipeline, the pipeline it goes to, the sequence that comes back."""


def _without(problem: _Problem, kind: int, total_s: float, own: NDArray[np.int64]) -> Floats:
    """Seconds of a pipeline without filling or each of its sequences, and what filling then takes."""
    left = total_s - problem.fill_s[kind, own[0]] - problem.load_s[kind, own]
    fill = np.full(own.size, problem.fill_s[kind, own[0]])
    fill[0] = problem.fill_s[kind, own[1]] if own.size > 1 else 0.0
    return np.stack([left, fill])


def _best_move(
    problem: _Problem, total_s: Floats, longest: NDArray[np.int64], slow: int, own: NDArray[np.int64]
) -> Change | None:
    kind_of = np.array(problem.class_of)
    if not own.size:
        return None
    left_s = _without(problem, int(kind_of[slow]), float(total_s[slow]), own).sum(0)
    last = problem.lengths.size - 1
    now = np.where(longest <= last, problem.fill_s[kind_of, np.minimum(longest, last)], 0.0)
    grown = np.where(own[:, None] < longest, problem.fill_s[kind_of][:, own].T - now, 0.0)
    there_s = total_s + problem.load_s[kind_of][:, own].T + grown
    both = np.maximum(left_s[:, None], there_s)
    both[~problem.fits[kind_of][:, own].T] = np.inf
    both[:, slow] = np.inf
    at = int(both.argmin())
    if both.flat[at] >= total_s[slow] * (1 - 1e-9):
        return None
    return int(own[at // total_s.size]), at % total_s.size, None


def _best_swap(problem: _Problem, total_s: Floats, places: list[list[int]], slow: int, other: int) -> Change | None:
    own, theirs = np.array(places[slow], dtype=np.int64), np.array(places[other], dtype=np.int64)
    if not own.size or not theirs.size:
        return None
    here, there = problem.class_of[slow], problem.class_of[other]
    both = np.zeros((own.size, theirs.size))
    for kind, pipeline, mine, foreign, across in (
        (here, slow, own, theirs, False),
        (there, other, theirs, own, True),
    ):
        left, fill = _without(problem, kind, float(total_s[pipeline]), mine)
        fill = np.maximum(fill[:, None], problem.fill_s[kind, foreign])
        done_s = left[:, None] + problem.load_s[kind, foreign] + fill
        done_s = np.where(problem.fits[kind, foreign], done_s, np.inf)
        both = np.maximum(both, done_s.T if across else done_s)
    at = int(both.argmin())
    if both.flat[at] >= total_s[slow] * (1 - 1e-9):
        return None
    return int(own[at // theirs.size]), other, int(theirs[at % theirs.size])


def greedy(
    lengths: Sequence[int], pipelines: Sequence[PipelineCost], trials: int = TRIALS, seed: int = 0
) -> Assignment:
    """Algorithm 1: sequences in drawn orders, each where the slowest pipeline stays fastest.

    The best of all trials. All of them draw from one seed, so every process gets the same answer.

    Raises:
        InfeasibleError, ConfigError: as `dispatch`.
    """
    problem = _Problem.of(lengths, pipelines)
    draw = np.random.default_rng(seed)
    kind_of = np.array(problem.class_of)
    load_s, fill_s = problem.load_s[kind_of], problem.fill_s[kind_of]
    count, size = len(kind_of), problem.lengths.size
    barred = ~problem.fits[kind_of]
    orders = np.stack([draw.permutation(size) for _ in range(trials)]) if size else np.zeros((trials, 0), np.int64)
    sums, fills = np.zeros((trials, count)), np.zeros((trials, count))
    where = np.zeros((trials, size), dtype=np.int64)
    rows = np.arange(trials)
    for step in range(size):
        seq = orders[:, step]
        new_fill = np.maximum(fills, fill_s[:, seq].T)
        now = sums + fills
        # The top may be the one that grows, which is then larger anyway.
        done = np.maximum(sums + load_s[:, seq].T + new_fill, now.max(1)[:, None])
        done[barred[:, seq].T] = np.inf
        best = done.argmin(1)
        where[rows, seq] = best
        sums[rows, best] += load_s[best, seq]
        fills[rows, best] = new_fill[rows, best]
    trial = int((sums + fills).max(1).argmin())
    return problem.numbered([[int(s) for s in np.flatnonzero(where[trial] == p)] for p in range(count)])


def exact(lengths: Sequence[int], pipelines: Sequence[PipelineCost], node_limit: int = 1000) -> Assignment:
    """Eq. 3 as a mixed-integer program by HiGHS (in SciPy), at most `node_limit` search nodes.

    `dispatch`'s answer where the program's is not better.

    Raises:
        InfeasibleError, ConfigError: as `dispatch`; SciPy is not installed.
    """
    try:
        from scipy import optimize, sparse
    except ModuleNotFoundError:
        raise ConfigError(
            "exact dispatch needs SciPy, which brings HiGHS: pip install 'megatron-balance[highs]'"
        ) from None

    start = dispatch(lengths, pipelines)
    problem = _Problem.of(lengths, pipelines)
    size, count = problem.lengths.size, len(pipelines)
    if not size:
        return start
    kind_of = np.array(problem.class_of)
    load_s, fill_s = problem.load_s[kind_of], problem.fill_s[kind_of]
    # Columns: m[d, i], then the fill time of each pipeline, then the time of the slowest.
    cells = count * size
    d, i = np.divmod(np.arange(cells), size)
    every = sparse.csr_matrix((np.ones(cells), (i, np.arange(cells))), (size, cells + count + 1))
    time = sparse.csr_matrix(
        (
            np.concatenate([load_s.ravel(), np.ones(count), -np.ones(count)]),
            (
                np.concatenate([d, np.arange(count), np.arange(count)]),
                np.concatenate([np.arange(cells), cells + np.arange(count), np.full(count, cells + count)]),
            ),
        ),
        (count, cells + count + 1),
    )
    deep = np.flatnonzero(fill_s.ravel() > 0)
    rows = np.arange(deep.size)
    fill = sparse.csr_matrix(
        (
            np.concatenate([fill_s.ravel()[deep], -np.ones(deep.size)]),
            (np.concatenate([rows, rows]), np.concatenate([deep, cells + d[deep]])),
        ),
        (deep.size, cells + count + 1),
    )
    goal = np.zeros(cells + count + 1)
    goal[-1] = 1
    upper = np.concatenate([problem.fits[kind_of].ravel().astype(float), np.full(count + 1, np.inf)])
    result: Any = optimize.milp(
        goal,
        constraints=[
            optimize.LinearConstraint(every, 1, 1),
            optimize.LinearConstraint(time, -np.inf, 0),
            *([optimize.LinearConstraint(fill, -np.inf, 0)] if deep.size else []),
        ],
        integrality=np.concatenate([np.ones(cells), np.zeros(count + 1)]),
        bounds=optimize.Bounds(0, upper),
        options={"node_limit": node_limit},
    )
    if result.x is None:
        return start
    chosen = np.asarray(result.x[:cells]).reshape(count, size).argmax(0)
    found = problem.numbered([[int(s) for s in np.flatnonzero(chosen == p)] for p in range(count)])
    return min((start, found), key=lambda answer: slowest_s(lengths, pipelines, answer))
