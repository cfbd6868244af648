"""The remapping as a mixed-integer program for Gurobi, HiGHS (in SciPy) and SCIP (in OR-Tools):
Zeppelin's Eq. (2), and among equal costs the fewest tokens between nodes.

Every rank of a job solves for itself, so an answer may depend on nothing but the problem: one
thread, fixed seeds, limits in nodes of the search and never in seconds, and only a proven optimum
counts.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from megatron_balance.ir.arrays import Bools, Ints
from megatron_balance.ir.columns import Move
from megatron_balance.ir.layers import MilpSolver
from megatron_balance.solvers.remap_problem import RemapProblem, by_node

Floats: TypeAlias = NDArray[np.float64]

MAX_NODES = 10_000
"""Nodes of the branch-and-bound tree.

These problems are proven at the root or close to it; more means that something is wrong.
"""


class NoAnswerError(Exception):
    """This solver gives no proven optimum here; the message is the reason, in words that do not
    depend on the problem.
    """


@dataclass(frozen=True, slots=True)
class Milp:
    """Minimise `cost` x with low <= A x <= high, 0 <= x, and x whole where `whole`; A is given by
    its nonzero entries, row by row.

    The first variables are the tokens of the pairs (src, dst) [n, 2].
    """

    pairs: Ints
    cost: Floats
    whole: Bools
    entries: tuple[Ints, Ints, Floats]  # row, column, value
    low: Floats
    high: Floats


def solve(problem: RemapProblem, solver: MilpSolver) -> Ints:
    """`Move` rows [n, 3] of an optimum.

    Raises:
        NoAnswerError: the solver is not installed, has no licence or too small a licence, or ended
            without an optimum.
    """
    milp = formulate(problem)
    values = SOLVERS[solver](milp)
    tokens = np.rint(values[: len(milp.pairs)]).astype(np.int64)
    moves = np.column_stack([milp.pairs, tokens])[tokens > 0]
    for column, wanted in ((Move.SRC, problem.surplus), (Move.DST, problem.deficit)):
        if (np.bincount(moves[:, column], moves[:, Move.TOKENS], len(wanted)) != wanted).any():
            raise NoAnswerError("its answer is not in whole tokens")
    return moves


def formulate(problem: RemapProblem) -> Milp:
    """Variables: tokens of each pair of a surplus and a deficit; for the bottleneck also each
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
    rows = _Constraints()
    for rank, _, need in ends:
        rows.add(need, need, (rank, pair, 1.0))
    if problem.objective == "total":
        # How many tokens move is given: the least sum has the fewest between nodes, at any prices.
        return rows.program(pairs, np.where(inside, 0.0, 1.0), whole=np.ones(len(pairs), dtype=np.bool_))
    counted = ends if problem.sides == "both" else ends[:1]
    num_variables = len(pairs) + sum(len(ranks) for _, ranks, _ in counted) + 1
    kept = np.minimum(*(by_node(need, problem.node_size).sum(axis=1) for need in (problem.surplus, problem.deficit)))
    first = len(pairs)
    for rank, ranks, need in counted:
        each = np.arange(len(need))
        largest = np.full_like(each, num_variables - 1)
        rows.add(0 * need, 0 * need, (rank[inside], pair[inside], 1.0), (each, first + each, -1.0))
        rows.add(need, need + np.inf, (each, first + each, 1.0 - problem.intra), (each, largest, 1.0))
        nodes, node = np.unique(ranks // problem.node_size, return_inverse=True)
        rows.add(kept[nodes], kept[nodes], (node, first + each, 1.0))
        first += len(need)
    is_largest = np.arange(num_variables) == num_variables - 1
    return rows.program(pairs, np.where(is_largest, 1.0, 0.0), whole=~is_largest)


class _Constraints:
    """Constraints being collected, a block of like ones at a time."""

    def __init__(self) -> None:
        self._entries: list[tuple[Ints, Ints, Floats]] = []
        self._bounds: list[Floats] = []
        self._count = 0

    def add(self, low: NDArray[Any], high: NDArray[Any], *terms: tuple[Ints, Ints, float]) -> None:
        """`low` <= A x <= `high` with A[row, column] = value of each of `terms`; rows count from 0
        within the block.
        """
        self._entries += [(row + self._count, column, np.full(len(row), value)) for row, column, value in terms]
        self._bounds.append(np.stack([low, high]).astype(np.float64))
        self._count += len(low)

    def program(self, pairs: Ints, cost: Floats, *, whole: Bools) -> Milp:
        row, column, value = (np.concatenate(parts) for parts in zip(*self._entries, strict=True))
        order = np.argsort(row, kind="stable")
        low, high = np.concatenate(self._bounds, axis=1)
        return Milp(pairs, cost, whole, (row[order], column[order], value[order]), low, high)


def _gurobi(milp: Milp) -> Floats:
    library = _library("gurobipy")
    try:
        with library.Env(empty=True) as env:
            env.setParam("OutputFlag", 0)
            env.start()
            with library.Model(env=env) as model:
                for name, value in (("Threads", 1), ("Seed", 0), ("MIPGap", 0.0), ("NodeLimit", MAX_NODES)):
                    model.setParam(name, value)
                kinds = [library.GRB.INTEGER if whole else library.GRB.CONTINUOUS for whole in milp.whole]
                variables = list(model.addVars(len(kinds), obj=milp.cost.tolist(), vtype=kinds).values())
                for columns, values, low, high in _each_row(milp):
                    terms = library.LinExpr(values, [variables[column] for column in columns])
                    model.addLConstr(terms, library.GRB.EQUAL if low == high else library.GRB.GREATER_EQUAL, low)
                model.optimize()
                if model.Status != library.GRB.OPTIMAL:
                    raise NoAnswerError(f"it ended with status {model.Status} within {MAX_NODES} nodes")
                return np.array(model.getAttr("X", variables), dtype=np.float64)
    except library.GurobiError as error:
        raise NoAnswerError(str(error)) from error


def _highs(milp: Milp) -> Floats:
    optimize, sparse = _library("scipy.optimize"), _library("scipy.sparse")
    row, column, value = milp.entries
    matrix = sparse.csr_array((value, (row, column)), shape=(len(milp.low), len(milp.cost)))
    # SciPy gives HiGHS its default seed 0, and HiGHS searches the tree of an integer program in one
    # thread.
    result = optimize.milp(
        milp.cost,
        integrality=milp.whole.astype(np.int64),
        constraints=optimize.LinearConstraint(matrix, milp.low, milp.high),
        options={"node_limit": MAX_NODES, "mip_rel_gap": 0.0},
    )
    if not result.success:
        raise NoAnswerError(f"it ended with status {result.status} within {MAX_NODES} nodes")
    return np.array(result.x, dtype=np.float64)


def _ortools(milp: Milp) -> Floats:
    library = _library("ortools.linear_solver.pywraplp")
    solver = library.Solver.CreateSolver("SCIP")
    if solver is None:
        raise NoAnswerError("this build of OR-Tools lacks SCIP")
    solver.SetSolverSpecificParametersAsString(f"limits/nodes = {MAX_NODES}\nrandomization/randomseedshift = 0\n")
    variables = [solver.Var(0.0, solver.infinity(), bool(whole), "") for whole in milp.whole]
    for columns, values, low, high in _each_row(milp):
        constraint = solver.Constraint(low, high)
        for column, value in zip(columns, values, strict=True):
            constraint.SetCoefficient(variables[column], value)
    for variable, cost in zip(variables, milp.cost.tolist(), strict=True):
        solver.Objective().SetCoefficient(variable, cost)
    exact = library.MPSolverParameters()
    exact.SetDoubleParam(exact.RELATIVE_MIP_GAP, 0.0)
    status = solver.Solve(exact)
    if status != solver.OPTIMAL:
        raise NoAnswerError(f"it ended with status {status} within {MAX_NODES} nodes")
    return np.array([variable.solution_value() for variable in variables])


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise NoAnswerError(f"it cannot be imported ({error})") from error


def _each_row(milp: Milp) -> Iterator[tuple[list[int], list[float], float, float]]:
    """Columns, values, low and high of each constraint."""
    row, column, value = milp.entries
    cuts = np.searchsorted(row, np.arange(len(milp.low) + 1)).tolist()
    columns, values = column.tolist(), value.tolist()
    for start, stop, low, high in zip(cuts, cuts[1:], milp.low.tolist(), milp.high.tolist(), strict=False):
        yield columns[start:stop], values[start:stop], low, high


SOLVERS: dict[MilpSolver, Callable[[Milp], Floats]] = {"gurobi": _gurobi, "highs": _highs, "ortools": _ortools}
