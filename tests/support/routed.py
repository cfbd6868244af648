"""Jobs of the pool's ranks that look at how exchanges ran, not only at what came out."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from megatron_balance.analysis.trace_format import TrackSpan
from megatron_balance.compile.pipeline import compile_policies
from megatron_balance.compile.transpose import Policy
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.runtime import phase_run
from megatron_balance.runtime.attention import balanced_attention
from megatron_balance.runtime.bind import AttentionShape, Bound, bind
from megatron_balance.runtime.groups import stream_names
from megatron_balance.runtime.kernels.base import Kernel
from megatron_balance.runtime.lower.steps import FinishStep, IssueStep, Phase, Step
from megatron_balance.runtime.recorder import Recorder, Trace, Traced, hidden_share
from megatron_balance.training.stragglers import Link, link_rates
from tests.support import jobs
from tests.support.foreseen import Issue, streams
from tests.support.jobs import Ran, Run
from tests.support.pool import World
from tests.support.stream_threads import HangError, with_streams

HEAD_DIM = 8


@dataclass(frozen=True)
class PhaseTrace:
    """Events that one phase recorded, those that its streams should have had, and the ops of each
    group of relay tasks.
    """

    recorded: list[Traced]
    expected: dict[str, tuple[Issue, ...]]
    groups: list[set[int]]
    hidden: float


def streamed(
    world: World, plans: Sequence[MicrobatchPlan], head_dim: int, runs: Sequence[Run], safe: bool = False
) -> list[list[Ran]]:
    """`jobs.attend` of each plan, over streams; `safe`: as in `Groups`."""
    groups = with_streams(world.groups, plans[0].ranks_per_node, safe=safe)
    return [jobs.attend(replace(world, groups=groups), plan, head_dim, runs) for plan in plans]


def first_uses(world: World, plans: Sequence[MicrobatchPlan], turned: bool) -> list[str]:
    """The error of each rank's host where all ranks begin with the pairs of the first plan, or, if
    `turned`, odd ranks with those of the second.
    """
    groups = with_streams(world.groups, plans[0].ranks_per_node)
    said: list[str] = []
    for plan in plans[::-1] if turned and world.rank % 2 else plans:
        try:
            bind(plan, world.rank, _shape(plan), groups=groups)
        except HangError as error:
            said.append(str(error))
            break
    return said


def traced(world: World, plan: MicrobatchPlan, policy: Policy) -> list[PhaseTrace]:
    """Forward and backward of `plan`, as they were recorded."""
    trace: Trace = []
    bound = bind(plan, world.rank, _shape(plan), groups=world.groups, policy=policy, trace=trace)
    out = _attend(bound)
    forward = list(trace)
    out.sum().backward()
    program = compile_policies(plan, world.rank, [policy])[0].program
    return [
        _phase_trace(forward, streams(program.forward, world.rank, plan.ranks_per_node), bound.phases["forward"]),
        _phase_trace(
            trace[len(forward) :], streams(program.backward, world.rank, plan.ranks_per_node), bound.phases["backward"]
        ),
    ]


def ranged(world: World, plan: MicrobatchPlan) -> tuple[list[str], list[str]]:
    """Names of the ranges that a profiler sees of forward and backward, and those of the steps."""
    bound = bind(plan, world.rank, _shape(plan), groups=world.groups)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        _attend(bound).sum().backward()
    found = sorted((event.time_range.start, event.name) for event in seen.events() or ())
    steps = [(phase == "forward", step) for phase in ("forward", "backward") for step in bound.phases[phase].steps]
    return (
        [name for _, name in found if name.startswith("balance ")],
        [name for forward, step in steps for name in _names(step, forward=forward)],
    )


def _names(step: Step, *, forward: bool) -> list[str]:
    match step:
        case IssueStep(exchange):
            return [phase_run.name_of("pack", exchange.zone, exchange.id, forward=forward)]
        case FinishStep(exchange):
            return [phase_run.name_of(what, exchange.zone, exchange.id, forward=forward) for what in ("wait", "place")]
        case _:
            return [phase_run.name_of("attention", step.zone, forward=forward)]


def recorded(
    world: World, plan: MicrobatchPlan, policy: Policy, streamed: bool
) -> tuple[list[TrackSpan], list[str], float]:
    """Spans of forward and backward of two layers of `plan`, names of the pool's streams, and when the
    clock of the spans began (Unix time).
    """
    groups = with_streams(world.groups, plan.ranks_per_node) if streamed else world.groups
    recorder = Recorder(world.rank, groups.streams)
    bound = replace(bind(plan, world.rank, _shape(plan), groups=groups, policy=policy), recorder=recorder, number=5)
    inputs = _inputs(bound)
    dist.barrier(group=world.groups.pool)
    out = balanced_attention(inputs[0], inputs[1], inputs[2], bound)
    again = balanced_attention(out, inputs[1], inputs[2], bound)
    again.sum().backward()
    return recorder.spans(), stream_names(groups.size, plan.ranks_per_node), recorder.began_unix_s


def die_in_attention(world: World, plan: MicrobatchPlan, rank: int) -> None:
    """Rank `rank` is gone at its first launch, without a word."""
    bound = bind(plan, world.rank, _shape(plan), groups=world.groups)
    if world.rank == rank:
        bound = replace(bound, kernel=_Fatal())
    _attend(bound)


def fail_in_attention(world: World, plan: MicrobatchPlan, rank: int) -> str:
    """The error that each rank gets when the kernel of `rank` fails and the rank lives on."""
    bound = bind(plan, world.rank, _shape(plan), groups=world.groups)
    if world.rank == rank:
        bound = replace(bound, kernel=_Failing())
    try:
        _attend(bound)
    except RuntimeError as error:
        return str(error)
    return ""


def forward_seconds(world: World, plan: MicrobatchPlan, slow: tuple[int, ...], seconds: float) -> float:
    """How long the forward took on this rank, where each launch of the ranks `slow` takes
    `seconds`.
    """
    bound = bind(plan, world.rank, _shape(plan), groups=world.groups)
    if world.rank in slow:
        bound = replace(bound, kernel=_Slow(bound.kernel, seconds))
    inputs = _inputs(bound)
    dist.barrier(group=world.groups.pool)
    start = time.perf_counter()
    balanced_attention(inputs[0], inputs[1], inputs[2], bound)
    return time.perf_counter() - start


@dataclass(frozen=True)
class Waited:
    """`HostTimes` of one forward."""

    attended_s: float
    waited_s: dict[int, float]


def late(world: World, plan: MicrobatchPlan, rank: int, seconds: float) -> Waited:
    """A forward to which one rank comes late."""
    bound, times = bind(plan, world.rank, _shape(plan), groups=world.groups), world.groups.host_times
    _attend(bound)
    times.clear()
    if world.rank == rank:
        time.sleep(seconds)
    _attend(bound)
    found = Waited(times.attended_s, dict(times.waited_s))
    times.clear()
    return found


def rates(world: World, links: Sequence[Link], ranks_per_node: int) -> dict[Link, float]:
    """The rates of links."""
    return link_rates(links, world.groups, ranks_per_node)


def _phase_trace(trace: Trace, expected: dict[str, tuple[Issue, ...]], phase: Phase) -> PhaseTrace:
    return PhaseTrace(
        trace, expected, [{relay_task.op for relay_task in group} for group in phase.relay_tasks], hidden_share(trace)
    )


def _shape(plan: MicrobatchPlan) -> AttentionShape:
    return AttentionShape(plan.num_heads, plan.num_kv_heads, HEAD_DIM)


def _inputs(bound: Bound) -> list[torch.Tensor]:
    torch.manual_seed(bound.rank)
    heads = (bound.shape.num_heads, bound.shape.num_kv_heads, bound.shape.num_kv_heads)
    return [torch.randn(bound.num_tokens, h, HEAD_DIM, requires_grad=True) for h in heads]


def _attend(bound: Bound) -> torch.Tensor:
    q, k, v = _inputs(bound)
    return balanced_attention(q, k, v, bound)


class _Fatal:
    name = "fatal"

    def forward(self, *_: object) -> None:
        os._exit(1)


class _Failing:
    name = "failing"

    def forward(self, *_: object) -> None:
        raise RuntimeError("the kernel was asked to fail")


class _Slow:
    name = "slow"

    def __init__(self, kernel: Kernel, seconds: float) -> None:
        self.kernel, self.seconds = kernel, seconds

    def forward(self, *args: object) -> object:
        time.sleep(self.seconds)
        return self.kernel.forward(*args)  # pyright: ignore[reportArgumentType]
