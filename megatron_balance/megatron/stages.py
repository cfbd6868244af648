"""Transfers between pipeline stages; and Megatron's step in ticks, all stages attending together.

Shapes of transfers come from the plan: Megatron's way to know them (`variable_seq_lengths`) sends
each shape ahead of its tensor and synchronises the device. A transfer does not say which microbatch
it brings; the order does. Across the border between two stages hidden states go forward, and their
gradients come back, in the order of one list of microbatches (`Crossings`), which follows from the
schedule.

Ticks (DistCA, section 4.1): passes, loss, gradient sums and transfers are Megatron's own functions.
Only the order is ours (`planning.ticks`), and the work of a stage without a microbatch of its own:
it makes the attention calls of the others' layers. All stages and chunks have the same number of
layers, which `flags` sees to.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.utils import get_model_config

from megatron_balance.analysis.backward import Recomputed, attention_runs
from megatron_balance.compile import ping_pong
from megatron_balance.compile.ping_pong import NanoSegment
from megatron_balance.compile.pipeline import PhaseName
from megatron_balance.errors import ConfigError
from megatron_balance.ir.step import Cell, Tick, TickPlan
from megatron_balance.megatron import core_attention, planning
from megatron_balance.megatron.forward_step import PlannedMicrobatch, forward_step
from megatron_balance.megatron.groups import schedule_groups
from megatron_balance.patterns import pattern_of
from megatron_balance.planning.ticks import neighbour, passes_on
from megatron_balance.runtime.attention import BackwardSlot, Server
from megatron_balance.runtime.bind import Bound, Counters
from megatron_balance.training.binding import Binder
from megatron_balance.training.pool import Pool
from megatron_balance.training.tokens import padded

Shape = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class StageShapes:
    """Shapes of the hidden states between pipeline stages, by microbatch: [rows, 1, hidden size]."""

    rows: tuple[int, ...]
    hidden_size: int

    @classmethod
    def of_step(cls, tokens: Sequence[Sequence[int]], multiple: int, config: Any) -> StageShapes:
        """The shapes of a step. `tokens`: by microbatch and nano-batch, of this rank; `multiple`:
        of which the rows of a nano-batch are one; `config`: Megatron's, of the model.
        """
        shares = config.tensor_model_parallel_size if config.sequence_parallel else 1
        return cls(tuple(sum(padded(n, multiple) for n in of) // shares for of in tokens), config.hidden_size)

    def __getitem__(self, microbatch: int) -> Shape:
        return self.rows[microbatch], 1, self.hidden_size


@dataclass(frozen=True, slots=True)
class Crossings:
    """Microbatches that cross a stage's borders, in order, once a model chunk."""

    # Stages form a ring: the last one hands on to the first one's next chunk.
    with_previous: tuple[int, ...]
    with_next: tuple[int, ...]

    @classmethod
    def of_passes(cls, passes: Sequence[tuple[int, int]], stage: int, num_stages: int, num_chunks: int) -> Crossings:
        """The crossings of `passes`, (microbatch, chunk) in the order of every stage's forwards."""
        # The first stage is handed nothing for the first chunk, and the last hands on nothing of
        # the last.
        all_of_them = tuple(m for m, _ in passes)
        inside = tuple(m for m, chunk in passes if chunk < num_chunks - 1)
        return cls(inside if stage == 0 else all_of_them, inside if stage == num_stages - 1 else all_of_them)

    @classmethod
    def of_schedule(
        cls, num_microbatches: int, stage: int, num_stages: int, num_chunks: int, chunk_group: int
    ) -> Crossings:
        """Crossings in Megatron's schedules; `chunk_group`: `microbatch_group_size_per_vp_stage`."""
        make_table: Any = schedules.get_schedule_table
        table: Sequence[tuple[int, int]] = make_table(num_microbatches, num_chunks, chunk_group)
        return cls.of_passes(table, stage, num_stages, num_chunks)


class PlannedTransfers(P2PCommunicator):
    """Megatron's communicator, told the shape of everything that it receives, for one step."""

    def __init__(self, group: dist.ProcessGroup, config: Any, shapes: StageShapes, crossings: Crossings) -> None:
        """Make a step's communicator over `group`, this rank's pipeline; `config`: of the model."""
        told = copy.copy(config)
        told.variable_seq_lengths = True
        # It works round a race in batch_isend_irecv that torch no longer has (pytorch/pytorch#82450,
        # torch 1.13): a request's wait makes the stream wait for the transfer.
        told.batch_p2p_sync = False
        super().__init__(group, told)
        self.expect(shapes, crossings)

    def expect(self, shapes: StageShapes, crossings: Crossings) -> None:
        """Take a step's shapes, of what is received and of what is sent."""
        # Hidden states come from the stage before and go to the one behind; gradients the other
        # way, in the same order.
        self._received = _Due(shapes, crossings.with_previous), _Due(shapes, crossings.with_next)
        self._sent = _Due(shapes, crossings.with_previous), _Due(shapes, crossings.with_next)

    @classmethod
    def of_pipeline(cls, config: Any, shapes: StageShapes, crossings: Crossings) -> PlannedTransfers:
        return cls(cast("dist.ProcessGroup", mpu.get_pipeline_model_parallel_group()), config, shapes, crossings)

    def _communicate_shapes(
        self,
        tensor_send_next: torch.Tensor | None,
        tensor_send_prev: torch.Tensor | None,
        recv_prev: bool,
        recv_next: bool,
    ) -> tuple[Sequence[int], Sequence[int]]:
        """Shapes of what comes from the previous and from the next stage; empty: nothing does."""
        # Every stage plans every microbatch, and ranks at one place in the pools of their stages
        # hold the same rows, so nothing needs to be asked.
        for due, tensor in zip(self._sent, (tensor_send_prev, tensor_send_next), strict=True):
            if tensor is not None:
                due.check(tensor.shape)
        previous, following = self._received
        return previous.take() if recv_prev else (), following.take() if recv_next else ()


class _Due:
    def __init__(self, shapes: StageShapes, microbatches: Iterable[int]) -> None:
        self._shapes = shapes
        self._left: Iterator[int] = iter(microbatches)

    def take(self) -> Shape:
        return self._shapes[self._next()]

    def check(self, shape: Sequence[int]) -> None:
        """Reject a tensor that the neighbouring stage does not expect."""
        microbatch = self._next()
        if tuple(shape) != self._shapes[microbatch]:
            raise ConfigError(
                f"microbatch {microbatch} leaves this pipeline stage as {list(shape)}, but its plan says "
                f"{list(self._shapes[microbatch])} (rows, 1, hidden size); a stage must keep the rows it was given"
            )

    def _next(self) -> int:
        found = next(self._left, None)
        assert found is not None, "a pipeline schedule moves more than its order of passes says"
        return found


def given_group(p2p_communicator: Any) -> dist.ProcessGroup | None:
    """The group of a script's communicator; ConfigError: it is another than Megatron's plain one."""
    if p2p_communicator is None:
        return None
    if type(p2p_communicator) is not P2PCommunicator:
        raise ConfigError(
            f"the schedule was handed a p2p_communicator of type {type(p2p_communicator).__name__}; planned "
            "microbatches go through P2PCommunicator alone: leave it out"
        )
    return p2p_communicator.pp_group


MakeMicrobatch = Callable[[int], PlannedMicrobatch]


class _BoundTicks:
    """The plans of a step's ticks, bound for this rank."""

    # Each when first needed, for the phases of all ticks that run it, and let go after the last.

    def __init__(
        self, binder: Binder, nano_batches: Sequence[Sequence[TickPlan]], phases_of: Mapping[bool, frozenset[PhaseName]]
    ) -> None:
        """`nano_batches`: by nano-batch, the ticks of the step with their plans; `binder` is over
        the joint pool. `phases_of`: those that run in a backward tick (True), and in a forward
        tick.
        """
        self._binder = binder
        self._nano_batches = nano_batches
        self._last = {planned.tick.microbatches: number for number, planned in enumerate(nano_batches[0])}
        self._phases: dict[tuple[int | None, ...], frozenset[PhaseName]] = {}
        for tick in (planned.tick for planned in nano_batches[0]):
            # Of one plan, the phases of all ticks that run it: it is bound once, and let go behind
            # the last.
            self._phases[tick.microbatches] = (
                self._phases.get(tick.microbatches, frozenset()) | phases_of[tick.backward]
            )
        self._bound: dict[tuple[int | None, ...], tuple[Bound, ...]] = {}
        for ticks in zip(*nano_batches, strict=True):
            for nano_batch, planned in enumerate(ticks):
                binder.expect(planned.plan, ("replay",), nano_batch, self._phases[planned.tick.microbatches])
        self.counters: list[Counters] = []

    def take(self, number: int) -> tuple[Bound, ...]:
        """The bound plans of tick `number`, by nano-batch; they are asked for in order."""
        key = self._nano_batches[0][number].tick.microbatches
        if key not in self._bound:
            self._bound[key] = tuple(
                self._bind(ticks[number], nano_batch, number) for nano_batch, ticks in enumerate(self._nano_batches)
            )
            self.counters += [bound.counters for bound in self._bound[key]]
        return self._bound.pop(key) if self._last[key] == number else self._bound[key]

    def _bind(self, planned: TickPlan, nano_batch: int, number: int) -> Bound:
        # A backward tick's plan is another than that of the forward: it replays what the rank owns.
        phases = self._phases[planned.tick.microbatches]
        return self._binder.bind(planned.plan, ("replay",), nano_batch, phases, number=2 * number + nano_batch)[0]


class TickRun:
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
        """Prepare a step of this rank. `nano_batches`: by nano-batch, its ticks with their plans;
        `binder` is over the joint pool; `microbatches` makes this rank's rows of one, without
        plans.
        """
        self.ticks = [one.tick for one in nano_batches[0]]
        self.chunks: list[Any] = model if isinstance(model, list) else [model]
        self.config: Any = get_model_config(self.chunks[0])
        self.binder = binder
        self.forward_only = forward_only
        self.stage, self.num_stages = pool.stage, pool.num_stages
        self.num_layers = self.config.num_layers // (self.num_stages * len(self.chunks))
        self.recompute = planning.recompute_of(self.config)
        # Microbatches of backward ticks are those of the forward ones.
        self.num_microbatches = len({m for tick in self.ticks for m in tick.microbatches if m is not None})
        self.microbatches = functools.cache(microbatches)
        self.bounds = _BoundTicks(
            binder,
            nano_batches,
            {
                backward: phases(self.recompute, self.num_layers, backward=backward, training=not forward_only)
                for backward in (False, True)
            },
        )
        self.passes: Any = schedules
        passes = [
            (cell.microbatch, cell.chunk)
            for cell in (tick.cells[self.stage] for tick in self.ticks if not tick.backward)
            if cell is not None
        ]
        crossings = Crossings.of_passes(passes, self.stage, self.num_stages, len(self.chunks))
        self.communicator: Any = PlannedTransfers.of_pipeline(self.config, shapes, crossings)
        self.inputs: dict[Cell, torch.Tensor | None] = {}
        self.outputs: dict[Cell, Any] = {}
        self.gradients: dict[Cell, torch.Tensor | None] = {}
        self.slots: dict[Cell, tuple[BackwardSlot, ...]] = {}
        self.losses: list[Any] = []
        self.num_tokens = torch.zeros([], dtype=torch.int, device="cuda")
        self.not_synchronised: ExitStack | None = None

    def run(
        self, *, first_val_step: bool | None = None, force_all_reduce: bool | None = False, **_unused: Any
    ) -> list[Any]:
        """The step's reduced losses, on the last stage. Keywords as Megatron's schedules take them."""
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
            # Sent before what the backward needs is kept or given back.
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
        # A forward tick's plan; the backward tick sets its own when it begins.
        slots = self.slots[cell] = tuple(BackwardSlot() for _ in bounds)
        batch = self.microbatches(cell.microbatch).with_plans(bounds, slots)
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
        if self.forward_only:
            self.inputs.pop(cell, None)
            self.slots.pop(cell)
            return
        self.outputs[cell] = output
        if not self._is_last(cell):
            self.passes.deallocate_output_tensor(output, self.config.deallocate_pipeline_outputs)

    def _backward(self, cell: Cell, bounds: Sequence[Bound]) -> torch.Tensor | None:
        for slot, bound in zip(self.slots.pop(cell), bounds, strict=True):
            # The plan of the backward tick, which attention's backward runs.
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
        server = Server(self.binder.options.dtype, self.num_tokens.device, core_attention.softmax_scale(self.config))
        passes = _attention_passes(
            self.recompute, self.num_layers, len(bounds), backward=tick.backward, training=not self.forward_only
        )
        for backward, segments in passes:
            server.serve(bounds, segments, backward=backward)
        calls = sum(
            segment.nano_batch == 0 and segment.part == "attend" for _, segments in passes for segment in segments
        )
        for bound in bounds:
            tasks = sum(pattern_of(zone).num_tasks(zone, bound.rank) for zone in bound.plan.zones)
            bound.counters.idle_tasks += calls * tasks

    def _is_first(self, cell: Cell) -> bool:
        return self.stage == 0 and cell.chunk == 0

    def _is_last(self, cell: Cell) -> bool:
        return self.stage == self.num_stages - 1 and cell.chunk == len(self.chunks) - 1

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
        """Whether a chunk's last backward sums its gradients; else all are summed at the end."""
        return self.config.grad_sync_func is None or (self.stage == 0 and len(self.chunks) == 1)

    def _hold_gradients(self) -> None:
        if self.not_synchronised is None:
            self.not_synchronised = ExitStack()
            for hold in _each(self.config.no_sync_func or (), 1):
                self.not_synchronised.enter_context(hold())

    def _release_gradients(self) -> None:
        if self.not_synchronised is not None:
            self.not_synchronised.close()
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


def _each(functions: Any, count: int) -> list[Callable[..., Any]]:
    return list(functions) if isinstance(functions, list | tuple) else [functions] * count


class _LayerPass(NamedTuple):
    backward: bool
    segments: tuple[NanoSegment, ...]


def _attention_passes(
    recompute: Recomputed, num_layers: int, num_nano_batches: int, *, backward: bool, training: bool = True
) -> tuple[_LayerPass, ...]:
    """The attention calls of a pass through a chunk, with forwards computed again (training)."""
    # A stage without a microbatch makes the calls of those that have one, so both ask here.
    runs = attention_runs(recompute, num_layers, training=training)
    forwards = [_LayerPass(False, ping_pong.forward(run.num_layers, num_nano_batches)) for run in runs]
    if not backward:
        return tuple(forwards)
    passes: list[_LayerPass] = []
    for run, forward in zip(reversed(runs), reversed(forwards), strict=True):
        passes += [forward] * run.again + [_LayerPass(True, ping_pong.backward(forward.segments))]
    return tuple(passes)


def phases(recompute: Recomputed, num_layers: int, *, backward: bool, training: bool = True) -> frozenset[PhaseName]:
    """The phases of attention in such a pass: a backward that computes forwards again has both."""
    passes = _attention_passes(recompute, num_layers, 1, backward=backward, training=training)
    return frozenset("backward" if each.backward else "forward" for each in passes)
