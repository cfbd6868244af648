"""Attention kernels: a protocol (`base`), implementations, and the choice."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import torch

from megatron_balance.errors import ConfigError
from megatron_balance.runtime.kernels.base import Entries, Kernel, PlainKernel
from megatron_balance.runtime.kernels.cpu_flash import CpuFlashKernel
from megatron_balance.runtime.kernels.libraries import (
    FLASH_ATTN_3,
    NOT_INSTALLED,
    Calls,
    Capabilities,
    Capability,
    FlashAttn2Calls,
    FlashAttn3Calls,
    Offer,
    PaddedKernel,
    TeFusedCalls,
    TorchCalls,
    VarlenKernel,
    capability_of,
    cudnn_fault,
    first_line,
    flash_attention_4_fault,
    restore_flash_attention,
)

log = logging.getLogger(__name__)

_FP32_FP64 = (torch.float32, torch.float64)
_BF16_FP16 = (torch.bfloat16, torch.float16)
_MULTIPLE = 8
"""Head dims that the libraries take are multiples of it; others are padded."""


def _varlen(name: str, calls: Callable[[], Calls]) -> Callable[[int], Kernel]:
    def make(head_dim: int) -> Kernel:
        kernel = VarlenKernel(name, calls())
        more = -head_dim % _MULTIPLE
        return PaddedKernel(kernel, (head_dim, head_dim), head_dim + more) if more else kernel

    return make


def _up_to_256(_: Capability | None) -> int:
    return 256


def _up_to_256_on_hopper(capability: Capability | None) -> int:
    return 256 if capability is None or capability < (10, 0) else 128


KERNELS: dict[str, Offer] = {
    "plain": Offer(lambda _: PlainKernel(), ("cpu", "cuda"), (*_FP32_FP64, *_BF16_FP16), two_widths=True),
    "cpu_flash": Offer(lambda _: CpuFlashKernel(), ("cpu",), (torch.float32, *_BF16_FP16)),
    "torch_varlen": Offer(
        _varlen("torch_varlen", TorchCalls),
        *(("cuda",), _BF16_FP16, _up_to_256),
        capabilities=Capabilities((8, 0)),
    ),
    "flash_attn": Offer(
        _varlen("flash_attn", FlashAttn2Calls),
        *(("cuda",), _BF16_FP16, _up_to_256, ("flash_attn.flash_attn_interface",)),
        "pip install --no-build-isolation flash-attn",
        Capabilities((8, 0)),
    ),
    # Of the other libraries' limits those that stand in Transformer Engine 2.17.1's own choice
    # (pytorch/attention/dot_product_attention/utils.py) and in torch 2.13 (nn/attention/_fa4.py).
    "flash_attn_3": Offer(
        _varlen("flash_attn_3", FlashAttn3Calls),
        *(("cuda",), _BF16_FP16, _up_to_256, FLASH_ATTN_3),
        "build hopper/ of https://github.com/Dao-AILab/flash-attention",
        Capabilities((9, 0), (9, 0)),
        windows=False,
    ),
    "flash_attn_4": Offer(
        _varlen("flash_attn_4", lambda: TorchCalls("FA4")),
        *(("cuda",), _BF16_FP16, _up_to_256_on_hopper, ("flash_attn.cute.interface",)),
        "pip install 'flash-attn-4==4.0.0b11' (torch 2.13 reads two results of its forward; later ones return five)",
        Capabilities((9, 0), (10, 9)),
        flash_attention_4_fault,
    ),
    "te_fused": Offer(
        _varlen("te_fused", TeFusedCalls),
        *(("cuda",), _BF16_FP16, _up_to_256_on_hopper, ("transformer_engine.pytorch.cpp_extensions.fused_attn",)),
        "pip install --no-build-isolation 'transformer-engine[pytorch]', with cuDNN 9.7 or later",
        Capabilities((9, 0), (10, 9)),
        cudnn_fault,
    ),
}
"""By name, as a run file's `kernel:` has them."""

AUTOMATIC_HOPPER = ("flash_attn_3", "te_fused", "flash_attn_4", "flash_attn", "torch_varlen")
"""`auto` up to compute capability 9, in order of preference.

By the published rates of an H100: FlashAttention-3 648 TFLOP/s, cuDNN 595, FlashAttention-2 370
(arXiv 2407.08608, Figure 5). Before Hopper only the last two names serve."""

AUTOMATIC_BLACKWELL = ("flash_attn_4", "te_fused", "flash_attn", "torch_varlen")
"""`auto` from compute capability 10 on: FlashAttention-4 was made for it."""

AUTOMATIC_CPU = ("cpu_flash", "plain")
"""`auto` on a CPU. On CUDA the formula is chosen by name only: its scores are whole matrices, in
fp32."""

_told: set[str] = set()
"""Sentences that were logged."""


def automatic(device: torch.device) -> tuple[str, ...]:
    if device.type == "cpu":
        return AUTOMATIC_CPU
    capability = capability_of(device)
    return AUTOMATIC_BLACKWELL if capability is not None and capability >= (10, 0) else AUTOMATIC_HOPPER


def choose_kernel(
    name: str, device: torch.device, dtype: torch.dtype, head_dim: int, *, windows: bool = False
) -> Kernel:
    """Make the kernel called `name`, and log once which it is.

    "auto": the first of `automatic(device)` that serves device, dtype and head dim, can be used
    here and, on a GPU, passes its trial. One that is installed but broken is reported once and
    skipped. `windows`: it is to serve sliding windows, which the trial then has, too.

    Raises:
        ConfigError: no such kernel, it cannot be used here, it cannot serve these tensors, or none
            of `auto` can.
    """
    shown = f"({device.type}, {dtype}, head dim {head_dim})"
    if name == "auto":
        kernel = _automatic(device, dtype, head_dim, windows=windows)
    elif name not in KERNELS:
        raise ConfigError(f"unknown kernel {name!r}; known: auto, {', '.join(KERNELS)}")
    else:
        offer = KERNELS[name]
        kernel, reason = _made(name, device, dtype, head_dim, windows=windows)
        if kernel is None and offer.refusal(device, dtype, head_dim, windows=windows):
            raise ConfigError(f"kernel {name} {reason} (head dim {head_dim}); use kernel: auto")
        if kernel is None:
            needs = f"needs {' or '.join(offer.modules)}, which is not installed"
            why = needs if reason == NOT_INSTALLED else f"cannot be used here: {reason}"
            raise ConfigError(f"kernel {name} {why}; {offer.mend or 'another torch'}, or use kernel: auto")
    _tell(logging.INFO, f"attention kernel {kernel.name} {shown}")
    return kernel


def kernel_of_widths(
    name: str, device: torch.device, dtype: torch.dtype, widths: tuple[int, int], *, windows: bool = False
) -> Kernel:
    """`choose_kernel` for queries and keys of one width, and values and outputs of maybe another."""
    kernel = choose_kernel(name, device, dtype, max(widths), windows=windows)
    return (
        kernel
        if widths[0] == widths[1] or KERNELS[kernel.name].two_widths
        else PaddedKernel(kernel, widths, max(widths))
    )


def _automatic(device: torch.device, dtype: torch.dtype, head_dim: int, *, windows: bool) -> Kernel:
    reasons: dict[str, str] = {}
    for name in automatic(device):
        offer = KERNELS[name]
        kernel, reasons[name] = _made(name, device, dtype, head_dim, windows=windows)
        if kernel is not None:
            return kernel
        served = not offer.refusal(device, dtype, head_dim, windows=windows)
        if offer.modules and served and reasons[name] != NOT_INSTALLED:
            _tell(logging.WARNING, f"attention kernel {name} is installed, but is skipped: {reasons[name]}")
    mends = [f"{name}: {KERNELS[name].mend}" for name in reasons if KERNELS[name].mend]
    raise ConfigError(
        f"no attention kernel for {dtype} and head dim {head_dim} on {device.type}: "
        f"{'; '.join(f'{name} {reason}' for name, reason in reasons.items())}. Train in bf16, install one of them "
        f"({'; '.join(mends)}), or set 'kernel: plain' (the formula: slow, with the scores of all pairs in memory)"
    )


def _made(
    name: str, device: torch.device, dtype: torch.dtype, head_dim: int, *, windows: bool
) -> tuple[Kernel | None, str]:
    offer = KERNELS[name]
    reason = offer.refusal(device, dtype, head_dim, windows=windows) or offer.fault()
    if reason:
        return None, reason
    try:
        kernel = offer.make(head_dim)
    except Exception as error:
        return None, first_line(error)
    if capability_of(device) is not None and name != "plain":
        reason = trial_failure(kernel, device, dtype, head_dim, windows=windows)
    if reason:
        restore_flash_attention()
        return None, reason
    return kernel, ""


def _tell(level: int, sentence: str) -> None:
    if sentence not in _told:
        _told.add(sentence)
        log.log(level, sentence)


TRIAL_TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 1e-2}
"""Largest difference from the formula over its largest value, as the GPU suite asks
(`tools/gpu/attention.py`); of other types 1e-4."""


_HEADS, _KV_HEADS = 2, 1


# Causal with more keys than queries, so that alignment shows, and full; neither a multiple of 64.
_ENTRIES = Entries(((0, 70), (70, 90)), ((0, 130), (130, 203)), (True, False), ((0, 70), (70, 90)))


# As a halo has them: one window for all, at the end of the keys.
_WINDOWS = ((40, 0), (40, 0))


_RESULTS = ("out", "LSE", "dq", "dk", "dv")


def trial_failure(
    kernel: Kernel, device: torch.device, dtype: torch.dtype, head_dim: int, *, windows: bool = False
) -> str:
    """The reason why the kernel's results cannot be used; "" if they are right. `windows`: try sliding
    windows, too.

    Waits for the device. Found once for a name, a device and tensors.
    """
    for rows in (_ENTRIES, replace(_ENTRIES, windows=_WINDOWS))[: 1 + windows]:
        key = (kernel.name, device, dtype, head_dim, rows)
        if key not in _failures:
            _failures[key] = _failure(kernel, device, dtype, head_dim, rows)
        if _failures[key]:
            return _failures[key]
    return ""


_failures: dict[tuple[object, ...], str] = {}


def _failure(kernel: Kernel, device: torch.device, dtype: torch.dtype, head_dim: int, rows: Entries) -> str:
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (
        torch.randn(rows, heads, head_dim, generator=generator).to(device, dtype)
        for rows, heads in ((90, _HEADS), (203, _KV_HEADS), (203, _KV_HEADS), (90, _HEADS))
    )
    scale = head_dim**-0.5
    try:
        found = _results(kernel, rows, (q, k, v), dout, scale)
        exact = _results(PlainKernel(), rows, (q.float(), k.float(), v.float()), dout.float(), scale)
        apart = [
            float((one.float() - other).abs().max() / other.abs().max())
            for one, other in zip(found, exact, strict=True)
        ]
    except Exception as error:
        return f"its first call fails: {first_line(error)}"
    allowed = TRIAL_TOLERANCE.get(dtype, 1e-4)
    wrong = [f"{name} by {by:.2g}" for name, by in zip(_RESULTS, apart, strict=True) if not by <= allowed]
    return f"its first call differs from the formula, {', '.join(wrong)} of the largest value" if wrong else ""


def _results(
    kernel: Kernel,
    rows: Entries,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    dout: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, ...]:
    """Out, LSE, dq, dk and dv."""
    entries = kernel.prepare(rows, dout.device)
    out, lse = kernel.forward(entries, *inputs, scale)
    return out, lse, *kernel.backward(entries, (dout, out.to(dout.dtype), lse), *inputs, scale)
