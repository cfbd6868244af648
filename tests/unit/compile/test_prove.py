"""Other ids, proxies, rows and steps than those of the plan are refused by the proof of what runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_balance.compile.order import Finish
from megatron_balance.compile.pipeline import compile_ranks, expand
from megatron_balance.compile.proof import runs
from megatron_balance.compile.proof.meaning import verify
from megatron_balance.compile.proof.runs import verify_steps
from megatron_balance.errors import InvalidProgramError
from megatron_balance.ir.batch import Batch
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.columns import Route, Rows, Transfer
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import REMAP, Routing
from megatron_balance.ir.program import Exchange, Program
from tests.support.strategies import Case, plan

CASE = Case(Batch((90, 40, 33, 7)), Cluster(4, 2), Model(4, 2, 4, 32, 64), 50, seed=5, remapped=True, routing=(1, 1))
PLANNED = plan("te_ring", CASE)


def exchanges(program: Program) -> list[tuple[str, int, Exchange]]:
    phases = ("forward", "backward")
    return [
        (phase, at, op) for phase in phases for at, op in enumerate(getattr(program, phase)) if isinstance(op, Exchange)
    ]


def with_op(program: Program, phase: str, at: int, op: Exchange) -> Program:
    ops = list(getattr(program, phase))
    ops[at] = op
    return replace(program, **{phase: tuple(ops)})


def refused(program: Program) -> bool:
    """Whether the program, or that it is what the ranks run, is refused."""
    try:
        verify(program)
        runs.verify_runs(PLANNED, program)
    except InvalidProgramError:
        return True
    return False


@pytest.mark.parametrize("policy", ["keep", "replay"])
def test_every_changed_exchange_id_and_proxy_is_refused(policy) -> None:
    program = runs.prove(PLANNED, policy)
    found = exchanges(program)
    for phase, at, op in found:
        for by in (-1, 1, 100):
            assert refused(with_op(program, phase, at, replace(op, id=op.id + by))), (phase, at, by)
    routed = [each for each in found if each[2].routes]
    assert len(routed) > 3
    for phase, at, op in routed:
        for row, column in ((0, 3), (-1, 4)):  # send proxy, receive proxy
            routes = [list(each) for each in op.routes]
            routes[row][column] ^= 1  # the other rank of that node
            changed = with_op(program, phase, at, replace(op, routes=Rows.of(Route.WIDTH, routes)))
            assert refused(changed), (phase, at, row, column)
            with pytest.raises(InvalidProgramError, match="expected proxies"):  # by the plan's routing alone
                runs.verify_routes(PLANNED, changed)


def test_ids_that_do_not_rise_are_refused_without_a_plan() -> None:
    program = expand(PLANNED, "keep")
    (_, _, first), (phase, at, second), *_ = exchanges(program)
    with pytest.raises(InvalidProgramError, match="ids must rise"):
        verify(with_op(program, phase, at, replace(second, id=first.id)))


def test_proxies_that_ranks_and_program_agree_on_are_held_against_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    program, ranks = expand(PLANNED, "keep"), compile_ranks(PLANNED, "keep")
    monkeypatch.setattr(runs, "compile_ranks", lambda *_, **__: ranks)
    runs.verify_runs(PLANNED, program)
    in_pieces = replace(PLANNED, routing=Routing(1, (REMAP, 0), pieces=2))
    with pytest.raises(InvalidProgramError, match="expected proxies"):
        runs.verify_runs(in_pieces, program)


def test_a_projection_that_lost_a_row_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    program = expand(PLANNED, "keep")
    whole = compile_ranks(PLANNED, "keep")

    def lossy(*_args, **_options):
        first = whole[1]
        at, op = next((at, op) for at, op in enumerate(first.program.forward) if isinstance(op, Exchange))
        ops = list(first.program.forward)
        ops[at] = replace(op, transfers=Rows.of(Transfer.WIDTH, list(op.transfers)[1:]))
        return [whole[0], replace(first, program=replace(first.program, forward=tuple(ops))), *whole[2:]]

    monkeypatch.setattr(runs, "compile_ranks", lossy)
    with pytest.raises(InvalidProgramError, match="rank 1: forward op"):
        runs.verify_runs(PLANNED, program)


def test_steps_in_another_order_are_refused() -> None:
    ranks = compile_ranks(PLANNED, "keep")
    for rank, each in enumerate(ranks):
        verify_steps(each.program.forward, each.forward.steps, rank, PLANNED.mask)
    ops, steps = ranks[0].program.forward, list(ranks[0].forward.steps)
    late = [at for at, step in enumerate(steps) if isinstance(step, Finish)]
    assert late
    for at in late[:3]:
        moved = [*steps[:at], *steps[at + 1 :], steps[at]]
        with pytest.raises(InvalidProgramError, match="rank 0: op"):
            verify_steps(ops, moved, 0, PLANNED.mask)
    with pytest.raises(InvalidProgramError, match="has no step"):
        verify_steps(ops, steps[: late[0]] + steps[late[0] + 1 :], 0, PLANNED.mask)


def test_steps_of_either_phase_and_the_issue_order_are_part_of_the_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    program, ranks = expand(PLANNED, "keep"), compile_ranks(PLANNED, "keep")
    for phase in ("forward", "backward"):
        order = getattr(ranks[1], phase)
        late = next(at for at, step in enumerate(order.steps) if isinstance(step, Finish))
        moved = [*order.steps[:late], *order.steps[late + 1 :], order.steps[late]]
        wrong = replace(ranks[1], **{phase: order._replace(steps=moved)})
        monkeypatch.setattr(runs, "compile_ranks", lambda *_, wrong=wrong, **__: [ranks[0], wrong, *ranks[2:]])
        with pytest.raises(InvalidProgramError, match="rank 1: op"):
            runs.verify_runs(PLANNED, program)
    met: list[int] = []
    monkeypatch.setattr(runs, "compile_ranks", lambda *_, **__: ranks)
    monkeypatch.setattr(runs, "verify_issue_order", lambda calls: met.append(len(calls)))
    runs.verify_runs(PLANNED, program)
    assert met == [PLANNED.num_ranks] * 2
