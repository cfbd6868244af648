"""Megatron's multi-latent attention with latents that travel in place of keys and values
(`latent_kv`).

Its up projection hands the latent to core attention and computes nothing; the keys and values that it
would give are made where queries meet them, on whatever rank. The weight stays the module's, so
checkpoints are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.multi_latent_attention import MLASelfAttention

from megatron_balance.errors import ConfigError
from megatron_balance.megatron.tokens import job_device


class Latent(NamedTuple):
    """Of one layer and microbatch: the normalised latent [T, C] or [T, 1, C], and the weight of its up
    projection.
    """

    rows: torch.Tensor
    weight: torch.Tensor


def run_reasons(*, joint: bool, nano_batches: bool, candidates: bool, self_check: bool, parts_heads: bool) -> list[str]:
    """Reasons of a way of running why latents cannot travel: a rank would attend for layers whose
    weights it does not have, or with some of the heads, or nobody has tried it.
    """
    ways = (
        (joint, "idle pipeline stages have no weights of other stages' layers; set 'pipeline: stages'"),
        (nano_batches, "it does not run as two nano-batches; set 'ping_pong: false'"),
        (candidates, "it does not change between strategies; name one strategy"),
        (self_check, "the self-check of a step has no attention over latents; set 'self_check: false'"),
        (parts_heads, "the planner parts heads, and all heads come in one latent; choose another planner"),
    )
    return [f"latent_kv: true: {sentence}, or leave it out" for found, sentence in ways if found]


def model_reasons(chunks: Sequence[torch.nn.Module]) -> list[str]:
    """Reasons of a built model: an up projection that does more than multiply by its weight."""
    ups: list[Any] = [each.linear_kv_up_proj for chunk in chunks for each in _attentions(chunk)]
    kinds = dict.fromkeys(
        type(up).__name__ for up in ups if getattr(up, "bias", None) is not None or not hasattr(up, "weight")
    )
    return [
        f"latent_kv: true: {kind} is no plain product with a weight (a bias, or a norm of its own); leave it out"
        for kind in kinds
    ]


def install(chunk: torch.nn.Module) -> int:
    """Let the multi-latent attentions of a model chunk hand core attention the latent; their number.

    Raises:
        ConfigError: as `model_reasons`.
    """
    reasons = model_reasons([chunk])
    if reasons:
        raise ConfigError("; ".join(reasons))
    attentions: list[Any] = _attentions(chunk)
    for module in attentions:
        module.linear_kv_up_proj.forward = _HandsOn(module, module.linear_kv_up_proj)
    return len(attentions)


def _attentions(chunk: torch.nn.Module) -> list[MLASelfAttention]:
    return [each for each in chunk.modules() if isinstance(each, MLASelfAttention)]


def agreed(mine: bool) -> bool:
    """Whether all ranks of the world say yes. Collective over the world."""
    said = torch.tensor([int(mine)], device=job_device())
    dist.all_reduce(said, dist.ReduceOp.MIN)
    return bool(said)


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
