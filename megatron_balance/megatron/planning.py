"""Plans for the steps of a training job: ahead of time where the coming lengths are known, on the spot otherwise."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.core.num_microbatches_calculator import get_num_microbatches

from megatron_balance import make_planner
from megatron_balance.core.batch import Batch
from megatron_balance.core.plan import BatchPlan, MicrobatchPlan
from megatron_balance.errors import ConfigError
from megatron_balance.megatron.own_scheduler import own_planner
from megatron_balance.runtime.agree import check_agreement
from megatron_balance.runtime.prefetch import PlanAhead, PlanSpec

if TYPE_CHECKING:
    from megatron_balance.megatron.session import Session

log = logging.getLogger(__name__)

HORIZON = 2
"""Steps planned ahead."""
ALWAYS_AGREE = 3
"""In so many first steps the ranks compare their plans; then every `agreement_every`."""


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """The plans of one step. `plan_s`: seconds of planning, wherever it ran; `wait_s`: of them, how long the step waited."""

    plans: tuple[MicrobatchPlan, ...]
    plan_s: float
    wait_s: float

    @property
    def fingerprint(self) -> str:
        return BatchPlan(self.plans).fingerprint()


class StepPlanner:
    """Plans of training steps, or of evaluation. Remembers the last step: on a rerun Megatron brings the same microbatches again."""

    def __init__(self, job: Session, ahead: bool) -> None:
        """Plan for `job`; `ahead`: in a background process, if the training samples are ours."""
        assert job.config.planner is not None
        self._job = job
        self._name = job.config.planner.name
        self._options = {**dataclasses.asdict(job.config.planner.options)}
        if self._options.get("tokens_per_rank") is None:
            full = tokens_per_rank(job.args.seq_length, job.args.micro_batch_size, job.args.context_parallel_size)
            # A planner that may place tokens unevenly says by how much: what a rank must have memory for, whatever the batch.
            self._options["tokens_per_rank"] = int(full * self._options.get("slack", 1.0))
        layers = dataclasses.replace(job.config.planner.layers, align=job.row_multiple)
        table = job.config.plan_costs
        spec = PlanSpec(self._name, job.cluster(), job.model(), layers, self._options, None if table is None else str(table.resolve()))
        own = own_planner(spec)
        self._plan = own or make_planner(spec.name, spec.cluster, spec.model, spec.layers, spec.plan_costs, **spec.options)
        # The planning process imports no Megatron: what Megatron's own code plans is planned on the spot.
        self._ahead = PlanAhead(spec) if ahead and job.train_data is not None and own is None else None
        self._submitted: set[tuple[int, int]] = set()
        self._last: tuple[tuple[tuple[int, ...], ...], PlannedStep] | None = None
        self._steps = 0
        self._warned = False

    def plan(self, lengths: tuple[tuple[int, ...], ...]) -> PlannedStep:
        """Plans for microbatches of the given lengths; all ranks agree on them.

        Raises:
            InfeasibleError: a microbatch that the pool cannot hold.
            PlanMismatchError: ranks that planned differently.
        """
        if self._last is not None and self._last[0] == lengths:
            return self._last[1]
        step = self._from_ahead(lengths) if self._ahead is not None else self._now(lengths)
        self._steps += 1
        if self._steps <= ALWAYS_AGREE or self._steps % self._job.config.agreement_every == 0:
            check_agreement(step.fingerprint, self._job.pool.groups)
        self._last = (lengths, step)
        return step

    def close(self) -> None:
        """End the background process."""
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None

    def _now(self, lengths: Sequence[tuple[int, ...]]) -> PlannedStep:
        start = time.perf_counter()
        plans = tuple(self._plan(Batch(microbatch)) for microbatch in lengths)
        seconds = time.perf_counter() - start
        return PlannedStep(plans, seconds, seconds)

    def _from_ahead(self, lengths: tuple[tuple[int, ...], ...]) -> PlannedStep:
        assert self._ahead is not None
        consumed = self._job.args.consumed_train_samples
        # Not this step: the first one after a start or a resume is planned on the spot, not waited for.
        for step in range(1, HORIZON + 1):
            self._submit(consumed + step * get_num_microbatches() * self._samples(), len(lengths))
        plans: list[MicrobatchPlan] = []
        waited = 0.0
        planned = 0.0
        for m, microbatch in enumerate(lengths):
            key = (consumed, m)
            ready = self._ahead.take(key) if key in self._submitted else None
            self._submitted.discard(key)
            plan = ready.plan if ready is not None else None
            if ready is not None:
                waited += ready.waited_s
                planned += ready.plan_s
            if plan is None or plan.lengths != microbatch:
                if plan is not None and not self._warned:
                    log.warning(
                        "planning ahead expected other lengths than the data iterator brought at sample %d; planning on the spot. "
                        "Is the order of samples not sequential?",
                        consumed,
                    )
                    self._warned = True
                now = self._now([microbatch])
                plan, waited, planned = now.plans[0], waited + now.wait_s, planned + now.plan_s
            plans.append(plan)
        return PlannedStep(tuple(plans), planned, waited)

    def _samples(self) -> int:
        """Samples of the pool in one microbatch."""
        return self._job.args.micro_batch_size * self._job.pool.num_replicas

    def _submit(self, consumed: int, num_microbatches: int) -> None:
        """Ask for the plans of the step that begins at sample `consumed`; Megatron's sampler deals samples in order."""
        data = self._job.train_data
        assert self._ahead is not None
        assert data is not None
        for m in range(num_microbatches):
            first = consumed + m * self._samples()
            if (consumed, m) in self._submitted or first + self._samples() > len(data):
                continue
            lengths = tuple(n for index in range(first, first + self._samples()) for n in data.sample_lengths(index))
            self._ahead.submit((consumed, m), lengths)
            self._submitted.add((consumed, m))


def tokens_per_rank(seq_length: int, micro_batch_size: int, context_parallel_size: int) -> int:
    """Tokens a rank holds when every sample is full: the capacity if the configuration names none.

    Raises:
        ConfigError: samples that context-parallel ranks cannot share.
    """
    tokens, rest = divmod(seq_length * micro_batch_size, context_parallel_size)
    if rest:
        raise ConfigError(
            f"--seq-length {seq_length} x --micro-batch-size {micro_batch_size} is not divisible by {context_parallel_size} ranks"
        )
    return tokens
