"""The model that plans are made for, read from a model's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from megatron_balance.errors import ConfigError
from megatron_balance.ir.model import Model

NAMES = {
    "num_heads": ("num_attention_heads", "n_heads", "num_heads", "n_head"),
    "num_kv_heads": ("num_key_value_heads", "n_kv_heads", "num_kv_heads"),
    "head_dim": ("head_dim",),
    "num_layers": ("num_hidden_layers", "n_layers", "num_layers", "n_layer"),
    "hidden_size": ("hidden_size", "dim", "d_model", "n_embd"),
    "ffn_size": ("intermediate_size", "ffn_size", "n_inner"),
    "vocab_size": ("vocab_size",),
}
"""Of each fact, its names in configurations, Transformers' first."""

GATED = ("silu", "swish", "swiglu", "geglu")
"""Activations of MLPs that have a gate, in the families of models that use them."""


def model_of(config: object) -> Model:
    """The model that a configuration describes.

    Args:
        config: a `megatron_balance.Model`, or a configuration with Transformers' names, torchtitan's
            or GPT-2's: an object with attributes, or a mapping.

    Raises:
        ConfigError: heads, or the hidden size, are not said.
    """
    if isinstance(config, Model):
        return config
    text_config = getattr(config, "get_text_config", None)  # of a model with several modalities
    found = _found(text_config() if text_config is not None else config)
    missing = [name for name in ("num_heads", "hidden_size") if name not in found]
    if missing == ["hidden_size"] and "head_dim" in found:
        found["hidden_size"] = found["head_dim"] * found["num_heads"]
        missing = []
    if missing:
        names = " and ".join(f"{name} ({', '.join(NAMES[name])})" for name in missing)
        raise ConfigError(
            f"{type(config).__name__} does not say {names}; give a configuration that does, or "
            "megatron_balance.Model(num_heads=..., num_kv_heads=..., head_dim=...)"
        )
    found.setdefault("num_kv_heads", found["num_heads"])
    found.setdefault("head_dim", found["hidden_size"] // found["num_heads"])
    found.setdefault("ffn_size", 4 * found["hidden_size"])
    activation = str(_value(config, "hidden_act") or "")
    dtype = _value(config, "dtype")
    described = Model(
        found.pop("num_heads"),
        found.pop("num_kv_heads"),
        found.pop("head_dim"),
        gated_ffn=activation in GATED,
        name=str(_value(config, "model_type") or type(config).__name__),
        bytes_per_element=dtype.itemsize if isinstance(dtype, torch.dtype) else 2,
    )
    return replace(described, **found)  # pyright: ignore[reportArgumentType]  the sizes among NAMES


def _found(config: object) -> dict[str, int]:
    found: dict[str, int] = {}
    for fact, names in NAMES.items():
        values = (_value(config, name) for name in names)
        value = next((value for value in values if isinstance(value, int)), None)
        if value is not None:
            found[fact] = value
    return found


def _value(config: object, name: str) -> Any:
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
