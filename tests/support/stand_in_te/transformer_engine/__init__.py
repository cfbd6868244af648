# type: ignore  # modules made at run time
"""A package with the name and a few classes of Transformer Engine, which needs a GPU."""

# As much as Megatron imports at version 1.3, so that Megatron defines its real
# TEDotProductAttention over a base class that cannot attend.

import sys
import types

import torch

__version__ = "1.3.0"


class DotProductAttention(torch.nn.Module):
    # Base of Megatron's TEDotProductAttention; whoever reaches its forward has not been given a plan.
    def __init__(self, **options: object) -> None:
        super().__init__()
        self.layer_number = options.get("layer_number", 1)
        self.options = options

    def forward(self, *_args: object, **_options: object) -> torch.Tensor:
        raise NotImplementedError("the stand-in for Transformer Engine cannot attend")


class RMSNorm(torch.nn.RMSNorm):
    # Megatron closes the block with it wherever Transformer Engine is installed.
    def __init__(self, normalized_shape: int, eps: float, **_options: object) -> None:
        super().__init__(normalized_shape, eps=eps)


# Megatron derives from it, and these tests never make one.
class _Unused(torch.nn.Module): ...


def _module(name: str, **content: object) -> types.ModuleType:
    module = types.ModuleType(f"{__name__}.{name}")
    # So that Megatron's searches below it end in ImportError, as with an old version.
    module.__path__ = []
    for key, value in content.items():
        setattr(module, key, value)
    sys.modules[module.__name__] = module
    return module


unused = dict.fromkeys(("Linear", "LayerNormLinear", "LayerNorm"), _Unused)
pytorch = _module("pytorch", DotProductAttention=DotProductAttention, RMSNorm=RMSNorm, **unused)
pytorch.distributed = _module(
    "pytorch.distributed", CudaRNGStatesTracker=type("CudaRNGStatesTracker", (), {}), activation_recompute_forward=None
)
pytorch.fp8 = _module("pytorch.fp8", FP8GlobalStateManager=None, fp8_autocast=None, fp8_model_init=None)
pytorch.float8_tensor = _module("pytorch.float8_tensor", Float8Tensor=type("Float8Tensor", (torch.Tensor,), {}))
pytorch.cpp_extensions = _module("pytorch.cpp_extensions", cast_to_fp8=None)
common = _module("common")
common.recipe = _module("common.recipe", DelayedScaling=type("DelayedScaling", (), {}))
