"""A GPU where only calls are looked at: streams that carry nothing, a kernel that computes nothing."""

# Since stand-ins do nothing, one rank's attention call needs no other rank (`count`).

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_balance.compile.transpose import Policy
from megatron_balance.ir.model import GradientWire
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.runtime import bind as binding
from megatron_balance.runtime.bind import AttentionShape, Bound, bind
from megatron_balance.runtime.cuda import StreamMessage
from megatron_balance.runtime.executor import run_backward, run_forward
from megatron_balance.runtime.groups import Groups
from megatron_balance.runtime.kernels import CuSeqlens, Grads, VarlenKernel
from megatron_balance.runtime.kernels.base import Entries, PlainKernel
from megatron_balance.runtime.pool import BufferPool


class SilentStream:
    # See `runtime.cuda.Stream`.
    def wait(self, event: Any) -> None: ...

    def batch(self, transfers: Sequence[StreamMessage]) -> None: ...

    def call(self, issue: Callable[[], Sequence[dist.Work]]) -> None: ...

    def empty(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def uses(self, x: Tensor) -> None: ...

    def record(self) -> Any: ...


class SilentStreams:
    # See `runtime.cuda.Streams`.
    def of(self, name: str) -> SilentStream:
        del name
        return SilentStream()

    def now(self) -> Any: ...

    def wait(self, event: Any) -> None: ...


class ShapeKernel(PlainKernel):
    # Results of the right shapes, in the type of the queries; LSE in fp32.
    def forward(self, entries: Entries, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        del k, v, scale
        return q.new_empty(entries.num_q, *q.shape[1:]), torch.empty(entries.num_q, q.shape[1])

    def backward(
        self, entries: Entries, dout: tuple[Tensor, Tensor, Tensor], q: Tensor, k: Tensor, v: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        del dout, v, scale
        keys = sum(stop - start for start, stop in entries.k)
        dk, dv = (k.new_empty(keys, *k.shape[1:]) for _ in range(2))
        return q.new_empty(entries.num_q, *q.shape[1:]), dk, dv


# The GPU here: a name for the host's memory under which copies to it are told from others.
DEVICE = torch.device("cpu", 0)

HEAD_DIM = 8


@dataclass
class Copies:
    # Copies of tables from host to device, and launches of the mover.
    at_bind: int = 0
    in_layers: int = 0
    bound: bool = False
    launches: list[str] = field(default_factory=list)


class _Calls:
    # An attention library whose kernels write nothing.
    def forward(self, _at: CuSeqlens, q: Tensor, _k: Tensor, _v: Tensor, _scale: float) -> tuple[Tensor, Tensor]:
        return torch.empty_like(q), torch.empty((q.shape[1], q.shape[0]), dtype=torch.float32).T

    def backward(
        self, _at: CuSeqlens, _dout: tuple[Tensor, Tensor, Tensor], q: Tensor, k: Tensor, v: Tensor, _scale: float
    ) -> Grads:
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


class _Kernel:
    # A Triton kernel that is not compiled.
    def __init__(self, name: str, copies: Copies) -> None:
        self.name, self.copies = name, copies

    def __getitem__(self, _grid: object) -> Callable[..., None]:
        return lambda *_, **__: self.copies.launches.append(self.name)


@contextmanager
def _stand_ins(copies: Copies) -> Iterator[None]:
    from megatron_balance.runtime.movers.triton import mover as triton_mover

    names = ("copy_rows", "add_rows", "merge_rows")
    calls: Any = _Calls()
    to = Tensor.to

    def counted(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args and args[0] == DEVICE:
            copies.in_layers += copies.bound
            copies.at_bind += not copies.bound
        return to(self, *args, **kwargs)

    replaced: dict[tuple[Any, str], Any] = {(triton_mover, name): _Kernel(name, copies) for name in names}
    replaced[binding, "kernel_of_widths"] = lambda *_, **__: VarlenKernel("counted", calls)
    replaced[binding, "choose_mover"] = lambda _, device: triton_mover.TritonMover(device)
    replaced[Tensor, "to"] = counted
    held = {(owner, name): getattr(owner, name) for owner, name in replaced}
    try:
        for (owner, name), value in replaced.items():
            setattr(owner, name, value)
        yield
    finally:
        for (owner, name), value in held.items():
            setattr(owner, name, value)


def _groups(plan: MicrobatchPlan, rank: int) -> Groups:
    size, per_node = plan.num_ranks, plan.ranks_per_node
    whole: Any = object()
    node = rank // per_node
    by_ranks: dict[tuple[int, ...], Any] = {tuple(range(size)): whole}
    if 1 < per_node < size:
        by_ranks[tuple(range(node * per_node, (node + 1) * per_node))] = whole
    streams: Any = SilentStreams()
    return Groups(rank, size, tuple(range(size)), whole, by_ranks, streams=streams, buffers=BufferPool(cpu=True))


def _layer(bound: Bound, *, strided: bool) -> None:
    heads = (bound.shape.num_heads, bound.shape.num_kv_heads, bound.shape.num_kv_heads)
    gaps = 2 if strided else 1
    q, k, v = (torch.empty((bound.num_tokens, gaps * n, HEAD_DIM), dtype=torch.bfloat16)[:, :n] for n in heads)
    out, lse, received = run_forward(bound, q, (k, v), 1.0)
    run_backward(bound, torch.empty_like(out), (q, k, v), (out, lse), received, 1.0)


def count(plan: MicrobatchPlan, rank: int, policy: Policy, wire: GradientWire, *, strided: bool) -> Copies:
    # Bind the plan for `rank` and run a layer, forward and backward.
    #
    # `strided`: queries, keys and values have gaps between rows.
    copies = Copies()
    shape = AttentionShape(plan.num_heads, plan.num_kv_heads, HEAD_DIM)
    with _stand_ins(copies):
        bound = bind(
            plan,
            rank,
            shape,
            groups=_groups(plan, rank),
            device=DEVICE,
            dtype=torch.bfloat16,
            policy=policy,
            gradient_wire=wire,
        )
        copies.bound = True
        _layer(bound, strided=strided)
    return copies
