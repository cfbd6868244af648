"""Recurrences as affine maps of their state, in plain torch: chunk by chunk, for CPUs and as a check.

Inputs are of one piece: T tokens, H heads. C: tokens of a chunk.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class AffineRecurrence(Protocol):
    """The seam between recurrent layers and their kernels.

    `inputs`: tensors [T, H, ...] in the type in which states are kept. T may be 0.
    """

    def shapes(self, inputs: Sequence[Tensor]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of one head's M, and of its state."""
        ...

    def run(self, inputs: Sequence[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs [T, H, V] from a first state, and the last state [H, ...]. Differentiable."""
        ...

    def map_of(self, inputs: Sequence[Tensor]) -> Tensor:
        """M [H, ...] of all tokens: the last state is M times the first one and U."""
        ...

    def apply(self, m: Tensor, state: Tensor, *, transposed: bool = False) -> Tensor:
        """M, or its transpose, times a state."""
        ...


@dataclass(frozen=True)
class GatedDelta:
    """Gated delta rule: Gated DeltaNet (arXiv:2412.06464) with g [T, H], Kimi Delta Attention
    (arXiv:2510.26692) with g [T, H, K].

    Inputs q, k [T, H, K], v [T, H, V], g (logarithm of the decay), beta [T, H]. A state [K, V].
    """

    chunk: int = 64

    def shapes(self, inputs: Sequence[Tensor]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        _, k, v, _, _ = inputs
        return (k.shape[2], k.shape[2]), (k.shape[2], v.shape[2])

    def run(self, inputs: Sequence[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
        outs = [inputs[2][:0]]
        for q, k, v, g, beta in self._chunks(inputs):
            keys, erased, written, total = self._chunk_of(k, v, g, beta)
            change = written - erased @ state  # what each token writes: beta (v - its read of the state)
            out = (q * g.exp()) @ state + _decayed(q, k, g, 0) @ change
            outs.append(out.transpose(0, 1))
            state = total * state + keys.transpose(1, 2) @ change
        return torch.cat(outs), state

    def map_of(self, inputs: Sequence[Tensor]) -> Tensor:
        k = inputs[1]
        m = torch.eye(k.shape[2], dtype=k.dtype, device=k.device).expand(k.shape[1], -1, -1)
        for _, k, v, g, beta in self._chunks(inputs):
            keys, erased, _, total = self._chunk_of(k, v, g, beta)
            m = total * m - keys.transpose(1, 2) @ (erased @ m)
        return m

    def apply(self, m: Tensor, state: Tensor, *, transposed: bool = False) -> Tensor:
        return (m.transpose(1, 2) if transposed else m) @ state

    def _chunks(self, inputs: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
        # q, k, v, summed g, beta of each chunk, [H, C, ...] each.
        q, k, v, g, beta = inputs
        for each in zip(*(x.split(self.chunk) for x in (q, k, v, g, beta)), strict=True):
            q, k, v, g, beta = (x.transpose(0, 1) for x in each)
            if len(k[0]):
                yield q, k, v, (g if g.ndim == 3 else g[..., None]).cumsum(1), beta[..., None]

    def _chunk_of(self, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, ...]:
        # Keys decayed to the chunk's end, what the first state and what values come to in the changes,
        # decay of the whole chunk. The changes of a chunk solve (I + beta A) x = beta (v - k state).
        system = torch.eye(k.shape[1], dtype=k.dtype, device=k.device) + beta * _decayed(k, k, g, -1)
        right = torch.cat([beta * k * g.exp(), beta * v], dim=2)
        solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        erased, written = solved.split([k.shape[2], v.shape[2]], dim=2)
        return k * (g[:, -1:] - g).exp(), erased, written, g[:, -1, :, None].exp()


@dataclass(frozen=True)
class Mamba2:
    """State space duality, Mamba-2 (arXiv:2405.21060): M is one decay a head.

    Inputs x [T, H, P], dt [T, H], a [T, H] (logarithm of the decay), b and c [T, H, N]. A state [N,
    P].
    """

    chunk: int = 64

    def shapes(self, inputs: Sequence[Tensor]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        x, _, _, b, _ = inputs
        return (1, 1), (b.shape[2], x.shape[2])

    def run(self, inputs: Sequence[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
        outs = [inputs[0][:0]]
        for each in zip(*(x.split(self.chunk) for x in inputs), strict=True):
            x, dt, a, b, c = (x.transpose(0, 1) for x in each)
            if len(x[0]):
                g, written = a[..., None].cumsum(1), x * dt[..., None]
                outs.append(((c * g.exp()) @ state + _decayed(c, b, g, 0) @ written).transpose(0, 1))
                state = g[:, -1:].exp() * state + (b * (g[:, -1:] - g).exp()).transpose(1, 2) @ written
        return torch.cat(outs), state

    def map_of(self, inputs: Sequence[Tensor]) -> Tensor:
        return inputs[2].sum(0).exp()[:, None, None]

    def apply(self, m: Tensor, state: Tensor, *, transposed: bool = False) -> Tensor:
        del transposed
        return m * state


def _decayed(q: Tensor, k: Tensor, g: Tensor, diagonal: int) -> Tensor:
    # Scores [H, C, C] of q [H, C, K] by k, each channel decayed from the key's token to the query's; g
    # [H, C, K or 1]: summed logarithms. Zero above `diagonal`, where the exponential would overflow:
    # masked before it, since gradients are NaN otherwise.
    hidden = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool, device=q.device).triu(diagonal + 1)
    if g.shape[2] == 1:
        return (q @ k.transpose(1, 2)) * (g - g.transpose(1, 2)).masked_fill(hidden, float("-inf")).exp()
    decay = (g[:, :, None] - g[:, None]).masked_fill(hidden[:, :, None], float("-inf")).exp()
    return torch.einsum("hik,hjk,hijk->hij", q, k, decay)
