"""Balanced schedules for training loops that import Megatron's schedules and never call `pretrain`.

Such a loop builds its model, its groups and its optimizer itself, and calls the function that
`get_forward_backward_func` gives it once a step. `balance` gives it another one in its place.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch.distributed as dist
from megatron.core import mpu
from megatron.core.utils import get_model_config, unwrap_model

from megatron_balance.errors import ConfigError
from megatron_balance.megatron import session
from megatron_balance.megatron.arguments import REFUSALS, leave_out, reasons_in
from megatron_balance.megatron.core_attention import give_core_attention
from megatron_balance.megatron.entry import te_available
from megatron_balance.megatron.forward_backward import balanced_schedule
from megatron_balance.megatron.latent import latent_reasons
from megatron_balance.megatron.log import log_reasons
from megatron_balance.patches import applied
from megatron_balance.patches.selection import for_loop
from megatron_balance.planning.run import Run, load_config

log = logging.getLogger(__name__)

NAMES = {"num_experts": "num_moe_experts", "swiglu": "gated_linear_unit", "fp8_format": "fp8"}
"""Options of Megatron's command line by another name than in its `TransformerConfig`."""


class BalancedLoop:
    """A forward-backward function with planned microbatches; keywords and result are Megatron's.

    Its iterator gives a batch a microbatch: a mapping with `tokens`, `labels`, `loss_mask` and
    `position_ids`, each [B, S]. Position 0 opens a document, -1 is padding. The loss is per token;
    what it stores of a microbatch is `lm loss`, a sum and its tokens.
    """

    def __init__(self, job: session.Session, forward_backward_func: Callable[..., Any]) -> None:
        """Open the session of `job`; `close` ends it."""
        self._job = job
        self._schedule = balanced_schedule(forward_backward_func)
        patches = for_loop(job.args, joint=job.joint, nano_batches=job.ping_pong)
        with ExitStack() as stack:
            stack.enter_context(applied(patches, job.config.accepted_sources, str(job.config.source)))
            stack.enter_context(session.opened(job))
            job.make_pools()
            self._stack = stack.pop_all()

    def __call__(self, *, num_microbatches: int, forward_only: bool = False, **kwargs: Any) -> Any:
        """Run a step; arguments and result as Megatron's, whose `forward_step_func` ours replaces."""
        result = self._schedule(num_microbatches=num_microbatches, forward_only=forward_only, **kwargs)
        if not forward_only:
            args = self._job.args
            args.consumed_train_samples += num_microbatches * args.micro_batch_size * self._job.pool.num_replicas
            args.curr_iteration += 1
        return result

    def close(self) -> None:
        """End background work, and undo all patches."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def balance(
    model: Any,
    forward_backward_func: Callable[..., Any],
    config: str | Path | Run,
    *,
    seq_length: int,
    micro_batch_size: int,
    vocab_size: int = 1,
    check_for_nan_in_loss: bool = False,
) -> BalancedLoop:
    """Plan the microbatches of a loop that calls Megatron's schedules itself.

    Collective over the world, once, after `initialize_model_parallel` and when the model is built.

    Args:
        model: a GPT, or its chunks, wrapped or not. Its config says `calculate_per_token_loss`.
        forward_backward_func: what Megatron's `get_forward_backward_func` gave.
        config: the balance configuration, or its YAML.
        seq_length: most tokens of a sample.
        micro_batch_size: samples of a microbatch on each replica.
        vocab_size: for predicted memory and `self_check`.
        check_for_nan_in_loss: whether a loss that is no number ends the job or replays the step, by
            Megatron's rerun state machine.

    Raises:
        ConfigError: a model or a planner that cannot run so; all reasons at once.
    """
    chunks = model if isinstance(model, list | tuple) else [model]
    run = config if isinstance(config, Run) else load_config(config)
    if run.planner is None or run.planner.planner.plan_step is not None:
        named = "none" if run.planner is None else run.planner.name
        raise ConfigError(
            f"{run.source}: planner {named}: a loop of its own needs a planner that keeps the microbatches it is "
            "given, for example 'planner: {name: zeppelin}'"
        )
    model_config = get_model_config(chunks[0])
    args = arguments_of(model_config, chunks, seq_length, micro_batch_size, vocab_size)
    args.check_for_nan_in_loss_and_grad = check_for_nan_in_loss
    reasons = [*reasons_in(REFUSALS, args), *log_reasons(args, run), *latent_reasons(args, wanted=run.latent_kv)]
    reasons += session.way_reasons(args, run)
    if reasons:
        raise ConfigError("; ".join(reasons))
    for sentence in leave_out(args, [model_config]):
        log.warning("%s", sentence)
    for chunk in chunks:
        give_core_attention(chunk)
    return BalancedLoop(session.Session(args, run, te_patched=te_available()), forward_backward_func)


def arguments_of(
    model_config: Any, chunks: Sequence[Any], seq_length: int, micro_batch_size: int, vocab_size: int
) -> argparse.Namespace:
    """Megatron's arguments, at their defaults but for what a built model says."""
    from megatron.training.arguments import add_megatron_arguments

    from megatron_balance.megatron.arguments import add_balance_arguments

    parser = add_balance_arguments(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))
    args = parser.parse_args([])
    for name in vars(args):
        found = NAMES.get(name, name)
        if hasattr(model_config, found):
            setattr(args, name, getattr(model_config, found))
    gpt = unwrap_model(chunks[0])
    ddp = getattr(chunks[0], "ddp_config", None)
    known = {
        "tensor_model_parallel_size": mpu.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": mpu.get_pipeline_model_parallel_world_size(),
        "context_parallel_size": mpu.get_context_parallel_world_size(),
        "data_parallel_size": mpu.get_data_parallel_world_size(),
        "virtual_pipeline_model_parallel_size": len(chunks) if len(chunks) > 1 else None,
        "group_query_attention": True,
        "params_dtype": model_config.params_dtype,
        "position_embedding_type": getattr(gpt, "position_embedding_type", "none"),
        "max_position_embeddings": getattr(gpt, "max_sequence_length", seq_length),
        "use_distributed_optimizer": bool(getattr(ddp, "use_distributed_optimizer", False)),
        "grad_reduce_in_bf16": not getattr(ddp, "grad_reduce_in_fp32", True),
        "seq_length": seq_length,
        "micro_batch_size": micro_batch_size,
        "padded_vocab_size": vocab_size,
        "rank": dist.get_rank(),
        "consumed_train_samples": 0,
        "curr_iteration": 0,
        "train_iters": 1 << 62,
        "check_for_nan_in_loss_and_grad": False,
        "check_for_spiky_loss": False,
    }
    for name, value in known.items():
        setattr(args, name, value)
    return args
