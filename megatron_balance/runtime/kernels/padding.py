"""Head dims that a library does not take, padded with zeros to the next one that it does.

Zeros in queries and keys add nothing to the scores, and the scale is the caller's; the columns of
the output, and of the gradients, that belong to them are left out. So the result is exact. The
copies cost memory traffic, which `cost.kernel.padding_elements` counts.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import pad

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
