"""Orders: of steps and exchanges, of what CUDA streams are told, of passes, of two nano-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_balance.compile import ping_pong
from megatron_balance.compile.order import BY_ID, Finish, IssueOrder, RunLaunches, Start, Step, issue_orders, order
from megatron_balance.compile.ping_pong import Cuts, NanoSegment, cut_segments
from megatron_balance.compile.pipeline import PASSES, compile_policies, compile_ranks, expand, in_order, project
from megatron_balance.compile.pipeline import Pass as CompilerPass
from megatron_balance.compile.proof.meaning import verify
from megatron_balance.compile.proof.runs import GroupCall, IssuedCall, issued, parts, verify_issue_order
from megatron_balance.compile.transpose import POLICIES, Policy, transpose
from megatron_balance.errors import InvalidProgramError
from megatron_balance.ir.columns import Rows
from megatron_balance.ir.mask import SlidingWindow
from megatron_balance.ir.plan import REMAP, MicrobatchPlan, Routing, Zone
from megatron_balance.ir.program import Attend, AttendGrad, Exchange, Kind, Merge, Op, Program, RankProgram
from megatron_balance.ir.text import parse, text
from megatron_balance.runtime import cuda
from megatron_balance.runtime.attention import balanced_attention
from megatron_balance.runtime.bind import AttentionShape, bind
from megatron_balance.runtime.cuda import CudaStreams, StreamMessage
from megatron_balance.runtime.groups import Groups, stream_names
from tests.support import by_hand
from tests.support.foreseen import Issue, streams
from tests.support.rendezvous import calls_of, hanging
from tests.support.silent import SilentStream, SilentStreams

torch = pytest.importorskip("torch")

RING = by_hand.pool("ring", (64,), 4, ranks_per_node=2)
PAIR = by_hand.plan((64,), 4, by_hand.ring((0, 2), 0), ranks_per_node=2, routing=Routing(1, (0,)))


class Written(SilentStreams):
    # Streams that write down what they are told; every event is the number of what came before it.
    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []

    def of(self, name: str) -> WrittenStream:
        return WrittenStream(name, self.log)

    def now(self) -> str:
        return f"compute {sum(entry[0] == 'compute' for entry in self.log)}"

    def wait(self, event: str) -> None:
        self.log.append(("compute", "wait", event))

    def timed(self, on: bool) -> None:
        raise AssertionError(f"nobody asked for times, but {on}")

    def seconds(self, begin: str, end: str) -> float:
        raise AssertionError(f"nobody asked for times, but {begin} to {end}")


class WrittenStream(SilentStream):
    def __init__(self, name: str, log: list[tuple[Any, ...]]) -> None:
        self.name, self.log = name, log

    def wait(self, event: str) -> None:
        self.log.append((self.name, "wait", event))

    def batch(self, transfers: Sequence[StreamMessage]) -> None:
        rows = [("to" if t.sends else "from", t.peer, t.tensor.nbytes) for t in transfers]
        self.log.append((self.name, "batch", rows))

    def call(self, issue: Callable[[], Sequence[Any]]) -> None:
        raise AssertionError(f"no collective here, but {issue}")

    def uses(self, x: Any) -> None:
        self.log.append((self.name, "uses", x.nbytes))

    def record(self) -> str:
        return f"{self.name} {sum(entry[:2] == (self.name, 'batch') for entry in self.log)}"


def log_of(plan: MicrobatchPlan, rank: int) -> list[tuple[Any, ...]]:
    # All that rank `rank` issues in a forward, but for the memory its streams use; binding has
    # connected its ranks before. Nothing arrives, so the values are void.
    streams = Written()
    groups = Groups(rank, plan.num_ranks, tuple(range(plan.num_ranks)), None, streams=streams)
    bound = bind(plan, rank, AttentionShape(2, 1, 4), groups=groups, kernel="plain")
    streams.log.clear()
    inputs = [torch.zeros(bound.num_tokens, heads, 4) for heads in (2, 1, 1)]
    balanced_attention(inputs[0], inputs[1], inputs[2], bound)
    batches = {(name, size) for name, what, rows in streams.log if what == "batch" for _, _, size in rows}
    assert batches == {(name, size) for name, what, size in streams.log if what == "uses"}
    return [entry for entry in streams.log if entry[1] != "uses"]


def test_legs_wait_for_the_leg_before_and_links_go_beside_each_other() -> None:
    # Transfers in the node and between nodes go beside each other.
    # Rank 1 receives from rank 0 beside it and sends to rank 2 on the other node: 16 tokens, keys
    # and values, fp32.
    log = log_of(RING, 1)
    assert log[:6] == [
        ("inter_node", "wait", "compute 0"),
        ("inter_node", "batch", [("to", 2, 512)]),
        ("intra_node", "wait", "compute 0"),
        ("intra_node", "batch", [("from", 0, 256)]),  # its low chunk only: no one needs the high one
        ("compute", "wait", "intra_node 1"),
        ("inter_node", "wait", "compute 1"),
    ]
    # A leg waits for the leg before and attention for the last.
    # Rank 2 receives half of what it needs of rank 0 directly and half over rank 3, and sends its
    # own the same way. It passes nothing on, so its legs wait for its own work only.
    assert log_of(PAIR, 2) == [
        ("dispatch", "wait", "compute 0"),
        ("dispatch", "batch", [("to", 3, 512)]),
        ("inter_node", "wait", "compute 0"),
        ("inter_node", "batch", [("from", 0, 256), ("to", 0, 512)]),
        ("combine", "wait", "compute 0"),
        ("combine", "batch", [("from", 3, 256)]),
        ("compute", "wait", "inter_node 1"),
        ("compute", "wait", "combine 1"),
    ]
    # A proxy passes on without waiting for its own work.
    log = log_of(PAIR, 3)
    assert log == [
        ("dispatch", "batch", [("from", 2, 512)]),
        ("inter_node", "wait", "dispatch 1"),
        ("inter_node", "batch", [("from", 1, 256), ("to", 1, 512)]),
        ("combine", "wait", "inter_node 1"),
        ("combine", "batch", [("to", 2, 256)]),
    ]
    busy = replace(PAIR, lengths=(64, 8), zones=(*PAIR.zones, Zone("local", "ring", (3,), (1,))))
    assert log_of(busy, 3) == log


def test_both_ends_of_every_batch_have_its_messages_in_the_same_order() -> None:
    # All that two ranks say to each other on one stream, in order, is the same on both sides.
    plan = replace(RING, lengths=(200,), routing=Routing(1, (0,)))
    said: dict[tuple[str, int, int], list[int]] = {}
    heard: dict[tuple[str, int, int], list[int]] = {}
    for rank in range(4):
        for name, what, rows in log_of(plan, rank):
            for way, peer, size in rows if what == "batch" else ():
                src, dst = (rank, peer) if way == "to" else (peer, rank)
                (said if way == "to" else heard).setdefault((name, src, dst), []).append(size)
    assert said == heard
    assert {name for name, _, _ in said} == {"dispatch", "inter_node", "intra_node", "combine"}
    # A pool has the streams that its nodes need.
    routed = ["inter_node", "intra_node", "dispatch", "combine"]
    pools = {(1, 8): [], (8, 8): ["intra_node"], (4, 8): ["intra_node"], (4, 1): ["inter_node"]}
    for (size, ranks_per_node), links in {**pools, (16, 8): routed, (16, 0): routed}.items():
        assert stream_names(size, ranks_per_node) == [name for link in links for name in (link, f"{link} moved")]


class FakeCuda:
    # `torch.cuda`, written down.
    def __init__(self) -> None:
        self.log: list[Any] = []
        self.inside: list[int] = [0]
        self.made = 0

    def Stream(self, priority: int) -> SimpleNamespace:  # noqa: N802
        self.made += 1
        number = self.made
        self.log.append(("stream", number, priority))
        return SimpleNamespace(number=number, wait_event=lambda event: self.log.append((number, "waits for", event)))

    def Event(self, *, enable_timing: bool) -> SimpleNamespace:  # noqa: N802
        assert not enable_timing, "nobody asked for times"
        return SimpleNamespace(
            record=lambda stream=None: self.log.append((stream.number if stream else self.inside[-1], "records"))
        )

    def current_stream(self) -> SimpleNamespace:
        return SimpleNamespace(wait_event=lambda event: self.log.append((self.inside[-1], "waits for", event)))

    @contextmanager
    def stream(self, stream: SimpleNamespace) -> Any:
        self.inside.append(stream.number)
        yield
        self.inside.pop()


def test_calls_and_waits_happen_inside_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    # Work log_of and waited for under the stream joins that stream to the communicator's own, and
    # never stops the host.
    fake = FakeCuda()
    monkeypatch.setattr(cuda.torch, "cuda", fake)
    monkeypatch.setattr(cuda.dist, "P2POp", lambda op, tensor, peer, group: (op.__name__, tensor, peer, group))

    def batch(ops: list[Any]) -> list[SimpleNamespace]:
        fake.log.append((fake.inside[-1], [(name, peer, group) for name, _, peer, group in ops]))
        return [SimpleNamespace(wait=lambda: fake.log.append((fake.inside[-1], "waits for the call")))]

    monkeypatch.setattr(cuda.dist, "batch_isend_irecv", batch)
    streams = CudaStreams({"inter_node": "between", "combine": "inside"}, (10, 11, 12))  # pyright: ignore[reportArgumentType]
    across, combine = streams.of("inter_node"), streams.of("combine")
    assert streams.of("inter_node") is across
    streams.of("intra_node")
    streams.now()
    across.wait("ready")  # pyright: ignore[reportArgumentType]
    x = torch.zeros(1)
    across.batch([StreamMessage(0, 1, 0, True, 1, x), StreamMessage(2, 0, 0, False, 2, x)])
    across.record()
    combine.batch([StreamMessage(0, 1, 0, True, 1, x)])
    streams.wait("event")  # pyright: ignore[reportArgumentType]
    assert fake.log == [
        ("stream", 1, -1),  # between nodes: high priority
        ("stream", 2, -1),  # and what brings pieces to them and takes them from there
        ("stream", 3, 0),
        (0, "records"),
        (1, "waits for", "ready"),
        (1, [("isend", 11, "between"), ("irecv", 12, "between")]),
        (1, "waits for the call"),
        (1, "records"),
        (2, [("isend", 11, "inside")]),
        (2, "waits for the call"),
        (0, "waits for", "event"),
    ]


# Turns of two nano-batches, and where a phase is cut. That interleaved programs meet in one order
# on all ranks, the contract suite proves.

# A document of 8 tokens on each of two ranks; rank 1 attends for the later half of rank 0's.
DISPATCH = by_hand.plan(
    (8, 4),
    2,
    by_hand.task_table([(0, 0, 0, 8), (1, 1, 0, 4)], [(0, 0, 0, 4, 0, 4), (1, 0, 4, 8, 0, 8), (1, 1, 0, 4, 0, 4)]),
    ranks_per_node=1,
)


def programs_of(planned: MicrobatchPlan, policy: Policy, *, backward: bool) -> list[Sequence[Op]]:
    programs = [compiled.program for compiled in compile_ranks(planned, policy)]
    return [program.backward if backward else program.forward for program in programs]


def shown(segments: Sequence[NanoSegment]) -> str:
    return " ".join(
        f"{'AB'[segment.nano_batch]}{segment.part[0] if segment.part != 'end' else 'E'}{segment.layer}"
        for segment in segments
    )


def test_two_halves_take_turns_and_a_dispatch_is_cut_where_it_goes_out_and_comes_home() -> None:
    # Parts of two halves take turns.
    assert shown(ping_pong.forward(2)) == "Al0 As0 Bl0 Bs0 Aa0 Ba0 AE0 Al1 As1 BE0 Bl1 Bs1 Aa1 Ba1 AE1 Al2 BE1 Bl2"
    assert shown(ping_pong.one_by_one(1)) == "Al0 As0 Aa0 AE0 Bl0 Bs0 Ba0 BE0 Al1 Bl1"
    assert shown(ping_pong.forward(0)) == "Al0 Bl0"
    assert shown(ping_pong.backward(ping_pong.forward(1))) == "Bl1 Bs0 Al1 As0 Ba0 Aa0 BE0 Bl0 AE0 Al0"
    # A dispatch is cut behind what goes out and before what comes home.
    ahead = issue_orders(DISPATCH, "replay")
    forward, backward = (programs_of(DISPATCH, "replay", backward=b) for b in (False, True))
    assert cut_text(forward[1], 1, ahead.forward.first) == "start 0 | finish 0 run start 1 | finish 1"
    # Rank 0 only sends and computes its own: it could ask for what comes back to the owner at once,
    # but the others send that in their second part.
    assert cut_text(forward[0], 0, ahead.forward.first) == "start 0 | start 1 run | finish 0 finish 1"
    both = cut_text(backward[1], 1, ahead.backward.first)
    assert both == "start 1 start 2 | finish 1 finish 2 run start 3 | finish 3"
    kept = programs_of(DISPATCH, "keep", backward=True)
    ahead = issue_orders(DISPATCH, "keep")
    assert cut_text(kept[1], 1, ahead.backward.first) == "start 1 | finish 1 run start 3 | finish 3"
    # What has no exchanges is attended in the second part.
    assert cut_segments((), (), frozenset({0})) == Cuts(0, 0)
    ops: list[Op] = [Attend(0, Rows.of(9, [(0, 0, 4, 0, 2, 0, 4, 0, 1)]))]
    assert cut_segments(ops, (RunLaunches(0),), frozenset({0})) == Cuts(0, 1)


def cut_text(ops: Sequence[Op], rank: int, may_start: frozenset[int]) -> str:
    steps = order(ops, rank, issue=IssueOrder(first=may_start))
    where = cut_segments(ops, steps, may_start)
    words = [f"{type(step).__name__.lower().removesuffix('launches')}{_id(ops[step.op])}" for step in steps]
    parts = words[: where.attend], words[where.attend : where.end], words[where.end :]
    return " | ".join(map(" ".join, parts))


def _id(op: Op) -> str:
    return f" {op.id}" if isinstance(op, Exchange) else ""


# The pass list: every pass can be watched, and all readers passes by it.
PLAN = MicrobatchPlan(
    planner="test",
    lengths=(96, 24),
    num_ranks=4,
    ranks_per_node=2,
    num_heads=2,
    num_kv_heads=1,
    zones=(Zone("pool", "ring", (0, 1, 2, 3), (0,)), Zone("local", "ring", (3,), (1,))),
    moves=Rows.of(3, [(3, 0, 6), (3, 1, 6), (3, 2, 6)]),
    routing=Routing(1, (REMAP, 0)),
)


@pytest.mark.parametrize("policy", [None, *POLICIES])
def test_the_whole_program_is_printed_and_proved_after_each_pass(policy: Policy | None) -> None:
    seen: dict[str, Program] = {}

    def after(step: CompilerPass, program: Program) -> None:
        assert parse(text(program)) == program
        verify(program)
        seen[step.name] = program

    assert expand(PLAN, policy, after) == expand(PLAN, policy) == seen["order"]
    assert list(seen) == [each.name for each in PASSES]
    # Each pass adds what its name says.
    assert (seen["project"].remap_in, seen["remap"].remap_in) == (0, 1)
    assert "via" not in text(seen["remap"])
    assert "via" in text(seen["route"])
    assert seen["project"].backward == seen["route"].backward == ()
    assert bool(seen["transpose"].backward) == (policy is not None)
    assert any(isinstance(op, Merge) for op in seen["transpose"].backward) == (policy is not None)


@pytest.mark.parametrize("policy", POLICIES)
def test_one_ranks_program_is_the_one_of_the_whole(policy: Policy) -> None:
    for rank, of_all in enumerate(compile_ranks(PLAN, policy)):
        (compiled,) = compile_policies(PLAN, rank, [policy])
        assert compiled.program == of_all.program
        assert compiled.program == transpose(project(PLAN, rank, replays=policy == "replay"), policy, merges=False)
        orders = issue_orders(PLAN, policy)
        programs = compiled.program.forward, compiled.program.backward
        for phase, ops, issue in zip((compiled.forward, compiled.backward), programs, orders, strict=True):
            assert phase.steps == order(ops, rank, issue=issue)
            assert phase.issue == issue
        assert in_order(compiled.program, orders) == replace(compiled, remap_merge=None)


def test_a_phase_that_will_not_run_has_no_steps_and_passes_do_only_what_a_plan_asks_for() -> None:
    (forward,) = compile_policies(PLAN, 0, ["replay"], phases=("forward",))
    assert forward.program.backward == forward.backward.steps == ()
    (backward,) = compile_policies(PLAN, 0, ["replay"], phases=("backward",))
    assert backward.forward.steps == ()
    assert backward.backward == compile_policies(PLAN, 0, ["replay"])[0].backward
    (proof,) = compile_ranks(PLAN, "replay", target="proof", ranks=(0,))
    assert proof.forward.steps == proof.backward.steps == ()
    # Passes do nothing that a plan does not ask for.
    seen: list[str] = []
    expand(replace(PLAN, moves=Rows(3), routing=None), None, lambda _, program: seen.append(text(program)))
    assert len(set(seen)) == 1
    assert [each.name for each in PASSES] == ["project", "remap", "route", "transpose", "order"]
    # Comm patterns of whole sequences have no program under a window.
    groups = Groups(0, PLAN.num_ranks, tuple(range(PLAN.num_ranks)), None)
    with pytest.raises(InvalidProgramError, match=r"pattern ring has no program under mask window_3; .* compile\.halo"):
        bind(replace(PLAN, mask=SlidingWindow(3)), 0, AttentionShape(2, 1, 4), groups=groups)


# The order of a rank's steps and streams: what starts early, and what waits for what. That no
# step of any planner comes too early and no rank waits for ever, the contract suite proves.

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


def words_of(ops: Sequence[Op], steps: Sequence[Step]) -> list[str]:
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


def test_steps_of_three_queues_forward_backward_and_replayed() -> None:
    # The next rounds keys are under way while the current ones are attended.
    program = bound(QUEUES, 0)
    # The first transfer of the second queue, start 3, is early too, but behind all of the first's.
    assert words_of(program.forward, order(program.forward, 0)) == [
        *("start 0", "run s0", "finish 0", "start 1", "run s0", "finish 1", "start 2", "start 3", "run s0"),
        *("finish 2", "run s0", "run s1", "finish 3", "run s1", "run s2"),
    ]
    # The backward comes in reverse and its gradients travel beside computation.
    steps = words_of(program.backward, order(program.backward, 0))
    assert [s for s in steps if s.startswith("run")] == ["run s2", *["run s1"] * 2, *["run s0"] * 4]
    ends = [s for s in steps if not s.startswith("run")]
    assert ends == ["start 1", "start 3", "finish 3", "start 5", "finish 5", "start 7", "finish 1", "finish 7"]
    # The gradient of the first ring round goes once it is computed, and the next launch waits for
    # no gradient.
    assert steps.index("start 3") < steps.index("finish 3")
    assert steps[steps.index("start 3") + 1] == "run s0"
    # In a replayed ring the next keys pass the current gradients.
    program = bound(QUEUES, 0, "replay")
    steps = words_of(program.backward, order(program.backward, 0))
    for again, gradient in ((2, 1), (4, 3), (6, 5)):
        assert steps.index(f"start {again}") < steps.index(f"start {gradient}")
    starts = [int(s.removeprefix("start ")) for s in steps if s.startswith("start")]
    assert [i for i in starts if i % 2 == 0] == sorted(i for i in starts if i % 2 == 0)
    assert [i for i in starts if i % 2] == sorted(i for i in starts if i % 2)


def test_a_launch_waits_only_for_what_it_reads_and_what_is_only_received_is_asked_for_at_once() -> None:
    # A launch waits only for the gradients that it reads.
    # The gradient of sequence 1's output comes from rank 1; the launch of sequence 0 goes ahead of
    # it.
    ops: list[Op] = [
        Exchange(0, Rows.of(8, [(Kind.OUT_GRAD, 1, 0, 8, 0, 2, 1, 0)])),
        AttendGrad(0, Rows.of(9, [(0, 0, 8, 0, 2, 0, 8, 0, 1)])),
        AttendGrad(0, Rows.of(9, [(1, 0, 8, 0, 2, 0, 8, 0, 1)])),
    ]
    assert words_of(ops, order(ops, 0)) == ["start 0", "run s0", "finish 0", "run s1"]
    # A launch does not wait for keys that none of its queries sees.
    ops = [
        Exchange(0, Rows.of(8, [(Kind.KV, 0, 4, 8, 0, 1, 1, 0)])),
        Attend(0, Rows.of(9, [(0, 0, 4, 0, 2, 0, 8, 0, 1)])),
    ]
    assert words_of(ops, order(ops, 0)) == ["start 0", "run s0", "finish 0"]
    # What is only received is asked for at once.
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
def test_each_leg_of_a_routed_exchange_has_its_stream_and_a_direct_transfer_that_of_its_link() -> None:
    # Rank 0 sends to rank 2 on the other node: half of it over rank 1 and rank 3.
    ring = by_hand.plan((32,), 4, by_hand.ring((0, 2), 0), ranks_per_node=2, routing=Routing(1, (0,)))
    forward = [project(ring, rank).forward for rank in range(4)]
    exchange = [next(i for i, op in enumerate(ops) if isinstance(op, Exchange)) for ops in forward]
    issues = [streams(ops, rank, 2) for rank, ops in enumerate(forward)]
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
    # A direct transfer belongs to the link that it takes.
    program = project(replace(QUEUES, zones=QUEUES.zones[:1], lengths=(64,)), 1)
    found = streams(program.forward, 1, 2)
    # Rank 1 receives from its own node and sends to the other.
    assert set(found) == {"compute", "inter_node", "intra_node"}
    assert [i.op for i in found["inter_node"]] == [i.op for i in found["intra_node"]]
    backward = streams(bound(QUEUES, 1).backward, 1, 2)
    assert set(backward) == {"compute", "inter_node moved", "intra_node moved"}
    # A pair that moves anything goes where moved values go.
    copied, moved = (Kind.KV, 0, 0, 8, 0, 2, 0, 1), (Kind.OUT, 0, 8, 16, 0, 2, 0, 1)
    back, far = (Kind.KV, 0, 0, 8, 0, 2, 1, 0), (Kind.KV, 0, 0, 8, 0, 2, 0, 2)
    for rows in ((copied, moved, back, far), (moved, copied, far, back)):
        assert parts(Exchange(0, Rows.of(8, rows)), 0, 2) == (
            ("direct", "inter_node", {(0, 2)}),
            ("direct", "intra_node", {(1, 0)}),
            ("direct", "intra_node moved", {(0, 1)}),
        )


# The order in which all ranks issue their exchanges: what passes what, and the proof that ranks
# cannot wait for one another.

# Two nodes of two; ranks 0 and 2 share a sequence, and 1 and 3 another. Rank 3 keeps its tokens
# outside attention where rank 0 has them in it.
TWO_NODES = by_hand.plan(
    (64, 32, 24),
    4,
    by_hand.ring(range(4), 0, name="inter_node"),
    by_hand.ring((0, 1), 1, name="intra_node"),
    by_hand.ring((2, 3), 2, name="intra_node"),
    ranks_per_node=2,
)
REMAPPED = replace(TWO_NODES, moves=Rows.of(3, [(0, 3, 5), (1, 2, 3)]))
ROUTED = replace(REMAPPED, routing=Routing(1, (REMAP, 0, 1, 2)))
PLANS = {"plain": TWO_NODES, "remapped": REMAPPED, "routed": ROUTED}


def sorted_ids(order: IssueOrder, moved: set[int], count: int) -> list[int]:
    return sorted(range(count), key=lambda at: order.key(at, moved=at in moved))


def test_the_next_steps_keys_pass_the_current_gradients_and_no_more() -> None:
    replayed = issue_orders(by_hand.pool("ring", (64,), 4), "replay").backward
    # Even: keys of a round again; odd: gradients of the round.
    assert sorted_ids(replayed, {1, 3, 5}, 6) == [0, 2, 1, 4, 3, 5]
    assert sorted_ids(IssueOrder(), {1}, 4) == [0, 2, 1, 3]
    assert sorted_ids(BY_ID, {1, 3, 5}, 6) == list(range(6))
    # A remap is around all zones.
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


def call(exchange: int, *ends: int) -> IssuedCall:
    return IssuedCall(
        GroupCall((0, 0), exchange, "direct", "inter_node"), exchange, (), frozenset({(ends[0], ends[1])})
    )


def test_circles_and_calls_that_one_end_does_not_issue_are_refused() -> None:
    # A circle of three is refused though no two ranks share two calls.
    a, b, c = call(0, 0, 1), call(1, 1, 2), call(2, 2, 0)
    verify_issue_order([[a, c], [a, b], [b, c]])
    with pytest.raises(InvalidProgramError, match=r"rank 0 is at exchange 2 .*, which rank 2 issues after exchange 1 "):
        verify_issue_order([[c, a], [a, b], [b, c]])
    # A call that one end does not issue is refused.
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
