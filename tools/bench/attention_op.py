"""A graph break at attention against a registered operator, under torch.compile.

    python -m tools.bench.attention_op [--backend inductor] [--width 64 --tokens 64]

Layers of attention and MLP on one rank, forward and backward: not compiled, compiled with
`balanced_attention` as it is (graphs break there), and with an operator that has a fake
implementation, made here for the comparison. Graphs, CPU seconds of the first step and milliseconds
of a later one, median and least, and the largest difference of the first step's gradients.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from megatron_balance import Model
from megatron_balance.runtime.attention import BackwardSlot, _Attention  # pyright: ignore[reportPrivateUsage]
from megatron_balance.torch import BalancedBatch, SequenceBalancer, balanced_attention

HEADS, KV_HEADS = 8, 4
NOT_COMPILED, BREAK, OPERATOR = "not compiled", "graph break", "operator"
SKIPPED = 10
"""Steps in which graphs may still be compiled."""


class Saved:
    """Tensors for a backward, which autograd would keep; an operator has no place for them."""

    def save_for_backward(self, *tensors: Tensor) -> None:
        self.saved_tensors = tensors


class Calls:
    """The batch of a step, which an operator cannot take, and calls to go back through."""

    batch: BalancedBatch
    saved: list[Any] = []  # noqa: RUF012  one list for the process, as the operators are


@torch.library.custom_op("balance_bench::attention", mutates_args=())
def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[T, H, D], [T, G, D], [T, G, D] to [T, H, D]."""
    bound, saved = Calls.batch.bound(q.dtype, q.device), Saved()
    out = _Attention.forward(saved, (bound, BackwardSlot(bound), q.shape[-1] ** -0.5, True), None, None, q, k, v)
    Calls.saved.append(saved)
    return out


@torch.library.custom_op("balance_bench::attention_grad", mutates_args=())
def attention_grad(grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v of the last call whose backward is not done."""
    dq, dk, dv = (x.contiguous() for x in _Attention.backward(Calls.saved.pop(), grad) if x is not None)
    return dq, dk, dv


def backward_of(_ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The operator's backward, for autograd."""
    return attention_grad(grad.contiguous())


def fake(q: Tensor, _k: Tensor, _v: Tensor) -> Tensor:
    """An output of the right shape."""
    return torch.empty_like(q)


def fake_grad(grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the right shapes."""
    dk, dv = (grad.new_empty(grad.shape[0], KV_HEADS, grad.shape[2]) for _ in range(2))
    return torch.empty_like(grad), dk, dv


attention.register_fake(fake)
attention_grad.register_fake(fake_grad)
attention.register_autograd(backward_of)


class Layer(nn.Module):
    """Attention and MLP on rows [T, C]."""

    def __init__(self, width: int, how: str) -> None:
        super().__init__()
        self.head_dim, self.how = width // HEADS, how
        self.norm, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, (HEADS + 2 * KV_HEADS) * self.head_dim)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, batch: BalancedBatch) -> Tensor:
        heads = self.qkv(self.norm(x)).view(len(x), -1, self.head_dim).split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        q, k, v = (each.contiguous() for each in heads)
        out = attention(q, k, v) if self.how == OPERATOR else balanced_attention(q, k, v, batch)
        x = x + self.out(out.flatten(1))
        return x + self.mlp(self.norm2(x))


@dataclass
class Way:
    """Layers that attend in one way, and what was found."""

    layers: nn.ModuleList
    graphs: int = 0
    first_cpu_s: float = 0.0
    gradients: list[Tensor] = field(default_factory=list[Tensor])
    cpu_ms: list[float] = field(default_factory=list[float])

    def step(self, x: Tensor, batch: BalancedBatch, number: int) -> None:
        """A forward and a backward."""
        started = time.process_time()
        for layer in self.layers:
            x = layer(x, batch)
        x.square().mean().backward()
        took = time.process_time() - started
        if number == 0:
            self.first_cpu_s = took
            self.gradients = [p.grad.clone() for p in self.layers.parameters() if p.grad is not None]
        elif number >= SKIPPED:
            self.cpu_ms.append(1e3 * took)
        self.layers.zero_grad()


def made(how: str, options: argparse.Namespace) -> Way:
    """Layers with the same parameters for every way."""
    from torch._dynamo.backends.registry import lookup_backend

    torch.manual_seed(0)
    way = Way(nn.ModuleList(Layer(options.width, how) for _ in range(options.layers)))
    compile_graph: Any = lookup_backend(options.backend)

    def counted(graph: Any, inputs: Any, **given: Any) -> Any:
        way.graphs += 1
        return compile_graph(graph, inputs, **given)

    if how != NOT_COMPILED:
        for layer in way.layers:
            layer.compile(backend=counted, dynamic=True)
    return way


def main() -> int:
    """Print a row for each way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="eager", help="of torch.compile")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    model = Model(HEADS, KV_HEADS, options.width // HEADS, options.layers, options.width, 4 * options.width)
    balancer = SequenceBalancer("te_ring", model)
    ways = {how: made(how, options) for how in (NOT_COMPILED, BREAK, OPERATOR)}
    for step in range(options.steps):
        half = options.tokens // 2
        Calls.batch = balancer([torch.arange(half), torch.arange(half + step % 4)])
        Calls.batch.bound(torch.float32, torch.device("cpu"))  # once a batch, whoever attends first
        x = torch.randn(Calls.batch.num_rows, options.width, generator=torch.Generator().manual_seed(step))
        turns = list(ways.values())
        for way in turns[step % len(turns) :] + turns[: step % len(turns)]:  # the caches are warmer for later ones
            way.step(x, Calls.batch, step)
    table = Table("attention", "graphs", "first step, CPU s", "CPU, ms", "least", "gradient")
    for how, way in ways.items():
        pairs = zip(way.gradients, ways[NOT_COMPILED].gradients, strict=True)
        table.add_row(
            how,
            str(way.graphs),
            f"{way.first_cpu_s:.1f}",
            f"{statistics.median(way.cpu_ms):.2f}",
            f"{min(way.cpu_ms):.2f}",
            f"{max(float((a - b).abs().max()) for a, b in pairs):.1e}",
        )
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
