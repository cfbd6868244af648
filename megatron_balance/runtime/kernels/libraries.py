"""Varlen attention calls of libraries, one class each, and which of them can be used on this
machine.

All align a causal mask at the bottom right and return the natural-log LSE of scaled scores; the
backward is handed the merged output and LSE. The gradient of the queries is summed with atomics
inside them, unless `torch.use_deterministic_algorithms` is on.

Shape legend: N query rows, M key rows, H query heads, G key-value heads, D head dim; LSE is [N, H]
here, in whatever strides a call has it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import attention

from megatron_balance.errors import ConfigError
from megatron_balance.runtime.kernels.base import Kernel, Window

Grads = tuple[Tensor, Tensor, Tensor]

NO_WINDOW: Window = (-1, -1)
"""As the libraries say that there is none."""


@dataclass(frozen=True, slots=True)
class CuSeqlens:
    """The entries of one launch, all full, all causal, or all of one sliding window: cu_seqlens of
    the packed queries and keys, and the rows of their largest entry.

    `cu_q`, `cu_k`: int32 [entries + 1], on the device. `window`: `kernels.base.Window`; where it ends
    with a query's own key, `causal` holds, too.
    """

    cu_q: Tensor
    cu_k: Tensor
    max_q: int
    max_k: int
    causal: bool
    window: Window = NO_WINDOW


class Calls(Protocol):
    """A library's forward and backward of one launch."""

    def forward(self, at: CuSeqlens, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Q [N, H, D], k and v [M, G, D] -> out [N, H, D] and LSE [N, H]."""
        ...

    def backward(
        self, at: CuSeqlens, dout: tuple[Tensor, Tensor, Tensor], q: Tensor, k: Tensor, v: Tensor, scale: float
    ) -> Grads:
        """dq, dk and dv. `dout`: the gradient, the final output [N, H, D] and LSE [N, H]."""
        ...


def _window_sides(at: CuSeqlens) -> dict[str, int]:
    """Arguments of a sliding window; without one none, so that the call is as it was without them."""
    if at.window == NO_WINDOW:
        return {}
    return {"window_size_left": at.window[0], "window_size_right": at.window[1]}


def _deterministic() -> bool:
    return torch.are_deterministic_algorithms_enabled()


def current_flash_attention_impl() -> str | None:
    """The implementation behind torch's flash attention; None: its own, FlashAttention-2."""
    return attention.current_flash_attention_impl() if hasattr(attention, "current_flash_attention_impl") else None


def flash_attention_4_fault() -> str:
    """The reason why torch cannot put FlashAttention-4 behind its operators; "" if it can."""
    if "FA4" in getattr(attention, "list_flash_attention_impls", list)():
        return ""
    return f"torch {torch.__version__} cannot put it behind its operators, 2.13 can"


def restore_flash_attention() -> None:
    if current_flash_attention_impl() is not None:
        attention.restore_flash_attention_impl()


# torch 2.13 (aten), and `torch.nn.attention.activate_flash_attention_impl`, which puts
# FlashAttention-4 behind the same operators.
class TorchCalls:
    """FlashAttention behind torch's operators: 2, as torch was built with it, or `impl`.

    What is behind them is the same for the whole process, so the kernel made last decides; an
    earlier one refuses to run by another's.
    """

    def __init__(self, impl: str | None = None) -> None:
        self.impl = impl
        restore_flash_attention()
        if impl is not None:
            attention.activate_flash_attention_impl(impl)

    def forward(self, at: CuSeqlens, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        now = current_flash_attention_impl()
        if now != self.impl:
            raise RuntimeError(
                f"behind torch's flash attention is now {now or 'FlashAttention-2'}, this kernel was made for "
                f"{self.impl or 'FlashAttention-2'}; make it anew"
            )
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            *(q, k, v, at.cu_q, at.cu_k, at.max_q, at.max_k, 0.0, at.causal),
            return_debug_mask=False,
            scale=scale,
            **_window_sides(at),
        )
        return out, lse.T

    def backward(
        self, at: CuSeqlens, dout: tuple[Tensor, Tensor, Tensor], q: Tensor, k: Tensor, v: Tensor, scale: float
    ) -> Grads:
        seed = torch.empty(2, dtype=torch.uint64, device=q.device)  # no dropout: read by nobody
        unused = torch.empty(0, device=q.device)
        return torch.ops.aten._flash_attention_backward(
            *(dout[0], q, k, v, dout[1], dout[2].T.contiguous(), at.cu_q, at.cu_k, at.max_q, at.max_k),
            *(0.0, at.causal, seed, unused),
            scale=scale,
            **_window_sides(at),
        )


# flash-attn 2.8.3 (`flash_attn.flash_attn_interface`).
class FlashAttn2Calls:
    """The package flash-attn."""

    def __init__(self) -> None:
        self.module: ModuleType = import_module("flash_attn.flash_attn_interface")

    def forward(self, at: CuSeqlens, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        out, lse, *_ = self.module._flash_attn_varlen_forward(
            *(q, k, v, at.cu_q, at.cu_k, at.max_q, at.max_k),
            dropout_p=0.0,
            softmax_scale=scale,
            causal=at.causal,
            **_window_sides(at),
        )
        return out, lse.T

    def backward(
        self, at: CuSeqlens, dout: tuple[Tensor, Tensor, Tensor], q: Tensor, k: Tensor, v: Tensor, scale: float
    ) -> Grads:
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        self.module._flash_attn_varlen_backward(
            *(dout[0], q, k, v, dout[1], dout[2].T.contiguous(), dq, dk, dv, at.cu_q, at.cu_k, at.max_q, at.max_k),
            dropout_p=0.0,
            softmax_scale=scale,
            causal=at.causal,
            window_size_left=at.window[0],
            window_size_right=at.window[1],
            softcap=0.0,
            alibi_slopes=None,
            deterministic=_deterministic(),
        )
        return dq, dk, dv


FLASH_ATTN_3 = ("flash_attn_interface", "flash_attn_3.flash_attn_interface")
"""Modules that flash-attn 3 may be.

Its own setup puts one at the top, Transformer Engine's instructions put it into a package."""


# flash-attn 3 as of the tag 2.8.3 and of main in August 2026 (`hopper/flash_attn_interface.py`);
# arguments go by position, since two names differ.
class FlashAttn3Calls:
    """flash-attn 3 for Hopper."""

    def __init__(self) -> None:
        self.module: ModuleType = import_module(next(name for name in FLASH_ATTN_3 if not import_fault(name)))

    def forward(self, at: CuSeqlens, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        new_keys_and_out, used, paging_rotary_scales = (None,) * 4, (None,) * 3, (None,) * 9
        out, lse, *_ = self.module._flash_attn_forward(
            *(
                q,
                k,
                v,
                *new_keys_and_out,
                at.cu_q,
                at.cu_k,
                *used,
                at.max_q,
                at.max_k,
                *paging_rotary_scales,
                scale,
                at.causal,
            )
        )
        return out, lse.T

    def backward(
        self, at: CuSeqlens, dout: tuple[Tensor, Tensor, Tensor], q: Tensor, k: Tensor, v: Tensor, scale: float
    ) -> Grads:
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        self.module._flash_attn_backward(
            *(
                dout[0],
                q,
                k,
                v,
                dout[1],
                dout[2].T.contiguous(),
                at.cu_q,
                at.cu_k,
                None,
                None,
                at.max_q,
                at.max_k,
                dq,
                dk,
                dv,
            ),
            *(scale, at.causal),
            deterministic=_deterministic(),
        )
        return dq, dk, dv


CUDNN = (9, 7)
"""From this cuDNN on lengths need not be multiples of 64 under a mask that is causal at the bottom
right (Transformer Engine 2.17.1, `common/fused_attn/fused_attn.cpp`); before 9.6 LSE is padded, too.
"""
CUDNN_WITH_FAULTS = ((9, 10, 0), (9, 10, 1))
"""Versions from which that file takes no fused attention in bf16."""


def cudnn_fault() -> str:
    """The reason why Transformer Engine's cuDNN serves no packed sequences; "" if it does."""
    try:
        version: tuple[int, int, int] = import_module("transformer_engine.pytorch.utils").get_cudnn_version()
    except Exception as error:
        return first_line(error)
    shown = ".".join(map(str, version))
    if version < CUDNN:
        return f"cuDNN {shown}: before 9.7 it takes lengths that are multiples of 64 only"
    return f"cuDNN {shown}: its fused attention has known faults" if version in CUDNN_WITH_FAULTS else ""


# Transformer Engine 2.9 to 2.18 (`transformer_engine.pytorch.cpp_extensions.fused_attn`).
class TeFusedCalls:
    """Transformer Engine's fused attention, by cuDNN (`cudnn_fault`)."""

    def __init__(self) -> None:
        self.module: ModuleType = import_module("transformer_engine.pytorch.cpp_extensions.fused_attn")
        self.types: dict[torch.dtype, object] = import_module("transformer_engine.pytorch.constants").TE_DType
        self.backend = self.module.FusedAttnBackend["F16_arbitrary_seqlen"]
        self.backward_takes = frozenset(inspect.signature(self.module.fused_attn_bwd).parameters)

    def options(self, at: CuSeqlens, scale: float) -> dict[str, object]:
        mask = "padding_causal_bottom_right" if at.causal else "padding"
        # From 2.15 on; before, the output has the format of q.
        formats = {"o_format": "thd"} if "o_format" in self.backward_takes else {}
        return {
            "cu_seqlens_q_padded": at.cu_q, "cu_seqlens_kv_padded": at.cu_k, "attn_scale": scale, "dropout": 0.0,
            "qkv_layout": "thd_thd_thd", "attn_bias_type": "no_bias", "attn_mask_type": mask,
            "window_size": (at.window[0], 0) if at.causal else at.window, **formats,
        }  # fmt: skip

    def forward(self, at: CuSeqlens, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        out, kept, *_ = self.module.fused_attn_fwd(
            *(True, at.max_q, at.max_k, at.cu_q, at.cu_k, q, k, v, q.dtype, self.backend), **self.options(at, scale)
        )
        lse = kept[0]
        if tuple(lse.shape) != (*q.shape[:2], 1):
            raise ConfigError(
                f"Transformer Engine's fused attention returned softmax statistics {tuple(lse.shape)}, not "
                f"{(*q.shape[:2], 1)}: "
                "packed ones need cuDNN >= 9.7; update it, or use kernel: auto"
            )
        return out.view(q.shape), lse[..., 0]

    def backward(
        self, at: CuSeqlens, dout: tuple[Tensor, Tensor, Tensor], q: Tensor, k: Tensor, v: Tensor, scale: float
    ) -> Grads:
        q, k, v, grad, out = (x.contiguous() for x in (q, k, v, *dout[:2]))
        seed = torch.zeros(2, dtype=torch.int64, device=q.device)  # no dropout: read by nobody
        kept = [dout[2].contiguous()[..., None], seed]
        types = (q.dtype, self.types[q.dtype]) if "dqkv_dtype" in self.backward_takes else (q.dtype,)
        formats = {"do_format": "thd", "dqkv_layout": "thd_thd_thd"} if "do_format" in self.backward_takes else {}
        dq, dk, dv, *_ = self.module.fused_attn_bwd(
            *(at.max_q, at.max_k, at.cu_q, at.cu_k, q, k, v, out, grad, *types, kept, self.backend),
            **self.options(at, scale),
            **formats,
            deterministic=_deterministic(),
        )
        return dq.view(q.shape), dk.view(k.shape), dv.view(v.shape)


Capability = tuple[int, int]
"""Compute capability of a GPU, (major, minor)."""


NOT_INSTALLED = "not installed"


def capability_of(device: torch.device) -> Capability | None:
    """None for a CPU, or where no GPU is here to ask."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_capability(device)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Compute capabilities from `first` on, up to `last` (None: all later ones), as told to a user."""

    first: Capability
    last: Capability | None = None

    def __contains__(self, capability: Capability) -> bool:
        return self.first <= capability and (self.last is None or capability <= self.last)

    def __str__(self) -> str:
        low = ".".join(map(str, self.first))
        if self.last is None:
            return f"{low} and later"
        return low if self.last == self.first else f"{low} to {'.'.join(map(str, self.last))}"


def _any_head_dim(_: Capability | None) -> int:
    """More than any head dim."""
    return 1 << 30


@dataclass(frozen=True, slots=True)
class Offer:
    """A kernel that can be chosen."""

    # Makes it for tensors of a head dim.
    make: Callable[[int], Kernel]
    # Types of devices.
    devices: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    # Largest head dim, by compute capability.
    largest: Callable[[Capability | None], int] = _any_head_dim
    # One of them must be there and can be imported.
    modules: tuple[str, ...] = ()
    # How to get it.
    mend: str = ""
    # Of GPUs.
    capabilities: Capabilities = Capabilities((0, 0))
    # Further needs; the reason why it cannot be used here, "" if it can.
    check: Callable[[], str] = str
    # Whether its calls here take sliding windows.
    windows: bool = True
    # Values may have another width than keys; else the narrower are padded.
    two_widths: bool = False

    def fault(self) -> str:
        """The reason why it cannot be used on this machine: `NOT_INSTALLED`, an error at import, or
        a version; "" if it can.
        """
        faults = [import_fault(name) for name in self.modules]
        if faults and "" not in faults:
            return next((fault for fault in faults if fault != NOT_INSTALLED), NOT_INSTALLED)
        return self.check()

    @property
    def installed(self) -> bool:
        return not self.fault()

    def refusal(self, device: torch.device, dtype: torch.dtype, head_dim: int, *, windows: bool = False) -> str:
        """The reason why it does not serve such tensors; "" if it does."""
        if windows and not self.windows:
            return "is not called with sliding windows here"
        if device.type not in self.devices:
            return f"does not serve {device.type} tensors"
        if dtype not in self.dtypes:
            return f"does not serve {dtype}, only {', '.join(map(str, self.dtypes))}"
        capability = capability_of(device)
        if capability is not None and capability not in self.capabilities:
            return f"serves compute capability {self.capabilities}, this GPU has {'.'.join(map(str, capability))}"
        largest = self.largest(capability)
        return "" if head_dim <= largest else f"serves head dims up to {largest}"


@cache
def import_fault(name: str) -> str:
    """The reason why a module cannot be imported, `NOT_INSTALLED` or the error; "" if it can.

    A wheel that was built for another torch fails with an OSError, or with an ImportError for an
    undefined symbol.
    """
    top = name.partition(".")[0]
    if top not in sys.modules and find_spec(top) is None:
        return NOT_INSTALLED
    try:
        import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            return NOT_INSTALLED  # the package is there, but not this part of it
        return first_line(error)
    except Exception as error:
        return first_line(error)
    return ""


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
