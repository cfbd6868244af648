"""Packing into bins of one size so that the most work of a bin is least: Eq. 1 of WLB-LLM, and of
Hydraulis for a number of microbatches.

The baseline of systems whose samples all have the same length: the attention of a bin is as the
squares of its documents, unless their work is given. A greedy answer, and the integer program that
improves on it. Every rank of a job solves for itself, so the search is limited in nodes and never in
seconds.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum
from typing import Any

import numpy as np


class NoSolverError(Exception):
    """The solver is not installed; the message says what to do."""


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
        NoSolverError: SciPy is missing.
    """
    if not problem.sizes:
        return list(bins)
    found = _solve(problem, node_limit)
    if found is None:
        return list(bins)
    if None in bins or problem.largest(found) < problem.largest(bins):
        return list(found)
    return list(bins)


def _solve(problem: PackingProblem, node_limit: int) -> list[int] | None:
    """Bins of an answer to Eq. 1, the best that was found; None: none was found."""
    optimize, sparse = _library("scipy.optimize"), _library("scipy.sparse")
    sizes = np.array(problem.sizes, dtype=np.float64)
    count, bins = len(sizes), problem.num_bins
    item, at = (grid.ravel() for grid in np.meshgrid(np.arange(count), np.arange(bins), indexing="ij"))
    works = np.array(problem.works, dtype=np.float64)
    works /= works.max()  # in units of the largest item, so that all numbers are about 1
    each = np.arange(count * bins)
    once = sparse.csr_array((np.ones(len(each)), (item, each)), shape=(count, len(each) + 1))
    room = sparse.csr_array((sizes[item] / problem.capacity, (at, each)), shape=(bins, len(each) + 1))
    rows = np.concatenate([at, np.arange(bins)])
    columns = np.concatenate([each, np.full(bins, len(each))])
    load = sparse.csr_array(
        (np.concatenate([works[item], np.full(bins, -1.0)]), (rows, columns)), shape=(bins, len(each) + 1)
    )
    # Bins are alike: item i goes into one of the first i + 1.
    upper = np.append(np.where(at <= item, 1.0, 0.0), np.inf)
    result = optimize.milp(
        np.append(np.zeros(len(each)), 1.0),
        integrality=np.append(np.ones(len(each)), 0),
        bounds=optimize.Bounds(0.0, upper),
        constraints=[
            optimize.LinearConstraint(once, 1.0, 1.0),
            optimize.LinearConstraint(room, -np.inf, 1.0),
            optimize.LinearConstraint(load, -np.inf, 0.0),
        ],
        options={"node_limit": node_limit, "mip_rel_gap": 0.0},
    )
    if result.x is None:
        return None
    chosen = result.x[:-1].reshape(count, bins).argmax(axis=1)
    held = np.bincount(chosen, weights=sizes, minlength=bins)
    return None if held.max() > problem.capacity else chosen.tolist()


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise NoSolverError(
            f"packing by integer program needs SciPy ({error}); install it, or choose another packing"
        ) from error
