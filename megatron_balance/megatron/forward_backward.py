"""Megatron's schedule over planned microbatches: the seam into its training and evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from megatron.core.utils import get_model_config
from megatron.training.training import update_seqlen_stats_from_cu_seqlens

from megatron_balance.errors import ConfigError
from megatron_balance.ir.arrays import Ints
from megatron_balance.megatron import self_check, session
from megatron_balance.megatron.forward_step import (
    PlannedMicrobatch,
    forward_step,
    mask_counts,
    mean_over_replicas,
    planned_microbatch,
)
from megatron_balance.megatron.groups import schedule_groups, tensor_parallel
from megatron_balance.megatron.microbatches import MakeLocal, Microbatches
from megatron_balance.megatron.pipeline_ticks import TickRun
from megatron_balance.megatron.role_step import Read, run_role
from megatron_balance.megatron.stage_transfers import Crossings, PlannedTransfers, StageShapes, given_group
from megatron_balance.megatron.tokens import job_device, numbered, read, recall
from megatron_balance.training.lengths import PoolLengths, share_lengths
from megatron_balance.training.microbatch import LocalMicrobatch, assemble, interleave
from megatron_balance.training.nano_batches import by_nano_batch
from megatron_balance.training.plans import PlannedStep
from megatron_balance.training.pool import Pool
from megatron_balance.training.tokens import TokenExchange


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
        if not forward_only:
            job.steps.begin(job.args.curr_iteration + 1)
        if forward_only and job.changes is not None:
            job.changes.gather_weights()
        pool = job.pool
        planned, shared, found = _planned_step(job, data_iterator, num_microbatches, forward_only=forward_only)
        if not forward_only:
            job.steps.tracer.planned(job.config.planner.name if job.config.planner else "")
            job.sequences = _own_sequences(found.apart, pool.readers[pool.replica])
            _count_flops(job.sequences)
            if job.changes is not None and planned.step.strategy != job.layout:
                return run_role(job, job.changes, planned, shared, found)
            if job.changes is not None:
                job.changes.gather_weights(for_step=True)
        own = own_plans_of(planned, pool, num_microbatches)
        exchange = TokenExchange(found.apart, planned.plans, pool, planned.step.pipeline_of)
        rows = exchange.to_ranks(found.mine, job.num_columns, tensor_parallel(), job_device())

        def local(index: int) -> LocalMicrobatch:
            """This rank's rows of a microbatch, put together when the schedule asks for it."""
            parts = [assemble(rows[at], exchange.layouts[at], job.row_multiple) for at in own[index]]
            return interleave(parts, job.row_multiple)

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
            microbatches.trained(job, shared, job.planner(forward_only))
        return mean_over_replicas(result) if forward_only else result

    return schedule


def _planned_step(
    job: session.Session, data_iterator: Any, num_microbatches: int, *, forward_only: bool
) -> tuple[PlannedStep, PoolLengths, Read]:
    """Read the step's samples, share their lengths, and plan. Collective over all ranks that plan."""
    pool, parallel, device, iterator = job.pool, tensor_parallel(), job_device(), first_iterator(data_iterator)
    planner = job.planner(forward_only)
    draw = planner.draw(num_microbatches)
    if draw.first is not None:
        assert job.train_data is not None, "samples are read by number only where they are ours"
        iterator = numbered(job.train_data, draw, job.args.micro_batch_size, pool)
    reads = parallel.is_source and pool.has_tokens
    mine, failure = read(iterator, draw.num_microbatches * reads, job.reader, job.depths, job.first_sample)
    mine = mine if pool.reads else []  # another rank of this replica read the same samples
    shared = share_lengths(mine, failure, draw.num_microbatches, pool, parallel, device, fingerprint=draw.fingerprint)
    planned = planner.plan(shared.lengths, announced=shared.announced)
    recalled = recall(planned.recalled, job.train_data, pool, parallel, device, job.depths)
    mine, apart = by_nano_batch(mine, shared, planned.step.members, pool.rank, recalled)
    return planned, shared, Read(mine, apart)


def first_iterator(given: Any) -> Iterator[Any]:
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
            f"the schedule was handed {', '.join(given)}: stages cannot attend together over other groups; set "
            "'pipeline: stages'"
        )

    def microbatch(index: int) -> PlannedMicrobatch:
        return planned_microbatch(local(index), [None] * len(planned.plans_of[index]), num_samples=job.num_samples)

    binder = job.binder(job.pool.joint)
    run = TickRun(job.pool, binder, planned.ticks, microbatch, shapes, model, forward_only=forward_only)
    result = run.run(**kwargs)
    if not forward_only:
        job.steps.ran(planned, shared, run.counters)
    return mean_over_replicas(result) if forward_only else result


def _own_sequences(shared: PoolLengths, reader: int) -> tuple[Ints, ...]:
    """By microbatch, lengths of the sequences that this rank's replica read."""
    return tuple(
        np.array(lengths, dtype=np.int64)[owners == reader]
        for lengths, owners in zip(shared.lengths, shared.owners, strict=True)
    )


def _count_flops(sequences: Sequence[Ints]) -> None:
    """Tell Megatron's throughput line the sequences of this rank's replica.

    It expects them on each of the replica's ranks, and none of evaluation.
    """
    for own in sequences:
        # At least one entry: a rank that reports nothing would miss the all-reduce that Megatron
        # sums these with.
        update_seqlen_stats_from_cu_seqlens(
            torch.from_numpy(np.concatenate([[0], np.cumsum(own) if len(own) else [0]]))
        )
