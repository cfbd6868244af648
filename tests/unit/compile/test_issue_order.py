"""The order in which all ranks issue their exchanges: what passes what, and the proof that ranks
cannot wait for one another."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_balance.compile.order import BY_ID, IssueOrder, Start, issue_orders
from megatron_balance.compile.pipeline import compile_ranks
from megatron_balance.compile.proof.runs import GroupCall, IssuedCall, issued, parts, verify_issue_order
from megatron_balance.compile.transpose import POLICIES, Policy
from megatron_balance.errors import InvalidProgramError
from megatron_balance.ir.columns import Rows
from megatron_balance.ir.plan import REMAP, MicrobatchPlan, Routing
from megatron_balance.ir.program import Exchange, Kind
from tests.support import by_hand
from tests.support.rendezvous import calls_of, hanging

# Two nodes of two; ranks 0 and 2 share a sequence, and 1 and 3 another. Rank 3 keeps its tokens
# outside attention where rank 0 has them in it.
PLAN = by_hand.plan(
    (64, 32, 24),
    4,
    by_hand.ring(range(4), 0, name="inter_node"),
    by_hand.ring((0, 1), 1, name="intra_node"),
    by_hand.ring((2, 3), 2, name="intra_node"),
    ranks_per_node=2,
)
REMAPPED = replace(PLAN, moves=Rows.of(3, [(0, 3, 5), (1, 2, 3)]))
ROUTED = replace(REMAPPED, routing=Routing(1, (REMAP, 0, 1, 2)))
PLANS = {"plain": PLAN, "remapped": REMAPPED, "routed": ROUTED}


def test_a_pair_that_moves_anything_goes_where_moved_values_go() -> None:
    copied, moved = (Kind.KV, 0, 0, 8, 0, 2, 0, 1), (Kind.OUT, 0, 8, 16, 0, 2, 0, 1)
    back, far = (Kind.KV, 0, 0, 8, 0, 2, 1, 0), (Kind.KV, 0, 0, 8, 0, 2, 0, 2)
    for rows in ((copied, moved, back, far), (moved, copied, far, back)):
        assert parts(Exchange(0, Rows.of(8, rows)), 0, 2) == (
            ("direct", "inter_node", {(0, 2)}),
            ("direct", "intra_node", {(1, 0)}),
            ("direct", "intra_node moved", {(0, 1)}),
        )


def sorted_ids(order: IssueOrder, moved: set[int], count: int) -> list[int]:
    return sorted(range(count), key=lambda at: order.key(at, moved=at in moved))


def test_the_next_steps_keys_pass_the_current_gradients_and_no_more() -> None:
    replayed = issue_orders(by_hand.pool("ring", (64,), 4), "replay").backward
    # Even: keys of a round again; odd: gradients of the round.
    assert sorted_ids(replayed, {1, 3, 5}, 6) == [0, 2, 1, 4, 3, 5]
    assert sorted_ids(IssueOrder(), {1}, 4) == [0, 2, 1, 3]
    assert sorted_ids(BY_ID, {1, 3, 5}, 6) == list(range(6))


def test_a_remap_is_around_all_zones() -> None:
    forward, backward = issue_orders(REMAPPED, "replay")
    assert sorted_ids(forward, {6}, 7) == list(range(7))
    ids = sorted_ids(backward, set(range(4, 15, 2)), 15)
    assert ids[:2] == [0, 2]  # both exchanges of the remap in, which every rank can start
    assert ids[-1] == 14


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", PLANS)
def test_in_the_safe_order_exchanges_start_by_their_ids(name: str, policy: Policy) -> None:
    for each in compile_ranks(PLANS[name], policy, passing=False):
        for ops, phase in ((each.program.forward, each.forward), (each.program.backward, each.backward)):
            started = [ops[step.op].id for step in phase.steps if isinstance(step, Start)]  # pyright: ignore[reportAttributeAccessIssue]
            assert started == sorted(started)
            assert phase.cuts.attend == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_issue_order_that_differs_on_one_rank_is_refused_and_hangs(policy: Policy) -> None:
    """Any two neighbouring calls changed round on one rank that it shares with a rank that keeps to
    the order."""
    compiled, refused, tried = compile_ranks(ROUTED, policy), 0, 0
    for backward in (False, True):
        calls = issued(compiled, ROUTED.ranks_per_node, backward=backward)
        for rank, own in enumerate(calls):
            for at in range(len(own) - 1):
                first, second = own[at], own[at + 1]
                if not first.ranks & second.ranks - {rank}:
                    continue
                changed = [list(each) for each in calls]
                changed[rank][at : at + 2] = [second, first]
                tried += 1
                with pytest.raises(InvalidProgramError, match="different orders") as caught:
                    verify_issue_order(changed)
                assert f"rank {rank} is at {second.call}, which rank" in str(caught.value)
                assert f"which rank {rank} issues after {second.call}" in str(caught.value)
                refused += 1
    assert refused == tried > 50


def call(exchange: int, *ranks: int) -> IssuedCall:
    return IssuedCall(
        GroupCall((0, 0), exchange, "direct", "inter_node"), exchange, (), frozenset({(ranks[0], ranks[1])})
    )


def test_a_circle_of_three_is_refused_though_no_two_ranks_share_two_calls() -> None:
    a, b, c = call(0, 0, 1), call(1, 1, 2), call(2, 2, 0)
    verify_issue_order([[a, c], [a, b], [b, c]])
    with pytest.raises(InvalidProgramError, match=r"rank 0 is at exchange 2 .*, which rank 2 issues after exchange 1 "):
        verify_issue_order([[c, a], [a, b], [b, c]])


def test_a_call_that_one_end_does_not_issue_is_refused() -> None:
    with pytest.raises(InvalidProgramError, match="rank 1 takes part in what rank 0 issues"):
        verify_issue_order([[call(0, 0, 1)], []])
    with pytest.raises(InvalidProgramError, match=r"rank 0 issues exchange 0 .* twice"):
        verify_issue_order([[call(0, 0, 1), call(0, 0, 1)], [call(0, 0, 1)]])


def test_a_rank_with_no_rows_in_a_collective_issues_it_in_its_place() -> None:
    """Of zone "few", rank 1 has neither tokens nor heads, and rank 2 no tokens; the inputs of the next
    zone pass its outputs on every rank, although they do not need it there.
    """
    few = by_hand.zone("few", "head_exchange", (1, 2, 0), [0])
    then = by_hand.zone("then", "head_exchange", (0, 1), [1])
    plan = by_hand.plan((1, 8), 3, few, then, heads=(2, 2))
    for policy in POLICIES:
        ranks = compile_ranks(plan, policy)
        for backward in (False, True):
            verify_issue_order(issued(ranks, plan.ranks_per_node, backward=backward))
        assert not hanging(calls_of([plan], [ranks]))
    (_, back), _ = (
        [op for op in compiled.program.forward if isinstance(op, Exchange) and op.group == (1, 2, 0)]
        for compiled in compile_ranks(plan, "keep")[1:]
    )
    assert not back.transfers
    assert back.moves


def test_plans_of_one_rank_and_of_no_sequences_have_nothing_to_order() -> None:
    empty: MicrobatchPlan = replace(PLAN, lengths=(), zones=())
    for plan in (empty, by_hand.plan((8,), 1, by_hand.local(0, 0))):
        for backward in (False, True):
            verify_issue_order(issued(compile_ranks(plan, "replay"), plan.ranks_per_node, backward=backward))
