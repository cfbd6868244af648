"""How a plan travels with its microbatch through Megatron's layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_balance.runtime.attention import BackwardSlot
from megatron_balance.runtime.bind import Bound


@dataclass
class BalancedSeqParams(PackedSeqParams):
    """PackedSeqParams that carry the bound plan of one microbatch.

    `qkv_format` stays "sbhd": with "thd" Megatron would derive positions from cu_seqlens and its static context-parallel group.
    Extra fields are harmless, since Transformer Engine is handed the base class's fields only.
    """

    bound: Bound | None = None
    """What `balanced_attention` runs for this rank."""
    backward: BackwardSlot | None = None
    """Where its backward finds the plan of its tick, if the pipeline stages attend together."""
    position_ids: torch.Tensor | None = None
    """[T] int64: position of each local token in its own sequence, padding tokens included; half by nano-batch."""
    nano_batches: tuple[BalancedSeqParams, ...] = ()
    """Of a microbatch that runs as two nano-batches (`megatron.ping_pong`): those of each nano-batch, in place of `bound`."""

    def __post_init__(self) -> None:
        """Nothing to derive: the base class precomputes Mamba's sequence index, which needs cu_seqlens."""

    @property
    def bound_now(self) -> Bound:
        """What attention runs by now: `bound`, or once the backward tick has begun its plan, with the other stages that are in it."""
        bound = self.bound if self.backward is None or self.backward.bound is None else self.backward.bound
        assert bound is not None, "a planned microbatch is bound before the model sees it"
        return bound
