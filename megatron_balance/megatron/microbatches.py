"""The microbatches of a step that this rank runs, bound as the schedule asks for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import torch

from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.ir.step import StepPlan
from megatron_balance.megatron import session
from megatron_balance.megatron.forward_step import PlannedMicrobatch, planned_microbatch
from megatron_balance.runtime.bind import Counters
from megatron_balance.runtime.lower.steps import BOTH_PHASES, PhaseName
from megatron_balance.training.binding import Binder, bind_layers, policies_of
from megatron_balance.training.lengths import PoolLengths
from megatron_balance.training.microbatch import LocalMicrobatch
from megatron_balance.training.plans import PlannedStep, StepPlans

MakeLocal: TypeAlias = Callable[[int], LocalMicrobatch]


class Microbatches:
    """The step's microbatches that this rank's pipeline runs, shared by the model chunks of the rank.

    Each is bound when the schedule first asks for it.
    """

    def __init__(
        self,
        job: session.Session,
        planned: PlannedStep,
        local: MakeLocal,
        own: Sequence[range],
        counts: torch.Tensor | None = None,
        *,
        forward_only: bool,
    ) -> None:
        """Take the plans, `own` by microbatch; `local` makes this rank's rows of a microbatch.

        `counts`: of `mask_counts`, where further tokens are predicted.
        """
        place = job.place(planned.step.strategy)
        assert place is not None, "a rank that is left over runs no microbatch"
        self._job = job
        self._binder = job.binder(place.attention, place.shape)
        # Evaluation keeps nothing for a backward that does not come.
        self.decision = None if forward_only else job.keeping().decide(planned)
        self._phases: tuple[PhaseName, ...] = ("forward",) if forward_only else BOTH_PHASES
        self._planned = planned
        self._own = own
        self._local = local
        self._counts, self._num_samples = counts, job.num_samples
        self._bound: dict[int, PlannedMicrobatch] = {}
        self._chunks = 0
        self._asked = [0] * len(own)
        self.counters: list[Counters] = []
        if not forward_only:  # of a step that was expected and did not come
            job.bind_ahead.forget_all_but(
                self._binder.key(plan, policies_of(self.decision), nano_batch, self._phases)
                for of in own
                for nano_batch, at in enumerate(of)
                for plan in self._binder.plans(planned.plans[at]).values()
            )
        for of in own[1:]:
            self._expect(self._binder, planned.plans, of)

    def trained(self, job: session.Session, shared: PoolLengths, plans: StepPlans) -> None:
        """Log the training step that ran; then look up the first microbatch of the next one.

        The host waits for the device now and then until that step begins.
        """
        job.steps.ran(self._planned, shared, self.counters, self.decision)
        job.bind_ahead.submit(lambda: self.expect_next(plans.coming()))

    def expect_next(self, coming: StepPlan | None) -> None:
        """Say that a step with this plan is likely to come next, with the decision of this one."""
        if coming is None or coming.ticks:
            return
        place = self._job.place(coming.strategy)
        if place is not None:
            first = coming.pipelines[place.pipeline].start
            binder = self._job.binder(place.attention, place.shape)
            self._expect(binder, coming.plans, coming.plans_of[first])

    def _expect(self, binder: Binder, plans: Sequence[MicrobatchPlan], which: Sequence[int]) -> None:
        for nano_batch, at in enumerate(which):
            for plan in binder.plans(plans[at]).values():
                binder.expect(plan, policies_of(self.decision), nano_batch, self._phases)

    def of_chunk(self) -> Iterator[PlannedMicrobatch]:
        """All microbatches in order, for one model chunk. Every chunk's is made before any is used."""
        self._chunks += 1
        return map(self._take, range(len(self._asked)))

    def _take(self, index: int) -> PlannedMicrobatch:
        if index not in self._bound:
            self._bound[index] = self._bind(index)
        self._asked[index] += 1
        return self._bound.pop(index) if self._asked[index] == self._chunks else self._bound[index]

    def _bind(self, index: int) -> PlannedMicrobatch:
        plans = self._planned.plans
        bounds = [
            bind_layers(self._binder, plans[at], self.decision, nano_batch, self._phases, number=at)
            for nano_batch, at in enumerate(self._own[index])
        ]
        self.counters += [bound.counters for layers in bounds for bound in layers.bounds]
        counts = None if self._counts is None else self._counts[index]
        return planned_microbatch(self._local(index), bounds, counts, self._num_samples)
