"""FlashAttention's varlen kernels on CUDA: those that torch was built with, or the flash-attn package's.

One launch serves the full entries of an op and one the causal ones, since the kernel's mask is one switch for all entries.
Operands that are not consecutive are gathered by an index built once per microbatch.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from megatron_balance.runtime.kernels import Entries


def has_flash_attn() -> bool:
    """Whether the flash-attn package is installed."""
    return find_spec("flash_attn") is not None


@dataclass(frozen=True, slots=True)
class _Half:
    """The full or the causal entries. Index tensors are None where rows are consecutive, then `*_first` says from where."""

    causal: bool
    q: Tensor | slice
    k: Tensor | slice
    dout: Tensor | slice
    packed_q: Tensor | slice
    packed_k: Tensor | slice
    cu_q: Tensor
    cu_k: Tensor
    max_q: int
    max_k: int


@dataclass(frozen=True, slots=True)
class _Prepared:
    halves: tuple[_Half, ...]
    num_q: int
    num_k: int


class VarlenKernel:
    """See `runtime.kernels.Kernel`. `name`: torch_varlen or flash_attn."""

    def __init__(self, name: str) -> None:
        self.name = name

    def launches(self, entries: Entries) -> int:
        return len(set(entries.causal))

    def prepare(self, entries: Entries, device: torch.device) -> _Prepared:
        packed_q, packed_k = _packed(entries.q), _packed(entries.k)
        halves = []
        for causal in sorted(set(entries.causal)):
            chosen = [i for i, c in enumerate(entries.causal) if c == causal]
            halves.append(
                _Half(
                    causal,
                    _rows([entries.q[i] for i in chosen], device),
                    _rows([entries.k[i] for i in chosen], device),
                    _rows([entries.dout[i] for i in chosen], device) if entries.dout else slice(0, 0),
                    _rows([packed_q[i] for i in chosen], device),
                    _rows([packed_k[i] for i in chosen], device),
                    _cu_seqlens([entries.q[i] for i in chosen], device),
                    _cu_seqlens([entries.k[i] for i in chosen], device),
                    max(entries.q[i][1] - entries.q[i][0] for i in chosen),
                    max(entries.k[i][1] - entries.k[i][0] for i in chosen),
                )
            )
        return _Prepared(tuple(halves), packed_q[-1][1], packed_k[-1][1])

    def forward(self, entries: _Prepared, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        call = _torch_forward if self.name == "torch_varlen" else _flash_attn_forward
        parts = [call(half, _take(q, half.q), _take(k, half.k), _take(v, half.k), scale) for half in entries.halves]
        if len(parts) == 1:
            return parts[0][0], parts[0][1].T
        out = q.new_empty(entries.num_q, *q.shape[1:])
        lse = parts[0][1].new_empty(q.shape[1], entries.num_q)
        for half, (part, part_lse) in zip(entries.halves, parts, strict=True):
            out[half.packed_q] = part
            lse[:, half.packed_q] = part_lse
        return out, lse.T

    def backward(
        self, entries: _Prepared, dout: tuple[Tensor, Tensor, Tensor], q: Tensor, k: Tensor, v: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        call = _torch_backward if self.name == "torch_varlen" else _flash_attn_backward
        parts = []
        for half in entries.halves:
            final = (_take(dout[0], half.dout), _take(dout[1], half.dout), _take(dout[2], half.dout).T.contiguous())
            parts.append(call(half, final, _take(q, half.q), _take(k, half.k), _take(v, half.k), scale))
        if len(parts) == 1:
            return parts[0]
        dq = q.new_empty(entries.num_q, *q.shape[1:])
        dk = k.new_empty(entries.num_k, *k.shape[1:])
        dv = torch.empty_like(dk)
        for half, (part_q, part_k, part_v) in zip(entries.halves, parts, strict=True):
            dq[half.packed_q], dk[half.packed_k], dv[half.packed_k] = part_q, part_k, part_v
        return dq, dk, dv


def _packed(rows: tuple[tuple[int, int], ...]) -> list[tuple[int, int]]:
    """Where the rows of each entry lie when all are packed one after the other."""
    found, at = [], 0
    for start, stop in rows:
        found.append((at, at + stop - start))
        at += stop - start
    return found


def _rows(rows: list[tuple[int, int]], device: torch.device) -> Tensor | slice:
    if all(a[1] == b[0] for a, b in zip(rows, rows[1:], strict=False)):
        return slice(rows[0][0], rows[-1][1])
    return torch.cat([torch.arange(a, b) for a, b in rows]).to(device)


def _take(x: Tensor, rows: Tensor | slice) -> Tensor:
    return x[rows].contiguous() if isinstance(rows, slice) else x.index_select(0, rows)


def _cu_seqlens(rows: list[tuple[int, int]], device: torch.device) -> Tensor:
    sizes = torch.tensor([0, *(b - a for a, b in rows)], dtype=torch.int32)
    return sizes.cumsum(0, dtype=torch.int32).to(device)


def _torch_forward(half: _Half, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, half.cu_q, half.cu_k, half.max_q, half.max_k, 0.0, half.causal, return_debug_mask=False, scale=scale
    )
    return out, lse


def _torch_backward(
    half: _Half, dout: tuple[Tensor, Tensor, Tensor], q: Tensor, k: Tensor, v: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    seed = torch.zeros(2, dtype=torch.uint64, device=q.device)  # no dropout: read by nobody
    unused = torch.empty(0, device=q.device)
    return torch.ops.aten._flash_attention_backward(
        dout[0], q, k, v, dout[1], dout[2], half.cu_q, half.cu_k, half.max_q, half.max_k, 0.0, half.causal, seed, unused, scale=scale
    )


def _flash_attn() -> Any:
    return import_module("flash_attn.flash_attn_interface")


def _flash_attn_forward(half: _Half, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    out, lse, *_ = _flash_attn()._flash_attn_varlen_forward(
        q, k, v, half.cu_q, half.cu_k, half.max_q, half.max_k, dropout_p=0.0, softmax_scale=scale, causal=half.causal
    )
    return out, lse


def _flash_attn_backward(
    half: _Half, dout: tuple[Tensor, Tensor, Tensor], q: Tensor, k: Tensor, v: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    _flash_attn()._flash_attn_varlen_backward(
        dout[0], q, k, v, dout[1], dout[2], dq, dk, dv, half.cu_q, half.cu_k, half.max_q, half.max_k,
        dropout_p=0.0, softmax_scale=scale, causal=half.causal, window_size_left=-1, window_size_right=-1, softcap=0.0,
        alibi_slopes=None, deterministic=False,
    )  # fmt: skip
    return dq, dk, dv
