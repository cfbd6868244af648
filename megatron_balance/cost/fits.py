"""Least squares with coefficients that are not negative: links (alpha-beta), quadratic latencies,
KnapFormer's gamma.

Errors are weighed relatively: a profile spans microseconds to seconds, and unweighted squares would
hear the longest times alone. A negative coefficient would let more work take less time, so the best
fit without any is taken.

Solved in fractions: BLAS rounds as each CPU's kernel has it, and then ranks on different CPUs, whose
planners take their costs from here, would plan differently.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from megatron_balance.cost.base import Link
from megatron_balance.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Quadratic:
    """Seconds a l^2 + b l + c of a sequence of l tokens under one parallel scheme (Hydraulis, arXiv
    2412.07894, Appendix C.2).
    """

    a: float
    b: float
    c: float

    def time_s(self, length: float) -> float:
        """Seconds of one sequence."""
        return (self.a * length + self.b) * length + self.c


def fit_quadratic(lengths: Sequence[float], seconds: Sequence[float]) -> Quadratic:
    """The quadratic nearest to measured (length in tokens, seconds), no coefficient negative.

    Raises:
        ConfigError: fewer than three different lengths, or times that are not positive.
    """
    if len(set(lengths)) < 3:
        raise ConfigError(f"a quadratic needs at least 3 different lengths, got {sorted(set(lengths))}")
    a, b, c = least_squares([[length**2, length, 1.0] for length in lengths], seconds, what="quadratic")
    return Quadratic(a, b, c)


def fit_link(num_bytes: Sequence[float], seconds: Sequence[float]) -> Link:
    """The alpha and rate nearest to measured (bytes, seconds) of messages.

    Raises:
        ConfigError: fewer than two sizes, or times that are not positive.
    """
    if len(set(num_bytes)) < 2:
        raise ConfigError(f"a link needs at least 2 different message sizes, got {sorted(set(num_bytes))}")
    beta, alpha = least_squares([[size, 1.0] for size in num_bytes], seconds, what="link", needed=(0,))
    return Link(alpha, 1.0 / beta)


def least_squares(
    columns: Sequence[Sequence[float]], seconds: Sequence[float], *, what: str, needed: tuple[int, ...] = ()
) -> tuple[float, ...]:
    """Coefficients, none negative, that minimise the relative squared error of columns @
    coefficients against seconds.

    `columns` [n, c], positive, with few c: every subset of coefficients is tried that has those in
    `needed`. These come out positive also where noise hides that the times rise.

    Raises:
        ConfigError: no times, or one that is not positive.
    """
    targets = np.asarray(seconds, dtype=np.float64)
    if not len(targets) or not (targets > 0).all():
        raise ConfigError(f"{what}: times to fit must be positive seconds, got {list(seconds)}")
    rows = np.asarray(columns, dtype=np.float64) / targets[:, None]
    scale = rows.max(axis=0)
    width = rows.shape[1]
    equations = _normal_equations(rows / scale)
    best, best_error = np.zeros(width), np.inf
    for size in range(1, width + 1):
        for chosen in combinations(range(width), size):
            if not set(needed) <= set(chosen):
                continue
            at = list(chosen)
            scaled = _solved([[equations[i][j] for j in (*at, width)] for i in at])
            if scaled is None:  # some columns say the same: fewer will do
                continue
            solution = scaled / scale[at]
            error = float((((rows[:, at] * solution).sum(axis=1) - 1) ** 2).sum())
            if (
                (solution >= 0).all()
                and (solution[[at.index(i) for i in needed]] > 0).all()
                and error < best_error * (1 - 1e-12)
            ):
                best, best_error = np.zeros(width), error
                best[at] = solution
    return tuple(best.tolist())


def _normal_equations(columns: NDArray[np.float64]) -> list[list[int]]:
    """The equations [c, c + 1] of coefficients by which columns [n, c] come nearest to 1 in all rows:
    whole numbers, all times the same, so nothing is rounded.
    """
    ratios = [[value.as_integer_ratio() for value in row] for row in columns.tolist()]
    unit: int = max(below for row in ratios for _, below in row)  # of powers of two
    rows = [[*(above * (unit // below) for above, below in row), unit] for row in ratios]
    width = columns.shape[1]
    return [[sum(row[i] * row[j] for row in rows) for j in range(width + 1)] for i in range(width)]


def _solved(equations: Sequence[Sequence[int]]) -> NDArray[np.float64] | None:
    """The solution [c] of equations [c, c + 1], exact up to the last rounding, by Gauss and Jordan;
    None: they are not independent.
    """
    left = [[*map(Fraction, row)] for row in equations]
    width = len(left)
    for i in range(width):
        pivot = next((row for row in range(i, width) if left[row][i]), None)
        if pivot is None:
            return None
        left[i], left[pivot] = left[pivot], left[i]
        first = left[i][i]
        left[i] = [value / first for value in left[i]]
        for other in (row for row in range(width) if row != i):
            factor = left[other][i]
            left[other] = [value - factor * own for value, own in zip(left[other], left[i], strict=True)]
    return np.array([float(row[width]) for row in left])
