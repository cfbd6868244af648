"""Torch's norms under sequence parallelism, for runs without a GPU.

Neither Apex nor Transformer Engine can serve there.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

from megatron_balance.patches import Patch


def marked(new: Callable[..., Any]) -> Callable[..., Any]:
    """`WrappedTorchNorm.__new__` that accepts sequence parallelism.

    Its parameters are marked for the gradient sum over tensor-parallel ranks.
    """

    @functools.wraps(new)
    def build(cls: type, config: Any, *args: Any, **kwargs: Any) -> Any:
        if not config.sequence_parallel:
            return new(cls, config, *args, **kwargs)
        plain = copy.copy(config)
        plain.sequence_parallel = False
        norm = new(cls, plain, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = True  # finalize_model_grads sums these over the tensor-parallel group
        return norm

    return build


PATCHES = (
    Patch(
        target="megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__",
        wrap=marked,
        role="wrapped",
        parameters=("config",),
        why=(
            "a norm acts on each token alone, so sequence parallelism needs only the mark that makes its gradient whole"
        ),
    ),
)
