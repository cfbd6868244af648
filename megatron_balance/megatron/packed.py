"""Plans on their way through Megatron's layers, with their microbatch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_balance.ir.mask import Mask
from megatron_balance.runtime.attention import BackwardSlot
from megatron_balance.runtime.bind import Bound
from megatron_balance.training.binding import MaskBounds


class CountedMask(torch.Tensor):
    """A loss mask whose `sum` is a count that it was given, in place of its own. Results of
    operations are plain tensors.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]
    count: torch.Tensor

    @classmethod
    def of(cls, mask: torch.Tensor, count: torch.Tensor) -> CountedMask:
        counted = mask.as_subclass(cls)
        counted.count = count
        return counted

    def sum(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        # Megatron weights a rank's share of a loss by the sum of its mask.
        return super().sum(*args, **kwargs) if args or kwargs else self.count


@dataclass(frozen=True, eq=False)
class Ahead:
    """Values of the tokens that lie ahead of each row in its own sequence, for multi-token
    prediction.

    By depth, from 0 for the row itself, each [1, T]; rows with no token so far ahead have zeros. A
    mask is weighted: its sum over the pool is that of depth 0. `count`: the mean of a rank, as a
    scalar tensor; every mask says that it is its sum.
    """

    tokens: tuple[torch.Tensor, ...]
    positions: tuple[torch.Tensor, ...]
    labels: tuple[torch.Tensor, ...]
    masks: tuple[torch.Tensor, ...]
    count: torch.Tensor

    def rolled(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """One of these tensors, one token ahead, and a count, as Megatron's `roll_tensor` gives
        them. Labels of depth 0 come as a copy. Padding stays where it is.
        """
        if tensor.dtype == torch.bool:
            return tensor, self.count
        # Megatron hands back the very tensors that it was given, so identity says which one this
        # is.
        for by_depth in (self.tokens, self.positions, self.labels, self.masks):
            for depth, each in enumerate(by_depth):
                if each is tensor:
                    return by_depth[depth + 1], self.count
        # Only the labels of depth 0 come as a copy.
        assert not tensor.is_floating_point(), "only the mask of the microbatch is rolled"
        return self.labels[1], self.count


@dataclass
class BalancedSeqParams(PackedSeqParams):
    """PackedSeqParams that carry the bound plan of one microbatch."""

    bound: Bound | None = None
    """The plan that `balanced_attention` runs for this rank, in all layers."""
    layers: MaskBounds | None = None
    """Or the plan bound for layers of each mask, of those that keep and those that replay."""
    backward: BackwardSlot | None = None
    """The slot for the backward tick's plan, if the pipeline stages attend together."""
    position_ids: torch.Tensor | None = None
    """[T] int64: position of each local token, padding included; nano-batch by nano-batch."""
    samples: torch.Tensor | None = None
    """[T] int64: the sample in which each row was read, below `num_samples`; None: nobody asks."""
    num_samples: int = 0
    alone: tuple[int, ...] = ()
    """Lengths of the sequences of a microbatch that this rank attends for itself, without a plan."""
    ahead: Ahead | None = None
    """Of a model that predicts further tokens."""
    nano_batches: tuple[BalancedSeqParams, ...] = ()
    """The parameters of each ping-pong nano-batch, in place of `bound`."""

    def __post_init__(self) -> None:
        """Leave out the base class's index of sequences for Mamba, which needs cu_seqlens."""

    def bound_now(self, number: int, mask: Mask) -> Bound:
        """The plan that attention runs now in the layer of this number (`held_layers`) and mask: its
        own, or the backward tick's once that has begun.
        """
        if self.layers is not None:
            return self.layers.of_layer(number, mask)
        # The other stages of the backward tick are in its plan alone, whose layers all have one mask.
        bound = self.bound if self.backward is None or self.backward.bound is None else self.backward.bound
        assert bound is not None, "a planned microbatch is bound before the model sees it"
        return bound
