"""Named ranges in the traces of PyTorch's profiler, and in Nsight's where it is asked for NVTX
(`torch.autograd.profiler.emit_nvtx`, Megatron's --profile).

Names read `balance forward attend intra-node`, `balance backward issue 7 inter-node`: what is done,
the number of the exchange (`ir.program.Exchange`) and the zone.
"""

from __future__ import annotations

from torch.autograd import profiler

from megatron_balance.runtime.lower.steps import Finish, GradLaunch, Launch, Start, Step


def recorded() -> bool:
    """Whether a profiler is listening; ranges cost host time even where none is."""
    return profiler._is_profiler_enabled  # pyright: ignore[reportPrivateUsage]


def name_of(step: Step, *, forward: bool) -> str:
    """The name of the range of a step."""
    match step:
        case Start(exchange):
            what = f"issue {exchange.id} {exchange.zone}"
        case Finish(exchange):
            what = f"wait {exchange.id} {exchange.zone}"
        case Launch() | GradLaunch():
            what = f"attend {step.zone}"
    return f"balance {'forward' if forward else 'backward'} {what}"
