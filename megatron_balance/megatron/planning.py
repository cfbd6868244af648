"""Plans for Megatron's steps: Megatron's facts, handed to `training.plans`."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from importlib.metadata import version
from itertools import groupby
from math import lcm
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from megatron.core.num_microbatches_calculator import get_num_microbatches

from megatron_balance.cost.base import CostModel
from megatron_balance.errors import ConfigError
from megatron_balance.ir.batch import Batch
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.ir.step import Lengths
from megatron_balance.megatron.groups import tensor_parallel
from megatron_balance.megatron.planned_model import step_memory
from megatron_balance.planners import megatron_dynamic
from megatron_balance.planners.base import JointStages
from megatron_balance.planners.megatron_dynamic import Microbatch, Scheduler
from megatron_balance.planning.ahead import PlanAhead
from megatron_balance.planning.choice import PlannerChoice
from megatron_balance.planning.step_planner import PlanSpec, StepPlanner
from megatron_balance.training.plans import Samples, StepPlans, check_agreement

if TYPE_CHECKING:
    from megatron_balance.megatron.session import Session


def step_plans(job: Session, *, ahead: bool, evaluation: bool = False, joint: bool | None = None) -> StepPlans:
    """Plans of a job's training steps, or of its `evaluation`, which has no backward pass.

    `ahead`: whether to plan in a background process, if the training samples are ours. `joint`:
    whether all pipeline stages attend together; None: as the job has it.
    """
    spec = plan_spec(job, joint=job.joint if joint is None else joint, evaluation=evaluation)
    own = by_own_scheduler(spec.choice())
    # The other tensor-parallel ranks and stages have the plans of these.
    alone = job.args.tensor_model_parallel_size == 1
    peers = None if alone else tensor_parallel().group
    proves = job.pool.stage == 0 and (alone or tensor_parallel().is_source)
    every = job.config.prove_every if proves else 0
    proving = dataclasses.replace(spec, prove_every=every, prove_as=job.pool.rank)
    # The planning process imports no Megatron: what Megatron's own code plans is planned on the
    # spot.
    process = PlanAhead(proving) if ahead and job.train_data is not None and own is None else None
    return StepPlans(
        StepPlanner(spec, own),
        samples(job),
        lambda fingerprint: check_agreement(fingerprint, job.pool.joint, tensor_parallel=peers),
        ahead=process,
        evaluation=evaluation,
    )


def plan_spec(job: Session, *, joint: bool, evaluation: bool = False) -> PlanSpec:
    """The planner of the configuration for the ranks, the model and the samples of a job."""
    trained = job.args.micro_batch_size
    # A rank holds as many more tokens in evaluation as its microbatches have more samples: it keeps
    # nothing for a backward pass.
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
    pipeline = JointStages(job.joint_cluster(), job.args.virtual_pipeline_model_parallel_size or 1) if joint else None
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
    """Reject candidates none of which holds a whole sample; ConfigError names the one that holds
    most.
    """
    known = StepPlanner(spec).candidates()
    best = max(known, key=lambda each: each.max_tokens)
    if best.max_tokens < seq_length:
        raise ConfigError(
            f"strategies: no candidate holds --seq-length {seq_length}: {best.strategy}, with the longest microbatch, "
            f"holds {best.max_tokens} tokens; {best.longer_with(seq_length)}"
        )


def first_lengths(job: Session) -> Lengths:
    """The lengths of the step that comes first, where the samples are ours; else of a microbatch of
    whole samples.
    """
    known = samples(job)
    found = None
    if known.lengths is not None:
        found = known.step(known.consumed(), get_num_microbatches())
    return found or ((job.args.seq_length,) * known.per_microbatch,)


def samples(job: Session) -> Samples:
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
    """A rank's capacity if the configuration names none: its tokens when every sample is full and
    every rank holds tokens. ConfigError: samples that context-parallel ranks cannot share.
    """
    tokens, rest = divmod(seq_length * micro_batch_size, context_parallel_size)
    if rest:
        raise ConfigError(
            f"--seq-length {seq_length} x --micro-batch-size {micro_batch_size} is not divisible by "
            f"{context_parallel_size} ranks"
        )
    return tokens


log = logging.getLogger(__name__)


PROBE = ((8192, 4096, 2048, 1024, 512, 256, 128, 64, 32, 16), 1024, 8)


def by_own_scheduler(choice: PlannerChoice) -> PlannerChoice | None:
    """The planner with Megatron's own scheduler deciding its groups; None: its options follow no
    scheduler of Megatron's, or none works.
    """
    plan_with = choice.planner.plan_with(choice.options) if choice.planner.plan_with is not None else None
    scheduler = own_scheduler() if plan_with is not None else None
    if plan_with is None or scheduler is None:
        return None
    groups = _Guarded(scheduler)

    def plan(batch: Batch, cluster: Cluster, model: Model, cost: CostModel, options: Any) -> MicrobatchPlan:
        del cost  # groups follow from lengths
        return plan_with(groups, batch, cluster, model, options)

    return dataclasses.replace(choice, planner=dataclasses.replace(choice.planner, plan=plan))


class _Guarded:
    """Megatron's scheduler; our rules, and once a line in the log, where it fails."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._said = False

    def __call__(self, lengths: Sequence[int], tokens: int, num_ranks: int) -> list[Microbatch]:
        try:
            return self._scheduler(lengths, tokens, num_ranks)
        except Exception as error:  # Megatron's assertions and index errors alike
            if not self._said:
                log.warning(
                    "Megatron's scheduler fails for %d sequences on %d ranks of %d tokens (%s: %s); use our rules for "
                    "such batches",
                    *(len(lengths), num_ranks, tokens, type(error).__name__, error),
                )
                self._said = True
            # Whatever Megatron raises, assertions and index errors alike, our rules plan the batch.
            return megatron_dynamic.RULES["hybrid"](lengths, tokens, num_ranks)


def own_scheduler() -> Scheduler | None:
    """The scheduler of the installed megatron-core, or None if it has none or one that fails; a log
    line says which.

    Through megatron-core 0.19 this is `BalancedCPScheduler`, whose rules are `rules: hybrid`. Its
    code decides; what surrounds it there (data loader, forward pass) is not used, and does not run
    in 0.17 to 0.19.
    """
    name = f"megatron-core {version('megatron-core')}"
    try:
        _schedule(*PROBE)
    except Exception as error:  # whatever the installed version raises, we do without it
        log.warning(
            "%s has no scheduler of context-parallel groups that works (%s: %s); use our rules",
            name,
            type(error).__name__,
            error,
        )
        return None
    log.info("context-parallel groups by BalancedCPScheduler of %s", name)
    return _schedule


def _schedule(lengths: Sequence[int], tokens: int, num_ranks: int) -> list[Microbatch]:
    """Microbatches of groups. Raises what Megatron raises, where its rules do not come out."""
    from megatron.core.pipeline_parallel.hybrid_cp_schedule import BalancedCPScheduler

    # All that it asks of its process group is the size.
    group: Any = SimpleNamespace(size=lambda: num_ranks)
    scheduler = BalancedCPScheduler(tokens, group)
    _, by_rank = scheduler.get_groups_and_subsamples(list(enumerate(lengths)), None)
    return [tuple((len(list(ranks)), tuple(seqs)) for seqs, ranks in groupby(microbatch)) for microbatch in by_rank]
