"""Movers of rows: a protocol (`base`), implementations, and the choice."""

from functools import lru_cache
from importlib.util import find_spec

import torch

from megatron_balance.errors import ConfigError
from megatron_balance.ir.model import GradientWire
from megatron_balance.runtime.lower.memory import AttentionShape
from megatron_balance.runtime.movers.base import Mover, PlainMover

MOVERS = ("auto", "plain", "triton")


def choose_mover(name: str, device: torch.device) -> Mover:
    """Make the mover called `name`; "auto": triton on CUDA, else plain. ConfigError: there is none."""
    # Triton on CPU tensors needs its interpreter.
    if name == "auto":
        name = "triton" if device.type == "cuda" else "plain"
    match name:
        case "plain":
            return PlainMover()
        case "triton":
            if find_spec("triton") is None:
                raise ConfigError(
                    "the mover triton needs the package triton, which is not installed; pip install triton, or mover: "
                    "plain"
                )
            from megatron_balance.runtime.movers.triton.mover import TritonMover

            return TritonMover(device)
        case _:
            raise ConfigError(f"unknown mover {name!r}; known: {', '.join(MOVERS)}")


@lru_cache(maxsize=8)
def build_variants(device: torch.device, dtype: torch.dtype, shape: AttentionShape, wire: GradientWire = "fp32") -> int:
    """Compile all that the mover of `device` will launch for calls of `shape`; the number of variants.
    Nobody else need call it: ranks of a node that do find what the first of them compiled.
    """
    if choose_mover("auto", device).name != "triton":
        return 0
    from megatron_balance.runtime.movers.triton.variants import build

    return build(device, dtype, shape, wire)
