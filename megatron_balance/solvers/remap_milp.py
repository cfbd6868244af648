"""The remapping as a mixed-integer program for Gurobi and HiGHS (in SciPy): Zeppelin's Eq. (2), and
among equal costs the fewest tokens between nodes. Only a proven optimum counts.
"""

from __future__ import annotations

import numpy as np

from megatron_balance.ir.arrays import Ints
from megatron_balance.ir.columns import Move
from megatron_balance.ir.layers import MilpSolver
from megatron_balance.solvers import milp
from megatron_balance.solvers.remap_problem import RemapProblem, by_node

MAX_NODES = 10_000
"""Nodes of the branch-and-bound tree.

These problems are proven at the root or close to it; more means that something is wrong.
"""


def solve(problem: RemapProblem, solver: MilpSolver) -> Ints:
    """`Move` rows [n, 3] of an optimum.

    Raises:
        NoSolverError: the solver is not installed.
        NoAnswerError: it has no licence or too small a licence, or ended without an optimum.
    """
    pairs, program = formulate(problem)
    values = milp.solve(program, MAX_NODES, solver=solver, proven=True)
    tokens = np.rint(values[: len(pairs)]).astype(np.int64)
    moves = np.column_stack([pairs, tokens])[tokens > 0]
    for column, wanted in ((Move.SRC, problem.surplus), (Move.DST, problem.deficit)):
        if (np.bincount(moves[:, column], moves[:, Move.TOKENS], len(wanted)) != wanted).any():
            raise milp.NoAnswerError("its answer is not in whole tokens")
    return moves


def formulate(problem: RemapProblem) -> tuple[Ints, milp.Milp]:
    """Pairs (src, dst) [n, 2], and the program: variables are the tokens of each pair, then each
    rank's tokens inside, and the largest cost.

    A rank with need tokens of which x stay inside its node costs need - (1 - intra) x. Writing x as
    a whole variable of its own lets a solver conclude from a bound on the largest cost how much
    each rank must keep inside, which proves the optimum at once.

    Among equal costs the tokens between nodes are the fewest. Keeping inside as many tokens as a
    node's surplus and deficit allow costs no rank more (`remap_exact`), so this is a constraint in
    whole tokens, and no second objective, which would need a scale.
    """
    senders, receivers = np.flatnonzero(problem.surplus), np.flatnonzero(problem.deficit)
    src, dst = (grid.ravel() for grid in np.meshgrid(np.arange(len(senders)), np.arange(len(receivers)), indexing="ij"))
    pairs = np.stack([senders[src], receivers[dst]], axis=1)
    src_node, dst_node = (pairs // problem.node_size).T
    inside = src_node == dst_node
    ends = ((src, senders, problem.surplus[senders]), (dst, receivers, problem.deficit[receivers]))
    pair = np.arange(len(pairs))
    rows = milp.Constraints()
    for rank, _, need in ends:
        rows.add(len(need), need, need, (rank, pair, 1.0))
    num_variables = len(pairs) + sum(len(ranks) for _, ranks, _ in ends) + 1
    kept = np.minimum(*(by_node(need, problem.node_size).sum(axis=1) for need in (problem.surplus, problem.deficit)))
    first = len(pairs)
    for rank, ranks, need in ends:
        each = np.arange(len(need))
        largest = np.full_like(each, num_variables - 1)
        rows.add(len(need), 0.0, 0.0, (rank[inside], pair[inside], 1.0), (each, first + each, -1.0))
        rows.add(len(need), need, np.inf, (each, first + each, 1.0 - problem.intra), (each, largest, 1.0))
        nodes, node = np.unique(ranks // problem.node_size, return_inverse=True)
        rows.add(len(nodes), kept[nodes], kept[nodes], (node, first + each, 1.0))
        first += len(need)
    is_largest = np.arange(num_variables) == num_variables - 1
    return pairs, rows.program(is_largest.astype(np.float64), ~is_largest)
