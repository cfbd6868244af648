"""Happens-before of all that the runtime gives to a GPU's streams, and of hosts in group calls."""

# On stand-ins: nothing touches memory that another stream may still use, and every wait that
# matters is found when it is left out. `python -m tools.faults races` does the same to a thousand
# random plans.

from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from megatron_balance import Batch, Cluster, MicrobatchPlan, Model
from megatron_balance.compile import order, pipeline, transpose
from megatron_balance.compile.proof import runs
from megatron_balance.errors import InvalidProgramError
from megatron_balance.ir.columns import Rows
from megatron_balance.ir.program import Exchange
from megatron_balance.planning.ticks import plan_ticks, ticks
from megatron_balance.runtime import pool, transport
from megatron_balance.runtime.groups import Behind, IssueQueue
from megatron_balance.workloads.lengths import draw
from tests.support import by_hand, host_threads
from tests.support.rendezvous import GroupCall, Meeting, calls_of, hanging
from tests.support.strategies import ALL_PLANNERS, EVERY_PATTERN, Case, plan, replace
from tools.gpu_model import races
from tools.gpu_model.dropped import verdicts
from tools.gpu_model.races import Recorded
from tools.gpu_model.record import Way, record
from tools.gpu_model.trace import Trace

pytest.importorskip("triton")
pytest.importorskip("torch")
CASE = Case(Batch((90, 40, 33, 7)), Cluster(4, 2), Model(4, 2, 4, 32, 64), 50, seed=5, remapped=True, routing=(1, 1))
LAYERS = {
    "bare": replace(CASE, remapped=False, routing=None),
    "routed": replace(CASE, remapped=False),
    "remapped and routed": CASE,
}


def _dealt(lengths: tuple[int, ...], owned: Rows) -> MicrobatchPlan:
    shards = [(seq, a, min(a + 16, stop)) for _, seq, start, stop in owned for a in range(start, stop, 16)]
    tasks = sorted((at % 4, seq, a, b, 0, b) for at, (seq, a, b) in enumerate(shards))
    return by_hand.plan(lengths, 4, by_hand.task_table(owned, tasks), ranks_per_node=2, heads=(4, 2))


def recorded(planner: str, case: Case, way: Way, rank: int = 1) -> Recorded:
    return Recorded(record([plan(planner, case)], rank, way))


WAYS = (Way("keep"), Way("replay"), Way("replay", mover="plain"))


@pytest.mark.parametrize("planner", ALL_PLANNERS)
def test_happens_before_orders_every_access_of_every_planner_layer_and_policy(planner: str) -> None:
    # Of some planners in every pair of layers and ways, of the others in one pair each, in turn.
    pairs = list(zip(LAYERS.items(), WAYS, strict=True))
    mine = ALL_PLANNERS.index(planner) % len(pairs)
    for (layers, case), way in pairs if planner in EVERY_PATTERN else pairs[mine : mine + 1]:
        run = recorded(planner, case, way)
        assert run.races() == [], (layers, way)
        assert len(run.pairs) > 30


@pytest.mark.parametrize(
    ("planner", "policy"), [("zeppelin", "replay"), ("distca", "keep"), ("ulysses", "replay"), ("random_zones", "keep")]
)
def test_happens_before_orders_interleaved_nano_batches(planner: str, policy) -> None:
    plans = [plan(planner, CASE), plan(planner, replace(CASE, batch=Batch((64, 21))))]
    for rank in (0, 3):
        assert Recorded(record(plans, rank, Way(policy))).races() == []


def test_happens_before_orders_what_a_stage_without_tokens_does_in_a_tick() -> None:
    # Two stages of two ranks in the last tick of the first microbatch: one has no tokens, and attends
    # for the other (`runtime.attention`).
    table = by_hand.task_table([(0, 0, 0, 60), (1, 1, 0, 20)])
    stage = by_hand.plan((60, 20), 2, table, ranks_per_node=2, heads=(4, 2))
    one = plan_ticks(ticks(2, 1, 1), [stage], _dealt)[0]
    assert one.tick.microbatches == (0, None)
    for rank in range(4):
        run = Recorded(record([one.plan, one.plan], rank, Way("replay")))
        assert run.races() == []
        assert any(op.kind == "backward" for op in run.trace.ops)


@pytest.mark.parametrize("planner", ["te_ring", "zeppelin", "distca", "ulysses", "random_task_table"])
def test_happens_before_finds_every_wait_event_and_order_that_is_left_out_and_needed(planner: str) -> None:
    # Every one is found missing, or others order the same, or what it orders shares no byte. No more
    # waits than half are not needed: where a batch follows another and nothing was computed between
    # them it waits all the same, and so does a receive into memory that no one has used.
    counts = verdicts(recorded(planner, CASE, Way("replay", num_layers=1)))
    assert counts.wrong == []
    waits, orders = counts.by["wait"], counts.by["order"]
    assert waits["found"] > 10
    assert waits["implied"] + waits["idle"] <= waits["found"]
    assert orders["idle"] < orders["found"] // 5


def test_a_check_that_sees_last_writes_only_is_told_what_it_misses(monkeypatch) -> None:
    # The verdicts do not rest on the check that they are held against.
    check = races._conflicts

    def blind(ops):
        pairs = check(ops)
        writes = [bool(op.writes) for op in ops]
        return pairs[[not writes[a] for a, _ in pairs.tolist()]]

    monkeypatch.setattr(races, "_conflicts", blind)
    wrong = verdicts(recorded("zeppelin", CASE, Way("keep", num_layers=1))).wrong
    assert {what for what, _ in wrong} == {"wait", "event", "order"}


def test_happens_before_finds_a_pool_without_fences_and_memory_that_is_let_go_too_soon(monkeypatch) -> None:
    # Kept keys go through two layers, so that memory is used again.
    planners = ("te_ring", "zeppelin")
    with monkeypatch.context() as patch:
        patch.setattr(pool.BufferPool, "used", lambda *_: None)
        found = [recorded(planner, CASE, Way("replay")).races() for planner in planners]
        assert all(found)
        assert "touch the same memory, and nothing orders them" in str(found[0][0])
    monkeypatch.setattr("tools.gpu_model.stand_ins.RecordedStream.uses", lambda *_: None)
    found = [race for planner in planners for race in recorded(planner, CASE, Way("replay")).races()]
    assert {race.later.what for race in found} == {"free"}


def test_happens_before_finds_a_leg_that_does_not_wait_for_the_one_that_brings_its_pieces(monkeypatch) -> None:
    relay = transport.Streamed.add_relay_tasks

    def forgetful(self, relay_tasks, batches) -> None:
        relay(self, relay_tasks, batches)
        batches.after.clear()

    monkeypatch.setattr(transport.Streamed, "add_relay_tasks", forgetful)
    found = recorded("te_ring", CASE, Way("keep", num_layers=1)).races()
    assert found
    assert {race.earlier.stream.split()[0] for race in found} <= {"dispatch", "inter_node", "combine"}


def test_happens_before_by_hand() -> None:
    # Stream b reads what stream a wrote: a race, unless an event joins them.
    trace = Trace(0)
    trace.launch("a", "write", (), ((0, 10),))
    event = trace.record("a")
    trace.wait("b", event)
    trace.wait("b", event)
    trace.launch("b", "read", ((8, 12),), ())
    trace.free("a", (0, 16), frozenset())
    run = Recorded(trace)
    said = "rank 0: read on 'b' and memory let go on 'a' touch the same memory, and nothing orders them"
    assert [str(race) for race in run.races()] == [said]
    trace.ops[-1] = trace.ops[-1].__class__("a", "free", "memory let go", writes=((0, 16),), spared=frozenset({"b"}))
    run = Recorded(trace)
    assert run.races() == []
    # Each of the two alone would do.
    assert verdicts(run).by["wait"] == {"found": 0, "implied": 2, "idle": 0, "lent": 0}
    del trace.ops[3]
    assert verdicts(Recorded(trace)).by["wait"] == {"found": 1, "implied": 0, "idle": 0, "lent": 0}


def test_batches_are_issued_in_their_order_wherever_launches_lie() -> None:
    said: list[str] = []
    queue, keys = IssueQueue(), [object(), object(), object()]

    def put(name: str, key: int, behind: Behind = Behind.NOTHING) -> None:
        queue.put(keys[key], lambda: said.append(name), behind)

    put("dispatch 0", 0)
    put("across 0", 0, Behind.LAUNCH)
    put("dispatch 1", 1)  # may not pass
    assert said == ["dispatch 0"]
    queue.through(keys[0])
    assert said == ["dispatch 0", "across 0"]
    queue.launched()
    assert said[2:] == ["dispatch 1"]
    put("outputs", 2, Behind.LAUNCHES)
    queue.launched()
    assert len(said) == 3
    queue.attended()
    assert said[3:] == ["outputs"]
    put("outputs", 2, Behind.LAUNCHES)
    put("keys", 0)  # would have to wait
    assert said[4:] == ["outputs", "keys"]
    for link in ("inter_node", "intra_node"):  # of one exchange, or of two: neither waits for more than the other
        put(f"outputs {link}", 2, Behind.LAUNCHES)
    queue.launched()
    assert said[6:] == []
    queue.attended()
    assert said[6:] == ["outputs inter_node", "outputs intra_node"]
    put("across 2", 2, Behind.LAUNCH)
    queue.forget()
    queue.flush()
    assert said[8:] == []


def test_values_that_only_come_back_are_received_behind_the_last_launch() -> None:
    # On every stream: one that is posted before holds multiprocessors until its sender is done.
    ops = record([_dealt((64,), Rows.of(4, [(0, 0, 0, 64)]))], 0, Way("keep", num_layers=1)).ops
    kinds = [op.kind for op in ops]
    forward, backward = kinds.index("forward"), kinds.index("backward")
    # one byte connects a pair
    more = [any(stop - start > 1 for start, stop in op.writes) for op in ops]
    receives = [(at, op.stream) for at, op in enumerate(ops) if kinds[at] == "batch" and more[at]]
    both = {"inter_node moved", "intra_node moved"}
    assert [stream for at, stream in receives if at < forward] == []
    assert {stream for at, stream in receives if forward < at < backward} == both
    assert {stream for at, stream in receives if at > backward} == both


def test_legs_that_others_need_for_their_first_launch_do_not_wait_for_a_backward_launch() -> None:
    # A backward launch is three kernels, one behind the other at the head of the one hardware queue:
    # a rank whose launch needs nothing of an exchange would hold up all whose launch does.
    passed_on = 0
    for rank in range(CASE.cluster.num_ranks):
        ops = record([plan("distca", LAYERS["routed"])], rank, Way("keep", num_layers=1)).ops
        kinds = [op.kind for op in ops]
        forward, backward = kinds.index("forward"), kinds.index("backward")
        inputs = [at for at, op in enumerate(ops) if op.stream in ("inter_node", "combine") and kinds[at] == "batch"]
        assert all(at < backward for at in inputs)
        passed_on += sum(at > forward for at in inputs)
    assert passed_on


# Hosts that stand in a group call until their peers have come: the model against the real
# transport, and connecting before the step.

SMALL = Case(Batch((400, 90, 64, 33, 250)), Cluster(8, 4), Model(4, 2, 8), None, seed=5, remapped=True, routing=(1, 1))


def pairs(*both: tuple[int, int]) -> GroupCall:
    return GroupCall("c", frozenset(both))


def test_a_host_stands_until_the_other_end_is_in_a_call_with_the_pair() -> None:
    # A host stands until the other end is in a call with the pair.
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
    # Ranks leave a call together: rank 0 has met rank 1, which stands until it has met rank 2.
    meeting = Meeting()
    assert meeting.enter(0, pairs((0, 1))) == []
    assert meeting.enter(1, pairs((0, 1), (1, 2))) == []
    assert meeting.enter(2, pairs((1, 2))) == [0, 1, 2]
    # A collective holds its ranks at its first use.
    together, meeting = GroupCall("g", group=(0, 1, 2)), Meeting()
    assert meeting.enter(0, together) == meeting.enter(2, together) == []
    assert meeting.enter(1, together) == [0, 1, 2]
    assert meeting.enter(1, together) == [1]
    # Two ranks that begin with different pairs hang.
    a, b = pairs((0, 1)), GroupCall("d", frozenset({(0, 1)}))
    assert hanging([[a, b], [b, a]]) == {0: a, 1: b}
    assert hanging([[a, b], [a, b]]) == {}
    assert hanging([[a, b], [b, a]], Meeting({("c", (0, 1))})) == {}
    assert hanging([[a, b], [a]]) == {0: b}


@pytest.mark.parametrize(
    ("planner", "policy", "safe"),
    [(planner, "replay", False) for planner in ("llama_all_gather", "ulysses", "zeppelin", "distca")]
    + [("zeppelin", "keep", False), ("te_ring", "replay", True)],
)
def test_rendezvous_of_the_model_is_that_of_the_transport(planner: str, policy: transpose.Policy, safe: bool) -> None:
    planned = plan(planner, SMALL)
    hangs, issued = host_threads.run([planned], policy, safe=safe, connects=False)
    assert not hangs
    compiled = pipeline.compile_ranks(planned, policy, passing=not safe)
    assert bare(issued) == bare(calls_of([planned], [compiled]))


def bare(calls: Sequence[Sequence[GroupCall]]) -> list[list[GroupCall]]:
    return [[call._replace(name="") for call in own] for own in calls]


def github(planner: str, ranks: int, per_node: int, seed: int) -> MicrobatchPlan:
    """A remapped plan of lengths as GitHub's, scaled down."""
    lengths = draw("github", 4096 * ranks, 1, seed)[0]
    batch = Batch(tuple(max(1, length // 128) for length in lengths))
    case = Case(batch, Cluster(ranks, per_node), Model(4, 2, 8), None, seed, True, (1, 1))
    return plan("zeppelin, rings" if planner == "zeppelin" else planner, case)


def test_rendezvous_hangs_where_ranks_issue_in_orders_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    # te_ring on two nodes of two: on the same ranks in the model and on the transport; connecting
    # first keeps it from it.
    one = pipeline.in_order

    # A rank that only receives in the remap out asks for it when it enters the forward, as it did
    # before there was one order.
    def own_order(program, issue, phases=pipeline.BOTH_PHASES):
        last = [op for op in program.forward if isinstance(op, Exchange) and op.id == program.num_exchanges - 1]
        if last and not any(src == program.rank for *_, src, _ in last[0].transfers):
            issue = issue._replace(forward=order.IssueOrder(first=frozenset({last[0].id})))
        return one(program, issue, phases)

    monkeypatch.setattr(pipeline, "in_order", own_order)
    planned = github("te_ring", 4, 2, seed=0)
    hangs, _ = host_threads.run([planned], "replay", connects=False)
    predicted = hanging(calls_of([planned], [pipeline.compile_ranks(planned, "replay")]))
    assert hangs.keys() == predicted.keys()
    assert len(hangs) == planned.num_ranks
    assert {rank: call._replace(name="") for rank, call in predicted.items()} == hangs
    connected, _ = host_threads.run([planned], "replay")
    assert not connected
    with pytest.raises(InvalidProgramError, match="different orders"):
        runs.prove(planned, "replay")


@pytest.mark.parametrize("policy", transpose.POLICIES)
def test_rendezvous_of_zeppelin_on_four_nodes_of_eight_with_a_remap_goes_through(policy: transpose.Policy) -> None:
    # It hung on all 32 ranks while each rank let what it only receives pass what it sends.
    planned = github("zeppelin", 32, 8, seed=1)
    assert not hanging(calls_of([planned], [pipeline.compile_ranks(planned, policy)]))


def test_the_safe_order_changes_the_order_of_calls_and_nothing_else_and_holds_no_batch_back(monkeypatch) -> None:
    # Not even behind a launch, as later legs and late receives are otherwise.
    planned, put, seen = plan("te_ring", SMALL), IssueQueue.put, set[Behind]()

    def noted(queue: IssueQueue, key: object, issue: Callable[[], None], behind: Behind = Behind.NOTHING) -> None:
        seen.add(behind)
        put(queue, key, issue, behind)

    monkeypatch.setattr(IssueQueue, "put", noted)
    passing = host_threads.run([planned], "replay", connects=False)[1]
    assert seen > {Behind.NOTHING}
    seen.clear()
    safe = host_threads.run([planned], "replay", safe=True, connects=False)[1]
    assert seen == {Behind.NOTHING}
    for own, own_safe in zip(passing, safe, strict=True):
        assert own != own_safe
        assert Counter(own) == Counter(own_safe)


@pytest.mark.parametrize(("planner", "policy"), [("ulysses", "keep"), ("zeppelin", "replay")])
def test_rendezvous_happens_when_a_plan_is_bound_and_never_in_its_step(planner: str, policy: transpose.Policy) -> None:
    # New pairs of a second plan too; what the first one connected is not connected again, not for
    # the same plan either.
    plans = [plan(planner, replace(SMALL, batch=batch)) for batch in (Batch((300, 20)), SMALL.batch)]
    hangs, issued = host_threads.run([*plans, plans[0]], policy)
    assert not hangs
    _, without = host_threads.run([*plans, plans[0]], policy, connects=False)
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
