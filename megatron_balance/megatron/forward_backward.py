"""Megatron's schedule over planned microbatches: the seam into its training and evaluation. And the
self-check: one step forward with the plan and without, before training.
"""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.core.rerun_state_machine import RerunMode, get_rerun_state_machine
from megatron.core.utils import get_model_config
from megatron.training.training import update_seqlen_stats_from_cu_seqlens

from megatron_balance.errors import ConfigError, SelfCheckError
from megatron_balance.ir.arrays import Ints
from megatron_balance.megatron import forward_step, session
from megatron_balance.megatron.data import LOSS_MASK, PADDING, column, numbered, recall, unpack
from megatron_balance.megatron.groups import job_device, schedule_groups, tensor_parallel
from megatron_balance.megatron.stages import Crossings, PlannedTransfers, StageShapes, TickRun, given_group
from megatron_balance.training import tokens
from megatron_balance.training.plans import PlannedStep
from megatron_balance.training.pool import Pool

log = logging.getLogger(__name__)


def balanced_schedule(inner: Callable[..., Any]) -> Callable[..., Any]:
    """A forward-backward function that plans the step's microbatches and runs `inner` on them."""

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
        # Inside Megatron's rerun loop: on a rerun the same raw microbatches come again, and the
        # same plan.
        job.prepare(model)
        if job.unchecked and not forward_only:
            _check_self(job, schedule, inner, model, kwargs)
        if not forward_only:
            job.steps.begin(job.args.curr_iteration + 1)
        # Weights that the last step changed are with their owners; evaluation runs Megatron's own
        # model.
        if forward_only and job.changes is not None:
            job.changes.gather_weights()
        pool = job.pool
        planned, shared, mine, apart = _planned_step(job, data_iterator, num_microbatches, forward_only=forward_only)
        if not forward_only:
            job.steps.tracer.planned(job.config.planner.name if job.config.planner else "")
            job.sequences = _own_sequences(apart, pool.readers[pool.replica])
            _count_flops(job.sequences)
            if job.changes is not None and planned.step.strategy != job.layout:
                return job.changes.run(planned, shared, mine, apart)
            if job.changes is not None:
                job.changes.gather_weights(for_step=True)
        own = planned.own_plans_of(pool.pipeline)
        # Pipelines side by side have as many microbatches as each needs.
        if planned.step.strategy is None:
            _check_number(len(own), num_microbatches)
        exchange = tokens.TokenExchange(apart, planned.plans, pool, planned.step.pipeline_of)
        rows = exchange.to_ranks(mine, job.num_columns, tensor_parallel(), job_device())

        def local(index: int) -> tokens.LocalMicrobatch:
            return exchange.local(rows, own[index], job.row_multiple)

        chunks = model if isinstance(model, list) else [model]
        shapes = StageShapes.of_step(
            [[exchange.counts[at] for at in of] for of in own], job.row_multiple, get_model_config(chunks[0])
        )
        if planned.step.ticks:
            return _run_ticks(job, planned, shared, local, shapes, model, forward_only=forward_only, **kwargs)
        kwargs |= _planned_transfers(pool, shapes, chunks, kwargs)
        counts = _mask_counts([rows[of[0]] for of in own], job.depths) if job.depths and pool.has_tokens else None
        microbatches = forward_step.Microbatches(job, planned, local, own, counts, forward_only=forward_only)
        # All chunks' iterators draw on the same microbatches.
        iterators = [microbatches.of_chunk() for _ in chunks]
        given = {"model": model, "num_microbatches": len(own), "forward_only": forward_only}
        result = _run(inner, iterators, **given, **kwargs)
        if not forward_only:
            microbatches.trained(shared)
        return _mean_over_replicas(result) if forward_only else result

    return schedule


def _run(inner: Callable[..., Any], iterators: list[Iterator[forward_step.PlannedMicrobatch]], **given: Any) -> Any:
    # One iterator a model chunk, as Megatron's schedules take them.
    of_chunks = iterators if len(iterators) > 1 else iterators[0]
    return inner(forward_step_func=forward_step.forward_step, data_iterator=of_chunks, **given)


def _planned_step(
    job: session.Session, data_iterator: Any, num_microbatches: int, *, forward_only: bool
) -> tuple[PlannedStep, tokens.PoolLengths, list[tokens.Sequences], tokens.PoolLengths]:
    """Read the step's samples, share their lengths, and plan. Collective over all ranks that plan.
    Returns the plan, the lengths as read, and the sequences of this rank and of the pool with each
    nano-batch as a microbatch of its own.
    """
    pool, parallel, device, iterator = job.pool, tensor_parallel(), job_device(), first_iterator(data_iterator)
    planner = job.planner(forward_only)
    draw = planner.draw(num_microbatches)
    if draw.first is not None:
        assert job.train_data is not None, "samples are read by number only where they are ours"
        iterator = numbered(job.train_data, draw, job.args.micro_batch_size, pool)
    # The middle stages need lengths alone.
    reads = parallel.is_source and pool.has_tokens
    mine, failure = job.reader.read(iterator, draw.num_microbatches * reads)
    # Another rank of this replica read the same samples.
    mine = mine if pool.reads else []
    shared = tokens.share_lengths(
        mine, failure, draw.num_microbatches, pool, parallel, device, fingerprint=draw.fingerprint
    )
    planned = planner.plan(shared.lengths, shared.trees, announced=shared.announced)
    recalled = recall(planned, job.train_data, pool, parallel, device, job.reader)
    mine, apart = tokens.by_nano_batch(mine, shared, planned.step.members, pool.rank, recalled)
    return planned, shared, mine, apart


def first_iterator(given: Any) -> Iterator[Any]:
    """This rank's iterator, of one a model chunk."""
    # A script's own provider may leave out those of chunks that neither embed nor compute the loss.
    return next((each for each in (given if isinstance(given, list) else [given]) if each is not None), iter(()))


def _check_number(planned: int, num_microbatches: int) -> None:
    """Reject a plan of another number of microbatches than the schedule runs, on all ranks."""
    if planned != num_microbatches:
        raise ConfigError(
            f"the planner made {planned} microbatches of a step in which every rank runs {num_microbatches} "
            "(--global-batch-size over --micro-batch-size and replicas); it must keep their number"
        )


def _planned_transfers(pool: Pool, shapes: StageShapes, chunks: list[Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords for Megatron's pipeline schedules: a communicator that knows the shapes, and the
    groups that they would take, or were given with a communicator. None where there is one stage.
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
    shared: tokens.PoolLengths,
    local: forward_step.MakeLocal,
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

    def microbatch(index: int) -> forward_step.PlannedMicrobatch:
        return forward_step.planned_microbatch(
            local(index), [None] * len(planned.step.plans_of[index]), num_samples=job.num_samples
        )

    binder = job.binder(job.pool.joint)
    run = TickRun(job.pool, binder, planned.step.ticks, microbatch, shapes, model, forward_only=forward_only)
    result = run.run(**kwargs)
    if not forward_only:
        job.steps.ran(planned, shared, run.bounds.counters)
    return _mean_over_replicas(result) if forward_only else result


def _mask_counts(rows: Sequence[torch.Tensor], depths: int) -> torch.Tensor:
    """Sums over the pool of the loss masks [microbatches, 1 + depths] fp32 of a step's rows [T, C].
    Collective over the data- and context-parallel ranks of a stage; nothing is read on the host.
    """
    masks = [column(depth, LOSS_MASK) for depth in range(depths + 1)]
    # [microbatches, 1 + depths].
    counts = torch.stack([tokens.from_bits(each[:, masks]).sum(0) for each in rows])
    dist.all_reduce(counts, group=mpu.get_data_parallel_group(with_context_parallel=True))
    return counts


def _mean_over_replicas(stored: list[dict[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
    """Reports of evaluated microbatches with the mean of their replicas' losses, 1 beside it.
    Collective over the last stage's pool, where reports of `_loss_of_replicas` are; others stay as
    they are.
    """
    if not stored or stored[0][forward_step.LOSS].dim() < 2:
        return stored
    # With `--sft` Megatron averages evaluation over microbatches of replicas, each by its own
    # tokens, and a plan spreads those over all ranks.
    sums = torch.stack([each[forward_step.LOSS] for each in stored])
    dist.all_reduce(sums, group=mpu.get_data_parallel_group(with_context_parallel=True))
    # [microbatches, replicas, (sum, tokens)] to [microbatches].
    means = (sums[..., 0] / sums[..., 1].clamp(min=1)).mean(1)
    return [
        {**each, forward_step.LOSS: torch.stack([mean, torch.ones_like(mean)])}
        for each, mean in zip(stored, means, strict=True)
    ]


def _own_sequences(shared: tokens.PoolLengths, reader: int) -> tuple[Ints, ...]:
    return tuple(
        np.array(lengths, dtype=np.int64)[owners == reader]
        for lengths, owners in zip(shared.lengths, shared.owners, strict=True)
    )


def _count_flops(sequences: Sequence[Ints]) -> None:
    """Tell Megatron's throughput line the sequences of this rank's replica."""
    # Megatron's line expects them on each of the replica's ranks, and none of evaluation.
    for own in sequences:
        # At least one entry: a rank that reports nothing would miss the all-reduce that Megatron
        # sums these with.
        update_seqlen_stats_from_cu_seqlens(
            torch.from_numpy(np.concatenate([[0], np.cumsum(own) if len(own) else [0]]))
        )


TOLERANCE = {torch.float32: 1e-5}
HALF_TOLERANCE = 1e-2  # relative difference of losses that is rounding; the second with weights of another type


def _tiny_samples(num_replicas: int, batch: int, length: int, vocabulary: int) -> dict[str, torch.Tensor]:
    """Samples of all replicas [num_replicas * batch, S] with documents of several lengths."""
    lengths = [each for each in (29, 12, 2, 1) if each <= length // 2] or [1]
    size = sum(lengths)
    positions = torch.cat([torch.arange(each) for each in lengths]).repeat(num_replicas * batch, 1)
    ids = torch.arange(num_replicas * batch * size).view(-1, size) * 7919 % max(1, vocabulary - 1)
    # Positions [replicas * B, S]; the last token of each document has no label.
    last = torch.nn.functional.pad(positions[:, 1:], (0, 1)) == 0
    labels = torch.roll(ids, -1, dims=1).masked_fill(last, 0)
    assert PADDING not in positions, "a tiny sample has no padding"
    return {"tokens": ids, "labels": labels, "loss_mask": (~last).float(), "position_ids": positions}


def _check_self(
    job: session.Session, schedule: Callable[..., Any], inner: Callable[..., Any], model: Any, kwargs: dict[str, Any]
) -> None:
    """Compare the losses of a tiny batch by `schedule`, as in training, and by `inner`, held whole
    by every rank. Collective over the world. SelfCheckError: they differ by more than rounding.
    """
    job.unchecked = False
    sums_loss, job.sums_loss = job.sums_loss, False
    args, pool, chunks = job.args, job.pool, model if isinstance(model, list) else [model]
    batch, number = args.micro_batch_size, pool.num_stages
    length = min(args.seq_length, args.max_position_embeddings)
    samples = _tiny_samples(pool.num_replicas, batch, length, args.padded_vocab_size or args.vocab_size or 2)
    own = {name: values[pool.replica * batch :][:batch] for name, values in samples.items()}
    with _nothing_counted(chunks):
        given = {"model": model, "num_microbatches": number, "forward_only": True}
        stored = schedule(
            forward_step_func=forward_step.forward_step, data_iterator=iter([own] * number), **given, **kwargs
        )
        with_plan = _loss(stored, summed=True)
        whole = [_whole(job, samples) for _ in range(number)]
        rows = [[each.tokens.shape[1]] for each in whole]
        shapes = StageShapes.of_step(rows, job.row_multiple, get_model_config(chunks[0]))
        transfers = _planned_transfers(pool, shapes, chunks, kwargs)
        stored = _run(inner, [iter(whole) for _ in chunks], **given, **(kwargs | transfers))
        without = _loss(stored, summed=False)
    job.sums_loss = sums_loss
    _compare_losses(with_plan, without, getattr(args, "curr_iteration", 0) + 1, job)


def _compare_losses(with_plan: float, without: float, step: int, job: Any) -> None:
    """Compare two losses, of which a stage that computes none has NaN for both."""
    difference = abs(with_plan - without) / max(abs(without), 1e-30)
    tolerance = TOLERANCE.get(job.dtype, HALF_TOLERANCE)
    device = job_device()
    known = torch.tensor([with_plan, without, difference], dtype=torch.float64, device=device)
    # A stage that computes no loss must not win the maximum, nor hide that there is none.
    if not mpu.is_pipeline_last_stage(ignore_virtual=True):
        known.fill_(-math.inf)
    known = torch.nan_to_num(known, nan=math.inf, neginf=-math.inf)
    dist.all_reduce(known, op=dist.ReduceOp.MAX)
    with_plan, without, difference = known.tolist()
    told = f"self-check before step {step}: a tiny batch has loss {with_plan:.7g} with the plan of "
    told += f"{job.config.planner.name} and {without:.7g} without, a relative difference of {difference:.1e}"
    # NaN does not compare: a difference that is none must fail.
    if not difference <= tolerance:
        raise SelfCheckError(
            f"{told}; expected at most {tolerance:.0e}. Nothing was trained. See whether this Megatron is one that was "
            "reviewed ('megatron-balance doctor --patches'), try another planner or kernel, or set self_check: false"
        )
    log.info("%s", told)


def _loss(stored: Sequence[Mapping[str, torch.Tensor]], *, summed: bool) -> float:
    """Loss per token of what a forward stored, NaN where that is nothing; `summed`: over the pool."""
    total = torch.zeros(2, device="cuda")
    for each in stored:
        total += each[forward_step.LOSS].detach().view(-1, 2).sum(0)
    if summed:
        dist.all_reduce(total, group=mpu.get_data_parallel_group(with_context_parallel=True))
    loss, count = total.tolist()
    return loss / count if count else math.nan


def _whole(job: Any, samples: Mapping[str, torch.Tensor]) -> forward_step.PlannedMicrobatch:
    """All samples of the pool as one microbatch of this rank, which attends for itself."""
    sequences = unpack(samples, job.depths, 0 if job.num_samples else None)
    device = job_device()
    layout = np.array([(seq, 0, length) for seq, length in enumerate(sequences.lengths)], dtype=np.int64)
    local = tokens.assemble(sequences.rows.to(device), layout, job.row_multiple)
    counts = _mask_counts([local.rows], job.depths)[0] if job.depths else None
    microbatch = forward_step.planned_microbatch(local, [None], counts, job.num_samples)
    # Without a plan every rank holds the whole batch, and attends document by document.
    microbatch.params.alone = sequences.lengths
    return microbatch


@contextmanager
def _nothing_counted(chunks: Sequence[Any]) -> Iterator[None]:
    """Evaluate, without timers and Megatron's own checks of values, which would count this."""
    machine: Any = get_rerun_state_machine()
    mode, training = machine.get_mode(), [chunk.training for chunk in chunks]
    timers = [get_model_config(chunk).timers for chunk in chunks]
    # Which values leap is judged by those before, and counted in this mode too.
    seen = {name: dict(getattr(machine, name)) for name in ("large_value_counts", "max_values")}
    machine.set_mode(RerunMode.DISABLED)
    for chunk in chunks:
        chunk.eval()
        get_model_config(chunk).timers = None
    try:
        with torch.no_grad():
            yield
    finally:
        machine.set_mode(mode)
        vars(machine).update(seen)
        for chunk, was, kept in zip(chunks, training, timers, strict=True):
            chunk.train(was)
            get_model_config(chunk).timers = kept
