"""Host time of a layer over the kernel's, and the budgets that plans have to keep."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_balance import MicrobatchPlan
from megatron_balance.cost.base import Host
from tools.bench.host.counted import Counted
from tools.bench.host.plans import kernel_s

PRICES = Host(call_s=35e-6, launch_s=30e-6)
"""A group call through torch's NCCL process group, and a kernel launched by torch or Triton.
Estimates, not measured here: the table of docs/measurements/host-time.md says what is."""

BUDGETS: dict[str, float] = {
    "distca": 0.5,
    "head exchange in a node": 0.5,
    "zeppelin, waves": 0.5,
    "zeppelin, groups": 0.5,
    "zeppelin, routed": 1.2,
}
"""Most host time over kernel time, forward and backward of a layer; the others are printed only."""

PYTHON_S: dict[str, float] = {
    "distca": 1.3e-3,
    "head exchange in a node": 0.9e-3,
    "zeppelin, waves": 3.3e-3,
    "zeppelin, groups": 2.6e-3,
    "zeppelin, routed": 3.7e-3,
}
"""CPU seconds of a layer's Python, as docs/measurements/host-time.md has them."""


@dataclass(frozen=True, slots=True)
class HostTime:
    """Seconds of a layer, forward and backward: what the host takes, priced and in Python, and the
    kernel.
    """

    priced_s: float
    python_s: float
    kernel_s: float

    @property
    def ratio(self) -> float:
        return (self.priced_s + self.python_s) / self.kernel_s


def host_time(found: Counted, plan: MicrobatchPlan, python_s: float | None = None) -> HostTime:
    """Price what was counted of a plan. `python_s`: instead of what was measured with it."""
    seconds = found.python_s if python_s is None else python_s
    assert seconds is not None, "measure it, or say it"
    priced_s = PRICES.issue_s(found.group_calls, found.launches + found.operators)
    return HostTime(priced_s, seconds, kernel_s(plan))
