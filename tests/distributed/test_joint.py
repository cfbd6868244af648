"""Pipeline stages that attend together on gloo ranks: each microbatch's attention is its own,
wherever, with whom and interleaved with what it ran, and all ranks make the same calls in the same
order.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

from megatron_balance.compile import ping_pong
from megatron_balance.compile.pipeline import expand, layout
from megatron_balance.compile.proof.meaning import verify
from megatron_balance.errors import ConfigError, InvalidProgramError
from megatron_balance.ir.columns import Rows
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.planning.ticks import plan_ticks, ticks
from megatron_balance.reference import owned_rows
from megatron_balance.runtime.attention import BackwardSlot, Server, balanced_attention
from megatron_balance.runtime.bind import AttentionShape, bind
from megatron_balance.runtime.groups import single
from tests.support import by_hand, dense
from tests.support.pool import Pool
from tests.support.tick_jobs import LAYERS, NanoBatchStep, Way, alone, attend_in_ticks, seed_of

HEADS, KV_HEADS, DIM, RANKS = 4, 2, 8, 8
FIRST = ((37, 20, 3), (60,), (11, 12, 13, 14), (1,))
SECOND = ((41,), (), (25, 9), (7, 1, 5))
"""Of the same microbatches, of which one has no second nano-batch."""


def dealt(lengths: tuple[int, ...], owned: Rows, pattern: str = "dispatch") -> MicrobatchPlan:
    """Shards of 8 queries dealt to all ranks, with or without tokens of their own."""
    shards = [(seq, a, min(a + 8, stop)) for _, seq, start, stop in owned for a in range(start, stop, 8)]
    tasks = sorted((at % RANKS, seq, a, b, 0, b) for at, (seq, a, b) in enumerate(shards))
    zones = (replace(by_hand.task_table(owned, tasks), pattern=pattern),) if lengths else ()
    return by_hand.plan(lengths, RANKS, *zones, ranks_per_node=2, heads=(HEADS, KV_HEADS))


def spread(lengths: tuple[int, ...], num_ranks: int) -> MicrobatchPlan:
    """Each sequence in as many parts as a stage has ranks."""
    parts = [
        (r, s, n * r // num_ranks, n * (r + 1) // num_ranks) for r in range(num_ranks) for s, n in enumerate(lengths)
    ]
    zones = (by_hand.task_table([row for row in parts if row[2] < row[3]]),) if lengths else ()
    return by_hand.plan(lengths, num_ranks, *zones, ranks_per_node=2, heads=(HEADS, KV_HEADS))


def nano_batch_step(
    microbatches: tuple[tuple[int, ...], ...], num_stages: int = 2, num_chunks: int = 1, pattern: str = "dispatch"
) -> NanoBatchStep:
    plans = tuple(spread(lengths, RANKS // num_stages) for lengths in microbatches)
    in_tick = functools.partial(dealt, pattern=pattern)
    return NanoBatchStep(plans, plan_ticks(ticks(num_stages, len(plans), num_chunks), plans, in_tick))


@pytest.mark.dist
@pytest.mark.parametrize(
    ("num_stages", "num_chunks", "nano_batches", "way", "pattern"),
    [
        pytest.param(2, 1, (FIRST,), Way(again=True), "dispatch", id="whole, again"),
        pytest.param(
            2, 1, (FIRST, SECOND), Way(streams=True), "dispatch", id="nano-batches", marks=pytest.mark.product
        ),
        pytest.param(
            2, 2, (FIRST, SECOND), Way(again=True, streams=True), "dispatch_once", id="nano-batches, chunks, again"
        ),
        pytest.param(
            4, 2, (FIRST, SECOND), Way(), "dispatch", id="nano-batches, four stages", marks=pytest.mark.product
        ),
    ],
)
def test_every_stage_gets_the_attention_of_its_own_microbatches(
    pool: Pool,
    num_stages: int,
    num_chunks: int,
    nano_batches: tuple[tuple[tuple[int, ...], ...], ...],
    way: Way,
    pattern: str,
) -> None:
    steps = [nano_batch_step(microbatches, num_stages, num_chunks, pattern) for microbatches in nano_batches]
    ranks = pool.run(attend_in_ticks, RANKS, steps, DIM, way)
    for number, attended in enumerate(ranks):
        stage, rank = divmod(number, RANKS // num_stages)
        assert len(attended.values) == len(nano_batches) * len(FIRST) * num_chunks
        for (cell, nano_batch), values in attended.values.items():
            plan = steps[nano_batch].plans[cell.microbatch]
            owned = Rows.of(3, layout(plan, rank).tolist())
            assert len(values[0]) == sum(stop - start for _, start, stop in owned)
            truth = alone(plan, DIM, seed_of(stage, cell, nano_batch)) if len(owned) else [[]] * 4
            for name, value, wanted in zip(("out", "q_grad", "k_grad", "v_grad"), values, truth, strict=True):
                assert not len(owned) or dense.worst([value], [owned_rows(owned, wanted)]) < 1e-10, (
                    number,
                    cell,
                    nano_batch,
                    name,
                )
        assert attended.order == ranks[0].order, (
            "a rank that serves makes the calls of those that compute, in their order"
        )
    segments = ping_pong.forward(LAYERS, len(nano_batches))
    forwards, backwards = (
        [segment for segment in ts if segment.part != "linear"] for ts in (segments, ping_pong.backward(segments))
    )
    num_ticks = len(steps[0].ticks) // 2
    assert len(ranks[0].order) == num_ticks * (len(forwards) * (1 + way.again) + len(backwards))


def test_ticks_are_proved_like_any_plan() -> None:
    step = nano_batch_step(FIRST[:3])
    assert {one.tick.microbatches for one in step.ticks} == {
        (0, None),
        (1, 0),
        (2, 1),
        (None, 2),
        (None, 0),
        (0, 1),
        (1, 2),
        (2, None),
    }
    for one in step.ticks:
        verify(expand(one.plan, "replay"))


def test_a_backward_without_its_plan_is_an_error() -> None:
    shape = AttentionShape(HEADS, KV_HEADS, DIM)

    def alone(length: int) -> MicrobatchPlan:
        table = by_hand.task_table([(0, 0, 0, length)], [(0, 0, 0, length, 0, length)])
        return by_hand.plan((length,), 1, table, heads=(HEADS, KV_HEADS))

    bound = bind(alone(5), 0, shape, groups=single(), policy="replay")
    q, k, v = (torch.randn(5, heads, DIM, requires_grad=True) for heads in (HEADS, KV_HEADS, KV_HEADS))
    slot = BackwardSlot()
    out = balanced_attention(q, k, v, bound, 1.0, slot)
    with pytest.raises(InvalidProgramError, match="needs a plan in which this rank owns as many, got none"):
        out.sum().backward()
    slot.bound = bind(alone(6), 0, shape, groups=single(), policy="replay")
    with pytest.raises(InvalidProgramError, match="got one with 6"):
        balanced_attention(q, k, v, bound, 1.0, slot).sum().backward()
    slot.bound = bind(alone(5), 0, shape, groups=single(), policy="replay", phases=["forward"])
    with pytest.raises(InvalidProgramError, match="shall run on rank 0, which bound it for its forward only"):
        balanced_attention(q, k, v, bound, 1.0, slot).sum().backward()
    with pytest.raises(ConfigError, match="bind both phases, or with policy replay"):
        bind(alone(5), 0, shape, groups=single(), phases=["forward"])
    with pytest.raises(InvalidProgramError, match="rank 0 has 5 rows of its own"):
        Server(torch.float32, torch.device("cpu"), 1.0).serve([bound], ping_pong.forward(1, 1), backward=False)
