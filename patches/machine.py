"""Patches where a machine lacks a Makefile of Megatron's dataset helpers, a GPU for the experts' split
sizes, or Apex and Transformer Engine for norms under sequence parallelism.
"""

import copy
import functools
import importlib.util
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron_balance.patches import Patch

log = logging.getLogger(__name__)


def _skip_when_compiled(compile_helpers: Callable[[], None]) -> Callable[[], None]:
    """`compile_helpers` only where there is a Makefile, or no compiled module."""

    @functools.wraps(compile_helpers)
    def checked() -> None:
        spec = importlib.util.find_spec("megatron.core.datasets.helpers_cpp")
        folder = Path(compile_helpers.__code__.co_filename).parent
        if spec is None or (folder / "Makefile").exists():
            compile_helpers()
        else:
            log.info("dataset helpers are compiled already and there is no Makefile beside them; not running make")

    return checked


HELPERS = (
    Patch(
        target="megatron.core.datasets.utils:compile_helpers",
        wrap=_skip_when_compiled,
        role="observed",
        reviewed={"834469025eba": "0.19.x, 0.18.2, 0.20 of 2026-08"},
        why="the wheel has helpers_cpp compiled but no Makefile, so Megatron would stop at start-up",
    ),
)


def _also_from_cpu(move: Callable[..., Any]) -> Callable[..., Any]:
    """`maybe_move_tensor_to_cpu` that turns a tensor on the CPU into an array, too."""

    @functools.wraps(move)
    def moved(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        if as_numpy and isinstance(tensor, torch.Tensor) and not tensor.is_cuda:
            return tensor.numpy()
        return move(tensor, as_numpy, record_stream)

    return moved


SPLITS = (
    Patch(
        target="megatron.core.transformer.moe.token_dispatcher:maybe_move_tensor_to_cpu",
        wrap=_also_from_cpu,
        role="wrapped",
        parameters=("tensor", "as_numpy", "record_stream"),
        why="the alltoall dispatcher hands its split sizes to torch as arrays, which it makes of CUDA tensors only",
    ),
)


def _marked(new: Callable[..., Any]) -> Callable[..., Any]:
    """`WrappedTorchNorm.__new__` that accepts sequence parallelism."""

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


NORM = (
    Patch(
        target="megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__",
        wrap=_marked,
        role="wrapped",
        parameters=("config",),
        why="a norm acts on each token alone, so sequence parallelism needs only the mark that makes its gradient "
        "whole",
    ),
)
PATCHES = (*HELPERS, *SPLITS, *NORM)
