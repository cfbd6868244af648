"""flexsp: sequence-parallel groups of different sizes, chosen by an integer program.

Paper: FlexSP: Accelerating Large Language Model Training via Flexible Sequence Parallelism (Wang et
al., arXiv 2412.01523): planner, bucketing, blaster. What we implement: disjoint groups of one to
all ranks (powers of two, and all), Ulysses inside; the program chooses groups and sequences so that
the longest group is as short as possible. HiGHS (in SciPy) solves it within a number of nodes, so
that a plan depends on no clock; a greedy answer stands where the program does not beat it, where
SciPy is missing (one warning), and where the program would be too large. `plan_batch` is the
blaster.

What we leave out: model states in the memory constraint, ZeRO's communication, solving ahead.

Where we differ and why: ranks may stay idle. Seconds come from our cost model instead of fitted
constants, and count ranks without heads. Where nothing holds the batch, sequences go over all
ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from math import ceil, inf
from typing import Literal, TypeAlias

import numpy as np

from megatron_balance.cost.base import CostModel
from megatron_balance.ir.batch import Batch
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.ir.step import StepPlan
from megatron_balance.planners.base import Count, Slack
from megatron_balance.solvers import milp
from megatron_balance.solvers.groups import Frame, arrange, by_sequence, capacity_of, check_each, check_pool, sizes
from megatron_balance.solvers.milp import NoAnswerError, NoSolverError
from megatron_balance.solvers.packing import longest_first

log = logging.getLogger(__name__)
# Numbers of microbatches that `plan_batch` tries, from the least that fits on.
BLASTS = 3


@dataclass(frozen=True, slots=True)
class FlexSpOptions:
    tokens_per_rank: Count | None = None
    """Capacity of a rank in tokens, per microbatch; `slack` decides if not given."""
    slack: Slack = 1.5
    """Without `tokens_per_rank`: capacity over the batch's mean tokens per rank, at least 1."""
    solver: Literal["highs", "greedy"] = "highs"
    """`highs` improves the greedy answer by the integer program; `greedy` does without SciPy."""
    node_limit: Count = 50
    """Nodes of the program's search."""
    num_buckets: Count = 16
    """Lengths that the program tells apart."""
    most_variables: Count = 3000
    """A program of more variables is not tried; the greedy answer stands."""
    most_cells: Count = 2_000_000
    """Nor is one of more variables times constraints: one node of its search may take ten seconds."""


def plan(batch: Batch, cluster: Cluster, model: Model, cost: CostModel, options: FlexSpOptions) -> MicrobatchPlan:
    capacity = capacity_of(options, batch.num_tokens, cluster.num_ranks)
    check_pool(batch.lengths, cluster.num_ranks, options.tokens_per_rank)
    groups = _GroupSeconds(cluster, model, cost).groups(batch.lengths, capacity, options)
    placement, _ = by_sequence(((0, *each) for each in _on_ranks(groups, cluster)), len(batch.lengths))
    return Frame("flexsp", cluster, model, "head_exchange").microbatch(batch.lengths, placement)


def plan_batch(batch: Batch, cluster: Cluster, model: Model, cost: CostModel, options: FlexSpOptions) -> StepPlan:
    """The microbatches of the blaster: the fastest of the least numbers that fit."""
    capacity = capacity_of(options, batch.num_tokens, cluster.num_ranks)
    check_each(batch.lengths, cluster.num_ranks, options.tokens_per_rank)
    pricing = _GroupSeconds(cluster, model, cost)
    pool_tokens = capacity * cluster.num_ranks
    fewest = max(1, -(-batch.num_tokens // pool_tokens))
    tried = (_blast(batch.lengths, count) for count in range(fewest, max(fewest + BLASTS, len(batch.lengths) + 1)))

    def fits(microbatches: Sequence[Sequence[int]]) -> bool:
        return all(sum(batch.lengths[seq] for seq in seqs) <= pool_tokens for seqs in microbatches)

    fitting = list(filter(fits, tried))[:BLASTS]
    best_s, best = None, None
    for microbatches in fitting:
        grouped = [pricing.groups([batch.lengths[seq] for seq in seqs], capacity, options) for seqs in microbatches]
        pairs = zip(microbatches, grouped, strict=True)
        total_s = sum(pricing.problem([batch.lengths[s] for s in seqs], capacity).makespan(g) for seqs, g in pairs)
        if best_s is None or total_s < best_s:
            best_s, best = total_s, (microbatches, grouped)
    placed = (
        (microbatch, ranks, [seqs[at] for at in own])
        for microbatch, (seqs, groups) in enumerate(zip(*best, strict=True) if best is not None else ())
        for ranks, own in _on_ranks(groups, cluster)
    )
    placement, microbatch_of = by_sequence(placed, len(batch.lengths))
    return Frame("flexsp", cluster, model, "head_exchange").batch(batch.lengths, placement, microbatch_of)


def _blast(lengths: Sequence[int], count: int) -> list[list[int]]:
    """Sequences by length, cut into at most `count` runs of about equal tokens."""
    order = longest_first(lengths)
    total = sum(lengths)
    microbatches: list[list[int]] = [[] for _ in range(count)]
    before = 0
    for seq in order:
        # Where its middle lies.
        microbatches[min(count - 1, (2 * before + lengths[seq]) * count // (2 * total))].append(seq)
        before += lengths[seq]
    return [seqs for seqs in microbatches if seqs]


def _on_ranks(groups: Groups, cluster: Cluster) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    ranks_of = arrange([size for size, _ in groups], cluster.num_ranks, cluster.node_size)
    return zip(ranks_of, (seqs for _, seqs in groups), strict=True)


@dataclass(frozen=True, slots=True)
class _GroupSeconds:
    cluster: Cluster
    model: Model
    cost: CostModel

    def groups(self, lengths: Sequence[int], capacity: int, options: FlexSpOptions) -> Groups:
        """The groups of one microbatch; all ranks together where nothing else holds it."""
        if not lengths:
            return ()
        problem = self.problem(lengths, capacity)
        chosen = greedy(problem)
        together: Groups = ((self.cluster.num_ranks, tuple(range(len(lengths)))),)
        if chosen is None or problem.makespan(together) <= problem.makespan(chosen):
            chosen = together
        if options.solver == "highs":
            try:
                return improve(problem, chosen, options)
            except NoSolverError as error:
                _warn_once(str(error))
            except NoAnswerError as error:
                level = logging.INFO if isinstance(error, _TooLargeError) else logging.DEBUG
                log.log(level, "flexsp: the greedy answer stands: %s", error)
        return chosen

    def problem(self, lengths: Sequence[int], capacity: int) -> _GroupsProblem:
        allowed = sizes(self.cluster.num_ranks)
        seconds = {n: [self._seconds(n, size) for size in allowed] for n in set(lengths)}
        return _GroupsProblem(lengths, [seconds[n] for n in lengths], allowed, self.cluster.num_ranks, capacity)

    def _seconds(self, length: int, size: int) -> float:
        heads = ceil(self.model.num_heads / size) / self.model.num_heads
        busy_s = heads * self.cost.attention_s(self.model.mask.num_pairs(length)) + self.cost.linear_s(length / size)
        # Peers on the node and beyond it; each pair exchanges 1 / size^2 of the sequence.
        inside, outside = min(size, self.cluster.node_size) - 1, max(0, size - self.cluster.node_size)
        # Tokens of which a rank sends another one all heads, or all tokens of as many heads.
        part = length / size / size
        per_peer = self.cost.kv_bytes(part) + 2 * self.cost.query_bytes(part)
        inside_s = self.cost.intra_node_s(inside * per_peer, 0) if inside else 0.0
        outside_s = self.cost.inter_node_s(outside * per_peer, 0, 1 / self.cluster.ranks_per_nic) if outside else 0.0
        return busy_s + max(inside_s, outside_s)


@lru_cache(maxsize=1)
def _warn_once(reason: str) -> None:
    log.warning("flexsp: %s; the greedy answer stands", reason)


# Items into groups of chosen sizes: how many groups of which size, and which items in each, so
# that the longest is as short as possible. Machines are to be chosen, too: hard, so there is a greedy
# answer and an integer program that improves on it within a number of nodes.

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


class _TooLargeError(NoAnswerError):
    """The program is too large to be tried; the message says by what."""


@dataclass(frozen=True, slots=True)
class _GroupsProblem:
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


def greedy(problem: _GroupsProblem) -> Groups | None:
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


def _within(problem: _GroupsProblem, most_s: float) -> Groups | None:
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
            if most_s < inf:
                group = max(fits, key=lambda g: (time_s[g] + seconds[sizes[g]], -g))
            else:
                group = min(fits, key=time_s.__getitem__)
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


def improve(problem: _GroupsProblem, start: Groups, limits: FlexSpOptions) -> Groups:
    """Groups of a lower makespan than `start`, by a mixed-integer program (FlexSP's). Items of
    about the same tokens form a bucket and count as its largest.

    Raises:
        milp.NoSolverError: SciPy is not installed.
        NoAnswerError: `start` is best, the program is too large, or no better groups were found.
    """
    best_s = problem.makespan(start)
    if best_s * (1 - TOLERANCE) <= problem.least_makespan():
        raise NoAnswerError("the start is the best there is")
    if sum(min(problem.num_ranks // size, len(problem.tokens)) for size in problem.sizes) > limits.most_variables:
        raise _TooLargeError(f"the groups alone would make more than {limits.most_variables} variables")
    buckets = bucket(problem.tokens, limits.num_buckets)
    program = _IntegerProgram(problem, buckets, best_s * (1 - TOLERANCE))
    if program.num_variables > limits.most_variables:
        raise _TooLargeError(f"{program.num_variables} variables are more than {limits.most_variables}")
    if program.num_variables * program.num_rows > limits.most_cells:
        raise _TooLargeError(
            f"{program.num_variables} variables in {program.num_rows} constraints make more than "
            f"{limits.most_cells} cells: the first node alone would take many seconds"
        )
    counts = program.solve(limits.node_limit)
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

    def __init__(self, problem: _GroupsProblem, buckets: Sequence[Sequence[int]], most_s: float) -> None:
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
