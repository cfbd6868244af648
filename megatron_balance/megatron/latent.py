"""Megatron's multi-latent attention with latents that travel in place of keys and values
(`latent_kv`).

Its up projection hands the latent to core attention and computes nothing; the keys and values that it
would give are made where queries meet them, on whatever rank. The weight stays the module's, so
checkpoints are the same.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.multi_latent_attention import MLASelfAttention

from megatron_balance.errors import ConfigError
from megatron_balance.megatron.arguments import reasons_in

REASONS: tuple[tuple[Callable[[Any], bool], str], ...] = (
    (
        lambda args: not args.multi_latent_attention,
        "latent_kv: true goes with --multi-latent-attention; leave it out",
    ),
    (
        lambda args: args.recompute_granularity == "selective" and "mla_up_proj" in (args.recompute_modules or ()),
        "--recompute-modules mla_up_proj recomputes what 'latent_kv: true' does not keep; leave it out",
    ),
    (
        lambda args: args.fp8 is not None,
        "latent_kv: true makes keys and values of latents in bf16 only, and --fp8-format is given; leave one out",
    ),
    (
        lambda args: args.softmax_type not in (None, "vanilla"),
        "latent_kv: true has no attention sinks; leave out --softmax-type, or latent_kv",
    ),
)


class Latent(NamedTuple):
    """Of one layer and microbatch: the normalised latent [T, C] or [T, 1, C], and the weight of its up
    projection.
    """

    rows: torch.Tensor
    weight: torch.Tensor


def latent_reasons(args: argparse.Namespace, *, wanted: bool) -> list[str]:
    """Reasons why latents cannot travel, where they shall."""
    return reasons_in(REASONS, args) if wanted else []


def check_latent_run(*, joint: bool, nano_batches: bool, candidates: bool, self_check: bool) -> None:
    """Reject ways of running in which a rank attends for layers whose weights it does not have, or in
    which nobody has tried it.

    Raises:
        ConfigError: names the key.
    """
    for found, sentence in (
        (joint, "idle pipeline stages have no weights of other stages' layers; set 'pipeline: stages'"),
        (nano_batches, "it does not run as two nano-batches; set 'ping_pong: false'"),
        (candidates, "it does not change between strategies; name one strategy"),
        (self_check, "the self-check of a step has no attention over latents; set 'self_check: false'"),
    ):
        if found:
            raise ConfigError(f"latent_kv: true: {sentence}, or leave it out")


def install(chunk: torch.nn.Module) -> int:
    """Let the multi-latent attentions of a model chunk hand core attention the latent; their number.

    Raises:
        ConfigError: an up projection that does more than multiply by its weight.
    """
    count = 0
    for module in chunk.modules():
        if isinstance(module, MLASelfAttention):
            up: Any = module.linear_kv_up_proj
            if getattr(up, "bias", None) is not None or not hasattr(up, "weight"):
                raise ConfigError(
                    f"latent_kv: true: {type(up).__name__} is no plain product with a weight (a bias, or a norm of its "
                    "own); leave it out"
                )
            up.forward = _HandsOn(module, up)
            count += 1
    return count


class _HandsOn:
    """The up projection of an attention: puts the latent where its core attention takes it."""

    def __init__(self, attention: Any, up: Any) -> None:
        self.attention, self.up = attention, up

    def __call__(self, latent: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
        """Zeros in place of keys and values [T, ..., H * (D - R + V)], which take no memory."""
        config, group = self.attention.config, self.attention.tp_group
        if config.sequence_parallel and config.tensor_model_parallel_size > 1:
            rows = gather_from_sequence_parallel_region(latent, tensor_parallel_output_grad=True, group=group)
        else:
            rows = copy_to_tensor_model_parallel_region(latent, group=group)
        self.attention.core_attention.latent = Latent(rows, self.up.weight)
        return latent.new_zeros(()).expand(*rows.shape[:-1], self.up.weight.shape[0]), None


def taken(core_attention: Any) -> Latent | None:
    """The latent that was handed to a core attention for this call; None: keys and values."""
    found = getattr(core_attention, "latent", None)
    if found is not None:
        core_attention.latent = None
    return found
