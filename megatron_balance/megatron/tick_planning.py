"""Plans for steps in which all pipeline stages attend together: where each microbatch's tokens are, and each tick's attention.

To the planner the first nano-batches of all microbatches are one step and the second nano-batches another, in the same ticks.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING

from megatron.core.num_microbatches_calculator import get_num_microbatches

from megatron_balance.megatron.planning import HORIZON, PlannedStep, StepPlanner, part_lengths
from megatron_balance.planning.ahead import Pipeline, PlanSpec
from megatron_balance.planning.tick_planner import TickPlanner
from megatron_balance.training.nano_batches import NanoBatches as Parts
from megatron_balance.training.nano_batches import aligned_nano_batches as parts_alike

if TYPE_CHECKING:
    from megatron_balance.megatron.job import PlannedJob as Session

Lengths = tuple[tuple[int, ...], ...]
"""Of the sequences of one half of every microbatch."""


class JointStepPlanner(StepPlanner):
    """Like `StepPlanner`; a half of all microbatches is planned, and planned ahead, as a whole."""

    def __init__(self, job: Session, ahead: bool, forward_only: bool) -> None:
        """Plan for `job`; `ahead` as for `StepPlanner`, `forward_only`: evaluation."""
        super().__init__(job, ahead)
        self._forward_only = forward_only
        self._ticks = TickPlanner(self._spec)
        self._submitted_nano_batches: set[tuple[int, int]] = set()

    def _planned_for(self, spec: PlanSpec) -> PlanSpec:
        num_chunks = self._job.args.virtual_pipeline_model_parallel_size or 1
        return dataclasses.replace(spec, pipeline=Pipeline(self._job.joint_cluster(), num_chunks))

    def _parts(self, lengths: Sequence[tuple[int, ...]]) -> tuple[Parts, ...]:
        return parts_alike(lengths, ping_pong=self._job.ping_pong)

    def _planned(self, lengths: Sequence[tuple[int, ...]], parts: Sequence[Parts]) -> PlannedStep:
        consumed, num_nano_batches = self._job.args.consumed_train_samples, len(parts[0])
        if self._ahead is not None:
            for step in range(1, HORIZON + 1):
                self._submit_step(consumed + step * get_num_microbatches() * self._samples(), len(parts))
        nano_batches = [
            self._nano_batch((consumed, nano_batch), tuple(lengths[nano_batch::num_nano_batches])) for nano_batch in range(num_nano_batches)
        ]
        return PlannedStep(
            plans=tuple(chain.from_iterable(zip(*(nano_batch.plans for nano_batch in nano_batches), strict=True))),
            plan_s=sum(nano_batch.plan_s for nano_batch in nano_batches),
            wait_s=sum(nano_batch.wait_s for nano_batch in nano_batches),
            ticks=tuple(ticks for nano_batch in nano_batches for ticks in nano_batch.ticks),
        )

    def _nano_batch(self, key: tuple[int, int], lengths: Lengths) -> PlannedStep:
        """One half of every microbatch, made ahead or now. `key`: the first sample of the step, and which half."""
        ready = self._ahead.take(key) if self._ahead is not None and key in self._submitted_nano_batches else None
        self._submitted_nano_batches.discard(key)
        if ready is not None and tuple(plan.lengths for plan in ready.plans[: len(lengths)]) == lengths:
            plans, ticks = self._ticks.from_flat(ready.plans, len(lengths))
            return PlannedStep(plans, ready.plan_s, ready.waited_s, ticks=(ticks,))
        if ready is not None and ready.plans:
            self._warn_of_other_lengths(key[0])
        start = time.perf_counter()
        plans, ticks = self._ticks.plan(lengths, forward_only=self._forward_only)
        seconds = time.perf_counter() - start
        return PlannedStep(plans, seconds, seconds, ticks=(ticks,))

    def _submit_step(self, consumed: int, num_microbatches: int) -> None:
        """Ask for the plans of the step that begins at sample `consumed`."""
        assert self._ahead is not None
        coming = [self._coming(consumed + m * self._samples()) for m in range(num_microbatches)]
        lengths = [microbatch for microbatch in coming if microbatch is not None]
        if (consumed, 0) in self._submitted_nano_batches or len(lengths) < num_microbatches:
            return
        parts = self._parts(lengths)
        for nano_batch in range(len(parts[0])):
            chosen = [part_lengths(microbatch, own[nano_batch]) for microbatch, own in zip(lengths, parts, strict=True)]
            self._ahead.submit_step((consumed, nano_batch), chosen)
            self._submitted_nano_batches.add((consumed, nano_batch))
