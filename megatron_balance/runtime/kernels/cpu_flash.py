"""torch's flash attention for CPU."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from megatron_balance.runtime.kernels.base import Entries, FinalRows, Grads, merge_partials

_BLOCK = 128  # the fewest query rows of a block of a window


class CpuFlashKernel:
    """One call an entry, GQA without copies of the keys."""

    # Its causal mask is aligned at the top left, so a causal entry with more keys than queries is
    # run in two: the keys before its first query in full, the rest as a square, merged by LSE. An
    # entry of a sliding window is run in blocks of queries, each over the keys that they see, with
    # a mask.

    name = "cpu_flash"

    def launches(self, entries: Entries) -> int:
        if entries.windows:
            return sum(len(_blocks(entries, at)) for at in range(len(entries.q)))
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
        for at, ((a, b), (c, d), mask) in enumerate(zip(entries.q, entries.k, entries.causal, strict=True)):
            if entries.windows:
                parts += [
                    _flash(_rows(q, *rows), _rows(k, *keys), _rows(v, *keys), seen, scale)
                    for rows, keys, seen in _masked_blocks(entries, at, q)
                ]
                continue
            queries = _rows(q, a, b)
            if not _is_staircase(a, b, c, d, mask):
                parts.append(_flash(queries, _rows(k, c, d), _rows(v, c, d), mask, scale))
                continue
            middle = d - (b - a)
            before = _flash(queries, _rows(k, c, middle), _rows(v, c, middle), False, scale)
            parts.append(merge_partials(before, _flash(queries, _rows(k, middle, d), _rows(v, middle, d), True, scale)))
        return _rows_first([out for out, _ in parts]), _rows_first([lse for _, lse in parts])

    def backward(self, entries: Entries, dout: FinalRows, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Grads:
        q, k, v = _heads_first(q), _heads_first(k), _heads_first(v)
        # LSE [T, H] becomes [1, H, T], as the operator has it.
        final = (_heads_first(dout[0]), _heads_first(dout[1]), dout[2].T.unsqueeze(0))
        dqs, dks, dvs = list[Tensor](), list[Tensor](), list[Tensor]()
        spans = zip(entries.q, entries.k, entries.dout, entries.causal, strict=True)
        for at, ((a, b), (c, d), (e, f), mask) in enumerate(spans):
            if entries.windows:
                dq, *dkv = _window_grad(entries, at, final, (q, k, v), scale)
                parts = [dkv]
            else:
                queries, own = _rows(q, a, b), (_rows(final[0], e, f), _rows(final[1], e, f), _rows(final[2], e, f))
                middle = d - (b - a) if _is_staircase(a, b, c, d, mask) else c
                dq, *dkv = _flash_grad(own, queries, _rows(k, middle, d), _rows(v, middle, d), mask, scale)
                parts = [dkv]
                if middle > c:
                    before, *dkv = _flash_grad(own, queries, _rows(k, c, middle), _rows(v, c, middle), False, scale)
                    dq, parts = before + dq, [dkv, *parts]
            dqs.append(dq)
            dks += [dk for dk, _ in parts]
            dvs += [dv for _, dv in parts]
        return _rows_first(dqs), _rows_first(dks), _rows_first(dvs)


def _is_staircase(a: int, b: int, c: int, d: int, causal: bool) -> bool:
    return causal and d - c > b - a


def _heads_first(x: Tensor) -> Tensor:
    """[T, H, D] as [1, H, T, D], a view."""
    return x.transpose(0, 1).unsqueeze(0)


def _rows_first(parts: list[Tensor]) -> Tensor:
    """Parts [1, H, T, ...] as one [T of all, H, ...] without gaps."""
    # torch has a single one so already: a view.
    rows = [x.squeeze(0).transpose(0, 1) for x in parts]
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def _rows(x: Tensor, start: int, stop: int) -> Tensor:
    return x if stop - start == x.shape[2] else x.narrow(2, start, stop - start)


def _blocks(entries: Entries, at: int) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Runs of query rows of an entry of a window, and the run of key rows that each sees."""
    (a, b), (c, d), (left, right) = entries.q[at], entries.k[at], entries.windows[at]
    own = d - b  # a query's row and its own key's
    starts = range(a, b, max(_BLOCK, left))  # of a wide window the keys twice at most
    stops = (*starts[1:], b)
    return [((x, y), (max(c, x + own - left), min(d, y + own + right))) for x, y in zip(starts, stops, strict=True)]


def _masked_blocks(
    entries: Entries, at: int, like: Tensor
) -> Iterator[tuple[tuple[int, int], tuple[int, int], Tensor]]:
    """The blocks of an entry, each with its mask [Tq, Tk]: zero, and minus infinity where hidden."""
    left, right = entries.windows[at]
    own = entries.k[at][1] - entries.q[at][1]
    for (x, y), (u, w) in _blocks(entries, at):
        queries, keys = torch.arange(x, y)[:, None] + own, torch.arange(u, w)
        hidden = (keys < queries - left) | (keys > queries + right)
        yield (x, y), (u, w), torch.zeros(hidden.shape, dtype=like.dtype).masked_fill_(hidden, -math.inf)


def _window_grad(
    entries: Entries, at: int, final: FinalRows, operands: tuple[Tensor, Tensor, Tensor], scale: float
) -> Grads:
    """Gradients of an entry of a window, heads first."""
    q, k, v = operands
    (a, _), (c, d), e = entries.q[at], entries.k[at], entries.dout[at][0]
    dqs: list[Tensor] = []
    dk, dv = (torch.zeros_like(_rows(x, c, d), dtype=torch.promote_types(x.dtype, torch.float32)) for x in (k, v))
    for (x, y), (u, w), seen in _masked_blocks(entries, at, q):
        own = (_rows(final[0], e + x - a, e + y - a), _rows(final[1], e + x - a, e + y - a))
        lse = _rows(final[2], e + x - a, e + y - a)
        grads = _flash_grad((*own, lse), _rows(q, x, y), _rows(k, u, w), _rows(v, u, w), seen, scale)
        dqs.append(grads[0])
        dk[:, :, u - c : w - c] += grads[1]
        dv[:, :, u - c : w - c] += grads[2]
    return torch.cat(dqs, 2), dk.to(k.dtype), dv.to(v.dtype)


def _flash(q: Tensor, k: Tensor, v: Tensor, mask: bool | Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Out [1, H, T, D] and LSE [1, H, T]; `mask`: causal or not, or what is added to the scores."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *(q, k, v, 0.0, mask is True), attn_mask=mask if isinstance(mask, Tensor) else None, scale=scale
    )


def _flash_grad(dout: FinalRows, q: Tensor, k: Tensor, v: Tensor, mask: bool | Tensor, scale: float) -> Grads:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *(dout[0], q, k, v, dout[1], dout[2], 0.0, mask is True),
        attn_mask=mask if isinstance(mask, Tensor) else None,
        scale=scale,
    )
