"""All ranks' layouts at once against those of each rank."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given

from megatron_balance.compile.layouts import fragments, layouts, remapped
from megatron_balance.compile.pipeline import Projector, layout
from megatron_balance.ir.arrays import Ints
from megatron_balance.ir.columns import Held, Placed, RemoteHeld
from megatron_balance.ir.plan import MicrobatchPlan
from tests.support.examples import examples
from tests.support.strategies import ALL_PLANNERS, Case, cases, plan


@pytest.mark.parametrize("planner", ALL_PLANNERS)
@examples(12)
@given(case=cases())
def test_layouts_of_all_ranks_are_those_of_each_and_remote_tokens_those_of_the_moves(planner: str, case: Case) -> None:
    planned = plan(planner, case)
    ranks = range(planned.num_ranks)
    rows, held = layouts(planned), fragments(planned)
    assert [rows[rows[:, Placed.RANK] == rank][:, Placed.FRAGMENT].tolist() for rank in ranks] == [
        layout(planned, rank).tolist() for rank in ranks
    ]
    by_rank = [held[held[:, Held.RANK] == rank][:, Held.FRAGMENT].tolist() for rank in ranks]
    assert by_rank == [Projector(planned).attention_layout(rank).tolist() for rank in ranks]
    some = np.arange(0, planned.num_ranks, 2)
    assert fragments(planned, some).tolist() == held[held[:, Held.RANK] % 2 == 0].tolist()
    if planned.moves:
        assert_remote_tokens_are_the_moves(planned, held)


def assert_remote_tokens_are_the_moves(planned: MicrobatchPlan, held: Ints) -> None:
    moved: dict[tuple[int, int], int] = {}
    for row in remapped(planned, held).remote.tolist():
        fragment = held[row[RemoteHeld.FRAGMENT]].tolist()
        assert fragment[Held.RANK] == row[RemoteHeld.HOLDER]
        assert [fragment[at] for at in (Held.SEQ, Held.ZONE, Held.SENT_ON)] == [
            row[at] for at in (RemoteHeld.SEQ, RemoteHeld.ZONE, RemoteHeld.SENT_ON)
        ]
        start, stop = row[RemoteHeld.START], row[RemoteHeld.STOP]
        assert fragment[Held.START] <= start < stop <= fragment[Held.STOP]
        ends = row[RemoteHeld.HOLDER], row[RemoteHeld.OWNER]
        moved[ends] = moved.get(ends, 0) + stop - start
    assert moved == {(src, dst): tokens for src, dst, tokens in planned.moves}
