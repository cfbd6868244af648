"""Recurrences by the kernels of flash-linear-attention (fla-core 0.6.0), for CUDA, behind
`recurrence.AffineRecurrence`: a piece a call, from its first state to its last one; the choice.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from megatron_balance.runtime.kernels.recurrence import AffineRecurrence, GatedDelta, Mamba2

log = logging.getLogger(__name__)
# Largest difference from plain torch over the largest value; of other types 5e-3, as products in
# TF32 have.
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 1e-2}


@dataclass(frozen=True)
class FlaGatedDelta(GatedDelta):
    """`GatedDelta` by fla. `dtype`: in which it multiplies; states are fp32."""

    dtype: torch.dtype = torch.float32

    def run(self, inputs: Sequence[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
        return self._call(inputs, state) if len(inputs[0]) else super().run(inputs, state)

    def map_of(self, inputs: Sequence[Tensor]) -> Tensor:
        # The last state of a run that writes nothing, from the identity.
        q, k, _, g, beta = inputs
        eye = torch.eye(k.shape[2], dtype=torch.float32, device=k.device).expand(k.shape[1], -1, -1)
        with torch.no_grad():
            return self._call((q, k, torch.zeros_like(k), g, beta), eye)[1] if len(k) else eye

    def _call(self, inputs: Sequence[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v, g, beta = inputs
        kernel = _module(*(KDA if g.ndim == q.ndim else GATED_DELTA))
        q, k, v, beta = (x.to(self.dtype)[None] for x in (q, k, v, beta))
        first = state.float()[None]
        out, last = kernel(q, k, v, g.float()[None], beta, scale=1.0, initial_state=first, output_final_state=True)
        return out[0].to(inputs[0].dtype), last[0]


# mamba-ssm's own kernel takes the decay as one number of a head, times the step size, and gives one
# gradient of both. Inputs here have a decay of their own for each token.
@dataclass(frozen=True)
class FlaMamba2(Mamba2):
    """`Mamba2` by fla. `dtype`: in which it multiplies; states are fp32."""

    dtype: torch.dtype = torch.float32

    def run(self, inputs: Sequence[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
        if not len(inputs[0]):
            return super().run(inputs, state)
        x, dt, a, b, c = inputs
        q, k, v = (each.to(self.dtype)[None] for each in (c, b, x * dt[..., None]))
        first, kernel = state.float()[None], _module(*MAMBA2)
        out, last = kernel(q, k, v, a.float()[None], scale=1.0, initial_state=first, output_final_state=True)
        return out[0].to(inputs[0].dtype), last[0]


# The functions that are called.
GATED_DELTA = ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule")
KDA = ("fla.ops.kda", "chunk_kda")
MAMBA2 = ("fla.ops.simple_gla", "chunk_simple_gla")


def _module(name: str, function: str) -> Callable[..., Any]:
    return getattr(import_module(name), function)


def gated_delta(like: Tensor, chunk: int = 64, *, by_channel: bool = False) -> GatedDelta:
    """The gated delta rule for tensors such as `like`; `by_channel`: KDA.

    By fla's kernel on CUDA where it is installed and right, else in plain torch; logged once.
    """
    kernel, plain = FlaGatedDelta(64, like.dtype), GatedDelta(min(chunk, 16) if by_channel else chunk)
    return kernel if _serves(kernel, KDA if by_channel else GATED_DELTA, like.device, like.dtype) else plain


def mamba2(like: Tensor, chunk: int = 64) -> Mamba2:
    """Mamba-2 for tensors such as `like`, as `gated_delta`; fla calls it gated linear attention."""
    kernel, plain = FlaMamba2(chunk, like.dtype), Mamba2(chunk)
    return kernel if _serves(kernel, MAMBA2, like.device, like.dtype) else plain


def _serves(kernel: AffineRecurrence, called: tuple[str, str], device: torch.device, dtype: torch.dtype) -> bool:
    if device.type != "cuda" or dtype == torch.float64:
        return False
    return not _fault(kernel, called, device, dtype, exact=torch.are_deterministic_algorithms_enabled())


@cache
def _fault(
    kernel: AffineRecurrence, called: tuple[str, str], device: torch.device, dtype: torch.dtype, *, exact: bool
) -> str:
    """Why a kernel is not taken; "": it is."""
    name = ".".join(called)
    fault = "its bits differ from run to run, and deterministic algorithms are asked for" if exact else ""
    fault = fault or trial(kernel, called, device, dtype)
    log.info(f"recurrence {name} ({dtype})" if not fault else f"recurrence in plain torch: {name} {fault}")
    return fault


def trial(kernel: AffineRecurrence, called: tuple[str, str], device: torch.device, dtype: torch.dtype) -> str:
    """Call a kernel once and hold it against plain torch; "": it is right."""
    # The first call may come in a forward that is computed again, without gradients, under autocast.
    try:
        _module(*called)
        with torch.enable_grad(), torch.autocast(device.type, enabled=False):
            apart = differences(kernel, called == KDA, device, dtype)
    except ImportError:
        return "is not installed"
    except Exception as error:  # whatever a library raises, training goes on in plain torch
        return f"fails in its first call: {(str(error).splitlines() or [type(error).__name__])[0]}"
    allowed = TOLERANCE.get(dtype, 5e-3)
    wrong = [f"{name} by {by:.2g}" for name, by in apart.items() if not by <= allowed]
    return f"differs from plain torch in its first call, {', '.join(wrong)} of the largest value" if wrong else ""


def differences(
    kernel: AffineRecurrence, by_channel: bool, device: torch.device, dtype: torch.dtype
) -> dict[str, float]:
    """Largest differences of output, last state, M, gradients from plain torch, over its largest."""
    inputs, state = drawn(kernel, by_channel=by_channel)
    plain = Mamba2() if isinstance(kernel, Mamba2) else GatedDelta()
    # As the model has them, so that rounding of the inputs is no difference.
    given = [x.to(device, dtype).float() if x.ndim == 3 else x.to(device) for x in (*inputs, state)]
    found: list[dict[str, Tensor]] = []
    for each in (kernel, plain):
        leaves = [x.clone().requires_grad_() for x in given]
        out, last = each.run(leaves[:-1], leaves[-1])
        grads = torch.autograd.grad(out.square().sum() + last.square().sum(), leaves)
        named = {f"gradient {at}": grad for at, grad in enumerate(grads)}
        found.append({"out": out, "state": last, "M": each.map_of(given[:-1]), **named})
    ours, wanted = found
    return {
        name: float((x.float() - wanted[name]).abs().max() / wanted[name].abs().max().clamp(min=1e-9))
        for name, x in ours.items()
    }


def drawn(kernel: AffineRecurrence, *, by_channel: bool, rows: int = 150) -> tuple[list[Tensor], Tensor]:
    """Inputs in which states last, and a first state, fp32."""
    random = torch.Generator().manual_seed(0)
    heads, width = 2, 64
    q, k, v = (torch.randn(rows, heads, width, generator=random) for _ in range(3))
    k = torch.nn.functional.normalize(k, dim=-1)
    write = 0.1 + 0.8 * torch.rand(rows, heads, generator=random)
    decay = -0.02 * torch.rand(rows, heads, *([width] if by_channel else []), generator=random)
    state = torch.randn(heads, width, width, generator=random)
    if isinstance(kernel, Mamba2):
        return [v, write, decay, k, q], state
    return [q / 8, k, v, decay, write], state
