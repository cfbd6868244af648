"""A GPU where only calls are looked at: streams that carry nothing, a kernel that computes nothing."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_balance.runtime.cuda import StreamMessage
from megatron_balance.runtime.kernels.base import Entries, PlainKernel


class SilentStream:
    """See `runtime.cuda.Stream`."""

    def wait(self, event: Any) -> None: ...

    def batch(self, transfers: Sequence[StreamMessage]) -> None: ...

    def call(self, issue: Callable[[], Sequence[dist.Work]]) -> None: ...

    def empty(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def uses(self, x: Tensor) -> None: ...

    def record(self) -> Any: ...


class SilentStreams:
    """See `runtime.cuda.Streams`."""

    def of(self, name: str) -> SilentStream:
        del name
        return SilentStream()

    def now(self) -> Any: ...

    def wait(self, event: Any) -> None: ...


class ShapeKernel(PlainKernel):
    """Results of the right shapes, in the type of the queries; LSE in fp32."""

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
