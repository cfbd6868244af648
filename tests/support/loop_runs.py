"""A training loop of the shape of Megatron-Bridge's, which imports Megatron's schedules and never
calls its `pretrain`: its own model, groups, optimizer and data, no arguments of Megatron's.

As Bridge's `train_step` and `evaluate` (August 2026, 067f987df): the forward step takes the loop's
state first, bound once; the schedule is called inside the rerun loop, by keywords, with a
communicator and groups of the loop's own; losses are summed over microbatches, then over `dp_cp`.
`python -m tools.bridge_parity` runs Bridge itself.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

LENGTHS = (64, 17, 40, 5, 33, 64, 2, 50)
"""Of the documents: one a sample, so that plain causal attention is right; the rest is padding."""
SIZE, VOCABULARY, STEPS = 64, 96, 3


@dataclass
class State:
    """The loop's own, which its forward step gets."""

    steps_run: int = 0


def batches(step: int, replica: int, num_replicas: int) -> Iterator[dict[str, torch.Tensor]]:
    """The microbatches of one sample that a replica reads in a step."""
    for at, length in list(enumerate(LENGTHS))[replica::num_replicas]:
        tokens = (torch.arange(SIZE) * (3 + at) + 7 * step) % VOCABULARY
        positions = torch.where(torch.arange(SIZE) < length, torch.arange(SIZE), -1)
        mask = (torch.arange(SIZE) < length - 1).float()
        sample = {"tokens": tokens, "labels": tokens.roll(-1), "loss_mask": mask, "position_ids": positions}
        yield {name: value[None] for name, value in sample.items()}


def forward_step(state: State, iterator: Any, model: Any) -> Any:
    """The loop's own forward step, with loss per token; plans replace it."""
    state.steps_run += 1
    batch = next(iterator)
    future = torch.ones(SIZE, SIZE, dtype=torch.bool).triu(1)[None, None]
    positions = batch["position_ids"].clamp(min=0)
    losses = model(batch["tokens"], positions, future, labels=batch["labels"])

    def loss(mask: torch.Tensor, output: torch.Tensor) -> Any:
        total, tokens = (output * mask).sum(), mask.sum().int()
        return total, tokens, {"lm loss": torch.stack([total.detach(), tokens.float()])}

    return losses, partial(loss, batch["loss_mask"])


def reduced(stored: list[dict[str, torch.Tensor]], groups: Any) -> float:
    """The loss of a token over all microbatches and ranks."""
    total = torch.vstack([each["lm loss"].view(-1) for each in stored]).sum(0)
    dist.all_reduce(total, group=groups.dp_cp)
    return float(total[0] / total[1])


def build() -> tuple[Any, Any, Any]:
    """The model's config, the wrapped model and its optimizer; process groups before them."""
    from megatron.core import mpu
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    dist.init_process_group("gloo")
    mpu.initialize_model_parallel()
    model_parallel_cuda_manual_seed(5)
    torch.manual_seed(5)
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2, add_bias_linear=False,
        attention_dropout=0.0, hidden_dropout=0.0, calculate_per_token_loss=True, normalization="RMSNorm",
        masked_softmax_fusion=False, bias_dropout_fusion=False, bias_activation_fusion=False, apply_rope_fusion=False,
        gradient_accumulation_fusion=False, persist_layer_norm=False,
    )  # fmt: skip
    gpt = GPTModel(config, get_gpt_layer_local_spec(), VOCABULARY, SIZE, position_embedding_type="rope")
    model = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), gpt)
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-2, clip_grad=1.0), [model])
    config.finalize_model_grads_func = finalize_model_grads
    return config, model, optimizer


def run(argv: list[str]) -> int:
    """Train, and print losses, gradient norms and evaluated losses as JSON.

    `argv`: the balance configuration, or nothing.
    """
    from megatron.core import mpu
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.rerun_state_machine import RerunDataIterator, get_rerun_state_machine

    from megatron_balance.megatron.library import balance

    config, model, optimizer = build()
    forward_backward: Any = get_forward_backward_func(pp_size=1, vp_size=None)
    loop = balance(model, forward_backward, argv[0], seq_length=SIZE, micro_batch_size=1) if argv else None
    replica, num_replicas = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
    state, groups = State(), ProcessGroupCollection.use_mpu_process_groups()
    common: dict[str, Any] = {
        "forward_step_func": partial(forward_step, state),
        "model": [model],
        "num_microbatches": len(LENGTHS) // num_replicas,
        "seq_length": SIZE,
        "micro_batch_size": 1,
        "adjust_tensor_shapes_fn": None,
        "p2p_communicator": P2PCommunicator(pp_group=groups.pp, config=config),
        "pg_collection": groups,
    }
    rerun = get_rerun_state_machine()
    with nullcontext(forward_backward) if loop is None else loop as schedule:
        for step in range(STEPS):
            iterator: Any = RerunDataIterator(batches(step, replica, num_replicas))
            stored: list[dict[str, torch.Tensor]] = []
            while rerun.should_run_forward_backward(iterator):
                model.zero_grad_buffer()
                optimizer.zero_grad()
                stored = schedule(data_iterator=iterator, decoder_seq_length=SIZE, forward_only=False, **common)
            rerun.should_checkpoint_and_exit()
            _, norm, _ = optimizer.step() or (True, 0.0, None)
            model.eval()
            with torch.no_grad():
                evaluated = schedule(data_iterator=batches(STEPS, replica, num_replicas), forward_only=True, **common)
            model.train()
            values = [reduced(stored, groups), float(norm or 0), reduced(evaluated, groups)]
            sys.stdout.write(f"step {json.dumps(values)}\n")
    sys.stdout.write(f"own forward steps {state.steps_run}\n")
    dist.destroy_process_group()
    return 0
