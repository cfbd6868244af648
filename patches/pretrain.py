"""The script's call of `pretrain`: its arguments are complete and nothing is built yet."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron_balance.megatron.entry import training
from megatron_balance.megatron.gpt import with_planned_model
from megatron_balance.patches import Patch


def with_balance(pretrain: Callable[..., Any]) -> Callable[..., Any]:
    """`pretrain` inside a `Session`, with our core attention in the model's layer spec."""

    @functools.wraps(pretrain)
    def balanced(cfg_container: Any, *args: Any, **kwargs: Any) -> Any:
        with training(cfg_container):
            return with_planned_model(pretrain, (cfg_container, *args), kwargs)

    return balanced


# Two names of one function; scripts import either.
PATCHES = tuple(
    Patch(
        target=f"{module}:pretrain",
        wrap=with_balance,
        role="wrapped",
        parameters=("cfg_container",),
        why=(
            "the layer spec must hold our core attention before the script's model is built, and bad flags must stop "
            ""
            "here"
        ),
    )
    for module in ("megatron.training", "megatron.training.training")
)
