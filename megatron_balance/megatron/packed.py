"""Plans on their way through Megatron's layers, with their microbatch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_balance.runtime.attention import BackwardSlot
from megatron_balance.runtime.bind import Bound
from megatron_balance.training.binding import LayerBounds


@dataclass
class BalancedSeqParams(PackedSeqParams):
    """PackedSeqParams that carry the bound plan of one microbatch.

    `qkv_format` stays "sbhd": with "thd" Megatron would derive positions from cu_seqlens and its
    static context-parallel group. Extra fields are harmless, since Transformer Engine is handed the
    base class's fields only.
    """

    bound: Bound | None = None
    """The plan that `balanced_attention` runs for this rank, in all layers."""
    layers: LayerBounds | None = None
    """Or the plan bound for layers that keep and for layers that replay."""
    backward: BackwardSlot | None = None
    """The slot for the backward tick's plan, if the pipeline stages attend together."""
    position_ids: torch.Tensor | None = None
    """[T] int64: position of each local token, padding included; nano-batch by nano-batch."""
    nano_batches: tuple[BalancedSeqParams, ...] = ()
    """The parameters of each ping-pong nano-batch, in place of `bound`."""

    def __post_init__(self) -> None:
        """Leave out the base class's index of sequences for Mamba, which needs cu_seqlens."""

    def bound_now(self, number: int) -> Bound:
        """The plan that attention runs now in the layer of this number (`HeldLayers`): its own, or
        the backward tick's once that has begun.

        The other stages of the backward tick are in the latter.
        """
        if self.layers is not None:
            return self.layers.of_layer(number)
        bound = self.bound if self.backward is None or self.backward.bound is None else self.backward.bound
        assert bound is not None, "a planned microbatch is bound before the model sees it"
        return bound
