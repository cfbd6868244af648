"""Attention kernels behind one protocol.

Shape legend: T rows of an operand, N packed query rows of all entries in order, M packed key rows, H query heads, G key-value
heads, D head dim. An entry is a run of query rows and a run of key rows, full or causal at the bottom right. LSE is
natural-log, in fp32 (fp64 for fp64 inputs).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_balance.errors import ConfigError
from megatron_balance.runtime.flash import FLASH_ATTN_3, FlashAttn2Calls, FlashAttn3Calls, TeFusedCalls, TorchCalls, has_module
from megatron_balance.runtime.varlen import VarlenKernel


@dataclass(frozen=True, slots=True)
class Entries:
    """Rows of the entries of one launch: [start, stop) in the query operand, the key operand and (backward) dout's rows."""

    q: tuple[tuple[int, int], ...]
    k: tuple[tuple[int, int], ...]
    causal: tuple[bool, ...]
    dout: tuple[tuple[int, int], ...] = ()

    @property
    def num_q(self) -> int:
        return sum(b - a for a, b in self.q)


class Kernel(Protocol):
    """One launch over many entries. `prepare` runs once per microbatch; its result goes to every `forward` and `backward`."""

    name: str

    def launches(self, entries: Entries) -> int:
        """Kernel calls that the entries take."""
        ...

    def prepare(self, entries: Entries, device: torch.device) -> Any:
        """Whatever the kernel needs of the entries (index tensors, cu_seqlens) on `device`."""
        ...

    def forward(self, entries: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """q [T, H, D], k and v [T, G, D] -> packed out [N, H, D] and LSE [N, H]."""
        ...

    def backward(
        self, entries: Any, dout: tuple[Tensor, Tensor, Tensor], q: Tensor, k: Tensor, v: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Packed dq [N, H, D], dk and dv [M, G, D]. `dout`: gradient, final output [T, H, D] and LSE [T, H] in dout's rows."""
        ...


@dataclass(frozen=True, slots=True)
class Offer:
    """A kernel that can be chosen: what it serves, and what must be installed for it (one of `modules`).

    `head_dims`: (largest, multiple of what). `mend`: how to get it.
    """

    make: Callable[[], Kernel]
    devices: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    head_dims: tuple[int, int]
    modules: tuple[str, ...] = ()
    mend: str = ""

    @property
    def installed(self) -> bool:
        return not self.modules or any(has_module(name) for name in self.modules)

    def refusal(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
        """Why it does not serve such tensors; "" if it does."""
        if device.type not in self.devices:
            return f"does not serve {device.type} tensors"
        if dtype not in self.dtypes:
            return f"does not serve {dtype}, only {', '.join(map(str, self.dtypes))}"
        largest, multiple = self.head_dims
        return "" if head_dim <= largest and head_dim % multiple == 0 else f"serves head dims up to {largest} in multiples of {multiple}"


class PlainKernel:
    """Attention by its formula, in fp32 or the inputs' fp64: for tests and for what no other kernel serves."""

    name = "plain"

    def launches(self, entries: Entries) -> int:
        return len(entries.causal)

    def prepare(self, entries: Entries, device: torch.device) -> Entries:
        del device
        return entries

    def forward(self, entries: Entries, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        outs, lses = [], []
        for (a, b), (c, d), mask in zip(entries.q, entries.k, entries.causal, strict=True):
            scores = _scores(q[a:b], k[c:d], mask, scale)
            lse = torch.logsumexp(scores, -1)
            out = torch.einsum("grts,sgd->tgrd", torch.exp(scores - lse[..., None]), v[c:d].to(scores.dtype))
            outs.append(out.flatten(1, 2).to(q.dtype))
            lses.append(lse.flatten(0, 1).T)
        return torch.cat(outs), torch.cat(lses)

    def backward(
        self, entries: Entries, dout: tuple[Tensor, Tensor, Tensor], q: Tensor, k: Tensor, v: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        dqs, dks, dvs = [], [], []
        grad, out, lse = dout
        num_kv = k.shape[1]
        for (a, b), (c, d), (e, f), mask in zip(entries.q, entries.k, entries.dout, entries.causal, strict=True):
            scores = _scores(q[a:b], k[c:d], mask, scale)
            wide = scores.dtype
            weights = torch.exp(scores - lse[e:f].T.unflatten(0, (num_kv, -1))[..., None])
            dy = grad[e:f].to(wide).unflatten(1, (num_kv, -1))
            delta = (dy * out[e:f].to(wide).unflatten(1, (num_kv, -1))).sum(-1)
            dscores = weights * (torch.einsum("tgrd,sgd->grts", dy, v[c:d].to(wide)) - delta.permute(1, 2, 0)[..., None]) * scale
            dqs.append(torch.einsum("grts,sgd->tgrd", dscores, k[c:d].to(wide)).flatten(1, 2))
            dks.append(torch.einsum("grts,tgrd->sgd", dscores, q[a:b].to(wide).unflatten(1, (num_kv, -1))))
            dvs.append(torch.einsum("grts,tgrd->sgd", weights, dy))
        return torch.cat(dqs), torch.cat(dks), torch.cat(dvs)


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
    """Scaled scores [G, H / G, Tq, Tk]."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    scores = torch.einsum("tgrd,sgd->grts", q.to(wide).unflatten(1, (k.shape[1], -1)), k.to(wide)) * scale
    if causal:
        hidden = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).triu(len(k) - len(q) + 1)
        scores = scores.masked_fill(hidden, -math.inf)
    return scores


class CpuFlashKernel:
    """torch's flash attention for CPU: one call an entry, GQA without copies of the keys.

    Its causal mask is aligned at the top left, so a causal entry with more keys than queries is run in two: the keys before
    its first query in full, the rest as a square, merged by LSE.
    """

    name = "cpu_flash"

    def launches(self, entries: Entries) -> int:
        if True not in entries.causal:
            return len(entries.causal)
        return sum(
            2 if _is_staircase(a, b, c, d, mask) else 1 for (a, b), (c, d), mask in zip(entries.q, entries.k, entries.causal, strict=True)
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
            parts.append(merge(before, _flash(queries, _rows(k, middle, d), _rows(v, middle, d), True, scale)))
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
            grads.append((first[0] + second[0], torch.cat([first[1], second[1]], 2), torch.cat([first[2], second[2]], 2)))
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


def merge(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Merge two partials of the same queries: out [..., D] in the first one's type, natural-log LSE [...]."""
    lse = torch.logaddexp(one[1], other[1])
    weights = (torch.exp(part.sub(lse)).unsqueeze(-1) for part in (one[1], other[1]))
    return one[0].mul(next(weights)).add(other[0].mul(next(weights))).to(one[0].dtype), lse


_WIDE = (torch.float32, torch.float64)
_HALF = (torch.bfloat16, torch.float16)
_ANY_DIM = (1 << 30, 1)
_FLASH_DIMS = (256, 8)
KERNELS: dict[str, Offer] = {
    "plain": Offer(PlainKernel, ("cpu", "cuda"), (*_WIDE, *_HALF), _ANY_DIM),
    "cpu_flash": Offer(CpuFlashKernel, ("cpu",), (torch.float32, *_HALF), _ANY_DIM),
    "torch_varlen": Offer(lambda: VarlenKernel("torch_varlen", TorchCalls()), ("cuda",), _HALF, _FLASH_DIMS),
    "flash_attn": Offer(
        lambda: VarlenKernel("flash_attn", FlashAttn2Calls()),
        *(("cuda",), _HALF, _FLASH_DIMS, ("flash_attn.flash_attn_interface",)),
        "pip install --no-build-isolation flash-attn",
    ),
    "flash_attn_3": Offer(
        lambda: VarlenKernel("flash_attn_3", FlashAttn3Calls()),
        *(("cuda",), _HALF, _FLASH_DIMS, FLASH_ATTN_3),
        "build hopper/ of https://github.com/Dao-AILab/flash-attention",
    ),
    "te_fused": Offer(
        lambda: VarlenKernel("te_fused", TeFusedCalls()),
        *(("cuda",), _HALF, _FLASH_DIMS, ("transformer_engine.pytorch.cpp_extensions.fused_attn",)),
        "pip install --no-build-isolation 'transformer-engine[pytorch]'",
    ),
}
"""By name, as a run file's `kernel:` has them."""

AUTOMATIC = ("flash_attn_3", "flash_attn", "torch_varlen", "cpu_flash", "plain")
"""In order of preference. te_fused is chosen by name only: what it leaves for the backward depends on the version of cuDNN."""


def choose_kernel(name: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> Kernel:
    """The kernel called `name` ("auto": the first of AUTOMATIC that is installed and serves device, dtype and head dim).

    Raises ConfigError: no such kernel, it is not installed, or it cannot serve these tensors.
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
        raise ConfigError(f"kernel {name} needs {' or '.join(offer.modules)}, which is not installed; {offer.mend}, or use kernel: auto")
    return offer.make()
