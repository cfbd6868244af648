"""The proof of one rank: what holds of all ranks is accepted of each, and what the whole proof refuses
some rank refuses, too.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from megatron_balance.compile.join import split
from megatron_balance.compile.order import BY_ID
from megatron_balance.compile.pipeline import compile_ranks, expand
from megatron_balance.compile.proof import runs
from megatron_balance.compile.proof.meaning import NotAloneError, verify
from megatron_balance.compile.proof.runs import provable, verify_own_steps, verify_owned, verify_peers
from megatron_balance.errors import InvalidProgramError
from megatron_balance.ir.batch import Batch
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.columns import Rows
from megatron_balance.ir.model import Model
from megatron_balance.ir.program import Exchange, RankProgram
from tests.support.strategies import Case, plan
from tools.faults import mutants

CASE = Case(Batch((90, 40, 33, 7)), Cluster(4, 2), Model(4, 2, 4, 32, 64), 50, seed=5, remapped=True, routing=(1, 1))
PLANNED = plan("te_ring", CASE)


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
