"""Exact loss and gradient norm of every step.

Megatron prints the norm with three decimals and hands it to no hook.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from megatron_balance.megatron import session
from megatron_balance.patches import Patch


def reported(training_log: Callable[..., Any]) -> Callable[..., Any]:
    """`training_log`, after which the step's record is complete and written."""
    signature = inspect.signature(training_log)

    @functools.wraps(training_log)
    def log_step(*args: Any, **kwargs: Any) -> Any:
        result = training_log(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        session.current().end_step()
        loss = given["loss_dict"].get("lm loss")
        session.current().steps.finish(given["iteration"], loss, given["grad_norm"])
        return result

    return log_step


PATCHES = (
    Patch(
        target="megatron.training.training:training_log",
        wrap=reported,
        role="wrapped",
        parameters=(
            "loss_dict",
            "iteration",
            "grad_norm",
        ),
        why="the only place where the reduced loss and the gradient norm of a step meet",
    ),
)
