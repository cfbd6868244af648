"""The one training job of this process: its configuration, its pool, its planners and its log.

Megatron calls our patches with its own arguments only, and keeps its job process-wide too. This is
the only such state of ours; plans travel with their microbatch.
"""

import argparse
import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.utils import get_model_config
from megatron.training import get_tensorboard_writer, get_wandb_writer

from megatron_balance.analysis.estimate import estimate
from megatron_balance.analysis.machine import Machine
from megatron_balance.cost.parallel import one_of_each
from megatron_balance.errors import ConfigError
from megatron_balance.ir.arrays import Ints
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.model import Model
from megatron_balance.ir.step import Lengths
from megatron_balance.ir.strategy import Scheme, Strategy
from megatron_balance.megatron import core_attention, data, flags, gpt, ping_pong, planning, router, script_data, ways
from megatron_balance.megatron.groups import job_device, make_pool, ranks_on_a_node
from megatron_balance.planners.pipelines import stage_cluster
from megatron_balance.planning.choice import Run, planning_cost, to_yaml
from megatron_balance.planning.step_planner import PlanSpec, StepPlanner
from megatron_balance.profiling.hardware import cluster_of_machine
from megatron_balance.runtime.bind import AttentionShape, BindOptions
from megatron_balance.runtime.cuda import CudaStreams
from megatron_balance.runtime.groups import Groups
from megatron_balance.runtime.kernels import choose_kernel
from megatron_balance.runtime.movers import build_variants
from megatron_balance.training.binding import BindAhead, Binder
from megatron_balance.training.figures import JobFacts
from megatron_balance.training.keeping import Keeping
from megatron_balance.training.ledger import DataIdentity, Ledger
from megatron_balance.training.log import LogTarget, ScalarWriter, StepLog, StepTracer
from megatron_balance.training.plans import StepPlans
from megatron_balance.training.pool import Pool
from megatron_balance.training.roll_call import RollCall

if TYPE_CHECKING:
    from megatron_balance.megatron.changes import Changes

log = logging.getLogger(__name__)


class Session:
    """Created before Megatron is initialised; complete once the process groups exist."""

    def __init__(
        self, args: argparse.Namespace, config: Run, te_patched: bool, writers: Sequence[ScalarWriter] | None = None
    ) -> None:
        """Take validated `args`; pools and planners come later. `writers`: None: Megatron's own."""
        self.args = args
        self.config = config
        self.te_patched = te_patched
        self.joint = ways.attends_jointly(args, config)  # whether all pipeline stages attend together, tick by tick
        # Whether every data-parallel replica is a pipeline with microbatches of its own.
        self.pipelines = ways.runs_pipelines(args, config)
        self.layout = ways.layout_of(args)
        # Strategies that training changes between; none: it runs the layout.
        self.candidates = ways.candidates_of(args, config, self.layout)
        self.layouts = ways.layouts_of(args, config, self.layout) if self.candidates else None
        # The way to other strategies than the layout; made when the model and the optimizer are.
        self.changes: Changes | None = None
        self.ping_pong = ping_pong.wanted(args, config, tell=True)  # whether microbatches run as two nano-batches
        # Whether latents travel in place of keys and values; with `latent_kv: pays` decided when
        # the model is there.
        self.latents = config.latent_kv is True
        self.steps = StepLog(_log_target(args, config, writers))
        self.bind_ahead = BindAhead()
        # Lengths of what this rank's replica read in the last training step, by microbatch.
        self.sequences: tuple[Ints, ...] = ()
        # The training samples if they are ours, or say their lengths: planning ahead reads those.
        self.train_data: data.NumberedSamples | None = None
        self.script_data = script_data.ScriptData()
        self._pool: Pool | None = None
        self._roll: RollCall | None = None
        self._planners: dict[bool, StepPlans] = {}
        self._ledger, self._data = Ledger(), DataIdentity()
        _save_ledger(self._ledger.to_json(), args)
        self._prepared: set[int] = set()
        self.unchecked = config.self_check
        self.sums_loss = flags.sums_trees(args)
        self._model: Any = None
        self._keeping: Keeping | None = None

    @property
    def pool(self) -> Pool:
        """This rank's pool; ConfigError: the process groups were made past our patch."""
        if self._pool is None:
            raise ConfigError(
                "no pool: Megatron's process groups were made before this session; set them up inside `pretrain`"
            )
        return self._pool

    def make_pools(self) -> None:
        """Make the groups of all pools; every rank calls this once, together."""
        cluster, planner, communication = self.config.cluster, self.config.planner, self.config.communication
        self._roll = RollCall()
        self._pool = make_pool(
            cluster.ranks_per_node if cluster is not None else None,
            communication.sms,
            attends="joint" if self.joint else "replica" if self.pipelines else "pool",
            safe=communication.safe,
            timeout=timedelta(minutes=self.args.distributed_timeout_minutes),
        )
        if job_device().type == "cuda" and (cluster is None or not cluster.names_machine):
            self.config = self.config.model_copy(update={"cluster": cluster_of_machine(cluster)})
        if planner is not None:
            # Options that cannot be are told before a model is built.
            planner.num_holders(self.cluster())
        attends = self.joint_cluster() if self.joint else self.cluster()
        if (idle := ways.idle_reason(self.args, self.config, attends)) is not None and self.args.rank == 0:
            log.warning("%s", idle)
        self._describe()
        self.steps.tracer.place(
            lambda: self.args.rank // self.gpus_per_node,
            lambda: CudaStreams({}, ()) if job_device().type == "cuda" else None,
        )
        if self.candidates:
            planning.check_holds(planning.plan_spec(self, joint=False), self.args.seq_length)

    def _describe(self) -> None:
        cost = planning_cost(self.cluster(), self.model(), self.config.plan_costs)
        num_chunks = self.args.virtual_pipeline_model_parallel_size or 1
        self.steps.describe(JobFacts(self.pool, self.model(), cost, num_chunks, self._pipelines_of), job_device())

    def _pipelines_of(self, strategy: Strategy | None) -> list[JobFacts]:
        """Facts of each pipeline of a strategy, for figures; none where it is the layout."""
        if strategy is None or strategy == self.layout:
            return []
        found: dict[Scheme, JobFacts] = {}
        for scheme in dict.fromkeys(strategy.pipelines):
            gpus = one_of_each(self.gpus(), scheme.tensor)
            per_node = min(scheme.context, gpus.ranks_per_node)
            ranks = dataclasses.replace(gpus, num_ranks=scheme.context, ranks_per_node=per_node)
            model = self.model(scheme.tensor)
            cost = planning_cost(ranks, model, self.config.plan_costs)
            found[scheme] = JobFacts(self.pool, model, cost, stages=scheme.pipeline, tensor=scheme.tensor)
        return [found[scheme] for scheme in strategy.pipelines]

    @property
    def shape(self) -> AttentionShape:
        return self.shape_of(self.args.tensor_model_parallel_size)

    def shape_of(self, size: int) -> AttentionShape:
        """Heads of one of `size` tensor-parallel ranks."""
        args = self.args
        # Heads are split over tensor-parallel ranks; latents are one key and value head for all of
        # them.
        if args.multi_latent_attention:
            heads, keys = args.num_attention_heads // size, args.qk_head_dim + args.qk_pos_emb_head_dim
            values = None if args.v_head_dim == keys else args.v_head_dim
            if self.latents:
                return AttentionShape(heads, 1, keys, values, (args.kv_lora_rank, args.qk_pos_emb_head_dim))
            return AttentionShape(heads, heads, keys, values)
        kv_heads = args.num_query_groups if args.group_query_attention else args.num_attention_heads
        return AttentionShape(args.num_attention_heads // size, max(1, kv_heads // size), args.kv_channels)

    @property
    def depths(self) -> int:
        """How many tokens beyond the next one the model predicts."""
        return self.args.mtp_num_layers or 0

    @property
    def num_samples(self) -> int:
        """Samples of a microbatch of the pool, where a loss asks for the sample of a row; else 0."""
        asked = flags.balances_by_sample(self.args) or flags.averages_evaluation(self.args)
        return self.pool.num_replicas * self.args.micro_batch_size if asked else 0

    @property
    def reader(self) -> data.Reader:
        args = self.args
        # Experts count all tokens of a sample, and FP8 scales are of all rows: with those no tail
        # is left out.
        dense = args.num_experts is None and args.fp8 is None
        # The number of the first sample that this replica reads of a microbatch, if anybody asks.
        first = self.pool.replica * args.micro_batch_size if self.num_samples else None
        learned = args.position_embedding_type == "learned_absolute"
        return data.Reader(dense, learned, self.depths, first, args.balance_trees)

    @property
    def num_columns(self) -> int:
        # The sequence's sample as a last column, where a loss asks for it.
        return data.NUM_COLUMNS + self.depths * data.PER_DEPTH + bool(self.num_samples)

    @property
    def dtype(self) -> torch.dtype:
        return self.args.params_dtype

    @property
    def row_multiple(self) -> int:
        return flags.row_multiple(self.args, self.args.tensor_model_parallel_size)

    def place(self, strategy: Strategy | None) -> "RankPlace | None":
        """This rank's place under a strategy; None: it is left over."""
        if self.changes is None or strategy is None or strategy == self.layout:
            return RankPlace(self.pool.pipeline, self.pool.attention, self.shape, self.row_multiple)
        return self.changes.place(strategy)

    def binder(self, groups: Groups, shape: AttentionShape | None = None) -> Binder:
        """Facts by which plans are bound over ranks that attend together; `shape`: of this rank."""
        # Before the first plan is bound, whatever a step would otherwise have to compile is built.
        config, recorder = self.config, self.steps.tracer.recorder
        build_variants(job_device(), self.dtype, self.shape, config.gradient_wire)
        options = BindOptions(
            *(shape or self.shape, groups, job_device(), self.dtype, self.kernel), gradient_wire=config.gradient_wire
        )
        return Binder(options, self.bind_ahead, recorder, planning.masks_of(self.args))

    def cluster(self) -> Cluster:
        """The pool as planners see it."""
        return self._cluster_of(self.pool.size, self.pool.ranks_per_node)

    def joint_cluster(self) -> Cluster:
        """The pools of all stages, as planners see them. ConfigError: unevenly, or not in order."""
        if not self.pool.joint_ranks_per_node:
            raise ConfigError(
                f"ranks {list(self.pool.joint.ranks)}, stage by stage, lie on nodes unevenly or not node by node, so "
                "their attention "
                "cannot be planned together; leave out --use-tp-pp-dp-mapping, set cluster.ranks_per_node, or set "
                "'pipeline: stages'"
            )
        return self._cluster_of(self.pool.joint.size, self.pool.joint_ranks_per_node)

    def gpus(self) -> Cluster:
        """All GPUs of the job, as planners of strategies see them."""
        return self._machine(self.args.world_size, self.gpus_per_node)

    @cached_property
    def gpus_per_node(self) -> int:
        """Ranks of a node, as configured; else collective over the world at the first call."""
        cluster = self.config.cluster
        per_node = cluster.ranks_per_node if cluster is not None else None
        return min(per_node, self.args.world_size) if per_node is not None else ranks_on_a_node()

    def _cluster_of(self, num_ranks: int, ranks_per_node: int) -> Cluster:
        groups = self._machine(num_ranks, ranks_per_node)
        return groups if self.config.cluster is None else of_pool(groups, self.args.tensor_model_parallel_size)

    def _machine(self, num_ranks: int, ranks_per_node: int) -> Cluster:
        cluster = self.config.cluster
        if cluster is None:
            return Cluster(num_ranks=num_ranks, ranks_per_node=ranks_per_node, name="job")
        return cluster.build(num_ranks=num_ranks, ranks_per_node=ranks_per_node).with_kernel(self.kernel)

    @cached_property
    def kernel(self) -> str:
        """Name of the attention kernel that runs here; it is chosen, and tried, at the first call."""
        widest, windows = max(self.shape.widths), bool(self.args.window_size)
        return choose_kernel(self.config.kernel, job_device(), self.dtype, widest, windows=windows).name

    def model(self, tensor: int | None = None) -> Model:
        """The model as planners see it on one of `tensor` tensor-parallel ranks; None: as laid out."""
        size = tensor or self.args.tensor_model_parallel_size
        return planning.planned_model(self.args, self.config, self.shape_of(size), size)

    def data_identity(self) -> DataIdentity:
        """Identity of the training samples. Collective over the world at the first call."""
        if isinstance(self.train_data, data.Documents):
            return DataIdentity(self.train_data.fingerprint)
        return self.script_data.identity(self.args)

    def planner(self, forward_only: bool) -> StepPlans:
        """The plans of training steps, or of evaluation; they share nothing."""
        if forward_only not in self._planners:
            ahead = self.config.plan_ahead and not forward_only
            self._planners[forward_only] = planning.step_plans(self, ahead=ahead, evaluation=forward_only)
            if not forward_only:
                self._planners[forward_only].restore(self._ledger, self._data, self.config.accepted_data)
        return self._planners[forward_only]

    def resume(self, checkpoint_args: argparse.Namespace) -> None:
        """Go on from a checkpoint and what waited. ConfigError: the planner cannot train that."""
        self._ledger, self._data = _saved_ledger(checkpoint_args)
        assert self.config.planner is not None
        self.config.planner.check_carry(self._ledger.carry)
        if self._ledger.carry.trees and self.args.balance_trees is None:
            raise ConfigError(
                f"the checkpoint's {len(self._ledger.held)} waiting sequences are trees; give --balance-trees, or "
                "start anew from the weights alone (--finetune)"
            )
        if False in self._planners:
            self._planners[False].restore(self._ledger, self._data, self.config.accepted_data)
        _save_ledger(self._ledger.to_json(self._data), self.args)

    def end_step(self) -> None:
        """A training step is over: the next checkpoint is saved with what it carries on."""
        if False in self._planners:
            _save_ledger(self._planners[False].saved(), self.args)

    def prepare(self, model: Any) -> None:
        """Check and adapt a model at its first step. ConfigError: it attends past our attention."""
        chunks: list[Any] = model if isinstance(model, list) else [model]
        # A script may give some ranks alone a data set.
        if not self._prepared and self.script_data.kept and not _agreed(self.train_data is not None):
            self.train_data = None
        if self.config.latent_kv == "pays" and not self._prepared:
            self._choose_latents(chunks)
        for chunk in chunks:
            if id(chunk) in self._prepared:
                continue
            self.adapt(chunk)
            self.ping_pong = self.ping_pong and ping_pong.able(chunk, self.config)
            if self.num_samples:
                router.tell_samples(chunk)
            self._prepared.add(id(chunk))
        self._model = model

    def _choose_latents(self, chunks: list[Any]) -> None:
        """Let latents travel if they can, and if so the first samples are faster. Collective."""
        reasons = [*ways.latent_reasons(self.args, self.config), *core_attention.latent_model_reasons(chunks)]
        if not _agreed(not reasons):
            log.log(
                logging.INFO if self.args.rank == 0 else logging.DEBUG,
                "latent_kv: pays: keys and values travel, since latents cannot: %s",
                "; ".join(reasons) or "so says the model of another rank",
            )
            return
        found: dict[bool, tuple[bool, float]] = {}
        # Rank 0 alone predicts, and all do as it says.
        if self.args.rank == 0:
            lengths = planning.first_lengths(self)
            for self.latents in (False, True):
                found[self.latents] = _predicted(planning.plan_spec(self, joint=False), lengths)
        self.latents = _agreed(not found or found[True] < found[False])
        if found:
            log.info(
                "latent_kv: pays: %s travel: predicted are %.2f ms a layer with latents, %.2f ms with keys and values",
                "latents" if self.latents else "keys and values",
                *(1e3 * found[each][1] for each in (True, False)),
            )
        if self.latents:
            self._describe()

    def adapt(self, chunk: Any) -> None:
        """Check a model chunk, number its attention layers, give it rotary embeddings by position."""
        gpt.check_model(chunk, self.te_patched)
        if self.latents:
            core_attention.hand_latents_on(chunk)
        router.hand_padding_on(chunk)
        if not self.pipelines:
            router.share_losses(chunk)
        gpt.number_layers(chunk, planning.recompute_of(get_model_config(chunk)))
        gpt.rotate_by_position(chunk, self.args.max_position_embeddings)

    def keeping(self) -> Keeping:
        """Decision maker on layers that keep; made collectively at the first training step."""
        if self._keeping is None:
            self._keeping = planning.keeping(self, self._model)
        return self._keeping

    def close(self) -> None:
        for planner in self._planners.values():
            planner.close()
        self.bind_ahead.close()
        if self.changes is not None:
            self.changes.close()
        self.steps.close()
        if self._roll is not None:
            self._roll.close()

    def failed(self, error: Exception) -> None:
        """Tell the other ranks why this one ends, or log which of them ended."""
        if self._roll is not None:
            self._roll.failed(error)


def of_pool(cluster: Cluster, tensor_parallel: int) -> Cluster:
    """`cluster` (of GPUs) for a pool with one rank of each `tensor_parallel` neighbours."""
    # A pool has one rank of each tensor-parallel group, whose ranks share its NICs.
    peers = min(tensor_parallel, cluster.ranks_per_nic)
    return dataclasses.replace(
        cluster,
        ranks_per_nic=max(1, cluster.ranks_per_nic // tensor_parallel),
        nic_bytes_per_s=cluster.nic_bytes_per_s / peers,
    )


_current: list[Session] = []


def current() -> Session:
    """The session of this process; ConfigError: there is none."""
    if not _current:
        raise ConfigError(
            "training was started without megatron_balance's pretrain; use megatron_balance.pretrain_gpt or .launch"
        )
    return _current[-1]


@contextmanager
def opened(session: Session) -> Iterator[Session]:
    """Make `session` the current one inside the block; if that fails, say which ranks are missing."""
    _current.append(session)
    try:
        yield session
    except Exception as error:
        # torch's errors do not say which rank a collective waits for.
        session.failed(error)
        raise
    finally:
        _current.remove(session)
        session.close()


def _predicted(spec: PlanSpec, lengths: Lengths) -> tuple[bool, float]:
    """Whether a rank's memory does not hold the step of these lengths, by closed forms, and seconds
    of a layer, modules outside attention included; less is better. Errors as of `StepPlanner.plan`.
    """
    too_large, total_s = False, 0.0
    for plan in StepPlanner(spec).plan(lengths)[0].plans:
        ranks = spec.cluster
        # Of a pipeline's own.
        if plan.num_ranks != ranks.num_ranks:
            ranks = stage_cluster(ranks, plan.num_ranks)
        cost = planning_cost(ranks, spec.model, spec.plan_costs)
        found = estimate(plan, Machine(ranks, spec.model, cost, memory=spec.memory))
        total_s += found.layer_s
        too_large |= not found.backward.fits
    return too_large, total_s


def _agreed(mine: bool) -> bool:
    """Whether all ranks of the world say yes. Collective over the world."""
    said = torch.tensor([int(mine)], device=job_device())
    dist.all_reduce(said, dist.ReduceOp.MIN)
    return bool(said)


def _log_target(args: argparse.Namespace, config: Run, writers: Sequence[ScalarWriter] | None = None) -> LogTarget:
    """Where this rank's records go. `writers`: of scalars; None: Megatron's own."""
    folder, writes = Path(args.balance_log) if args.balance_log else None, args.rank == 0
    return LogTarget(
        folder=folder,
        config=to_yaml(config) if folder is not None and writes else "",
        writes=writes,
        interval=args.log_interval,
        writers=_scalar_writers(args.tensorboard_log_interval) if writers is None else lambda _: writers,
        tracer=StepTracer(folder, config.trace_steps, args.rank),
    )


def _scalar_writers(interval: int) -> Callable[[int], Sequence[ScalarWriter]]:
    """Megatron's writers for a step: those that exist on this rank, every `interval` steps."""

    def writers(step: int) -> list[ScalarWriter]:
        if step % interval:
            return []
        tensorboard: Any = get_tensorboard_writer()
        wandb: Any = get_wandb_writer()
        present: list[ScalarWriter] = []
        if tensorboard:
            present.append(tensorboard.add_scalar)
        if wandb:
            present.append(lambda name, value, at: wandb.log({name: value}, at))
        return present

    return writers


_CARRY = "balance_carry"


def _save_ledger(text: str, args: argparse.Namespace) -> None:
    """Put a ledger's text where the next checkpoint takes it from."""
    # A step that is saved before it is over (a rerun that ends the job) is saved with the account
    # that it began with, since it is dealt again on resuming.
    setattr(args, _CARRY, text)


def _saved_ledger(args: argparse.Namespace) -> tuple[Ledger, DataIdentity]:
    """The ledger that a checkpoint with these arguments was saved with, and what its samples are;
    an empty one and an unknown one if it knows of none. ConfigError: its text is not a ledger.
    """
    text: str | None = getattr(args, _CARRY, None)
    return (Ledger(), DataIdentity()) if text is None else Ledger.from_json(text)


@dataclass(frozen=True, slots=True)
class RankPlace:
    """This rank under a strategy: the pipeline that it runs, who attend together, its heads."""

    pipeline: int
    attention: Groups
    shape: AttentionShape
    row_multiple: int
