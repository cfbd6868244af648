"""One small launch of a kernel on its device, held against the formula, before it is chosen.

A library may import and yet fail at its first call, or mean another mask or another LSE than the
version that was read. That is told here, once, and not in the first step of a training run.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch

from megatron_balance.runtime.kernels.base import Entries, Kernel
from megatron_balance.runtime.kernels.offer import first_line
from megatron_balance.runtime.kernels.plain import PlainKernel

TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 1e-2}
"""Largest difference from the formula over its largest value, as the GPU suite asks
(`tools/gpu/attention.py`); of other types 1e-4."""

_HEADS, _KV_HEADS = 2, 1
# Causal with more keys than queries, so that alignment shows, and full; neither a multiple of 64.
_ENTRIES = Entries(((0, 70), (70, 90)), ((0, 130), (130, 203)), (True, False), ((0, 70), (70, 90)))
# As a halo has them: one window for all, at the end of the keys.
_WINDOWS = ((40, 0), (40, 0))
_RESULTS = ("out", "LSE", "dq", "dk", "dv")


def failure(kernel: Kernel, device: torch.device, dtype: torch.dtype, head_dim: int, *, windows: bool = False) -> str:
    """The reason why the kernel's results cannot be used; "" if they are right. `windows`: try sliding
    windows, too.

    Waits for the device. `failure` of the same name, device and tensors is found once.
    """
    found = _failure(_ByName(kernel), device, dtype, head_dim, _ENTRIES)
    if found or not windows:
        return found
    return _failure(_ByName(kernel), device, dtype, head_dim, replace(_ENTRIES, windows=_WINDOWS))


class _ByName:
    """A kernel, equal to others of its name."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ByName) and other.kernel.name == self.kernel.name

    def __hash__(self) -> int:
        return hash(self.kernel.name)


@cache
def _failure(named: _ByName, device: torch.device, dtype: torch.dtype, head_dim: int, rows: Entries) -> str:
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (
        torch.randn(rows, heads, head_dim, generator=generator).to(device, dtype)
        for rows, heads in ((90, _HEADS), (203, _KV_HEADS), (203, _KV_HEADS), (90, _HEADS))
    )
    scale = head_dim**-0.5
    try:
        found = _results(named.kernel, rows, (q, k, v), dout, scale)
        exact = _results(PlainKernel(), rows, (q.float(), k.float(), v.float()), dout.float(), scale)
        apart = [
            float((one.float() - other).abs().max() / other.abs().max())
            for one, other in zip(found, exact, strict=True)
        ]
    except Exception as error:
        return f"its first call fails: {first_line(error)}"
    allowed = TOLERANCE.get(dtype, 1e-4)
    wrong = [f"{name} by {by:.2g}" for name, by in zip(_RESULTS, apart, strict=True) if not by <= allowed]
    return f"its first call differs from the formula, {', '.join(wrong)} of the largest value" if wrong else ""


def _results(
    kernel: Kernel,
    rows: Entries,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    dout: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, ...]:
    """Out, LSE, dq, dk and dv."""
    entries = kernel.prepare(rows, dout.device)
    out, lse = kernel.forward(entries, *inputs, scale)
    return out, lse, *kernel.backward(entries, (dout, out.to(dout.dtype), lse), *inputs, scale)
