"""A transformer block over two ping-pong nano-batches: one exchanges while the other computes.

Source: DistCA, section 4.1. The order is `compile.ping_pong`'s. Megatron's layer is taken apart at
core attention: everything before and after is its own submodules, called as `TransformerLayer` and
`Attention` call them; patches/layers.py pins the sources that were read for it. A layer that
cannot be taken apart so is refused.
"""

import argparse
import inspect
import logging
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import islice
from typing import Any, NamedTuple, cast

import torch
from megatron.core import tensor_parallel
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.typed_torch import apply_module
from megatron.core.utils import make_viewless_tensor
from torch import Tensor

from megatron_balance.analysis.backward import layer_runs
from megatron_balance.compile.ping_pong import forward as interleaved
from megatron_balance.errors import ConfigError
from megatron_balance.megatron import flags
from megatron_balance.megatron.core_attention import BalancedSeqParams, padded, rows_of, scale_and_sink
from megatron_balance.megatron.planning import recompute_of
from megatron_balance.megatron.router import BalancedRouter, router_of
from megatron_balance.planning.choice import Run
from megatron_balance.runtime.attention import AttentionCall

log = logging.getLogger(__name__)


def wanted(args: argparse.Namespace, config: Run, *, tell: bool = False) -> bool:
    """Whether microbatches run as two nano-batches; by default with planners made for it, where every
    flag allows it. `tell`: the log says why not. ConfigError: they shall be, and cannot.
    """
    if config.ping_pong is False or config.planner is None:
        return False
    reasons = flags.reasons(args, "ping_pong")
    if config.ping_pong == "auto":
        if not config.planner.planner.ping_pong:
            return False
        if reasons and tell:
            log.warning("microbatches run whole, not as two nano-batches: %s", "; ".join(reasons))
        return not reasons
    if reasons:
        raise ConfigError(f"ping_pong: true: {'; '.join(reasons)}")
    return True


def able(model: torch.nn.Module, config: Run) -> bool:
    """Whether layers can be taken apart at core attention. ConfigError: they shall be, and cannot."""
    for name, block in model.named_modules():
        for layer in block.layers if isinstance(block, TransformerBlock) else ():
            foreign = _foreign(layer)
            if foreign is None:
                continue
            reason = f"{name}: {foreign}"
            if config.ping_pong == "auto":
                log.warning("microbatches run whole, not as two nano-batches: %s", reason)
                return False
            raise ConfigError(f"ping_pong: true: {reason}")
    return True


def _foreign(layer: torch.nn.Module) -> str | None:
    """The reason why a layer cannot run nano-batch by nano-batch; None: it can."""
    plain = type(layer) is TransformerLayer and type(layer.self_attention) is SelfAttention
    if not plain or not all(
        isinstance(module, IdentityOp) for module in (layer.cross_attention, layer.pre_cross_attn_layernorm)
    ):
        return (
            f"{type(layer).__name__} with {type(getattr(layer, 'self_attention', None)).__name__} is not "
            "Megatron's own layer"
        )
    router = router_of(layer)
    if router is not None and type(router) is not BalancedRouter:
        return f"the router of its experts, {type(router).__name__}, does not come from Megatron's own layer spec"
    return None


_MLP_TAKES_PARAMS = "packed_seq_params" in inspect.signature(TransformerLayer._forward_mlp).parameters


class _NanoBatch(NamedTuple):
    """Nano-batch `number` of `count`. `rotary` [rows, 1, 1, D]; `padding` [1, T], with experts."""

    number: int
    count: int
    params: BalancedSeqParams
    rotary: Tensor | None
    padding: Tensor | None


def run_block(
    block: TransformerBlock,
    hidden_states: Tensor,
    rotary_pos_emb: Tensor | None,
    padding_mask: Tensor | None,
    params: BalancedSeqParams,
) -> Tensor:
    """`TransformerBlock.forward` over the nano-batches that `params` carry. Hidden states [T, 1,
    h], whose rows lie as `training.tokens.interleave` lays them out; `padding_mask` [1, T], where
    there are experts.
    """
    # Pipeline stages behind the first are handed their input.
    if not block.pre_process:
        hidden_states = cast(Tensor, block.input_tensor)
    hidden_states = make_viewless_tensor(inp=hidden_states, requires_grad=True, keep_graph=True)
    # Rows of a rank's share: sequence parallelism has split every nano-batch already.
    shares = block.config.tensor_model_parallel_size if block.config.sequence_parallel else 1
    rows = [_rows(nano_batch) for nano_batch in params.nano_batches]
    rotary: Sequence[Tensor | None] = [None] * len(rows) if rotary_pos_emb is None else rotary_pos_emb.split(rows)
    padding: Sequence[Tensor | None] = (
        [None] * len(rows) if padding_mask is None else padding_mask.split([n // shares for n in rows], dim=1)
    )
    nano_batches = [
        _NanoBatch(at, len(rows), *own) for at, own in enumerate(zip(params.nano_batches, rotary, padding, strict=True))
    ]
    states = hidden_states.split([n // shares for n in rows])
    # As `TransformerBlock.forward`, whose layers draw from the tracker under sequence parallelism.
    tracker: Any = tensor_parallel.get_cuda_rng_tracker()
    rng = tracker.fork() if block.config.sequence_parallel else nullcontext()
    with rng:
        left = iter(cast("list[TransformerLayer]", list(block.layers)))
        for num_layers, again in layer_runs(recompute_of(block.config), len(block.layers), training=block.training):
            layers = list(islice(left, num_layers))
            states = _checkpointed(layers, nano_batches, states) if again else _run_layers(layers, nano_batches, states)
    hidden_states = torch.cat(list(states))
    if block.final_layernorm is not None:
        hidden_states = make_viewless_tensor(
            inp=apply_module(block.final_layernorm)(hidden_states), requires_grad=True, keep_graph=True
        )
    return hidden_states


def _rows(params: BalancedSeqParams) -> int:
    assert params.position_ids is not None, "a planned microbatch knows its positions"
    return len(params.position_ids)


def _checkpointed(
    layers: Sequence[TransformerLayer], nano_batches: Sequence[_NanoBatch], states: Sequence[Tensor]
) -> Sequence[Tensor]:
    def run(*saved: Tensor) -> tuple[Tensor, ...]:
        return tuple(_run_layers(layers, nano_batches, saved))

    return tensor_parallel.checkpoint(run, False, *states)


def _run_layers(
    layers: Sequence[TransformerLayer], nano_batches: Sequence[_NanoBatch], states: Sequence[Tensor]
) -> Sequence[Tensor]:
    turning = [_PingPongRun(layers, nano_batch, state) for nano_batch, state in zip(nano_batches, states, strict=True)]
    for nano_batch, layer, part in interleaved(len(layers), len(nano_batches)):
        match part:
            case "linear":
                turning[nano_batch].linear(layer)
            case "start":
                turning[nano_batch].start(layer)
            case "attend":
                turning[nano_batch].attend()
            case "end":
                turning[nano_batch].end()
    return [each.state for each in turning]


class _PingPongRun:
    """One nano-batch on its way. `state` [T, 1, h]: hidden states; up to attention, the residual."""

    def __init__(self, layers: Sequence[TransformerLayer], nano_batch: _NanoBatch, state: Tensor) -> None:
        self.layers, self.nano_batch, self.state = layers, nano_batch, state
        self.qkv: tuple[Tensor, Tensor, Tensor] | None = None
        self.call: AttentionCall | None = None
        self.out: Tensor | None = None

    def linear(self, layer: int) -> None:
        """Run the layer before on from its attention, and this one up to its own."""
        # The linear step of a layer and of the next one up to its core attention are one segment.
        if layer:
            assert self.out is not None
            self.state = _behind(self.layers[layer - 1], self.out, self.state, self.nano_batch)
            self.out = None
        if layer < len(self.layers):
            self.qkv, self.state = _before(self.layers[layer], self.state, self.nano_batch.rotary)

    def start(self, layer: int) -> None:
        assert self.qkv is not None
        params = self.nano_batch.params
        core = self.layers[layer].self_attention.core_attention
        bound, (scale, sink) = params.bound_now(core), scale_and_sink(core)
        self.call = AttentionCall(bound, scale, params.backward, sink)
        self.call.start(*rows_of(*self.qkv, bound))
        self.qkv = None

    def attend(self) -> None:
        assert self.call is not None
        self.call.attend()

    def end(self) -> None:
        assert self.call is not None
        self.out = padded(self.call.end(), _rows(self.nano_batch.params))
        self.call = None


def _before(
    layer: TransformerLayer, state: Tensor, rotary: Tensor | None
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """Run a layer up to core attention: query, key and value [T, 1, heads, D]; the residual state."""
    normed = apply_module(layer.input_layernorm)(state)
    normed, residual = normed if isinstance(normed, tuple) else (normed, state)
    if layer.config.fp32_residual_connection:
        residual = residual.float()
    attention = layer.self_attention
    query, key, value = attention.get_query_key_value_tensors(normed, None, output_gate=False, split_qkv=True)
    skipped = cast("list[int] | None", layer.config.no_rope_freq)  # Megatron makes a list of a pattern or a number
    if rotary is not None and not (skipped and skipped[attention.layer_number - 1]):
        query, key = (
            apply_rotary_pos_emb(x, rotary, config=layer.config, cp_group=attention.pg_collection.cp)
            for x in (query, key)
        )
    return (query, key, value), residual


def _behind(layer: TransformerLayer, out: Tensor, residual: Tensor, nano_batch: _NanoBatch) -> Tensor:
    """Run a layer on from the output [T, 1, H * D] of core attention: its hidden states."""
    projected = apply_module(layer.self_attention.linear_proj)(out)
    with layer.bias_dropout_add_exec_handler():
        state = layer.self_attn_bda(layer.training, layer.config.bias_dropout_fusion)(
            projected, residual, layer.hidden_dropout
        )
    router = router_of(layer)
    if isinstance(router, BalancedRouter):
        router.of_microbatch = nano_batch.params
    with nullcontext() if router is None else router.routing_nano_batch(nano_batch.number, nano_batch.count):
        given: dict[str, Any] = {"packed_seq_params": nano_batch.params} if _MLP_TAKES_PARAMS else {}
        mlp = layer._forward_mlp(state, padding_mask=nano_batch.padding, **given)
    return cast(Tensor, mlp)  # a tuple only where CUDA graphs are captured
