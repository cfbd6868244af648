"""Multi-token prediction: the next token's values where a plan puts tokens anywhere."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

from megatron_balance.megatron.gpt import planned_mtp_block
from megatron_balance.megatron.packed import BalancedSeqParams
from megatron_balance.patches import Patch, read


def looked_up(roll_tensor: Callable[..., Any]) -> Callable[..., Any]:
    """`roll_tensor` that looks up what lies ahead in a planned microbatch."""

    @functools.wraps(roll_tensor)
    def rolled(
        tensor: Any,
        shifts: int = -1,
        dims: int = -1,
        cp_group: Any = None,
        packed_seq_params: Any = None,
        **of_version: Any,
    ) -> Any:
        if tensor is not None and isinstance(packed_seq_params, BalancedSeqParams):
            ahead = packed_seq_params.ahead
            assert ahead is not None, "the microbatch was read with what lies ahead"
            if isinstance(tensor, list):  # Megatron's branch dev rolls several, and gives no sums
                return [ahead.rolled(each)[0] for each in cast("list[Any]", tensor)]
            return ahead.rolled(tensor)
        return roll_tensor(tensor, shifts, dims, cp_group, packed_seq_params, **of_version)

    return rolled


def planned(get_gpt_mtp_block_spec: Callable[..., Any]) -> Callable[..., Any]:
    """The builder of a block's spec, with our core attention and router in its layers."""

    @functools.wraps(get_gpt_mtp_block_spec)
    def get(*args: Any, **kwargs: Any) -> Any:
        return planned_mtp_block(get_gpt_mtp_block_spec(*args, **kwargs))

    return get


PATCHES = (
    Patch(
        target="megatron.core.models.gpt.gpt_layer_specs:get_gpt_mtp_block_spec",
        wrap=planned,
        role="wrapped",
        why="Megatron takes the layers that predict further tokens from its own spec, not from the model config's",
    ),
    Patch(
        target="megatron.core.transformer.multi_token_prediction:roll_tensor",
        wrap=looked_up,
        reviewed={"980b86a01aa9": "0.19.x", "2da11bfe7d2e": "0.20 of 2026-08", "b9b9f1549049": "dev of 2026-08"},
        why="Megatron shifts rows along its static context-parallel ranks; the next token may lie on any rank",
    ),
    Patch(
        target="megatron.core.transformer.multi_token_prediction:process_mtp_loss",
        wrap=read,
        reviewed={"99c65592ee06": "0.19.x, 0.20 of 2026-08", "ad343eafe578": "dev of 2026-08"},
        why="a share of the loss is weighted by the counts that it takes of the rolled mask",
    ),
    Patch(
        target="megatron.core.transformer.multi_token_prediction:MultiTokenPredictionLayer._get_embeddings",
        wrap=read,
        reviewed={"b5996e917e64": "0.19.x", "f2eb0ca55bc4": "0.20 of 2026-08", "1377b150614c": "dev of 2026-08"},
        why="it rolls tokens, positions and padding, in that order, the same objects that it was given",
    ),
)
