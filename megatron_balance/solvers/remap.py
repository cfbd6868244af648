"""The remapping solver: from the tokens each rank holds to equal counts, at the least cost
(Zeppelin, section 3.4, Eq. 2).

- What we implement: Eq. (2), the rank that pays most for what it sends pays as little as possible;
  exactly, in whole tokens.
- What we add: receivers count too, since a receiving link saturates as well; targets that are
  multiples of the tensor-parallel size (`align`).
- Where we differ: the paper calls a standard solver (Gurobi). Its cost matrix has two values, so
  the optimum has a closed form (`remap_exact`), which is the default and makes the sum over all ranks
  least as well; Gurobi and HiGHS solve the same problem as a program (`remap_milp`): the same cost
  and tokens between nodes, perhaps by other moves. The paper's target is the mean, which need not be
  whole; ours is `remap_problem.balanced`.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from functools import cache

import numpy as np

from megatron_balance.errors import ConfigError
from megatron_balance.ir.arrays import Ints
from megatron_balance.ir.columns import Move
from megatron_balance.ir.layers import Solver
from megatron_balance.solvers import remap_exact, remap_milp
from megatron_balance.solvers.milp import NoAnswerError, NoSolverError
from megatron_balance.solvers.remap_problem import RemapProblem, balanced

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Remapping:
    """`target` [d]: the tokens of each rank afterwards.

    `moves` [n, 3]: rows (src, dst, tokens > 0), sorted, one for each pair.
    """

    target: Ints
    moves: Ints


def solve(
    held: Ints,
    node_size: int,
    *,
    intra_s: float,
    inter_s: float,
    align: int = 1,
    solver: Solver = "exact",
) -> Remapping:
    """The balanced target of `held` [d] tokens per rank, and the moves that reach it at the least
    cost.

    Args:
        held: tokens of each rank now.
        node_size: ranks of a node, numbered node by node; the last node may be smaller.
        intra_s: seconds per token (or any cost) between two ranks of a node.
        inter_s: the same between nodes. Taken as `intra_s` where it is less: leaving the node is
            never a gain.
        align: the counts of the target are multiples of this, but for one rank with the rest (see
            `balanced`).
        solver: where it is missing, unlicensed or finds no proven optimum, one warning says so and
            the exact solver answers.

    Raises:
        ConfigError: a count, a size or a cost out of its range.
    """
    held = np.asarray(held, dtype=np.int64)
    _check(held, node_size, intra_s, inter_s, align)
    target = balanced(held, align)
    over = held - target
    intra = min(intra_s / inter_s, 1.0) if inter_s > 0 else 1.0
    problem = RemapProblem(np.maximum(over, 0), np.maximum(-over, 0), node_size, intra)
    moves = _moves(problem, solver) if over.any() else np.zeros((0, Move.WIDTH), dtype=np.int64)
    return Remapping(target, moves[np.lexsort((moves[:, Move.DST], moves[:, Move.SRC]))])


def _moves(problem: RemapProblem, solver: Solver) -> Ints:
    if solver != "exact":
        try:
            return remap_milp.solve(problem, solver)
        except (NoAnswerError, NoSolverError) as error:
            _warn_once(solver, str(error))
    return remap_exact.solve(problem)


@cache
def _warn_once(solver: Solver, reason: str) -> None:
    log.warning(
        "remapping: solver %r gives no answer: %s; the exact solver takes over (same cost, same tokens between nodes)",
        solver,
        reason,
    )


def _check(held: Ints, node_size: int, intra_s: float, inter_s: float, align: int) -> None:
    if held.ndim != 1 or not len(held) or held.min() < 0:
        raise ConfigError(
            f"remapping: tokens held by each rank must be one count of 0 or more per rank, got {held.tolist()}"
        )
    if node_size < 1 or align < 1:
        raise ConfigError(
            f"remapping: a node has at least 1 rank and align is at least 1, got node_size={node_size}, align={align}"
        )
    for name, cost in (("intra_s", intra_s), ("inter_s", inter_s)):
        if not (math.isfinite(cost) and cost >= 0):
            raise ConfigError(f"remapping: {name} must be a finite cost per token of 0 or more, got {cost}")
