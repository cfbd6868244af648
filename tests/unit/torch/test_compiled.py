"""Attention as an operator is the same attention, and says what is wrong as it does."""

import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_balance import Model
from megatron_balance.errors import ConfigError
from megatron_balance.torch import SequenceBalancer, Settings, balanced_attention, compiled
from megatron_balance.torch.batch import BalancedBatch

MODEL = Model(num_heads=4, num_kv_heads=2, head_dim=8, num_layers=1, hidden_size=32, ffn_size=64)


def batch_of(*lengths: int, **settings: Any) -> BalancedBatch:
    balancer = SequenceBalancer("te_ring", MODEL, settings=Settings(**settings))
    documents = [torch.arange(n) for n in lengths]
    balancer(documents)
    return balancer(documents)


def inputs_of(rows: int, heads: tuple[int, int, int, int] = (4, 2, 8, 8)) -> list[Tensor]:
    g = torch.Generator().manual_seed(rows)
    queries, keys, width, values = heads
    shapes = ((queries, width), (keys, width), (keys, values))
    return [torch.randn(rows, *shape, generator=g, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize(
    ("heads", "how"),
    [
        ((4, 2, 8, 8), {}),
        ((4, 2, 8, 8), {"window": 5, "scale": 0.2}),
        ((4, 2, 8, 8), {"sink": True}),
        ((4, 2, 8, 8), {"softcap": 2}),
        ((6, 3, 4, 12), {"own_heads": True}),
    ],
    ids=["plain", "window", "sink", "softcap", "values of another width"],
)
def test_the_operator_gives_the_attention_and_gradients_of_the_call(heads: Any, how: dict[str, Any]) -> None:
    found: list[list[Tensor]] = []
    for in_graphs in (False, True):
        batch = batch_of(9, 1, 6, compiled=in_graphs, row_multiple=10)
        given = inputs_of(batch.num_rows, heads)
        if "sink" in how:
            given.append(torch.linspace(-1, 1, heads[0]).requires_grad_())
        named = {**how, "sink": given[3]} if "sink" in how else how
        for _ in range(2 if in_graphs else 1):  # of a window and of own heads the balancer hears by the first call
            batch = batch if not in_graphs else batch_like(batch)
            out = balanced_attention(given[0], given[1], given[2], batch, **named)
        made: Any = out.grad_fn
        assert ("megatron_balance" in made.next_functions[0][0].name()) == in_graphs
        assert not out[16:].any(), "padding gives zeros"
        found.append([out.detach(), *torch.autograd.grad(out.square().sum(), given)])
    for plain, operator in zip(*found, strict=True):
        assert torch.equal(plain, operator)


def batch_like(batch: BalancedBatch) -> BalancedBatch:
    # Another batch of the same balancer, which learns what layers ask for.
    batch.in_graphs(torch.float32)
    return batch


def test_torch_finds_no_fault_in_the_operator() -> None:
    batch = batch_of(9, 6, compiled=True)
    assert batch.number is not None
    given = (batch.number, *batch.rooms.values(), *inputs_of(batch.num_rows), None, None, None, 0.0, None, False)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(compiled.attention, given, test_utils=checks)


def test_rows_and_calls_are_checked_as_without_it() -> None:
    batch = batch_of(9, 6, compiled=True)
    q, k, v = inputs_of(20)
    with pytest.raises(ConfigError, match=r"the 15 rows of batch.tokens, got 20, 20 and 20"):
        balanced_attention(q, k, v, batch)
    with pytest.raises(ConfigError, match="attention under the batch's plan"):
        batch.mean_loss(q.sum())
    q, k, v = inputs_of(15)
    loss = F.mse_loss(balanced_attention(q, k, v, batch), v.repeat_interleave(2, 1), reduction="sum")
    batch.mean_loss(loss).backward()
    assert q.grad is not None


def test_a_batch_lasts_as_long_as_a_graph_needs_it() -> None:
    batch = batch_of(9, 6, compiled=True)
    assert batch.number is not None
    number, (q, k, v) = int(batch.number), inputs_of(15)
    out = balanced_attention(q, k, v, batch)
    del batch
    gc.collect()
    assert number in compiled._held, "its backward is to come"
    out.sum().backward()
    del out
    gc.collect()
    assert number not in compiled._held
    batch = batch_of(9, 6, compiled=True)
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda x: x):
        out = balanced_attention(q, k, v, batch)
    del batch
    gc.collect()
    with pytest.raises(ConfigError, match="keep the batch until the backward is done"):
        out.sum().backward()
