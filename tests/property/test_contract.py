"""One suite for every planner: add one to PLANNERS and it is held to all of this."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_balance.compile import ping_pong
from megatron_balance.compile.pipeline import Projector, compile_ranks, layout
from megatron_balance.compile.proof.runs import prove, verify_issue_order
from megatron_balance.compile.remap import fragments, layouts, remapped
from megatron_balance.compile.transpose import POLICIES, Policy
from megatron_balance.ir.arrays import Ints, as_array
from megatron_balance.ir.batch import Batch
from megatron_balance.ir.columns import Held, Placed, RemoteHeld
from megatron_balance.ir.plan import MicrobatchPlan, from_json, to_json
from megatron_balance.ir.text import parse, text
from tests.support import dense
from tests.support.dense import NAMES
from tests.support.rendezvous import batches_of, group_calls, hanging
from tests.support.strategies import ALL_PLANNERS, Case, cases, examples, lengths, plan

policies = st.sampled_from(POLICIES)
each_planner = pytest.mark.parametrize("planner", ALL_PLANNERS)


@each_planner
@examples(16)
@given(case=cases(masks=NAMES), policy=policies)
def test_a_plan_and_its_program_are_right(planner: str, policy: Policy, case: Case) -> None:
    # Of one plan: the same input gives it again; it is read back from its JSON; every token has one
    # owner, in the order of the layout. Of its one program: every query meets every key that it may
    # see once, forward and backward, as it stands and as its ranks run it; it is read back from
    # what it prints; outputs and gradients equal dense attention. Layouts of all ranks at once are
    # those of each, and remote tokens those of the moves.
    planned = plan(planner, case)
    assert plan(planner, case) == planned
    read = from_json(to_json(planned))
    assert read == planned
    assert read.fingerprint() == planned.fingerprint()
    program = prove(planned, policy)
    assert planned.lengths == case.batch.lengths
    owned = [layout(planned, rank).tolist() for rank in range(planned.num_ranks)]
    tokens = sorted((seq, token) for rows in owned for seq, start, stop in rows for token in range(start, stop))
    assert tokens == [(seq, token) for seq, length in enumerate(planned.lengths) for token in range(length)]
    assert owned == [as_array(owned).tolist() for owned in program.owned]
    assert_layouts_of_all_ranks_are_those_of_each(planned)
    assert parse(text(program)) == program
    assert dense.worst_of(program, value_dim=3) < 1e-9


@each_planner
@examples(7)
@given(
    case=cases(masks=NAMES, max_length=80, max_sequences=4),
    policy=policies,
    other=lengths(max_length=80, max_sequences=4, min_sequences=0),
    passing=st.booleans(),
)
def test_issue_order_is_one_and_no_rendezvous_hangs(
    planner: str, policy: Policy, case: Case, other: tuple[int, ...], passing: bool
) -> None:
    assert_one_issue_order(planner, policy, case, other, passing=passing)


@examples(30)
@given(case=cases(num_ranks=(4, 6, 8), max_length=12, min_sequences=3), other=lengths(max_length=12), policy=policies)
def test_issue_order_of_several_zones_is_one(policy: Policy, case: Case, other: tuple[int, ...]) -> None:
    # Few tokens: ranks of a group then often have nothing to send or receive in its collectives.
    assert_one_issue_order("random_shares", policy, replace(case, remapped=False, routing=None), other)


def assert_one_issue_order(
    planner: str, policy: Policy, case: Case, other: tuple[int, ...], *, passing: bool = True
) -> None:
    # Of two nano-batches interleaved over two layers and, in that, of each of them, with nothing
    # connected before; under `communication: safe` too.
    case = replace(case, tokens_per_rank=None)
    plans = [plan(planner, each) for each in (case, replace(case, batch=Batch(other)))]
    compiled = [compile_ranks(each, policy, passing=passing) for each in plans]
    phases = batches_of(plans, compiled, ping_pong.forward(2))
    for batches in phases:
        verify_issue_order(batches)
    assert not hanging([group_calls([*ahead, *back]) for ahead, back in zip(*phases, strict=True)])


def assert_layouts_of_all_ranks_are_those_of_each(planned: MicrobatchPlan) -> None:
    ranks = range(planned.num_ranks)
    rows, held = layouts(planned), fragments(planned)
    of_each = [rows[rows[:, Placed.RANK] == rank][:, Placed.FRAGMENT].tolist() for rank in ranks]
    assert of_each == [layout(planned, rank).tolist() for rank in ranks]
    in_attention = [held[held[:, Held.RANK] == rank][:, Held.FRAGMENT].tolist() for rank in ranks]
    assert in_attention == [Projector(planned).attention_layout(rank).tolist() for rank in ranks]
    some = np.arange(0, planned.num_ranks, 2)
    assert fragments(planned, some).tolist() == held[held[:, Held.RANK] % 2 == 0].tolist()
    if planned.moves:
        assert_remote_tokens_are_the_moves(planned, held)


def assert_remote_tokens_are_the_moves(planned: MicrobatchPlan, held: Ints) -> None:
    moved: dict[tuple[int, int], int] = {}
    for row in remapped(planned, held).remote.tolist():
        fragment = held[row[RemoteHeld.FRAGMENT]].tolist()
        assert fragment[Held.RANK] == row[RemoteHeld.HOLDER]
        assert [fragment[at] for at in (Held.SEQ, Held.ZONE, Held.SENT_ON)] == [
            row[at] for at in (RemoteHeld.SEQ, RemoteHeld.ZONE, RemoteHeld.SENT_ON)
        ]
        start, stop = row[RemoteHeld.START], row[RemoteHeld.STOP]
        assert fragment[Held.START] <= start < stop <= fragment[Held.STOP]
        ends = row[RemoteHeld.HOLDER], row[RemoteHeld.OWNER]
        moved[ends] = moved.get(ends, 0) + stop - start
    assert moved == {(src, dst): tokens for src, dst, tokens in planned.moves}
