"""Packing into bins of one size so that the most work of a bin is least: Eq. 1 of WLB-LLM, and of
Hydraulis for a number of microbatches.

The baseline of systems whose samples all have the same length: the attention of a bin is as the
squares of its documents, unless their work is given. A greedy answer, and the integer program that
improves on it. Every rank of a job solves for itself, so the search is limited in nodes and never in
seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum

import numpy as np

from megatron_balance.solvers import milp


@dataclass(frozen=True, slots=True)
class PackingProblem:
    """`sizes`: of the items, descending; `num_bins` bins of `capacity`. `work`: of the items; None:
    the squares of their sizes.
    """

    sizes: Sequence[int]
    num_bins: int
    capacity: int
    work: Sequence[float] | None = None

    @property
    def works(self) -> Sequence[float]:
        return [size * size for size in self.sizes] if self.work is None else self.work

    def largest(self, bins: Sequence[int | None]) -> float:
        """The most work of a bin; `bins`: of each item, None: in none."""
        works = self.works
        return max(
            fsum(work for work, at in zip(works, bins, strict=True) if at == own) for own in range(self.num_bins)
        )


def greedy(problem: PackingProblem) -> list[int | None]:
    """The bin of each item when every item in turn goes to the bin with the least sum of squares of
    those with room; None: none has room.

    Ties go to the lower bin.
    """
    loads, room = [0] * problem.num_bins, [problem.capacity] * problem.num_bins
    chosen: list[int | None] = []
    for size in problem.sizes:
        at = min((load, own) for own, load in enumerate(loads) if room[own] >= size) if max(room) >= size else None
        chosen.append(None if at is None else at[1])
        if at is not None:
            loads[at[1]] += size * size
            room[at[1]] -= size
    return chosen


def improve(problem: PackingProblem, bins: Sequence[int | None], node_limit: int) -> list[int | None]:
    """The better of `bins` and what HiGHS (in SciPy) finds for Eq. 1 within `node_limit` nodes.

    An answer that holds all items is better than one that leaves some out.

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
    """Bins of an answer to Eq. 1, the best that was found; None: none was found."""
    sizes = np.array(problem.sizes, dtype=np.float64)
    count, bins = len(sizes), problem.num_bins
    item, at = (grid.ravel() for grid in np.meshgrid(np.arange(count), np.arange(bins), indexing="ij"))
    works = np.array(problem.works, dtype=np.float64)
    works /= works.max()  # in units of the largest item, so that all numbers are about 1
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
