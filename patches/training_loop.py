"""Megatron's training loop: our options and session around a script's `pretrain`, whole documents,
planned microbatches, a record of every step, what a checkpoint carries on; other strategies; and the
pipeline schedules and communicator whose order of transfers we rely on.
"""

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

from megatron_balance.megatron import session
from megatron_balance.megatron.data import DocumentBlend, DocumentDataset, is_numbered, make_provider, names_corpus
from megatron_balance.megatron.entry import training
from megatron_balance.megatron.flags import add_balance_arguments
from megatron_balance.megatron.forward_backward import balanced_schedule
from megatron_balance.megatron.gpt import with_planned_model
from megatron_balance.patches import Patch, followed_by, handed_on

log = logging.getLogger(__name__)


def _with_balance(pretrain: Callable[..., Any]) -> Callable[..., Any]:
    """`pretrain` inside a `Session`, with our core attention in the model's layer spec."""

    @functools.wraps(pretrain)
    def balanced(cfg_container: Any, *args: Any, **kwargs: Any) -> Any:
        with training(cfg_container):
            return with_planned_model(pretrain, (cfg_container, *args), kwargs)

    return balanced


# Of an unmodified script, whose parser and call of `pretrain` we cannot write ourselves.
ENTRY = (
    Patch(
        target="megatron.training.arguments:add_megatron_arguments",
        wrap=handed_on(add_balance_arguments),
        role="wrapped",
        parameters=("parser",),
        why="--balance-* must be known to the parser; extra_args_provider belongs to the script, which we do not "
        "change",
    ),
    # Two names of one function; scripts import either.
    *(
        Patch(
            target=f"{module}:pretrain",
            wrap=_with_balance,
            role="wrapped",
            parameters=("cfg_container",),
            why="the layer spec must hold our core attention before the script's model is built, and bad flags must "
            "stop here",
        )
        for module in ("megatron.training", "megatron.training.training")
    ),
)


def _make_pools(_result: Any, _given: Mapping[str, Any]) -> None:
    session.current().make_pools()


def _resume(_result: Any, given: Mapping[str, Any]) -> None:
    session.current().resume(given["checkpoint_args"])


def _end_step(_result: Any, given: Mapping[str, Any]) -> None:
    job = session.current()
    job.end_step()
    job.steps.finish(given["iteration"], given["loss_dict"].get("lm loss"), given["grad_norm"])


def _from_documents(build_iterators: Callable[..., Any]) -> Callable[..., Any]:
    """`build_train_valid_test_data_iterators` over our document data set if there is a corpus."""

    @functools.wraps(build_iterators)
    def build(build_train_valid_test_datasets_provider: Callable[..., Any]) -> Any:
        return build_iterators(_choose_provider(build_train_valid_test_datasets_provider))

    return build


def _choose_provider(given: Callable[..., Any]) -> Callable[..., Any]:
    """Our document provider if the command line names a corpus, else `given`; the log says why."""
    job = session.current()
    kept = job.config.data == "script"
    replace = names_corpus(job.args) and not kept
    of_ours = getattr(given, "func", given).__module__ == DocumentDataset.__module__
    job.script_data.kept = not replace and not of_ours
    provider: Callable[..., Any] = make_provider(job.config.documents, job.config.sample_filling) if replace else given
    named = getattr(given, "__qualname__", None) or repr(given)
    if not replace:
        log.warning(
            "data: %s of the script is kept, since %s; a sequence begins where its position_ids are 0 (with "
            "--reset-position-ids at every document), and batches cannot be planned ahead",
            named,
            "the configuration says so" if kept else "no --data-path is given",
        )
    elif not of_ours:
        log.warning(
            "data: %s of the script is replaced by whole documents of the corpora (%s)", named, job.config.documents
        )

    def build(*args: Any, **kwargs: Any) -> Any:
        train, valid, test = provider(*args, **kwargs)
        job.train_data = train if isinstance(train, (DocumentDataset, DocumentBlend)) else None
        if job.script_data.kept and train is not None:  # model chunks in the middle have none
            job.script_data.dataset = train
            if is_numbered(train, job.args):
                job.train_data = train
                log.info("data: %s says what samples hold, so batches are planned ahead", type(train).__name__)
        return train, valid, test

    if getattr(provider, "is_distributed", False):
        build.is_distributed = True  # pyright: ignore[reportFunctionMemberAccess]
    return build


LOOP = (
    Patch(
        target="megatron.core.parallel_state:initialize_model_parallel",
        wrap=followed_by(_make_pools),
        role="wrapped",
        why="Megatron's context-parallel groups are fixed slices of the world; a plan's rings run over any ranks of a "
        "pool, and groups must be made by all ranks at once, right after Megatron's own",
    ),
    Patch(
        target="megatron.core.parallel_state:update_pg_timeout",
        role="observed",
        reviewed={"8803be35dab8": "0.19.x, 0.18.2, 0.20 of 2026-08"},
        why="it sets the timeout of all groups in Megatron's list, to which `megatron.groups` adds those of the pools",
    ),
    Patch(
        target="megatron.training.training:build_train_valid_test_data_iterators",
        wrap=_from_documents,
        role="wrapped",
        parameters=("build_train_valid_test_datasets_provider",),
        why="a script's own provider joins documents inside samples of fixed length; a planner needs whole sequences "
        "and their lengths",
    ),
    Patch(
        target="megatron.training.training:get_forward_backward_func",
        wrap=handed_on(balanced_schedule),
        role="wrapped",
        why="the one place inside the rerun loop that sees all raw microbatches of a step, in training and evaluation; "
        "wrapping the iterator would hide the RerunDataIterator from Megatron's replay",
    ),
    Patch(
        target="megatron.training.training:training_log",
        wrap=followed_by(_end_step),
        role="wrapped",
        parameters=("loss_dict", "iteration", "grad_norm"),
        why="the only place where the reduced loss and the gradient norm of a step meet",
    ),
    Patch(
        target="megatron.training.checkpointing:check_checkpoint_args",
        wrap=followed_by(_resume),
        role="wrapped",
        parameters=("checkpoint_args",),
        why="a checkpoint's arguments, where the planner's carry is, meet this run's nowhere else; not called with "
        "--finetune",
    ),
)


def _make_roles(result: Any, given: Mapping[str, Any]) -> None:
    model, optimizer, *_ = result
    job = session.current()
    if job.candidates:
        from megatron_balance.megatron.changes import Changes

        job.changes = Changes(job, model, optimizer, getattr(given.get("cfg_container"), "model", None))


def _of_today(save_checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    """`save_checkpoint` of a model with today's weights."""

    @functools.wraps(save_checkpoint)
    def save(*args: Any, **kwargs: Any) -> Any:
        changes = session.current().changes
        if changes is not None:
            changes.gather_weights()
        return save_checkpoint(*args, **kwargs)

    return save


STRATEGIES = (
    Patch(
        target="megatron.training.training:setup_model_and_optimizer",
        wrap=followed_by(_make_roles),
        role="wrapped",
        parameters=("cfg_container",),
        why="roles are made of the model's config and the optimizer's shards, and `pretrain` hands neither to a hook",
    ),
    Patch(
        target="megatron.training.training:save_checkpoint",
        wrap=_of_today,
        role="wrapped",
        why="the weights of Megatron's own model are gathered when somebody needs them, not after every step",
    ),
    Patch(
        target="megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.step_with_ready_grads",
        reviewed={"de195dd0b41b": "0.19.x"},
        why="its all-gather waits where `_defer_param_sync` is set (megatron/changes.py)",
    ),
)

_ORDER = "which microbatch a transfer brings follows from its place in the schedule (megatron/stages.py)"
_ASKS = "our communicator is a subclass that answers `_communicate_shapes`; it relies on when this asks, and for what"

ONE_CHUNK = (
    Patch(
        target="megatron.core.pipeline_parallel.schedules:forward_backward_pipelining_without_interleaving",
        reviewed={
            "43c05abb1b63": "0.19.x",
            "818d94bd60e8": "0.18.2",
            "29c981e03dad": "0.20 of 2026-08",
            "05f1a63af1f3": "dev of 2026-08",
        },
        why=_ORDER,
    ),
)
INTERLEAVED = (
    Patch(
        target="megatron.core.pipeline_parallel.schedules:forward_backward_pipelining_with_interleaving",
        reviewed={
            "00baf040c63b": "0.19.x",
            "b59fc2244c30": "0.18.2",
            "3063902f8600": "0.20 of 2026-08",
            "e863b2040726": "dev of 2026-08",
        },
        why=_ORDER,
    ),
    Patch(
        target="megatron.core.pipeline_parallel.schedules:get_schedule_table",
        reviewed={"a7b63a2b60a2": "0.19.x, 0.18.2, 0.20 of 2026-08"},
        why=_ORDER,
    ),
)
COMMUNICATOR = (
    Patch(
        target="megatron.core.pipeline_parallel.p2p_communication:P2PCommunicator._communicate",
        reviewed={"3fb54290a618": "0.19.x, 0.18.2, 0.20 of 2026-08", "62138313f9ad": "dev of 2026-08"},
        why=_ASKS,
    ),
    Patch(
        target="megatron.core.pipeline_parallel.p2p_communication:P2PCommunicator._communicate_shapes",
        reviewed={"572ea46b0de6": "0.19.x, 0.18.2, 0.20 of 2026-08"},
        why=_ASKS,
    ),
)
PATCHES = (*ENTRY, *LOOP, *STRATEGIES, *ONE_CHUNK, *INTERLEAVED, *COMMUNICATOR)
