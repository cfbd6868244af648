"""Ranks that count what their attention calls allocate."""

import gc
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_balance.compile.transpose import Policy
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.runtime.attention import balanced_attention
from megatron_balance.runtime.bind import AttentionShape, Bound, bind
from megatron_balance.runtime.executor import run_backward, run_forward
from megatron_balance.runtime.pool import BufferPool
from tests.support.pool import World


class Allocations(TorchDispatchMode):
    """Counts calls whose result is memory of its own, by operator, while `on`. Memory of the pool
    is not made by operators.
    """

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
    """A kernel whose own allocations are nobody's concern here."""

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
class Step:
    """Memory of one step: some layers forward, then backward.

    `allocations`: by operator, without the kernel's.
    """

    allocations: dict[str, int]
    num_slabs: int
    held_bytes: int
    peak_bytes: int
    used_after: int


@dataclass(frozen=True)
class Seen:
    steps: list[Step]
    call_bytes: int


def steps(
    world: World, plans: Sequence[MicrobatchPlan], layers: int, policy: Policy, mover: str, dtype: str
) -> list[Seen]:
    """Each plan's steps, three of them, on the same pool of memory, all plans bound before the
    first.
    """
    wanted, groups = getattr(torch, dtype), replace(world.groups, buffers=BufferPool(cpu=True))
    shape = AttentionShape(plans[0].num_heads, plans[0].num_kv_heads, 16)
    bounds = [
        bind(p, world.rank, shape, groups=groups, dtype=wanted, policy=policy, mover=mover, kernel="plain")
        for p in plans
    ]
    seen = [Seen([], bound.peak_bytes.call_bytes if bound.peak_bytes is not None else 0) for bound in bounds]
    for _ in range(3):
        for bound, found in zip(bounds, seen, strict=True):
            found.steps.append(_step(bound, layers, wanted))
    return seen


def _step(bound: Bound, layers: int, dtype: torch.dtype) -> Step:
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
    return Step(
        {k: v for k, v in counter.found.items() if v}, pool.num_slabs, pool.held_bytes, pool.peak_bytes, pool.used_bytes
    )


def keep_a_gradient(world: World, plan: MicrobatchPlan) -> bool:
    """Whether what autograd saved in the first call is still what it was after ten more calls went
    through the same memory.
    """
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
