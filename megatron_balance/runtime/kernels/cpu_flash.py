"""torch's flash attention for CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_balance.runtime.kernels.base import Entries, merge_partials


class CpuFlashKernel:
    """One call an entry, GQA without copies of the keys.

    Its causal mask is aligned at the top left, so a causal entry with more keys than queries is run
    in two: the keys before its first query in full, the rest as a square, merged by LSE.
    """

    name = "cpu_flash"

    def launches(self, entries: Entries) -> int:
        if True not in entries.causal:
            return len(entries.causal)
        return sum(
            2 if _is_staircase(a, b, c, d, mask) else 1
            for (a, b), (c, d), mask in zip(entries.q, entries.k, entries.causal, strict=True)
        )

    def prepare(self, entries: Entries, device: torch.device) -> Entries:
        del device
        return entries

    def forward(self, entries: Entries, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        q, k, v = _heads_first(q), _heads_first(k), _heads_first(v)
        parts: list[tuple[Tensor, Tensor]] = []
        for (a, b), (c, d), mask in zip(entries.q, entries.k, entries.causal, strict=True):
            queries = _rows(q, a, b)
            if not _is_staircase(a, b, c, d, mask):
                parts.append(_flash(queries, _rows(k, c, d), _rows(v, c, d), mask, scale))
                continue
            middle = d - (b - a)
            before = _flash(queries, _rows(k, c, middle), _rows(v, c, middle), False, scale)
            parts.append(merge_partials(before, _flash(queries, _rows(k, middle, d), _rows(v, middle, d), True, scale)))
        if len(parts) == 1:
            out, lse = parts[0]
        else:
            out, lse = torch.cat([out for out, _ in parts], 2), torch.cat([lse for _, lse in parts], 2)
        return out.squeeze(0).transpose(0, 1), lse.squeeze(0).T

    def backward(
        self, entries: Entries, dout: tuple[Tensor, Tensor, Tensor], q: Tensor, k: Tensor, v: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = _heads_first(q), _heads_first(k), _heads_first(v)
        final = (_heads_first(dout[0]), _heads_first(dout[1]), dout[2].T.unsqueeze(0))
        grads: list[tuple[Tensor, Tensor, Tensor]] = []
        for (a, b), (c, d), (e, f), mask in zip(entries.q, entries.k, entries.dout, entries.causal, strict=True):
            queries, own = _rows(q, a, b), (_rows(final[0], e, f), _rows(final[1], e, f), _rows(final[2], e, f))
            if not _is_staircase(a, b, c, d, mask):
                grads.append(_flash_grad(own, queries, _rows(k, c, d), _rows(v, c, d), mask, scale))
                continue
            middle = d - (b - a)
            first = _flash_grad(own, queries, _rows(k, c, middle), _rows(v, c, middle), False, scale)
            second = _flash_grad(own, queries, _rows(k, middle, d), _rows(v, middle, d), True, scale)
            grads.append(
                (first[0] + second[0], torch.cat([first[1], second[1]], 2), torch.cat([first[2], second[2]], 2))
            )
        if len(grads) == 1:
            dq, dk, dv = grads[0]
        else:
            dq, dk, dv = (torch.cat([g[i] for g in grads], 2) for i in range(3))
        return dq.squeeze(0).transpose(0, 1), dk.squeeze(0).transpose(0, 1), dv.squeeze(0).transpose(0, 1)


def _is_staircase(a: int, b: int, c: int, d: int, causal: bool) -> bool:
    return causal and d - c > b - a


def _heads_first(x: Tensor) -> Tensor:
    """[T, H, D] as [1, H, T, D], a view."""
    return x.transpose(0, 1).unsqueeze(0)


def _rows(x: Tensor, start: int, stop: int) -> Tensor:
    """Rows [start, stop) of `x` [1, H, T, ...]: a view, `x` itself if that is all of them."""
    return x if stop - start == x.shape[2] else x.narrow(2, start, stop - start)


def _flash(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Out [1, H, T, D] and LSE [1, H, T] of heads-first operands."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=None, scale=scale)


def _flash_grad(
    dout: tuple[Tensor, Tensor, Tensor], q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout[0], q, k, v, dout[1], dout[2], 0.0, causal, attn_mask=None, scale=scale
    )
