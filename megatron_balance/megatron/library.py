"""Balanced schedules for training loops that import Megatron's schedules and never call `pretrain`:
`balance` gives them another function in place of `get_forward_backward_func`'s.
"""

import argparse
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.core.distributed import TorchFullyShardedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.rerun_state_machine import RerunState, get_rerun_state_machine
from megatron.core.utils import get_model_config, unwrap_model

from megatron_balance.errors import ConfigError, DataError
from megatron_balance.ir.arrays import Ints
from megatron_balance.megatron import entry, flags, session
from megatron_balance.megatron.data import BOUNDARIES, COLUMNS, TreeLoss
from megatron_balance.megatron.forward_backward import balanced_schedule, first_iterator
from megatron_balance.megatron.forward_step import LOSS
from megatron_balance.megatron.gpt import give_core_attention
from megatron_balance.megatron.ways import log_reasons, way_reasons
from megatron_balance.model_config import refusal
from megatron_balance.patches import applied
from megatron_balance.patches.selection import for_job
from megatron_balance.planning.choice import Run, load_config
from megatron_balance.training.log import ScalarWriter

log = logging.getLogger(__name__)

# Options of Megatron's command line by another name than in its `TransformerConfig`.
NAMES = {
    "num_experts": "num_moe_experts",
    "swiglu": "gated_linear_unit",
    "fp8_format": "fp8",
    "decoder_first_pipeline_num_layers": "num_layers_in_first_pipeline_stage",
    "decoder_last_pipeline_num_layers": "num_layers_in_last_pipeline_stage",
}
Batch = Mapping[str, torch.Tensor]

# Keys of the configuration about our own data set, where a run that has them asks for something.
UNREAD: dict[str, Callable[[Run], bool]] = {
    "data": lambda run: run.data == "documents",
    "documents": lambda _: True,
    "sample_filling": lambda _: True,
    "accepted_data": lambda _: True,
    "plan_ahead": lambda run: run.plan_ahead,
}


class _BalancedLoop(AbstractContextManager["_BalancedLoop"]):
    """A forward-backward function with planned microbatches; keywords and result are Megatron's.

    Its iterator gives a batch a microbatch: a mapping with `tokens`, `labels`, `loss_mask` and
    `position_ids`, each [B, S]. Position 0 opens a document, -1 is padding. The loss is per token;
    what it stores of a microbatch is `lm loss` (`loss_name`), a sum and its tokens.
    """

    def __init__(
        self,
        job: session.Session,
        forward_backward_func: Callable[..., Any],
        *,
        batch_of: Callable[[Any], Batch] | None = None,
        loss_name: str = LOSS,
    ) -> None:
        """Open the session of `job`; `close` ends it. `batch_of`, `loss_name`: of `balance`."""
        self._job, self._batch_of, self._loss_name = job, batch_of, loss_name
        self._schedule = balanced_schedule(forward_backward_func)
        self._next_step: int = job.args.curr_iteration + 1
        self._groups: object = None
        patches = for_job(job.args, joint=job.joint, nano_batches=job.ping_pong, always=())
        with ExitStack() as stack:
            stack.enter_context(applied(patches, job.config.accepted_sources, str(job.config.source)))
            stack.enter_context(session.opened(job))
            job.make_pools()
            self._stack = stack.pop_all()

    def __call__(self, *, num_microbatches: int, data_iterator: Any, forward_only: bool = False, **kwargs: Any) -> Any:
        """Run a step; arguments and result as Megatron's, whose `forward_step_func` ours replaces. One
        that Megatron's rerun state machine runs again in place is the same step.
        ConfigError: process groups that are not those of `parallel_state`. DataError: a batch that is
        none, on all ranks.
        """
        groups = kwargs.get("pg_collection")
        if groups is not self._groups:
            _check_groups(groups)
            self._groups = groups
        if not forward_only and get_rerun_state_machine().state != RerunState.RERUNNING_IN_PLACE:
            self._job.args.curr_iteration = self._next_step - 1
            self._next_step += 1
        found = self._schedule(
            num_microbatches=num_microbatches,
            data_iterator=self._batches(data_iterator),
            forward_only=forward_only,
            **kwargs,
        )
        if self._loss_name == LOSS or not found:
            return found
        return [{self._loss_name if name == LOSS else name: value for name, value in each.items()} for each in found]

    def _batches(self, given: Any) -> Iterator[Batch]:
        iterator, job = first_iterator(given), self._job
        with suppress(StopIteration):
            while True:
                each = next(iterator)
                batch = each if self._batch_of is None else self._batch_of(each)
                _check_batch(batch, job.args, by_sample=bool(job.num_samples))
                yield batch

    @property
    def sequences(self) -> tuple[Ints, ...]:
        """Lengths that this rank's replica read in the last step, by microbatch, for throughput."""
        return self._job.sequences

    def finish_step(
        self,
        loss: float | torch.Tensor | None = None,
        grad_norm: float | torch.Tensor | None = None,
        *,
        step: int | None = None,
    ) -> None:
        """Write the record of the training step that ran; without this call there is none.
        Collective over the world where `log` names a folder. `loss`: of a token, reduced; None on
        ranks that do not know it. `step`: its number, from 1, if not one more than the last one's:
        loops may skip some.
        """
        number = self._next_step - 1 if step is None else step
        self._job.steps.finish(number, loss, grad_norm)
        self._next_step = number + 1

    def close(self) -> None:
        """End background work, and undo all patches."""
        self._stack.close()

    def __exit__(self, *_: object) -> None:
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
    check_for_spiky_loss: bool = False,
    steps_done: int = 0,
    log_folder: str | Path | None = None,
    writers: Sequence[ScalarWriter] = (),
    batch_of: Callable[[Any], Batch] | None = None,
    loss_name: str = LOSS,
    timeout_minutes: int = 10,
    trees: TreeLoss | None = None,
) -> _BalancedLoop:
    """Plan the microbatches of a loop that calls Megatron's schedules itself.

    Collective over the world, once, after `initialize_model_parallel` and when the model is built.

    Args:
        model: a GPT, or its chunks, wrapped or not. Its config says `calculate_per_token_loss`.
        forward_backward_func: what Megatron's `get_forward_backward_func` gave.
        config: the balance configuration, or its YAML.
        seq_length: most tokens of a sample.
        micro_batch_size: most samples of a microbatch on each replica.
        vocab_size: for predicted memory and `self_check`.
        check_for_nan_in_loss: whether a loss that is no number ends the job or replays the step, by
            Megatron's rerun state machine.
        check_for_spiky_loss: whether one that leaps replays the step: the loss of a token, by the
            machine's `spiky_loss_factor` if the loop gave it one, else 10.
        steps_done: training steps before this process, for the log.
        log_folder: of `steps.jsonl` and traces, written by rank 0 when the loop calls `finish_step`.
        writers: of a step's scalars, for example TensorBoard's `add_scalar`.
        batch_of: the batch of what the iterator gives, if that is none.
        loss_name: the key under which the loop looks for sum and tokens.
        timeout_minutes: of exchanges between ranks.
        trees: position ids are along the paths of trees, and `loss_mask` their weights: of a mean
            over what they count, or of a sum (docs/trees.md).

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
    args = _arguments_of(model_config, chunks, seq_length, micro_batch_size, vocab_size)
    args.check_for_nan_in_loss_and_grad, args.check_for_spiky_loss = check_for_nan_in_loss, check_for_spiky_loss
    args.curr_iteration, args.distributed_timeout_minutes = steps_done, timeout_minutes
    args.balance_trees = trees
    args.balance_log = None if log_folder is None else str(log_folder)
    kinds = dict.fromkeys(type(each).__name__ for each in unwrap_model(list(chunks)) if not isinstance(each, GPTModel))
    reasons = [f"the model is of class {kind}, and the forward step is that of Megatron's GPTModel" for kind in kinds]
    reasons += [*flags.reasons(args), *flags.reasons(args, "own_loop")]
    reasons += [*log_reasons(args, run), *way_reasons(args, run)]
    unknown = flags.unknown_fields(model_config)
    said = refusal("the model's config", unknown, run.accept, f"accept: {{}} in {run.source}")
    reasons += [] if said is None else [said]
    if reasons:
        raise ConfigError("; ".join(reasons))
    of_plans = (
        f"planner {run.planner.name} from {run.source}: the forward step and the loss, per token, are "
        "megatron_balance's; those that the loop hands over are not called"
    )
    told = [*_unread_keys(run), *flags.leave_out(args, [model_config]), of_plans, *flags.sentences(args)]
    for sentence in told:
        log.log(logging.WARNING if args.rank == 0 else logging.DEBUG, "%s", sentence)
    for chunk in chunks:
        give_core_attention(chunk)
    job = session.Session(args, run, te_patched=entry.te_available(), writers=writers)
    return _BalancedLoop(job, forward_backward_func, batch_of=batch_of, loss_name=loss_name)


def _unread_keys(run: Run) -> list[str]:
    unread = [name for name, asks in UNREAD.items() if name in run.model_fields_set and asks(run)]
    return [f"{run.source}: {', '.join(unread)}: not looked at, since the loop reads its own samples"] if unread else []


def _check_groups(groups: Any) -> None:
    """Reject process groups of a loop that are not those of `parallel_state`, whose ranks plan."""
    own: dict[str, Any] = {
        "dp_cp": mpu.get_data_parallel_group(with_context_parallel=True),
        "pp": mpu.get_pipeline_model_parallel_group(),
        "tp": mpu.get_tensor_model_parallel_group(),
    }
    for name, group in own.items():
        given = getattr(groups, name, None)
        if given is None:
            continue
        ranks, planned = dist.get_process_group_ranks(given), dist.get_process_group_ranks(group)
        if ranks != planned:
            raise ConfigError(
                f"pg_collection.{name} has ranks {ranks}, and Megatron's parallel_state {planned}: plans take the "
                "groups of parallel_state; use those"
            )


def _check_batch(batch: Any, args: argparse.Namespace, *, by_sample: bool) -> None:
    """Reject what is no batch of the loop that `args` tell of; DataError."""
    if not isinstance(batch, Mapping):
        raise DataError(
            f"the iterator gave a {type(batch).__name__}; expected a mapping with {', '.join(COLUMNS)}: let batch_of "
            "make one of it"
        )
    missing = [name for name in COLUMNS if batch.get(name) is None]
    if missing:
        raise DataError(
            f"a batch of {', '.join(map(str, batch))} has no {', '.join(missing)}; expected {', '.join(COLUMNS)}: let "
            "batch_of make them"
        )
    samples, size = batch["tokens"].shape
    if samples > args.micro_batch_size or size > args.seq_length:
        raise DataError(
            f"a batch has {samples} samples of {size} tokens, and 'balance' was told of at most "
            f"{args.micro_batch_size} (micro_batch_size) of {args.seq_length} (seq_length)"
        )
    if not by_sample:
        return
    if samples != args.micro_batch_size:
        raise DataError(
            f"a batch has {samples} samples, and seq_aux_loss is a mean over {args.micro_batch_size} "
            "(micro_batch_size) on each replica; give as many, or use aux_loss"
        )
    if samples > 1 and any(batch.get(name) is not None for name in BOUNDARIES):
        raise DataError("seq_aux_loss takes the packed samples of a microbatch for one in Megatron; use one sample")


def _arguments_of(
    model_config: Any, chunks: Sequence[Any], seq_length: int, micro_batch_size: int, vocab_size: int
) -> argparse.Namespace:
    """Megatron's arguments, at their defaults but for what a built model says."""
    from megatron.training.arguments import add_megatron_arguments

    from megatron_balance.megatron.flags import add_balance_arguments

    parser = add_balance_arguments(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))
    args = parser.parse_args([])
    for name in vars(args):
        found = NAMES.get(name, name)
        if hasattr(model_config, found):
            setattr(args, name, getattr(model_config, found))
    gpt = unwrap_model(chunks[0])
    ddp = getattr(chunks[0], "ddp_config", None)
    # Said last, over what the configs say: these are facts of the built groups and model.
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
        "use_megatron_fsdp": bool(getattr(ddp, "use_megatron_fsdp", False)),
        "use_torch_fsdp2": isinstance(chunks[0], TorchFullyShardedDataParallel),
        "consumed_train_samples": 0,
        "train_iters": 1 << 62,
    }
    for name, value in known.items():
        setattr(args, name, value)
    return args
