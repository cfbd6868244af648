"""The arguments of a checkpoint that a run resumes from: with them comes what the planner carried."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron_balance.megatron import session
from megatron_balance.patches import Patch


def with_carry(check_checkpoint_args: Callable[..., Any]) -> Callable[..., Any]:
    """`check_checkpoint_args`, after which the session goes on with the checkpoint's carry."""

    @functools.wraps(check_checkpoint_args)
    def check(checkpoint_args: Any, *args: Any, **kwargs: Any) -> Any:
        result = check_checkpoint_args(checkpoint_args, *args, **kwargs)
        session.current().resume(checkpoint_args)
        return result

    return check


PATCHES = (
    Patch(
        target="megatron.training.checkpointing:check_checkpoint_args",
        wrap=with_carry,
        role="wrapped",
        parameters=("checkpoint_args",),
        why=(
            "a checkpoint's arguments, where the planner's carry is, meet this run's nowhere else; not called with "
            "--finetune"
        ),
    ),
)
