"""Memory of this rank in Megatron's terms: its device, its parameters, the layers of each stage."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from megatron.core import mpu

from megatron_balance.analysis.backward import Stage
from megatron_balance.analysis.memory import OPTIMIZER_BYTES, Sharding, parameters_of_rank
from megatron_balance.analysis.step_memory import StepMemory
from megatron_balance.ir.model import Model
from megatron_balance.ir.strategy import Strategy
from megatron_balance.megatron.job import PlannedJob
from megatron_balance.megatron.recompute import recompute_of
from megatron_balance.megatron.tokens import job_device
from megatron_balance.training.keeping import Keeping, RankMemory, agree_memory


def keeping(job: PlannedJob, model: Any) -> Keeping:
    """The decision maker of a job: how many layers keep in each step. Collective over the world."""
    chunks = model if isinstance(model, list) else [model]
    device, args = job_device(), job.args
    mine = RankMemory(job.pool.stage, _device_bytes(job, device), _state_bytes(args, chunks, device))

    def of_strategy(strategy: Strategy | None) -> list[StepMemory]:
        if strategy is None or strategy == job.layout:
            return []
        return [_memory(job, scheme.tensor, scheme.pipeline) for scheme in strategy.pipelines]

    return Keeping(
        agree_memory(mine),
        step_memory(job),
        job.pool.joint,
        lambda: float(torch.cuda.max_memory_allocated(device)) if device.type == "cuda" else None,
        agreement_every=job.config.agreement_every,
        of_strategy=of_strategy,
    )


def step_memory(job: PlannedJob) -> StepMemory:
    """The memory of a training step around its plans, by Megatron's arguments alone: what every rank
    tells its planner is the same. Stages that attend together replay.
    """
    found = _memory(job, job.args.tensor_model_parallel_size, job.pool.num_stages)
    return dataclasses.replace(found, asked="replay") if job.joint else found


def _memory(job: PlannedJob, tensor: int, num_stages: int) -> StepMemory:
    args, model = job.args, job.model(tensor)
    return StepMemory(
        _activations(model, args, tensor), stages_of(args, model, tensor, num_stages), job.config.backward
    )


def stages_of(args: Any, model: Model, tensor: int, num_stages: int) -> tuple[Stage, ...]:
    """The pipeline stages of a job with their predicted state, on one of `tensor` tensor-parallel
    ranks, which has `model`; the last has the layers of multi-token prediction, too.
    """
    virtual = args.virtual_pipeline_model_parallel_size or 1
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
    """Bytes of parameters, gradients and optimizer of a rank that has `model`. Tables are split by
    tensor-parallel ranks, projections down to latents are not.
    """
    own = dataclasses.replace(model, vocab_size=max(1, model.vocab_size // tensor), latent_split=1)
    others, experts = parameters_of_rank(own, sharding)
    each = model.bytes_per_element + _gradient_bytes(args)
    of_experts = sharding.optimizer_of_experts if args.use_distributed_optimizer else 1
    shared = others / sharding.optimizer + experts / of_experts
    return each * (others + experts) + OPTIMIZER_BYTES * shared


def _gradient_bytes(args: Any) -> int:
    return 2 if args.grad_reduce_in_bf16 else 4


def _device_bytes(job: PlannedJob, device: torch.device) -> float | None:
    """Bytes that tensors may have on this rank's device.

    On a CPU the configuration's word, if it has one: no rank has a device of its own there.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return float(free + torch.cuda.memory_reserved(device))
    given = {} if job.config.cluster is None else job.config.cluster.given
    return float(given["memory_bytes"]) if "memory_bytes" in given else None


def _state_bytes(args: Any, chunks: list[Any], device: torch.device) -> float:
    """Bytes of parameters, gradients and optimizer on this rank: predicted from its parameters, or
    what the device counts already, if that is more.
    """
    gradient = _gradient_bytes(args)
    shares = mpu.get_data_parallel_world_size(with_context_parallel=True) if args.use_distributed_optimizer else 1
    of_experts = mpu.get_expert_data_parallel_world_size() if args.use_distributed_optimizer else 1
    total = 0.0
    for parameter in (parameter for chunk in chunks for parameter in chunk.parameters()):
        shared = shares if getattr(parameter, "allreduce", True) else of_experts
        each = parameter.element_size() + (gradient + OPTIMIZER_BYTES / shared) * parameter.requires_grad
        total += parameter.numel() * each
    return max(total, float(torch.cuda.memory_allocated(device))) if device.type == "cuda" else total


def _activations(model: Model, args: Any, size: int) -> Model:
    """The model as the activations of one of `size` tensor-parallel ranks see it: its share of
    logits, and of hidden states with sequence parallelism.
    """
    return dataclasses.replace(
        model,
        hidden_size=model.hidden_size // (size if args.sequence_parallel else 1),
        vocab_size=max(1, model.vocab_size // size),
    )
