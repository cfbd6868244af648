"""FlashAttention's varlen kernels on CUDA: one launch for an op with any number of entries.

The kernel's mask is one switch for all entries, so an op with full and causal entries takes two
launches, never more; a full entry of one query row goes with either. Entries of a sliding window
share a launch if their window is the same, as those of a halo all are (`compile.halo`). Operands
that are not consecutive are gathered by an index built once per microbatch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_balance.runtime.kernels.base import Entries, Kernel, Window
from megatron_balance.runtime.kernels.libraries import NO_WINDOW, Calls, CuSeqlens, Grads


@dataclass(frozen=True, slots=True)
class _MaskGroup:
    """The entries of a launch under one mask. Rows are a slice where they are consecutive, else an
    index.
    """

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

    def __init__(self, name: str, calls: Calls) -> None:
        self.name, self.calls = name, calls

    def launches(self, entries: Entries) -> int:
        return len(set(_masks(entries)))

    def prepare(self, entries: Entries, device: torch.device) -> _VarlenEntries:
        packed_q, packed_k = _packed(entries.q), _packed(entries.k)
        groups: list[_MaskGroup] = []
        masks = _masks(entries)
        for causal, window in sorted(set(masks)):
            chosen = [i for i, mask in enumerate(masks) if mask == (causal, window)]
            q, k = [entries.q[i] for i in chosen], [entries.k[i] for i in chosen]
            at = CuSeqlens(
                _cu_seqlens(q, device),
                _cu_seqlens(k, device),
                max(b - a for a, b in q),
                max(b - a for a, b in k),
                causal,
                window,
            )
            groups.append(
                _MaskGroup(
                    at,
                    _rows(q, device),
                    _rows(k, device),
                    _rows([entries.dout[i] for i in chosen], device) if entries.dout else slice(0, 0),
                    _rows([packed_q[i] for i in chosen], device),
                    _rows([packed_k[i] for i in chosen], device),
                )
            )
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
        self,
        entries: _VarlenEntries,
        dout: tuple[Tensor, Tensor, Tensor],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        parts = []
        for group in entries.groups:
            final = (_take(dout[0], group.dout), _take(dout[1], group.dout), _take(dout[2], group.dout))
            parts.append(
                self.calls.backward(group.at, final, _take(q, group.q), _take(k, group.k), _take(v, group.k), scale)
            )
        if len(parts) == 1:
            return parts[0]
        dq = q.new_empty(entries.num_q, *q.shape[1:])
        dk = k.new_empty(entries.num_k, *k.shape[1:])
        dv = torch.empty_like(dk)
        for group, (part_q, part_k, part_v) in zip(entries.groups, parts, strict=True):
            dq[group.packed_q], dk[group.packed_k], dv[group.packed_k] = part_q, part_k, part_v
        return dq, dk, dv


def _masks(entries: Entries) -> tuple[tuple[bool, Window], ...]:
    """Causal or not, and window, of each entry. A full one of a single query is causal, too, and
    goes with the others.
    """
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
    """`kernel`, which takes heads of width `wide` alone, for queries and keys of width D and values
    and outputs of width V: they are padded with zeros.

    These add nothing to the scores, and the scale is the caller's; their columns of the output, and of
    the gradients, are left out. So the result is exact. The copies cost memory traffic, which
    `cost.kernel.padding_elements` counts.
    """

    def __init__(self, kernel: Kernel, widths: tuple[int, int], wide: int) -> None:
        """`widths`: D and V."""
        self.kernel, self.name, (self.dim, self.value_dim), self.wide = kernel, kernel.name, widths, wide

    def launches(self, entries: Entries) -> int:
        return self.kernel.launches(entries)

    def prepare(self, entries: Entries, device: torch.device) -> Any:
        return self.kernel.prepare(entries, device)

    def forward(self, entries: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        out, lse = self.kernel.forward(entries, self._padded(q), self._padded(k), self._padded(v), scale)
        return _cut(out, self.value_dim), lse

    def backward(
        self, entries: Any, dout: tuple[Tensor, Tensor, Tensor], q: Tensor, k: Tensor, v: Tensor, scale: float
    ) -> Grads:
        final = (self._padded(dout[0]), self._padded(dout[1]), dout[2])
        grads = self.kernel.backward(entries, final, self._padded(q), self._padded(k), self._padded(v), scale)
        return _cut(grads[0], self.dim), _cut(grads[1], self.dim), _cut(grads[2], self.value_dim)

    def _padded(self, x: Tensor) -> Tensor:
        return pad(x, (0, self.wide - x.shape[-1])) if x.shape[-1] < self.wide else x


def _cut(x: Tensor, width: int) -> Tensor:
    return x[..., :width].contiguous() if x.shape[-1] > width else x
