"""A run that changes between strategies: roles are made behind Megatron's model and optimizer, and
whoever saves the model finds today's weights in it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from megatron_balance.megatron import session
from megatron_balance.patches import Patch, read


def with_roles(setup_model_and_optimizer: Callable[..., Any]) -> Callable[..., Any]:
    """`setup_model_and_optimizer`, behind which the session makes its roles."""
    signature = inspect.signature(setup_model_and_optimizer)

    @functools.wraps(setup_model_and_optimizer)
    def setup(*args: Any, **kwargs: Any) -> Any:
        model, optimizer, *rest = setup_model_and_optimizer(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        job = session.current()
        if job.candidates:
            from megatron_balance.megatron.changes import Changes

            job.changes = Changes(job, model, optimizer, getattr(given.get("cfg_container"), "model", None))
        return model, optimizer, *rest

    return setup


def of_today(save_checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    """`save_checkpoint` of a model with today's weights."""

    @functools.wraps(save_checkpoint)
    def save(*args: Any, **kwargs: Any) -> Any:
        changes = session.current().changes
        if changes is not None:
            changes.gather_weights()
        return save_checkpoint(*args, **kwargs)

    return save


PATCHES = (
    Patch(
        target="megatron.training.training:setup_model_and_optimizer",
        wrap=with_roles,
        role="wrapped",
        parameters=("cfg_container",),
        why="roles are made of the model's config and the optimizer's shards, and `pretrain` hands neither to a hook",
    ),
    Patch(
        target="megatron.training.training:save_checkpoint",
        wrap=of_today,
        role="wrapped",
        why="the weights of Megatron's own model are gathered when somebody needs them, not after every step",
    ),
    Patch(
        target="megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.step_with_ready_grads",
        wrap=read,
        reviewed={"de195dd0b41b": "0.19.x"},
        why="its all-gather waits where `_defer_param_sync` is set (megatron/changes.py)",
    ),
)
