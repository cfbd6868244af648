"""Even chunks: equal tokens without padding, whatever the lengths; the patterns over them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_balance.compile.pipeline import expand, layout
from megatron_balance.ir.arrays import as_array, sums
from megatron_balance.ir.columns import Fragment, Pair
from megatron_balance.ir.plan import Zone
from megatron_balance.ir.program import Attend, Exchange
from megatron_balance.patterns import zigzag
from megatron_balance.patterns.zigzag import INDEX, START, STOP
from tests.support.by_hand import plan, pool

CUTS = {"documents": zigzag.of_documents, "sequence": zigzag.of_sequence}
each_cut = pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
each_pattern = pytest.mark.parametrize("pattern", ["gather_documents", "gather_sequence"])

lengths_of = st.lists(st.one_of(st.integers(1, 5), st.integers(1, 40), st.integers(1, 3000)), max_size=12)
sizes = st.integers(1, 12)


def by_rank(lengths: list[int], size: int, cut=zigzag.of_documents) -> list[list[tuple[int, int, int]]]:
    """(place, start, stop) of each rank's chunks."""
    table = cut(np.array(lengths, dtype=np.int64), size)
    return [[(p, a, b) for i, p, a, b in table.tolist() if i == rank] for rank in range(size)]


@each_cut
@given(lengths=lengths_of, size=sizes)
def test_every_token_lies_once_and_ranks_differ_by_one_token_at_most(cut, lengths: list[int], size: int) -> None:
    table = cut(np.array(lengths, dtype=np.int64), size)
    for place, length in enumerate(lengths):
        tokens = [token for _, p, a, b in table.tolist() if p == place for token in range(a, b)]
        assert sorted(tokens) == list(range(length))
    held = sums(table[:, INDEX], table[:, STOP] - table[:, START], size)
    more = sum(lengths) % size
    assert held.tolist() == [sum(lengths) // size + (rank < more) for rank in range(size)]
    assert table.tolist() == sorted(table.tolist()), "by rank, place and start"


def test_a_document_that_2g_divides_gives_rank_i_chunks_i_and_2g_minus_1_minus_i() -> None:
    assert by_rank([16, 8], 2) == [[(0, 0, 4), (0, 12, 16), (1, 0, 2), (1, 6, 8)], [(0, 4, 12), (1, 2, 6)]]


def test_what_is_left_over_lengthens_high_chunks_first_then_low_ones_from_document_to_document() -> None:
    # 3 ranks; 2 tokens over each: ranks 0, 1 (high chunks), then 2 (high) and 0 (low), then 1, 2 (low)
    assert by_rank([8, 8, 8], 3) == [
        [(0, 0, 1), (0, 6, 8), (1, 0, 2), (1, 7, 8), (2, 0, 1), (2, 7, 8)],
        [(0, 1, 2), (0, 4, 6), (1, 2, 3), (1, 6, 7), (2, 1, 3), (2, 6, 7)],
        [(0, 2, 4), (1, 3, 6), (2, 3, 6)],
    ]


def test_documents_shorter_than_2g_tokens_go_to_the_ranks_whose_turn_it_is() -> None:
    assert by_rank([1, 2, 1], 4) == [[(0, 0, 1)], [(1, 1, 2)], [(1, 0, 1)], [(2, 0, 1)]]


def test_a_packed_sequence_is_cut_where_its_chunks_end_not_where_documents_do() -> None:
    assert by_rank([6, 10], 2, zigzag.of_sequence) == [[(0, 0, 4), (1, 6, 10)], [(0, 4, 6), (1, 0, 6)]]


@given(lengths=st.lists(st.integers(64, 3000), min_size=1, max_size=12), size=st.integers(2, 8))
def test_documents_cut_each_on_its_own_give_ranks_nearly_equal_attention(lengths: list[int], size: int) -> None:
    """Pairs differ from the mean by less than the longest documents' rows of a token or two."""
    table = zigzag.of_documents(np.array(lengths, dtype=np.int64), size)
    stop, start = table[:, STOP], table[:, START]
    pairs = sums(table[:, INDEX], (stop * (stop + 1) - start * (start + 1)) // 2, size)
    assert abs(pairs - pairs.mean()).max() <= sum(lengths) + max(lengths)


@each_pattern
def test_one_gather_brings_what_several_ranks_hold_and_a_reduce_scatter_takes_its_gradients_back(pattern: str) -> None:
    program = expand(pool(pattern, (40, 1), 4), "keep")
    (gather,) = [op for op in program.forward if isinstance(op, Exchange)]
    (scatter,) = [op for op in program.backward if isinstance(op, Exchange)]
    assert (gather.collective, scatter.collective) == ("all_gather", "reduce_scatter")
    assert set(as_array(gather.transfers)[:, 1].tolist()) == {0}, "a sequence on one rank stays there"
    assert len([op for op in program.forward if isinstance(op, Attend)]) == 4


def test_the_middle_chunks_of_the_last_rank_are_one_entry_of_its_kernel() -> None:
    program = expand(pool("gather_documents", (64,), 4))
    entries = [len(op.pairs) for op in program.forward if isinstance(op, Attend)]
    assert entries == [2, 2, 2, 1]
    (last,) = [as_array(op.pairs) for op in program.forward if isinstance(op, Attend) and op.rank == 3]
    assert last[:, Pair.Q_SPAN].tolist() == [[24, 40]]


def test_ranks_in_another_order_hold_what_the_order_says() -> None:
    zone = Zone("zone", "gather_documents", (2, 0, 1), (0,))
    made = plan((7,), 3, zone)
    held = [sum(b - a for _, a, b in layout(made, rank)[:, : Fragment.WIDTH].tolist()) for rank in range(3)]
    assert held == [2, 2, 3], "one token more on the zone's first rank"
    (gather,) = [op for op in expand(made).forward if isinstance(op, Exchange)]
    assert gather.group == (0, 1, 2), "process groups are made in this order"
