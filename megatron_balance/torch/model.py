"""The model that plans are made for, read from a model's configuration."""

from __future__ import annotations

import torch

from megatron_balance.ir.model import Model
from megatron_balance.model_config import facts, value


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
    described = _of_text(config)
    dtype = value(config, "dtype")
    return Model(
        **facts(described),
        bytes_per_element=dtype.itemsize if isinstance(dtype, torch.dtype) else 2,
    )


def layers_of(config: object) -> int | None:
    """Layers that a configuration says; None: it does not say, or is a `Model`."""
    return None if isinstance(config, Model) else facts(_of_text(config)).get("num_layers")


def _of_text(config: object) -> object:
    """The configuration of the text model, of a model with several modalities."""
    text_config = getattr(config, "get_text_config", None)
    return config if text_config is None else text_config()
