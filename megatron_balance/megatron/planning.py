"""Plans for Megatron's steps: the model and the memory of a job as planners see them, by Megatron's
arguments, and Megatron's facts, handed to `training.plans`.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
from collections.abc import Sequence
from importlib.metadata import version
from itertools import groupby
from math import lcm
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import mpu
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.transformer.utils import is_layer_window_attention

from megatron_balance.analysis.backward import Recomputed, Stage
from megatron_balance.analysis.memory import OPTIMIZER_BYTES, Sharding, parameters_of_rank
from megatron_balance.analysis.step_memory import StepMemory
from megatron_balance.cost.base import CostModel
from megatron_balance.errors import ConfigError
from megatron_balance.ir.batch import Batch
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.mask import CAUSAL, Mask, SlidingWindow
from megatron_balance.ir.model import Model, RecurrentLayers
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.ir.step import Lengths
from megatron_balance.ir.strategy import Strategy
from megatron_balance.megatron.flags import is_hybrid, layers_by_pattern
from megatron_balance.megatron.groups import job_device, tensor_parallel
from megatron_balance.planners import megatron
from megatron_balance.planners.base import JointStages, Scheduler
from megatron_balance.planners.megatron import Microbatch
from megatron_balance.planning.choice import PlannerChoice, Run
from megatron_balance.planning.step_planner import PlanAhead, PlanSpec, StepPlanner
from megatron_balance.runtime.bind import AttentionShape
from megatron_balance.training.keeping import AgreedMemory, Keeping
from megatron_balance.training.plans import Samples, StepPlans, check_agreement

if TYPE_CHECKING:
    from megatron_balance.megatron.session import Session

log = logging.getLogger(__name__)


def planned_model(args: argparse.Namespace, config: Run, shape: AttentionShape, tensor: int) -> Model:
    """One tensor-parallel rank's share of heads and MLP; `shape`: its heads, `tensor`: such ranks."""
    first, *others = masks_of(args)
    inner = (args.moe_ffn_hidden_size if args.num_experts else None) or args.ffn_hidden_size
    further = args.mtp_num_layers or 0
    return Model(
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        value_dim=shape.value_dim,
        **_latents(args, tensor),
        latent_travels=shape.latent is not None,
        num_layers=args.num_layers + further,
        mtp_layers=further,
        hidden_size=args.hidden_size,
        ffn_size=max(1, inner // tensor),
        gated_ffn=bool(args.swiglu),
        name="job",
        bytes_per_element=args.params_dtype.itemsize,
        num_experts=args.num_experts or 0,
        **_experts(args, tensor),
        vocab_size=args.padded_vocab_size or args.vocab_size or 1,
        gradient_wire=config.gradient_wire,
        attention=first.name,
        other_attention=others[0].name if others else "",
        other_layers=_with_other_mask(args, first) if others else 0,
        tied_embeddings=not args.untie_embeddings_and_output_weights,
        recurrent=_recurrent(args, tensor),
    )


def _recurrent(args: Any, tensor: int) -> RecurrentLayers | None:
    """The recurrent layers of a hybrid model; of two kinds, all as of the kind that has more."""
    if not is_hybrid(args):
        return None
    every = layers_by_pattern(args)
    if not every:  # a GPT, whose layers all have an MLP
        freq = args.linear_attention_freq
        which = [(at + 1) % freq != 0 for at in range(args.num_layers)] if isinstance(freq, int) else freq
        every = "".join("G" if each else "*" for each in which)
        every += every[-1] * (args.mtp_num_layers or 0)
    # What a layer that predicts further tokens has inside is counted, and is one layer of the model.
    most = args.num_layers + (args.mtp_num_layers or 0)
    counts = {symbol: min(every.count(symbol), most) for symbol in "MG*+-E"}
    attend = min(max(1, counts["*"] + counts["+"]), most)
    mlps = min(counts["-"] + counts["E"], most) if layers_by_pattern(args) else most
    layers = min(counts["M"] + counts["G"], most)
    if counts["G"] > counts["M"]:
        whole = RecurrentLayers(
            *("gated_delta", layers, attend, mlps, args.linear_num_value_heads, args.linear_value_head_dim),
            key_heads=args.linear_num_key_heads,
            key_dim=args.linear_key_head_dim,
            conv_width=args.linear_conv_kernel_dim,
        )
    elif counts["M"]:
        heads = args.mamba_num_heads or 2 * args.hidden_size // args.mamba_head_dim  # Megatron's mixer expands by 2
        groups, numbers = args.mamba_num_groups, args.mamba_state_dim
        whole = RecurrentLayers(
            *("mamba2", layers, attend, mlps, heads, args.mamba_head_dim), key_heads=groups, key_dim=numbers, chunk=128
        )
    else:  # attention and MLPs in layers of their own
        return None
    return whole.share(tensor)


def _experts(args: argparse.Namespace, tensor: int) -> dict[str, Any]:
    if not args.num_experts:
        return {}
    every = args.moe_layer_freq
    dense = (
        [at % every != 0 for at in range(args.num_layers)] if isinstance(every, int) else [not each for each in every]
    )
    return {
        "experts_per_token": args.moe_router_topk,
        "expert_split": args.expert_model_parallel_size * (args.expert_tensor_parallel_size or tensor) / tensor,
        "shared_ffn_size": (args.moe_shared_expert_intermediate_size or 0) // tensor,
        "dense_layers": layers_by_pattern(args).count("-") if layers_by_pattern(args) else sum(dense),
    }


def _with_other_mask(args: argparse.Namespace, first: Mask) -> int:
    further = args.mtp_num_layers or 0
    # Layers that predict further tokens are numbered from 1 again.
    numbers = [*range(1, args.num_layers + 1), *range(1, further + 1)]
    return sum(_mask_of_layer(args, number) != first for number in numbers)


def _latents(args: argparse.Namespace, tensor: int) -> dict[str, Any]:
    if not args.multi_latent_attention:
        return {}
    return {
        "latent_rank": args.kv_lora_rank,
        "latent_rope": args.qk_pos_emb_head_dim,
        "query_rank": args.q_lora_rank or 0,
        # Projections down to latents are not split by tensor-parallel ranks, but under sequence
        # parallelism each has a part of the rows.
        "latent_split": tensor if args.sequence_parallel else 1,
    }


def _mask_of_layer(config: Any, layer_number: int) -> Mask:
    """The mask of a layer, numbered from 1; `config`: Megatron's arguments or its model config."""
    # --window-size L,R: L keys before a query's own and R behind it; without negative numbers or
    # keys behind, a sliding window of L + 1 keys. --window-attn-skip-freq: which layers see all.
    if is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
        return SlidingWindow(config.window_size[0] + 1)
    return CAUSAL


def masks_of(args: Any) -> tuple[Mask, ...]:
    """Masks of the model's layers: the one that plans are made for, then any other."""
    # Layers that predict further tokens are numbered from 1 again.
    numbers = range(1, max(args.num_layers, getattr(args, "mtp_num_layers", None) or 0) + 1)
    found = {_mask_of_layer(args, number) for number in numbers}
    return tuple(sorted(found, key=lambda mask: (mask != CAUSAL, mask.name)))


def mask_of(core_attention: Any) -> Mask:
    """The mask of a core attention, ours or patched Transformer Engine's."""
    return _mask_of_layer(core_attention.config, core_attention.layer_number)


def recompute_of(config: Any) -> Recomputed:
    """The forwards that a backward computes again, by a `TransformerConfig` or the arguments."""
    if config.recompute_granularity == "full":
        what = "block" if config.recompute_method == "block" else "uniform"
        return Recomputed(what, config.recompute_num_layers or 1)
    # Of selective recomputation only core attention matters here: other modules lie between
    # attention calls.
    if config.recompute_granularity == "selective" and "core_attn" in (config.recompute_modules or ("core_attn",)):
        return Recomputed("core_attention")
    return Recomputed()


def keeping(job: Session, model: Any) -> Keeping:
    """The decision maker of a job: how many layers keep in each step. Collective over the world."""
    chunks = model if isinstance(model, list) else [model]
    device, args = job_device(), job.args

    def of_strategy(strategy: Strategy | None) -> list[StepMemory]:
        if strategy is None or strategy == job.layout:
            return []
        return [_memory(job, scheme.tensor, scheme.pipeline) for scheme in strategy.pipelines]

    return Keeping(
        AgreedMemory.agreed(job.pool.stage, _device_bytes(job, device), _state_bytes(args, chunks, device)),
        _step_memory(job),
        job.pool.joint,
        lambda: float(torch.cuda.max_memory_allocated(device)) if device.type == "cuda" else None,
        agreement_every=job.config.agreement_every,
        of_strategy=of_strategy,
    )


def _step_memory(job: Session) -> StepMemory:
    """Memory of a step around its plans, by arguments alone: all ranks tell planners the same."""
    found = _memory(job, job.args.tensor_model_parallel_size, job.pool.num_stages)
    # Stages that attend together replay.
    return dataclasses.replace(found, asked="replay") if job.joint else found


def _memory(job: Session, tensor: int, num_stages: int) -> StepMemory:
    args, model = job.args, job.model(tensor)
    # A tensor-parallel rank has its share of logits, and of hidden states with sequence
    # parallelism.
    activations = dataclasses.replace(
        model,
        hidden_size=model.hidden_size // (tensor if args.sequence_parallel else 1),
        vocab_size=max(1, model.vocab_size // tensor),
    )
    return StepMemory(activations, stages_of(args, model, tensor, num_stages), job.config.backward)


def stages_of(args: Any, model: Model, tensor: int, num_stages: int) -> tuple[Stage, ...]:
    """The pipeline stages with their predicted state, on a TP rank of `tensor`, which has `model`."""
    virtual = args.virtual_pipeline_model_parallel_size or 1
    # The last stage has the layers of multi-token prediction, too.
    further = [0] * (num_stages - 1) + [args.mtp_num_layers or 0]
    ranks = args.tensor_model_parallel_size * args.pipeline_model_parallel_size
    ranks *= args.context_parallel_size * args.data_parallel_size
    shares = ranks // (tensor * num_stages) if args.use_distributed_optimizer else 1
    found: list[Stage] = []
    for at, more in enumerate(further):
        sharding = Sharding(pipeline=num_stages, stage=at, optimizer=shares, experts=model.expert_split)
        layers = args.num_layers // num_stages + more
        state = _predicted_state(args, model, tensor, sharding)
        found.append(Stage(layers, sharding, recompute_of(args), virtual, state))
    return tuple(found)


def _predicted_state(args: Any, model: Model, tensor: int, sharding: Sharding) -> float:
    """Bytes of parameters, gradients and optimizer of a rank that has `model`."""
    # Tables are split by tensor-parallel ranks, projections down to latents are not.
    own = dataclasses.replace(model, vocab_size=max(1, model.vocab_size // tensor), latent_split=1)
    others, experts = parameters_of_rank(own, sharding)
    each = model.bytes_per_element + _gradient_bytes(args)
    of_experts = sharding.optimizer_of_experts if args.use_distributed_optimizer else 1
    shared = others / sharding.optimizer + experts / of_experts
    return each * (others + experts) + OPTIMIZER_BYTES * shared


def _gradient_bytes(args: Any) -> int:
    return 2 if args.grad_reduce_in_bf16 else 4


def _device_bytes(job: Session, device: torch.device) -> float | None:
    """Bytes that tensors may have on this rank's device; on a CPU as the configuration says."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return float(free + torch.cuda.memory_reserved(device))
    given = {} if job.config.cluster is None else job.config.cluster.given
    return float(given["memory_bytes"]) if "memory_bytes" in given else None


def _state_bytes(args: Any, chunks: list[Any], device: torch.device) -> float:
    """Bytes of this rank's parameters, gradients, optimizer, or what the device counts, if more."""
    gradient = _gradient_bytes(args)
    shares = mpu.get_data_parallel_world_size(with_context_parallel=True) if args.use_distributed_optimizer else 1
    of_experts = mpu.get_expert_data_parallel_world_size() if args.use_distributed_optimizer else 1
    total = 0.0
    for parameter in (parameter for chunk in chunks for parameter in chunk.parameters()):
        shared = shares if getattr(parameter, "allreduce", True) else of_experts
        each = parameter.element_size() + (gradient + OPTIMIZER_BYTES / shared) * parameter.requires_grad
        total += parameter.numel() * each
    return max(total, float(torch.cuda.memory_allocated(device))) if device.type == "cuda" else total


def step_plans(job: Session, *, ahead: bool, evaluation: bool = False) -> StepPlans:
    """Plans of a job's steps, or of its `evaluation`, without a backward. `ahead`: whether to plan
    in a background process, if samples are ours.
    """
    spec = plan_spec(job, joint=job.joint, evaluation=evaluation)
    own = _by_own_scheduler(spec.choice())
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
        _samples(job),
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
    mode: dict[str, Any]
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
        options["tokens_per_rank"] = int(held * getattr(choice.options, "slack", 1.0))
        options["tokens_per_rank"] = -(-options["tokens_per_rank"] // gpus) if changes else options["tokens_per_rank"]
    table = None if job.config.plan_costs is None else str(job.config.plan_costs.resolve())
    if changes:
        options["strategies"] = tuple(map(str, job.candidates))
        shares = [scheme.tensor for strategy in job.candidates for scheme in strategy.pipelines]
        align = lcm(*shares) if job.args.sequence_parallel else 1
        cluster, model, mode = job.gpus(), job.model(1), {"changes": True, "base": str(job.layout)}
    else:
        if job.candidates:  # evaluated on the layout, which takes Megatron's own samples whole
            options["strategies"] = ()
            full = tokens_per_rank(job.args.seq_length, size, job.args.context_parallel_size)
            options["tokens_per_rank"] = max(options["tokens_per_rank"], full)
        align, cluster, model = job.row_multiple, job.cluster(), job.model()
        chunks = job.args.virtual_pipeline_model_parallel_size or 1
        pipeline = JointStages(job.joint_cluster(), chunks) if joint else None
        strategy = str(job.layout) if choice.planner.pipelines else None
        mode = {"pipeline": pipeline, "ping_pong": job.ping_pong, "strategy": strategy}
    layers = dataclasses.replace(choice.layers, align=align)
    return PlanSpec(choice.name, cluster, model, layers, options, table, **mode, memory=_step_memory(job))


def check_holds(spec: PlanSpec, seq_length: int) -> None:
    """Reject candidates none of which holds a whole sample; ConfigError names the largest."""
    known = StepPlanner(spec).candidates()
    best = max(known, key=lambda each: each.max_tokens)
    if best.max_tokens < seq_length:
        raise ConfigError(
            f"strategies: no candidate holds --seq-length {seq_length}: {best.strategy}, with the longest microbatch, "
            f"holds {best.max_tokens} tokens; {best.longer_with(seq_length)}"
        )


def first_lengths(job: Session) -> Lengths:
    """The lengths of the first step, where samples are ours; else of a microbatch of full samples."""
    known = _samples(job)
    found = None
    if known.lengths is not None:
        found = known.step(known.consumed(), get_num_microbatches())
    return found or ((job.args.seq_length,) * known.per_microbatch,)


def _samples(job: Session) -> Samples:
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
        trees=getattr(data, "sample_trees", None) if job.args.balance_trees else None,
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


PROBE = ((8192, 4096, 2048, 1024, 512, 256, 128, 64, 32, 16), 1024, 8)


def _by_own_scheduler(choice: PlannerChoice) -> PlannerChoice | None:
    """The planner with groups by Megatron's own scheduler; None: it follows none, or none works."""
    plan_with = choice.planner.plan_with(choice.options) if choice.planner.plan_with is not None else None
    scheduler = _own_scheduler() if plan_with is not None else None
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
            return megatron.RULES["hybrid"](lengths, tokens, num_ranks)


def _own_scheduler() -> Scheduler | None:
    """The scheduler of the installed megatron-core; None: none that works; the log says which."""
    # Through megatron-core 0.19 this is `BalancedCPScheduler`, whose rules are `rules: hybrid`. Its
    # code decides; what surrounds it there (data loader, forward pass) is not used, and does not
    # run in 0.17 to 0.19.
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
