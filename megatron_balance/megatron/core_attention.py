"""Planned attention as Megatron's core attention module, over keys and values or over latents; and
`BalancedSeqParams`, which carry a microbatch's plan to it in the place of Megatron's PackedSeqParams.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from megatron_balance.errors import ConfigError
from megatron_balance.ir.mask import Mask
from megatron_balance.megatron import planning
from megatron_balance.runtime.attention import BackwardSlot, balanced_attention, latent_attention
from megatron_balance.runtime.bind import Bound
from megatron_balance.runtime.recurrent import RecurrentBound
from megatron_balance.training.binding import MaskBounds, RecurrentBounds


class CountedMask(torch.Tensor):
    """A loss mask whose `sum` is a count that it was given. Results of operations are plain."""

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
    """Values of the tokens ahead of each row in its sequence, for multi-token prediction."""

    # Megatron divides a depth's loss by the sum of this rank's mask. Tokens lie where the plan has
    # them, so every rank reports the mean of all (`count`). Masks from depth 1 on are weighted: their
    # sum over the pool is that of depth 0, whose mask is the mean in every row.

    # By depth, from 0 for the row itself, each [1, T]; rows with no token so far ahead have zeros.
    tokens: tuple[torch.Tensor, ...]
    positions: tuple[torch.Tensor, ...]
    labels: tuple[torch.Tensor, ...]
    masks: tuple[torch.Tensor, ...]
    # The mean of a rank, as a scalar tensor; every mask says that it is its sum.
    count: torch.Tensor

    def rolled(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """One of these tensors one token ahead, and a count, as of `roll_tensor`; padding stays."""
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

    bound: Bound | None = None  # the plan that this rank runs in all layers (pipeline ticks)
    # Or the plan bound for layers of each mask, of those that keep and those that replay.
    layers: MaskBounds | None = None
    # The slot for the backward tick's plan, if the pipeline stages attend together.
    backward: BackwardSlot | None = None
    # [T] int64: position of each local token, padding included; nano-batch by nano-batch.
    position_ids: torch.Tensor | None = None
    # [T] int64: the sample in which each row was read, below `num_samples`; None: nobody asks.
    samples: torch.Tensor | None = None
    num_samples: int = 0
    # Lengths of the sequences of a microbatch that this rank attends for itself, without a plan: of
    # the self-check alone.
    alone: tuple[int, ...] = ()
    ahead: Ahead | None = None  # of a model that predicts further tokens
    # The parameters of each ping-pong nano-batch, in place of `bound`.
    nano_batches: tuple[BalancedSeqParams, ...] = ()

    def __post_init__(self) -> None:
        """Leave out the base class's index of sequences for Mamba, which needs cu_seqlens."""

    def bound_now(self, core_attention: Any) -> Bound:
        """The plan that a core attention runs now: of its layer's mask and of what keeping costs
        there, or the tick's, of the backward once that has begun. ConfigError: `gpt.number_layers`
        did not see it.
        """
        number = getattr(core_attention, "held_number", None)
        if number is None:
            raise ConfigError(
                "a core attention ran that was not there at the first training step; build the model before `pretrain` "
                "trains it"
            )
        if self.layers is not None:
            return self.layers.of_layer(number, planning.mask_of(core_attention))
        # The other stages of the backward tick are in its plan alone, whose layers all have one mask.
        bound = self.bound if self.backward is None or self.backward.bound is None else self.backward.bound
        assert bound is not None, "a planned microbatch is bound before the model sees it"
        return bound

    def recurrent_now(self, num_heads: int, halo: int, device: torch.device) -> RecurrentBound:
        """The plan bound for a recurrent layer of so many heads on this rank and of so wide a halo."""
        if self.alone:
            return RecurrentBounds.alone(self.alone, device).of(num_heads, halo)
        assert self.layers is not None, "recurrent layers run neither as two nano-batches nor in joint ticks"
        return self.layers.recurrent.of(num_heads, halo)


class BalancedCoreAttention(MegatronModule):
    """Core attention that runs the plan of its microbatch over the pool, on this rank's heads."""

    # A learnable sink's logit is its one parameter, as Megatron's own, so checkpoints are the same.

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
        """Take a `CoreAttentionBuilder`'s arguments; `softmax_offset`: of what is replaced."""
        super().__init__(config=config)
        if attention_type != "self" or attn_mask_type not in (AttnMaskType.causal, AttnMaskType.padding_causal):
            raise ConfigError(
                f"layer {layer_number}: balanced attention is causal self-attention, got {attention_type}, "
                f"{attn_mask_type.name}"
            )
        if attention_dropout or (attention_dropout is None and config.attention_dropout):
            raise ConfigError("attention dropout cannot be reproduced across placements; use --attention-dropout 0")
        self.layer_number = layer_number
        self.latent: _Latent | None = None  # handed over by the attention for the call that comes (`hand_latents_on`)
        self.softmax_scale = softmax_scale if softmax_scale is not None else 1.0 / math.sqrt(config.kv_channels or 1)
        self.softmax_offset = softmax_offset
        if softmax_offset is None and config.softmax_type != "vanilla":
            groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp"])
            self.softmax_offset = self._offset(config.num_attention_heads // groups.tp.size())

    def _offset(self, num_heads: int) -> torch.Tensor:
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
        if self.config.softmax_type != "learnable":
            return super().sharded_state_dict(prefix, sharded_offsets, metadata)
        learned = self.state_dict(prefix="", keep_vars=True)
        # As Megatron's own core attention: split over tensor-parallel ranks by head.
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
        """`attend` of query and key [T, 1, H or G, D] and value [T, 1, G, V]: [T, 1, H * V]."""
        if not isinstance(packed_seq_params, BalancedSeqParams):
            raise ConfigError(
                f"layer {self.layer_number}: core attention was called without a plan. The forward step must come "
                "from megatron_balance; "
                "a script that calls the model itself (inference, a custom loop) cannot run with --balance-config"
            )
        if attention_bias is not None:
            raise ConfigError(f"layer {self.layer_number}: attention bias is not supported")
        # Taken once: the next call may come without a latent.
        given, self.latent = self.latent, None
        if given is not None:
            return _attend_latent(query, key, given, packed_seq_params, self)
        return attend(query, key, value, packed_seq_params, self)


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: BalancedSeqParams, core_attention: Any
) -> torch.Tensor:
    """Planned attention in Megatron's shapes, as of a core attention, ours or Transformer Engine's.

    Query [T, 1, H, D], key [T, 1, G, D], value [T, 1, G, V]; returns [T, 1, H * V]. Rows lie as the
    plan laid them out, padding that no sequence owns last: its output is zero.
    """
    scale, sink = scale_and_sink(core_attention)
    if params.alone:
        return _attend_alone(query, key, value, params.alone, (scale, planning.mask_of(core_attention), sink))
    bound = params.bound_now(core_attention)
    q, k, v = rows_of(query, key, value, bound)
    out = balanced_attention(q, k, v, bound, scale, params.backward, sink=sink)
    return padded(out, query.shape[0])


def _attend_latent(
    query: torch.Tensor, key: torch.Tensor, given: _Latent, params: BalancedSeqParams, core_attention: Any
) -> torch.Tensor:
    """`attend` over latents, query [T, (1,) H, D]; of the key only the rotary part counts."""
    scale, sink = scale_and_sink(core_attention)
    assert not params.alone, "latent_reasons refuses a self-check"
    assert sink is None, "latent_reasons refuses sinks"
    bound = params.bound_now(core_attention)
    assert bound.shape.latent is not None, "the plan was bound for latents"
    rank, rope = bound.shape.latent
    # Latent and the rotary part of the key, which all heads share: [T, C + R].
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
    """`attend` by torch over whole sequences, one behind the other. `how`: scale, mask, sink."""
    scale, mask, sink = how
    parts: list[torch.Tensor] = []
    start = 0
    for length in lengths:
        q, k, v = (
            x.view(x.shape[0], *x.shape[-2:])[start : start + length].transpose(0, 1) for x in (query, key, value)
        )
        queries, keys = torch.arange(length)[:, None], torch.arange(length)
        # queries [T, 1] see keys [first, stop) of their own sequence.
        first, stop = mask.keys(0, queries)
        # [1, T, T] bool, over all heads.
        seen = ((keys >= first) & (keys < stop)).to(q.device)[None]
        if sink is not None:  # a key of zeros, whose score is the sink, and its value
            k, v = (F.pad(x, (0, 0, 0, 1)) for x in (k, v))
            own = torch.zeros(seen.shape, dtype=q.dtype, device=q.device).masked_fill(~seen, -math.inf)
            # [H, T, 1 + T]: each head's sink as the score of one more key; masked keys score -inf.
            seen = torch.cat([own.expand(len(sink), -1, -1), sink.to(q.dtype)[:, None, None].expand(-1, length, 1)], 2)
        parts.append(F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=True))
        start += length
    return padded(torch.cat(parts, dim=1).transpose(0, 1), query.shape[0])


def rows_of(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bound: Bound
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The rows [T, heads, D] that sequences own, of Megatron's [rows, (1,) heads, D]."""
    own = (x[: bound.num_tokens] for x in (query, key, value))
    # Multi-latent attention squeezes the second dimension away.
    q, k, v = ((x[:, 0] if x.dim() == 4 else x).contiguous() for x in own)
    return q, k, v


def padded(out_THD: torch.Tensor, rows: int) -> torch.Tensor:
    """Core attention's output in Megatron's shape [rows, 1, H * D], zero where a row is padding."""
    return F.pad(out_THD.flatten(1)[:, None], (0, 0, 0, 0, 0, rows - out_THD.shape[0]))


def scale_and_sink(core_attention: Any) -> tuple[float, torch.Tensor | None]:
    """Of a core attention, ours or patched Transformer Engine's: the factor of scores, and the logit
    [H] that each head has beside its keys, of this tensor-parallel rank; None: none.
    """
    ours, offset = isinstance(core_attention, BalancedCoreAttention), getattr(core_attention, "softmax_offset", None)
    scale = core_attention.softmax_scale if ours else softmax_scale(core_attention.config)
    return scale, None if offset is None else offset.view(-1)


def softmax_scale(config: Any) -> float:
    """The factor of scores in Megatron's own attention modules, the same in all layers."""
    return config.softmax_scale if config.softmax_scale is not None else 1.0 / math.sqrt(config.kv_channels)


class _Latent(NamedTuple):
    """Of a layer and microbatch: the normalised latent [T, (1,) C], its up projection's weight."""

    rows: torch.Tensor
    weight: torch.Tensor


def latent_model_reasons(chunks: Sequence[torch.nn.Module]) -> list[str]:
    """Reasons of a built model: an up projection that does more than multiply by its weight."""
    ups: list[Any] = [each.linear_kv_up_proj for chunk in chunks for each in _latent_attentions(chunk)]
    kinds = dict.fromkeys(
        type(up).__name__ for up in ups if getattr(up, "bias", None) is not None or not hasattr(up, "weight")
    )
    return [
        f"latent_kv: true: {kind} is no plain product with a weight (a bias, or a norm of its own); leave it out"
        for kind in kinds
    ]


def hand_latents_on(chunk: torch.nn.Module) -> int:
    """Let the multi-latent attentions of a model chunk hand core attention the latent, in place of
    keys and values; their number. ConfigError: one for which `latent_model_reasons` has a reason.
    """
    reasons = latent_model_reasons([chunk])
    if reasons:
        raise ConfigError("; ".join(reasons))
    attentions: list[Any] = _latent_attentions(chunk)
    for module in attentions:
        module.linear_kv_up_proj.forward = _HandsOn(module, module.linear_kv_up_proj)
    return len(attentions)


def _latent_attentions(chunk: torch.nn.Module) -> list[MLASelfAttention]:
    return [each for each in chunk.modules() if isinstance(each, MLASelfAttention)]


class _HandsOn:
    """The up projection of an attention, which hands the latent to its core attention."""

    # The weight stays the module's, so checkpoints are the same.

    def __init__(self, attention: Any, up: Any) -> None:
        self.attention, self.up = attention, up

    def __call__(self, latent: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
        config, group = self.attention.config, self.attention.tp_group
        if config.sequence_parallel and config.tensor_model_parallel_size > 1:
            rows = gather_from_sequence_parallel_region(latent, tensor_parallel_output_grad=True, group=group)
        else:
            rows = copy_to_tensor_model_parallel_region(latent, group=group)
        self.attention.core_attention.latent = _Latent(rows, self.up.weight)
        # Zeros in place of keys and values [T, ..., H * (D - R + V)], of stride 0: they take no
        # memory, and the keys and values that the latent would give are made where queries meet
        # them, on whatever rank.
        return latent.new_zeros(()).expand(*rows.shape[:-1], self.up.weight.shape[0]), None
