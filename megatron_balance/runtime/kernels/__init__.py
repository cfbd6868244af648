"""Attention kernels: a protocol (`base`), implementations, and the choice."""

from __future__ import annotations

import torch

from megatron_balance.errors import ConfigError
from megatron_balance.runtime.kernels.base import Kernel, Offer
from megatron_balance.runtime.kernels.cpu_flash import CpuFlashKernel
from megatron_balance.runtime.kernels.libraries import (
    FLASH_ATTN_3,
    FlashAttn2Calls,
    FlashAttn3Calls,
    TeFusedCalls,
    TorchCalls,
)
from megatron_balance.runtime.kernels.plain import PlainKernel
from megatron_balance.runtime.kernels.varlen import VarlenKernel

_FP32_FP64 = (torch.float32, torch.float64)
_BF16_FP16 = (torch.bfloat16, torch.float16)
_ANY_DIM = (1 << 30, 1)
_FLASH_DIMS = (256, 8)
KERNELS: dict[str, Offer] = {
    "plain": Offer(PlainKernel, ("cpu", "cuda"), (*_FP32_FP64, *_BF16_FP16), _ANY_DIM),
    "cpu_flash": Offer(CpuFlashKernel, ("cpu",), (torch.float32, *_BF16_FP16), _ANY_DIM),
    "torch_varlen": Offer(lambda: VarlenKernel("torch_varlen", TorchCalls()), ("cuda",), _BF16_FP16, _FLASH_DIMS),
    "flash_attn": Offer(
        lambda: VarlenKernel("flash_attn", FlashAttn2Calls()),
        *(("cuda",), _BF16_FP16, _FLASH_DIMS, ("flash_attn.flash_attn_interface",)),
        "pip install --no-build-isolation flash-attn",
    ),
    "flash_attn_3": Offer(
        lambda: VarlenKernel("flash_attn_3", FlashAttn3Calls()),
        *(("cuda",), _BF16_FP16, _FLASH_DIMS, FLASH_ATTN_3),
        "build hopper/ of https://github.com/Dao-AILab/flash-attention",
    ),
    "te_fused": Offer(
        lambda: VarlenKernel("te_fused", TeFusedCalls()),
        *(("cuda",), _BF16_FP16, _FLASH_DIMS, ("transformer_engine.pytorch.cpp_extensions.fused_attn",)),
        "pip install --no-build-isolation 'transformer-engine[pytorch]'",
    ),
}
"""By name, as a run file's `kernel:` has them."""

AUTOMATIC = ("flash_attn_3", "flash_attn", "torch_varlen", "cpu_flash", "plain")
"""In order of preference.

te_fused is chosen by name only: what it leaves for the backward depends on the version of cuDNN."""


def choose_kernel(name: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> Kernel:
    """Make the kernel called `name`.

    "auto": the first of `AUTOMATIC` that is installed and serves device, dtype and head dim.

    Raises:
        ConfigError: no such kernel, it is not installed, or it cannot serve these tensors.
    """
    if name == "auto":
        fitting = (o for o in map(KERNELS.__getitem__, AUTOMATIC) if not o.refusal(device, dtype, head_dim))
        return next(o for o in fitting if o.installed).make()
    offer = KERNELS.get(name)
    if offer is None:
        raise ConfigError(f"unknown kernel {name!r}; known: auto, {', '.join(KERNELS)}")
    refusal = offer.refusal(device, dtype, head_dim)
    if refusal:
        raise ConfigError(f"kernel {name} {refusal} (head dim {head_dim}); use kernel: auto")
    if not offer.installed:
        raise ConfigError(
            f"kernel {name} needs {' or '.join(offer.modules)}, which is not installed; {offer.mend}, or use kernel: "
            "auto"
        )
    return offer.make()
