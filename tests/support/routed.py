"""Jobs of the pool's ranks that look at how exchanges ran, not only at what came out."""

import copy
import gc
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_balance.analysis.trace_format import TrackSpan
from megatron_balance.compile.pipeline import compile_policies
from megatron_balance.compile.transpose import Policy
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.runtime import phase_run
from megatron_balance.runtime.attention import balanced_attention
from megatron_balance.runtime.bind import AttentionShape, Bound, bind
from megatron_balance.runtime.executor import run_backward, run_forward
from megatron_balance.runtime.groups import HostTimes, stream_names
from megatron_balance.runtime.lower.steps import FinishStep, IssueStep, Step
from megatron_balance.runtime.pool import BufferPool
from megatron_balance.runtime.recorder import Recorder, Trace, Traced
from megatron_balance.training.stragglers import Link, link_rates
from tests.support import jobs
from tests.support.foreseen import Issue, streams
from tests.support.jobs import Ran, Run
from tests.support.pool import World, said
from tests.support.stream_threads import HangError, with_streams

HEAD_DIM = 8
Plans = Sequence[MicrobatchPlan]
Recorded = tuple[list[TrackSpan], list[str], float]


@dataclass(frozen=True)
class PhaseTrace:
    # Events that one phase recorded, those that its streams should have had, and the ops of each
    # group of relay tasks.
    recorded: list[Traced]
    expected: dict[str, tuple[Issue, ...]]
    groups: list[set[int]]


def streamed(world: World, plans: Plans, width: int, runs: Sequence[Run], safe: bool = False) -> list[list[Ran]]:
    # `jobs.attend` of each plan, over streams; `safe`: as in `Groups`.
    groups = with_streams(world.groups, plans[0].ranks_per_node, safe=safe)
    return [jobs.attend(replace(world, groups=groups), plan, width, runs) for plan in plans]


def first_uses(world: World, plans: Plans, turned: bool) -> list[str]:
    # The error of each rank's host where all ranks begin with the pairs of the first plan, or, if
    # `turned`, odd ranks with those of the second.
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
    # Forward and backward of `plan`, as they were recorded.
    trace: Trace = []
    bound = bind(plan, world.rank, _shape(plan), groups=world.groups, policy=policy, trace=trace)
    out = _attend(bound)
    forward = list(trace)
    out.sum().backward()
    program = compile_policies(plan, world.rank, [policy])[0].program
    found: list[PhaseTrace] = []
    for recorded, ops, phase in (
        (forward, program.forward, bound.phases["forward"]),
        (trace[len(forward) :], program.backward, bound.phases["backward"]),
    ):
        groups = [{relay_task.op for relay_task in group} for group in phase.relay_tasks]
        expected = streams(ops, world.rank, plan.ranks_per_node)
        found.append(PhaseTrace(recorded, expected, groups))
    return found


def ranged(world: World, plan: MicrobatchPlan) -> tuple[list[str], list[str]]:
    # Names of the ranges that a profiler sees of forward and backward, and those of the steps.
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


def recorded(world: World, plan: MicrobatchPlan, policy: Policy, streamed: bool) -> Recorded:
    # Spans of forward and backward of two layers of `plan`, names of the pool's streams, and when
    # the clock of the spans began (Unix time).
    groups = with_streams(world.groups, plan.ranks_per_node) if streamed else world.groups
    recorder = Recorder(world.rank, groups.streams)
    bound = replace(bind(plan, world.rank, _shape(plan), groups=groups, policy=policy), recorder=recorder, number=5)
    q, k, v = _inputs(bound)
    dist.barrier(group=world.groups.pool)
    balanced_attention(balanced_attention(q, k, v, bound), k, v, bound).sum().backward()
    return recorder.spans(), stream_names(groups.size, plan.ranks_per_node), recorder.began_unix_s


def die_in_attention(world: World, plan: MicrobatchPlan, rank: int) -> None:
    # Rank `rank` is gone at its first launch, without a word.
    bound = bind(plan, world.rank, _shape(plan), groups=world.groups)
    if world.rank == rank:
        bound = _with(bound, lambda *_: os._exit(1))
    _attend(bound)


def fail_in_attention(world: World, plan: MicrobatchPlan, rank: int) -> str:
    # The error that each rank gets when the kernel of `rank` fails and the rank lives on.
    bound = bind(plan, world.rank, _shape(plan), groups=world.groups)
    if world.rank == rank:
        bound = _with(bound, _fail)
    return said(_attend, bound)


def forward_seconds(world: World, plan: MicrobatchPlan, slow: tuple[int, ...], seconds: float) -> float:
    # How long the forward took on this rank, where each launch of the ranks `slow` takes `seconds`.
    bound = bind(plan, world.rank, _shape(plan), groups=world.groups)
    if world.rank in slow:
        kernel = bound.kernel
        bound = _with(bound, lambda *given: (time.sleep(seconds), kernel.forward(*given))[1])
    inputs = _inputs(bound)
    dist.barrier(group=world.groups.pool)
    start = time.perf_counter()
    balanced_attention(inputs[0], inputs[1], inputs[2], bound)
    return time.perf_counter() - start


def late(world: World, plan: MicrobatchPlan, rank: int, seconds: float) -> HostTimes:
    # Of a forward to which one rank comes late.
    bound, times = bind(plan, world.rank, _shape(plan), groups=world.groups), world.groups.host_times
    _attend(bound)
    times.clear()
    if world.rank == rank:
        time.sleep(seconds)
    _attend(bound)
    found = copy.deepcopy(times)
    times.clear()
    return found


def rates(world: World, links: Sequence[Link], ranks_per_node: int) -> dict[Link, float]:
    return link_rates(links, world.groups, ranks_per_node)


def _shape(plan: MicrobatchPlan) -> AttentionShape:
    return AttentionShape(plan.num_heads, plan.num_kv_heads, HEAD_DIM)


def _inputs(bound: Bound) -> list[torch.Tensor]:
    torch.manual_seed(bound.rank)
    heads = (bound.shape.num_heads, bound.shape.num_kv_heads, bound.shape.num_kv_heads)
    return [torch.randn(bound.num_tokens, h, HEAD_DIM, requires_grad=True) for h in heads]


def _attend(bound: Bound) -> torch.Tensor:
    q, k, v = _inputs(bound)
    return balanced_attention(q, k, v, bound)


def _with(bound: Bound, forward: Callable[..., Any]) -> Bound:
    # With a kernel that does this in a launch.
    kernel: Any = SimpleNamespace(name="stand-in", forward=forward)
    return replace(bound, kernel=kernel)


def _fail(*_: object) -> None:
    raise RuntimeError("the kernel was asked to fail")


class Allocations(TorchDispatchMode):
    # Counts calls whose result is memory of its own, by operator, while `on`. Memory of the pool is
    # not made by operators.
    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self.on = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self.on:
            given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
            made = [x for x in tree_leaves(out) if isinstance(x, Tensor) and x.untyped_storage()._cdata not in given]
            self.found[str(func)] += any(x.numel() for x in made)
        return out


class NotCounted:
    # A kernel whose own allocations are nobody's concern here.
    def __init__(self, kernel: Any, counter: Allocations) -> None:
        self.kernel, self.counter, self.name = kernel, counter, kernel.name

    def forward(self, *args: Any) -> Any:
        return self.quietly(self.kernel.forward, *args)

    def backward(self, *args: Any) -> Any:
        return self.quietly(self.kernel.backward, *args)

    def quietly(self, call: Callable[..., Any], *args: Any) -> Any:
        self.counter.on = False
        try:
            return call(*args)
        finally:
            self.counter.on = True


@dataclass(frozen=True)
class StepRun:
    # Memory of one step: some layers forward, then backward.
    #
    # `allocations`: by operator, without the kernel's.
    allocations: dict[str, int]
    num_slabs: int
    held_bytes: int
    peak_bytes: int
    used_after: int


@dataclass(frozen=True)
class Seen:
    steps: list[StepRun]
    call_bytes: int


def steps(world: World, plans: Plans, layers: int, policy: Policy, mover: str, dtype: str) -> list[Seen]:
    # Each plan's steps, three of them, on the same pool of memory, all plans bound before the
    # first.
    wanted, groups = getattr(torch, dtype), replace(world.groups, buffers=BufferPool(cpu=True))
    shape = AttentionShape(plans[0].num_heads, plans[0].num_kv_heads, 16)
    how: Any = {"groups": groups, "dtype": wanted, "policy": policy, "mover": mover, "kernel": "plain"}
    bounds = [bind(plan, world.rank, shape, **how) for plan in plans]
    seen = [Seen([], bound.peak_bytes.call_bytes if bound.peak_bytes is not None else 0) for bound in bounds]
    for _ in range(3):
        for bound, found in zip(bounds, seen, strict=True):
            found.steps.append(_step(bound, layers, wanted))
    return seen


def _step(bound: Bound, layers: int, dtype: torch.dtype) -> StepRun:
    shape, counter = bound.shape, Allocations()
    heads = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads, shape.num_heads)
    tensors = [torch.randn(bound.num_tokens, h, shape.head_dim).to(dtype) for h in heads]
    counted = replace(bound, kernel=NotCounted(bound.kernel, counter))
    pool = bound.groups.buffers
    with counter:
        forwards = [run_forward(counted, tensors[0], (tensors[1], tensors[2]), 0.25) for _ in range(layers)]
        for out, lse, received in reversed(forwards):
            run_backward(counted, tensors[3], (tensors[0], tensors[1], tensors[2]), (out, lse), received, 0.25)
        del forwards, out, lse, received
    gc.collect()  # Triton's interpreter leaves its arguments to the garbage collection
    pool.empty((1,), torch.uint8, torch.device("cpu"))  # so that it takes back what was let go
    made = {name: count for name, count in counter.found.items() if count}
    return StepRun(made, pool.num_slabs, pool.held_bytes, pool.peak_bytes, pool.used_bytes)


def keep_a_gradient(world: World, plan: MicrobatchPlan) -> bool:
    # Whether what autograd saved in the first call is still what it was after ten more calls went
    # through the same memory.
    shape = AttentionShape(plan.num_heads, plan.num_kv_heads, 16)
    bound = bind(plan, world.rank, shape, groups=world.groups, dtype=torch.float32)
    generator = torch.Generator().manual_seed(world.rank)
    heads = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    leaves = [torch.randn(bound.num_tokens, h, 16, generator=generator).requires_grad_() for h in heads]
    others = [torch.randn(bound.num_tokens, h, 16, generator=generator).requires_grad_() for h in heads]

    def call(tensors: Sequence[Tensor]) -> Tensor:
        return balanced_attention(tensors[0], tensors[1], tensors[2], bound)

    alone = torch.autograd.grad(call(leaves).square().sum(), leaves)
    kept = [x.clone() for x in alone]
    out = call(leaves)
    for _ in range(10):
        torch.autograd.grad(call(others).sum(), others)
    late = torch.autograd.grad(out.square().sum(), leaves)
    return all(torch.equal(a, b) and torch.equal(b, c) for a, b, c in zip(alone, kept, late, strict=True))
