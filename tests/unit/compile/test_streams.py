"""Issue order of the CUDA transport, on streams that only write it down: which stream does what, in
which order, after which event."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_balance.compile import ping_pong
from megatron_balance.compile.order import IssueOrder, RunLaunches, issue_orders, order
from megatron_balance.compile.ping_pong import Cuts, Segment, cut_segments
from megatron_balance.compile.pipeline import PASSES, compile_policies, compile_ranks, expand, in_order, project
from megatron_balance.compile.pipeline import Pass as CompilerPass
from megatron_balance.compile.proof.meaning import verify
from megatron_balance.compile.transpose import POLICIES, Policy, transpose
from megatron_balance.errors import InvalidProgramError
from megatron_balance.ir.columns import Rows
from megatron_balance.ir.mask import SlidingWindow
from megatron_balance.ir.plan import REMAP, MicrobatchPlan, Routing, Zone
from megatron_balance.ir.program import Attend, Exchange, Merge, Op, Program
from megatron_balance.ir.text import parse, text
from megatron_balance.runtime import cuda
from megatron_balance.runtime.attention import balanced_attention
from megatron_balance.runtime.bind import AttentionShape, bind
from megatron_balance.runtime.cuda import CudaStreams, StreamMessage
from megatron_balance.runtime.groups import Groups, stream_names
from tests.support import by_hand
from tests.support.silent import SilentStream, SilentStreams

torch = pytest.importorskip("torch")

RING = by_hand.pool("ring", (64,), 4, ranks_per_node=2)
PAIR = by_hand.plan((64,), 4, by_hand.ring((0, 2), 0), ranks_per_node=2, routing=Routing(1, (0,)))


class Written(SilentStreams):
    """Streams that write down what they are told; every event is the number of what came before it."""

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
        self.log.append(
            (self.name, "batch", [("to" if t.sends else "from", t.peer, t.tensor.nbytes) for t in transfers])
        )

    def call(self, issue: Callable[[], Sequence[Any]]) -> None:
        raise AssertionError(f"no collective here, but {issue}")

    def uses(self, x: Any) -> None:
        self.log.append((self.name, "uses", x.nbytes))

    def record(self) -> str:
        return f"{self.name} {sum(entry[:2] == (self.name, 'batch') for entry in self.log)}"


def issued(plan: MicrobatchPlan, rank: int) -> list[tuple[Any, ...]]:
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


def test_transfers_in_the_node_and_between_nodes_go_beside_each_other() -> None:
    # Rank 1 receives from rank 0 beside it and sends to rank 2 on the other node: 16 tokens, keys
    # and values, fp32.
    log = issued(RING, 1)
    assert log[:6] == [
        ("inter_node", "wait", "compute 0"),
        ("inter_node", "batch", [("to", 2, 512)]),
        ("intra_node", "wait", "compute 0"),
        ("intra_node", "batch", [("from", 0, 256)]),  # its low chunk only: no one needs the high one
        ("compute", "wait", "intra_node 1"),
        ("inter_node", "wait", "compute 1"),
    ]


def test_a_leg_waits_for_the_leg_before_and_attention_for_the_last() -> None:
    # Rank 2 receives half of what it needs of rank 0 directly and half over rank 3, and sends its
    # own the same way. It passes nothing on, so its legs wait for its own work only.
    assert issued(PAIR, 2) == [
        ("dispatch", "wait", "compute 0"),
        ("dispatch", "batch", [("to", 3, 512)]),
        ("inter_node", "wait", "compute 0"),
        ("inter_node", "batch", [("from", 0, 256), ("to", 0, 512)]),
        ("combine", "wait", "compute 0"),
        ("combine", "batch", [("from", 3, 256)]),
        ("compute", "wait", "inter_node 1"),
        ("compute", "wait", "combine 1"),
    ]


def test_a_proxy_passes_on_without_waiting_for_its_own_work() -> None:
    log = issued(PAIR, 3)
    assert log == [
        ("dispatch", "batch", [("from", 2, 512)]),
        ("inter_node", "wait", "dispatch 1"),
        ("inter_node", "batch", [("from", 1, 256), ("to", 1, 512)]),
        ("combine", "wait", "inter_node 1"),
        ("combine", "batch", [("to", 2, 256)]),
    ]
    busy = replace(PAIR, lengths=(64, 8), zones=(*PAIR.zones, Zone("local", "ring", (3,), (1,))))
    assert issued(busy, 3) == log


def test_both_ends_of_every_batch_have_its_messages_in_the_same_order() -> None:
    # All that two ranks say to each other on one stream, in order, is the same on both sides.
    plan = replace(RING, lengths=(200,), routing=Routing(1, (0,)))
    said: dict[tuple[str, int, int], list[int]] = {}
    heard: dict[tuple[str, int, int], list[int]] = {}
    for rank in range(4):
        for name, what, rows in issued(plan, rank):
            for way, peer, size in rows if what == "batch" else ():
                src, dst = (rank, peer) if way == "to" else (peer, rank)
                (said if way == "to" else heard).setdefault((name, src, dst), []).append(size)
    assert said == heard
    assert {name for name, _, _ in said} == {"dispatch", "inter_node", "intra_node", "combine"}


@pytest.mark.parametrize(
    ("size", "ranks_per_node", "links"),
    [
        (1, 8, []),
        (8, 8, ["intra_node"]),
        (4, 8, ["intra_node"]),
        (4, 1, ["inter_node"]),
        (16, 8, ["inter_node", "intra_node", "dispatch", "combine"]),
        (16, 0, ["inter_node", "intra_node", "dispatch", "combine"]),
    ],
)
def test_a_pool_has_the_streams_that_its_nodes_need(size: int, ranks_per_node: int, links: list[str]) -> None:
    assert stream_names(size, ranks_per_node) == [name for link in links for name in (link, f"{link} moved")]


class FakeCuda:
    """`torch.cuda`, written down."""

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
    # Work issued and waited for under the stream joins that stream to the communicator's own, and
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


def shown(segments: Sequence[Segment]) -> str:
    return " ".join(
        f"{'AB'[segment.nano_batch]}{segment.part[0] if segment.part != 'end' else 'E'}{segment.layer}"
        for segment in segments
    )


# Turns


def test_parts_of_two_halves_take_turns() -> None:
    assert shown(ping_pong.forward(2)) == "Al0 As0 Bl0 Bs0 Aa0 Ba0 AE0 Al1 As1 BE0 Bl1 Bs1 Aa1 Ba1 AE1 Al2 BE1 Bl2"
    assert shown(ping_pong.one_by_one(1)) == "Al0 As0 Aa0 AE0 Bl0 Bs0 Ba0 BE0 Al1 Bl1"
    assert shown(ping_pong.forward(0)) == "Al0 Bl0"
    assert shown(ping_pong.backward(ping_pong.forward(1))) == "Bl1 Bs0 Al1 As0 Ba0 Aa0 BE0 Bl0 AE0 Al0"


# Cuts


def cut_text(ops: Sequence[Op], rank: int, may_start: frozenset[int]) -> str:
    steps = order(ops, rank, issue=IssueOrder(first=may_start))
    where = cut_segments(ops, steps, may_start)
    words = [f"{type(step).__name__.lower().removesuffix('launches')}{_id(ops[step.op])}" for step in steps]
    return " | ".join(
        " ".join(part) for part in (words[: where.attend], words[where.attend : where.end], words[where.end :])
    )


def _id(op: Op) -> str:
    return f" {op.id}" if isinstance(op, Exchange) else ""


def test_a_dispatch_is_cut_behind_what_goes_out_and_before_what_comes_home() -> None:
    ahead = issue_orders(DISPATCH, "replay")
    forward, backward = (programs_of(DISPATCH, "replay", backward=b) for b in (False, True))
    assert cut_text(forward[1], 1, ahead.forward.first) == "start 0 | finish 0 run start 1 | finish 1"
    # Rank 0 only sends and computes its own: it could ask for what comes back to the owner at once,
    # but the others send that in their second part.
    assert cut_text(forward[0], 0, ahead.forward.first) == "start 0 | start 1 run | finish 0 finish 1"
    assert (
        cut_text(backward[1], 1, ahead.backward.first) == "start 1 start 2 | finish 1 finish 2 run start 3 | finish 3"
    )
    kept = programs_of(DISPATCH, "keep", backward=True)
    ahead = issue_orders(DISPATCH, "keep")
    assert cut_text(kept[1], 1, ahead.backward.first) == "start 1 | finish 1 run start 3 | finish 3"


def test_what_has_no_exchanges_is_attended_in_the_second_part() -> None:
    assert cut_segments((), (), frozenset({0})) == Cuts(0, 0)
    ops: list[Op] = [Attend(0, Rows.of(9, [(0, 0, 4, 0, 2, 0, 4, 0, 1)]))]
    assert cut_segments(ops, (RunLaunches(0),), frozenset({0})) == Cuts(0, 1)


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


def test_the_passes_are_in_this_order() -> None:
    assert [each.name for each in PASSES] == ["project", "remap", "route", "transpose", "order"]


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


def test_passes_do_nothing_that_a_plan_does_not_ask_for() -> None:
    seen: list[str] = []
    expand(replace(PLAN, moves=Rows(3), routing=None), None, lambda _, program: seen.append(text(program)))
    assert len(set(seen)) == 1


@pytest.mark.parametrize("policy", POLICIES)
def test_one_ranks_program_is_the_one_of_the_whole(policy: Policy) -> None:
    for rank, of_all in enumerate(compile_ranks(PLAN, policy)):
        (compiled,) = compile_policies(PLAN, rank, [policy])
        assert compiled.program == of_all.program
        assert compiled.program == transpose(project(PLAN, rank, replays=policy == "replay"), policy, merges=False)
        orders = issue_orders(PLAN, policy)
        for phase, ops, issue in zip(
            (compiled.forward, compiled.backward),
            (compiled.program.forward, compiled.program.backward),
            orders,
            strict=True,
        ):
            assert phase.steps == order(ops, rank, issue=issue)
            assert phase.issue == issue
        assert in_order(compiled.program, orders) == replace(compiled, remap_merge=None)


def test_a_phase_that_will_not_run_has_no_steps() -> None:
    (forward,) = compile_policies(PLAN, 0, ["replay"], phases=("forward",))
    assert forward.program.backward == forward.backward.steps == ()
    (backward,) = compile_policies(PLAN, 0, ["replay"], phases=("backward",))
    assert backward.forward.steps == ()
    assert backward.backward == compile_policies(PLAN, 0, ["replay"])[0].backward
    (proof,) = compile_ranks(PLAN, "replay", target="proof", ranks=(0,))
    assert proof.forward.steps == proof.backward.steps == ()


def test_comm_patterns_of_whole_sequences_have_no_program_under_a_window() -> None:
    pytest.importorskip("torch")
    from megatron_balance.runtime.bind import AttentionShape, bind
    from megatron_balance.runtime.groups import Groups

    groups = Groups(0, PLAN.num_ranks, tuple(range(PLAN.num_ranks)), None)
    with pytest.raises(InvalidProgramError, match=r"pattern ring has no program under mask window_3; .* compile\.halo"):
        bind(replace(PLAN, mask=SlidingWindow(3)), 0, AttentionShape(2, 1, 4), groups=groups)
