"""Plans for Megatron's steps: Megatron's facts, handed to `training.plans`."""

from __future__ import annotations

import dataclasses
from math import lcm

from megatron.core.num_microbatches_calculator import get_num_microbatches
from torch.distributed import ProcessGroup

from megatron_balance.errors import ConfigError
from megatron_balance.ir.step import Lengths
from megatron_balance.megatron.groups import tensor_parallel
from megatron_balance.megatron.job import PlannedJob
from megatron_balance.megatron.memory import step_memory
from megatron_balance.megatron.own_scheduler import by_own_scheduler
from megatron_balance.planning.ahead import PlanAhead
from megatron_balance.planning.step_planner import Pipeline, PlanSpec, StepPlanner
from megatron_balance.training.agree import check_agreement
from megatron_balance.training.plans import Samples, StepPlans


def step_plans(job: PlannedJob, *, ahead: bool, evaluation: bool = False, joint: bool | None = None) -> StepPlans:
    """Plans of a job's training steps, or of its evaluation.

    Args:
        job: whose pool, model and configuration are planned for.
        ahead: whether to plan in a background process, if the training samples are ours.
        evaluation: whether steps have no backward pass.
        joint: whether all pipeline stages attend together; None: as the job has it.
    """
    spec = plan_spec(job, joint=job.joint if joint is None else joint, evaluation=evaluation)
    own = by_own_scheduler(spec.choice())
    # The planning process imports no Megatron: what Megatron's own code plans is planned on the
    # spot.
    # The other tensor-parallel ranks and stages have the plans of these.
    proves = job.pool.stage == 0 and (job.args.tensor_model_parallel_size == 1 or tensor_parallel().is_source)
    every = job.config.prove_every if proves else 0
    proving = dataclasses.replace(spec, prove_every=every, prove_as=job.pool.rank)
    process = PlanAhead(proving) if ahead and job.train_data is not None and own is None else None
    return StepPlans(
        StepPlanner(spec, own),
        samples(job),
        lambda fingerprint: check_agreement(fingerprint, job.pool.joint, tensor_parallel=peers(job)),
        ahead=process,
        evaluation=evaluation,
    )


def peers(job: PlannedJob) -> ProcessGroup | None:
    """The tensor-parallel group, whose ranks plan the same for themselves; None: of one rank."""
    return tensor_parallel().group if job.args.tensor_model_parallel_size > 1 else None


def plan_spec(job: PlannedJob, *, joint: bool, evaluation: bool = False) -> PlanSpec:
    """The planner of the configuration for the ranks, the model and the samples of a job.

    A rank holds as many more tokens in evaluation as its microbatches have more samples: it keeps
    nothing for a backward pass.
    """
    trained = job.args.micro_batch_size
    size = (getattr(job.args, "eval_micro_batch_size", None) or trained) if evaluation else trained
    choice = job.config.planner
    assert choice is not None
    changes = bool(job.candidates) and not evaluation
    # A rank is a tensor-parallel group, and a single GPU where strategies differ in them.
    gpus = job.args.tensor_model_parallel_size if job.candidates else 1
    options = dataclasses.asdict(choice.options)
    if options.get("tokens_per_rank") is not None:
        options["tokens_per_rank"] = options["tokens_per_rank"] * max(size, trained) // trained
        options["tokens_per_rank"] *= 1 if changes else gpus
    else:
        full = tokens_per_rank(job.args.seq_length, size, job.args.context_parallel_size)
        cluster = job.cluster()
        # Ranks without tokens leave theirs to the others; and a planner that may place tokens
        # unevenly says by how much: what a rank must have memory for, whatever the batch.
        held = -(-full * cluster.num_ranks // choice.num_holders(cluster))
        options["tokens_per_rank"] = int(held * (choice.planner.room(choice.options) if choice.planner.room else 1.0))
        options["tokens_per_rank"] = -(-options["tokens_per_rank"] // gpus) if changes else options["tokens_per_rank"]
    table = None if job.config.plan_costs is None else str(job.config.plan_costs.resolve())
    if changes:
        options["strategies"] = tuple(map(str, job.candidates))
        shares = [scheme.tensor for strategy in job.candidates for scheme in strategy.pipelines]
        layers = dataclasses.replace(choice.layers, align=lcm(*shares) if job.args.sequence_parallel else 1)
        return PlanSpec(
            choice.name,
            job.gpus(),
            job.model(1),
            layers,
            options,
            table,
            changes=True,
            base=str(job.layout),
            memory=step_memory(job),
        )
    if job.candidates:  # evaluated on the layout, which takes Megatron's own samples whole
        options["strategies"] = ()
        full = tokens_per_rank(job.args.seq_length, size, job.args.context_parallel_size)
        options["tokens_per_rank"] = max(options["tokens_per_rank"], full)
    layers = dataclasses.replace(choice.layers, align=job.row_multiple)
    pipeline = Pipeline(job.joint_cluster(), job.args.virtual_pipeline_model_parallel_size or 1) if joint else None
    strategy = str(job.layout) if choice.planner.pipelines else None
    return PlanSpec(
        choice.name,
        job.cluster(),
        job.model(),
        layers,
        options,
        table,
        pipeline,
        job.ping_pong,
        strategy,
        memory=step_memory(job),
    )


def check_holds(spec: PlanSpec, seq_length: int) -> None:
    """Reject candidates none of which holds a whole sample.

    Raises:
        ConfigError: names the one that holds most, and what would make it hold more.
    """
    known = StepPlanner(spec).candidates()
    best = max(known, key=lambda each: each.max_tokens)
    if best.max_tokens < seq_length:
        raise ConfigError(
            f"strategies: no candidate holds --seq-length {seq_length}: {best.strategy}, with the longest microbatch, "
            f"holds {best.max_tokens} tokens; {best.longer_with(seq_length)}"
        )


def first_lengths(job: PlannedJob) -> Lengths:
    """The lengths of the step that comes first, where the samples are ours; else of a microbatch of
    whole samples.
    """
    known = samples(job)
    found = None
    if known.lengths is not None:
        found = known.step(known.consumed(), get_num_microbatches())
    return found or ((job.args.seq_length,) * known.per_microbatch,)


def samples(job: PlannedJob) -> Samples:
    """The order in which Megatron's sampler deals training samples."""
    data = job.train_data
    return Samples(
        consumed=lambda: job.args.consumed_train_samples,
        num_microbatches=get_num_microbatches,
        per_microbatch=job.args.micro_batch_size * job.pool.num_replicas,
        lengths=None if data is None else data.sample_lengths,
        total=0 if data is None else len(data),
        # Iterations count from 0 while one runs.
        remaining=lambda: job.args.train_iters - job.args.curr_iteration,
        identity=job.data_identity,
    )


def tokens_per_rank(seq_length: int, micro_batch_size: int, context_parallel_size: int) -> int:
    """Tokens a rank holds when every sample is full and every rank holds tokens: its capacity if
    the configuration names none.

    Raises:
        ConfigError: samples that context-parallel ranks cannot share.
    """
    tokens, rest = divmod(seq_length * micro_batch_size, context_parallel_size)
    if rest:
        raise ConfigError(
            f"--seq-length {seq_length} x --micro-batch-size {micro_batch_size} is not divisible by "
            f"{context_parallel_size} ranks"
        )
    return tokens
