"""Planned attention as Megatron's core attention module, and how it gets into a layer spec."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from megatron_balance.analysis.backward import Recompute, held_layers
from megatron_balance.errors import ConfigError
from megatron_balance.ir.mask import Mask
from megatron_balance.megatron import latent
from megatron_balance.megatron.masks import mask_of, sink_of
from megatron_balance.megatron.packed import BalancedSeqParams
from megatron_balance.megatron.router import check_router, give_router
from megatron_balance.runtime.attention import balanced_attention, latent_attention
from megatron_balance.runtime.bind import Bound


class BalancedCoreAttention(MegatronModule):
    """Core attention that runs the plan of its microbatch over the pool.

    With the parameter of Megatron's own alone, the logit of a learnable sink, so checkpoints are the
    same with and without us. Heads are those of this tensor-parallel rank.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        softmax_offset: torch.Tensor | None = None,
    ) -> None:
        """Take Megatron's arguments of a core attention (`CoreAttentionBuilder`), by keyword.

        `k_channels`, `v_channels`: of multi-latent attention; tensors say them again at each call.
        `softmax_offset`: of the core attention that this one replaces.
        """
        super().__init__(config=config)
        if attention_type != "self" or attn_mask_type not in (AttnMaskType.causal, AttnMaskType.padding_causal):
            raise ConfigError(
                f"layer {layer_number}: balanced attention is causal self-attention, got {attention_type}, "
                f"{attn_mask_type.name}"
            )
        if attention_dropout or (attention_dropout is None and config.attention_dropout):
            raise ConfigError("attention dropout cannot be reproduced across placements; use --attention-dropout 0")
        self.layer_number = layer_number
        self.latent: latent.Latent | None = None
        """Handed over by the attention for the call that comes (`megatron.latent`)."""
        self.softmax_scale = softmax_scale if softmax_scale is not None else 1.0 / math.sqrt(config.kv_channels or 1)
        self.softmax_offset = softmax_offset
        if softmax_offset is None and config.softmax_type != "vanilla":
            groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp"])
            self.softmax_offset = self._offset(config.num_attention_heads // groups.tp.size())

    def _offset(self, num_heads: int) -> torch.Tensor:
        """The logits [num_heads] of the sinks, as Megatron's core attention makes them."""
        kind, dtype = self.config.softmax_type, self.config.params_dtype
        device = torch.cuda.current_device()
        if kind == "off-by-one":
            return torch.zeros(num_heads, device=device, dtype=dtype)
        made = torch.nn.Parameter(torch.empty(num_heads, device=device, dtype=dtype))
        if self.config.perform_initialization:
            assert self.config.init_method is not None
            self.config.init_method(made)
        return made

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """The sinks in a checkpoint, split by head, under Megatron's own name."""
        if self.config.softmax_type != "learnable":
            return super().sharded_state_dict(prefix, sharded_offsets, metadata)
        learned = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(learned, prefix, {"softmax_offset": 0}, sharded_offsets)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: object = None,
    ) -> torch.Tensor:
        """Attention of query and key [T, 1, H or G, D] and value [T, 1, G, V]; see `attend`.

        Rows lie as the plan laid them out. Returns [T, 1, H * V].
        """
        if not isinstance(packed_seq_params, BalancedSeqParams):
            raise ConfigError(
                f"layer {self.layer_number}: core attention was called without a plan. The forward step must come "
                "from megatron_balance; "
                "a script that calls the model itself (inference, a custom loop) cannot run with --balance-config"
            )
        if attention_bias is not None:
            raise ConfigError(f"layer {self.layer_number}: attention bias is not supported")
        given = latent.taken(self)
        if given is not None:
            return _attend_latent(query, key, given, packed_seq_params, self)
        return attend(query, key, value, packed_seq_params, self)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    params: BalancedSeqParams,
    core_attention: Any,
) -> torch.Tensor:
    """Planned attention in Megatron's shapes, as of a core attention, ours or Transformer Engine's.

    Query [T, 1, H, D], key [T, 1, G, D], value [T, 1, G, V]; returns [T, 1, H * V]. Multi-latent
    attention squeezes the second dimension away.

    The last rows may be padding that no sequence owns (an idle rank, or a multiple of the
    tensor-parallel size): their output is zero.
    """
    scale, mask, sink = softmax_scale_of(core_attention), mask_of(core_attention), sink_of(core_attention)
    if params.alone:
        return _attend_alone(query, key, value, params.alone, (scale, mask, sink))
    bound = params.bound_now(held_number(core_attention), mask)
    q, k, v = rows_of(query, key, value, bound)
    out = balanced_attention(q, k, v, bound, scale, params.backward, sink=sink)
    return padded(out, query.shape[0])


def _attend_latent(
    query: torch.Tensor, key: torch.Tensor, given: latent.Latent, params: BalancedSeqParams, core_attention: Any
) -> torch.Tensor:
    """`attend` over latents, query [T, (1,) H, D]. Of the key only the rotary part counts, which all
    heads share.
    """
    scale, mask = softmax_scale_of(core_attention), mask_of(core_attention)
    assert not params.alone, "latent_reasons refuses a self-check"
    assert sink_of(core_attention) is None, "latent_reasons refuses sinks"
    bound = params.bound_now(held_number(core_attention), mask)
    assert bound.shape.latent is not None, "the plan was bound for latents"
    rank, rope = bound.shape.latent
    rows = torch.cat([given.rows.flatten(0, -2), key.flatten(0, -3)[:, 0, -rope:]], dim=-1)
    own = query.flatten(0, -3)[: bound.num_tokens].contiguous()
    assert rows.shape[1] == rank + rope, "a latent of another width than the plan's"
    latents = rows[: bound.num_tokens, None].contiguous()
    out = latent_attention(own, latents, given.weight, bound, scale, params.backward)
    return padded(out, query.shape[0])


def _attend_alone(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: Sequence[int],
    how: tuple[float, Mask, torch.Tensor | None],
) -> torch.Tensor:
    """Attention of whole sequences that lie one behind the other, by torch; shapes of `attend`.

    `how`: the factor of scores, the mask, and a sink.
    """
    scale, mask, sink = how
    parts: list[torch.Tensor] = []
    start = 0
    for length in lengths:
        q, k, v = (
            x.view(x.shape[0], *x.shape[-2:])[start : start + length].transpose(0, 1) for x in (query, key, value)
        )
        queries, keys = torch.arange(length)[:, None], torch.arange(length)
        first, stop = mask.keys(0, queries)
        seen = ((keys >= first) & (keys < stop)).to(q.device)[None]
        if sink is not None:  # a key of zeros, whose score is the sink, and its value
            k, v = (F.pad(x, (0, 0, 0, 1)) for x in (k, v))
            own = torch.zeros(seen.shape, dtype=q.dtype, device=q.device).masked_fill(~seen, -math.inf)
            seen = torch.cat([own.expand(len(sink), -1, -1), sink.to(q.dtype)[:, None, None].expand(-1, length, 1)], 2)
        parts.append(F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=True))
        start += length
    return padded(torch.cat(parts, dim=1).transpose(0, 1), query.shape[0])


def rows_of(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bound: Bound
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The rows [T, heads, D] that sequences own, of Megatron's [rows, 1, heads, D].

    The last rows may be padding. Multi-latent attention squeezes the second dimension away.
    """
    own = (x[: bound.num_tokens] for x in (query, key, value))
    q, k, v = ((x[:, 0] if x.dim() == 4 else x).contiguous() for x in own)
    return q, k, v


def padded(out_THD: torch.Tensor, rows: int) -> torch.Tensor:
    """Core attention's output in Megatron's shape [rows, 1, H * D], zero where a row is padding."""
    return F.pad(out_THD.flatten(1)[:, None], (0, 0, 0, 0, 0, rows - out_THD.shape[0]))


def number_layers(model: torch.nn.Module, recompute: Recompute) -> None:
    """Number the attention layers of a model chunk by what keeping costs (`HeldLayers`)."""
    cores = [module for _, module in _core_attentions(model)]
    for core, number in zip(cores, held_layers(recompute, len(cores)).numbers, strict=True):
        core.held_number = number


def held_number(core_attention: Any) -> int:
    """The number of a core attention's layer.

    Raises:
        ConfigError: the model was not numbered.
    """
    number = getattr(core_attention, "held_number", None)
    if number is None:
        raise ConfigError(
            "a core attention ran that was not there at the first training step; build the model before `pretrain` "
            "trains it"
        )
    return number


def softmax_scale_of(core_attention: Any) -> float:
    """The factor of scores in a core attention, ours or patched Transformer Engine's."""
    if isinstance(core_attention, BalancedCoreAttention):
        return core_attention.softmax_scale
    config = core_attention.config
    return config.softmax_scale if config.softmax_scale is not None else 1.0 / math.sqrt(config.kv_channels)


def balanced_spec(spec: Any) -> Any:
    """A copy of a layer or block spec with our core attention, and our router before experts.

    Raises:
        ConfigError: the spec has an attention that is not causal self-attention with a core
            attention of its own.
    """
    result = copy.deepcopy(spec)
    replaced = sum(_replace(layer) for layer in getattr(result, "layer_specs", None) or [result])
    if not replaced:
        raise ConfigError(
            "the model's layer spec has no self-attention with a core_attention submodule; nothing to balance"
        )
    return result


def _replace(layer: ModuleSpec) -> int:
    submodules = layer.submodules
    if _core_of(getattr(submodules, "cross_attention", None)) is not None:
        raise ConfigError("the layer spec has cross-attention; encoder-decoder models are not supported")
    attention = getattr(submodules, "self_attention", None)
    if _core_of(attention) is None:
        return 0
    attention.submodules.core_attention = BalancedCoreAttention  # pyright: ignore[reportOptionalMemberAccess]
    give_router(getattr(submodules, "mlp", None))
    return 1


def planned_mtp_block(spec: Any) -> Any:
    """A copy of the spec of the layers that predict further tokens, with our core attention and
    router; None: this stage has none.

    Raises:
        ConfigError: a layer without a core attention of its own.
    """
    if spec is None:
        return None
    result = copy.deepcopy(spec)
    for layer in result.layer_specs:
        if not _replace(layer.submodules.mtp_model_layer):
            raise ConfigError(
                "--mtp-num-layers: a layer's spec has no self-attention with a core_attention submodule; leave it out"
            )
    return result


def _core_of(attention: Any) -> Any:
    return getattr(getattr(attention, "submodules", None), "core_attention", None)


def layer_spec_of(model_config: Any) -> Callable[..., Any]:
    """A `transformer_layer_spec` for GPTModelConfig: the model's own, with our core attention."""
    from megatron.training.models.gpt import default_layer_spec

    given = model_config.transformer_layer_spec

    def build(config: Any, vp_stage: int | None = None) -> Any:
        if given is None:
            spec = default_layer_spec(config, vp_stage)  # pyright: ignore[reportArgumentType]
        elif isinstance(given, ModuleSpec) or not callable(given):
            spec = given
        else:
            spec = given(config)
        return balanced_spec(spec)

    return build


def give_core_attention(model: torch.nn.Module) -> None:
    """Put our core attention in place of Megatron's own in a model that was built past the layer
    spec, with its sinks.
    """
    for attention in list(model.modules()):
        core = vars(attention)["_modules"].get("core_attention")
        if type(core) is DotProductAttention:
            attention.core_attention = BalancedCoreAttention(
                *(core.config, core.layer_number, core.attn_mask_type, "self"),
                softmax_scale=core.softmax_scale,
                softmax_offset=getattr(core, "softmax_offset", None),
            )


def _core_attentions(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Attention modules' names and their core attentions, in the order of the layers."""
    for name, module in model.named_modules():
        core = vars(module)["_modules"].get("core_attention")
        if core is not None:
            yield name, core


def check_model(model: torch.nn.Module, te_patched: bool) -> None:
    """Reject a model in which an attention does not run plans.

    Raises:
        ConfigError: a core attention that is not ours; the script builds its model past the layer
            spec.
    """
    for name, module in model.named_modules():
        check_router(module, name)
    for name, core in _core_attentions(model):
        if isinstance(core, BalancedCoreAttention):
            continue
        if te_patched and type(core).__name__ == "TEDotProductAttention" and not core.config.multi_latent_attention:
            continue
        raise ConfigError(
            f"{name}.core_attention is {type(core).__name__}, which knows nothing of plans. Build the model from its "
            "model config "
            "(pretrain's first argument) instead of a model_provider of the script's own"
        )
