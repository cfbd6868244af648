"""Head dims that a library does not take, padded with zeros to the next one that it does; and heads of
two widths (multi-latent attention), of which the narrower is padded to the wider.

Zeros in queries and keys add nothing to the scores, and the scale is the caller's; the columns of
the output, and of the gradients, that belong to them are left out. So the result is exact. The
copies cost memory traffic, which `cost.kernel.padding_elements` counts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_balance.runtime.kernels.base import Entries, Kernel
from megatron_balance.runtime.kernels.libraries import Calls, CuSeqlens, Grads


class PaddedCalls:
    """`calls` for tensors of head dim `dim`, which is no multiple of `multiple`."""

    def __init__(self, calls: Calls, dim: int, multiple: int) -> None:
        self.calls, self.dim, self.more = calls, dim, -dim % multiple

    def forward(self, at: CuSeqlens, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        out, lse = self.calls.forward(at, self._wide(q), self._wide(k), self._wide(v), scale)
        return out[..., : self.dim].contiguous(), lse

    def backward(
        self, at: CuSeqlens, dout: tuple[Tensor, Tensor, Tensor], q: Tensor, k: Tensor, v: Tensor, scale: float
    ) -> Grads:
        final = (self._wide(dout[0]), self._wide(dout[1]), dout[2])
        dq, dk, dv = self.calls.backward(at, final, self._wide(q), self._wide(k), self._wide(v), scale)
        return dq[..., : self.dim].contiguous(), dk[..., : self.dim].contiguous(), dv[..., : self.dim].contiguous()

    def _wide(self, x: Tensor) -> Tensor:
        return pad(x, (0, self.more))


class OneWidth:
    """`kernel`, which takes heads of one width, for queries and keys of width D and values and outputs
    of width V. See `runtime.kernels.base.Kernel`.
    """

    def __init__(self, kernel: Kernel, widths: tuple[int, int]) -> None:
        """`widths`: D and V."""
        self.kernel, self.name, (self.dim, self.value_dim) = kernel, kernel.name, widths
        self.wide = max(widths)

    def launches(self, entries: Entries) -> int:
        return self.kernel.launches(entries)

    def prepare(self, entries: Entries, device: torch.device) -> Any:
        return self.kernel.prepare(entries, device)

    def forward(self, entries: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        out, lse = self.kernel.forward(entries, self._padded(q), self._padded(k), self._padded(v), scale)
        return _cut(out, self.value_dim), lse

    def backward(
        self, entries: Any, dout: tuple[Tensor, Tensor, Tensor], q: Tensor, k: Tensor, v: Tensor, scale: float
    ) -> Grads:
        final = (self._padded(dout[0]), self._padded(dout[1]), dout[2])
        grads = self.kernel.backward(entries, final, self._padded(q), self._padded(k), self._padded(v), scale)
        return _cut(grads[0], self.dim), _cut(grads[1], self.dim), _cut(grads[2], self.value_dim)

    def _padded(self, x: Tensor) -> Tensor:
        return pad(x, (0, self.wide - x.shape[-1])) if x.shape[-1] < self.wide else x


def _cut(x: Tensor, width: int) -> Tensor:
    return x[..., :width].contiguous() if x.shape[-1] > width else x
