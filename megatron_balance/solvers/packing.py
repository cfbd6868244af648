"""Packing items into bins: least loaded first, best fit, first fit, least squares of sizes, by an
integer program (Eq. 1 of WLB-LLM, and of Hydraulis for a number of microbatches), and in two halves.
"""

import bisect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace
from itertools import count

import numpy as np

from megatron_balance.solvers import milp


def longest_first(sizes: Sequence[float]) -> list[int]:
    """The order of items by size, the largest first; of equal ones the lower."""
    return sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True)  # stable, reversed too


def join_late(
    dealt: Sequence[Sequence[int]], late: Iterable[tuple[int, int]], most: float
) -> tuple[list[list[tuple[int, int]]], list[tuple[int, int]]]:
    """Microbatches with late sequences (number, tokens), each in turn in the one with the fewest dealt
    and joined tokens (ties: the lower); and those with which that would pass `most`.

    `dealt`: tokens of each sequence by microbatch, which are numbered from 0 on through all.
    """
    number = count()
    joined = [[(next(number), tokens) for tokens in microbatch] for microbatch in dealt]
    held, left = [sum(microbatch) for microbatch in dealt], list[tuple[int, int]]()
    for sequence in late:
        at = min(range(len(held)), key=held.__getitem__)
        if held[at] + sequence[1] > most:
            left.append(sequence)
            continue
        joined[at].append(sequence)
        held[at] += sequence[1]
    return joined, left


def best_fit(sizes: Sequence[int], spaces: Sequence[float]) -> list[int | None]:
    """The bin of each item, the one with the least room that holds it; None: no bin does."""
    free = sorted((space, index) for index, space in enumerate(spaces))
    chosen: list[int | None] = []
    for size in sizes:
        at = bisect.bisect_left(free, (size, -1))
        if at == len(free):
            chosen.append(None)
            continue
        space, index = free.pop(at)
        bisect.insort(free, (space - size, index))
        chosen.append(index)
    return chosen


# Less room than the item before needed: the room, negative, so that most comes first; load; which.
Full = tuple[int, float, int]


def begins_with_room(size: int, room: Sequence[int], ready: list[tuple[float, int]], full: list[Full]) -> bool:
    """Whether some has room; then the first of the heap `ready` is the least loaded that has."""
    while full and -full[0][0] >= size:
        _, load, at = heappop(full)
        heappush(ready, (load, at))
    while ready and room[ready[0][1]] < size:
        load, at = heappop(ready)
        heappush(full, (-room[at], load, at))
    return bool(ready)


def least_loaded(
    sizes: Sequence[int], works: Sequence[float], rooms: Sequence[int], loads: Sequence[float]
) -> Iterator[int | None]:
    """The bin of each item in turn: of those that have room the one with least work, of equal ones the
    lower; None: none has. `rooms`, `loads`: of the bins before.
    """
    room, ready, full = list(rooms), sorted((load, at) for at, load in enumerate(loads)), list[Full]()
    for size, work in zip(sizes, works, strict=True):
        if (full or room[ready[0][1]] < size) and not begins_with_room(size, room, ready, full):
            yield None
            continue
        load, at = ready[0]
        room[at] -= size
        heapreplace(ready, (load + work, at))
        yield at


def members(bins: Sequence[int | None], num_bins: int) -> list[list[int]]:
    """The items of each bin, ascending; `bins`: of each item, None: in none."""
    found: list[list[int]] = [[] for _ in range(num_bins)]
    for item, at in enumerate(bins):
        if at is not None:
            found[at].append(item)
    return found


def first_fit_decreasing(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Items of each bin, the largest first, in the first bin with room or one of their own."""
    bins: list[list[int]] = []
    room: list[int] = []
    for item in longest_first(sizes):
        at = next((number for number, left in enumerate(room) if left >= sizes[item]), len(bins))
        if at == len(bins):
            bins.append([])
            room.append(capacity)
        bins[at].append(item)
        room[at] -= sizes[item]
    return bins


# Bins of one size grow by this part of the smallest that could do, until all items fit.
GROWTH = 64


def first_fit_evenly(sizes: Sequence[int], num_bins: int, most: int | None) -> list[list[int]] | None:
    """Items of each bin by first fit into `num_bins` bins of one size, the smallest tried that
    does; None: bins of `most` do not. The same items of some of the bins, packed alone into as
    many, fit as well.
    """
    smallest = max(-(-sum(sizes) // num_bins), max(sizes, default=0))
    size, step = smallest, max(1, smallest // GROWTH)
    while most is None or size <= most:
        bins = first_fit_decreasing(sizes, size)
        if len(bins) <= num_bins:
            return bins + [[] for _ in range(num_bins - len(bins))]
        size = size + step if most is None or size == most else min(size + step, most)
    return None


@dataclass(frozen=True, slots=True)
class PackingProblem:
    """`sizes`: descending; `num_bins` of `capacity`. `work`: None: squares of sizes."""

    sizes: Sequence[int]
    num_bins: int
    capacity: int
    work: Sequence[float] | None = None

    @property
    def works(self) -> Sequence[float]:
        return [size * size for size in self.sizes] if self.work is None else self.work

    def largest(self, bins: Sequence[int | None]) -> float:
        """The most work of a bin; `bins`: of each item, None: in none."""
        loads = [0.0] * self.num_bins
        for work, at in zip(self.works, bins, strict=True):
            if at is not None:
                loads[at] += work
        return max(loads)


def pack_greedily(problem: PackingProblem) -> list[int | None]:
    """The bin of each item, the least work that has room; None: none has."""
    none = [0.0] * problem.num_bins
    return list(least_loaded(problem.sizes, problem.works, [problem.capacity] * problem.num_bins, none))


def pack_better(problem: PackingProblem, bins: Sequence[int | None], node_limit: int) -> list[int | None]:
    """The better of `bins` and what HiGHS finds for Eq. 1; an answer that holds all items is
    better.

    Raises:
        milp.NoSolverError: SciPy is missing.
    """
    found = _solve(problem, node_limit) if problem.sizes else None
    if found is None:
        return list(bins)
    if None in bins or problem.largest(found) < problem.largest(bins):
        return list(found)
    return list(bins)


def _solve(problem: PackingProblem, node_limit: int) -> list[int] | None:
    sizes = np.array(problem.sizes, dtype=np.float64)
    count, bins = len(sizes), problem.num_bins
    item, at = (grid.ravel() for grid in np.meshgrid(np.arange(count), np.arange(bins), indexing="ij"))
    works = np.array(problem.works, dtype=np.float64)
    # In units of the largest item, so that all numbers are about 1.
    works /= works.max()
    # Columns: item by bin, whether it is there; last the most work of a bin.
    each, every, most = np.arange(count * bins), np.arange(bins), np.full(bins, count * bins)
    rows = milp.Constraints()
    rows.add(count, 1.0, 1.0, (item, each, 1.0))
    rows.add(bins, -np.inf, 1.0, (at, each, sizes[item] / problem.capacity))
    rows.add(bins, -np.inf, 0.0, (at, each, works[item]), (every, most, -1.0))
    # Bins are alike: item i goes into one of the first i + 1.
    upper = np.append(np.where(at <= item, 1.0, 0.0), np.inf)
    is_most = np.arange(count * bins + 1) == count * bins
    try:
        values = milp.solve(rows.program(is_most.astype(np.float64), ~is_most, upper), node_limit)
    except milp.NoAnswerError:
        return None
    chosen = values[:-1].reshape(count, bins).argmax(axis=1)
    held = np.bincount(chosen, weights=sizes, minlength=bins)
    return None if held.max() > problem.capacity else chosen.tolist()


# Cells (items x size) up to which the most equal split is searched.
_EXACT = 1 << 24


def nano_batches(sizes: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Indices of the items of two nano-batches of sizes as equal as whole items allow, the larger
    one first.

    Largest first to the smaller one (of equal ones, that of the smaller squares); where that leaves
    more than a hundredth between them and the batch is small enough, the most equal split by subset
    sums.
    """
    parts: tuple[list[int], list[int]] = ([], [])
    loads = [(0, 0), (0, 0)]
    for i in longest_first(sizes):
        nano_batch = int(loads[1] < loads[0])
        parts[nano_batch].append(i)
        size, squares = loads[nano_batch]
        loads[nano_batch] = (size + sizes[i], squares + sizes[i] ** 2)
    total = sum(sizes)
    if abs(loads[0][0] - loads[1][0]) * 100 > total and len(sizes) * total <= _EXACT:
        parts = _most_equal(sizes, total)
    first, second = sorted(parts, key=lambda part: (-sum(sizes[i] for i in part), part))
    return tuple(sorted(first)), tuple(sorted(second))


def _most_equal(sizes: Sequence[int], total: int) -> tuple[list[int], list[int]]:
    # Bit s of `reached[i]`: some of the first i items are s together.
    reached = [1]
    for size in sizes:
        reached.append(reached[-1] | reached[-1] << size)
    lower = reached[-1] & ((1 << (total // 2 + 1)) - 1)
    left = lower.bit_length() - 1
    chosen: list[int] = []
    for i in range(len(sizes) - 1, -1, -1):
        if not reached[i] >> left & 1:
            chosen.append(i)
            left -= sizes[i]
    taken = set(chosen)
    return chosen, [i for i in range(len(sizes)) if i not in taken]
