"""The order of a rank's steps and streams: what starts early, and what waits for what. That no step
of any planner comes too early and no rank waits for ever, the contract suite proves."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from megatron_balance.compile.order import BY_ID, Finish, IssueOrder, RunLaunches, Start, Step, issue_orders, order
from megatron_balance.compile.pipeline import compile_policies, compile_ranks, project
from megatron_balance.compile.proof.runs import GroupCall, IssuedCall, issued, parts, verify_issue_order
from megatron_balance.compile.transpose import POLICIES, Policy
from megatron_balance.errors import InvalidProgramError
from megatron_balance.ir.columns import Rows
from megatron_balance.ir.plan import REMAP, MicrobatchPlan, Routing, Zone
from megatron_balance.ir.program import Attend, AttendGrad, Exchange, Kind, Op, RankProgram
from tests.support import by_hand
from tests.support.foreseen import Issue, streams
from tests.support.rendezvous import calls_of, hanging

# Three queues on two nodes of two ranks: a ring over all ranks, one inside the first node, and a
# sequence on one rank.
QUEUES = by_hand.plan(
    (64, 32, 8),
    4,
    by_hand.ring(range(4), 0, name="inter_node"),
    by_hand.ring((0, 1), 1, name="intra_node"),
    by_hand.local(0, 2),
    ranks_per_node=2,
)


def shown(ops: Sequence[Op], steps: Sequence[Step]) -> list[str]:
    # Steps in short: exchanges by their ids, launches by their zone's number of keys' sequence.
    found: list[str] = []
    for step in steps:
        op = ops[step.op]
        match step:
            case Start():
                assert isinstance(op, Exchange)
                found.append(f"start {op.id}")
            case Finish():
                assert isinstance(op, Exchange)
                found.append(f"finish {op.id}")
            case RunLaunches():
                assert isinstance(op, Attend | AttendGrad)
                found.append("run s" + "s".join(str(s) for s in sorted({row[0] for row in op.pairs})))
    return found


def bound(plan: MicrobatchPlan, rank: int, policy: Policy = "keep") -> RankProgram:
    return compile_policies(plan, rank, [policy])[0].program


def test_the_next_rounds_keys_are_under_way_while_the_current_ones_are_attended() -> None:
    program = bound(QUEUES, 0)
    assert shown(program.forward, order(program.forward, 0)) == [
        *("start 0", "run s0"),
        *("finish 0", "start 1", "run s0"),
        *(
            "finish 1",
            "start 2",
            "start 3",
            "run s0",
        ),  # the first transfer of the second queue too, but behind all of the first's
        *("finish 2", "run s0", "run s1"),
        *("finish 3", "run s1", "run s2"),
    ]


def test_the_backward_comes_in_reverse_and_its_gradients_travel_beside_computation() -> None:
    program = bound(QUEUES, 0, "keep")
    steps = shown(program.backward, order(program.backward, 0))
    assert [s for s in steps if s.startswith("run")] == [
        "run s2",
        "run s1",
        "run s1",
        "run s0",
        "run s0",
        "run s0",
        "run s0",
    ]
    ends = [s for s in steps if not s.startswith("run")]
    assert ends == ["start 1", "start 3", "finish 3", "start 5", "finish 5", "start 7", "finish 1", "finish 7"]
    # The gradient of the first ring round goes once it is computed, and the next launch waits for
    # no gradient.
    assert steps.index("start 3") < steps.index("finish 3")
    assert steps[steps.index("start 3") + 1] == "run s0"


def test_in_a_replayed_ring_the_next_keys_pass_the_current_gradients() -> None:
    program = bound(QUEUES, 0, "replay")
    steps = shown(program.backward, order(program.backward, 0))
    for again, gradient in ((2, 1), (4, 3), (6, 5)):
        assert steps.index(f"start {again}") < steps.index(f"start {gradient}")
    starts = [int(s.removeprefix("start ")) for s in steps if s.startswith("start")]
    assert [i for i in starts if i % 2 == 0] == sorted(i for i in starts if i % 2 == 0)
    assert [i for i in starts if i % 2] == sorted(i for i in starts if i % 2)


def test_a_launch_waits_only_for_the_gradients_that_it_reads() -> None:
    # The gradient of sequence 1's output comes from rank 1; the launch of sequence 0 goes ahead of
    # it.
    ops: list[Op] = [
        Exchange(0, Rows.of(8, [(Kind.OUT_GRAD, 1, 0, 8, 0, 2, 1, 0)])),
        AttendGrad(0, Rows.of(9, [(0, 0, 8, 0, 2, 0, 8, 0, 1)])),
        AttendGrad(0, Rows.of(9, [(1, 0, 8, 0, 2, 0, 8, 0, 1)])),
    ]
    assert shown(ops, order(ops, 0)) == ["start 0", "run s0", "finish 0", "run s1"]


def test_a_launch_does_not_wait_for_keys_that_none_of_its_queries_sees() -> None:
    ops: list[Op] = [
        Exchange(0, Rows.of(8, [(Kind.KV, 0, 4, 8, 0, 1, 1, 0)])),
        Attend(0, Rows.of(9, [(0, 0, 4, 0, 2, 0, 8, 0, 1)])),
    ]
    assert shown(ops, order(ops, 0)) == ["start 0", "run s0", "finish 0"]


def test_what_is_only_received_is_asked_for_at_once() -> None:
    # A rank that sends no gradient asks for those of others before it computes its own.
    zones = (Zone("intra_node", "all_gather", (0, 1), (0,)),)
    program = bound(replace(QUEUES, lengths=(16,), zones=zones), 0)
    received_only = [
        replace(op, transfers=Rows.of(8, [row for row in op.transfers if row[7] == 0]), collective="p2p", group=())
        if isinstance(op, Exchange)
        else op
        for op in program.backward
    ]
    assert isinstance(order(received_only, 0)[0], Start)


# Streams


def test_each_leg_of_a_routed_exchange_has_its_stream() -> None:
    # Rank 0 sends to rank 2 on the other node: half of it over rank 1 and rank 3.
    ring = by_hand.plan((32,), 4, by_hand.ring((0, 2), 0), ranks_per_node=2, routing=Routing(1, (0,)))
    issues = [streams(project(ring, rank).forward, rank, 2) for rank in range(4)]
    exchange = [
        next(i for i, op in enumerate(project(ring, rank).forward) if isinstance(op, Exchange)) for rank in range(4)
    ]
    for rank in (0, 2):
        at = exchange[rank]
        assert {name: list(of) for name, of in issues[rank].items() if name != "compute"} == {
            "dispatch": [Issue(at, "dispatch", ("own",))],
            "inter_node": [Issue(at, "across", ("own",))],
            "combine": [Issue(at, "combine", ("own",))],
        }
    for rank in (1, 3):
        at = exchange[rank]
        assert issues[rank] == {
            "compute": (),
            "dispatch": (Issue(at, "dispatch", ("send_proxy",)),),
            "inter_node": (Issue(at, "across", ("receive_proxy", "send_proxy")),),
            "combine": (Issue(at, "combine", ("receive_proxy",)),),
        }


def test_a_direct_transfer_belongs_to_the_link_that_it_takes() -> None:
    program = project(replace(QUEUES, zones=QUEUES.zones[:1], lengths=(64,)), 1)
    found = streams(program.forward, 1, 2)
    assert set(found) == {
        "compute",
        "inter_node",
        "intra_node",
    }  # rank 1 receives from its own node and sends to the other
    assert [i.op for i in found["inter_node"]] == [i.op for i in found["intra_node"]]
    backward = streams(bound(QUEUES, 1).backward, 1, 2)
    assert set(backward) == {"compute", "inter_node moved", "intra_node moved"}


# The order in which all ranks issue their exchanges: what passes what, and the proof that ranks
# cannot wait for one another.

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
    # Any two neighbouring calls changed round on one rank that it shares with a rank that keeps to
    # the order.
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
    # Of zone "few", rank 1 has neither tokens nor heads, and rank 2 no tokens; the inputs of the
    # next zone pass its outputs on every rank, although they do not need it there.
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
