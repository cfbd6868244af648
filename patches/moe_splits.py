"""Split sizes of the experts' exchange, for runs without a GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from megatron_balance.patches import Patch


def also_from_cpu(move: Callable[..., Any]) -> Callable[..., Any]:
    """`maybe_move_tensor_to_cpu` that turns a tensor on the CPU into an array, too."""

    @functools.wraps(move)
    def moved(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        if as_numpy and isinstance(tensor, torch.Tensor) and not tensor.is_cuda:
            return tensor.numpy()
        return move(tensor, as_numpy, record_stream)

    return moved


PATCHES = (
    Patch(
        target="megatron.core.transformer.moe.token_dispatcher:maybe_move_tensor_to_cpu",
        wrap=also_from_cpu,
        role="wrapped",
        parameters=(
            "tensor",
            "as_numpy",
            "record_stream",
        ),
        why="the alltoall dispatcher hands its split sizes to torch as arrays, which it makes of CUDA tensors only",
    ),
)
