"""Named ranges in the traces of PyTorch's profiler, and in Nsight's where it is asked for NVTX
(`torch.autograd.profiler.emit_nvtx`, Megatron's --profile).

Names are those of `analysis.trace_format`, between the phase and the zone: `balance forward attention
intra-node`, `balance backward pack 7 inter-node`, `wait 7`, `place 7`.
"""

from __future__ import annotations

from torch.autograd import profiler

from megatron_balance.analysis.trace_format import named


def recorded() -> bool:
    """Whether a profiler is listening; ranges cost host time even where none is."""
    return profiler._is_profiler_enabled  # pyright: ignore[reportPrivateUsage]


def name_of(what: str, zone: str, exchange: int = -1, *, forward: bool) -> str:
    """The name of a range. `exchange`: -1: of none."""
    return f"balance {'forward' if forward else 'backward'} {named(what, exchange)} {zone}"
