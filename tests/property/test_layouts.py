"""All ranks' layouts at once against those of each rank."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given

from megatron_balance.compile.layouts import RANK, SEQ, ZONE, fragments, layouts, remote
from megatron_balance.compile.pipeline import attention_layout, layout
from tests.support.strategies import ALL_PLANNERS, Case, cases, plan


@pytest.mark.parametrize("planner", ALL_PLANNERS)
@given(case=cases())
def test_layouts_of_all_ranks_are_those_of_each(planner: str, case: Case) -> None:
    planned = plan(planner, case)
    ranks = range(planned.num_ranks)
    rows, held = layouts(planned), fragments(planned)
    assert [rows[rows[:, RANK] == rank][:, SEQ:].tolist() for rank in ranks] == [layout(planned, rank).tolist() for rank in ranks]
    assert [held[held[:, RANK] == r][:, SEQ:ZONE].tolist() for r in ranks] == [attention_layout(planned, r).tolist() for r in ranks]
    some = np.arange(0, planned.num_ranks, 2)
    assert fragments(planned, some).tolist() == held[held[:, RANK] % 2 == 0].tolist()


@pytest.mark.parametrize("planner", ALL_PLANNERS)
@given(case=cases())
def test_remote_tokens_are_those_of_the_moves(planner: str, case: Case) -> None:
    planned = plan(planner, case)
    if not planned.moves:
        return
    held = fragments(planned)
    found: dict[tuple[int, int], int] = {}
    for fragment, begin, end, linear_layout, holder in remote(planned, held).tolist():
        rank, _, start, stop = held[fragment, :4].tolist()
        assert rank == holder
        assert start <= begin < end <= stop
        found[holder, linear_layout] = found.get((holder, linear_layout), 0) + end - begin
    assert found == {(src, dst): tokens for src, dst, tokens in planned.moves}
