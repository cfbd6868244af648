from __future__ import annotations

import pytest

from megatron_balance.ir.arrays import as_array, as_rows, concat
from megatron_balance.ir.columns import Rows


def test_rows_give_back_what_they_were_made_of() -> None:
    rows = Rows.of(3, [(0, 5, -1), (2**40, 7, 8)])
    assert list(rows) == [(0, 5, -1), (2**40, 7, 8)]
    assert len(rows) == 2


def test_rows_are_compared_and_hashed_by_content() -> None:
    assert Rows.of(2, [(1, 2)]) == Rows.of(2, [[1, 2]])
    assert hash(Rows.of(2, [(1, 2)])) == hash(Rows.of(2, [(1, 2)]))
    assert Rows.of(2, [(1, 2)]) != Rows.of(1, [(1,), (2,)])


def test_no_rows_are_false() -> None:
    assert not Rows(4)
    assert len(Rows(4)) == 0
    assert list(Rows(4)) == []


def test_a_row_of_another_width_is_refused() -> None:
    with pytest.raises(ValueError, match=r"row \(1, 2\) has 2 columns, expected 3"):
        Rows.of(3, [(1, 2)])


def test_rows_and_arrays_are_the_same_table() -> None:
    rows = Rows.of(2, [(1, 2), (3, 4)])
    table = as_array(rows)
    assert table.tolist() == [[1, 2], [3, 4]]
    assert not table.flags.writeable
    assert as_rows(table[:, ::-1]) == Rows.of(2, [(2, 1), (4, 3)])
    assert concat([rows, Rows(2), rows], 2).tolist() == [[1, 2], [3, 4], [1, 2], [3, 4]]
