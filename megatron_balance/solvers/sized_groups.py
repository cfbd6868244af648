"""Items into groups of chosen sizes: how many groups of which size, and which items in each, so
that the longest is as short as possible. Machines are to be chosen, too: hard, so there is a greedy
answer and an integer program that improves on it within a number of nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import inf
from typing import TypeAlias

import numpy as np

from megatron_balance.solvers import milp
from megatron_balance.solvers.milp import NoAnswerError
from megatron_balance.solvers.packing import longest_first

# Sizes and the items of each group.
Groups: TypeAlias = tuple[tuple[int, tuple[int, ...]], ...]

# Steps of the bisection of `greedy`.
STEPS = 12

# Makespans over the lower bound that `greedy` tries until one is enough.
_FACTORS = (1.0, 1.5, 2.0, 4.0, 8.0, inf)

# Makespans this close, relatively, are not told apart.
TOLERANCE = 0.005

# Of a group, over all items' tokens: more would be the same, and is beyond the solver's
# tolerance.
MOST_ROOM = 8


class TooLargeError(NoAnswerError):
    """The program is too large to be tried; the message says by what."""


@dataclass(frozen=True, slots=True)
class GroupsProblem:
    """`tokens`: of each item; `seconds[item][i]`: in a group of `sizes[i]`, ascending."""

    tokens: Sequence[int]
    seconds: Sequence[Sequence[float]]
    sizes: Sequence[int]
    num_ranks: int
    capacity: int

    def makespan(self, groups: Groups) -> float:
        return max((sum(self.seconds[k][self.sizes.index(size)] for k in items) for size, items in groups), default=0.0)

    def least_makespan(self) -> float:
        """Seconds at least: the slowest item alone, and all spread over all ranks."""
        fastest = [min((row[i] for i in self.allowed(item)), default=inf) for item, row in enumerate(self.seconds)]
        busy = sum(min(s * size for s, size in zip(row, self.sizes, strict=True)) for row in self.seconds)
        return max(*fastest, busy / self.num_ranks)

    def allowed(self, item: int, most_s: float = inf) -> list[int]:
        """Indices of the sizes that hold the item and take at most `most_s` for it."""
        tokens, seconds = self.tokens[item], self.seconds[item]
        return [i for i, size in enumerate(self.sizes) if tokens <= size * self.capacity and seconds[i] <= most_s]


def greedy(problem: GroupsProblem) -> Groups | None:
    """The best groups of a bisection over the makespan; None: it finds none."""
    low = problem.least_makespan()
    best = next((groups for factor in _FACTORS if (groups := _within(problem, low * factor)) is not None), None)
    if best is None:
        return None
    high = problem.makespan(best)
    for _ in range(STEPS):
        if high <= low * (1 + TOLERANCE):
            break
        middle = (low + high) / 2
        groups = _within(problem, middle)
        if groups is None:
            low = middle
        else:
            best, high = groups, min(middle, problem.makespan(groups))
    return best


def _within(problem: GroupsProblem, most_s: float) -> Groups | None:
    free = problem.num_ranks
    # Of each group: the index of its size.
    sizes: list[int] = []
    items: list[list[int]] = []
    free_tokens: list[int] = []
    time_s: list[float] = []
    for item in longest_first(problem.tokens):
        tokens, seconds = problem.tokens[item], problem.seconds[item]
        fits = [g for g, i in enumerate(sizes) if tokens <= free_tokens[g] and time_s[g] + seconds[i] <= most_s]
        if fits:
            group = (
                max(fits, key=lambda g: (time_s[g] + seconds[sizes[g]], -g))
                if most_s < inf
                else min(fits, key=time_s.__getitem__)
            )
        else:
            size = next((i for i in problem.allowed(item, most_s) if problem.sizes[i] <= free), None)
            if size is None:
                return None
            group = len(sizes)
            sizes.append(size)
            items.append([])
            free_tokens.append(problem.sizes[size] * problem.capacity)
            time_s.append(0.0)
            free -= problem.sizes[size]
        items[group].append(item)
        free_tokens[group] -= tokens
        time_s[group] += seconds[sizes[group]]
    return tuple((problem.sizes[i], tuple(sorted(group))) for i, group in zip(sizes, items, strict=True))


@dataclass(frozen=True, slots=True)
class Limits:
    """Kinds of items; nodes of the search; variables, and times constraints, of a program."""

    num_buckets: int = 16
    nodes: int = 50
    variables: int = 3000
    cells: int = 2_000_000


def improve(problem: GroupsProblem, start: Groups, limits: Limits) -> Groups:
    """Groups of a lower makespan than `start`, by a mixed-integer program (FlexSP's). Items of
    about the same tokens form a bucket and count as its largest.

    Raises:
        milp.NoSolverError: SciPy is not installed.
        NoAnswerError: `start` is best, the program is too large, or no better groups were found.
    """
    best_s = problem.makespan(start)
    if best_s * (1 - TOLERANCE) <= problem.least_makespan():
        raise NoAnswerError("the start is the best there is")
    if sum(min(problem.num_ranks // size, len(problem.tokens)) for size in problem.sizes) > limits.variables:
        raise TooLargeError(f"the groups alone would make more than {limits.variables} variables")
    buckets = bucket(problem.tokens, limits.num_buckets)
    program = _IntegerProgram(problem, buckets, best_s * (1 - TOLERANCE))
    if program.num_variables > limits.variables:
        raise TooLargeError(f"{program.num_variables} variables are more than {limits.variables}")
    if program.num_variables * program.num_rows > limits.cells:
        raise TooLargeError(
            f"{program.num_variables} variables in {program.num_rows} constraints make more than {limits.cells} cells: "
            "the first node alone would take many seconds"
        )
    counts = program.solve(limits.nodes)
    left = [list(items) for items in buckets]
    groups: list[tuple[int, tuple[int, ...]]] = []
    for size, taken in counts:
        items = [left[q].pop(0) for q, count in taken for _ in range(count)]
        groups.append((problem.sizes[size], tuple(sorted(items))))
    assert not any(left), left
    if sum(size for size, _ in groups) > problem.num_ranks:
        raise NoAnswerError("the solver's tolerance took items into groups that are not there")
    if problem.makespan(tuple(groups)) >= best_s:
        raise NoAnswerError("the groups of the program are no better")
    return tuple(groups)


def bucket(tokens: Sequence[int], num_buckets: int) -> list[list[int]]:
    """Items in descending order of tokens, cut into at most `num_buckets` runs with the least sum
    of (largest of its run - own) tokens, by FlexSP's recurrence over the last run.
    """
    order = longest_first(tokens)
    kinds = [list(items) for _, items in groupby(order, key=tokens.__getitem__)]
    if len(kinds) <= num_buckets:
        return kinds
    # Prefix sums over kinds.
    count, total = [0], [0]
    for items in kinds:
        count.append(count[-1] + len(items))
        total.append(total[-1] + len(items) * tokens[items[0]])

    def excess(a: int, b: int) -> int:
        return tokens[kinds[a][0]] * (count[b] - count[a]) - (total[b] - total[a])

    best = [excess(0, b) for b in range(len(kinds) + 1)]
    cuts = [[0] * (len(kinds) + 1)]
    for _ in range(1, num_buckets):
        begins = [0] * (len(kinds) + 1)
        sums = best.copy()
        _best_begins(best, excess, begins, sums, (1, len(kinds), 0, len(kinds)))
        best = sums
        cuts.append(begins)
    runs: list[list[int]] = []
    end = len(kinds)
    for row in reversed(cuts):
        if end:
            begin = row[end]
            runs.append([item for items in kinds[begin:end] for item in items])
            end = begin
    return runs[::-1]


def _best_begins(
    before: Sequence[int],
    excess: Callable[[int, int], int],
    begins: list[int],
    sums: list[int],
    span: tuple[int, int, int, int],
) -> None:
    """For each end in [low, high] the begin of its last run with the least sum, by halving."""
    low, high, first, last = span
    if low > high:
        return
    end = (low + high) // 2
    sums[end], begins[end] = min((before[a] + excess(a, end), a) for a in range(first, min(last, end - 1) + 1))
    _best_begins(before, excess, begins, sums, (low, end - 1, first, begins[end]))
    _best_begins(before, excess, begins, sums, (end + 1, high, begins[end], last))


class _IntegerProgram:
    """Minimise the makespan over how many items of each bucket each possible group takes."""

    def __init__(self, problem: GroupsProblem, buckets: Sequence[Sequence[int]], most_s: float) -> None:
        self.problem, self.buckets, self.most_s = problem, buckets, most_s
        largest = [items[0] for items in buckets]
        self.allowed = [set(problem.allowed(item, most_s)) for item in largest]
        self.seconds = [problem.seconds[item] for item in largest]
        self.tokens = [problem.tokens[item] for item in largest]
        self.group_sizes = [i for i, size in enumerate(problem.sizes) for _ in range(self._most_groups(i, size))]
        self.takes = [
            (q, p) for p, i in enumerate(self.group_sizes) for q in range(len(buckets)) if i in self.allowed[q]
        ]
        self.num_variables = 1 + len(self.group_sizes) + len(self.takes)
        num_alike = len(self.group_sizes) - len(set(self.group_sizes))
        self.num_rows = len(buckets) + 2 * len(self.group_sizes) + num_alike + 1

    def _most_groups(self, index: int, size: int) -> int:
        takers = sum(len(items) for items, allowed in zip(self.buckets, self.allowed, strict=True) if index in allowed)
        return min(self.problem.num_ranks // size, takers)

    def solve(self, nodes: int) -> Iterator[tuple[int, list[tuple[int, int]]]]:
        """For each group: the index of its size, and (bucket, items) it takes."""
        whole = np.arange(self.num_variables) > 0
        most = np.array([1.0] * (1 + len(self.group_sizes)) + [float(len(self.buckets[q])) for q, _ in self.takes])
        program = self._constraints().program((~whole).astype(np.float64), whole, most)
        assert len(program.low) == self.num_rows
        return self._read([round(value) for value in milp.solve(program, nodes, gap=TOLERANCE).tolist()])

    def _constraints(self) -> milp.Constraints:
        """Column 0: makespan over `most_s`; then the groups; then `takes`."""
        problem = self.problem
        bucket, group = np.array(self.takes, dtype=np.int64).reshape(-1, 2).T
        size = np.array(self.group_sizes, dtype=np.int64)
        num_ranks = np.array(problem.sizes, dtype=np.int64)[size]
        there = 1 + np.arange(len(size))
        takes = 1 + len(size) + np.arange(len(bucket))
        seconds = np.array(self.seconds)[bucket, size[group]] / self.most_s
        room = np.minimum(num_ranks * float(problem.capacity), MOST_ROOM * sum(problem.tokens))
        every, zero = np.arange(len(size)), np.zeros(len(size), dtype=np.int64)
        rows = milp.Constraints()
        items = np.array([len(items) for items in self.buckets])
        rows.add(len(items), items, items, (bucket, takes, 1.0))
        rows.add(len(size), -inf, 0.0, (group, takes, seconds), (every, zero, -1.0))
        tokens = np.array(self.tokens)[bucket] / room[group]
        rows.add(len(size), -inf, 0.0, (group, takes, tokens), (every, there, -1.0))
        # Groups of one size are alike: those with lower numbers are there first.
        alike = np.flatnonzero(size[1:] == size[:-1])
        pair = np.arange(len(alike))
        rows.add(len(alike), 0.0, inf, (pair, there[alike], 1.0), (pair, there[alike + 1], -1.0))
        rows.add(1, 0.0, float(problem.num_ranks), (zero, there, num_ranks.astype(np.float64)))
        return rows

    def _read(self, values: Sequence[int]) -> Iterator[tuple[int, list[tuple[int, int]]]]:
        taken: list[list[tuple[int, int]]] = [[] for _ in self.group_sizes]
        for count, (q, p) in zip(values[1 + len(self.group_sizes) :], self.takes, strict=True):
            if count:
                taken[p].append((q, count))
        return ((size, own) for size, own in zip(self.group_sizes, taken, strict=True) if own)
