"""Traces of chosen steps of a loop in plain PyTorch, in the format of simulated steps and of
Megatron's (`training.tracing`).

The loop is not ours: a step begins where its batches are asked for, and ends when the first optimizer
of `torch.optim` has made its step.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from megatron_balance.runtime.cuda import CudaStreams
from megatron_balance.torch.settings import Settings
from megatron_balance.training.pool import Pool
from megatron_balance.training.tracing import StepTracer

log = logging.getLogger(__name__)


class LoopTracer(StepTracer):
    """Traces of this rank. All ranks of the job trace the same steps, counted from 1."""

    def __init__(self, settings: Settings, pool: Pool, device: torch.device) -> None:
        """Trace the steps that the settings name; `pool`: which nodes its ranks are on."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        super().__init__(settings.trace_folder, settings.trace_steps, rank)
        on_device = device.type == "cuda"
        node = rank // pool.ranks_per_node
        self.place(lambda: node, lambda: CudaStreams({}, ()) if on_device else None)
        self._number = 0
        self._hooks: list[RemovableHandle] = []

    def begin_next(self) -> None:
        """Begin a training step; collective over the job if it is traced."""
        self.end()
        self._number += 1
        self.begin(self._number)
        if self.recorder is not None:
            self._hooks = [
                register_optimizer_step_pre_hook(lambda *_: self.ran()),
                register_optimizer_step_post_hook(self._stepped),
            ]

    def end(self) -> None:
        """Give up the trace of a step whose optimizer made no step; the log says so."""
        self._unhook()
        if self.recorder is not None:
            log.warning("step %d is not traced: no optimizer of torch.optim made a step in it", self._number)
            self.finish()

    def _stepped(self, *_: Any) -> None:
        self._unhook()
        self.finish()

    def _unhook(self) -> None:
        for each in self._hooks:
            each.remove()
        self._hooks = []
