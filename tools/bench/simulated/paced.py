"""A kernel at a fixed share of a core, to a fraction of a millisecond.

Eight ranks on two cores share them: a rank that waits makes the others faster, and so does one that
sends. A reservation of the kernel's deadline scheduler (`tools.bench.emulated.device`) ends that,
but is kept only at every tick of its timer, 4 ms apart: a launch of a few milliseconds runs at full
speed, then stands still, and in runs of 4 ms the reserved threads keep those from the cores that
carry transfers. Here a launch is computed as ever, in `c` seconds of the processor, and returns `c
/ share` seconds after it was called: the time in between is the core's for others, transfers first.
Where a launch has not had its share by then, it returns late.

`c` has in it what Linux does for packets on the core meanwhile, since it counts that to the thread
that runs there (CONFIG_IRQ_TIME_ACCOUNTING is not set): beside transfers a launch takes longer, and
as many times longer as a launch alone does.
"""

import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from megatron_balance.runtime.kernels.base import Entries, Kernel

Value = TypeVar("Value")


class PacedKernel:
    """`kernel`, so much slower that it takes `share` of a core. `computed_s`: of the processor so
    far; `late_s`: what came late, in all; `spent_s`: by the clock on the wall, in launches.
    """

    def __init__(self, kernel: Kernel, share: float) -> None:
        self.name = kernel.name
        self._kernel, self._share = kernel, share
        self.computed_s = self.late_s = self.spent_s = 0.0

    @property
    def late_share(self) -> float:
        """Of the time that launches should have taken so far, how much they took longer."""
        return self.late_s * self._share / self.computed_s if self.computed_s else 0.0

    def launches(self, entries: Any) -> int:
        return self._kernel.launches(entries)

    def prepare(self, entries: Entries, device: torch.device) -> Any:
        return self._kernel.prepare(entries, device)

    def forward(self, entries: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        return self._paced(lambda: self._kernel.forward(entries, q, k, v, scale))

    def backward(
        self, entries: Any, dout: tuple[Tensor, Tensor, Tensor], q: Tensor, k: Tensor, v: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self._paced(lambda: self._kernel.backward(entries, dout, q, k, v, scale))

    def _paced(self, call: Callable[[], Value]) -> Value:
        begin_s, computed_s = time.perf_counter(), time.thread_time()
        value = call()
        computed_s = time.thread_time() - computed_s
        left_s = begin_s + computed_s / self._share - time.perf_counter()
        time.sleep(max(0.0, left_s))
        self.computed_s += computed_s
        self.late_s += max(0.0, -left_s)
        self.spent_s += time.perf_counter() - begin_s
        return value
