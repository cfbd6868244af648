"""Plans for the steps of a training job: ahead of time where the coming lengths are known, on the
spot otherwise.

What a trainer knows comes in as callables: samples consumed, microbatches of a step, lengths of a
sample, and how ranks compare a fingerprint.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain

from megatron_balance.errors import ConfigError
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.ir.step import EMPTY, Carry, Lengths, StepPlan, dealt
from megatron_balance.ir.tick import TickPlan
from megatron_balance.planning.ahead import PlanAhead
from megatron_balance.planning.place import NanoBatches
from megatron_balance.planning.step_planner import StepPlanner

log = logging.getLogger(__name__)

HORIZON = 2
"""Steps planned ahead."""
ALWAYS_AGREE = 3
"""Number of first steps in which the ranks compare their plans; then every `agreement_every`."""


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """The plan of one step. `plan_s`: seconds of planning, wherever it ran; `wait_s`: of them, how
    long the step waited.
    """

    step: StepPlan
    plan_s: float
    wait_s: float
    carry: Carry = EMPTY
    """For the next step."""

    @property
    def plans(self) -> tuple[MicrobatchPlan, ...]:
        """Of every nano-batch, microbatch by microbatch."""
        return self.step.plans

    @property
    def ticks(self) -> tuple[tuple[TickPlan, ...], ...]:
        """By nano-batch, where all pipeline stages attend together."""
        return self.step.ticks

    @property
    def plans_of(self) -> tuple[range, ...]:
        """By microbatch, which of `plans` are its nano-batches'."""
        return self.step.plans_of

    @property
    def parts(self) -> tuple[NanoBatches, ...]:
        """By microbatch and nano-batch, its sequences by their place in the microbatch."""
        parts: list[NanoBatches] = []
        first = 0
        for microbatch in self.step.members:
            parts.append(tuple(tuple(seq - first for seq in seqs) for seqs in microbatch))
            first += sum(map(len, microbatch))
        return tuple(parts)

    @property
    def fingerprint(self) -> str:
        """Sixteen hex digits of every decision, what is carried included."""
        step = self.step.fingerprint()
        return step if self.carry.is_empty else hashlib.sha256((step + self.carry.to_json()).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Samples:
    """The training samples of a pool, dealt in order: `per_microbatch` to each microbatch.

    `lengths`: of the sequences of one sample, known without reading it; None: they are not ours,
    and nothing is planned ahead.
    """

    consumed: Callable[[], int]
    num_microbatches: Callable[[], int]
    per_microbatch: int
    lengths: Callable[[int], tuple[int, ...]] | None = None
    total: int = 0

    def step(self, first: int, num_microbatches: int) -> Lengths | None:
        """Lengths of the step that begins at sample `first`; None: the samples end before it does."""
        size = self.per_microbatch
        if self.lengths is None or first + num_microbatches * size > self.total:
            return None
        starts = range(first, first + num_microbatches * size, size)
        return tuple(tuple(n for index in range(start, start + size) for n in self.lengths(index)) for start in starts)


class StepPlans:
    """Plans of training steps, or of evaluation, on one rank.

    Remembers the last step: on a rerun the same microbatches come again, and get the same plan.
    """

    def __init__(
        self,
        planner: StepPlanner,
        samples: Samples,
        agree: Callable[[str], None],
        *,
        agreement_every: int,
        ahead: PlanAhead | None = None,
        evaluation: bool = False,
    ) -> None:
        """Plan by `planner`, ahead in the process `ahead` if there is one; `agree` is collective
        over all ranks that plan.
        """
        self._planner = planner
        self._samples = samples
        self._agree = agree
        self._agreement_every = agreement_every
        self._ahead = ahead
        self._evaluation = evaluation
        self._expected: dict[tuple[int, int], Lengths] = {}
        self._last: tuple[int, Lengths, PlannedStep] | None = None
        self._carry = EMPTY
        self._steps = 0
        self._warned = False

    def plan(self, lengths: Lengths) -> PlannedStep:
        """The plan of a step of microbatches of these lengths, equal on all ranks.

        Raises:
            InfeasibleError: a microbatch that the pool cannot hold.
            PlanMismatchError: ranks that planned differently.
        """
        consumed = self._samples.consumed()
        if self._last is not None and self._last[:2] == (consumed, lengths):
            return self._last[2]
        self.keep_carry()
        planned = self._now(lengths) if self._ahead is None else self._from_ahead(self._ahead, consumed, lengths)
        _check_dealt(planned.step, lengths, self._planner.choice.name)
        self._steps += 1
        if self._steps <= ALWAYS_AGREE or self._steps % self._agreement_every == 0:
            self._agree(planned.fingerprint)
        self._last = (consumed, lengths, planned)
        return planned

    def keep_carry(self) -> Carry:
        """End the last step: what it carries is what the next one is planned with, and what a
        checkpoint saves.
        """
        if self._last is not None:
            self._carry = self._last[2].carry
        return self._carry

    def restore(self, carry: Carry) -> None:
        """Go on with the carry of a checkpoint.

        Raises:
            ConfigError: this run's planner cannot take it over.
        """
        self._planner.choice.check_carry(carry)
        self._carry, self._last = carry, None

    def close(self) -> None:
        """End the background process."""
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None

    def _now(self, lengths: Lengths) -> PlannedStep:
        start = time.perf_counter()
        if self._evaluation:
            step, carry = self._planner.plan_evaluation(lengths), EMPTY
        else:
            step, carry = self._planner.plan(lengths, self._carry)
        seconds = time.perf_counter() - start
        return PlannedStep(step, seconds, seconds, carry)

    def _from_ahead(self, ahead: PlanAhead, consumed: int, lengths: Lengths) -> PlannedStep:
        """The plan made ahead, if it is one of these lengths and of this carry; else one made now.
        Asks for the coming steps.
        """
        key = (consumed, len(lengths))
        expected, ready = self._expected.pop(key, None), ahead.take(key)
        if ready is not None and ready.step is not None and expected == lengths and ready.before == self._carry:
            planned, intact = PlannedStep(ready.step, ready.plan_s, ready.waited_s, ready.after), True
        else:
            if ready is not None and ready.step is not None and expected != lengths:
                self._warn_of_other_lengths(consumed)
            planned = self._now(lengths)
            intact = ready is not None and ready.step is not None and ready.after == planned.carry
        if not intact:  # what was asked for follows another carry, or nothing
            ahead.forget()
            self._expected.clear()
        # Not this step: the first one after a start or a resume is planned on the spot, not waited
        # for.
        size = self._samples.num_microbatches() * self._samples.per_microbatch
        carry = None if intact else planned.carry
        for first in range(consumed + size, consumed + (HORIZON + 1) * size, size):
            coming = None if (first, len(lengths)) in self._expected else self._samples.step(first, len(lengths))
            if coming is not None:
                ahead.submit((first, len(lengths)), coming, carry)
                self._expected[first, len(lengths)] = coming
                carry = None
        return planned

    def _warn_of_other_lengths(self, consumed: int) -> None:
        if not self._warned:
            log.warning(
                "planning ahead expected other lengths than the data iterator brought at sample %d; planning on the "
                "spot. "
                "Is the order of samples not sequential?",
                consumed,
            )
            self._warned = True


def _check_dealt(step: StepPlan, lengths: Lengths, planner: str) -> None:
    """Reject steps whose sequences are not in the microbatches they were dealt to.

    Raises:
        ConfigError: they are not.
    """
    if tuple(tuple(sorted(chain.from_iterable(microbatch))) for microbatch in step.members) != dealt(lengths):
        raise ConfigError(
            f"planner {planner} moves sequences to other microbatches or steps than the data loader dealt them to, "
            "and training does "
            "not move their tokens there yet; choose a planner that keeps microbatches as dealt, or simulate this one"
        )
