"""Least squares with coefficients that are not negative: links (alpha-beta) and
KnapFormer's gamma.

Errors are weighed relatively: a profile spans microseconds to seconds. A negative coefficient would
let more work take less time. Solved in fractions: BLAS rounds as each CPU's kernel has it, and then
ranks on different CPUs, whose planners take their costs from here, would plan differently.
"""

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import combinations

import numpy as np

from megatron_balance.cost.base import CostModel, Link
from megatron_balance.errors import ConfigError
from megatron_balance.ir.arrays import Floats
from megatron_balance.ir.model import Model


def fit_link(num_bytes: Sequence[float], seconds: Sequence[float]) -> Link:
    """The link nearest to measured times. ConfigError: fewer than two sizes, times not positive."""
    if len(set(num_bytes)) < 2:
        raise ConfigError(f"a link needs at least 2 different message sizes, got {sorted(set(num_bytes))}")
    beta, alpha = least_squares([[size, 1.0] for size in num_bytes], seconds, what="link", needed=(0,))
    return Link(alpha, 1.0 / beta)


def least_squares(
    columns: Sequence[Sequence[float]], seconds: Sequence[float], *, what: str, needed: tuple[int, ...] = ()
) -> tuple[float, ...]:
    """Coefficients, none negative, of the least relative squared error of columns @ coefficients
    against seconds.

    `columns` [n, c], positive, with few c: every subset of coefficients is tried that has those in
    `needed`, which come out positive also where noise hides that the times rise. Raises ConfigError:
    no times, or one that is not positive.
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


def _normal_equations(columns: Floats) -> list[list[int]]:
    # Equations [c, c + 1] of the coefficients by which columns come nearest to 1: whole numbers,
    # nothing is rounded.
    ratios = [[value.as_integer_ratio() for value in row] for row in columns.tolist()]
    unit: int = max(below for row in ratios for _, below in row)  # of powers of two
    rows = [[*(above * (unit // below) for above, below in row), unit] for row in ratios]
    width = columns.shape[1]
    return [[sum(row[i] * row[j] for row in rows) for j in range(width + 1)] for i in range(width)]


def _solved(equations: Sequence[Sequence[int]]) -> Floats | None:
    # The solution [c] of equations [c, c + 1] by Gauss and Jordan; None: they are not independent.
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


# Table 1: "The estimated gamma = 0.49 on H100 GPUs", FLUX.
GAMMA_H100_FLUX = 0.49

# Tokens of the sequences by which a cost model's gamma is fitted.
LENGTHS = (512, 2048, 8192, 32768)


def sequence_work(lengths: Floats, model: Model, gamma: float) -> Floats:
    """Corrected FLOPs of each sequence in one layer of `model`: Eq. 2 with the model's own FLOPs,
    which for the paper's blocks (MHA, an MLP four times as wide, full attention) are 24 l d^2 and 4
    l^2 d.
    """
    pairs = model.mask.num_pairs(lengths)
    return model.linear_flops_per_token * lengths + gamma * model.attention_flops_per_pair * pairs


def gamma_of(cost: CostModel, model: Model, lengths: Sequence[int] = LENGTHS) -> float:
    """Gamma of a cost model, by its forward times at `lengths`."""
    mask = model.mask
    seconds = tuple(cost.linear_s(n) + cost.attention_s(mask.num_pairs(n), n) for n in lengths)
    linear, attention = model.linear_flops_per_token, model.attention_flops_per_pair
    return _ratio(tuple((linear * n, attention * mask.num_pairs(n)) for n in lengths), seconds)


@lru_cache(maxsize=8)  # a job asks for the same one in every step
def _ratio(flops: tuple[tuple[float, float], ...], seconds: tuple[float, ...]) -> float:
    k, k_gamma = least_squares(flops, seconds, what="gamma", needed=(0,))
    return k_gamma / k
