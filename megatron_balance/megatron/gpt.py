"""How this Megatron builds a GPT: from a model config (since 0.19), or by a provider of the script."""

from __future__ import annotations

import argparse
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron_balance.errors import ConfigError
from megatron_balance.megatron.core_attention import balanced_spec, give_core_attention, layer_spec_of

PROVIDER = "model_provider"
"""The parameter of `pretrain` that builds the model; an option since 0.19."""


def takes_provider(pretrain: Callable[..., Any]) -> bool:
    """Whether this Megatron's `pretrain` must be handed a function that builds the model."""
    given = inspect.signature(pretrain).parameters.get(PROVIDER)
    return given is not None and given.default is inspect.Parameter.empty


def start(pretrain: Callable[..., Any], args: argparse.Namespace) -> tuple[Any, Sequence[Callable[..., Any]]]:
    """The configuration of a GPT for `pretrain`, and its model provider where it takes one."""
    from megatron.training import argument_utils

    if takes_provider(pretrain):
        return argument_utils.pretrain_cfg_container_from_args(args), (functools.partial(_build, args),)
    model = argument_utils.gpt_config_from_args(args)
    return argument_utils.pretrain_cfg_container_from_args(args, model), ()


def _build(
    args: Any,
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> Any:
    """A model chunk with planned attention, as Megatron's own script builds it."""
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
    """Put our core attention into the model config, where this Megatron has one.

    Raises:
        ConfigError: the model is not a GPT.
    """
    from megatron.training import models

    config, gpt = getattr(cfg_container, "model", None), getattr(models, "GPTModelConfig", None)
    if config is None:
        return
    if gpt is None or not isinstance(config, gpt):
        raise ConfigError(f"the model is a {type(config).__name__}; plans are made for GPT models (GPTModelConfig)")
    config.transformer_layer_spec = layer_spec_of(config)


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
