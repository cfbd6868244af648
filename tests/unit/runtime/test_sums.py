"""Sums of gradients: what a round of a ring moves through memory, counted; and what is kept as it
comes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

from megatron_balance.ir.model import GradientWire  # noqa: E402
from megatron_balance.ir.program import Kind  # noqa: E402
from megatron_balance.runtime.bind import AttentionShape, bind  # noqa: E402
from megatron_balance.runtime.executor import run_backward, run_forward  # noqa: E402
from megatron_balance.runtime.groups import Groups  # noqa: E402
from megatron_balance.runtime.lower.steps import FinishStep, GradLaunch  # noqa: E402
from tests.support import by_hand  # noqa: E402
from tests.support.silent import ShapeKernel  # noqa: E402
from tests.unit.compile.test_streams import Written  # noqa: E402

RANKS, TOKENS, HEADS, KV_HEADS, DIM = 8, 64, 4, 2, 8
KV_BYTES, Q_BYTES = 2 * TOKENS * KV_HEADS * DIM * 2, TOKENS * HEADS * DIM * 2
"""Of one rank's keys and values, and of its queries, in bf16."""


class Moved(TorchDispatchMode):
    """Bytes that operators on gradients read and write: zeroing, copying, adding."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name, tensors = func.overloadpacket.__name__, [x for x in tree_leaves(args) if isinstance(x, torch.Tensor)]
        if name in ("zero_", "fill_"):
            self.num_bytes += tensors[0].nbytes
        elif name == "copy_":
            self.num_bytes += sum(x.nbytes for x in tensors)
        elif name == "add_":
            self.num_bytes += tensors[0].nbytes + sum(x.nbytes for x in tensors)
        elif name == "index_add_":
            self.num_bytes += 3 * tensors[-1].nbytes
        elif name == "_to_copy":
            self.num_bytes += tensors[0].nbytes + result.nbytes
        return result


def moved_a_round(wire: GradientWire) -> float:
    """Bytes that the sums of a round take on rank 7 of a ring, which attends to all rounds: those of
    the backward less those of a ring that is a round shorter.
    """
    found = []
    for ranks in (RANKS, RANKS - 1):
        plan = by_hand.pool("ring", (TOKENS * ranks,), ranks, heads=(HEADS, KV_HEADS))
        groups = Groups(0, ranks, tuple(range(ranks)), None, streams=Written())  # pyright: ignore[reportArgumentType]
        shape = AttentionShape(HEADS, KV_HEADS, DIM)
        bound = bind(plan, 0, shape, groups=groups, dtype=torch.bfloat16, kernel="plain", gradient_wire=wire)
        bound = replace(bound, kernel=ShapeKernel())
        q, k, v, dout = (
            torch.zeros(bound.num_tokens, h, DIM, dtype=torch.bfloat16) for h in (HEADS, KV_HEADS, KV_HEADS, HEADS)
        )
        out, lse, received = run_forward(bound, q, (k, v), 1.0)
        with Moved() as moved:
            run_backward(bound, dout, (q, k, v), (out, lse), received, 1.0)
        found.append(moved.num_bytes)
    return found[0] - found[1]


def test_a_round_of_a_ring_moves_each_gradient_once() -> None:
    """Rank 0's last half of the queries attends in every round. Its dq is added to the total: read
    in bf16, the total read and written in fp32. Its dk and dv are added to what the next rank sent.

    Zeroing a total for every round, adding to it, and adding what was received, were 63,488 bytes
    here in place of 30,720.
    """
    dq = 5 * Q_BYTES / 2
    assert moved_a_round("fp32") == dq + 5 * KV_BYTES
    assert moved_a_round("bf16") == dq + 3 * KV_BYTES, "as Transformer Engine's ring: three tensors in bf16"


def test_a_gradient_is_kept_where_it_is_the_first_of_its_buffer_and_all_of_it() -> None:
    plan = by_hand.pool("ring", (TOKENS * 4,), 4, heads=(HEADS, KV_HEADS))
    groups = Groups(0, 4, (0, 1, 2, 3), None, streams=Written())  # pyright: ignore[reportArgumentType]
    steps = bind(plan, 0, AttentionShape(HEADS, KV_HEADS, DIM), groups=groups, kernel="plain").phases["backward"].steps
    launches = [step for step in steps if isinstance(step, GradLaunch)]
    assert [len(step.dk_sums.kept) for step in launches] == [1, 1, 1, 1]
    assert [len(step.dk_sums.added.runs) for step in launches] == [0, 0, 0, 0]
    # Queries of the last chunk only, while the keys of later ranks are there.
    assert [len(step.dq_sums.kept) for step in launches] == [0, 0, 0, 0]
    received = [m for step in steps if isinstance(step, FinishStep) for m in step.exchange.receives]
    assert {m.kind for m in received} == {Kind.KV_GRAD}
    assert all(not m.sums.kept for m in received), "the launch came first"
