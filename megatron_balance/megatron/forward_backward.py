"""Megatron's schedule over planned microbatches: the seam into its training and evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from megatron.core.utils import get_model_config
from megatron.training.training import update_seqlen_stats_from_cu_seqlens

from megatron_balance.errors import ConfigError
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.ir.step import StepPlan
from megatron_balance.megatron import self_check, session
from megatron_balance.megatron.forward_step import PlannedMicrobatch, forward_step, mask_counts, planned_microbatch
from megatron_balance.megatron.groups import schedule_groups, tensor_parallel
from megatron_balance.megatron.pipeline_ticks import TickRun
from megatron_balance.megatron.stage_transfers import Crossings, PlannedTransfers, StageShapes, given_group
from megatron_balance.megatron.tokens import job_device, numbered, read, recall
from megatron_balance.runtime.bind import Counters
from megatron_balance.runtime.lower.steps import BOTH_PHASES, PhaseName
from megatron_balance.training.binding import bind_layers, policies_of
from megatron_balance.training.lengths import PoolLengths, share_lengths
from megatron_balance.training.microbatch import LocalMicrobatch, assemble, interleave
from megatron_balance.training.nano_batches import by_nano_batch
from megatron_balance.training.plans import PlannedStep, StepPlans
from megatron_balance.training.pool import Pool
from megatron_balance.training.tokens import TokenExchange

MakeLocal: TypeAlias = Callable[[int], LocalMicrobatch]


def balanced_schedule(inner: Callable[..., Any]) -> Callable[..., Any]:
    """A forward-backward function that plans the step's microbatches and runs `inner` on them.

    Called inside Megatron's rerun loop: on a rerun the same raw microbatches come again, and the
    same plan with them.
    """

    def schedule(
        *,
        forward_step_func: Callable[..., Any],  # noqa: ARG001  ours takes its place; the log said so when the session began
        data_iterator: Any,
        model: Any,
        num_microbatches: int,
        forward_only: bool = False,
        **kwargs: Any,
    ) -> Any:
        job = session.current()
        if kwargs.get("collect_non_loss_data"):
            raise ConfigError(
                "non-loss data is collected on the last rank alone, but a plan needs all ranks; pass no "
                "process_non_loss_data_func"
            )
        job.prepare(model)
        if job.unchecked and not forward_only:
            _check_self(job, schedule, inner, model, kwargs)
        job.steps.begin(forward_only)
        pool = job.pool
        parallel, device, iterator = tensor_parallel(), job_device(), _first_iterator(data_iterator)
        planner = job.planner(forward_only)
        draw = planner.draw(num_microbatches)
        if draw.first is not None:
            assert job.train_data is not None, "samples are read by number only where they are ours"
            iterator = numbered(job.train_data, draw, job.args.micro_batch_size, pool)
        reads = parallel.is_source and pool.has_tokens
        mine, failure = read(iterator, draw.num_microbatches * reads, job.depths, job.first_sample)
        mine = mine if pool.reads else []  # another rank of this replica read the same samples
        shared = share_lengths(
            mine, failure, draw.num_microbatches, pool, parallel, device, fingerprint=draw.fingerprint
        )
        planned = planner.plan(shared.lengths, announced=shared.announced)
        own = own_plans_of(planned, pool, num_microbatches)
        recalled = recall(planned.recalled, job.train_data, pool, parallel, device, job.depths)
        mine, apart = by_nano_batch(mine, shared, planned.step.members, pool.rank, recalled)
        exchange = TokenExchange(apart, planned.plans, pool, planned.step.pipeline_of)
        rows = exchange.to_ranks(mine, job.num_columns, parallel, device)

        def local(index: int) -> LocalMicrobatch:
            """This rank's rows of a microbatch, put together when the schedule asks for it."""
            parts = [assemble(rows[at], exchange.layouts[at], job.row_multiple) for at in own[index]]
            return interleave(parts, job.row_multiple)

        _count_flops(apart, pool.readers[pool.replica], forward_only=forward_only)
        chunks = model if isinstance(model, list) else [model]
        shapes = StageShapes.of_step(
            [[exchange.counts[at] for at in of] for of in own],
            job.row_multiple,
            get_model_config(chunks[0]),
        )
        if planned.ticks:
            return _run_ticks(job, planned, shared, local, shapes, model, forward_only=forward_only, **kwargs)
        kwargs |= _planned_transfers(pool, shapes, chunks, kwargs)
        counts = mask_counts([rows[of[0]] for of in own], job.depths) if job.depths and pool.has_tokens else None
        microbatches = Microbatches(job, planned, local, own, counts, forward_only=forward_only)
        of_chunks = [microbatches.of_chunk() for _ in chunks]
        result = inner(
            forward_step_func=forward_step,
            data_iterator=of_chunks if len(of_chunks) > 1 else of_chunks[0],
            model=model,
            num_microbatches=len(own),
            forward_only=forward_only,
            **kwargs,
        )
        if not forward_only:
            microbatches.trained(job, shared, planner)
        return result

    return schedule


def _first_iterator(given: Any) -> Iterator[Any]:
    """The iterator of this rank, of one a model chunk.

    A script's own provider may leave out those of chunks that neither embed nor compute the loss.
    """
    return next((each for each in (given if isinstance(given, list) else [given]) if each is not None), iter(()))


def _check_self(
    job: session.Session, schedule: Callable[..., Any], inner: Callable[..., Any], model: Any, kwargs: dict[str, Any]
) -> None:
    """Compare a tiny batch with a plan and without (`self_check`)."""
    job.unchecked = False
    chunks = model if isinstance(model, list) else [model]

    def planned(iterator: Any, num_microbatches: int) -> Any:
        return schedule(
            forward_step_func=forward_step,
            data_iterator=iterator,
            model=model,
            num_microbatches=num_microbatches,
            forward_only=True,
            **kwargs,
        )

    def alone(whole: Sequence[PlannedMicrobatch]) -> Any:
        rows = [[each.tokens.shape[1]] for each in whole]
        shapes = StageShapes.of_step(rows, job.row_multiple, get_model_config(chunks[0]))
        transfers = _planned_transfers(job.pool, shapes, chunks, kwargs)
        return self_check.run_alone(inner, whole, model, kwargs | transfers)

    self_check.check(job, planned, alone, chunks)


def own_plans_of(planned: PlannedStep, pool: Pool, num_microbatches: int) -> tuple[range, ...]:
    """By microbatch that this rank runs, its plans; pipelines side by side have as many as each needs.

    Raises:
        ConfigError: as `check_number`, where all ranks share every microbatch.
    """
    own = planned.own_plans_of(pool.pipeline)
    if planned.step.strategy is None:
        check_number(len(own), num_microbatches)
    return own


def check_number(planned: int, num_microbatches: int) -> None:
    """Reject a plan of another number of microbatches than the schedule runs, on this and all ranks.

    Raises:
        ConfigError: names both numbers.
    """
    if planned != num_microbatches:
        raise ConfigError(
            f"the planner made {planned} microbatches of a step in which every rank runs {num_microbatches} "
            "(--global-batch-size over --micro-batch-size and replicas); it must keep their number"
        )


def _planned_transfers(pool: Pool, shapes: StageShapes, chunks: list[Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords for Megatron's pipeline schedules: a communicator that knows the shapes, and the groups
    that they would take, or were given with a communicator. None where there is one stage.
    """
    if pool.num_stages == 1:
        return {}
    config: Any = get_model_config(chunks[0])
    crossings = Crossings.of_schedule(
        len(shapes.rows), pool.stage, pool.num_stages, len(chunks), config.microbatch_group_size_per_vp_stage
    )
    group = given_group(given.get("p2p_communicator"))
    if group is not None:
        return {"p2p_communicator": PlannedTransfers(group, config, shapes, crossings)}
    transfers = PlannedTransfers.of_pipeline(config, shapes, crossings)
    return {"p2p_communicator": transfers, "pg_collection": schedule_groups()}


def _run_ticks(
    job: session.Session,
    planned: PlannedStep,
    shared: PoolLengths,
    local: MakeLocal,
    shapes: StageShapes,
    model: Any,
    *,
    forward_only: bool,
    **kwargs: Any,
) -> Any:
    """The step with our schedule in place of Megatron's: all pipeline stages attend together."""
    given = [
        name
        for name in ("pg_collection", "p2p_communicator", "adjust_tensor_shapes_fn")
        if kwargs.get(name) is not None
    ]
    if given:
        raise ConfigError(
            f"pretrain was handed {', '.join(given)}: stages cannot attend together over other groups; set 'pipeline: "
            "stages'"
        )

    def microbatch(index: int) -> PlannedMicrobatch:
        return planned_microbatch(local(index), [None] * len(planned.plans_of[index]), num_samples=job.num_samples)

    binder = job.binder(job.pool.joint)
    run = TickRun(job.pool, binder, planned.ticks, microbatch, shapes, model, forward_only=forward_only)
    result = run.run(**kwargs)
    if not forward_only:
        job.steps.ran(planned, shared, run.counters)
    return result


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
        counts: torch.Tensor | None,
        *,
        forward_only: bool,
    ) -> None:
        """Take the plans, `own` by microbatch; `local` makes this rank's rows of a microbatch.

        `counts`: of `mask_counts`, where further tokens are predicted.
        """
        self._binder = job.binder(job.pool.attention)
        self._pipeline = job.pool.pipeline
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
                self._binder.key(planned.plans[at], policy, nano_batch, self._phases)
                for of in own
                for nano_batch, at in enumerate(of)
                for policy in policies_of(self.decision)
            )
        for of in own[1:]:
            self._expect(planned.plans, of)

    def trained(self, job: session.Session, shared: PoolLengths, plans: StepPlans) -> None:
        """Log the training step that ran; then look up the first microbatch of the next one.

        The host waits for the device now and then until that step begins.
        """
        job.steps.ran(self._planned, shared, self.counters, self.decision)
        job.bind_ahead.submit(lambda: self.expect_next(plans.coming()))

    def expect_next(self, coming: StepPlan | None) -> None:
        """Say that a step with this plan is likely to come next, with the decision of this one."""
        if coming is not None and not coming.ticks:
            first = coming.pipelines[self._pipeline].start
            self._expect(coming.plans, coming.plans_of[first])

    def _expect(self, plans: Sequence[MicrobatchPlan], which: Sequence[int]) -> None:
        for nano_batch, at in enumerate(which):
            for policy in policies_of(self.decision):
                self._binder.expect(plans[at], policy, nano_batch, self._phases)

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
            bind_layers(self._binder, plans[at], self.decision, nano_batch, self._phases)
            for nano_batch, at in enumerate(self._own[index])
        ]
        self.counters += [bound.counters for layers in bounds for bound in layers.bounds]
        counts = None if self._counts is None else self._counts[index]
        return planned_microbatch(self._local(index), bounds, counts, self._num_samples)


def _count_flops(shared: PoolLengths, reader: int, *, forward_only: bool) -> None:
    """Tell Megatron's throughput line the sequences of this rank's replica.

    It expects them on each of the replica's ranks, and none of evaluation.
    """
    if forward_only:
        return
    for lengths, owners in zip(shared.lengths, shared.owners, strict=True):
        own = np.array(lengths, dtype=np.int64)[owners == reader]
        # At least one entry: a rank that reports nothing would miss the all-reduce that Megatron
        # sums these with.
        update_seqlen_stats_from_cu_seqlens(
            torch.from_numpy(np.concatenate([[0], np.cumsum(own) if len(own) else [0]]))
        )
