"""Rotary embedding by position: a rank holds fragments of many sequences, in any order."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from megatron.core.transformer.multi_latent_attention import MultiLatentAttention

from megatron_balance.errors import ConfigError
from megatron_balance.megatron.packed import BalancedSeqParams


class PositionRotary(torch.nn.Module):
    """Megatron's rotary embedding at the positions that a `BalancedSeqParams` carries.

    Megatron calls `get_rotary_seq_len` and hands the answer straight to `forward`; we answer with
    the positions themselves, so nothing is kept between the two calls and several microbatches may
    be in flight. Has no parameters and no buffers.
    """

    inner: RotaryEmbedding
    _table: torch.Tensor | None

    def __init__(self, inner: RotaryEmbedding, max_positions: int, *, of_rows: bool = False) -> None:
        """Wrap `inner`; positions are below `max_positions`.

        `of_rows`: for multi-latent attention, which squeezes the batch out of packed sequences.
        """
        super().__init__()
        object.__setattr__(self, "inner", inner)  # not a submodule: names in checkpoints stay as they were
        self._max_positions, self._of_rows = max_positions, of_rows
        self._concentration: float | None = None
        self._table = None

    def get_rotary_seq_len(
        self,
        inference_context: Any,
        transformer: Any,
        transformer_input: Any,
        config: Any,
        packed_seq_params: Any = None,
    ) -> torch.Tensor | int:
        """Positions [T] of the microbatch; Megatron's own answer for anything that we did not plan."""
        if isinstance(packed_seq_params, BalancedSeqParams):
            assert packed_seq_params.position_ids is not None, "a planned microbatch knows its positions"
            return packed_seq_params.position_ids
        return self.inner.get_rotary_seq_len(
            inference_context, transformer, transformer_input, config, packed_seq_params
        )

    def forward(
        self,
        positions: torch.Tensor | int,
        packed_seq: bool = False,
        cp_group: torch.distributed.ProcessGroup | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, float]:
        """Frequencies [T, 1, 1, D] of the given positions, by the formula of the wrapped module.

        For multi-latent attention [T, 1, D]. Of YaRN also the factor of concentration, as Megatron's.
        """
        if not isinstance(positions, torch.Tensor):
            return self.inner(positions, packed_seq=packed_seq, cp_group=cp_group)
        table = self._table
        if table is None or table.device != positions.device:
            made = self.inner.get_emb(self._max_positions)
            table, self._concentration = made if isinstance(made, tuple) else (made, None)
            self._table = table = table.to(positions.device)
        found = table[positions]
        found = found[:, 0] if self._of_rows else found
        return found if self._concentration is None else (found, self._concentration)


def install(model: torch.nn.Module, max_positions: int) -> None:
    """Give every GPT model inside `model` rotary embeddings by position.

    Raises:
        ConfigError: a kind of rotary embedding that cannot be gathered by position.
    """
    for module in list(model.modules()):
        rotary = vars(module)["_modules"].get("rotary_pos_emb")
        if rotary is None or isinstance(rotary, PositionRotary):
            continue
        if type(rotary) not in (RotaryEmbedding, YarnRotaryEmbedding):
            raise ConfigError(
                f"rotary embedding {type(rotary).__name__} cannot be applied by explicit positions; "
                "use --position-embedding-type rope, yarn, learned_absolute or none"
            )
        of_rows = isinstance(module, MultiLatentAttention)
        module.rotary_pos_emb = PositionRotary(rotary, max_positions, of_rows=of_rows)
