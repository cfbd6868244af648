from __future__ import annotations

import pytest

from megatron_balance.ir.span import Span, tiles


@pytest.mark.parametrize(("start", "stop"), [(3, 3), (4, 3), (-1, 2)])
def test_an_empty_or_negative_span_is_refused(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match=r"empty or negative span"):
        Span(start, stop)


def test_a_span_prints_as_a_half_open_interval() -> None:
    assert str(Span(2, 5)) == "[2:5)"
    assert len(Span(2, 5)) == 3


@pytest.mark.parametrize(
    ("span", "parts", "sizes"),
    [(Span(0, 8), 4, [2, 2, 2, 2]), (Span(3, 10), 3, [2, 2, 3]), (Span(0, 2), 5, [1, 1]), (Span(0, 1), 1, [1])],
)
def test_split_gives_nearly_equal_spans_without_empty_ones(span: Span, parts: int, sizes: list[int]) -> None:
    cut = span.split(parts)
    assert [len(s) for s in cut] == sizes
    assert tiles(cut, span)


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([(0, 3), (3, 8)], True),
        ([(3, 8), (0, 3)], True),
        ([(0, 3), (4, 8)], False),  # a gap
        ([(0, 4), (3, 8)], False),  # an overlap
        ([(0, 8), (0, 8)], False),  # twice
        ([(0, 7)], False),
        ([(0, 9)], False),
        ([], False),
    ],
)
def test_tiles_is_true_for_exactly_once(spans: list[tuple[int, int]], expected: bool) -> None:
    assert tiles([Span(a, b) for a, b in spans], Span(0, 8)) is expected
