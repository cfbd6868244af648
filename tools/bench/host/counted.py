"""One rank's attention call of a bound plan as CUDA would have it, on stand-ins that count.

The executor, the transport `Streamed`, the memory pool, the varlen kernel and the Triton mover are
those of training. Stand-ins take the place of streams, of the attention library and of Triton's
kernels: they do nothing but count, so no other rank is needed. Heads are narrow (`HEAD_DIM`), which
changes no count. A group call is a batch of sends and receives or a collective; a launch is a kernel
of attention or of Triton; an operator is a call into torch that would launch a kernel on a GPU.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_balance import MicrobatchPlan
from megatron_balance.compile.transpose import Policy
from megatron_balance.runtime import bind as binding
from megatron_balance.runtime.bind import AttentionShape, Bound, bind
from megatron_balance.runtime.executor import run_backward, run_forward
from megatron_balance.runtime.groups import Groups, stream_names
from megatron_balance.runtime.kernels.libraries import CuSeqlens, Grads
from megatron_balance.runtime.kernels.varlen import VarlenKernel
from megatron_balance.runtime.movers.triton import mover as triton_mover
from megatron_balance.runtime.pool import BufferPool

ALLOCATES = ("empty", "new_empty", "empty_like", "empty_strided", "detach", "alias", "set_")
"""Operators of torch that launch nothing; views are left out by their schema."""

HEAD_DIM = 8
"""Elements of a head here: 16 bytes, as many as one access of the mover's kernels needs, so that it
launches what it does for larger heads."""

DEVICE = torch.device("cpu", 0)
"""The GPU here: a name for the host's memory under which copies to it are told from others."""


@dataclass(frozen=True, slots=True)
class Counted:
    """Calls that one layer's forward and backward issue on one rank.

    `copies`: copies of tables from host to device, of the microbatch: at bind and in the first
    layer. `python_s`: CPU seconds of a layer on the stand-ins, if measured.
    """

    group_calls: int
    launches: int
    operators: int
    copies: int
    python_s: float | None = None


class _Stream:
    def __init__(self, counts: Counter[str]) -> None:
        self.counts = counts

    def wait(self, _event: object) -> None: ...

    def batch(self, _transfers: Sequence[object]) -> None:
        self.counts["group_calls"] += 1

    def call(self, _issue: Callable[[], object]) -> None:
        self.counts["group_calls"] += 1

    def empty(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def uses(self, _x: Tensor) -> None: ...

    def record(self) -> object:
        return None


class _Streams:
    def __init__(self, counts: Counter[str]) -> None:
        self.stream = _Stream(counts)

    def of(self, _name: str) -> _Stream:
        return self.stream

    def now(self) -> object:
        return None

    def wait(self, _event: object) -> None: ...


class _Calls:
    """An attention library whose kernels write nothing."""

    def __init__(self, counts: Counter[str]) -> None:
        self.counts = counts

    def forward(self, _at: CuSeqlens, q: Tensor, _k: Tensor, _v: Tensor, _scale: float) -> tuple[Tensor, Tensor]:
        self.counts["launches"] += 1
        return torch.empty_like(q), torch.empty((q.shape[1], q.shape[0]), dtype=torch.float32).T

    def backward(
        self, _at: CuSeqlens, _dout: tuple[Tensor, Tensor, Tensor], q: Tensor, k: Tensor, v: Tensor, _scale: float
    ) -> Grads:
        self.counts["launches"] += 1
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


class _Kernel:
    """A Triton kernel that is not compiled."""

    def __init__(self, counts: Counter[str]) -> None:
        self.counts = counts

    def __getitem__(self, _grid: object) -> Callable[..., None]:
        return self.launch

    def launch(self, *_tensors: object, **_constants: object) -> None:
        self.counts["launches"] += 1


class _Operators(TorchDispatchMode):
    """Counts the operators that would launch a kernel."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returns = func._schema.returns
        is_view = any(x.alias_info is not None and not x.alias_info.is_write for x in returns)
        if not is_view and func._schema.name.rpartition("::")[2] not in ALLOCATES:
            self.counts["operators"] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def stand_ins(counts: Counter[str]) -> Iterator[None]:
    """Triton's kernels and the choice of kernel and mover, replaced by what counts."""
    names = ("copy_rows", "add_rows", "merge_rows")
    held: dict[tuple[Any, str], Any] = {(triton_mover, name): getattr(triton_mover, name) for name in names}
    held |= {(binding, name): getattr(binding, name) for name in ("kernel_of_widths", "choose_mover")}
    for name in names:
        setattr(triton_mover, name, _Kernel(counts))
    calls: Any = _Calls(counts)
    binding.kernel_of_widths = lambda *_, **__: VarlenKernel("counted", calls)
    binding.choose_mover = lambda _, device: triton_mover.TritonMover(device)
    try:
        yield
    finally:
        for (module, name), value in held.items():
            setattr(module, name, value)


def groups_of(plan: MicrobatchPlan, rank: int, counts: Counter[str]) -> Groups:
    """A rank's view of its pool: streams that count, and a process group where training has one."""
    size, per_node = plan.num_ranks, plan.ranks_per_node
    whole: Any = object()
    node = rank // per_node
    by_ranks: dict[tuple[int, ...], Any] = {tuple(range(size)): whole}
    if 1 < per_node < size:
        by_ranks[tuple(range(node * per_node, (node + 1) * per_node))] = whole
    assert stream_names(size, per_node), "one rank alone communicates with nobody"
    streams: Any = _Streams(counts)
    return Groups(rank, size, tuple(range(size)), whole, by_ranks, streams=streams, buffers=BufferPool(cpu=True))


def bound_rank(plan: MicrobatchPlan, rank: int, counts: Counter[str], policy: Policy) -> Bound:
    """The plan bound for `rank`; tables are copied as they would be to a GPU."""
    shape = AttentionShape(plan.num_heads, plan.num_kv_heads, HEAD_DIM)
    groups = groups_of(plan, rank, counts)
    return bind(plan, rank, shape, groups=groups, device=DEVICE, dtype=torch.bfloat16, policy=policy)


def layer(bound: Bound) -> None:
    """One layer's forward and backward."""
    heads = (bound.shape.num_heads, bound.shape.num_kv_heads, bound.shape.num_kv_heads)
    q, k, v = (torch.empty((bound.num_tokens, n, HEAD_DIM), dtype=torch.bfloat16) for n in heads)
    out, lse, received = run_forward(bound, q, (k, v), 1.0)
    run_backward(bound, torch.empty_like(out), (q, k, v), (out, lse), received, 1.0)


@contextmanager
def copies(counts: Counter[str]) -> Iterator[None]:
    """Count the tables that go to the device: calls of `Tensor.to` with a device."""
    held = Tensor.to

    def counted(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args and args[0] == DEVICE:
            counts["copies"] += 1
        return held(self, *args, **kwargs)

    Tensor.to = counted  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        Tensor.to = held


def count(plan: MicrobatchPlan, rank: int, policy: Policy = "keep") -> Counted:
    """Count one rank's layer."""
    counts: Counter[str] = Counter()
    with stand_ins(counts), copies(counts):
        bound = bound_rank(plan, rank, counts, policy)
        layer(bound)  # tables that are made in the first layer
        tables = counts["copies"]
        counts.clear()
        with _Operators(counts):
            layer(bound)
    return Counted(counts["group_calls"], counts["launches"], counts["operators"], tables)


@contextmanager
def idle_operators() -> Iterator[None]:
    """Operators that touch data do not: what is left is the host's time."""
    held = {name: getattr(Tensor, name) for name in ("zero_", "fill_", "copy_", "index_select", "to")}

    def select(self: Tensor, _dim: int, index: Tensor) -> Tensor:
        return torch.empty((len(index), *self.shape[1:]), dtype=self.dtype)

    def to(self: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.empty(self.shape, dtype=dtype)

    other = {"index_select": select, "to": to}
    for name in held:
        setattr(Tensor, name, other.get(name, lambda self, *_: self))
    try:
        yield
    finally:
        for name, value in held.items():
            setattr(Tensor, name, value)


def measured(plan: MicrobatchPlan, rank: int, policy: Policy = "keep", repeats: int = 30) -> Counted:
    """`count`, with the least CPU seconds that a layer takes on the stand-ins in `repeats` runs."""
    counts: Counter[str] = Counter()
    seconds: list[float] = []
    with stand_ins(counts):
        bound = bound_rank(plan, rank, counts, policy)
        layer(bound)
    with stand_ins(counts), idle_operators():
        for _ in range(repeats):
            begin = time.thread_time()  # of this thread: other processes do not count
            layer(bound)
            seconds.append(time.thread_time() - begin)
    return replace(count(plan, rank, policy), python_s=min(seconds))
