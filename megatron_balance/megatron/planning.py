"""Plans for the steps of a training job: ahead of time where the coming lengths are known, on the spot otherwise."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from megatron.core.num_microbatches_calculator import get_num_microbatches

from megatron_balance import make_planner
from megatron_balance.errors import ConfigError
from megatron_balance.ir.batch import Batch
from megatron_balance.ir.plan import BatchPlan, MicrobatchPlan
from megatron_balance.ir.tick import TickPlan, fingerprint
from megatron_balance.megatron.own_scheduler import own_planner
from megatron_balance.planning.ahead import PlanAhead, PlanSpec
from megatron_balance.training.agree import check_agreement
from megatron_balance.training.nano_batches import NanoBatches as Parts
from megatron_balance.training.nano_batches import nano_batches_of as parts_of

if TYPE_CHECKING:
    from megatron_balance.megatron.job import PlannedJob as Session

log = logging.getLogger(__name__)

HORIZON = 2
"""Steps planned ahead."""
ALWAYS_AGREE = 3
"""In so many first steps the ranks compare their plans; then every `agreement_every`."""


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """The plans of one step. `plan_s`: seconds of planning, wherever it ran; `wait_s`: of them, how long the step waited.

    `parts`: by microbatch, the sequences of each of its parts, which have plans of their own, one after the other.
    """

    plans: tuple[MicrobatchPlan, ...]
    plan_s: float
    wait_s: float
    parts: tuple[Parts, ...] = ()
    ticks: tuple[tuple[TickPlan, ...], ...] = ()
    """Where all pipeline stages attend together: then `plans` say where tokens are owned, and these how they attend, by nano-batch."""

    @property
    def fingerprint(self) -> str:
        plans = BatchPlan(self.plans).fingerprint()
        if not self.ticks:
            return plans
        return hashlib.sha256("".join([plans, *map(fingerprint, self.ticks)]).encode()).hexdigest()[:16]

    @property
    def plans_of(self) -> tuple[range, ...]:
        """By microbatch: which of `plans` are its parts'."""
        ends = [0, *accumulate(len(each) for each in self.parts)]
        return tuple(range(begin, end) for begin, end in pairwise(ends))


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
            cluster = job.cluster()
            # Ranks without tokens leave theirs to the others; and a planner that may place tokens unevenly says by how much: what a rank
            # must have memory for, whatever the batch.
            held = -(-full * cluster.num_ranks // job.config.planner.num_holders(cluster))
            self._options["tokens_per_rank"] = int(held * self._options.get("slack", 1.0))
        layers = dataclasses.replace(job.config.planner.layers, align=job.row_multiple)
        table = job.config.plan_costs
        spec = PlanSpec(self._name, job.cluster(), job.model(), layers, self._options, None if table is None else str(table.resolve()))
        self._spec = spec = self._planned_for(spec)
        own = own_planner(spec)
        self._plan = own or make_planner(spec.name, spec.cluster, spec.model, spec.layers, spec.plan_costs, **spec.options)
        # The planning process imports no Megatron: what Megatron's own code plans is planned on the spot.
        self._ahead = PlanAhead(spec) if ahead and job.train_data is not None and own is None else None
        self._submitted: set[tuple[int, int, int]] = set()
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
        parts = self._parts(lengths)
        each = [part_lengths(microbatch, part) for microbatch, own in zip(lengths, parts, strict=True) for part in own]
        step = dataclasses.replace(self._planned(each, parts), parts=parts)
        self._steps += 1
        if self._steps <= ALWAYS_AGREE or self._steps % self._job.config.agreement_every == 0:
            check_agreement(step.fingerprint, self._job.pool.joint)
        self._last = (lengths, step)
        return step

    def close(self) -> None:
        """End the background process."""
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None

    def _parts(self, lengths: Sequence[tuple[int, ...]]) -> tuple[Parts, ...]:
        """By microbatch, the sequences that are planned together."""
        return tuple(parts_of(microbatch, ping_pong=self._job.ping_pong) for microbatch in lengths)

    def _planned(self, lengths: Sequence[tuple[int, ...]], parts: Sequence[Parts]) -> PlannedStep:
        """Plans for `lengths` of each part of each microbatch, made ahead or now."""
        return self._from_ahead(lengths, parts) if self._ahead is not None else self._now(lengths)

    def _now(self, lengths: Sequence[tuple[int, ...]]) -> PlannedStep:
        start = time.perf_counter()
        plans = tuple(self._plan(Batch(microbatch)) for microbatch in lengths)
        seconds = time.perf_counter() - start
        return PlannedStep(plans, seconds, seconds)

    def _from_ahead(self, lengths: Sequence[tuple[int, ...]], parts: Sequence[Parts]) -> PlannedStep:
        """Plans for `lengths` of each part of each microbatch."""
        assert self._ahead is not None
        consumed = self._job.args.consumed_train_samples
        # Not this step: the first one after a start or a resume is planned on the spot, not waited for.
        for step in range(1, HORIZON + 1):
            self._submit(consumed + step * get_num_microbatches() * self._samples(), len(parts))
        plans: list[MicrobatchPlan] = []
        waited = 0.0
        planned = 0.0
        keys = [(consumed, m, part) for m, own in enumerate(parts) for part in range(len(own))]
        for key, microbatch in zip(keys, lengths, strict=True):
            ready = self._ahead.take(key) if key in self._submitted else None
            self._submitted.discard(key)
            plan = ready.plan if ready is not None else None
            if ready is not None:
                waited += ready.waited_s
                planned += ready.plan_s
            if plan is None or plan.lengths != microbatch:
                if plan is not None:
                    self._warn_of_other_lengths(consumed)
                now = self._now([microbatch])
                plan, waited, planned = now.plans[0], waited + now.wait_s, planned + now.plan_s
            plans.append(plan)
        return PlannedStep(tuple(plans), planned, waited)

    def _planned_for(self, spec: PlanSpec) -> PlanSpec:
        """What is planned, given the ranks of the pool."""
        return spec

    def _warn_of_other_lengths(self, consumed: int) -> None:
        if not self._warned:
            log.warning(
                "planning ahead expected other lengths than the data iterator brought at sample %d; planning on the spot. "
                "Is the order of samples not sequential?",
                consumed,
            )
            self._warned = True

    def _coming(self, first: int) -> tuple[int, ...] | None:
        """Lengths of the microbatch that begins at sample `first`; None: there is none."""
        data = self._job.train_data
        assert data is not None
        samples = range(first, first + self._samples())
        return tuple(n for index in samples for n in data.sample_lengths(index)) if samples.stop <= len(data) else None

    def _samples(self) -> int:
        """Samples of the pool in one microbatch."""
        return self._job.args.micro_batch_size * self._job.pool.num_replicas

    def _submit(self, consumed: int, num_microbatches: int) -> None:
        """Ask for the plans of the step that begins at sample `consumed`; Megatron's sampler deals samples in order."""
        assert self._ahead is not None
        for m in range(num_microbatches):
            lengths = self._coming(consumed + m * self._samples())
            if (consumed, m, 0) in self._submitted or lengths is None:
                continue
            for at, part in enumerate(parts_of(lengths, ping_pong=self._job.ping_pong)):
                self._ahead.submit((consumed, m, at), part_lengths(lengths, part))
                self._submitted.add((consumed, m, at))


def part_lengths(lengths: Sequence[int], part: Sequence[int]) -> tuple[int, ...]:
    """Lengths of the sequences of one part."""
    return tuple(lengths[i] for i in part)


def tokens_per_rank(seq_length: int, micro_batch_size: int, context_parallel_size: int) -> int:
    """Tokens a rank holds when every sample is full and every rank holds tokens: what the capacity is if the configuration names none.

    Raises:
        ConfigError: samples that context-parallel ranks cannot share.
    """
    tokens, rest = divmod(seq_length * micro_batch_size, context_parallel_size)
    if rest:
        raise ConfigError(
            f"--seq-length {seq_length} x --micro-batch-size {micro_batch_size} is not divisible by {context_parallel_size} ranks"
        )
    return tokens
