"""Attention of a sequence written out in NumPy fp64, that every program must equal; drawn masks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_balance import reference
from megatron_balance.ir.mask import MASKS, Mask
from megatron_balance.ir.program import Program

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
# Masks that the contract suite draws from.
NAMES = (*MASKS, "window_3", "window_40")


@dataclass(frozen=True)
class Tensors:
    # Inputs of attention, one array per sequence: q [L, H, D], k [L, G, D], v [L, G, V] and dout
    # [L, H, V].
    q: list[Floats]
    k: list[Floats]
    v: list[Floats]
    dout: list[Floats]
    scale: float


def draw(
    lengths: Sequence[int], heads: int, kv_heads: int, head_dim: int = 4, seed: int = 0, value_dim: int | None = None
) -> Tensors:
    # Standard normal inputs, the same for the same arguments on every rank.
    #
    # `value_dim`: of values and outputs, if not `head_dim`.
    rng = np.random.default_rng(seed)
    values = head_dim if value_dim is None else value_dim

    widths = ((heads, head_dim), (kv_heads, head_dim), (kv_heads, values), (heads, values))
    drawn = ([rng.standard_normal((length, *each)) for length in lengths] for each in widths)
    return Tensors(*drawn, scale=head_dim**-0.5)


@dataclass(frozen=True)
class Dense:
    # One array per sequence; the names are those of `reference.Result`.
    out: list[Floats]
    q_grad: list[Floats]
    k_grad: list[Floats]
    v_grad: list[Floats]
    # [H]; zero where there are none.
    sink_grad: Floats


def visible(mask: Mask) -> Callable[[int], Bools]:
    # By length, which query [row] sees which key [column].
    def table(length: int) -> Bools:
        runs = [mask.keys(0, query) for query in range(length)]
        rows = [[first <= key < stop for key in range(length)] for first, stop in runs]
        return np.array(rows, dtype=bool).reshape(length, length)

    return table


def causal(length: int) -> Bools:
    return np.tril(np.ones((length, length), dtype=bool))


def attention(
    x: Tensors, visible: Callable[[int], Bools] = causal, sink: Floats | None = None, softcap: float = np.inf
) -> Dense:
    # Outputs and gradients, sequence by sequence. `visible`: by length, which query [row] sees
    # which key [column]; `sink` [H]: the score of one more key, whose value is zero; `softcap`:
    # what scores come near, at most.
    num_heads = x.q[0].shape[1] if x.q else 0
    sink = np.full(num_heads, -np.inf) if sink is None else sink
    scoring = (x.scale, softcap)
    columns = [_one(*parts, scoring, visible(len(parts[0])), sink) for parts in zip(x.q, x.k, x.v, x.dout, strict=True)]
    out, q_grad, k_grad, v_grad, sink_grad = ([c[i] for c in columns] for i in range(5))
    return Dense(out, q_grad, k_grad, v_grad, np.sum(sink_grad, axis=0))


def _one(
    q: Floats, k: Floats, v: Floats, dout: Floats, scoring: tuple[float, float], visible: Bools, sink: Floats
) -> tuple[Floats, Floats, Floats, Floats, Floats]:
    length, num_kv_heads = k.shape[:2]
    ratio = q.shape[1] // num_kv_heads
    qh, doh = q.swapaxes(0, 1), dout.swapaxes(0, 1)
    kh, vh = (np.repeat(t.swapaxes(0, 1), ratio, axis=0) for t in (k, v))
    scale, cap = scoring
    scaled = qh @ kh.swapaxes(1, 2) * scale
    # Of a tanh the derivative is 1 / cosh ** 2.
    capped, of_cap = (scaled, 1.0) if np.isinf(cap) else (cap * np.tanh(scaled / cap), 1 / np.cosh(scaled / cap) ** 2)
    scores = np.where(visible, capped, -np.inf)
    scores = np.concatenate([scores, np.broadcast_to(sink[:, None, None], (len(qh), length, 1))], axis=2)
    weights = np.exp(scores - scores.max(axis=2, keepdims=True))
    weights /= weights.sum(axis=2, keepdims=True)
    dweights = np.concatenate([doh @ vh.swapaxes(1, 2), np.zeros((len(qh), length, 1))], axis=2)
    # The softmax's own derivative, not the shortcut through the output that the programs use.
    dscores = weights * (dweights - (weights * dweights).sum(axis=2, keepdims=True))
    dsink, dscores, weights = dscores[:, :, -1].sum(axis=1), dscores[:, :, :-1] * of_cap * scale, weights[:, :, :-1]
    dk, dv = dscores.swapaxes(1, 2) @ qh, weights.swapaxes(1, 2) @ doh

    def by_kv_head(grad: Floats) -> Floats:
        return grad.reshape(num_kv_heads, ratio, length, -1).sum(axis=1).swapaxes(0, 1)

    return (weights @ vh).swapaxes(0, 1), (dscores @ kh).swapaxes(0, 1), by_kv_head(dk), by_kv_head(dv), dsink


def worst(ours: Sequence[Floats], theirs: Sequence[Floats]) -> float:
    # Largest difference over all sequences, relative to the largest magnitude in `theirs`, or to
    # 1e-3 where there is nothing as large.
    #
    # A query that sees one key only has no gradient, and what rounding leaves of it on either side
    # is not worth comparing: where `theirs` is nothing else, differences are relative to 1, as
    # inputs are.
    scale = max((float(np.abs(t).max(initial=0.0)) for t in theirs), default=0.0)
    difference = max((float(np.abs(o - t).max(initial=0.0)) for o, t in zip(ours, theirs, strict=True)), default=0.0)
    return difference / (max(scale, 1e-3) if scale > 1e-12 else 1.0)


def worst_of(program: Program, head_dim: int = 4, value_dim: int | None = None) -> float:
    # `worst` of outputs and gradients of a program by the reference, under its mask.
    x = draw(program.lengths, program.num_heads, program.num_kv_heads, head_dim, value_dim=value_dim)
    ours = reference.run(program, x.q, x.k, x.v, x.scale, x.dout)
    theirs = attention(x, visible(program.mask))
    return max(worst(getattr(ours, name), getattr(theirs, name)) for name in ("out", "q_grad", "k_grad", "v_grad"))
