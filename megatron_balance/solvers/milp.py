"""Mixed-integer linear programs, answered by HiGHS (in SciPy) or Gurobi. Every rank solves for
itself, so an answer depends on nothing but the program: one thread, fixed seeds, limits in nodes,
never in seconds.
"""

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from megatron_balance.errors import ConfigError
from megatron_balance.ir.arrays import Bools, Floats, Ints
from megatron_balance.ir.step import MilpSolver

# Row, column and value of entries of a constraint matrix; one value may hold for all.
Term: TypeAlias = tuple[Ints, Ints, "Floats | float"]


class NoSolverError(ConfigError):
    """The solver is not installed; the message says how to install it."""


class NoAnswerError(Exception):
    """No answer, or none of use; the reason, in words that do not depend on the program's numbers."""


@dataclass(frozen=True, slots=True)
class Milp:
    """Minimise `cost` x with low <= A x <= high, 0 <= x <= `upper`, x whole where `whole`."""

    cost: Floats
    whole: Bools
    upper: Floats
    # Row, column, value.
    entries: tuple[Ints, Ints, Floats]
    low: Floats
    high: Floats


class Constraints:
    """Constraints being collected, a block of like ones at a time."""

    def __init__(self) -> None:
        self._entries: list[Term] = []
        self._bounds: list[Floats] = []
        self._count = 0

    def add(self, count: int, low: Floats | Ints | float, high: Floats | Ints | float, *terms: Term) -> None:
        """`count` rows low <= A x <= high; A[row, column] = value of each of `terms`, whose rows count
        from 0 within the block.
        """
        self._entries += [(row + self._count, column, value) for row, column, value in terms]
        self._bounds.append(np.stack([np.broadcast_to(np.asarray(b, np.float64), count) for b in (low, high)]))
        self._count += count

    def program(self, cost: Floats, whole: Bools, upper: Floats | float = np.inf) -> Milp:
        row, column, value = (
            np.concatenate([np.broadcast_to(term[part], len(term[0])) for term in self._entries]) for part in range(3)
        )
        order = np.argsort(row, kind="stable")
        low, high = np.concatenate(self._bounds, axis=1)
        entries = (row[order], column[order], value[order])
        return Milp(cost, whole, np.broadcast_to(np.asarray(upper, np.float64), len(cost)), entries, low, high)


def solve(program: Milp, nodes: int, *, gap: float = 0.0, solver: MilpSolver = "highs", proven: bool = False) -> Floats:
    """x of the best answer within `nodes` nodes, or of one within `gap` of the optimum; `proven`:
    that alone.

    Raises:
        NoSolverError: the solver is not installed.
        NoAnswerError: none was found; or there is no licence, or too small a one.
    """
    return SOLVERS[solver](program, nodes, gap, proven)


def _highs(program: Milp, nodes: int, gap: float, proven: bool) -> Floats:
    optimize, sparse = _library("scipy.optimize", "highs"), _library("scipy.sparse", "highs")
    row, column, value = program.entries
    matrix = sparse.csr_array((value, (row, column)), shape=(len(program.low), len(program.cost)))
    # SciPy gives HiGHS its default seed 0, and HiGHS searches the tree of an integer program in one
    # thread.
    result = optimize.milp(
        program.cost,
        integrality=program.whole.astype(np.int64),
        bounds=optimize.Bounds(0.0, program.upper),
        constraints=optimize.LinearConstraint(matrix, program.low, program.high),
        options={"node_limit": nodes, "mip_rel_gap": gap},
    )
    if result.x is None or (proven and not result.success):
        raise NoAnswerError(f"it ended with status {result.status} within {nodes} nodes")
    return np.array(result.x, dtype=np.float64)


def _gurobi(program: Milp, nodes: int, gap: float, proven: bool) -> Floats:
    library = _library("gurobipy", "gurobi")
    try:
        with library.Env(empty=True) as env:
            env.setParam("OutputFlag", 0)
            env.start()
            with library.Model(env=env) as model:
                for name, value in (("Threads", 1), ("Seed", 0), ("MIPGap", gap), ("NodeLimit", nodes)):
                    model.setParam(name, value)
                kinds = [library.GRB.INTEGER if whole else library.GRB.CONTINUOUS for whole in program.whole]
                costs, upper = program.cost.tolist(), program.upper.tolist()
                variables = list(model.addVars(len(kinds), ub=upper, obj=costs, vtype=kinds).values())
                for columns, values, low, high in _each_row(program):
                    terms = library.LinExpr(values, [variables[column] for column in columns])
                    if low == high:
                        model.addLConstr(terms, library.GRB.EQUAL, low)
                        continue
                    if low > -np.inf:
                        model.addLConstr(terms, library.GRB.GREATER_EQUAL, low)
                    if high < np.inf:
                        model.addLConstr(terms, library.GRB.LESS_EQUAL, high)
                model.optimize()
                if not model.SolCount or (proven and model.Status != library.GRB.OPTIMAL):
                    raise NoAnswerError(f"it ended with status {model.Status} within {nodes} nodes")
                return np.array(model.getAttr("X", variables), dtype=np.float64)
    except library.GurobiError as error:
        raise NoAnswerError(str(error)) from error


def _library(name: str, extra: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise NoSolverError(
            f"{name} cannot be imported ({error}): pip install 'megatron-balance[{extra}]', or do without {extra}"
        ) from error


def _each_row(program: Milp) -> Iterator[tuple[list[int], list[float], float, float]]:
    row, column, value = program.entries
    cuts = np.searchsorted(row, np.arange(len(program.low) + 1)).tolist()
    columns, values = column.tolist(), value.tolist()
    for start, stop, low, high in zip(cuts, cuts[1:], program.low.tolist(), program.high.tolist(), strict=False):
        yield columns[start:stop], values[start:stop], low, high


SOLVERS: dict[MilpSolver, Callable[[Milp, int, float, bool], Floats]] = {"gurobi": _gurobi, "highs": _highs}
