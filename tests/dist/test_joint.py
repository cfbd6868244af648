"""Pipeline stages that attend together on gloo ranks: each microbatch's attention is its own, wherever and with whom it ran."""

from __future__ import annotations

import pytest
import torch

from megatron_balance.core.plan import MicrobatchPlan, Tiling
from megatron_balance.core.rows import Rows
from megatron_balance.core.tick import TickPlan
from megatron_balance.errors import InvalidProgramError
from megatron_balance.passes.verify import verify
from megatron_balance.reference import at_home
from megatron_balance.runtime.bind import AttentionShape, bind
from megatron_balance.runtime.groups import single
from megatron_balance.runtime.joint import BackwardSlot, joint_attention, serve
from megatron_balance.schedules import expand, layout
from megatron_balance.schedules.joint import plan_ticks
from megatron_balance.schedules.ticks import ticks
from tests.support import dense
from tests.support.jobs import inputs
from tests.support.pool import Pool
from tests.support.tick_jobs import attend_in_ticks

HEADS, KV_HEADS, DIM = 4, 2, 8
MICROBATCHES = ((37, 20, 3), (60,), (11, 12, 13, 14))


def dealt(lengths: tuple[int, ...], homes: Rows) -> MicrobatchPlan:
    """Shards of 8 queries dealt to all four ranks, with or without tokens of their own."""
    shards = [(seq, a, min(a + 8, stop)) for _, seq, start, stop in homes for a in range(start, stop, 8)]
    tasks = sorted((at % 4, seq, a, b, 0, b) for at, (seq, a, b) in enumerate(shards))
    return MicrobatchPlan("dealt", lengths, 4, 2, HEADS, KV_HEADS, (Tiling("dealt", homes, Rows.of(6, tasks)),))


def in_two(lengths: tuple[int, ...]) -> MicrobatchPlan:
    """Each sequence in two parts on the two ranks of a stage."""
    homes = Rows.of(
        4, [row for row in sorted((r, s, n // 2 * r, n if r else n // 2) for s, n in enumerate(lengths) for r in (0, 1)) if row[3]]
    )
    return MicrobatchPlan("in two", lengths, 2, 2, HEADS, KV_HEADS, (Tiling("in two", homes, Rows(6)),))


def planned() -> tuple[list[MicrobatchPlan], tuple[TickPlan, ...]]:
    plans = [in_two(lengths) for lengths in MICROBATCHES]
    return plans, plan_ticks(ticks(2, len(plans)), plans, dealt)


@pytest.mark.dist
def test_every_stage_gets_the_attention_of_its_own_microbatches(pool: Pool) -> None:
    plans, order = planned()
    ranks = pool.run(attend_in_ticks, 4, order, plans, DIM)
    for number, found in enumerate(ranks):
        stage, rank = divmod(number, 2)
        assert sorted(found) == [0, 1, 2]
        for microbatch, values in found.items():
            truth = dense.attention(inputs(plans[microbatch], DIM, stage))
            home = Rows.of(3, layout(plans[microbatch], rank).tolist())
            for name, value in zip(("out", "q_grad", "k_grad", "v_grad"), values, strict=True):
                assert dense.worst([value], [at_home(home, getattr(truth, name))]) < 1e-10, (number, microbatch, name)


def test_ticks_are_proved_like_any_plan() -> None:
    _, order = planned()
    assert {one.tick.microbatches for one in order} == {(0, None), (1, 0), (2, 1), (None, 2), (None, 0), (0, 1), (1, 2), (2, None)}
    for one in order:
        verify(expand(one.plan, "replay"))


def test_a_backward_without_its_plan_is_an_error() -> None:
    shape = AttentionShape(HEADS, KV_HEADS, DIM)

    def alone(length: int) -> MicrobatchPlan:
        homes = Rows.of(4, [(0, 0, 0, length)])
        return MicrobatchPlan("x", (length,), 1, 1, HEADS, KV_HEADS, (Tiling("x", homes, Rows.of(6, [(0, 0, 0, length, 0, length)])),))

    bound = bind(alone(5), 0, shape, groups=single(), policy="replay")
    q, k, v = (torch.randn(5, heads, DIM, requires_grad=True) for heads in (HEADS, KV_HEADS, KV_HEADS))
    slot = BackwardSlot()
    out = joint_attention(q, k, v, bound, slot, 1.0)
    with pytest.raises(InvalidProgramError, match="needs the plan of its tick with as many at home, got none"):
        out.sum().backward()
    slot.bound = bind(alone(6), 0, shape, groups=single(), policy="replay")
    with pytest.raises(InvalidProgramError, match="got one with 6"):
        joint_attention(q, k, v, bound, slot, 1.0).sum().backward()
    with pytest.raises(InvalidProgramError, match="rank 0 has 5 rows of its own"):
        serve(bound, torch.float32, torch.device("cpu"), 1.0, backward=False)
