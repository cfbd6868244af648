"""Megatron's step in ticks: all pipeline stages in one phase at a time, attending together.

Source: DistCA, section 4.1. Takes the place of Megatron's pipeline schedules for a planner that
plans ticks. Passes, loss, gradient sums and transfers between stages are Megatron's own functions.
Only the order is ours (`planning.ticks`), and the work of a stage without a microbatch of its
own: it makes the attention calls of the others' layers. All stages and chunks have the same number
of layers, which `arguments` sees to. Where microbatches run as ping-pong nano-batches
(`megatron.ping_pong`), a tick has a plan for each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.pipeline_parallel import schedules
from megatron.core.utils import get_model_config

from megatron_balance.ir.tick import Cell, Tick, TickPlan
from megatron_balance.megatron.forward_step import PlannedMicrobatch, forward_step
from megatron_balance.megatron.groups import schedule_groups
from megatron_balance.megatron.recompute import recompute_of
from megatron_balance.megatron.stage_transfers import Crossings, PlannedTransfers, StageShapes
from megatron_balance.patterns import pattern_of
from megatron_balance.planning.ticks import neighbour, passes_on
from megatron_balance.runtime.attention import BackwardSlot
from megatron_balance.runtime.bind import Bound, Counters
from megatron_balance.runtime.joint import Server
from megatron_balance.runtime.lower.steps import PhaseName
from megatron_balance.training.binding import Binder, BoundTicks
from megatron_balance.training.layer_runs import attention_passes, phases
from megatron_balance.training.pool import Pool

MakeMicrobatch = Callable[[int], PlannedMicrobatch]


class TickRun:
    """One step of this rank."""

    def __init__(
        self,
        pool: Pool,
        binder: Binder,
        nano_batches: Sequence[Sequence[TickPlan]],
        microbatches: MakeMicrobatch,
        shapes: StageShapes,
        model: Any,
        *,
        forward_only: bool,
    ) -> None:
        """Prepare the step; `run` runs it.

        Args:
            pool: of this rank.
            binder: over the joint pool.
            nano_batches: by nano-batch, the ticks of the step with their plans.
            microbatches: makes this rank's rows of a microbatch, without plans.
            shapes: of hidden states, by microbatch.
            model: Megatron's, a list of chunks or one.
            forward_only: evaluation.
        """
        self.ticks = [one.tick for one in nano_batches[0]]
        self.chunks: list[Any] = model if isinstance(model, list) else [model]
        self.config: Any = get_model_config(self.chunks[0])
        self.binder = binder
        self.forward_only = forward_only
        self.stage, self.num_stages = pool.stage, pool.num_stages
        self.num_layers = self.config.num_layers // (self.num_stages * len(self.chunks))
        """Of a model chunk."""
        self.recompute = recompute_of(self.config)
        self.num_microbatches = len({m for tick in self.ticks for m in tick.microbatches if m is not None})
        self.microbatches = microbatches
        self.bounds = BoundTicks(
            binder, nano_batches, {backward: self._phases(backward=backward) for backward in (False, True)}
        )
        self.passes: Any = schedules
        passes = [
            (cell.microbatch, cell.chunk)
            for cell in (tick.cells[self.stage] for tick in self.ticks if not tick.backward)
            if cell is not None
        ]
        crossings = Crossings.of_passes(passes, self.stage, self.num_stages, len(self.chunks))
        self.communicator: Any = PlannedTransfers.of_pipeline(self.config, shapes, crossings)
        self.made: dict[int, PlannedMicrobatch] = {}
        self.inputs: dict[Cell, torch.Tensor | None] = {}
        self.outputs: dict[Cell, Any] = {}
        self.gradients: dict[Cell, torch.Tensor | None] = {}
        self.slots: dict[Cell, tuple[BackwardSlot, ...]] = {}
        self.losses: list[Any] = []
        self.num_tokens = torch.zeros([], dtype=torch.int, device="cuda")
        self.not_synchronised: AbstractContextManager[Any] | None = None

    @property
    def counters(self) -> list[Counters]:
        """Counters of this rank's attention calls, one for each plan of the step."""
        return self.bounds.counters

    def run(
        self, *, first_val_step: bool | None = None, force_all_reduce: bool | None = False, **_unused: Any
    ) -> list[Any]:
        """The reduced losses of the step, on the last stage.

        Keywords as Megatron's schedules take them.
        """
        config = self.config
        if config.timers is not None:
            config.timers("forward-backward", log_level=1).start(barrier=config.barrier_with_L1_time)
        self._hold_gradients()
        if not self.forward_only:
            self._gather_parameters()
        for number, tick in enumerate(self.ticks):
            bounds = self.bounds.take(number)
            cell = tick.cells[self.stage]
            if cell is None:
                self._serve(tick, bounds)
                result = None
            elif tick.backward:
                result = self._backward(cell, bounds)
            else:
                result = self._forward(cell, bounds, first_val_step)
            self._pass_on(tick, result)
            if cell is not None and not tick.backward:
                self._keep_or_drop(cell, result)
        self._release_gradients()
        if not self.forward_only:
            self._synchronise_rest()
            self._finalise(force_all_reduce)
        if config.timers is not None:
            config.timers("forward-backward").stop()
        return self.losses

    # Passes

    def _forward(self, cell: Cell, bounds: Sequence[Bound], first_val_step: bool | None) -> torch.Tensor:
        slots = self.slots[cell] = tuple(BackwardSlot() for _ in bounds)
        batch = self._microbatch(cell.microbatch).with_plans(bounds, slots)
        first = cell.microbatch == 0
        output, num_tokens = self.passes.forward_step(
            forward_step,
            iter([batch]),
            self.chunks[cell.chunk],
            self.num_microbatches,
            None if self._is_first(cell) else self.inputs[cell],
            self.losses,
            self.config,
            mpu.get_context_parallel_world_size(),
            is_first_microbatch=self.passes.check_first_val_step(first_val_step, self.forward_only, first),
            current_microbatch=cell.microbatch,
            vp_stage=cell.chunk if len(self.chunks) > 1 else None,
            is_last_stage=self._is_last(cell),
        )
        self.num_tokens += num_tokens
        return output

    def _keep_or_drop(self, cell: Cell, output: Any) -> None:
        """Keep the values that the backward needs, after a forward and its transfer."""
        if self.forward_only:
            self.inputs.pop(cell, None)
            self.slots.pop(cell)
            return
        self.outputs[cell] = output
        if not self._is_last(cell):
            self.passes.deallocate_output_tensor(output, self.config.deallocate_pipeline_outputs)

    def _backward(self, cell: Cell, bounds: Sequence[Bound]) -> torch.Tensor | None:
        for slot, bound in zip(self.slots.pop(cell), bounds, strict=True):
            slot.bound = bound
        last = cell.microbatch == self.num_microbatches - 1
        if last and self._sums_in_backward:
            self._release_gradients()
        given = None if self._is_last(cell) else self.gradients.pop(cell)
        inputs = None if self._is_first(cell) else self.inputs.pop(cell)
        gradient = self.passes.backward_step(inputs, self.outputs.pop(cell), given, self.config)
        if last and len(self.chunks) > 1:
            self._hold_gradients()
        return gradient

    def _serve(self, tick: Tick, bounds: Sequence[Bound]) -> None:
        """Attend for others in each of their layers."""
        server = Server(self.binder.dtype, self.num_tokens.device, softmax_scale(self.config))
        passes = attention_passes(
            self.recompute, self.num_layers, len(bounds), backward=tick.backward, training=not self.forward_only
        )
        for backward, segments in passes:
            server.serve(bounds, segments, backward=backward)
        calls = sum(
            segment.nano_batch == 0 and segment.part == "attend" for _, segments in passes for segment in segments
        )
        for bound in bounds:
            bound.counters.idle_tasks += calls * num_tasks(bound)

    def _phases(self, *, backward: bool) -> frozenset[PhaseName]:
        """The phases that every rank runs of a tick's plan."""
        return phases(self.recompute, self.num_layers, backward=backward, training=not self.forward_only)

    def _is_first(self, cell: Cell) -> bool:
        return self.stage == 0 and cell.chunk == 0

    def _is_last(self, cell: Cell) -> bool:
        return self.stage == self.num_stages - 1 and cell.chunk == len(self.chunks) - 1

    def _microbatch(self, index: int) -> PlannedMicrobatch:
        if index not in self.made:
            self.made[index] = self.microbatches(index)
        return self.made[index]

    # Between stages

    def _pass_on(self, tick: Tick, result: torch.Tensor | None) -> None:
        """Send this tick's result to the stage that needs it, and receive the neighbour's."""
        num_chunks = len(self.chunks)
        sent = result if passes_on(tick, self.stage, num_chunks) is not None else None
        cell = passes_on(tick, neighbour(tick, self.stage), num_chunks)
        if sent is None and cell is None:
            return
        # The communicator knows the shape; Megatron only insists that there is one.
        if tick.backward:
            received = self.communicator.send_backward_recv_backward(sent, recv_next=cell is not None, tensor_shape=())
        else:
            received = self.communicator.send_forward_recv_forward(sent, recv_prev=cell is not None, tensor_shape=())
        if cell is not None:
            (self.gradients if tick.backward else self.inputs)[cell] = received

    # Gradients and parameters across replicas, as Megatron's schedules do it

    @property
    def _sums_in_backward(self) -> bool:
        """Whether a chunk's last backward sums its gradients, rather than all chunks' at the end.

        At the end the stages are aligned.
        """
        return self.config.grad_sync_func is None or (self.stage == 0 and len(self.chunks) == 1)

    def _hold_gradients(self) -> None:
        if self.not_synchronised is None:
            self.not_synchronised = _no_sync(self.config.no_sync_func)
            self.not_synchronised.__enter__()

    def _release_gradients(self) -> None:
        if self.not_synchronised is not None:
            self.not_synchronised.__exit__(None, None, None)
            self.not_synchronised = None

    def _gather_parameters(self) -> None:
        if self.config.param_sync_func is not None:
            for gather, chunk in zip(_each(self.config.param_sync_func, len(self.chunks)), self.chunks, strict=True):
                gather(chunk.parameters())

    def _synchronise_rest(self) -> None:
        if not self._sums_in_backward:
            for synchronise, chunk in zip(
                _each(self.config.grad_sync_func, len(self.chunks)), self.chunks, strict=True
            ):
                synchronise(chunk.parameters())

    def _finalise(self, force_all_reduce: bool | None) -> None:
        if self.config.finalize_model_grads_func is not None:
            self.config.finalize_model_grads_func(
                self.chunks,
                self.num_tokens,
                # as Megatron's schedules make where they are given none
                pg_collection=schedule_groups(),
                force_all_reduce=force_all_reduce,
            )


def softmax_scale(config: Any) -> float:
    """The factor of scores in Megatron's attention modules, the same in all layers."""
    return config.softmax_scale if config.softmax_scale is not None else 1.0 / math.sqrt(config.kv_channels)


def num_tasks(bound: Bound) -> int:
    """The number of tasks of a rank in one attention call."""
    return sum(pattern_of(zone).num_tasks(zone, bound.rank) for zone in bound.plan.zones)


def _no_sync(function: Any) -> AbstractContextManager[Any]:
    if function is None:
        return nullcontext()
    if not isinstance(function, list):
        return function()
    stack = ExitStack()
    for each in function:
        stack.enter_context(each())
    return stack


def _each(functions: Any, count: int) -> list[Callable[..., Any]]:
    """One function a model chunk."""
    return functions if isinstance(functions, list) else [functions] * count
