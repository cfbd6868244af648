"""The model that plans are made for, read from a model's configuration."""

from __future__ import annotations

from collections.abc import Collection
from weakref import WeakValueDictionary

import torch

from megatron_balance.ir.model import Model
from megatron_balance.model_config import check, facts, num_layers, value

_checked: WeakValueDictionary[int, object] = WeakValueDictionary()
"""Configurations of layers that passed, by their `id`."""


def model_of(config: object, accept: Collection[str] = ()) -> Model:
    """The model that a configuration describes.

    Args:
        config: a `megatron_balance.Model`, or a configuration with Transformers' names, torchtitan's
            or GPT-2's: an object with attributes, or a mapping.
        accept: names that a refusal said, to go on with them (`model_config.check`).

    Raises:
        ConfigError: heads, or the hidden size, are not said; a model type or a key that is not proved
            to attend as plans have it.
    """
    if isinstance(config, Model):
        return config
    dtype = value(config, "dtype")
    return Model(
        **facts(config, accept),
        bytes_per_element=dtype.itemsize if isinstance(dtype, torch.dtype) else 2,
    )


def layers_of(config: object) -> int | None:
    """Layers of its text model that a configuration says; None: it does not say, or is a `Model`."""
    return None if isinstance(config, Model) else num_layers(config)


def check_layer(layer: torch.nn.Module, accept: Collection[str]) -> None:
    """Refuse a layer of a model that is not proved to attend as plans have it, where the balancer was
    made of a `Model` and no configuration was seen. Configurations are looked at once.

    Raises:
        ConfigError: as `model_of`.
    """
    config = getattr(layer, "config", None)
    if config is not None and _checked.get(id(config)) is not config:
        check(config, accept)
        _checked[id(config)] = config
