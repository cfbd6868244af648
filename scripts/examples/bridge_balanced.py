"""Balanced training in Megatron-Bridge: `balanced` around its `pretrain`, and a small GPT (bridge.md).

torchrun --nproc-per-node 2 bridge_balanced.py --corpus PREFIX --balance balance.yaml [--cpu]
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NoReturn

VOCABULARY = 96
ON_CPU = (
    "transformer_engine",
    "transformer_engine.pytorch",
    "nvidia_resiliency_ext",
    "nvidia_resiliency_ext.inprocess",
)
"""Modules that Bridge imports whether it uses them or not, and that a CPU alone has not."""


@contextmanager
def balanced(config: str, log_folder: str | None = None) -> Iterator[None]:
    """Train with plans whatever Bridge's `pretrain` or `finetune` trains inside.

    Bridge takes no forward-backward function, so four of its names are others meanwhile: `setup`,
    behind which the model is there, the `get_forward_backward_func` of training and evaluation, and
    `train_step`, behind which loss and gradient norm are known.

    `config`: the balance configuration. `log_folder`: of its records of steps.
    """
    bridge = {name: _bridge(name) for name in ("pretrain", "train", "eval")}
    replaced = (("pretrain", "setup"), ("train", "train_step"))
    replaced += tuple((name, "get_forward_backward_func") for name in ("train", "eval"))
    own = {(module, name): getattr(bridge[module], name) for module, name in replaced}
    with ExitStack() as stack:

        def set_up(state: Any, *args: Any, **kwargs: Any) -> Any:
            check(state.cfg)
            found = own["pretrain", "setup"](state, *args, **kwargs)
            loop = stack.enter_context(loop_of(found, own["train", "get_forward_backward_func"], config, log_folder))
            bridge["train"].train_step = with_record(own["train", "train_step"], loop, found.state)
            for name in ("train", "eval"):
                bridge[name].get_forward_backward_func = lambda **_: loop
            return found

        bridge["pretrain"].setup = set_up
        try:
            yield
        finally:
            for (module, name), function in own.items():
                setattr(bridge[module], name, function)


def loop_of(found: Any, schedule: Any, config: str, log_folder: str | None) -> Any:
    """The forward-backward function with plans of what Bridge's `setup` gave."""
    from megatron_balance.megatron.library import balance

    state, cfg = found.state, found.state.cfg
    writers = []
    if state.tensorboard_logger:
        writers.append(state.tensorboard_logger.add_scalar)
    if state.wandb_logger:
        writers.append(lambda name, value, step: state.wandb_logger.log({name: value}, step))
    return balance(
        found.model,
        schedule(
            pp_size=cfg.model.pipeline_model_parallel_size, vp_size=cfg.model.virtual_pipeline_model_parallel_size
        ),
        config,
        seq_length=cfg.model.seq_length,
        micro_batch_size=cfg.train.micro_batch_size,
        vocab_size=cfg.model.vocab_size,
        check_for_nan_in_loss=cfg.rerun_state_machine.check_for_nan_in_loss,
        check_for_spiky_loss=cfg.rerun_state_machine.check_for_spiky_loss,
        steps_done=state.train_state.step,
        log_folder=log_folder,
        writers=writers,
        timeout_minutes=cfg.dist.distributed_timeout_minutes,
    )


def with_record(train_step: Any, loop: Any, state: Any) -> Any:
    """Bridge's `train_step`, after which the step's record is written, and its throughput is of the
    sequences that were read: Bridge's own forward step counts them otherwise.
    """

    def step(*args: Any, **kwargs: Any) -> Any:
        result = train_step(*args, **kwargs)
        losses, grad_norm = result[0], result[5]
        loop.finish_step(losses.get("lm loss"), grad_norm, step=state.train_state.step + 1)
        state._flops_seqlen_sum = sum(int(each.sum()) for each in loop.sequences)
        state._flops_seqlen_sq_sum = sum(int((each**2).sum()) for each in loop.sequences)
        state._flops_requires_global_reduce = True  # replicas read different sequences
        return result

    return step


def check(cfg: Any) -> None:
    """Refuse what the loop would do and plans do not; all reasons at once.

    Raises:
        ConfigError: says what to set.
    """
    from megatron_balance.errors import ConfigError

    data, eval_batch = cfg.dataset, cfg.validation.eval_micro_batch_size
    reasons = {
        "dist.use_decentralized_pg: plans take the groups of Megatron's parallel_state; set it to False": (
            cfg.dist.use_decentralized_pg
        ),
        "dataset.reset_attention_mask without reset_position_ids: a document opens at position 0; set both": (
            getattr(data, "reset_attention_mask", False) and not getattr(data, "reset_position_ids", False)
        ),
        "validation.eval_micro_batch_size: evaluation has the micro batch of training; leave it out": (
            eval_batch not in (None, cfg.train.micro_batch_size)
        ),
        "inprocess_restart: it renumbers ranks while the job runs; leave it out": (
            cfg.inprocess_restart is not None and cfg.inprocess_restart.enabled
        ),
        "peft, or a model that distils another: the forward step and the loss are Megatron's of pretraining": (
            cfg.peft is not None or hasattr(cfg.model, "teacher")
        ),
    }
    found = [reason for reason, holds in reasons.items() if holds]
    if found:
        raise ConfigError("; ".join(found))


def _bridge(name: str) -> Any:
    return importlib.import_module(f"megatron.bridge.training.{name}")


class _Anything(type):
    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent


class Absent(metaclass=_Anything):
    """A class of a module that is not there: named in Bridge's annotations, and never made."""

    def __init__(self, *_: Any, **__: Any) -> NoReturn:
        raise RuntimeError("a class of a module that a CPU has not; take another layer spec or switch the option off")


class _AbsentModule(types.ModuleType):
    def __getattr__(self, name: str) -> type:
        return getattr(Absent, name)


def on_cpu() -> None:
    """Let Megatron and Bridge run without a GPU: "cuda" means the CPU, and Bridge's imports succeed.

    Megatron is imported first, so that it knows that Transformer Engine is not there.
    """
    from megatron_balance.megatron import cpu

    cpu.install()
    importlib.import_module("megatron.training")
    for name in ON_CPU:
        sys.modules[name] = _AbsentModule(name)
    for name in ("pretrain", "gpt_step"):
        _bridge(name)
    for name in ON_CPU:
        del sys.modules[name]


def local_layers(config: Any) -> Any:
    """The spec of Megatron's own layers with planned attention: theirs refuses context parallelism."""
    from megatron.bridge.models.gpt_provider import local_layer_spec  # pyright: ignore[reportMissingImports]

    from megatron_balance.megatron.gpt import balanced_spec

    return balanced_spec(local_layer_spec(config))


def configuration(args: argparse.Namespace) -> Any:
    """Bridge's configuration of a small Llama on documents, evaluated as it trains."""
    import torch
    from megatron.bridge.models.gpt_provider import (  # pyright: ignore[reportMissingImports]
        GPTModelProvider,
        default_layer_spec,
        local_layer_spec,
    )

    config: Any = _bridge("config")
    fused = not args.cpu
    own_layers = local_layers if args.balance else local_layer_spec
    dtype = torch.bfloat16 if fused else torch.float32
    model = GPTModelProvider(
        num_layers=args.layers, hidden_size=64, ffn_hidden_size=128, num_attention_heads=8, num_query_groups=4,
        seq_length=args.seq_length, vocab_size=VOCABULARY, make_vocab_size_divisible_by=16, normalization="RMSNorm",
        activation_func=torch.nn.functional.silu, gated_linear_unit=True, position_embedding_type="rope",
        add_bias_linear=False, attention_dropout=0.0, hidden_dropout=0.0, share_embeddings_and_output_weights=False,
        transformer_layer_spec=default_layer_spec if fused else own_layers,
        transformer_impl="transformer_engine" if fused else "local", bf16=fused,
        params_dtype=dtype, pipeline_dtype=dtype,
        context_parallel_size=args.context, pipeline_model_parallel_size=args.pipeline, cp_comm_type="all_gather",
        tensor_model_parallel_size=args.tensor, sequence_parallel=fused and args.tensor > 1,
        bias_activation_fusion=fused, bias_dropout_fusion=fused, masked_softmax_fusion=False, apply_rope_fusion=fused,
        persist_layer_norm=fused, gradient_accumulation_fusion=False, cross_entropy_loss_fusion=fused,
        calculate_per_token_loss=True,
    )  # fmt: skip
    return config.ConfigContainer(
        model=model,
        train=config.TrainingConfig(train_iters=args.steps, global_batch_size=args.batch, micro_batch_size=1),
        validation=config.ValidationConfig(eval_interval=2, eval_iters=1),
        optimizer=config.OptimizerConfig(
            optimizer="adam", lr=1e-3, min_lr=1e-3, clip_grad=1.0, bf16=fused, use_distributed_optimizer=fused
        ),
        scheduler=config.SchedulerConfig(
            lr_decay_style="constant", lr_decay_iters=args.steps, lr_warmup_iters=0, start_weight_decay=0.01,
            end_weight_decay=0.01,
        ),
        ddp=config.DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, average_in_collective=False, use_distributed_optimizer=fused
        ),
        dataset=config.GPTDatasetConfig(
            data_path=[args.corpus], split="80,20,0", seq_length=args.seq_length, random_seed=11,
            reset_position_ids=True, reset_attention_mask=True, eod_mask_loss=True, create_attention_mask=args.cpu,
            skip_getting_attention_mask_from_dataset=not args.cpu, dataloader_type="single", num_workers=0,
        ),
        logger=config.LoggerConfig(log_interval=1),
        tokenizer=config.TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=VOCABULARY - 1),
        checkpoint=config.CheckpointConfig(save=None, load=None),
        rng=config.RNGConfig(seed=11),
        dist=config.DistributedInitConfig(distributed_backend="nccl" if fused else "gloo"),
    )  # fmt: skip


def main() -> None:
    """Train, and print the loss and gradient norm of every step, and evaluations, as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", required=True, help="prefix of a .bin and .idx, documents ending with token 95")
    parser.add_argument("--balance", help="the balance configuration; without it, Bridge alone")
    parser.add_argument("--balance-log", metavar="DIR", help="write steps.jsonl here")
    parser.add_argument("--cpu", action="store_true", help="without a GPU, in fp32, with Megatron's own layers")
    numbers = {"steps": 4, "batch": 4, "seq-length": 512, "layers": 2, "context": 1, "pipeline": 1, "tensor": 1}
    for name, value in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    if args.cpu:
        on_cpu()
    callbacks: Any = _bridge("callbacks")
    manager = callbacks.CallbackManager()
    manager.register("on_train_step_end", lambda at: say("step", at.loss_dict, at.grad_norm))
    manager.register("on_eval_end", lambda at: say("eval", at.total_loss_dict))
    with balanced(args.balance, args.balance_log) if args.balance else nullcontext():
        _bridge("pretrain").pretrain(configuration(args), _bridge("gpt_step").forward_step, callbacks=manager)


def say(what: str, losses: dict[str, Any], *others: float) -> None:
    """Print a line of JSON where losses are: on ranks of the last pipeline stage."""
    if losses:
        sys.stdout.write(f"{what} {json.dumps([*map(float, losses.values()), *others])}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
