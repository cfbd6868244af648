"""Attention by its formula: for tests, and for what no other kernel serves."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_balance.runtime.kernels.base import Entries


class PlainKernel:
    """Attention by its formula, in fp32 or the inputs' fp64."""

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
            dscores = (
                weights
                * (torch.einsum("tgrd,sgd->grts", dy, v[c:d].to(wide)) - delta.permute(1, 2, 0)[..., None])
                * scale
            )
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
