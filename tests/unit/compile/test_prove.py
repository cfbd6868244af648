"""Other ids, proxies, rows and steps than those of the plan are refused by the proof of what runs."""

import random
from dataclasses import replace

import pytest

from megatron_balance.compile.join import split
from megatron_balance.compile.order import BY_ID, Finish
from megatron_balance.compile.pipeline import compile_ranks, expand
from megatron_balance.compile.proof import runs
from megatron_balance.compile.proof.meaning import NotAloneError, verify
from megatron_balance.compile.proof.runs import provable, verify_own_steps, verify_owned, verify_peers, verify_steps
from megatron_balance.errors import InvalidProgramError
from megatron_balance.ir.batch import Batch
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.columns import Route, Rows, Transfer
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import REMAP, Routing
from megatron_balance.ir.program import Exchange, Program, RankProgram
from tests.support.strategies import Case, plan
from tools.faults import mutants

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
    # Whether the program, or that it is what the ranks run, is refused.
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


# The proof of one rank: what holds of all ranks is accepted of each, and what the whole proof
# refuses some rank refuses, too.


def programs() -> dict[int, RankProgram]:
    return {rank: each.program for rank, each in enumerate(compile_ranks(PLANNED, "replay"))}


@pytest.mark.parametrize("mask", ["causal", "full"])
@pytest.mark.parametrize("planner", ["te_ring", "zeppelin", "megatron_dynamic"])
def test_each_rank_of_a_plan_that_holds_is_proved(planner: str, mask: str) -> None:
    case = replace(CASE, model=replace(CASE.model, attention=mask))
    for each in (case, replace(case, remapped=False), replace(case, routing=None)):
        planned = plan(planner, each)
        assert provable(planned)
        for rank in range(4):
            for policy in ("keep", "replay", None):
                runs.prove_rank(planned, rank, policy)


def test_collectives_and_outputs_in_parts_are_not_proved_of_one_rank() -> None:
    case = replace(CASE, remapped=False, routing=None, tokens_per_rank=None)
    assert not provable(plan("distca, small blocks", case))
    with pytest.raises(NotAloneError, match="all its ranks at once"):
        runs.prove_rank(plan("llama_all_gather", case), 0, "keep")


def test_what_the_whole_proof_refuses_some_rank_refuses() -> None:
    refused = 0
    for policy in ("keep", "replay"):
        program = expand(PLANNED, policy)
        assert not mutants.refused_by_a_rank(program)
        for number in range(25):
            _, mutant = mutants.changed(program, random.Random(f"{policy} {number}"))
            try:
                verify(mutants.of_parts(mutant))
            except (InvalidProgramError, IndexError):
                refused += 1
                assert mutants.refused_by_a_rank(mutant), (policy, number)
    assert refused > 25


def test_ranks_that_list_other_transfers_between_them_are_refused() -> None:
    ranks = programs()
    own = ranks[1]
    peers = {rank: ranks[rank] for rank in runs.peers_of(own)}
    assert set(peers) == {0, 2, 3}
    verify_peers(own, peers)
    for phase in ("forward", "backward"):
        ops = list(getattr(own, phase))
        at, op = [(at, op) for at, op in enumerate(ops) if isinstance(op, Exchange) and len(op.transfers) > 1][-1]
        rows = [list(row) for row in op.transfers]
        routes = [list(row) for row in op.routes]
        for changed in (
            replace(op, transfers=Rows.of(8, rows[1:])),
            replace(op, transfers=Rows.of(8, [*rows, rows[0]])),
            replace(op, id=op.id + 1000),
            *([replace(op, routes=Rows.of(5, routes[1:]))] if routes else []),
        ):
            with pytest.raises(InvalidProgramError, match=f"ranks 1 and .*{phase} exchange"):
                verify_peers(replace(own, **{phase: (*ops[:at], changed, *ops[at + 1 :])}), peers)


def test_an_exchange_of_another_traffic_class_or_collective_is_refused() -> None:
    ranks = programs()
    (at, op), *_ = [(at, op) for at, op in enumerate(ranks[1].forward) if isinstance(op, Exchange)]
    for changed in (replace(op, moves=True), replace(op, collective="all_to_all", group=(0, 1, 2, 3))):
        forward = (*ranks[1].forward[:at], changed, *ranks[1].forward[at + 1 :])
        with pytest.raises(InvalidProgramError, match=f"ranks 1 and .*forward exchange {op.id}"):
            verify_peers(replace(ranks[1], forward=forward), {rank: ranks[rank] for rank in (0, 2, 3)})


def test_tokens_of_another_layout_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = programs()
    verify_owned(PLANNED, ranks[0])
    with pytest.raises(InvalidProgramError, match="rank 1 owns other tokens"):
        verify_owned(PLANNED, replace(ranks[0], rank=1))
    whole = runs.layouts(PLANNED)
    for table in (whole[1:], whole[[0, *range(len(whole))]]):
        monkeypatch.setattr(runs, "layouts", lambda _, table=table: table)
        with pytest.raises(InvalidProgramError, match="exactly one owner"):
            verify_owned(PLANNED, ranks[0])


def test_exchanges_that_start_in_another_order_than_everybody_elses_are_refused() -> None:
    (runs,) = compile_ranks(PLANNED, "replay", ranks=(2,))
    verify_own_steps(runs, PLANNED, backward=True)
    other = replace(runs, backward=runs.backward._replace(issue=BY_ID))
    with pytest.raises(InvalidProgramError, match="rank 2 starts exchange"):
        verify_own_steps(other, PLANNED, backward=True)


def test_ops_of_another_rank_are_refused() -> None:
    program = expand(PLANNED, "keep")
    one, other = split(program)[:2]
    shape = (program.lengths, program.num_heads, program.num_kv_heads)
    with pytest.raises(InvalidProgramError, match="an op of rank 1 in the program of rank 0"):
        runs.verify_rank(replace(one, forward=other.forward), shape, 4, "keep")
