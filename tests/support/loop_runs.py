"""Training loops of libraries that import Megatron's schedules and never call its `pretrain`."""

# Their own model, groups, optimizer and data, no arguments of Megatron's.

import json
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

# Of the documents: one a sample, so that plain causal attention is right; the rest is padding.
LENGTHS = (64, 17, 40, 5, 33, 64, 2, 50)
# `SPIKY`: the step, from 0, whose losses leap by what the loop tells the rerun machine.
SIZE, VOCABULARY, STEPS, SPIKY = 64, 96, 3, 1
# The number of the second step, in a loop of NeMo's shape that resumes behind step 4.
SKIPPED_TO = 8


@dataclass
class State:
    # The loop's own, which its forward step gets.
    steps_run: int = 0


def batches(step: int, replica: int, num_replicas: int) -> Iterator[dict[str, torch.Tensor]]:
    # The microbatches of one sample that a replica reads in a step.
    for at, length in list(enumerate(LENGTHS))[replica::num_replicas]:
        tokens = (torch.arange(SIZE) * (3 + at) + 7 * step) % VOCABULARY
        positions = torch.where(torch.arange(SIZE) < length, torch.arange(SIZE), -1)
        mask = (torch.arange(SIZE) < length - 1).float()
        sample = {"tokens": tokens, "labels": tokens.roll(-1), "loss_mask": mask, "position_ids": positions}
        yield {name: value[None] for name, value in sample.items()}


def forward_step(state: State, iterator: Any, model: Any) -> Any:
    # The loop's own forward step, with loss per token; plans replace it.
    state.steps_run += 1
    batch = next(iterator)
    future = torch.ones(SIZE, SIZE, dtype=torch.bool).triu(1)[None, None]
    positions = batch["position_ids"].clamp(min=0)
    losses = model(batch["tokens"], positions, future, labels=batch["labels"])

    def loss(mask: torch.Tensor, output: torch.Tensor) -> Any:
        total, tokens = (output * mask).sum(), mask.sum().int()
        return total, tokens, {"lm loss": torch.stack([total.detach(), tokens.float()])}

    return losses, partial(loss, batch["loss_mask"])


def never(*_: Any, **__: Any) -> Any:
    # A forward step that plans replace.
    raise AssertionError("the loop's own forward step was called")


def rows_of(found: dict[str, Any]) -> dict[str, torch.Tensor]:
    # A batch of verl's: ragged sequences [B, any] side by side, with labels and positions.
    tokens = found["input_ids"].to_padded_tensor(0)
    lengths = found["input_ids"].offsets().diff()[:, None]
    at = torch.arange(tokens.shape[1]).expand_as(tokens)
    return {
        "tokens": tokens,
        "labels": found["labels"].to_padded_tensor(0),
        "loss_mask": (at < lengths - 1).float(),
        "position_ids": at.masked_fill(at >= lengths, -1),
    }


def ragged(given: Iterator[dict[str, torch.Tensor]], sizes: tuple[int, ...]) -> Iterator[dict[str, torch.Tensor]]:
    # The samples as verl has them, `sizes` of them in a microbatch.
    for size in sizes:
        samples = [next(given) for _ in range(size)]
        held = [each["position_ids"][0] >= 0 for each in samples]
        yield {
            name: torch.nested.nested_tensor(
                [each[source][0][mask] for each, mask in zip(samples, held, strict=True)], layout=torch.jagged
            )
            for name, source in (("input_ids", "tokens"), ("labels", "labels"))
        }


@dataclass(frozen=True)
class Shape:
    # How a library calls: keywords of its call and of `balance`, and what its iterator gives.
    call: dict[str, Any]
    balance: dict[str, Any]
    iterator: Any
    name: str = "lm loss"


def shape_of(library: str, config: Any, model: Any, per_replica: int) -> Shape:
    # The shape of a library's calls; `per_replica`: samples of a step.
    if library == "nemo":
        call = {"model": model, "num_microbatches": per_replica, "seq_length": SIZE, "micro_batch_size": 1}
        call |= {"forward_step_func": never, "decoder_seq_length": None, "adjust_tensor_shapes_fn": None}
        name = "loss_sum_and_ub_size"
        told = {"batch_of": lambda found: found[0], "loss_name": name, "steps_done": 4}
        return Shape(call, told, lambda samples: ((each, at, 0) for at, each in enumerate(samples)), name)
    if library == "verl":
        sizes = (1, per_replica - 1)
        call = {"model": [model], "num_microbatches": 2, "seq_length": 1, "micro_batch_size": 1}
        call["forward_step_func"] = never
        told = {"batch_of": rows_of, "micro_batch_size": per_replica}
        return Shape(call, told, lambda samples: iter(list(ragged(samples, sizes))))
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
    from megatron.core.process_groups_config import ProcessGroupCollection

    groups = ProcessGroupCollection.use_mpu_process_groups()
    call = {"model": [model], "num_microbatches": per_replica, "seq_length": SIZE, "micro_batch_size": 1}
    call |= {"adjust_tensor_shapes_fn": None, "pg_collection": groups}
    call["p2p_communicator"] = P2PCommunicator(pp_group=groups.pp, config=config)
    return Shape(call, {}, iter)


def reduced(stored: list[dict[str, torch.Tensor]], name: str) -> float:
    # The loss of a token over all microbatches and ranks.
    from megatron.core import mpu

    total = torch.vstack([each[name].view(-1) for each in stored if each[name][1] > 0]).sum(0)
    dist.all_reduce(total, group=mpu.get_data_parallel_group(with_context_parallel=True))
    return float(total[0] / total[1])


def build() -> tuple[Any, Any, Any]:
    # The model's config, the wrapped model and its optimizer; process groups before them.
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


def spiky(machine: Any, step: int) -> None:
    # Let losses leap in step SPIKY alone, as after a hundred losses up to 1: a token's is 4 to 5
    # here, and their sums are ten times that.
    machine.large_value_counts["loss"], machine.max_values["loss"] = 100, 1.0
    machine.spiky_loss_factor = 3.0 if step == SPIKY else 10.0


def run(argv: list[str]) -> int:
    # Train, and print losses, gradient norms and evaluated losses as JSON.
    #
    # `argv`: the library whose shape the calls have; the balance configuration, or nothing; the
    # folder of records, or nothing.
    from megatron.core import mpu
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
    from megatron.core.rerun_state_machine import RerunDataIterator, RerunMode, get_rerun_state_machine

    from megatron_balance.megatron.library import balance

    config, model, optimizer = build()
    library, config.variable_seq_lengths = argv[0], argv[0] == "verl"
    forward_backward: Any = get_forward_backward_func(pp_size=1, vp_size=None)
    replica, num_replicas = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
    shape, state = shape_of(library, config, model, len(LENGTHS) // num_replicas), State()
    told = {"seq_length": SIZE, "micro_batch_size": 1, "check_for_spiky_loss": True, "log_folder": argv[-1]}
    loop = balance(model, forward_backward, argv[1], **{**told, **shape.balance}) if len(argv) > 1 else None
    common = {"forward_step_func": partial(forward_step, state), **shape.call}
    machine: Any = get_rerun_state_machine()
    with nullcontext(forward_backward) if loop is None else loop as schedule:
        for step in range(STEPS):
            machine.set_mode(RerunMode.VALIDATE_RESULTS)
            spiky(machine, step)
            iterator: Any = RerunDataIterator(shape.iterator(batches(step, replica, num_replicas)))
            stored: list[dict[str, torch.Tensor]] = []
            while machine.should_run_forward_backward(iterator):
                model.zero_grad_buffer()
                optimizer.zero_grad()
                stored = schedule(data_iterator=iterator, forward_only=False, **common)
            machine.should_checkpoint_and_exit()
            _, norm, _ = optimizer.step() or (True, 0.0, None)
            values = [reduced(stored, shape.name), float(norm or 0)]
            if loop is not None:
                loop.finish_step(*values, step=SKIPPED_TO if library == "nemo" and step == 1 else None)
                sys.stdout.write(f"read {json.dumps([each.tolist() for each in loop.sequences])}\n")
            model.eval()
            machine.set_mode(RerunMode.DISABLED)
            with torch.no_grad():
                samples = shape.iterator(batches(STEPS, replica, num_replicas))
                evaluated = schedule(data_iterator=samples, forward_only=True, **common)
            model.train()
            sys.stdout.write(f"step {json.dumps([*values, reduced(evaluated, shape.name)])}\n")
    sys.stdout.write(f"own forward steps {state.steps_run}\n")
    dist.destroy_process_group()
    return 0
