"""Attention kernels: a protocol (`base`), implementations, and the choice."""

import inspect
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import attention
from torch.nn.functional import pad

from megatron_balance.cost.kernel import TILE_TOKENS, KeyGrid, by_key_length, law_of
from megatron_balance.errors import ConfigError
from megatron_balance.runtime.kernels.base import Entries, FinalRows, Grads, Kernel, PlainKernel, Window
from megatron_balance.runtime.kernels.cpu_flash import CpuFlashKernel

NO_WINDOW: Window = (-1, -1)  # as the libraries say that there is none


@dataclass(frozen=True, slots=True)
class CuSeqlens:
    """The entries of one launch under one mask, and the rows of their largest."""

    # int32 [entries + 1], on the device, of the packed queries, and of keys.
    cu_q: Tensor
    cu_k: Tensor
    max_q: int
    max_k: int
    causal: bool
    # `kernels.base.Window`; where it ends with a query's own key, `causal` holds, too.
    window: Window = NO_WINDOW


class _Calls(Protocol):
    """A library's forward and backward of one launch."""

    def forward(self, at: CuSeqlens, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Q [N, H, D], k and v [M, G, D] -> out [N, H, D] and LSE [N, H]."""
        ...

    def backward(self, at: CuSeqlens, dout: FinalRows, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Grads:
        """dq, dk and dv. `dout`: the gradient, the final output [N, H, D] and LSE [N, H]."""
        ...


def _window_sides(at: CuSeqlens) -> dict[str, int]:
    """Arguments of a sliding window; without one none, so that the call is as it was without them."""
    if at.window == NO_WINDOW:
        return {}
    return {"window_size_left": at.window[0], "window_size_right": at.window[1]}


def _current_impl() -> str | None:
    """The implementation behind torch's flash attention; None: its own, FlashAttention-2."""
    return attention.current_flash_attention_impl() if hasattr(attention, "current_flash_attention_impl") else None


def _flash_attention_4_fault() -> str:
    """The reason why torch cannot put FlashAttention-4 behind its operators; "" if it can."""
    if "FA4" in getattr(attention, "list_flash_attention_impls", list)():
        return ""
    return f"torch {torch.__version__} cannot put it behind its operators, 2.13 can"


def _flash_attention_4_window_fault() -> str:
    """The reason why FlashAttention-4 behind torch's operators takes no windows; "" if it does."""
    # In torch 2.11 it takes them forward, and its backward raises.
    backward = getattr(getattr(attention, "_fa4", None), "_fa4_run_backward", None)
    if backward is None or "window_size_left" in inspect.signature(backward).parameters:
        return ""
    return f"cannot be called with sliding windows: backward torch {torch.__version__} refuses them, 2.13 takes them"


def _restore_flash_attention() -> None:
    if _current_impl() is not None:
        attention.restore_flash_attention_impl()


# torch 2.13 (aten), and `torch.nn.attention.activate_flash_attention_impl`, which puts
# FlashAttention-4 behind the same operators.
class TorchCalls:
    """FlashAttention behind torch's operators: 2, as torch was built with it, or `impl`."""

    # What is behind them is the same for the whole process, so the kernel made last decides; an
    # earlier one refuses to run by another's.

    def __init__(self, impl: str | None = None) -> None:
        self.impl = impl
        _restore_flash_attention()
        if impl is not None:
            attention.activate_flash_attention_impl(impl)

    def forward(self, at: CuSeqlens, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        now = _current_impl()
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

    def backward(self, at: CuSeqlens, dout: FinalRows, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Grads:
        seed = torch.empty(2, dtype=torch.uint64, device=q.device)  # no dropout: read by nobody
        unused = torch.empty(0, device=q.device)
        return torch.ops.aten._flash_attention_backward(
            *(dout[0], q, k, v, dout[1], dout[2].T.contiguous(), at.cu_q, at.cu_k, at.max_q, at.max_k),
            *(0.0, at.causal, seed, unused),
            scale=scale,
            **_window_sides(at),
        )


# flash-attn 2.8.3 (`flash_attn.flash_attn_interface`).
class _FlashAttn2Calls:
    """The package flash-attn."""

    def __init__(self, softcap: float = 0.0) -> None:
        self.softcap = softcap
        self.module: ModuleType = import_module("flash_attn.flash_attn_interface")

    def forward(self, at: CuSeqlens, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        out, lse, *_ = self.module._flash_attn_varlen_forward(
            *(q, k, v, at.cu_q, at.cu_k, at.max_q, at.max_k),
            dropout_p=0.0,
            softmax_scale=scale,
            causal=at.causal,
            softcap=self.softcap,
            **_window_sides(at),
        )
        return out, lse.T

    def backward(self, at: CuSeqlens, dout: FinalRows, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Grads:
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        self.module._flash_attn_varlen_backward(
            *(dout[0], q, k, v, dout[1], dout[2].T.contiguous(), dq, dk, dv, at.cu_q, at.cu_k, at.max_q, at.max_k),
            dropout_p=0.0,
            softmax_scale=scale,
            causal=at.causal,
            window_size_left=at.window[0],
            window_size_right=at.window[1],
            softcap=self.softcap,
            alibi_slopes=None,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        return dq, dk, dv


# Modules that flash-attn 3 may be. Its own setup puts one at the top, Transformer Engine's
# instructions put it into a package.
FLASH_ATTN_3 = ("flash_attn_interface", "flash_attn_3.flash_attn_interface")


# flash-attn 3 as of the tag 2.8.3 and of main in August 2026 (`hopper/flash_attn_interface.py`);
# arguments go by position, since two names differ.
class _FlashAttn3Calls:
    """flash-attn 3 for Hopper."""

    def __init__(self, softcap: float = 0.0) -> None:
        self.softcap = softcap
        self.module: ModuleType = import_module(next(name for name in FLASH_ATTN_3 if not _import_fault(name)))

    def forward(self, at: CuSeqlens, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        new_keys_and_out, used, paging_rotary_scales = (None,) * 4, (None,) * 3, (None,) * 9
        out, lse, *_ = self.module._flash_attn_forward(
            *(q, k, v, *new_keys_and_out, at.cu_q, at.cu_k, *used),
            *(at.max_q, at.max_k, *paging_rotary_scales, scale, at.causal),
            softcap=self.softcap,
        )
        return out, lse.T

    def backward(self, at: CuSeqlens, dout: FinalRows, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Grads:
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        self.module._flash_attn_backward(
            *(dout[0], q, k, v, dout[1], dout[2].T.contiguous(), at.cu_q, at.cu_k, None, None, at.max_q, at.max_k),
            *(dq, dk, dv, scale, at.causal),
            softcap=self.softcap,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        return dq, dk, dv


# From this cuDNN on lengths need not be multiples of 64 under a mask that is causal at the bottom
# right (Transformer Engine 2.17.1, `common/fused_attn/fused_attn.cpp`); before 9.6 LSE is padded,
# too.
CUDNN = (9, 7)
CUDNN_WITH_FAULTS = ((9, 10, 0), (9, 10, 1))  # versions from which that file takes no fused attention in bf16


def _cudnn_fault() -> str:
    """The reason why Transformer Engine's cuDNN serves no packed sequences; "" if it does."""
    try:
        version: tuple[int, int, int] = import_module("transformer_engine.pytorch.utils").get_cudnn_version()
    except Exception as error:
        return _first_line(error)
    shown = ".".join(map(str, version))
    if version < CUDNN:
        return f"cuDNN {shown}: before 9.7 it takes lengths that are multiples of 64 only"
    return f"cuDNN {shown}: its fused attention has known faults" if version in CUDNN_WITH_FAULTS else ""


# Transformer Engine 2.9 to 2.18 (`transformer_engine.pytorch.cpp_extensions.fused_attn`).
class _TeFusedCalls:
    """Transformer Engine's fused attention, by cuDNN (`_cudnn_fault`)."""

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

    def backward(self, at: CuSeqlens, dout: FinalRows, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Grads:
        q, k, v, grad, out = (x.contiguous() for x in (q, k, v, *dout[:2]))
        seed = torch.zeros(2, dtype=torch.int64, device=q.device)  # no dropout: read by nobody
        kept = [dout[2].contiguous()[..., None], seed]
        types = (q.dtype, self.types[q.dtype]) if "dqkv_dtype" in self.backward_takes else (q.dtype,)
        formats = {"do_format": "thd", "dqkv_layout": "thd_thd_thd"} if "do_format" in self.backward_takes else {}
        dq, dk, dv, *_ = self.module.fused_attn_bwd(
            *(at.max_q, at.max_k, at.cu_q, at.cu_k, q, k, v, out, grad, *types, kept, self.backend),
            **self.options(at, scale),
            **formats,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        return dq.view(q.shape), dk.view(k.shape), dv.view(v.shape)


Capability = tuple[int, int]  # compute capability of a GPU, (major, minor)
NOT_INSTALLED = "not installed"


def capability_of(device: torch.device) -> Capability | None:
    """None for a CPU, or where no GPU is here to ask."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_capability(device)


@dataclass(frozen=True, slots=True)
class _Capabilities:
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


class _Tensors(NamedTuple):
    """Tensors that a kernel shall serve, under sliding `windows` and a `softcap` (0: none) or not."""

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    windows: bool = False
    softcap: float = 0.0


@dataclass(frozen=True, slots=True)
class _Offer:
    """A kernel that can be chosen."""

    # Makes it for tensors of a head dim, and for scores with a soft cap (0: none), if it `caps`.
    make: Callable[[int, float], Kernel]
    # Types of devices.
    devices: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    # Largest head dim before compute capability 10, and from there on.
    largest: tuple[int, int] = (1 << 30, 1 << 30)
    # One of them must be there and can be imported.
    modules: tuple[str, ...] = ()
    # How to get it.
    mend: str = ""
    # Of GPUs.
    capabilities: _Capabilities = _Capabilities((0, 0))
    # Further needs; the reason why it cannot be used here, "" if it can.
    check: Callable[[], str] = str
    # The reason why its calls here take no sliding windows, "" if they do.
    window_fault: Callable[[], str] = str
    # Values may have another width than keys; else the narrower are padded.
    two_widths: bool = False
    # It can cap scores softly (`AttentionShape.softcap`).
    caps: bool = False

    def fault(self) -> str:
        """Why it cannot be used here: `NOT_INSTALLED`, an error at import, a version; "": it can."""
        faults = [_import_fault(name) for name in self.modules]
        if faults and "" not in faults:
            return next((fault for fault in faults if fault != NOT_INSTALLED), NOT_INSTALLED)
        return self.check()

    @property
    def installed(self) -> bool:
        return not self.fault()

    def refusal(
        self, device: torch.device, dtype: torch.dtype, head_dim: int, windows: bool = False, softcap: float = 0.0
    ) -> str:
        """The reason why it does not serve such tensors; "" if it does."""
        if softcap and not self.caps:
            return "cannot cap scores softly"
        if windows and self.window_fault():
            return self.window_fault()
        if device.type not in self.devices:
            return f"does not serve {device.type} tensors"
        if dtype not in self.dtypes:
            return f"does not serve {dtype}, only {', '.join(map(str, self.dtypes))}"
        capability = capability_of(device)
        if capability is not None and capability not in self.capabilities:
            return f"serves compute capability {self.capabilities}, this GPU has {'.'.join(map(str, capability))}"
        largest = self.largest[capability is not None and capability >= (10, 0)]
        return "" if head_dim <= largest else f"serves head dims up to {largest}"


@cache
def _import_fault(name: str) -> str:
    """The reason why a module cannot be imported, `NOT_INSTALLED` or the error; "" if it can."""
    # A wheel that was built for another torch fails with an OSError, or with an ImportError for an
    # undefined symbol.
    top = name.partition(".")[0]
    if top not in sys.modules and find_spec(top) is None:
        return NOT_INSTALLED
    try:
        import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            return NOT_INSTALLED  # the package is there, but not this part of it
        return _first_line(error)
    except Exception as error:
        return _first_line(error)
    return ""


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


@dataclass(frozen=True, slots=True)
class _MaskGroup:
    """Entries that one call serves. Rows: a slice if they are consecutive, else an index."""

    at: CuSeqlens
    q: Tensor | slice
    k: Tensor | slice
    dout: Tensor | slice
    packed_q: Tensor | slice
    packed_k: Tensor | slice


@dataclass(frozen=True, slots=True)
class _VarlenEntries:
    groups: tuple[_MaskGroup, ...]
    num_q: int
    num_k: int


class VarlenKernel:
    """See `runtime.kernels.base.Kernel`; `calls` are a library's."""

    def __init__(self, name: str, calls: _Calls) -> None:
        self.name, self.calls = name, calls

    def launches(self, entries: _VarlenEntries) -> int:
        return len(entries.groups)

    def _calls_of(self, entries: Entries) -> list[tuple[bool, Window, int]]:
        """The call that serves each entry: its mask, and in a backward the bucket of its keys."""
        masks, law = _masks(entries), law_of(self.name).key_blocks
        if law is None or not entries.dout:
            return [(*mask, 0) for mask in masks]
        num_q, num_k = (np.diff(rows, axis=1)[:, 0] for rows in (entries.q, entries.k))
        heads, kv_heads = (np.full(len(masks), each) for each in entries.heads)
        kinds = sorted(set(masks))
        launch = np.array([kinds.index(mask) for mask in masks])
        grid = KeyGrid.of(num_q, -(-num_k // TILE_TOKENS), heads, kv_heads)
        of = by_key_length(grid, launch, len(kinds), law)[0]
        return [(*mask, bucket) for mask, bucket in zip(masks, of.tolist(), strict=True)]

    def prepare(self, entries: Entries, device: torch.device) -> _VarlenEntries:
        packed_q, packed_k = _packed(entries.q), _packed(entries.k)
        groups: list[_MaskGroup] = []
        calls = self._calls_of(entries)
        for call in sorted(set(calls)):
            causal, window, _ = call
            chosen = [i for i, each in enumerate(calls) if each == call]
            q, k = [entries.q[i] for i in chosen], [entries.k[i] for i in chosen]
            max_q, max_k = (max(b - a for a, b in rows) for rows in (q, k))
            at = CuSeqlens(_cu_seqlens(q, device), _cu_seqlens(k, device), max_q, max_k, causal, window)
            dout = [entries.dout[i] for i in chosen] if entries.dout else [(0, 0)]
            rows = (q, k, dout, [packed_q[i] for i in chosen], [packed_k[i] for i in chosen])
            groups.append(_MaskGroup(at, *[_rows(each, device) for each in rows]))
        return _VarlenEntries(tuple(groups), packed_q[-1][1], packed_k[-1][1])

    def forward(self, entries: _VarlenEntries, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        parts = [
            self.calls.forward(group.at, _take(q, group.q), _take(k, group.k), _take(v, group.k), scale)
            for group in entries.groups
        ]
        if len(parts) == 1:
            return parts[0]
        out = q.new_empty(entries.num_q, *q.shape[1:])
        lse = parts[0][1].new_empty(entries.num_q, q.shape[1])
        for group, (part, part_lse) in zip(entries.groups, parts, strict=True):
            out[group.packed_q] = part
            lse[group.packed_q] = part_lse
        return out, lse

    def backward(
        self, entries: _VarlenEntries, dout: FinalRows, q: Tensor, k: Tensor, v: Tensor, scale: float
    ) -> Grads:
        parts: list[Grads] = []
        for group in entries.groups:
            grad, out, lse = (_take(x, group.dout) for x in dout)
            inputs = _take(q, group.q), _take(k, group.k), _take(v, group.k)
            parts.append(self.calls.backward(group.at, (grad, out, lse), *inputs, scale))
        if len(parts) == 1:
            return parts[0]
        dq = q.new_empty(entries.num_q, *q.shape[1:])
        dk = k.new_empty(entries.num_k, *k.shape[1:])
        dv = torch.empty_like(dk)
        for group, (part_q, part_k, part_v) in zip(entries.groups, parts, strict=True):
            dq[group.packed_q], dk[group.packed_k], dv[group.packed_k] = part_q, part_k, part_v
        return dq, dk, dv


def _masks(entries: Entries) -> tuple[tuple[bool, Window], ...]:
    """Causal or not, and window, of each entry."""
    # A full one of a single query is causal, too, and goes with the others.
    if entries.windows:
        return tuple((right == 0, (left, right)) for left, right in entries.windows)
    if not any(entries.causal):
        return tuple((causal, NO_WINDOW) for causal in entries.causal)
    rows = zip(entries.causal, entries.q, strict=True)
    return tuple((causal or stop - start == 1, NO_WINDOW) for causal, (start, stop) in rows)


def _packed(rows: tuple[tuple[int, int], ...]) -> list[tuple[int, int]]:
    packed, at = [], 0
    for start, stop in rows:
        packed.append((at, at + stop - start))
        at += stop - start
    return packed


def _rows(rows: list[tuple[int, int]], device: torch.device) -> Tensor | slice:
    if all(a[1] == b[0] for a, b in zip(rows, rows[1:], strict=False)):
        return slice(rows[0][0], rows[-1][1])
    return torch.cat([torch.arange(a, b) for a, b in rows]).to(device, non_blocking=True)  # no wait


def _take(x: Tensor, rows: Tensor | slice) -> Tensor:
    """Rows of `x`; the libraries take gaps between heads, not inside them."""
    if not isinstance(rows, slice):
        return x.index_select(0, rows)
    return x[rows] if x.dim() == 2 or x.stride(-1) == 1 else x[rows].contiguous()


def _cu_seqlens(rows: list[tuple[int, int]], device: torch.device) -> Tensor:
    sizes = torch.tensor([0, *(b - a for a, b in rows)], dtype=torch.int32)
    return sizes.cumsum(0, dtype=torch.int32).to(device, non_blocking=True)


class PaddedKernel:
    """`kernel`, which takes heads of width `wide` alone, for keys of width D and values of width V."""

    # They are padded with zeros, which add nothing to the scores, and the scale is the caller's;
    # their columns of the output, and of the gradients, are left out. So the result is exact. The
    # copies cost memory traffic, which `cost.kernel.padding_elements` counts.

    def __init__(self, kernel: Kernel, widths: tuple[int, int], wide: int) -> None:
        """`widths`: D and V."""
        self.kernel, self.name, (self.dim, self.value_dim), self.wide = kernel, kernel.name, widths, wide

    def launches(self, entries: Any) -> int:
        return self.kernel.launches(entries)

    def prepare(self, entries: Entries, device: torch.device) -> Any:
        return self.kernel.prepare(entries, device)

    def forward(self, entries: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        out, lse = self.kernel.forward(entries, self._padded(q), self._padded(k), self._padded(v), scale)
        return _cut(out, self.value_dim), lse

    def backward(self, entries: Any, dout: FinalRows, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Grads:
        final = (self._padded(dout[0]), self._padded(dout[1]), dout[2])
        grads = self.kernel.backward(entries, final, self._padded(q), self._padded(k), self._padded(v), scale)
        return _cut(grads[0], self.dim), _cut(grads[1], self.dim), _cut(grads[2], self.value_dim)

    def _padded(self, x: Tensor) -> Tensor:
        return pad(x, (0, self.wide - x.shape[-1])) if x.shape[-1] < self.wide else x


def _cut(x: Tensor, width: int) -> Tensor:
    return x[..., :width].contiguous() if x.shape[-1] > width else x


log = logging.getLogger(__name__)
_FP32_FP64 = (torch.float32, torch.float64)
_BF16_FP16 = (torch.bfloat16, torch.float16)
_MULTIPLE = 8  # head dims that the libraries take are multiples of it; others are padded


def _varlen(name: str, calls: Callable[..., _Calls]) -> Callable[[int, float], Kernel]:
    def make(head_dim: int, softcap: float) -> Kernel:
        kernel = VarlenKernel(name, calls(softcap) if softcap else calls())
        more = -head_dim % _MULTIPLE
        return PaddedKernel(kernel, (head_dim, head_dim), head_dim + more) if more else kernel

    return make


# By name, as a run file's `kernel:` has them.
KERNELS: dict[str, _Offer] = {
    "plain": _Offer(
        lambda _, softcap: PlainKernel(softcap),
        *(("cpu", "cuda"), (*_FP32_FP64, *_BF16_FP16)),
        two_widths=True,
        caps=True,
    ),
    "cpu_flash": _Offer(lambda *_: CpuFlashKernel(), ("cpu",), (torch.float32, *_BF16_FP16)),
    "torch_varlen": _Offer(
        _varlen("torch_varlen", TorchCalls), *(("cuda",), _BF16_FP16, (256, 256)), capabilities=_Capabilities((8, 0))
    ),
    "flash_attn": _Offer(
        _varlen("flash_attn", _FlashAttn2Calls),
        *(("cuda",), _BF16_FP16, (256, 256), ("flash_attn.flash_attn_interface",)),
        "pip install --no-build-isolation flash-attn",
        _Capabilities((8, 0)),
        caps=True,
    ),
    # Of the other libraries' limits those that stand in Transformer Engine 2.17.1's own choice
    # (pytorch/attention/dot_product_attention/utils.py) and in torch 2.13 (nn/attention/_fa4.py).
    "flash_attn_3": _Offer(
        _varlen("flash_attn_3", _FlashAttn3Calls),
        *(("cuda",), _BF16_FP16, (256, 256), FLASH_ATTN_3),
        "build hopper/ of https://github.com/Dao-AILab/flash-attention",
        _Capabilities((9, 0), (9, 0)),
        window_fault=lambda: "is not called with sliding windows here",
        caps=True,
    ),
    "flash_attn_4": _Offer(
        _varlen("flash_attn_4", lambda: TorchCalls("FA4")),
        *(("cuda",), _BF16_FP16, (256, 128), ("flash_attn.cute.interface",)),
        "pip install 'flash-attn-4==4.0.0b11' (torch 2.13 reads two results of its forward; later ones return five)",
        _Capabilities((9, 0), (10, 9)),
        _flash_attention_4_fault,
        _flash_attention_4_window_fault,
    ),
    "te_fused": _Offer(
        _varlen("te_fused", _TeFusedCalls),
        *(("cuda",), _BF16_FP16, (256, 128), ("transformer_engine.pytorch.cpp_extensions.fused_attn",)),
        "pip install --no-build-isolation 'transformer-engine[pytorch]', with cuDNN 9.7 or later",
        _Capabilities((9, 0), (10, 9)),
        _cudnn_fault,
    ),
}

# `auto` up to compute capability 9, in order of preference. By the published rates of an H100:
# FlashAttention-3 648 TFLOP/s, cuDNN 595, FlashAttention-2 370 (arXiv 2407.08608, Figure 5). Before
# Hopper only the last two names serve.
AUTOMATIC_HOPPER = ("flash_attn_3", "te_fused", "flash_attn_4", "flash_attn", "torch_varlen")

# `auto` from compute capability 10 on: FlashAttention-4 was made for it.
AUTOMATIC_BLACKWELL = ("flash_attn_4", "te_fused", "flash_attn", "torch_varlen")

# `auto` on a CPU. On CUDA the formula is chosen by name only: its scores are whole matrices, in
# fp32.
AUTOMATIC_CPU = ("cpu_flash", "plain")
_told: set[str] = set()  # sentences that were logged


def _preferred(device: torch.device) -> tuple[str, ...]:
    if device.type == "cpu":
        return AUTOMATIC_CPU
    capability = capability_of(device)
    return AUTOMATIC_BLACKWELL if capability is not None and capability >= (10, 0) else AUTOMATIC_HOPPER


def choose_kernel(  # noqa: PLR0913  the tensors, and what is asked of their attention
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    *,
    value_dim: int | None = None,
    windows: bool = False,
    softcap: float = 0.0,
) -> Kernel:
    """Make the kernel called `name`, and log once which it is. "auto": the first of
    `_preferred(device)` that serves these tensors (and sliding `windows`, and a `softcap` other than
    0), can be used here and, on a GPU, passes its trial. `value_dim`: width of values and outputs;
    None: that of keys. ConfigError: no such kernel, it cannot be used here or serve these tensors, or
    none of `auto` can.
    """
    # One that is installed but broken is reported once and skipped.
    widths = head_dim, head_dim if value_dim is None else value_dim
    of = _Tensors(device, dtype, max(widths), windows, softcap)
    if name == "auto":
        kernel = _automatic(of)
    elif name not in KERNELS:
        raise ConfigError(f"unknown kernel {name!r}; known: auto, {', '.join(KERNELS)}")
    else:
        offer = KERNELS[name]
        kernel, reason = _made(name, of)
        if kernel is None and offer.refusal(*of):
            raise ConfigError(f"kernel {name} {reason} (head dim {of.head_dim}); use kernel: auto")
        if kernel is None:
            needs = f"needs {' or '.join(offer.modules)}, which is not installed"
            why = needs if reason == NOT_INSTALLED else f"cannot be used here: {reason}"
            raise ConfigError(f"kernel {name} {why}; {offer.mend or 'another torch'}, or use kernel: auto")
    _tell(logging.INFO, f"attention kernel {kernel.name} ({device.type}, {dtype}, head dim {of.head_dim})")
    alike = widths[0] == widths[1] or KERNELS[kernel.name].two_widths
    return kernel if alike else PaddedKernel(kernel, widths, of.head_dim)


def _automatic(of: _Tensors) -> Kernel:
    reasons: dict[str, str] = {}
    for name in _preferred(of.device):
        offer = KERNELS[name]
        kernel, reasons[name] = _made(name, of)
        if kernel is not None:
            return kernel
        if offer.modules and not offer.refusal(*of) and reasons[name] != NOT_INSTALLED:
            _tell(logging.WARNING, f"attention kernel {name} is installed, but is skipped: {reasons[name]}")
    mends = [f"{name}: {KERNELS[name].mend}" for name in reasons if KERNELS[name].mend]
    raise ConfigError(
        f"no attention kernel for {of.dtype} and head dim {of.head_dim} on {of.device.type}: "
        f"{'; '.join(f'{name} {reason}' for name, reason in reasons.items())}. Train in bf16, install one of them "
        f"({'; '.join(mends)}), or set 'kernel: plain' (the formula: slow, with the scores of all pairs in memory)"
    )


def _made(name: str, of: _Tensors) -> tuple[Kernel | None, str]:
    offer = KERNELS[name]
    reason = offer.refusal(*of) or offer.fault()
    if reason:
        return None, reason
    try:
        kernel = offer.make(of.head_dim, of.softcap)
    except Exception as error:
        return None, _first_line(error)
    if capability_of(of.device) is not None and name != "plain":
        reason = _trial_failure(kernel, of)
    if reason:
        _restore_flash_attention()
        return None, reason
    return kernel, ""


def _tell(level: int, sentence: str) -> None:
    if sentence not in _told:
        _told.add(sentence)
        log.log(level, sentence)


# Largest difference from the formula over its largest value, as the GPU suite asks
# (`tools/gpu/attention.py`); of other types 1e-4.
TRIAL_TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 1e-2}
_HEADS, _KV_HEADS = 2, 1

# Causal with more keys than queries, so that alignment shows, and full; neither a multiple of 64.
_ENTRIES = Entries(((0, 70), (70, 90)), ((0, 130), (130, 203)), (True, False), ((0, 70), (70, 90)))

# As a halo has them: one window for all, at the end of the keys.
_WINDOWS = ((40, 0), (40, 0))
_RESULTS = ("out", "LSE", "dq", "dk", "dv")


def _trial_failure(kernel: Kernel, of: _Tensors) -> str:
    """Why the kernel's results cannot be used, with windows too; "": they are right. Found once."""
    for rows in (_ENTRIES, replace(_ENTRIES, windows=_WINDOWS))[: 1 + of.windows]:
        key = (kernel.name, rows, *of[:3], bool(of.softcap))
        if key not in _failures:
            _failures[key] = _failure(kernel, of, rows)
        if _failures[key]:
            return _failures[key]
    return ""


_failures: dict[tuple[object, ...], str] = {}


def _failure(kernel: Kernel, of: _Tensors, rows: Entries) -> str:
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (
        torch.randn(rows, heads, of.head_dim, generator=generator).to(of.device, of.dtype)
        for rows, heads in ((90, _HEADS), (203, _KV_HEADS), (203, _KV_HEADS), (90, _HEADS))
    )
    scale = of.head_dim**-0.5
    try:
        found = _results(kernel, rows, (q, k, v), dout, scale)
        exact = _results(PlainKernel(of.softcap), rows, (q.float(), k.float(), v.float()), dout.float(), scale)
        apart = [
            float((one.float() - other).abs().max() / other.abs().max())
            for one, other in zip(found, exact, strict=True)
        ]
    except Exception as error:
        return f"its first call fails: {_first_line(error)}"
    allowed = TRIAL_TOLERANCE.get(of.dtype, 1e-4)
    wrong = [f"{name} by {by:.2g}" for name, by in zip(_RESULTS, apart, strict=True) if not by <= allowed]
    return f"its first call differs from the formula, {', '.join(wrong)} of the largest value" if wrong else ""


def _results(
    kernel: Kernel, rows: Entries, inputs: tuple[Tensor, Tensor, Tensor], dout: Tensor, scale: float
) -> tuple[Tensor, ...]:
    """Out, LSE, dq, dk and dv."""
    entries = kernel.prepare(rows, dout.device)
    out, lse = kernel.forward(entries, *inputs, scale)
    return out, lse, *kernel.backward(entries, (dout, out.to(dout.dtype), lse), *inputs, scale)
