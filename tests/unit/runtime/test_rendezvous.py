"""Hosts that stand in a group call until their peers have come: the model against the real
transport, and connecting before the step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

pytest.importorskip("torch")

from megatron_balance.compile import pipeline
from megatron_balance.compile.order import IssueOrder
from megatron_balance.compile.pipeline import compile_ranks
from megatron_balance.compile.proof import runs
from megatron_balance.compile.transpose import POLICIES, Policy
from megatron_balance.errors import InvalidProgramError
from megatron_balance.ir.batch import Batch
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.ir.program import Exchange
from megatron_balance.runtime.groups import Behind, IssueQueue
from megatron_balance.workloads.lengths import draw
from tests.support import host_threads
from tests.support.rendezvous import GroupCall, Meeting, calls_of, hanging
from tests.support.strategies import Case, plan

SMALL = Case(Batch((400, 90, 64, 33, 250)), Cluster(8, 4), Model(4, 2, 8), None, seed=5, remapped=True, routing=(1, 1))


def pairs(*both: tuple[int, int]) -> GroupCall:
    return GroupCall("c", frozenset(both))


# The model


def test_a_host_stands_until_the_other_end_is_in_a_call_with_the_pair() -> None:
    meeting = Meeting()
    assert meeting.enter(0, pairs((0, 1))) == []
    assert meeting.enter(1, pairs((1, 0))) == []  # the other way is another pair
    assert sorted(meeting.waiting) == [0, 1]
    meeting = Meeting()
    assert meeting.enter(0, pairs((0, 1))) == []
    assert meeting.enter(1, pairs((0, 1), (1, 0))) == []  # rank 0 does not receive in its call
    meeting = Meeting()
    assert meeting.enter(0, pairs((0, 1))) == []
    assert meeting.enter(1, pairs((0, 1))) == [0, 1]
    assert meeting.enter(1, pairs((0, 1))) == [1]  # connected, and the call is only issued
    assert meeting.enter(0, GroupCall("another", frozenset({(0, 1)}))) == []


def test_ranks_leave_a_call_together() -> None:
    """Rank 0 has met rank 1, which stands until it has met rank 2."""
    meeting = Meeting()
    assert meeting.enter(0, pairs((0, 1))) == []
    assert meeting.enter(1, pairs((0, 1), (1, 2))) == []
    assert meeting.enter(2, pairs((1, 2))) == [0, 1, 2]


def test_a_collective_holds_its_ranks_at_its_first_use() -> None:
    together = GroupCall("g", group=(0, 1, 2))
    meeting = Meeting()
    assert meeting.enter(0, together) == meeting.enter(2, together) == []
    assert meeting.enter(1, together) == [0, 1, 2]
    assert meeting.enter(1, together) == [1]


def test_two_ranks_that_begin_with_different_pairs_hang() -> None:
    a, b = pairs((0, 1)), GroupCall("d", frozenset({(0, 1)}))
    assert hanging([[a, b], [b, a]]) == {0: a, 1: b}
    assert hanging([[a, b], [a, b]]) == {}
    assert hanging([[a, b], [b, a]], Meeting({("c", (0, 1))})) == {}
    assert hanging([[a, b], [a]]) == {0: b}


# The model against the transport


@pytest.mark.parametrize(
    ("planner", "policy", "safe"),
    [(planner, "replay", False) for planner in ("llama_all_gather", "ulysses", "zeppelin", "distca")]
    + [("zeppelin", "keep", False), ("te_ring", "replay", True)],
)
def test_rendezvous_of_the_model_is_that_of_the_transport(planner: str, policy: Policy, safe: bool) -> None:
    planned = plan(planner, SMALL)
    hangs, issued = host_threads.run([planned], policy, safe=safe, connects=False)
    assert not hangs
    compiled = compile_ranks(planned, policy, passing=not safe)
    assert bare(issued) == bare(calls_of([planned], [compiled]))


def bare(calls: Sequence[Sequence[GroupCall]]) -> list[list[GroupCall]]:
    return [[call._replace(name="") for call in own] for own in calls]


def github(planner: str, ranks: int, per_node: int, seed: int) -> MicrobatchPlan:
    """A remapped plan of lengths as GitHub's, scaled down."""
    lengths = draw("github", 4096 * ranks, 1, seed)[0]
    batch = Batch(tuple(max(1, length // 128) for length in lengths))
    case = Case(batch, Cluster(ranks, per_node), Model(4, 2, 8), None, seed, True, (1, 1))
    return plan("zeppelin, rings" if planner == "zeppelin" else planner, case)


@pytest.fixture
def receivers_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that only receives in the remap out asks for it when it enters the forward, as it did
    before there was one order.
    """
    one = pipeline.in_order

    def own_order(program, issue, phases=pipeline.BOTH_PHASES):
        last = [op for op in program.forward if isinstance(op, Exchange) and op.id == program.num_exchanges - 1]
        if last and not any(src == program.rank for *_, src, _ in last[0].transfers):
            issue = issue._replace(forward=IssueOrder(first=frozenset({last[0].id})))
        return one(program, issue, phases)

    monkeypatch.setattr(pipeline, "in_order", own_order)


@pytest.mark.usefixtures("receivers_first")
def test_rendezvous_hangs_where_ranks_issue_in_orders_of_their_own() -> None:
    """te_ring on two nodes of two: on the same ranks in the model and on the transport; connecting
    first keeps it from it.
    """
    planned = github("te_ring", 4, 2, seed=0)
    hangs, _ = host_threads.run([planned], "replay", connects=False)
    predicted = hanging(calls_of([planned], [compile_ranks(planned, "replay")]))
    assert hangs.keys() == predicted.keys()
    assert len(hangs) == planned.num_ranks
    assert {rank: call._replace(name="") for rank, call in predicted.items()} == hangs
    connected, _ = host_threads.run([planned], "replay")
    assert not connected
    with pytest.raises(InvalidProgramError, match="different orders"):
        runs.prove(planned, "replay")


@pytest.mark.parametrize("policy", POLICIES)
def test_rendezvous_of_zeppelin_on_four_nodes_of_eight_with_a_remap_goes_through(policy: Policy) -> None:
    """It hung on all 32 ranks while each rank let what it only receives pass what it sends."""
    planned = github("zeppelin", 32, 8, seed=1)
    assert not hanging(calls_of([planned], [compile_ranks(planned, policy)]))


def test_the_safe_order_changes_the_order_of_calls_and_nothing_else() -> None:
    planned = plan("te_ring", SMALL)
    orders = [host_threads.run([planned], "replay", safe=safe, connects=False)[1] for safe in (False, True)]
    for passing, safe in zip(*orders, strict=True):
        assert passing != safe
        assert Counter(passing) == Counter(safe)


def test_the_safe_order_holds_no_batch_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even behind a launch, as later legs and late receives are otherwise."""
    planned, put, seen = plan("zeppelin", SMALL), IssueQueue.put, set[Behind]()

    def noted(queue: IssueQueue, key: object, issue: Callable[[], None], behind: Behind = Behind.NOTHING) -> None:
        seen.add(behind)
        put(queue, key, issue, behind)

    monkeypatch.setattr(IssueQueue, "put", noted)
    for safe in (False, True):
        seen.clear()
        host_threads.run([planned], "replay", safe=safe, connects=False)
        assert (seen == {Behind.NOTHING}) == safe


# Connecting


@pytest.mark.parametrize(("planner", "policy"), [("ulysses", "keep"), ("zeppelin", "replay")])
def test_rendezvous_happens_when_a_plan_is_bound_and_never_in_its_step(planner: str, policy: Policy) -> None:
    """New pairs of a second plan too; what the first one connected is not connected again."""
    plans = [plan(planner, replace(SMALL, batch=batch)) for batch in (Batch((300, 20)), SMALL.batch, Batch((300, 20)))]
    hangs, issued = host_threads.run(plans, policy)
    assert not hangs
    _, without = host_threads.run(plans, policy, connects=False)
    for own, steps in zip(issued, without, strict=True):
        connected: set[tuple[str, tuple[int, int]]] = set()
        remaining = list(steps)
        for call in own:
            if remaining and call == remaining[0] and (call.group or call.links() <= connected):
                remaining.pop(0)
                continue
            assert not call.links() & connected  # each link once
            connected |= call.links()
        assert not remaining


def test_rendezvous_does_not_come_again_for_the_same_plan() -> None:
    planned = plan("zeppelin", SMALL)
    _, once = host_threads.run([planned], "replay")
    _, twice = host_threads.run([planned, planned], "replay")
    _, step = host_threads.run([planned], "replay", connects=False)
    assert [len(a) + len(b) for a, b in zip(once, step, strict=True)] == [len(own) for own in twice]
