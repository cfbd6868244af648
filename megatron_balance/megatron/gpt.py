"""How this Megatron builds a GPT, from a model config (since 0.19) or by a provider of the script,
and how ours gets into its layers: core attention, router, rotary embedding by position.
"""

import argparse
import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from megatron.core.ssm.mamba_layer import MambaLayerSubmodules
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.multi_latent_attention import MultiLatentAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

from megatron_balance.analysis.backward import Recomputed, held_layers
from megatron_balance.errors import ConfigError
from megatron_balance.megatron import flags
from megatron_balance.megatron.core_attention import BalancedCoreAttention, BalancedSeqParams
from megatron_balance.megatron.recurrent import MIXERS
from megatron_balance.megatron.router import check_router, give_router

PROVIDER = "model_provider"


def start(pretrain: Callable[..., Any], args: argparse.Namespace) -> tuple[Any, Sequence[Callable[..., Any]]]:
    """The configuration of a GPT for `pretrain`, and its model provider where it takes one."""
    from megatron.training import argument_utils

    # Whether this Megatron's `pretrain` must be handed a function that builds the model.
    given = inspect.signature(pretrain).parameters.get(PROVIDER)
    if given is not None and given.default is inspect.Parameter.empty:
        return argument_utils.pretrain_cfg_container_from_args(args), (functools.partial(_build, args),)
    hybrid = bool(flags.layers_by_pattern(args))
    model = argument_utils.hybrid_config_from_args(args) if hybrid else argument_utils.gpt_config_from_args(args)
    return argument_utils.pretrain_cfg_container_from_args(args, model), ()


def _build(
    args: Any,
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.training.arguments import core_transformer_config_from_args

    config = core_transformer_config_from_args(args) if config is None else config
    spec = get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=args.transformer_impl == "transformer_engine",
        normalization=args.normalization,
        qk_l2_norm=args.qk_l2_norm,
        vp_stage=vp_stage,
    )
    return GPTModel(
        config=config,
        transformer_layer_spec=balanced_spec(spec),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        vp_stage=vp_stage,
        pg_collection=pg_collection,
    )


def give_layer_spec(cfg_container: Any) -> None:
    """Put our core attention and mixers into a Megatron's model config, if it has one. ConfigError: it
    is neither a GPT nor a hybrid model.
    """
    from megatron.training import models

    config, gpt = getattr(cfg_container, "model", None), getattr(models, "GPTModelConfig", None)
    if config is None:
        return
    hybrid = getattr(models, "HybridModelConfig", None)
    if hybrid is not None and isinstance(config, hybrid):
        config.hybrid_stack_spec = _stack_spec_of(config)
        return
    if gpt is None or not isinstance(config, gpt):
        raise ConfigError(
            f"the model is a {type(config).__name__}; plans are made for GPT and hybrid models (GPTModelConfig, "
            "HybridModelConfig)"
        )
    config.transformer_layer_spec = _layer_spec_of(config)


def with_planned_model(pretrain: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call `pretrain`, whose model provider, if it takes one, builds planned attention."""
    bound = inspect.signature(pretrain).bind(*args, **kwargs)
    provider = bound.arguments.get(PROVIDER)
    if provider is not None:

        @functools.wraps(provider)
        def build(*given: Any, **named: Any) -> Any:
            model = provider(*given, **named)
            give_core_attention(model)
            return model

        bound.arguments[PROVIDER] = build
    return pretrain(*bound.args, **bound.kwargs)


def number_layers(model: torch.nn.Module, recompute: Recomputed) -> None:
    """Number the attention layers of a model chunk by what keeping costs (`held_layers`)."""
    cores = [module for _, module in _core_attentions(model)]
    for core, number in zip(cores, held_layers(recompute, len(cores)).numbers, strict=True):
        core.held_number = number


def balanced_spec(spec: Any) -> Any:
    """A copy of a spec with our core attention and router. ConfigError: it has no place for it."""
    result = copy.deepcopy(spec)
    replaced = sum(_replace(layer) for layer in getattr(result, "layer_specs", None) or [result])
    if not replaced:
        raise ConfigError(
            "the model's layer spec has no self-attention with a core_attention submodule, and no gated delta net; "
            "nothing to balance"
        )
    return result


def _stack_spec_of(model_config: Any) -> ModuleSpec:
    """The spec of a hybrid model's layers, with ours in it. ConfigError: one that cannot have ours."""
    from megatron.training.models import hybrid

    given = model_config.hybrid_stack_spec or hybrid.default_hybrid_stack_spec
    if model_config.restore_modelopt_state or model_config.transformer.transformer_impl == "inference_optimized":
        raise ConfigError(
            "a hybrid model whose layers are those of inference or of ModelOpt does not run plans; use "
            "--transformer-impl transformer_engine"
        )
    spec = copy.deepcopy(given)
    for layer in vars(spec.submodules).values():
        if isinstance(getattr(layer, "submodules", None), MambaLayerSubmodules):
            _give_mixer(layer.submodules.mixer)
        elif isinstance(getattr(layer, "submodules", None), TransformerLayerSubmodules):
            _replace(layer)
    return spec


def _give_mixer(spec: Any) -> bool:
    """Put ours in the place of Megatron's mixer of a layer, if it is one."""
    module: Any = getattr(spec, "module", None)
    ours = MIXERS.get(module)
    if ours is not None:
        spec.module = ours
    return ours is not None


def _replace(layer: ModuleSpec) -> int:
    submodules = layer.submodules
    if _core_of(getattr(submodules, "cross_attention", None)) is not None:
        raise ConfigError("the layer spec has cross-attention; encoder-decoder models are not supported")
    give_router(getattr(submodules, "mlp", None))
    attention: Any = getattr(submodules, "self_attention", None)
    if _give_mixer(attention):
        return 1
    if _core_of(attention) is None:
        return 0
    attention.submodules.core_attention = BalancedCoreAttention
    return 1


def planned_mtp_block(spec: Any) -> Any:
    """A copy of the spec of the layers that predict further tokens, with our core attention and
    router; None: this stage has none. ConfigError: a layer without a core attention of its own.
    """
    if spec is None:
        return None
    result = copy.deepcopy(spec)
    # Layers that predict further tokens have specs of their own inside.
    for layer in result.layer_specs:
        if not _replace(layer.submodules.mtp_model_layer):
            raise ConfigError(
                "--mtp-num-layers: a layer's spec has no self-attention with a core_attention submodule, and no gated "
                "delta net; leave it out"
            )
    return result


def _core_of(attention: Any) -> Any:
    return getattr(getattr(attention, "submodules", None), "core_attention", None)


def _layer_spec_of(model_config: Any) -> Callable[..., Any]:
    from megatron.training.models.gpt import default_layer_spec

    given = model_config.transformer_layer_spec

    def build(config: Any, vp_stage: int | None = None) -> Any:
        if given is None:
            spec = default_layer_spec(config, vp_stage)  # pyright: ignore[reportArgumentType]
        elif isinstance(given, ModuleSpec) or not callable(given):
            spec = given
        elif "vp_stage" in inspect.signature(given).parameters:
            spec = given(config, vp_stage=vp_stage)
        else:
            spec = given(config)
        return balanced_spec(spec)

    return build


def give_core_attention(model: torch.nn.Module) -> None:
    """Put ours, with its sinks, in place of Megatron's in a model built past the layer spec."""
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
    """Reject a model in which an attention does not run plans."""
    for name, module in model.named_modules():
        check_router(module, name)
        if isinstance(module, tuple(MIXERS)) and not isinstance(module, tuple(MIXERS.values())):
            raise ConfigError(
                f"{name} is Megatron's own {type(module).__name__}, which knows nothing of plans. Build the model from "
                "its model config (pretrain's first argument) instead of a model_provider of the script's own"
            )
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


class _PositionRotary(torch.nn.Module):
    """Megatron's rotary embedding at the positions that a `BalancedSeqParams` carries: a rank holds
    fragments of many sequences, in any order. Has no parameters and no buffers.
    """

    inner: RotaryEmbedding
    _table: torch.Tensor | None

    def __init__(self, inner: RotaryEmbedding, max_positions: int, *, of_rows: bool = False) -> None:
        """Wrap `inner`, for positions below `max_positions`."""
        # `of_rows`: for multi-latent attention, which squeezes the batch out of packed sequences.
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
        # The answer goes straight to `forward`, so nothing is kept between the two calls and
        # several microbatches may be in flight.
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
        """Frequencies [T, 1, 1, D] (or [T, 1, D]: `of_rows`) of positions, by the formula of the
        wrapped module. Of YaRN also the factor of concentration, as Megatron's.
        """
        if not isinstance(positions, torch.Tensor):
            return self.inner(positions, packed_seq=packed_seq, cp_group=cp_group)
        table = self._table
        if table is None or table.device != positions.device:
            made = self.inner.get_emb(self._max_positions)
            table, self._concentration = made if isinstance(made, tuple) else (made, None)
            self._table = table = table.to(positions.device)
        # [T, 1, 1, D] of a table [positions, 1, 1, D].
        found = table[positions]
        found = found[:, 0] if self._of_rows else found
        return found if self._concentration is None else (found, self._concentration)


def rotate_by_position(model: torch.nn.Module, max_positions: int) -> None:
    """Give GPT models inside `model` rotary embeddings by position. ConfigError: of another kind."""
    for module in list(model.modules()):
        rotary = vars(module)["_modules"].get("rotary_pos_emb")
        if rotary is None or isinstance(rotary, _PositionRotary):
            continue
        if type(rotary) not in (RotaryEmbedding, YarnRotaryEmbedding):
            raise ConfigError(
                f"rotary embedding {type(rotary).__name__} cannot be applied by explicit positions; "
                "use --position-embedding-type rope, yarn, learned_absolute or none"
            )
        of_rows = isinstance(module, MultiLatentAttention)
        module.rotary_pos_emb = _PositionRotary(rotary, max_positions, of_rows=of_rows)
