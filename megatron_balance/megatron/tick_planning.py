"""Plans for steps in which all pipeline stages attend together: where each microbatch's tokens are, and each tick's attention."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron.core.num_microbatches_calculator import get_num_microbatches

from megatron_balance.megatron.halves import Parts
from megatron_balance.megatron.planning import HORIZON, PlannedStep, StepPlanner
from megatron_balance.runtime.prefetch import Pipeline, PlanSpec
from megatron_balance.runtime.tick_planner import TickPlanner

if TYPE_CHECKING:
    from megatron_balance.megatron.session import Session


class JointStepPlanner(StepPlanner):
    """Like `StepPlanner`; a step is planned, and planned ahead, as a whole."""

    def __init__(self, job: Session, ahead: bool, forward_only: bool) -> None:
        """Plan for `job`; `ahead` as for `StepPlanner`, `forward_only`: evaluation."""
        super().__init__(job, ahead)
        self._forward_only = forward_only
        self._ticks = TickPlanner(self._spec)
        self._submitted_steps: set[int] = set()

    def _planned_for(self, spec: PlanSpec) -> PlanSpec:
        num_chunks = self._job.args.virtual_pipeline_model_parallel_size or 1
        return dataclasses.replace(spec, pipeline=Pipeline(self._job.joint_cluster(), num_chunks))

    def _now(self, lengths: Sequence[tuple[int, ...]]) -> PlannedStep:
        start = time.perf_counter()
        plans, ticks = self._ticks.plan(lengths, forward_only=self._forward_only)
        seconds = time.perf_counter() - start
        return PlannedStep(plans, seconds, seconds, ticks=ticks)

    def _from_ahead(self, lengths: Sequence[tuple[int, ...]], parts: Sequence[Parts]) -> PlannedStep:
        assert self._ahead is not None
        assert all(len(own) == 1 for own in parts), "stages that attend together take microbatches whole"
        consumed = self._job.args.consumed_train_samples
        for step in range(1, HORIZON + 1):
            self._submit_step(consumed + step * get_num_microbatches() * self._samples(), len(lengths))
        ready = self._ahead.take(consumed) if consumed in self._submitted_steps else None
        self._submitted_steps.discard(consumed)
        if ready is not None and tuple(plan.lengths for plan in ready.plans[: len(lengths)]) == tuple(lengths):
            plans, ticks = self._ticks.from_flat(ready.plans, len(lengths))
            return PlannedStep(plans, ready.plan_s, ready.waited_s, ticks=ticks)
        if ready is not None and ready.plans:
            self._warn_of_other_lengths(consumed)
        return self._now(lengths)

    def _submit_step(self, consumed: int, num_microbatches: int) -> None:
        """Ask for the plans of the step that begins at sample `consumed`."""
        assert self._ahead is not None
        lengths = [self._coming(consumed + m * self._samples()) for m in range(num_microbatches)]
        if consumed not in self._submitted_steps and None not in lengths:
            self._ahead.submit_step(consumed, [microbatch for microbatch in lengths if microbatch is not None])
            self._submitted_steps.add(consumed)
