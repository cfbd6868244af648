"""Layers of Megatron and Transformer Engine: attention that a script built itself, multi-token
prediction, blocks over two nano-batches, and the router's losses.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist

from megatron_balance.megatron.core_attention import BalancedSeqParams, attend
from megatron_balance.megatron.gpt import planned_mtp_block
from megatron_balance.megatron.ping_pong import run_block
from megatron_balance.patches import Patch, handed_on

# Transformer Engine's attention in models whose script builds the layer spec itself.
#
# The layer spec is the way in where there is a model config (megatron/core_attention.py). A script
# that hands `pretrain` a model provider of its own has built TEDotProductAttention already; its
# forward then runs the plan that came with the microbatch, and everything else as before.


def _attends(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`TEDotProductAttention.forward` that runs the plan of a planned microbatch."""

    @functools.wraps(forward)
    def attention(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *args: Any,
        packed_seq_params: Any = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        if not isinstance(packed_seq_params, BalancedSeqParams):
            return forward(module, query, key, value, *args, packed_seq_params=packed_seq_params, **kwargs)
        return attend(query, key, value, packed_seq_params, module)

    return attention


TE_ATTENTION = (
    Patch(
        target="megatron.core.extensions.transformer_engine:TEDotProductAttention.forward",
        wrap=_attends,
        role="wrapped",
        parameters=("query", "key", "value", "packed_seq_params"),
        why="Transformer Engine's context parallelism cuts every sequence alike over one static group; a plan does not",
    ),
)


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


MTP = (
    Patch(
        target="megatron.core.models.gpt.gpt_layer_specs:get_gpt_mtp_block_spec",
        wrap=handed_on(planned_mtp_block),
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
        reviewed={"99c65592ee06": "0.19.x, 0.20 of 2026-08", "ad343eafe578": "dev of 2026-08"},
        why="a share of the loss is weighted by the counts that it takes of the rolled mask",
    ),
    Patch(
        target="megatron.core.transformer.multi_token_prediction:MultiTokenPredictionLayer._get_embeddings",
        reviewed={"b5996e917e64": "0.19.x", "f2eb0ca55bc4": "0.20 of 2026-08", "1377b150614c": "dev of 2026-08"},
        why="it rolls tokens, positions and padding, in that order, the same objects that it was given",
    ),
)


def _interleaved(forward: Callable[..., Any]) -> Callable[..., Any]:
    """`TransformerBlock.forward` that runs ping-pong nano-batches, and everything else as before."""

    @functools.wraps(forward)
    def block(
        module: Any,
        hidden_states: Any,
        attention_mask: Any,
        *args: Any,
        rotary_pos_emb: Any = None,
        packed_seq_params: Any = None,
        padding_mask: Any = None,
        **kwargs: Any,
    ) -> Any:
        if isinstance(packed_seq_params, BalancedSeqParams) and packed_seq_params.nano_batches:
            return run_block(module, hidden_states, rotary_pos_emb, padding_mask, packed_seq_params)
        given = {"rotary_pos_emb": rotary_pos_emb, "packed_seq_params": packed_seq_params, "padding_mask": padding_mask}
        return forward(module, hidden_states, attention_mask, *args, **given, **kwargs)

    return block


_TAKEN_APART = "a layer is run in two steps, before and behind core attention; no method of Megatron's ends there"
_TAKEN_TOGETHER = (
    "a subclass (`megatron.router`) takes a router's losses over both nano-batches; it relies on "
    "what each method computes"
)

PING_PONG = (
    Patch(
        target="megatron.core.transformer.transformer_block:TransformerBlock.forward",
        wrap=_interleaved,
        reviewed={
            "194039641fa3": "0.19.x, 0.18.2",
            "b0248f0dec10": "0.20 of 2026-08",
            "0e79266b8535": "dev of 2026-08",
        },
        why="the layers' loop calls one layer after the other; two nano-batches take turns inside the layers",
    ),
    Patch(
        target="megatron.core.transformer.transformer_layer:TransformerLayer._forward_attention",
        reviewed={
            "0b95d95abd32": "0.19.x",
            "7f7145882040": "0.18.2",
            "ff81dbaed790": "0.20 of 2026-08",
            "181f10a1f703": "dev of 2026-08",
        },
        why=_TAKEN_APART,
    ),
    Patch(
        target="megatron.core.transformer.transformer_layer:TransformerLayer.forward",
        reviewed={
            "8a9854499f12": "0.19.x",
            "4ef11ae0cef8": "0.18.2",
            "01a4c56bdff4": "0.20 of 2026-08",
            "d541a2b5f9e9": "dev of 2026-08",
        },
        why=_TAKEN_APART,
    ),
    Patch(
        target="megatron.core.transformer.attention:Attention.forward",
        reviewed={
            "f15d3a7a34fd": "0.19.x",
            "03d782de9aec": "0.18.2",
            "eedc5cdd0ad5": "0.20 of 2026-08",
            "75446d3da083": "dev of 2026-08",
        },
        why=_TAKEN_APART,
    ),
)
PING_PONG_ROUTER = (
    Patch(
        target="megatron.core.transformer.moe.router:TopKRouter.routing",
        reviewed={
            "09d9a85f7dba": "0.19.x, 0.20 of 2026-08",
            "3fa170311845": "0.18.2",
            "92e70f4bb86d": "dev of 2026-08",
        },
        why=_TAKEN_TOGETHER,
    ),
    Patch(
        target="megatron.core.transformer.moe.router:TopKRouter.apply_z_loss",
        reviewed={
            "d6d01030e61f": "0.19.x, 0.20 of 2026-08",
            "257081afd8ac": "0.18.2",
            "c735cee33b9a": "dev of 2026-08",
        },
        why=_TAKEN_TOGETHER,
    ),
    Patch(
        target="megatron.core.transformer.moe.router:TopKRouter._apply_aux_loss",
        reviewed={"993a3b59cab2": "0.19.x, 0.18.2, 0.20 of 2026-08", "42da73451aff": "dev of 2026-08"},
        why=_TAKEN_TOGETHER,
    ),
    Patch(
        target="megatron.core.transformer.moe.router:TopKRouter._apply_global_aux_loss",
        reviewed={"ac86fc2005fc": "0.19.x, 0.18.2, 0.20 of 2026-08", "e799e848102f": "dev of 2026-08"},
        why=_TAKEN_TOGETHER,
    ),
)


# The weight of a rank's share of the load-balancing loss, with unequal tokens per rank.
#
# With per-token loss Megatron weights each rank's share by that rank's own token count times the
# group size, which is the group's count only if all ranks hold as many (the derivation in the
# router's comment says so). We give every rank the group's mean count, so that the shares add up to
# the auxiliary loss of the whole microbatch times its tokens, however they are placed.
#
# The same change mends a slip of 0.19.2: under a padding mask the "local" count is read from a tensor
# that the all-reduce before it has overwritten with the group's, so the loss is too strong by the
# size of the group.
#
# A group may hold no token at all: a replica of ranks that only serve attention, or more replicas
# than tokens. Its loss is 0, not 0 / 0.
def _mean_of_group(count: Callable[..., Any]) -> Callable[..., Any]:
    """`get_tokens_per_expert_and_token_count` with the group's mean as local token count.

    The total, a divisor, is at least 1. Megatron's branch dev names several groups, `reduce_groups`.
    """

    @functools.wraps(count)
    def counted(
        routing_map: Any,
        reduce_group: dist.ProcessGroup,
        topk: int | None = None,
        with_padding_mask: bool = False,
        **groups: Sequence[dist.ProcessGroup],
    ) -> Any:
        tokens_per_expert, _, total = count(
            routing_map, reduce_group, topk=topk, with_padding_mask=with_padding_mask, **groups
        )
        divisor = total.clamp(min=1) if with_padding_mask else total
        size = math.prod(group.size() for group in groups.get("reduce_groups", (reduce_group,)))
        return tokens_per_expert, total / size, divisor

    return counted


AUX_LOSS = (
    Patch(
        target="megatron.core.transformer.moe.router:get_tokens_per_expert_and_token_count",
        wrap=_mean_of_group,
        reviewed={"e6a448660cfd": "0.19.x, 0.18.2, 0.20 of 2026-08", "c6db4d4f28ed": "dev of 2026-08"},
        why="with unequal tokens per rank the shares of the auxiliary loss would be weighted by placement",
    ),
)

_REPLACED = "a subclass (`megatron.router`) computes the same over the rows of all ranks; it relies on what this does"

SINKHORN = (
    Patch(
        target="megatron.core.transformer.moe.router:TopKRouter.sinkhorn_load_balancing",
        reviewed={"8523b5da08b7": "0.19.x, 0.18.2, 0.20 of 2026-08, dev of 2026-08"},
        why=_REPLACED,
    ),
    Patch(
        target="megatron.core.transformer.moe.moe_utils:sinkhorn",
        reviewed={"36d8868d186c": "0.19.x, 0.18.2, 0.20 of 2026-08, dev of 2026-08"},
        why=_REPLACED,
    ),
)
BY_SAMPLE = (
    Patch(
        target="megatron.core.transformer.moe.router:TopKRouter._apply_seq_aux_loss",
        reviewed={"9d100b0c254e": "0.19.x, 0.20 of 2026-08", "0dbb1526bf54": "dev of 2026-08"},
        why=_REPLACED,
    ),
    Patch(
        target="megatron.core.transformer.moe.router:TopKRouter.attach_and_log_load_balancing_loss",
        reviewed={"e983604d3ade": "0.19.x, 0.20 of 2026-08", "59d93e27c745": "dev of 2026-08"},
        why="it weights a rank's share of the loss by the tokens that it is told",
    ),
)
_RUN_BY_OURS = (
    "a subclass (`megatron.recurrent`) runs it with a convolution and a recurrence of ours under the names of its "
    "kernels; it relies on what this calls, and with what"
)

MIXERS = tuple(
    Patch(target=target, reviewed=reviewed, why=_RUN_BY_OURS)
    for target, reviewed in (
        (
            "megatron.core.ssm.gated_delta_net.gdn:GatedDeltaNet.forward",
            {"1c75e4403c52": "0.19.x", "87cd4b236a22": "0.20 of 2026-08", "5933271b0d48": "dev of 2026-08"},
        ),
        (
            "megatron.core.ssm.mamba_mixer:MambaMixer.forward",
            {"79fe529beb9f": "0.19.x", "8a291f20fcbf": "0.20 of 2026-08", "7f90e2271936": "dev of 2026-08"},
        ),
        (
            "megatron.core.ssm.mamba_mixer:MambaMixer._ssm_training",
            {"bc0f18d9463f": "0.19.x, 0.20 of 2026-08, dev of 2026-08"},
        ),
    )
)
PATCHES = (*TE_ATTENTION, *MTP, *PING_PONG, *PING_PONG_ROUTER, *AUX_LOSS, *SINKHORN, *BY_SAMPLE, *MIXERS)
