"""Megatron's schedule, called with planned microbatches in place of the raw ones."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron_balance.megatron.forward_backward import balanced_schedule
from megatron_balance.patches import Patch


def planned(get_forward_backward_func: Callable[..., Any]) -> Callable[..., Any]:
    """`get_forward_backward_func` whose result plans every microbatch before the schedule runs it."""

    @functools.wraps(get_forward_backward_func)
    def get(*args: Any, **kwargs: Any) -> Callable[..., Any]:
        return balanced_schedule(get_forward_backward_func(*args, **kwargs))

    return get


PATCHES = (
    Patch(
        target="megatron.training.training:get_forward_backward_func",
        wrap=planned,
        role="wrapped",
        why=(
            "the one place inside the rerun loop that sees all raw microbatches of a step, in training and evaluation; "
            "wrapping the iterator would hide the RerunDataIterator from Megatron's replay"
        ),
    ),
)
