"""A GPU where only calls are looked at: streams that carry nothing, a kernel that computes nothing."""

# Since stand-ins do nothing, one rank's attention call needs no other rank (`count`).

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import MagicMock, patch

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_balance.compile.transpose import Policy
from megatron_balance.ir.model import GradientWire
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.runtime.bind import AttentionShape, bind
from megatron_balance.runtime.cuda import StreamMessage
from megatron_balance.runtime.executor import run_backward, run_forward
from megatron_balance.runtime.kernels.base import Entries, PlainKernel


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


@dataclass
class Copies:
    # Copies of tables from host to device, and names of the launches.
    at_bind: int
    in_layers: int
    launches: set[str]


def count(plan: MicrobatchPlan, rank: int, policy: Policy, wire: GradientWire, *, strided: bool) -> Copies:
    # One rank's microbatch of one layer. `strided`: queries, keys and values have gaps between rows.
    from megatron_balance.runtime.movers.triton import mover
    from tools.bench import host

    counts, heads = Counter[str](), (plan.num_heads, plan.num_kv_heads, plan.num_kv_heads)
    with host.stand_ins(counts), host.copies(counts), patch.object(mover, "add_rows", MagicMock()) as add_rows:
        groups, dtype = host.groups_of(plan, rank, counts), torch.bfloat16
        shape = AttentionShape(*heads[:2], 8)
        how: Any = {"groups": groups, "device": host.DEVICE, "dtype": dtype, "policy": policy, "gradient_wire": wire}
        bound = bind(plan, rank, shape, **how)
        at_bind = counts["copies"]
        q, k, v = (torch.empty((bound.num_tokens, (1 + strided) * n, 8), dtype=dtype)[:, :n] for n in heads)
        out, lse, received = run_forward(bound, q, (k, v), 1.0)
        run_backward(bound, torch.empty_like(out), (q, k, v), (out, lse), received, 1.0)
    return Copies(at_bind, counts["copies"] - at_bind, {"add_rows"} if add_rows.mock_calls else set())
