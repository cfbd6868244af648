"""Protocol of attention kernels.

An entry is a run of query rows and a run of key rows: full, causal at the bottom right, or a window.
LSE is natural-log, in fp32 (fp64 for fp64 inputs).

Shape legend: T rows of an operand, N packed query rows of all entries in order, M packed key rows,
H query heads, G key-value heads, D width of queries and keys, V of values and outputs.
"""

import math
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

# Keys that a query sees before and behind its own, where the last query's own key is the last one:
# FlashAttention's `window_size`.
Window: TypeAlias = tuple[int, int]
FinalRows: TypeAlias = tuple[Tensor, Tensor, Tensor]  # the output's gradient, the final output and its LSE
Grads: TypeAlias = tuple[Tensor, Tensor, Tensor]  # dq, dk and dv


@dataclass(frozen=True, slots=True)
class Entries:
    """Rows of the entries of one launch: [start, stop) in each operand."""

    q: tuple[tuple[int, int], ...]
    k: tuple[tuple[int, int], ...]
    causal: tuple[bool, ...]
    # In the output gradient's rows (backward).
    dout: tuple[tuple[int, int], ...] = ()
    # Of each entry, in place of `causal`; empty: none has one. Every query sees some key.
    windows: tuple[Window, ...] = ()
    # Of queries, and of keys and values.
    heads: tuple[int, int] = (1, 1)

    @property
    def num_q(self) -> int:
        return sum(b - a for a, b in self.q)


class Kernel(Protocol):
    """One launch over many entries, which `prepare` makes ready once per microbatch."""

    name: str

    def prepare(self, entries: Entries, device: torch.device) -> Any:
        """Index tensors, cu_seqlens or whatever the kernel needs of the entries on `device`."""
        ...

    def launches(self, entries: Any) -> int:
        """Kernel calls that prepared entries take."""
        ...

    def forward(self, entries: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Q [T, H, D], k [T, G, D] and v [T, G, V] -> packed out [N, H, V] and LSE [N, H]."""
        ...

    def backward(self, entries: Any, dout: FinalRows, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Grads:
        """Packed dq [N, H, D], dk [M, G, D], dv [M, G, V]; `dout`: `FinalRows` [T, H, ...]."""
        ...


def merge_partials(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Merge two partials of the same queries: out [..., D] in the first one's type, LSE [...]."""
    lse = torch.logaddexp(one[1], other[1])
    weights = (torch.exp(part.sub(lse)).unsqueeze(-1) for part in (one[1], other[1]))
    return one[0].mul(next(weights)).add(other[0].mul(next(weights))).to(one[0].dtype), lse


class PlainKernel:
    """Attention by its formula, in fp32 or fp64: for tests, and for what no other kernel serves."""

    name = "plain"

    def __init__(self, softcap: float = 0.0) -> None:
        """`softcap`: see `runtime.lower.memory.AttentionShape`."""
        self._cap = softcap

    def launches(self, entries: Entries) -> int:
        return len(entries.causal)

    def prepare(self, entries: Entries, device: torch.device) -> Entries:
        del device
        return entries

    def forward(self, entries: Entries, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        outs, lses = [], []
        for at, ((a, b), (c, d)) in enumerate(zip(entries.q, entries.k, strict=True)):
            scores = self._scores(q[a:b], k[c:d], hidden(entries, at, q.device), scale)
            lse = torch.logsumexp(scores, -1)
            # g: key-value head, r: query head of it, t: query, s: key, d: width
            out = torch.einsum("grts,sgd->tgrd", torch.exp(scores - lse[..., None]), v[c:d].to(scores.dtype))
            outs.append(out.flatten(1, 2).to(q.dtype))
            lses.append(lse.flatten(0, 1).T)
        return torch.cat(outs), torch.cat(lses)

    def backward(self, entries: Entries, dout: FinalRows, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Grads:
        dqs, dks, dvs = [], [], []
        grad, out, lse = dout
        num_kv = k.shape[1]
        for at, ((a, b), (c, d), (e, f)) in enumerate(zip(entries.q, entries.k, entries.dout, strict=True)):
            scores = self._scores(q[a:b], k[c:d], hidden(entries, at, q.device), scale)
            wide = scores.dtype
            weights = torch.exp(scores - lse[e:f].T.unflatten(0, (num_kv, -1))[..., None])
            dy = grad[e:f].to(wide).unflatten(1, (num_kv, -1))
            delta = (dy * out[e:f].to(wide).unflatten(1, (num_kv, -1))).sum(-1)
            dscores = (
                weights
                * (torch.einsum("tgrd,sgd->grts", dy, v[c:d].to(wide)) - delta.permute(1, 2, 0)[..., None])
                * scale
            )
            if self._cap:  # the derivative of the cap; hidden scores are minus infinity
                dscores *= 1 - (scores.clamp(min=-self._cap) / self._cap) ** 2
            dqs.append(torch.einsum("grts,sgd->tgrd", dscores, k[c:d].to(wide)).flatten(1, 2))
            dks.append(torch.einsum("grts,tgrd->sgd", dscores, q[a:b].to(wide).unflatten(1, (num_kv, -1))))
            dvs.append(torch.einsum("grts,tgrd->sgd", weights, dy))
        return torch.cat(dqs), torch.cat(dks), torch.cat(dvs)

    def _scores(self, q: Tensor, k: Tensor, hidden: Tensor | None, scale: float) -> Tensor:
        """Scaled scores [G, H / G, Tq, Tk]."""
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        scores = torch.einsum("tgrd,sgd->grts", q.to(wide).unflatten(1, (k.shape[1], -1)), k.to(wide)) * scale
        if self._cap:
            scores = self._cap * torch.tanh(scores / self._cap)
        return scores if hidden is None else scores.masked_fill(hidden, -math.inf)


def hidden(entries: Entries, at: int, device: torch.device) -> Tensor | None:
    """The pairs [Tq, Tk] that the mask of an entry hides; None: none."""
    num_q, num_k = (stop - start for start, stop in (entries.q[at], entries.k[at]))
    if not entries.windows and not entries.causal[at]:
        return None
    left, right = entries.windows[at] if entries.windows else (num_k, 0)
    own = torch.arange(num_q, device=device)[:, None] + num_k - num_q
    keys = torch.arange(num_k, device=device)
    return (keys < own - left) | (keys > own + right)
