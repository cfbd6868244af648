"""Groups of ranks: sizes, places, shares."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_balance.patterns import zigzag
from megatron_balance.solvers.groups import arrange, blocks, needed, rank_tokens, sizes


@pytest.mark.parametrize(
    ("num_ranks", "wanted"), [(1, (1,)), (2, (1, 2)), (6, (1, 2, 4, 6)), (8, (1, 2, 4, 8)), (9, (1, 2, 4, 8, 9))]
)
def test_sizes_are_powers_of_two_and_all_ranks(num_ranks: int, wanted: tuple[int, ...]) -> None:
    assert sizes(num_ranks) == wanted


def test_the_smallest_size_that_holds_a_sequence_is_needed_and_else_the_largest() -> None:
    assert [needed(length, 100, (1, 2, 4, 6)) for length in (1, 100, 101, 400, 401, 9999)] == [1, 1, 2, 4, 6, 6]


def test_blocks_lie_inside_nodes_if_a_node_holds_one() -> None:
    assert blocks(2, 6, 3) == [range(2), range(3, 5)]
    assert blocks(4, 12, 3) == [range(4), range(4, 8), range(8, 12)]
    assert blocks(6, 6, 3) == [range(6)]


def test_larger_groups_choose_first_and_fill_nodes() -> None:
    assert arrange([1, 4, 2, 1], 8, 4) == [(6,), (0, 1, 2, 3), (4, 5), (7,)]
    assert arrange([4, 1, 1], 6, 3) == [(0, 1, 2, 3), (4,), (5,)]
    assert arrange([], 4, 2) == []


@given(
    wanted=st.lists(st.integers(1, 8), max_size=8).filter(lambda own: sum(own) <= 16),
    node_size=st.sampled_from([1, 2, 4, 8, 16]),
)
def test_groups_are_disjoint_and_of_the_wanted_sizes(wanted: list[int], node_size: int) -> None:
    chosen = arrange(wanted, 16, node_size)
    assert [len(ranks) for ranks in chosen] == wanted
    taken = [rank for ranks in chosen for rank in ranks]
    assert len(set(taken)) == len(taken)
    assert all(0 <= rank < 16 for rank in taken)
    assert all(list(ranks) == sorted(ranks) for ranks in chosen)


@given(length=st.integers(1, 500), size=st.integers(1, 16))
def test_no_rank_of_a_zigzag_holds_more_than_its_counted_tokens(length: int, size: int) -> None:
    cut = zigzag.zigzag(np.array([length]), np.array([0]), size)
    held = [sum(stop - start for _, start, stop in zigzag.fragments(cut, i).tolist()) for i in range(size)]
    assert max(held) <= rank_tokens(length, size) <= max(held) + 1
