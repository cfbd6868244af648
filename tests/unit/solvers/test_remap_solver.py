"""solvers/remap: rules by example, edge cases, and what happens where a solver cannot answer."""

import logging
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron_balance.errors import ConfigError
from megatron_balance.ir.arrays import Ints
from megatron_balance.solvers import milp
from megatron_balance.solvers.remap import Solver, _warn_once, solve

HELD = [24, 12, 2, 6, 0, 0, 0, 4]


def remap(held: list[int], node_size: int, **arguments: Any) -> Ints:
    return solve(np.array(held), node_size, **{"intra_s": 1.0, "inter_s": 8.0, **arguments})


def moves(held: list[int], node_size: int, **arguments: Any) -> list[list[int]]:
    return remap(held, node_size, **arguments).tolist()


def target(held: list[int], node_size: int, **arguments: Any) -> list[int]:
    after = np.array(held)
    for src, dst, tokens in moves(held, node_size, **arguments):
        after[[src, dst]] += [-tokens, tokens]
    return after.tolist()


def test_tokens_stay_where_they_cost_most_and_extra_ones_with_ranks_that_hold_most():
    # Extra tokens stay with the ranks that hold most ties to the lower.
    assert target([3, 9, 4, 9, 0, 1], 6) == [4, 5, 4, 5, 4, 4]
    assert target([9, 0, 9, 9], 4) == [7, 6, 7, 7]
    assert target([5, 5, 5, 6], 4) == [5, 5, 5, 6]
    assert target([0, 5, 5, 5], 4) == [3, 4, 4, 4]
    # Aligned targets are multiples, but for one rank with the rest.
    aligned = {1: [10, 10, 10, 9], 2: [10, 10, 10, 9], 4: [12, 11, 8, 8], 8: [15, 8, 8, 8]}
    assert {align: target([39, 0, 0, 0], 4, align=align) for align in aligned} == aligned
    # Tokens inside the node go to the rank that would cost most.
    # Both surpluses are on node 0, which has room for 4 of 24 tokens: 18 - x and 6 - y are evened
    # out, so rank 0 gets all room.
    assert moves(HELD, 4) == [[0, 2, 4], [0, 4, 6], [0, 5, 6], [0, 6, 2], [1, 6, 4], [1, 7, 2]]
    # Receivers share the room. The mean is 10. Node 0 lacks 8 and 4 and has 6 to give: costs
    # 64 - 7 x 5 = 29 and 32 - 7 = 25, or 22 and 32.
    assert moves([2, 6, 16, 16, 10, 10], 3) == [[2, 0, 5], [2, 1, 1], [3, 0, 3], [3, 1, 3]]
    held = [0, 0, 16, 12, 12, 8]  # mean 8: ranks 0 and 1 lack 8 each, 8 tokens on their own node
    assert moves(held, 3) == [[2, 0, 4], [2, 1, 4], [3, 0, 4], [4, 1, 4]]
    # Within one node ranks are paired in order and a last node may be smaller.
    assert moves([10, 0, 6, 0], 4) == [[0, 1, 4], [0, 3, 2], [2, 3, 2]]
    assert moves([0, 0, 0, 0, 10], 4) == [[4, 0, 2], [4, 1, 2], [4, 2, 2], [4, 3, 2]]
    assert moves([4, 0, 4, 0, 7], 2) == [[0, 1, 1], [2, 3, 1], [4, 1, 2], [4, 3, 2]]
    alone = [1_000_003, *[0] * 63]
    assert remap(alone, 8)[:, :2].tolist() == [[0, rank] for rank in range(1, 64)]
    assert target(alone, 8) == [15626, 15626, 15626, *[15625] * 61]


@pytest.mark.parametrize("solver", ["exact", *milp.SOLVERS])
def test_nothing_moves_where_nothing_has_to(solver):
    for held, node_size in (([7, 7, 7, 7], 2), ([0, 0, 0, 0], 2), ([5], 1), ([5], 8), ([3, 3, 4, 3], 2)):
        found = remap(held, node_size, solver=solver)
        assert (found.shape, found.dtype) == ((0, 3), np.int64)


def test_only_the_ratio_of_the_costs_matters():
    held = np.random.default_rng(5).integers(0, 5000, 32).tolist()
    for scale in (1e-9, 1.0, 1e6):
        assert moves(held, 4, intra_s=0.25 * scale, inter_s=2.0 * scale) == moves(held, 4, intra_s=0.25, inter_s=2.0)
    # A node that costs more inside than outside counts as equal.
    assert moves(HELD, 4, intra_s=8.0, inter_s=1.0) == moves(HELD, 4, intra_s=1.0, inter_s=1.0)
    # Free moves inside nodes, and everywhere, are solved too.
    for costs in ({"intra_s": 0.0}, {"intra_s": 0.0, "inter_s": 0.0}):
        assert sum(tokens for _, _, tokens in moves(HELD, 4, **costs)) == 24


def test_arguments_out_of_range_are_named():
    for arguments, named in (
        ({"held": [3, -1]}, r"one count of 0 or more per rank, got \[3, -1\]"),
        ({"held": []}, "one count of 0 or more per rank"),
        ({"node_size": 0}, "node_size=0"),
        ({"align": 0}, "align=0"),
        ({"intra_s": -1.0}, "intra_s must be a finite cost per token of 0 or more, got -1"),
        ({"inter_s": float("nan")}, "inter_s must be a finite cost"),
    ):
        with pytest.raises(ConfigError, match=named):
            remap(**{"held": [3, 1], "node_size": 2, **arguments})


@pytest.fixture(autouse=True)
def _warn_anew(caplog) -> None:
    _warn_once.cache_clear()
    caplog.set_level(logging.WARNING)


class FakeGurobiError(Exception):
    pass


def refuse(*_: object, **__: object) -> Any:
    raise FakeGurobiError("No Gurobi license found")


UNLICENSED = SimpleNamespace(Env=refuse, GurobiError=FakeGurobiError)


@pytest.mark.parametrize(
    ("solver", "module", "replacement", "reason"),
    [
        ("gurobi", "gurobipy", None, "cannot be imported"),
        ("highs", "scipy.optimize", None, "cannot be imported"),
        ("gurobi", "gurobipy", UNLICENSED, "No Gurobi license found"),
    ],
)
def test_a_solver_that_cannot_answer_is_one_warning_and_the_exact_answer(
    solver: Solver, module, replacement, reason, monkeypatch, caplog
):
    monkeypatch.setitem(sys.modules, module, replacement)
    assert [moves(HELD, 4, solver=solver) for _ in range(3)] == [moves(HELD, 4)] * 3
    (said,) = caplog.messages
    assert f"solver '{solver}' gives no answer" in said
    assert reason in said
    assert "the exact solver" in said


def test_an_answer_that_is_not_whole_is_refused(monkeypatch, caplog):
    monkeypatch.setitem(milp.SOLVERS, "highs", lambda program, *_: np.full(len(program.cost), 0.5))
    assert moves([9, 1, 0, 2], 2, solver="highs") == moves([9, 1, 0, 2], 2)
    assert "not in whole tokens" in caplog.messages[0]


def test_a_licence_too_small_for_the_problem_is_one_warning_and_the_exact_answer(caplog):
    pytest.importorskip("gurobipy", reason="needs gurobipy, whose own licence holds 2,000 variables")
    held = np.random.default_rng(1).integers(0, 5000, 128).tolist()  # about 64 x 64 pairs
    answers = [moves(held, 8, solver="gurobi") for _ in range(2)]
    if not caplog.messages:
        pytest.skip("the Gurobi licence of this machine is not limited in size")
    (said,) = caplog.messages
    assert "license" in said
    assert answers == [moves(held, 8)] * 2
