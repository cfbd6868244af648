"""Weights of Megatron's own model, which give their memory back while roles compute.

Where the optimizer has fp32 weights of its own (bf16 training), those of the model are copies, and
are made again before the model runs. In fp32 they are the optimizer's own, and stay.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch


class OwnWeights:
    """The flat buffers of a model's weights, there or given back."""

    def __init__(self, model: Sequence[Any], optimizers: Sequence[Any], *, stay: bool) -> None:
        """Leave them where they are.

        Args:
            model: Megatron's DDP chunks.
            optimizers: whose fp32 weights are copied into them after each step.
            stay: whether somebody else reads them at any time, such as an asynchronous checkpoint.
        """
        buffers = [buffer for chunk in model for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        self._data: list[torch.Tensor] = []
        self._copies: list[Callable[[], None]] = []
        self._given_back = False
        if stay or any(buffer.param_data is None or buffer.param_data.dtype == torch.float32 for buffer in buffers):
            return
        self._data = [buffer.param_data for buffer in buffers]
        self._sizes = [data.untyped_storage().nbytes() for data in self._data]
        for each in optimizers:
            self._copies.append(each._copy_main_params_to_model_params)
            each._copy_main_params_to_model_params = functools.partial(self._copy, self._copies[-1])

    @property
    def num_bytes(self) -> int:
        """Bytes that they take now, of those that can be given back."""
        return sum(data.untyped_storage().nbytes() for data in self._data)

    def give_back(self) -> None:
        """Give their memory back. What the model has of weights is lost."""
        for data in self._data:
            data.untyped_storage().resize_(0)
        self._given_back = bool(self._data)

    def restore(self) -> None:
        """Bring this rank's part of today's weights back, if they were given back.

        An all-gather brings the others'.
        """
        if not self._given_back:
            return
        self._given_back = False
        for data, size in zip(self._data, self._sizes, strict=True):
            data.untyped_storage().resize_(size)
        for copy in self._copies:
            copy()

    def _copy(self, copy: Callable[[], None]) -> None:
        """Copy the optimizer's weights after a step, if there is memory to copy them to."""
        if not self._given_back:
            copy()
